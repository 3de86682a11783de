"""Which modules of a model are sharded by themselves, and what stays whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from accelerate.core.errors import PrepareError, SettingError

# They have no forward of their own before which their parameters could be gathered.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def blocks_of(model: nn.Module, policy: Any, ignored: set[nn.Module]) -> list[nn.Module]:
    """The modules below ``model`` that are gathered by themselves, inner ones before those around them.

    A module that shares a parameter with something outside of it stays with the model as a whole: torch
    gathers a parameter in one place.

    Args:
        model: the model.
        policy: a policy of ``torch.distributed.fsdp.wrap``, or None.
        ignored: modules that stay whole.
    """
    if policy is None:
        return []
    wanted = _chosen(model, policy, ignored)
    ordered = [part for part in _bottom_up(model) if part in wanted and part is not model]
    ordered = [part for part in ordered if not isinstance(part, _CONTAINERS) and any(_trained(part))]
    return _alone(model, ordered)


def _trained(part: nn.Module) -> Iterable[bool]:
    return (True for _ in part.parameters())


def _bottom_up(model: nn.Module) -> list[nn.Module]:
    """Every module once, children before their parents."""
    seen: dict[nn.Module, None] = {}

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if child not in seen:
                walk(child)
        seen[module] = None

    walk(model)
    return list(seen)


def _chosen(model: nn.Module, policy: Any, ignored: set[nn.Module]) -> set[nn.Module]:
    if isinstance(policy, CustomPolicy | ModuleWrapPolicy) or not callable(policy):
        if not hasattr(policy, "_run_policy"):
            raise SettingError(
                f"auto_wrap_policy is a {type(policy).__name__}, which is no policy",
                fix="use a name, or a policy of torch.distributed.fsdp.wrap",
            )
        return set(policy._run_policy(model, ignored, {}))
    found: set[nn.Module] = set()
    _walk(model, cast("Callable[..., bool]", policy), ignored, found)
    return found


def _walk(module: nn.Module, policy: Callable[..., bool], ignored: set[nn.Module], found: set) -> int:
    """Asks ``policy`` as torch does, children first; how many parameters are gathered by themselves."""
    if module in ignored or module in found:
        return 0
    numel = sum(p.numel() for p in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    taken = sum(_walk(child, policy, ignored, found) for child in module.children())
    if policy(module=module, recurse=False, nonwrapped_numel=numel - taken):
        found.add(module)
        return numel
    return taken


def _alone(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Those that share no parameter with anything that is gathered elsewhere."""
    while True:
        owners: dict[nn.Parameter, set[nn.Module]] = {}
        _own(model, model, set(blocks), owners)
        shared = set().union(*(found for found in owners.values() if len(found) > 1), set())
        kept = [block for block in blocks if block not in shared]
        if len(kept) == len(blocks):
            return kept
        blocks = kept


def _own(
    module: nn.Module, owner: nn.Module, blocks: set[nn.Module], owners: dict[nn.Parameter, set[nn.Module]]
) -> None:
    for parameter in module._parameters.values():
        if parameter is not None:
            owners.setdefault(parameter, set()).add(owner)
    for child in module.children():
        _own(child, child if child in blocks else owner, blocks, owners)


def ignored_of(model: nn.Module, given: Iterable[nn.Module] | str | None) -> set[nn.Module]:
    """The modules that stay whole on every process, with everything inside them.

    Args:
        model: the model.
        given: the modules, or a regular expression that their names match as a whole.

    Raises:
        SettingError: the expression is none, or matches no module.
        PrepareError: they hold trained parameters, whose gradients nobody would reduce.
    """
    if given is None:
        return set()
    if isinstance(given, str):
        tops = [module for name, module in model.named_modules() if _pattern(given).fullmatch(name)]
        if not tops:
            raise SettingError(
                f"ignored_modules {given!r} matches no module of the {type(model).__name__}",
                why="the whole name is compared, such as 'model.layers.0.mlp'",
                fix=f"for example '.*{given}.*'",
            )
    else:
        tops = list(given)
    found = {part for top in tops for part in top.modules()}
    trained = [
        name
        for path, part in model.named_modules()
        if part in found
        for name, p in part.named_parameters(prefix=path, recurse=False)
        if p.requires_grad
    ]
    if trained:
        more = f" and {len(trained) - 3} more" if len(trained) > 3 else ""
        raise PrepareError(
            f"ignored modules hold trained parameters: {', '.join(trained[:3])}{more}",
            why="nobody reduces the gradients of what is not sharded: every process would train its own",
            fix="freeze them (requires_grad_(False)), or take them out of ignored_modules",
        )
    return found


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise SettingError(f"ignored_modules {text!r} is no regular expression", why=str(error)) from error


def parameters_of(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """All parameters of ``modules``."""
    return {parameter for module in modules for parameter in module.parameters(recurse=False)}


def check_parameters(
    model: nn.Module, blocks: list[nn.Module], ignored: set[nn.Parameter], upcast: bool
) -> None:
    """Refuses what cannot be sharded, before anything is changed.

    Args:
        model: the model.
        blocks: the modules that are gathered by themselves.
        ignored: parameters that stay whole.
        upcast: half precision weights that train will be float32.

    Raises:
        PrepareError: a parameter is a scalar, or one group holds trained parameters of several types.
    """
    names = {p: name for name, p in model.named_parameters()}
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    _own(model, model, set(blocks), owners)
    groups: dict[nn.Module, dict[torch.dtype, str]] = {}
    for parameter, found in owners.items():
        if parameter in ignored:
            continue
        if parameter.dim() == 0:
            raise PrepareError(
                f"the parameter {names[parameter]} is a scalar, which cannot be sharded",
                fix="make it one-dimensional: torch.nn.Parameter(torch.ones(1))",
            )
        if parameter.requires_grad:
            dtype = torch.float32 if upcast and parameter.dtype.itemsize == 2 else parameter.dtype
            groups.setdefault(next(iter(found)), {}).setdefault(dtype, names[parameter])
    for types in groups.values():
        if len(types) > 1:
            said = ", ".join(f"{name} in {dtype}" for dtype, name in types.items())
            raise PrepareError(
                f"trained parameters of several types in one sharded part: {said}",
                why="they are gathered, and their gradients reduced, as one",
                fix="bring them to one type, for example model.float(), or freeze some of them",
            )
