"""The hooks of modules inside of a block, or of a resident part, of a dispatched model.

They have nothing to do while a module around them runs. ``torch.compile`` traces this file into its graphs,
and none of the others that move weights.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from typing import Any

import torch

from accelerate.offload.dispatch_hook import DispatchHook, _dispatched_forward, show_hook
from accelerate.offload.hooks import attributes_of
from accelerate.offload.weight_block import is_callable

# Forward of a class -> the function that stands for it. It has no reference to its key.
_FORWARDS: weakref.WeakKeyDictionary[types.FunctionType, types.FunctionType] = weakref.WeakKeyDictionary()


def attach_inner_hook(module: Any, hook: DispatchHook) -> None:
    """Attach the hook of a module inside of a block, or of a resident part of the model.

    It works when the module is called alone: by the user, by activation checkpointing inside a block, which
    recomputes in the backward pass, or by a program that runs parts of a model itself.
    """
    hook.is_inner = True
    show_hook(module, hook)
    if attributes_of(module).get("_hf_hook") is not hook or not is_callable(module):
        return
    # Methods are compared by their functions, partials by identity: layers of a class share one graph.
    original = getattr(module._old_forward, "__func__", None)
    if isinstance(original, types.FunctionType):
        module.forward = types.MethodType(_forward_of_class(original), module)
    else:
        forward = functools.partial(_inner_forward, module)
        module.forward = functools.update_wrapper(forward, module._old_forward)


def _forward_of_class(original: types.FunctionType) -> types.FunctionType:
    """Return the function that stands for the forward of a class, with its name and signature."""
    forward = _FORWARDS.get(original)
    if forward is None:
        # Compiled graphs belong to the code of a function, and there are few for each.
        code = _inner_forward.__code__.replace(co_name=original.__qualname__)
        forward: Any = functools.update_wrapper(types.FunctionType(code, globals()), original)
        del forward.__wrapped__
        forward.__signature__ = inspect.signature(original)
        _FORWARDS[original] = forward
    return forward


def _inner_forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module that has an inner hook. The hook and the forward are read each time."""
    hook = module._hf_hook
    # A compiler that traces it is inside of a module around it.
    first = args[0] if args else None
    if type(hook) is DispatchHook and (torch.compiler.is_compiling() or hook.is_prepared(first)):
        return module._old_forward(*args, **kwargs)
    return _dispatched_forward(module, *args, **kwargs)
