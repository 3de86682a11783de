"""The tensors that hold the most memory of a device, by name where a model or an optimizer has them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from accelerate.core.units import show_bytes
from accelerate.device.base import Device

# How many tensors are listed.
ROWS = 30


def describe_holders(
    hardware: Device, models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> str:
    """Return a table of the tensors of this process that hold the most memory of a device.

    A storage that several tensors share counts once. Tensors that only the graph of a backward holds are not
    objects of Python: they are in the line of the rest, where the device counts what is allocated.

    Args:
        hardware: the device.
        models, optimizers: whose tensors are named.

    Returns:
        Lines: the bytes of each kind of tensor, and the ``ROWS`` largest tensors.
    """
    names = dict(_name_tensors(models, optimizers))
    kinds = Counter[str]()
    rows: dict[int, tuple[int, str, str]] = {}
    for tensor in _live_tensors(hardware.type):
        key, size = _storage(tensor)
        if key and key not in rows:
            kind, name = names.get(key, ("other", ""))
            kinds[kind] += size
            shape = "x".join(map(str, _local(tensor).shape)) or "scalar"
            dtype = str(tensor.dtype).removeprefix("torch.")
            rows[key] = size, f"{name or 'a tensor'} ({shape}, {dtype})", kind
    allocated = hardware.memory_allocated()
    if allocated is not None and allocated > kinds.total():
        kinds["held by the backward's graph, or by libraries"] = allocated - kinds.total()
    lines = [f"{show_bytes(size):>12}  {kind}" for kind, size in kinds.most_common()]
    largest = sorted(rows.values(), key=lambda row: row[0], reverse=True)
    lines += ["", f"the largest of {len(largest)} tensors:"]
    lines += [f"{show_bytes(size):>12}  {kind:15}  {what}" for size, what, kind in largest[:ROWS]]
    return "\n".join(lines) + "\n"


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _storage(tensor: Any) -> tuple[int, int]:
    """Return the address and the bytes of a storage; 0 where there is none: sparse, fake, a wrapper."""
    try:
        storage = _local(tensor).untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):
        return 0, 0


def _live_tensors(device_type: str) -> Iterator[torch.Tensor]:
    """Yield the tensors that Python holds on a type of device."""
    for each in gc.get_objects():
        # Not isinstance: it asks proxies for their class, which may import or compute something.
        if issubclass(type(each), torch.Tensor) and each.device.type == device_type:
            yield each
            if each.is_leaf and each.grad is not None:
                yield each.grad


def _name_tensors(
    models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield the address of the storage of each named tensor, with its kind and name."""
    name_of: dict[Any, str] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            name_of[parameter] = name
            yield _storage(parameter)[0], ("parameters", name)
            if parameter.grad is not None:
                yield _storage(parameter.grad)[0], ("gradients", f"{name}.grad")
        for name, buffer in model.named_buffers():
            yield _storage(buffer)[0], ("buffers", name)
    for optimizer in optimizers:
        state: Mapping[Any, Any] = optimizer.state
        for parameter, values in state.items():
            for key, value in values.items() if isinstance(values, Mapping) else ():
                if isinstance(value, torch.Tensor):
                    owner = name_of.get(parameter, "a parameter of no prepared model")
                    yield _storage(value)[0], ("optimizer state", f"{key} of {owner}")
