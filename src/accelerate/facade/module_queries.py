"""Queries about modules: their submodules and their wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from accelerate.checkpoint.state_dict_files import is_distributed
from accelerate.core import packages
from accelerate.core.units import parse_bytes
from accelerate.offload.module_sizes import named_module_tensors
from accelerate.strategy import STRATEGIES
from accelerate.strategy.base import ModuleWrapping
from accelerate.strategy.protocol.replicated_module import ReplicatedModule

# torch's own classes that hold a model as ``module``; strategies unwrap what else wraps.
WRAPPERS = (DataParallel, DistributedDataParallel)
# The submodule of wrappers that strategies know: those of DeepSpeed, and FSDP1.
_WRAPPED_NAMES = ("module", "_fsdp_wrapped_module")
# The dtypes in the order in which 1.x numbers them.
_DTYPE_NAMES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
)
TENSOR_TYPE_TO_INT: dict[torch.dtype, int] = {
    getattr(torch, name): number for number, name in enumerate(_DTYPE_NAMES, start=1)
}
TENSOR_INT_TO_DTYPE = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size in bytes, from a number of bytes or a text such as ``"5GB"`` (10^9) or ``"5GiB"`` (2^30).

    Raises:
        SettingError: it is no size.
    """
    return parse_bytes(size)


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class of that name of the module or of the first submodule that has it, else None."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


@overload
def get_module_children_bottom_up(model: nn.Module, return_fqns: Literal[False] = ...) -> list[nn.Module]: ...
@overload
def get_module_children_bottom_up(
    model: nn.Module, return_fqns: Literal[True]
) -> list[tuple[str, nn.Module]]: ...
def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return every submodule once, children before their parents, the model last.

    Args:
        model: the model.
        return_fqns: give (path from the model, module) pairs.
    """
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        seen.add(module)
        for name, child in module.named_children():
            if child not in seen:
                yield from walk(child, f"{path}.{name}" if path else name)
        yield path, module

    pairs = list(walk(model, ""))
    return pairs if return_fqns else [module for _, module in pairs]


def is_compiled_module(module: Any) -> bool:
    """Return whether ``torch.compile`` made this module, as a wrapper around another one."""
    # Its own submodule: FSDP1 and PEFT models pass on attributes of the module inside them.
    return isinstance(module, nn.Module) and "_orig_mod" in getattr(module, "_modules", ())


def is_repeated_blocks(module: nn.Module) -> bool:
    """Return whether this is a list of modules of one class, such as the layers of a transformer."""
    return isinstance(module, nn.ModuleList) and len(module) > 0 and len({type(part) for part in module}) == 1


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return whether the module has a list of modules of one class somewhere."""
    return any(is_repeated_blocks(part) for part in module.modules())


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether a part of the module is compiled in place, or a part or the whole by a wrapper."""
    return any(
        is_compiled_module(part) or (part is not module and part._compiled_call_impl is not None)
        for part in module.modules()
    )


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether a parameter or buffer is a DTensor."""
    if not torch.distributed.is_available():
        return False
    return any(is_distributed(tensor) for _, tensor in named_module_tensors(model, recurse=True))


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return the world size of the model's own tensor parallelism; None without it."""
    size = getattr(model, "tp_size", None) or getattr(model, "_tp_size", None)
    return None if size is None else int(size)


def is_peft_model(model: Any) -> bool:
    """Return whether the model, without its wrappers, is a PEFT model."""
    if not packages.is_installed("peft"):
        return False
    from peft import PeftModel

    return isinstance(extract_model_from_parallel(model, keep_torch_compile=False), PeftModel)


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Return the user's own model, without the wrappers that train it in parallel.

    Args:
        model: a model, wrapped or not.
        keep_fp32_wrapper: False also takes off the mixed precision that ``prepare`` attached; layers that
            torchao computes in 8-bit floats stay so.
        keep_torch_compile: the result is compiled when ``model`` is; False gives the model inside.
        recursive: also unwrap submodules, in place.
    """
    model = _unwrap_parallel(model)
    compiled = model if is_compiled_module(model) else None
    inner = model
    while is_compiled_module(inner):
        inner = _unwrap_parallel(inner._orig_mod)
    if recursive:
        _unwrap_children(inner)
    if not keep_fp32_wrapper:
        from accelerate.precision.autocast import detach_autocast

        detach_autocast(inner)
    if compiled is None or not keep_torch_compile:
        return inner
    # A compiled module of its own for the inner one: the given one goes on training with its wrapper.
    return compiled if compiled._orig_mod is inner else type(compiled)(inner, compiled.dynamo_ctx)


def _unwrap_parallel(model: Any) -> Any:
    """Return what is inside of the parallel wrappers around ``model``, which may be compiled."""
    while isinstance(model, (*WRAPPERS, ReplicatedModule)):
        model = model._user_module if isinstance(model, ReplicatedModule) else model.module
    # Strategies take time to import.
    if any(name in getattr(model, "_modules", ()) for name in _WRAPPED_NAMES):
        for strategy in STRATEGIES:
            if issubclass(strategy, ModuleWrapping):
                model = strategy.inner_module(model)
    return model


def _unwrap_children(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not is_compiled_module(child) and (inner := _unwrap_parallel(child)) is not child:
                setattr(parent, name, inner)
