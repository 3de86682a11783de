"""Weights from files to a device that pins memory: what is read, through which blocks, and in which order."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import Accelerator, init_empty_weights, load_checkpoint_in_model
from accelerate import device as devices
from accelerate.checkpoint import file_reads
from accelerate.checkpoint.file_reads import DeviceUploads, ReadPlan
from accelerate.checkpoint.mapped_state import MappedOptimizerState
from accelerate.core.errors import CheckpointError
from accelerate.device.base import Device
from tests.null.test_read_plan import LARGE, locate, put

KiB = 2**10
HOST = devices.get("cpu")


class Event:
    """An event that knows whether the host has waited for it."""

    def __init__(self) -> None:
        self.is_over = False

    def synchronize(self) -> None:
        self.is_over = True


class Pinning(Device):
    """The simulated device with pinned memory and streams; it tells what waited for what."""

    pins_memory = True

    def __init__(self) -> None:
        super().__init__("sim")
        self.waits: list[tuple[str, str]] = []
        self.copies: list[Event] = []

    def stream(self, index: int | None = None) -> Any:
        return "copies"

    def current_stream(self, index: int | None = None) -> Any:
        return "compute"

    def use_stream(self, stream: Any) -> Any:
        assert stream == "copies"
        assert self.waits, "the memory of a target may be in use"
        return super().use_stream(None)

    def record_event(self, stream: Any, timed: bool = False) -> Any:
        if stream != "copies":
            return stream
        self.copies.append(Event())
        return self.copies[-1]

    def wait_event(self, event: Any, stream: Any) -> None:
        self.waits.append((event, stream))


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> Pinning:
    """It stands for ``sim`` in all of the package; blocks are small."""
    hardware = Pinning()
    monkeypatch.setattr(devices, "get", lambda type: hardware if type == "sim" else HOST)
    monkeypatch.setattr(file_reads, "BLOCK", 32 * KiB)
    monkeypatch.setattr(file_reads, "CHUNK", 12 * KiB)
    return hardware


Read = tuple[int, int]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """(Position, bytes) of each read. None goes into a block that is still copied from."""
    known: list[Read] = []
    read: Callable[..., None] = file_reads.read_exactly
    next_block = file_reads.DeviceUploader._next_block

    def watched_block(uploader: Any, size: int) -> torch.Tensor:
        copied_from = [*uploader._blocks]
        block = next_block(uploader, size)
        assert all(event.is_over for memory, event in copied_from if memory is block)
        return block

    def watched_read(path: Path, at: int, view: memoryview) -> None:
        known.append((at, len(view)))
        read(path, at, view)

    monkeypatch.setattr(file_reads.DeviceUploader, "_next_block", watched_block)
    monkeypatch.setattr(file_reads, "read_exactly", watched_read)
    return known


@pytest.fixture
def read_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ninth read of a load fails."""
    read, calls = file_reads.read_exactly, itertools.count()

    def fails_late(path: Path, at: int, view: memoryview) -> None:
        read(path, 2**40 if next(calls) == 8 else at, view)  # the file ends before

    monkeypatch.setattr(file_reads, "read_exactly", fails_late)


