"""Gradient hooks of parameters that sharding replaces.

torch's ``fully_shard`` gives a model new parameters without the hooks of the old ones. No graph reaches a
sharded parameter: hooks of ``Tensor.register_hook`` have to be on the unsharded one, which the first forward
makes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from accelerate.core.torch_internals import require
from accelerate.strategy.sharding.grads import fsdp_params, unsharded_param

require("hooks of parameters")


def has_hooks(parameter: torch.Tensor) -> bool:
    """Return whether functions of the user wait for the gradient of a parameter."""
    return _has_own_hooks(parameter) or bool(parameter._post_accumulate_grad_hooks)


def _has_own_hooks(parameter: torch.Tensor) -> bool:
    return any(not _steps_in_backward(hook) for hook in (parameter._backward_hooks or {}).values())


def _steps_in_backward(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is that of LOMO, which updates in it what has a gradient by then.

    Sharded parameters have theirs at the end of the backward, where ``fused_backward`` updates what is left.
    """
    for cell in getattr(hook, "__closure__", None) or ():
        with suppress(ValueError):  # a variable that is not assigned yet
            if callable(getattr(cell.cell_contents, "fused_backward", None)):
                return True
    return False


def move_hooks(replaced: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give new parameters the hooks of the old ones; the handles that the user has remove them still."""
    for old, new in replaced:
        if _has_own_hooks(old):
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


def call_late_hooks(model: nn.Module) -> None:
    """Call hooks that are registered on the sharded parameters of a model before its first forward, or later.

    The forward has made the unsharded parameters, and the backward is to come.
    """
    for sharded, fsdp_param in fsdp_params([model]).items():
        whole = unsharded_param(fsdp_param)
        if whole is not None and sharded._backward_hooks:
            whole.register_hook(_caller_of(sharded._backward_hooks))
        elif whole is not None:
            sharded._backward_hooks = _LateHooks(whole)


class _LateHooks(OrderedDict[int, Callable[..., Any]]):
    """The hooks of a sharded parameter; the first that is registered makes the unsharded one call all."""

    def __init__(self, whole: torch.Tensor) -> None:
        super().__init__()
        self.whole: torch.Tensor | None = whole

    def __setitem__(self, key: int, hook: Callable[..., Any]) -> None:
        super().__setitem__(key, hook)
        whole, self.whole = self.whole, None
        if whole is not None:
            # The sharded one trains, and the next all-gather would say so here.
            whole.requires_grad_(True).register_hook(_caller_of(self))


def _caller_of(hooks: Mapping[int, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def call(gradient: Any) -> Any:
        if gradient is None:  # the node of all pipeline stages, which has the gradients by other graphs
            return None
        for hook in tuple(hooks.values()):
            changed = None if _steps_in_backward(hook) else hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    return call
