"""The FSDP units of a model, and the modules that are not sharded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from accelerate.core.errors import PrepareError, SettingError

# They have no forward of their own before which their parameters could be all-gathered.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def find_units(model: nn.Module, policy: Any, ignored: set[nn.Module]) -> list[nn.Module]:
    """Return the modules below ``model`` that are FSDP units, inner ones before those around them.

    A module that shares a parameter with something outside of it is no unit: torch all-gathers a parameter
    in one unit.

    Args:
        model: the model.
        policy: a policy of ``torch.distributed.fsdp.wrap``, or None.
        ignored: modules that are not sharded.
    """
    if policy is None:
        return []
    selected_modules = _apply_policy(model, policy, ignored)
    ordered = [part for part in _modules_bottom_up(model) if part in selected_modules and part is not model]
    ordered = [part for part in ordered if not isinstance(part, _CONTAINERS) and any(_has_params(part))]
    return _drop_sharing_units(model, ordered)


def _has_params(part: nn.Module) -> Iterable[bool]:
    return (True for _ in part.parameters())


def _modules_bottom_up(model: nn.Module) -> list[nn.Module]:
    """Return every module once, children before their parents."""
    seen: dict[nn.Module, None] = {}

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if child not in seen:
                walk(child)
        seen[module] = None

    walk(model)
    return list(seen)


def _apply_policy(model: nn.Module, policy: Any, ignored: set[nn.Module]) -> set[nn.Module]:
    if isinstance(policy, CustomPolicy | ModuleWrapPolicy) or not callable(policy):
        if not hasattr(policy, "_run_policy"):
            raise SettingError(
                f"auto_wrap_policy is a {type(policy).__name__}, which is no policy",
                fix="use a name, or a policy of torch.distributed.fsdp.wrap",
            )
        return set(policy._run_policy(model, ignored, {}))
    chosen: set[nn.Module] = set()
    _apply_callable_policy(model, cast("Callable[..., bool]", policy), ignored, chosen)
    return chosen


def _apply_callable_policy(
    module: nn.Module, policy: Callable[..., bool], ignored: set[nn.Module], chosen: set
) -> int:
    """Ask ``policy`` as torch does, children first; return how many parameters are in units."""
    if module in ignored or module in chosen:
        return 0
    numel = sum(p.numel() for p in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    units_numel = sum(_apply_callable_policy(child, policy, ignored, chosen) for child in module.children())
    if policy(module=module, recurse=False, nonwrapped_numel=numel - units_numel):
        chosen.add(module)
        return numel
    return units_numel


def _drop_sharing_units(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with another unit."""
    while True:
        owners: dict[nn.Parameter, set[nn.Module]] = {}
        _collect_owners(model, model, set(blocks), owners)
        shared = set().union(*(units for units in owners.values() if len(units) > 1), set())
        unshared_blocks = [block for block in blocks if block not in shared]
        if len(unshared_blocks) == len(blocks):
            return unshared_blocks
        blocks = unshared_blocks


def _collect_owners(
    module: nn.Module, owner: nn.Module, blocks: set[nn.Module], owners: dict[nn.Parameter, set[nn.Module]]
) -> None:
    for parameter in module._parameters.values():
        if parameter is not None:
            owners.setdefault(parameter, set()).add(owner)
    for child in module.children():
        _collect_owners(child, child if child in blocks else owner, blocks, owners)


def find_ignored(model: nn.Module, ignored_modules: Iterable[nn.Module] | str | None) -> set[nn.Module]:
    """Return the modules that are not sharded, with everything inside them.

    Args:
        model: the model.
        ignored_modules: the modules, or a regular expression that matches their full names.

    Raises:
        SettingError: the expression is invalid, or matches no module.
        PrepareError: they hold trained parameters, whose gradients nobody would reduce.
    """
    if ignored_modules is None:
        return set()
    if isinstance(ignored_modules, str):
        tops = [
            module
            for name, module in model.named_modules()
            if _compile_pattern(ignored_modules).fullmatch(name)
        ]
        if not tops:
            raise SettingError(
                f"ignored_modules {ignored_modules!r} matches no module of the {type(model).__name__}",
                why="the whole name is compared, such as 'model.layers.0.mlp'",
                fix=f"for example '.*{ignored_modules}.*'",
            )
    else:
        tops = list(ignored_modules)
    ignored = {part for top in tops for part in top.modules()}
    trained = [
        name
        for path, part in model.named_modules()
        if part in ignored
        for name, p in part.named_parameters(prefix=path, recurse=False)
        if p.requires_grad
    ]
    if trained:
        more = f" and {len(trained) - 3} more" if len(trained) > 3 else ""
        raise PrepareError(
            f"ignored modules hold trained parameters: {', '.join(trained[:3])}{more}",
            why="gradients of unsharded parameters are not reduced: every rank would train its own",
            fix="freeze them (requires_grad_(False)), or take them out of ignored_modules",
        )
    return ignored


def _compile_pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise SettingError(f"ignored_modules {text!r} is no regular expression", why=str(error)) from error


def direct_parameters(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters of ``modules``, without those of modules inside them."""
    return {parameter for module in modules for parameter in module.parameters(recurse=False)}


def check_unit_params(
    model: nn.Module, blocks: list[nn.Module], ignored: set[nn.Parameter], upcast: bool
) -> None:
    """Refuse what cannot be sharded, before anything is changed.

    Args:
        model: the model.
        blocks: the FSDP units.
        ignored: parameters that are not sharded.
        upcast: whether trained half precision weights become float32.

    Raises:
        PrepareError: a parameter is a scalar, or one unit holds trained parameters of several dtypes.
    """
    names = {p: name for name, p in model.named_parameters()}
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    _collect_owners(model, model, set(blocks), owners)
    groups: dict[nn.Module, dict[torch.dtype, str]] = {}
    for parameter, units in owners.items():
        if parameter in ignored:
            continue
        if parameter.dim() == 0:
            raise PrepareError(
                f"the parameter {names[parameter]} is a scalar, which cannot be sharded",
                fix="make it one-dimensional: torch.nn.Parameter(torch.ones(1))",
            )
        if parameter.requires_grad:
            dtype = torch.float32 if upcast and parameter.dtype.itemsize == 2 else parameter.dtype
            groups.setdefault(next(iter(units)), {}).setdefault(dtype, names[parameter])
    for types in groups.values():
        if len(types) > 1:
            listing = ", ".join(f"{name} in {dtype}" for dtype, name in types.items())
            raise PrepareError(
                f"trained parameters of several dtypes in one FSDP unit: {listing}",
                why="they are all-gathered, and their gradients reduce-scattered, as one",
                fix="cast them to one dtype, for example model.float(), or freeze some of them",
            )