class Net(nn.Module):
    """Tensors below, at and above the size of a block, one of no dimension, and two that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(130, 301), nn.Linear(3, 5)
        self.embed = nn.Embedding(64, 128)
        self.head = nn.Linear(128, 64, bias=False)
        self.tie_weights()
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool))

    def tie_weights(self) -> None:
        self.head.weight = self.embed.weight


def saved_net(folder: Path) -> tuple[Net, Path]:
    torch.manual_seed(0)
    net = Net()
    state = {name: value for name, value in net.state_dict().items() if name != "head.weight"}
    save_file(state, folder / "model.safetensors")
    return net, folder / "model.safetensors"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as saved", "converted"])
def test_a_model_is_filled_through_few_pinned_blocks(
    hardware: Pinning, reads: list[Read], tmp_path: Path, dtype: torch.dtype | None
) -> None:
    """E4, E11: each byte is read once, and what is in flight at most fills three blocks."""
    net, path = saved_net(tmp_path)
    gc.collect()
    with init_empty_weights():
        model = Net()
    load_checkpoint_in_model(model, path, {"": "sim:0"}, dtype=dtype)
    assert model.head.weight is model.embed.weight
    for name, value in net.state_dict().items():
        told = model.state_dict()[name]
        wanted = value.to(dtype) if dtype and value.is_floating_point() else value
        assert (str(told.device), told.dtype) == ("sim:0", wanted.dtype)
        assert torch.equal(told.cpu(), wanted), name
    ends = [at + size for at, size in sorted(reads)]
    assert all(end <= at for end, (at, _) in zip(ends, sorted(reads)[1:], strict=False)), "nothing twice"
    assert sum(size for _, size in reads) == sum(
        value.nbytes for name, value in net.state_dict().items() if name != "head.weight"
    )
    assert len(hardware.copies) > 3
    assert set(hardware.waits) == {("compute", "copies")}
    assert all(event.is_over for event in hardware.copies), "the load is over when all values are there"


def test_values_are_copied_into_the_tensors_that_there_are(hardware: Pinning, tmp_path: Path) -> None:
    net, path = saved_net(tmp_path)
    model = Net().to("sim")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    before = {name: (p.data_ptr(), p._version) for name, p in model.named_parameters()}
    load_checkpoint_in_model(model, path)
    assert hardware.copies
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.cpu(), net.get_parameter(name))
        assert parameter.data_ptr() == before[name][0]
        assert parameter._version > before[name][1], "a backward that needs the old values must see it"


def test_shards_are_read_straight_into_tensors_of_a_device(
    hardware: Pinning, reads: list[Read], tmp_path: Path
) -> None:
    """Boxes of whole rows alone: the file is read where they are, once."""
    (source,) = put(tmp_path / "file", LARGE)
    there, plan = locate(source), ReadPlan()
    rows, column = (torch.zeros(*shape, device="sim") for shape in ((3, 2000), (3, 1)))
    assert plan.add(there, there.meta_tensor[5:8], rows)
    assert not plan.add(there, there.meta_tensor[:3, 4:5], column)
    assert not rows.any()
    reads.clear()  # torch before 2.12 reads all of a file to tell where its values are
    plan.run()
    assert torch.equal(rows.cpu(), LARGE[5:8])
    assert sum(size for _, size in reads) == rows.nbytes
    assert all(event.is_over for event in hardware.copies)


@pytest.mark.usefixtures("read_that_fails")
def test_a_file_that_cannot_be_read_is_named_and_no_copy_goes_on(hardware: Pinning, tmp_path: Path) -> None:
    """D2"""
    _, path = saved_net(tmp_path)
    with init_empty_weights():
        model = Net()
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        load_checkpoint_in_model(model, path, {"": "sim:0"})
    assert hardware.copies
    assert all(event.is_over for event in hardware.copies)


def test_only_devices_that_pin_memory_take_uploads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, path = saved_net(tmp_path)
    monkeypatch.setattr(DeviceUploads, "add", None)
    model = Net().to("sim")
    load_checkpoint_in_model(model, path)


class Doubling(nn.Linear):
    """A layer that computes with its weights as soon as they are loaded."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.doubled = self.weight.detach().view(-1) * 2


@pytest.fixture
def saved_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Accelerator, Any, Any, Path]:
    """A training on the simulated device that has saved, and gone on for a step."""
    monkeypatch.setattr("accelerate.checkpoint.mapped_state.LARGE", 1)
    monkeypatch.setattr("accelerate.checkpoint.mapped_state._file_system", lambda path: "ext4")
    torch.manual_seed(0)
    accelerator = Accelerator()
    assert accelerator.device.type == "sim"
    model = nn.Sequential(nn.Linear(301, 130), Doubling(130, 200), nn.Linear(200, 1))
    user = torch.optim.AdamW(model.parameters(), lr=0.1)
    user.param_groups[0]["estimate"] = torch.tensor(2.0)  # as optimizers keep that estimate their rate
    state: Any = user.state  # with some that is of no parameter
    state["all"], state["count"] = {"estimate": torch.tensor(2.0)}, 1
    model, optimizer = accelerator.prepare(model, user)
    train_step(accelerator, model, optimizer)
    folder = Path(accelerator.save_state(tmp_path / "state"))
    return accelerator, model, optimizer, folder


