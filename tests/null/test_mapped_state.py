"""Optimizer states that are mapped at first: soon memory of their own, nothing lost, nothing hidden."""

from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accelerate import Accelerator
from accelerate.checkpoint import mapped_state
from accelerate.core.errors import CheckpointError
from accelerate.strategy.deepspeed.zero_checkpoint import ZeroCheckpoint

pytestmark = pytest.mark.skipif(not mapped_state.can_detach(), reason="this system cannot copy pages ahead")
SIZE = 2**19


@pytest.fixture(autouse=True)
def small_files_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mapped_state, "LARGE", 1)
    monkeypatch.setattr(mapped_state, "_file_system", lambda path: "ext4")  # wherever the tests' folder lies
    yield
    while (
        mapped_state.MappedOptimizerState.open_states
    ):  # a failure that a test has not asked for must not reach the next
        mapped_state.MappedOptimizerState.open_states.pop()


def training(dtype: torch.dtype = torch.float32) -> tuple[Accelerator, torch.nn.Module, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(SIZE, 1, dtype=dtype)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def step(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, scale: float = 1.0) -> None:
    weight = next(iter(model.parameters()))
    accelerator.backward(model(torch.linspace(0, scale, SIZE, dtype=weight.dtype)[None]).sum())
    optimizer.step()
    optimizer.zero_grad()


def moments(optimizer: Any) -> list[torch.Tensor]:
    return [value.clone() for state in optimizer.state.values() for value in state.values()]


@pytest.fixture
def saved_training(tmp_path: Path) -> tuple[Path, list[torch.Tensor]]:
    accelerator, model, optimizer = training()
    step(accelerator, model, optimizer)
    return Path(accelerator.save_state(tmp_path / "a")), moments(optimizer)


def overwrite(folder: Path) -> None:
    """Zeros in the place of everything in the file, in place."""
    with (folder / "optimizer.bin").open("r+b") as file:
        file.write(bytes((folder / "optimizer.bin").stat().st_size))


def hold_copying(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Events: the copying has come to its turn; it may go on."""
    ready, go, whole = threading.Event(), threading.Event(), mapped_state.read_pages

    def slow(*pages: int) -> None:
        ready.set()
        assert go.wait(60)
        whole(*pages)

    monkeypatch.setattr(mapped_state, "read_pages", slow)
    return ready, go


def same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_what_is_loaded_does_not_depend_on_its_file(saved_training: tuple[Path, list[torch.Tensor]]) -> None:
    accelerator, _, optimizer = training()
    accelerator.load_state(saved_training[0])
    assert mapped_state.MappedOptimizerState.open_states, "nothing was mapped"
    mapped_state.MappedOptimizerState.wait_copied()
    overwrite(saved_training[0])
    assert same(moments(optimizer), saved_training[1])


def test_it_is_mapped_until_then(
    saved_training: tuple[Path, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the copying the file would shine through: so the test above can fail."""
    _, go = hold_copying(monkeypatch)
    accelerator, _, optimizer = training()
    accelerator.load_state(saved_training[0])
    overwrite(saved_training[0])
    assert not same(moments(optimizer), saved_training[1])
    go.set()


@pytest.mark.parametrize(
    "call",
    [
        lambda accelerator, folder: accelerator.save_state(folder / "b"),
        lambda accelerator, folder: accelerator.load_state(folder / "a"),
        lambda accelerator, folder: accelerator.wait_for_checkpoint(),
        lambda accelerator, folder: accelerator.end_training(),
    ],
    ids=["save_state", "load_state", "wait_for_checkpoint", "end_training"],
)
def test_a_file_that_is_changed_meanwhile_is_told(
    saved_training: tuple[Path, list[torch.Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[Accelerator, Path], Any],
) -> None:
    """D2"""
    ready, go = hold_copying(monkeypatch)
    accelerator, _, _ = training()
    accelerator.load_state(saved_training[0])
    assert ready.wait(60)
    overwrite(saved_training[0])
    go.set()
    with pytest.raises(CheckpointError, match=r"(?s)optimizer.bin cannot be trusted.*was changed"):
        call(accelerator, tmp_path)
    assert not (tmp_path / "b").exists()


def test_training_goes_on_while_pages_are_copied(
    saved_training: tuple[Path, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the state is written by training before the pages are copied: nothing of it is lost."""
    ready, go = hold_copying(monkeypatch)
    accelerator, model, optimizer = training()
    accelerator.load_state(saved_training[0])
    assert ready.wait(60)
    step(accelerator, model, optimizer, 2.0)
    after = moments(optimizer)
    go.set()
    mapped_state.MappedOptimizerState.wait_copied()
    overwrite(saved_training[0])
    assert same(moments(optimizer), after)

    again, model, optimizer = training()
    step(again, model, optimizer)
    step(again, model, optimizer, 2.0)
    assert same(moments(optimizer), after)


def test_a_removed_checkpoint_does_not_matter(
    saved_training: tuple[Path, list[torch.Tensor]], tmp_path: Path
) -> None:
    accelerator, _, optimizer = training()
    accelerator.load_state(saved_training[0])
    (saved_training[0] / "optimizer.bin").unlink()
    accelerator.wait_for_checkpoint()
    assert same(moments(optimizer), saved_training[1])


def maps(path: Path) -> int:
    """How many mappings of a file this process has, and how often it is open."""
    open_files = [os.readlink(each.path) for each in os.scandir("/proc/self/fd") if each.is_symlink()]
    return Path("/proc/self/maps").read_text().count(str(path)) + open_files.count(str(path))


@pytest.mark.parametrize("by", ["a step", "a wait", "the optimizer that goes"])
def test_nothing_of_the_file_stays_open(
    saved_training: tuple[Path, list[torch.Tensor]], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G22: disk space is free when the file is removed, and the file system can be unmounted."""
    path = saved_training[0] / "optimizer.bin"
    ready, go = hold_copying(monkeypatch)
    accelerator, model, optimizer = training()
    accelerator.load_state(saved_training[0])
    (mapped,) = mapped_state.MappedOptimizerState.open_states
    assert ready.wait(60)
    assert maps(path)
    go.set()
    assert mapped._thread is not None
    mapped._thread.join(60)
    if by == "a step":
        step(accelerator, model, optimizer, 2.0)
    elif by == "a wait":
        mapped_state.MappedOptimizerState.wait_copied()
    else:
        optimizer.optimizer.state.clear()
        gc.collect()
    assert not maps(path)
    if by == "a step":
        assert not mapped_state.MappedOptimizerState.open_states
        after = moments(optimizer)
        again, model, optimizer = training()
        step(again, model, optimizer)
        step(again, model, optimizer, 2.0)
        assert same(moments(optimizer), after)
    mapped_state.MappedOptimizerState.wait_copied()


class SlowAdamW(torch.optim.AdamW):
    """Writes to its state in a step, when ``may_write`` is set."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.entered, self.may_write, self.written = (threading.Event() for _ in range(3))
        self.slow = self.fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("a step that fails")
        if not self.slow:
            return super().step(closure)
        self.entered.set()
        assert self.may_write.wait(60)
        for values in self.state.values():
            values["exp_avg"].add_(1)
        self.written.set()
        return None


def two_trainings() -> tuple[Accelerator, list[torch.nn.Module], list[Any]]:
    torch.manual_seed(0)
    accelerator, models = Accelerator(cpu=True), [torch.nn.Linear(SIZE, 1) for _ in range(2)]
    optimizers = [SlowAdamW(model.parameters()) for model in models]
    models, optimizers = (
        list(each) for each in (accelerator.prepare(*models), accelerator.prepare(*optimizers))
    )
    return accelerator, models, optimizers


@pytest.mark.parametrize("by", ["a step", "a wait", "a step after one that failed"])
def test_a_write_of_another_thread_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """An optimizer steps in a thread while another one steps, or a save waits, here."""
    accelerator, models, optimizers = two_trainings()
    for model, optimizer in zip(models, optimizers, strict=True):
        step(accelerator, model, optimizer)
    folder = Path(accelerator.save_state(tmp_path / "a"))
    expected = moments(optimizers[1])

    ready, go = hold_copying(monkeypatch)
    accelerator, models, optimizers = two_trainings()
    accelerator.load_state(folder)
    mapped = list(mapped_state.MappedOptimizerState.open_states)
    assert len(mapped) == 2
    assert ready.wait(60)
    slow, whole = optimizers[1].optimizer, mapped_state.move_pages
    address = next(iter(slow.state.values()))["exp_avg"].data_ptr()

    def move(copy: int, target: mapped_state.MemoryRange) -> None:
        """Let the thread write where a write would be lost: after the last copy, before the move."""
        if target.start <= address < target.end and not slow.written.is_set():
            slow.may_write.set()
            assert slow.written.wait(60)
        whole(copy, target)

    monkeypatch.setattr(mapped_state, "move_pages", move)
    if by == "a step after one that failed":
        slow.fails = True
        with pytest.raises(RuntimeError, match="a step that fails"):
            slow.step()
        slow.fails = False
    slow.slow = True
    thread = threading.Thread(target=slow.step)
    thread.start()
    assert slow.entered.wait(60)
    go.set()
    for each in mapped:
        assert each._thread is not None
        each._thread.join(60)
    if by == "a wait":
        mapped_state.MappedOptimizerState.wait_copied()
    else:
        step(accelerator, models[0], optimizers[0], 2.0)
    assert maps(folder / "optimizer.bin") == 0, "what no thread writes to is detached"
    slow.may_write.set()
    thread.join(60)
    overwrite(folder)
    mapped_state.MappedOptimizerState.wait_copied()
    assert maps(folder / "optimizer_1.bin") == 0
    names = [name for state in optimizers[1].state.values() for name in state]
    written = [value + 1 if name == "exp_avg" else value for name, value in zip(names, expected, strict=True)]
    assert same(moments(optimizers[1]), written)


def test_a_tensor_of_a_group_is_a_part_of_the_state(tmp_path: Path) -> None:
    """DeepSpeed's groups take it as it is: it must not be moved during a step of another thread."""
    accelerator, model, optimizer = training()
    step(accelerator, model, optimizer)
    optimizer.param_groups[0]["history"] = torch.ones(SIZE)
    folder = Path(accelerator.save_state(tmp_path / "a"))
    mapped = mapped_state.MappedOptimizerState(folder / "optimizer.bin", map_location="cpu")
    mapped.load_into(lambda state: optimizer.param_groups[0].update(history=torch.zeros(1)))
    assert not mapped.is_held_by(optimizer)
    mapped = mapped_state.MappedOptimizerState(folder / "optimizer.bin", map_location="cpu")
    mapped.load_into(
        lambda state: optimizer.param_groups[0].update(history=state["param_groups"][0]["history"])
    )
    assert mapped.is_held_by(optimizer)


def test_hooks_of_the_user_run_while_states_are_detached(
    saved_training: tuple[Path, list[torch.Tensor]],
) -> None:
    """torch walks through the hooks of all optimizers: none may go meanwhile."""
    accelerator, model, optimizer = training()
    accelerator.load_state(saved_training[0])
    (mapped,) = mapped_state.MappedOptimizerState.open_states
    assert mapped._thread is not None
    mapped._thread.join(60)
    calls: list[str] = []
    hook = register_optimizer_step_pre_hook(lambda *_: calls.append("user's"))
    step(accelerator, model, optimizer, 2.0)
    hook.remove()
    assert calls == ["user's"]
    assert not mapped_state.MappedOptimizerState.open_states


def test_what_the_optimizer_does_not_keep_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimizer of another format makes tensors of its own."""
    accelerator, model, optimizer = training(torch.bfloat16)
    step(accelerator, model, optimizer)
    folder = Path(accelerator.save_state(tmp_path / "a"))
    state = torch.load(folder / "optimizer.bin")
    wide = {k: {n: v.float() for n, v in s.items()} for k, s in state["state"].items()}
    torch.save({**state, "state": wide}, folder / "wide.bin")
    copied: list[int] = []
    monkeypatch.setattr(mapped_state, "read_pages", lambda *pages: copied.append(pages[-1]))
    mapped_state.MappedOptimizerState(folder / "wide.bin", map_location="cpu").load_into(
        optimizer.load_state_dict
    )
    mapped_state.MappedOptimizerState.wait_copied()
    assert sum(copied) < 64 * 1024, "the counters of steps at most; the moments have 4 MB"


def test_a_file_that_is_copied_is_not_memory_of_this_process(
    saved_training: tuple[Path, list[torch.Tensor]],
) -> None:
    """Limits of a scheduler on the resident set count pages of mapped files, too."""
    accelerator, _, _ = training()
    accelerator.load_state(saved_training[0])
    (mapped,) = mapped_state.MappedOptimizerState.open_states
    assert mapped._thread is not None
    mapped._thread.join(60)
    of_file = re.search(
        rf"^{mapped._mapping.start:x}-.*?^Rss: *(\d+) kB", Path("/proc/self/smaps").read_text(), re.M | re.S
    )
    assert of_file is not None
    assert int(of_file[1]) * 1024 < mapped._mapping.size / 4


@pytest.mark.parametrize("what", ["system", "disk", "device"])
def test_elsewhere_files_are_read_at_once(
    saved_training: tuple[Path, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "system":
        monkeypatch.setattr(mapped_state, "can_detach", lambda: False)
    if what == "disk":
        monkeypatch.setattr(mapped_state, "_file_system", lambda path: "nfs4")
    accelerator, _, optimizer = training()
    if what == "device":
        load, path = optimizer.optimizer.load_state_dict, saved_training[0] / "optimizer.bin"
        assert [mapped_state.can_map(path, device, load) for device in ("cpu", "meta")] == [True, False]
        return
    accelerator.load_state(saved_training[0])
    assert not mapped_state.MappedOptimizerState.open_states
    overwrite(saved_training[0])
    assert same(moments(optimizer), saved_training[1])


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("safe", [True, False])
def test_the_file_of_a_model_is_not_mapped_after_a_load(safe: bool, tmp_path: Path, no_gc: None) -> None:
    """Its disk space is free when it is removed, and its file system can be unmounted."""
    accelerator, model, _ = training()
    folder = Path(accelerator.save_state(tmp_path / "a", safe_serialization=safe))
    file = folder / ("model.safetensors" if safe else "pytorch_model.bin")
    accelerator.load_state(folder)
    assert not is_mapped(file)
    other = Accelerator(cpu=True)
    other.prepare(torch.nn.Linear(3, 3))
    with pytest.raises(CheckpointError):
        other.load_state(folder)
    assert not is_mapped(file)
    state = torch.load(file, mmap=True) if not safe else load_file(file)
    assert is_mapped(file), "so the lines above can fail"
    assert state.keys() == model.state_dict().keys()


def test_files_of_deepspeed_are_not_mapped_when_they_are_read(tmp_path: Path, no_gc: None) -> None:
    file = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": {"weight": torch.ones(2**16)}, "param_shapes": None}, file)
    checkpoint = ZeroCheckpoint(tmp_path)
    assert checkpoint.weights["weight"].sum() == 2**16
    assert is_mapped(file)
    del checkpoint
    assert not is_mapped(file)
