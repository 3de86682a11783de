"""Reading the numbers of torch files straight to where they belong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.checkpoint.dcp_files import FileSlice, locate_tensor
from accelerate.checkpoint.file_reads import ReadPlan, TensorLocation
from accelerate.core.errors import CheckpointError

LARGE = torch.arange(3_000_000.0).view(1500, 2000)  # several parts of 4 MiB
STRAIGHT: dict[str, torch.Tensor] = {
    "rows": torch.arange(12.0).view(3, 4),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "half": torch.arange(5).to(torch.bfloat16),
    "complex": torch.arange(3).to(torch.complex64),
    "a view, with all of the memory behind it": torch.arange(24.0).view(6, 4)[2:4],
    "one element, of any stride": torch.ones(1, 1).expand(1, 1).as_strided((1,), (0,)),
    "large": LARGE,
}


def put(path: Path, *values: Any) -> list[FileSlice]:
    """Torch files, one after the other in a file, between other bytes."""
    sources: list[FileSlice] = []
    with path.open("wb") as file:
        for value in values:
            file.write(b"between")
            start = file.tell()
            torch.save(value, file)
            sources.append(FileSlice(path, start, file.tell() - start))
    return sources


def locate(source: FileSlice) -> TensorLocation:
    there = locate_tensor(source, {})
    assert there is not None
    return there


@pytest.mark.parametrize("name", STRAIGHT)
def test_what_lies_in_the_order_of_rows_is_read_straight(tmp_path: Path, name: str) -> None:
    value = STRAIGHT[name]
    _, source = put(tmp_path / "file", torch.ones(2), value)
    there = locate(source)
    assert (there.meta_tensor.device.type, there.meta_tensor.shape, there.meta_tensor.dtype) == (
        "meta",
        value.shape,
        value.dtype,
    )
    target = torch.empty_like(value).zero_()
    at, version, moves = target.data_ptr(), target._version, ReadPlan()
    assert moves.add(there, there.meta_tensor, target)
    assert not target.any(), "nothing is read before all is run"
    moves.run()
    assert torch.equal(target, value)
    assert target.data_ptr() == at
    assert target._version > version, "a tensor that a backward needs was changed: torch must see it"


def test_boxes_of_whole_rows_are_read_straight(tmp_path: Path) -> None:
    (source,) = put(tmp_path / "file", LARGE)
    there, moves = locate(source), ReadPlan()
    rows, one, column = torch.zeros(3, 2000), torch.zeros(1, 10), torch.zeros(3, 1)
    assert moves.add(there, there.meta_tensor[5:8], rows)
    assert moves.add(there, there.meta_tensor[9:10, 20:30], one)
    assert not moves.add(there, there.meta_tensor[:3, 4:5], column)
    moves.run()
    assert torch.equal(rows, LARGE[5:8])
    assert torch.equal(one, LARGE[9:10, 20:30])
    assert not column.any()


def test_what_would_not_be_the_same_bytes_is_left_to_others(tmp_path: Path) -> None:
    value = torch.arange(12.0).view(3, 4)
    plain, turned, negative = put(tmp_path / "file", value, value.t(), torch._neg_view(value))
    like = locate(plain).meta_tensor
    moves = ReadPlan()
    assert not moves.add(locate(plain), like, torch.zeros(3, 4, dtype=torch.float64))
    assert not moves.add(locate(plain), like, torch.zeros(4, 3).t())
    assert not moves.add(locate(plain), like, torch.zeros(3, 4, device="meta"))
    assert not moves.add(locate(turned), locate(turned).meta_tensor, torch.zeros(4, 3))
    there = locate_tensor(negative, {})
    assert there is None or not moves.add(there, there.meta_tensor, torch.zeros(3, 4))
    assert not moves.direct_reads


def test_what_is_no_plain_tensor_is_not_looked_into(tmp_path: Path) -> None:
    others = [
        {"a": 1},
        [torch.ones(2), torch.ones(3)],
        nn.Parameter(torch.ones(2)),
        torch.ones(2).to_sparse(),
    ]
    for source in put(tmp_path / "file", *others):
        assert locate_tensor(source, {}) is None


def test_files_of_old_versions_and_of_other_machines_are_left_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old"
    torch.save(torch.ones(2), old, _use_new_zipfile_serialization=False)
    assert locate_tensor(FileSlice(old, 0, old.stat().st_size), {}) is None
    (source,) = put(tmp_path / "file", torch.ones(2))
    monkeypatch.setattr(sys, "byteorder", "big" if sys.byteorder == "little" else "little")
    assert locate_tensor(source, {}) is None


def test_what_is_alike_is_unpickled_once(tmp_path: Path) -> None:
    one, same, other = put(tmp_path / "file", torch.zeros(4), torch.ones(4), torch.ones(5))
    unpickled: dict[bytes, Any] = {}
    layouts = [locate_tensor(source, unpickled) for source in (one, same, other)]
    assert all(layouts)
    assert layouts[0].meta_tensor is layouts[1].meta_tensor  # type: ignore[union-attr]
    assert layouts[0].start != layouts[1].start  # type: ignore[union-attr]
    assert layouts[2].meta_tensor.shape == (5,)  # type: ignore[union-attr]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    """D2"""
    path = tmp_path / "file"
    (source,) = put(path, LARGE)
    there, moves, target = locate(source), ReadPlan(), torch.zeros_like(LARGE)
    moves.add(there, there.meta_tensor, target)
    with path.open("r+b") as file:
        file.truncate(source.length // 2)
    with pytest.raises(CheckpointError, match=r"cannot read .*file\n.*it ends at"):
        moves.run()
    with pytest.raises(CheckpointError, match="cannot read"):
        locate_tensor(source, {})
