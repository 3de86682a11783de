"""State dicts of models as files: tied tensors, names under wrappers, safetensors.

safetensors cannot say that two names share one tensor. Here one name keeps the tensor, and the others are
aliases: listed in the manifest, and in the file's metadata as safetensors' own ``save_model`` does it
(``{alias: name}``).
"""

from __future__ import annotations

import json
import struct
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

from accelerate.core.errors import CheckpointError, SettingError

State = dict[str, Any]
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def tied(state: Mapping[str, Any]) -> dict[str, str]:
    """Names whose tensor is that of an earlier name: the same memory, shape and strides.

    Views that only overlap are not ties: each is its own tensor, and is saved as such.
    """
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.numel() == 0 or value.device.type == "meta":
            continue
        if value.layout is not torch.strided or not _address(value):
            continue
        key = (value.device, _address(value), value.dtype, tuple(value.shape), value.stride())
        owner = first.setdefault(key, name)
        if owner != name:
            aliases[name] = owner
    return aliases


def is_distributed(tensor: Any) -> bool:
    """Whether it is a ``DTensor``. Who has one has imported their module, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _address(tensor: torch.Tensor) -> int:
    """Where the data lies; 0 for tensors that stand for others (sharded, quantised ...) and have none."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def separated(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors as safetensors takes them: contiguous, no memory shared; aliases).

    Raises:
        CheckpointError: a value is no tensor, or has no data.
    """
    aliases = tied(state)
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[torch.device, int]] = set()
    for name, value in state.items():
        if name in aliases:
            continue
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name} in a model's state is a {type(value).__name__}, not a tensor",
                why="safetensors files hold tensors only",
                fix="save with safe_serialization=False",
            )
        if value.device.type == "meta":
            raise CheckpointError(
                f"{name} has no data to save (it is on the meta device)",
                fix="give the model its weights before saving it",
            )
        tensor = value.detach()
        if _address(tensor):
            memory = (tensor.device, tensor.untyped_storage().data_ptr())
            if memory in seen:  # another view of it is saved already; the copy takes no device memory
                tensor = tensor.to("cpu", copy=True)
            seen.add(memory)
        tensors[name] = tensor.contiguous()
    return tensors, aliases


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """(device, address, bytes) of the memory behind a tensor: equal for tensors that share it."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def table(tensors: Mapping[str, Any]) -> dict[str, tuple[str, list[int]]]:
    """(dtype, shape) by name, for the manifest."""
    return {
        name: (str(value.dtype).removeprefix("torch."), list(value.shape))
        for name, value in tensors.items()
        if isinstance(value, torch.Tensor)
    }


# dtype -> how a safetensors file calls it
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}


def write(tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str], file: BinaryIO) -> None:
    """Writes one safetensors file, tensor by tensor: no second copy of them is in memory.

    Source: "Format" in the readme of https://github.com/huggingface/safetensors: the length of the header as
    8 bytes, little-endian; the header, JSON; the tensors one after the other, here the widest dtypes first
    so that each is aligned.

    Raises:
        CheckpointError: the format has no name for a tensor's dtype.
    """
    order = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {**aliases, "format": "pt"}}
    end = 0
    for name, tensor in order:
        if tensor.dtype not in _CODES:
            raise CheckpointError(
                f"{name} is of {tensor.dtype}, which safetensors files do not hold",
                fix="save with safe_serialization=False",
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for _, tensor in order:
        file.write(raw(tensor))


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, in row-major order; of one on the CPU and contiguous they are not copied."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def read(path: Path) -> tuple[State, dict[str, str]]:
    """(tensors, aliases) of a safetensors file; tensors are mapped from the file, not copied."""
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        names = set(file.keys())
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    aliases = {alias: name for alias, name in metadata.items() if name in names and alias not in names}
    return state, aliases


def places(path: Path) -> dict[str, tuple[int, int]]:
    """(position in the file, bytes) of each tensor of a safetensors file."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    offsets = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: (8 + length + start, end - start) for name, (start, end) in offsets.items()}


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, torch.Tensor]:
    """``state_dict`` as safetensors can hold it: tied tensors once, all contiguous.

    Warns:
        UserWarning: names the tied tensors that are left out.
    """
    tensors, aliases = separated(state_dict)
    if aliases:
        pairs = ", ".join(f"{alias} (is {name})" for alias, name in aliases.items())
        warnings.warn(f"tied tensors are saved once, left out: {pairs}", stacklevel=2)
    return tensors


def canonical(name: str) -> str:
    """The name of a tensor without what wrappers put before and inside it.

    torch.compile adds ``_orig_mod.`` at any depth, data parallelism ``module.`` in front.
    """
    name = name.replace("_orig_mod.", "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def saved_names(state: Mapping[str, Any]) -> State:
    """``state`` by the names that go into a file: those of the model that was not compiled."""
    names = {name: name.replace("_orig_mod.", "") for name in state}
    if len(set(names.values())) < len(names):
        return dict(state)
    return {names[name]: value for name, value in state.items()}


def fitted(state: State, aliases: Mapping[str, str], like: Mapping[str, Any]) -> State:
    """``state`` by the names that the model uses, tied names included.

    Args:
        state: what a file holds.
        aliases: its aliases.
        like: the model's present state, for its names and ties.

    Returns:
        Names of ``like`` where they can be matched; other names stay, for the model to refuse.
    """
    state = {**state, **{alias: state[name] for alias, name in aliases.items() if name in state}}
    if state.keys() != like.keys():
        state = _renamed(state, like)
    owners = tied(like)
    for group in _groups(owners):
        present = next((name for name in group if name in state), None)
        for name in group:
            if present is not None:
                state.setdefault(name, state[present])
    return state


def _renamed(state: State, like: Iterable[str]) -> State:
    """``state`` with the names of ``like`` that mean the same; unchanged if that is ambiguous."""
    ours = {canonical(name): name for name in like}
    theirs = [canonical(name) for name in state]
    if len(set(theirs)) < len(theirs) or len(ours) < len(list(like)):
        return state
    return {ours.get(short, name): value for short, (name, value) in zip(theirs, state.items(), strict=True)}


def _groups(owners: Mapping[str, str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for alias, owner in owners.items():
        groups.setdefault(owner, [owner]).append(alias)
    return list(groups.values())


def untied(aliases: Mapping[str, str], like: Mapping[str, Any]) -> dict[str, str]:
    """Those of a file's ``aliases`` that the model has as tensors of their own."""
    names = {canonical(name): name for name in like}
    owners = tied(like)

    def root(name: str) -> str:
        own = names.get(canonical(name), name)
        return owners.get(own, own)

    return {
        alias: name
        for alias, name in aliases.items()
        if canonical(alias) in names and canonical(name) in names and root(alias) != root(name)
    }


def as_dtype(text: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype of that name: ``"bf16"``, ``"bfloat16"``, ``"torch.bfloat16"``.

    Raises:
        SettingError: there is no floating point dtype of that name.
    """
    if text is None or isinstance(text, torch.dtype):
        return text
    name = text.removeprefix("torch.")
    found = getattr(torch, _SHORT.get(name, name), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        known = ", ".join(sorted({*_SHORT, *_SHORT.values(), "float64"}))
        raise SettingError(f"{text!r} is no floating point dtype", fix=f"one of {known}")
    return found
