"""Calls around the forward of a sharded model, and late backwards, named where their error ends a rank.

Parameters are all-gathered around a forward of the prepared model, or of an FSDP unit. A method that computes
without it, or a submodule that is called alone, meets shards, and torch speaks of shapes, of views, or of a
mixture of ``torch.Tensor`` and ``DTensor``. Calls themselves are not watched, which would cost every forward.
"""

from __future__ import annotations

import dis
import re
import traceback
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.func
from torch import nn

from accelerate.core.errors import EXPLANATIONS, PrepareError
from accelerate.world.call_site import torch_prefixes, user_line

# Functions of torch that call a module, and names of modules that wrap the user's.
_CALLS = ("__call__", "_wrapped_call_impl", "_call_impl")
_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# What torch says when the root of the units meets one that was called before it: FSDP2, FSDP1.
_CALLED_BEFORE_ROOT = (
    "FSDP state has already been lazily initialized",
    "`_is_root` should not have been set",
)
# What torch says of a tensor without memory.
_FREED = re.compile("setStorage: .* are out of bounds for storage of size 0")
# Calls of a module with other weights, which the forwards of FSDP units find among their callers.
FUNCTIONAL_CALL = torch.func.functional_call.__code__
_REGISTER = "torch.distributed.fsdp.register_fsdp_forward_method"


# Prepared model -> the ``ShardedStrategy`` that has sharded it.
STRATEGIES: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def refuse_other_weights(
    model: nn.Module, module: nn.Module, parameters_and_buffers: Mapping[str, torch.Tensor], **_: Any
) -> None:
    """Refuse a ``torch.func.functional_call`` that gives a sharded model other weights than its own.

    Args:
        model: the prepared model.
        module, parameters_and_buffers: what ``functional_call`` was given; the module may contain the model.

    Raises:
        PrepareError: FSDP has computed with the weights of the model, and their gradients would be wrong.
    """
    from accelerate.strategy.sharding.grads import fsdp_params

    # In its first forward torch takes what stands at a module for the parameter, also a plain tensor.
    own = {
        id(tensor)
        for tensor in (*model.parameters(), *fsdp_params([model]))
        if isinstance(tensor, nn.Parameter)
    }
    prefix = next(
        (f"{name}." if name else "" for name, each in module.named_modules() if each is model), None
    )
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in parameters_and_buffers.items() if prefix is not None else ():
        label = name.removeprefix(prefix or "")
        if name.startswith(prefix or "") and label not in buffers and id(tensor) not in own:
            raise PrepareError(
                f"torch.func.functional_call was given another {label} for a sharded model",
                why="FSDP all-gathers the parameters that it has sharded, whatever stands in their places: "
                "this forward has computed with the weights of the model",
                fix="prepare a second model for the other weights, or write them into the parameters",
            )


def _explain_error(error: BaseException) -> PrepareError | None:
    if STRATEGIES and any(words in str(error) for words in _CALLED_BEFORE_ROOT):
        return PrepareError(
            "a submodule of a sharded model was called before the prepared model itself",
            why="the first call makes a module the root of the FSDP units; torch says "
            f"{str(error).splitlines()[0]}",
            fix="call the prepared model, model(...), once before its submodules",
        )
    if not isinstance(error, RuntimeError) or _is_users_own(error):
        return None
    if STRATEGIES and _FREED.search(str(error)):
        functions = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
        if "_engine_run_backward" in functions:
            return _second_backward_error(error)
    explanations = (_explain_bypass(error, *each) for each in STRATEGIES.items())
    return next((each for each in explanations if each is not None), None)


def _second_backward_error(error: RuntimeError) -> PrepareError:
    return PrepareError(
        "a backward through a sharded model needs unsharded parameters that are freed by now",
        why="they stay until the first backward through a forward has ended. A gradient penalty "
        "(create_graph=True) runs a second one: for it they stay under FSDP2 without tensor, context and "
        "pipeline parallelism, if gradients are reduced in each micro-batch and no other forward comes in "
        f"between; torch says {str(error).splitlines()[0]}",
        fix="fsdp_version=2, in accumulation windows GradientAccumulationPlugin(sync_each_batch=True), or "
        "train under ddp",
    )


def _is_users_own(error: RuntimeError) -> bool:
    """Return whether a ``raise`` outside of torch has raised it."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or last.tb_frame.f_code.co_filename.startswith(torch_prefixes()):
        return False
    return last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _explain_bypass(error: RuntimeError, root: nn.Module, strategy: Any) -> PrepareError | None:
    """Return the error for a call that computes with shards of a model; None for any other place."""
    names = {
        module: ".".join(part for part in name.split(".") if part not in _WRAPPED)
        for name, module in root.named_modules()
    }
    stack = list(traceback.walk_tb(error.__traceback__))
    modules: list[Any] = [frame.f_locals.get("self") for frame, _ in stack]
    inside = [at for at, module in enumerate(modules) if isinstance(module, nn.Module) and module in names]
    if not inside or not strategy.holds_shards(root, modules[inside[-1]]):
        return None
    version: int = strategy.plugin.fsdp_version
    gathering = (*_CALLS, "forward") if version == 1 else _CALLS
    if any(modules[at] is root and stack[at][0].f_code.co_name in gathering for at in inside):
        return None
    called, needed = modules[inside[0]], modules[inside[-1]]
    owner, method = names[called], stack[inside[0]][0].f_code.co_name
    kind = type(called).__name__.removeprefix("FSDP" if version == 2 else "")  # fully_shard puts it there
    method = "" if method in _CALLS else method
    submodule = f"the submodule {owner} ({kind})" if owner else f"the {kind} itself"
    what = f"{kind}.{method}" if method else submodule
    place = user_line(stack[: inside[0]])
    return PrepareError(
        f"{what} was called at {place}, outside of the forward of the prepared model, and computes with "
        f"shards of the parameters of {names[needed] or kind}",
        why=f"FSDP{version} all-gathers parameters around the forward of the prepared model only; torch says "
        f"{str(error).splitlines()[0]}",
        fix=_advice(version, owner, method),
    )


def _advice(version: int, owner: str, method: str) -> str:
    if method == "forward" and not owner:
        return "call the prepared model itself: model(...)"
    forward = "call the prepared model, and do this work in its forward"
    if version == 1:
        return f"{forward}; with fsdp_version=2 any method can be told to torch: {_REGISTER}"
    if method and not owner:
        return f'write once after prepare: {_REGISTER}(model, "{method}"); or {forward}'
    return f"{forward}; or in a method of the model that is told once to {_REGISTER}(model, name)"


EXPLANATIONS.append(_explain_error)
