"""Gradient hooks of parameters that sharding replaces.

torch's ``fully_shard`` gives a model new parameters without the hooks of the old ones. No graph reaches a
sharded parameter: hooks of ``Tensor.register_hook`` have to be on the unsharded one, which the first forward
makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from accelerate.core.torch_internals import require

require("hooks of parameters")


def has_hooks(parameter: torch.Tensor) -> bool:
    """Return whether functions of the user wait for the gradient of a parameter."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def move_hooks(replaced: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give new parameters the hooks of the old ones; the handles that the user has remove them still."""
    for old, new in replaced:
        if old._backward_hooks:
            new._backward_hooks = old._backward_hooks
        if old._post_accumulate_grad_hooks:
            new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def call_hooks_of_unit(unit: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Call the hooks of the sharded parameters of an FSDP unit on the gradients of its unsharded ones.

    They get this rank's gradient before it is reduced, as under DDP.

    Args:
        unit: the unit, sharded; its next forward has the unsharded parameters.
        modules: its modules.
    """
    hooked = [
        (m, n, p) for m in modules for n, p in m._parameters.items() if p is not None and p._backward_hooks
    ]
    hooks_of: list[Any] = [(module, name, sharded._backward_hooks) for module, name, sharded in hooked]
    if not hooked:
        return
    for _, _, sharded in hooked:
        sharded._backward_hooks = None

    def attach(*_: Any) -> None:
        handle.remove()
        for whole, hooks in {module._parameters[name]: hooks for module, name, hooks in hooks_of}.items():
            if whole is not None:
                whole.register_hook(_caller_of(hooks))

    uncompiled: Any = torch.compiler.disable(attach)
    handle = unit.register_forward_pre_hook(uncompiled)


def _caller_of(hooks: Mapping[int, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def call(gradient: Any) -> Any:
        if gradient is None:  # the node of all pipeline stages, which has the gradients by other graphs
            return None
        for hook in tuple(hooks.values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    return call
