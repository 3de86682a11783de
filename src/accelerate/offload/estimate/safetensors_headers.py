"""The headers of safetensors files: names, dtypes, shapes. No weight is read.

A file begins with the length of its header (8 bytes, little endian) and the header itself: a JSON object of
``{name: {"dtype", "shape", "data_offsets"}}`` (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from accelerate.core.errors import CheckpointError

_INDEX = ".safetensors.index.json"
# The format's names of numbers that torch has under another name, or may not have.
_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "F16": "float16",
    "BF16": "bfloat16", "U32": "uint32", "I32": "int32", "F32": "float32", "U64": "uint64", "I64": "int64",
    "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}  # fmt: skip


class SafetensorsTensorHeader(NamedTuple):
    """The header of one tensor in a file.

    Attributes:
        dtype: of its numbers.
        shape: of the whole tensor.
        nbytes: what it takes in the file.
        file: where it lies.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    file: Path


def find_safetensors(path: Path) -> list[Path]:
    """Return the safetensors files of a folder, or the named one; an index stands for its files."""
    if path.is_file():
        return [path] if path.name.endswith((".safetensors", _INDEX)) else []
    indices = sorted(path.glob(f"*{_INDEX}"))
    return indices[:1] or sorted(path.glob("*.safetensors"))


def read_headers(path: str | os.PathLike[str]) -> dict[str, SafetensorsTensorHeader]:
    """Read the header of every tensor in safetensors files.

    Args:
        path: a file, an index of shards, or a folder that holds either.

    Raises:
        CheckpointError: there is no such file, an index names one that is missing, or a file is damaged.
    """
    location = Path(path).expanduser()
    files = find_safetensors(location)
    if not files:
        raise CheckpointError(f"there is no safetensors file in {location}")
    tensors: dict[str, SafetensorsTensorHeader] = {}
    for file in files:
        tensors.update(_read_index(file) if file.name.endswith(_INDEX) else _read_file(file))
    return tensors


def _read_index(index: Path) -> dict[str, SafetensorsTensorHeader]:
    """Return the tensors of an index, in its order."""
    try:
        body = json.loads(index.read_text(encoding="utf-8"))
        names: dict[str, str] = body.get("weight_map", body or None)  # some are that table alone
        files = {name: index.parent / name for name in dict.fromkeys(names.values())}
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is no index of shards", why="it has no 'weight_map'") from error
    absent = [name for name, file in files.items() if file.parent != index.parent or not file.is_file()]
    if absent:
        raise CheckpointError(
            f"{index} names files that are not there: {', '.join(absent)}",
            fix="fetch the missing shards; they lie beside the index",
        )
    shard_headers = {name: _read_file(file) for name, file in files.items()}
    missing = [weight for weight, name in names.items() if weight not in shard_headers[name]]
    if missing:
        raise CheckpointError(f"{index} says that {names[missing[0]]} holds {missing[0]}, which it does not")
    return {weight: shard_headers[name][weight] for weight, name in names.items()}


def _read_file(file: Path) -> dict[str, SafetensorsTensorHeader]:
    """Return the tensors of one file, in the order of their offsets."""
    try:
        with safe_open(file, framework="pt"):  # checks the header, and that the file has all that is in it
            pass
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is cut, damaged, or no safetensors file", why=str(error)) from error
    with file.open("rb") as stream:
        rows: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    rows.pop("__metadata__", None)
    return {
        name: _parse_header(row, file)
        for name, row in sorted(rows.items(), key=lambda each: each[1]["data_offsets"])
    }


def _parse_header(row: dict[str, Any], file: Path) -> SafetensorsTensorHeader:
    name = str(_NAMES.get(row["dtype"], row["dtype"].lower()))
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{file} holds numbers of the kind {row['dtype']}, which torch does not have")
    begin, end = row["data_offsets"]
    return SafetensorsTensorHeader(dtype, tuple(row["shape"]), end - begin, file)