def train_step(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.linspace(0, 1, 301, device=accelerator.device)[None]).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def values_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    moments = {
        f"{number} {name}": value
        for number, p in enumerate(model.parameters())
        for name, value in optimizer.state[p].items()
    }
    return {**dict(model.named_parameters()), **moments}


@pytest.mark.parametrize("map_location", [None, "on_device"])
def test_load_state_uploads_weights_and_moments(
    saved_training: Any, request: pytest.FixtureRequest, map_location: str | None
) -> None:
    """D13: into the memory that there is, each byte read once; what is small is copied."""
    accelerator, model, optimizer, folder = saved_training
    wanted = {name: value.detach().cpu().clone() for name, value in values_of(model, optimizer).items()}
    train_step(accelerator, model, optimizer)
    estimates = [optimizer.param_groups[0]["estimate"], optimizer.state["all"]["estimate"]]
    for estimate in estimates:
        assert str(estimate.device) == "sim:0", "as 1.x moves it in prepare"
        estimate.zero_()
    before = {name: value.data_ptr() for name, value in values_of(model, optimizer).items()}
    hardware, reads = request.getfixturevalue("hardware"), request.getfixturevalue("reads")
    accelerator.load_state(folder, map_location=map_location)
    found = values_of(model, optimizer)
    for name, value in wanted.items():
        assert torch.equal(found[name].cpu(), value), name
    moments = {name: value for name, value in found.items() if " exp" in name and value.nbytes >= 2**16}
    filled = {**dict(model.named_parameters()), **moments}
    assert len(moments) == 4
    assert {name: value.data_ptr() for name, value in filled.items()} == {
        name: before[name] for name in filled
    }
    assert all(value.device.type == "sim" for value in filled.values())
    assert sum(size for _, size in reads) == sum(value.nbytes for value in filled.values())
    assert hardware.copies
    assert all(event.is_over for event in hardware.copies)
    assert torch.equal(model[1].doubled.cpu(), 2 * wanted["1.weight"].view(-1)), "used while it was uploaded"
    for estimate in (optimizer.param_groups[0]["estimate"], optimizer.state["all"]["estimate"]):
        assert (str(estimate.device), estimate.item()) == ("sim:0", 2.0)


class KeepingAdamW(torch.optim.AdamW):
    """An optimizer with a ``load_state_dict`` of its own, which casts nothing."""

    loaded: Any = None

    def load_state_dict(self, state_dict: Any) -> None:
        self.loaded = state_dict


@pytest.mark.usefixtures("hardware")
def test_an_optimizer_that_loads_by_itself_gets_a_state_of_the_device(saved_training: Any) -> None:
    """As in 1.x, where several processes load onto their devices."""
    accelerator, model, optimizer, folder = saved_training
    optimizer.optimizer.__class__ = KeepingAdamW
    accelerator.load_state(folder, map_location="on_device")
    assert not MappedOptimizerState.open_states
    moments = optimizer.optimizer.loaded["state"][0]
    assert {str(value.device) for value in moments.values()} == {"sim:0"}
    assert torch.equal(moments["exp_avg"], values_of(model, optimizer)["0 exp_avg"])


def test_moments_that_somebody_holds_keep_their_values(saved_training: Any, hardware: Pinning) -> None:
    accelerator, model, optimizer, folder = saved_training
    wanted = {name: value.detach().cpu().clone() for name, value in values_of(model, optimizer).items()}
    train_step(accelerator, model, optimizer)
    held = optimizer.state_dict()["state"][0]["exp_avg"]
    of_now = held.cpu().clone()
    accelerator.load_state(folder)
    assert torch.equal(held.cpu(), of_now)
    assert torch.equal(values_of(model, optimizer)["0 exp_avg"].cpu(), wanted["0 exp_avg"])


@pytest.mark.usefixtures("read_that_fails")
def test_a_load_state_that_cannot_read_a_file_names_it(saved_training: Any, hardware: Pinning) -> None:
    accelerator, _, _, folder = saved_training
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        accelerator.load_state(folder)
    assert hardware.copies
    assert all(event.is_over for event in hardware.copies)
