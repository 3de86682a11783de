"""Files of tensors: what is written is what safetensors' own reader reads, and what is read is the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from accelerate.checkpoint import file_reads, state_dict_files, torch_files
from accelerate.core.errors import CheckpointError
from tests.support.numbers import can_be_copied

DTYPES = sorted(filter(can_be_copied, state_dict_files._CODES), key=str)


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every bit pattern is as good as another, except for bool."""
    size = torch.empty((), dtype=dtype).element_size()
    count = torch.Size(shape).numel() * size
    raw = (torch.arange(count) * 37 + 11) % (2 if dtype is torch.bool else 251)
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def write_state(path: Path, state: dict[str, torch.Tensor]) -> Path:
    separate, aliases = state_dict_files.untie(state)
    with path.open("wb") as file:
        state_dict_files.write_safetensors(separate, aliases, file)
    return path


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same dtype, shape and bytes (NaN equals itself)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bytes(state_dict_files.raw_bytes(a)) == bytes(state_dict_files.raw_bytes(b))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_by_the_librarys_own_reader(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {
        "odd": random_tensor(dtype, 3, 5),
        "scalar": random_tensor(dtype),
        "empty": random_tensor(dtype, 0, 4),
        "turned": random_tensor(dtype, 4, 6).t(),
        "stepped": random_tensor(dtype, 8, 8)[::2, 1::3],
        "one": random_tensor(dtype, 1),
    }
    if dtype == getattr(torch, "float4_e2m1fn_x2", None):  # two numbers have no shape ()
        with pytest.raises(CheckpointError, match=r"scalar is a scalar of torch\.float4"):
            write_state(tmp_path / "scalar.safetensors", state)
        del state["scalar"]
    path = write_state(tmp_path / "file.safetensors", state)
    loaded = load_file(path)
    assert loaded.keys() == state.keys()
    assert all(same(loaded[name], value) for name, value in state.items())
    read, aliases = state_dict_files.read_safetensors(path)
    assert not aliases
    assert all(same(read[name], value) for name, value in state.items())


def test_mixed_dtypes_are_aligned_and_complete(tmp_path: Path) -> None:
    state = {f"{dtype}".removeprefix("torch."): random_tensor(dtype, 3) for dtype in DTYPES}
    path = write_state(tmp_path / "file.safetensors", state)
    loaded = load_file(path)
    assert all(same(loaded[name], value) for name, value in state.items())
    data = path.read_bytes()
    entries, start, _ = state_dict_files.read_safetensors_header(path)
    for name, entry in entries.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        assert data[begin:end] == bytes(state_dict_files.raw_bytes(state[name]))
        assert begin % state[name].element_size() == 0
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts so small that every tensor has several."""
    monkeypatch.setattr(file_reads, "CHUNK", 1000)
    monkeypatch.setattr(file_reads, "_LARGE", 500)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_torch_file_is_read_in_parts_as_torch_reads_it(tmp_path: Path, dtype: torch.dtype) -> None:
    base = random_tensor(dtype, 40, 30)
    value = {
        "whole": base,
        "row": base[3],
        "turned": base.t(),
        "small": random_tensor(dtype, 2),
        "n": [1, None],
    }
    torch.save(value, tmp_path / "file.bin")
    loaded = torch_files.read(tmp_path / "file.bin")
    assert all(same(loaded[name], value[name]) for name in ("whole", "row", "turned", "small"))
    assert loaded["turned"].stride() == base.t().stride()
    assert loaded["whole"].untyped_storage().data_ptr() == loaded["row"].untyped_storage().data_ptr()
    assert loaded["n"] == [1, None]


@pytest.mark.usefixtures("small")
def test_a_torch_file_of_the_old_format_is_read_too(tmp_path: Path) -> None:
    value = {"a": torch.randn(50, 50)}
    torch.save(value, tmp_path / "file.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(torch_files.read(tmp_path / "file.bin", mmap=True)["a"], value["a"])
    assert torch.equal(torch_files.read(tmp_path / "file.bin")["a"], value["a"])


@pytest.mark.usefixtures("small")
def test_what_was_read_does_not_depend_on_the_file(tmp_path: Path) -> None:
    """A file that is overwritten or cut after loading changes nothing, also if torch is set to map files."""
    reason = "torch before 2.7 has no setting for it"
    config: Any = pytest.importorskip("torch.utils.serialization.config", reason=reason)
    value = {"a": torch.randn(300, 300)}
    path = tmp_path / "file.bin"
    torch.save(value, path)
    with config.patch({"load.mmap": True}):
        loaded = torch_files.read(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    os.truncate(path, 0)
    assert torch.equal(loaded["a"], value["a"])


def test_a_parallel_file_reads_like_a_file(tmp_path: Path, small: None) -> None:
    data = bytes(range(256)) * 40
    path = tmp_path / "file"
    path.write_bytes(data)
    with file_reads.FileRangeReader(path) as file:
        assert file.read(3) == data[:3]
        assert file.seek(-5000, os.SEEK_END) == len(data) - 5000 == file.tell()
        assert file.read(4000) == data[-5000:-1000]
        assert file.seek(500, os.SEEK_CUR) == file.tell()
        assert file.read() == data[-500:]
        assert file.read(10) == b""
        file.seek(len(data) + 5)
        assert file.readinto(bytearray(10)) == 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(30, 40)
        self.tied = self.first.weight
        self.lower = nn.Parameter(torch.randn(30, 30, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("turned", torch.randn(30, 20).t())
        self.register_buffer("none", torch.zeros(0, 3))


def load_mapped(path: Path, model: nn.Module, **kwargs: Any) -> dict[str, Any]:
    """Loads a file into a model; returns the mapped state."""
    state, aliases = state_dict_files.read_safetensors(path)
    files = [file_reads.MappedTensorAddresses.create(path, state)]
    state = state_dict_files.fit_names(state, aliases, model.state_dict())
    file_reads.load_from_mapped(files, model.load_state_dict, state, **kwargs)
    return state


@pytest.mark.usefixtures("small")
def test_a_model_is_filled_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = Net(), Net()
    path = write_state(tmp_path / "model.safetensors", dict(source.state_dict()))
    read: list[int] = []
    real = file_reads.read_parallel
    monkeypatch.setattr(file_reads, "read_parallel", lambda *a: (read.append(len(a[2])), real(*a)))
    versions = {name: value._version for name, value in target.named_parameters()}
    places = {name: value.data_ptr() for name, value in target.state_dict().items()}
    load_mapped(path, target)
    for name, value in source.state_dict().items():
        assert same(target.state_dict()[name], value), name
        assert target.state_dict()[name].data_ptr() == places[name]
    # `turned` is not contiguous in the model and goes the usual way.
    assert sum(read) == sum(v.nbytes for name, v in source.state_dict().items() if name != "turned")
    assert all(value._version > versions[name] for name, value in target.named_parameters())


@pytest.mark.usefixtures("small")
def test_another_dtype_or_shape_is_converted_or_refused_as_ever(tmp_path: Path) -> None:
    source = nn.Linear(40, 40)
    path = write_state(tmp_path / "model.safetensors", dict(source.state_dict()))
    double = nn.Linear(40, 40).double()
    load_mapped(path, double)
    assert torch.equal(double.weight, source.weight.double())
    other = nn.Linear(40, 20)
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_mapped(path, other)


@pytest.mark.usefixtures("small")
def test_a_file_that_got_shorter_meanwhile_is_an_error(tmp_path: Path) -> None:
    """D2: never the bytes of a page that is not there."""
    model = nn.Linear(40, 40)
    path = write_state(tmp_path / "model.safetensors", dict(model.state_dict()))
    state, _ = state_dict_files.read_safetensors(path)
    files = [file_reads.MappedTensorAddresses.create(path, state)]
    os.truncate(path, 3000)
    try:
        file_reads.load_from_mapped(files, model.load_state_dict, state)
        text = ""
    except CheckpointError as error:
        text = str(error)
    del state, files  # whoever shows them touches what is not there any more
    assert "model.safetensors" in text
    assert "ends at 3000 bytes" in text


def test_copies_elsewhere_are_left_alone(tmp_path: Path) -> None:
    """Only what is mapped from the file is read from it, and only while it is filled."""
    path = write_state(tmp_path / "file.safetensors", {"a": torch.ones(1000)})
    state, _ = state_dict_files.read_safetensors(path)

    def load() -> None:
        assert torch.equal(torch.zeros(1000).copy_(torch.full((1000,), 3.0)), torch.full((1000,), 3.0))
        assert torch.equal(torch.zeros(500).copy_(state["a"][:500]), torch.ones(500))
        assert torch.equal(torch.zeros(500).copy_(state["a"][::2]), torch.ones(500))

    file_reads.load_from_mapped([file_reads.MappedTensorAddresses.create(path, state)], load)
