"""Comparison of saved states with the objects that they are for, before any object is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from accelerate.core import tree

_SHOWN = 6
# Options that schedules add to the groups of an optimizer.
_OF_SCHEDULES = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
_NOT_OPTIONS = {"params", "param_names", *_OF_SCHEDULES}
# Optimizers of torch.optim whose state has tensors of other shapes than the parameters.
_OTHER_SHAPES = {"Adafactor", "LBFGS", "Muon"}


def list_names(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


def copy_state(state: Any) -> Any:
    """Return a copy of a state whose tensors are no longer those of the object."""
    return tree.map_tree(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, state
    )


# ---------------------------------------------------------------- models


def model_differences(
    state: Mapping[str, Any], template: Mapping[str, Any]
) -> tuple[list[str], list[str], list[str]]:
    """Return (names that the state lacks, names that the model lacks, texts about other shapes).

    Args:
        state: what was saved, by the model's names.
        template: the model's state dict; a value of None is held by another rank.
    """
    # Layers of torch make this one up: it came later than their first files.
    missing = [n for n in template if n not in state and not n.endswith("num_batches_tracked")]
    surplus = [name for name in state if name not in template]
    shapes = []
    for name, value in template.items():
        saved = state.get(name)
        if not (isinstance(value, torch.Tensor) and isinstance(saved, torch.Tensor)) or is_lazy(value):
            continue
        # torch loads a single number into a tensor without dimensions.
        if saved.shape != value.shape and not (value.dim() == 0 and saved.numel() == 1):
            shapes.append(
                f"size mismatch for {name}: {tuple(saved.shape)} was saved, the model has "
                f"{tuple(value.shape)}"
            )
    return missing, surplus, shapes


def describe_model(missing: list[str], surplus: list[str], shapes: list[str], *, strict: bool) -> str:
    """Return why a state does not fit a model; empty if it does."""
    texts = [f"Missing key(s): {list_names(missing)}"] if strict and missing else []
    texts += [f"Unexpected key(s): {list_names(surplus)}"] if strict and surplus else []
    return "; ".join([*texts, *shapes[:_SHOWN]])


def describe_shapes(
    saved: Mapping[str, tuple[torch.dtype, torch.Size]], template: Mapping[str, Any], *, strict: bool
) -> str:
    """Return why saved tensors, of which dtype and shape are known, do not fit a model; empty if they do."""
    outline = {name: torch.empty(shape, device="meta") for name, (_, shape) in saved.items()}
    return describe_model(*model_differences(outline, template), strict=strict)


def converts_states(module: Any) -> bool:
    """Return whether loading may change names or shapes by code of its own, so that a difference may fit."""
    if not isinstance(module, nn.Module) or type(module).load_state_dict is not nn.Module.load_state_dict:
        return True
    for each in module.modules():
        load = type(each)._load_from_state_dict
        hooks = [getattr(hook, "hook", hook) for hook in each._load_state_dict_pre_hooks.values()]
        sources = [load, *hooks]
        if not all(_is_of(source, "torch.nn.modules", "torch.distributed") for source in sources):
            return True
    return False


def _is_of(function: Any, *packages: str) -> bool:
    # Bound methods and partial functions too.
    function = getattr(function, "func", function)
    return str(getattr(function, "__module__", "")).startswith(packages)


# ---------------------------------------------------------------- optimizers


def describe_optimizer(
    optimizer: torch.optim.Optimizer,
    sizes: Sequence[int],
    state: Any,
    *,
    saved_class: str = "",
    shapes: Sequence[torch.Size] | None = None,
) -> str:
    """Return why a full state dict does not fit an optimizer; empty if nothing speaks against it.

    Args:
        optimizer: the user's.
        sizes: the number of parameters in each of its groups.
        state: the state dict.
        saved_class: the class that was saved; empty if that is not known.
        shapes: of the parameters, in the order of the groups; None if they are not known.
    """
    if not (isinstance(state, Mapping) and {"state", "param_groups"} <= state.keys()):
        return "it is no state of an optimizer"
    saved = [len(group["params"]) for group in state["param_groups"]]
    if saved != list(sizes):
        return (
            f"it holds groups of {list_names(map(str, saved))} parameters, and the optimizer has groups of "
            f"{list_names(map(str, sizes))}"
        )
    return describe_other_class(optimizer, state["param_groups"], saved_class) or _describe_shapes(
        optimizer, state, shapes
    )


def describe_other_class(
    optimizer: torch.optim.Optimizer, saved_groups: Sequence[Mapping[str, Any]], saved_class: str = ""
) -> str:
    """Return why the saved groups are of another kind of optimizer; empty if they are not.

    Options are compared, which tell the classes of torch apart. A version of torch may have options that
    another one has not, so it takes differences in both directions.
    """
    own_class, theirs = type(optimizer), getattr(torch.optim, saved_class, None)
    unrelated = (
        isinstance(theirs, type)
        and own_class.__module__.startswith("torch.optim")
        and not (issubclass(own_class, theirs) or issubclass(theirs, own_class))
    )
    for own, saved in zip(optimizer.param_groups, saved_groups, strict=False):
        lacking = sorted(set(optimizer.defaults) - saved.keys() - _NOT_OPTIONS)
        surplus = sorted(saved.keys() - own.keys() - _NOT_OPTIONS)
        if unrelated or (lacking and surplus):
            return (
                f"it is the state of {saved_class or 'another optimizer'} "
                f"({list_names(surplus) or 'the same options'}), and the optimizer is {own_class.__name__} "
                f"({list_names(lacking) or 'the same options'})"
            )
    return ""


def _describe_shapes(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], shapes: Sequence[torch.Size] | None
) -> str:
    kind = type(optimizer)
    if shapes is None or not kind.__module__.startswith("torch.optim") or kind.__name__ in _OTHER_SHAPES:
        return ""
    saved = [key for group in state["param_groups"] for key in group["params"]]
    for number, (key, shape) in enumerate(zip(saved, shapes, strict=True)):
        for name, value in state["state"].get(key, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != shape:
                return (
                    f"{name} of its parameter {number} has the shape {tuple(value.shape)}, and the "
                    f"parameter {tuple(shape)}"
                )
    return ""
