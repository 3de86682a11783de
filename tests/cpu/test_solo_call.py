"""G15: ``if accelerator.is_main_process: accelerator.save_state(...)``, as scripts of diffusers write it."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate.core.errors import AccelerateError, CheckpointError, CollectiveError
from tests.support.ranks import RanksError, RankServer, same_on_all
from tests.support.scripts import run_to_exit
from tests.support.watchdog import speed_up_watchdog

NOTE = "save_state on the main process alone: the random states"


class Training:
    """Four batches or more of each rank."""

    def __init__(self, **options: Any) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True, **options)
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        rows = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
        loader = DataLoader(rows, batch_size=4, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.batches = iter(self.loader)

    def step(self) -> None:
        x, y = next(self.batches)
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward((self.model(x) - y).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> list[float]:
        return next(self.model.parameters()).detach().flatten().tolist()


def on_some_ranks(folder: str, callers: list[int]) -> tuple[list[str], list[float], list[float]]:
    """Ranks ``callers`` save after one step; what is said, the weights then, and those after a load."""
    training = Training()
    rank = training.accelerator.process_index
    training.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank in callers:
            assert training.accelerator.save_state(folder) == Path(folder)
    saved = training.weights()
    training.step()
    assert training.weights() != saved
    training.accelerator.wait_for_everyone()
    training.accelerator.load_state(folder)
    loaded = training.weights()
    # The ranks are in step again: whatever comes now is made together.
    training.accelerator.save_state(f"{folder}-joint")
    training.step()
    return [str(each.message) for each in caught], saved, loaded


@pytest.mark.parametrize(("size", "callers"), [(2, [0]), (3, [0]), (3, [0, 2]), (2, [0, 1])])
def test_the_main_process_saves_alone(
    ranks: RankServer, tmp_path: Path, size: int, callers: list[int]
) -> None:
    told, saved, loaded = zip(*ranks(size, on_some_ranks, str(tmp_path / "c"), callers), strict=True)
    assert same_on_all(saved) == same_on_all(loaded), "the checkpoint holds what all had"
    is_solo = len(callers) < size
    assert [NOTE in text for text in told[0]] == [True] * is_solo, told[0]
    assert not any(told[1:])
    files = set(os.listdir(tmp_path / "c"))
    assert {"model.safetensors", "optimizer.bin", "random_states_0.pkl", "manifest.json"} <= files
    assert ("random_states_1.pkl" in files) is not is_solo
    assert "random_states_1.pkl" in os.listdir(tmp_path / "c-joint")
    assert sorted(os.listdir(tmp_path)) == ["c", "c-joint"], "nothing is left"


def after_the_end(folder: str, callers: list[int], named: bool) -> tuple[str, str, list[Path]]:
    """What rank ``callers`` can do when the group is gone; the end of kohya's scripts."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(folder, automatic_checkpoint_naming=named, total_limit=2)
    training = Training(project_config=project)
    accelerator = training.accelerator
    rank = accelerator.process_index
    training.step()
    evaluated = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8)), batch_size=2))
    if named:
        accelerator.save_state()
    weights = training.weights()
    accelerator.end_training()
    before = repr(accelerator.state)
    assert (PartialState().process_index, AcceleratorState().num_processes) == (rank, 2), "no group is opened"
    with accelerator.split_between_processes([10, 11]) as own:
        assert own == [10 + rank]
    assert [batch.tolist() for (batch,) in evaluated] == [
        [2 * rank, 2 * rank + 1],
        [2 * rank + 4, 2 * rank + 5],
    ]
    with pytest.warns(UserWarning, match="waits for nobody"):
        accelerator.wait_for_everyone()
    saved: list[Path] = []
    if rank in callers:
        saved = [Path(accelerator.save_state(f"{folder}/end{n}")) for n in range(2)]
        accelerator.save_model(training.model, f"{folder}/model")
        accelerator.save(accelerator.get_state_dict(training.model), f"{folder}/weights.bin")
        if rank == 0:
            next(training.model.parameters()).data.zero_()
            accelerator.load_state(str(saved[-1]))
            assert training.weights() == weights
    with pytest.raises(CollectiveError, match="the process group is closed") as error:
        accelerator.gather(torch.ones(1))
    accelerator.end_training()
    return before, str(error.value), saved


@pytest.mark.parametrize(("callers", "named"), [([0], False), ([0, 1], False), ([0], True), ([0, 1], True)])
def test_the_main_process_saves_after_the_end_of_the_training(
    ranks: RankServer, tmp_path: Path, callers: list[int], named: bool
) -> None:
    """As in 1.x, the state and the numbers of the ranks outlive the group; nothing there waits for a rank."""
    (text, error, saved), other = ranks(2, after_the_end, str(tmp_path), callers, named)
    assert "Num processes: 2" in text
    assert "end_training() or destroy_process_group() was called before" in error
    place = tmp_path / "checkpoints"
    names = ["checkpoint_1", "checkpoint_2"]
    assert saved == [place / name if named else tmp_path / f"end{n}" for n, name in enumerate(names)]
    if named:
        assert sorted(os.listdir(place)) == names, "of three, the newest two"
    assert other[2] == (saved if len(callers) == 2 else [])
    assert {"model.safetensors", "optimizer.bin", "random_states_0.pkl"} <= set(os.listdir(saved[-1]))
    assert torch.load(tmp_path / "weights.bin").keys() == {"weight", "bias"}
    assert os.listdir(tmp_path / "model") == ["model.safetensors"]


def sharded_after_the_end(folder: str) -> list[str]:
    from accelerate import FullyShardedDataParallelPlugin

    training = Training(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    training.accelerator.end_training()
    errors: list[str] = []
    for call in (training.accelerator.save_state, partial(training.accelerator.save_model, training.model)):
        with pytest.raises(AccelerateError) as error:
            call(folder)
        errors.append(str(error.value))
    return errors


def test_shards_are_not_saved_after_the_end_of_the_training(ranks: RankServer, tmp_path: Path) -> None:
    state, model = same_on_all(ranks(2, sharded_after_the_end, str(tmp_path)))
    assert "call save_state before end_training()" in state
    assert "the process group is closed" in model
    assert not os.listdir(tmp_path)


class Counter:
    """An object of the user's."""

    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def with_all_that_a_script_saves(folder: str) -> tuple[list[str], int, int, list[float]]:
    """Two saves from one line; what is said, what is loaded, and random numbers after two loads."""
    training, counter = Training(), Counter()
    accelerator = training.accelerator
    schedule = torch.optim.lr_scheduler.StepLR(training.optimizer.optimizer, 5)
    schedule = accelerator.prepare(schedule)
    accelerator.register_for_checkpointing(counter)
    seen: list[str] = []
    accelerator.register_save_state_pre_hook(lambda models, weights, output: seen.append(output))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for number in range(2):
            training.step()
            schedule.step()
            counter.count += 1
            if accelerator.is_main_process:
                accelerator.save_state(f"{folder}/{number}")
    assert len(seen) == 2 * accelerator.is_main_process
    training.step()
    drawn: list[float] = []
    for _ in range(2):
        counter.count = 9
        accelerator.load_state(f"{folder}/1")
        drawn.append(torch.rand(()).item())
    return [str(each.message) for each in caught], counter.count, schedule.scheduler.last_epoch, drawn


def test_all_that_a_script_saves_needs_the_main_process_alone(ranks: RankServer, tmp_path: Path) -> None:
    """It is said once; the others load what they did not save, and random states of their own."""
    first, second = ranks(2, with_all_that_a_script_saves, str(tmp_path))
    assert [NOTE in text for text in first[0]] == [True]
    assert second[0] == []
    assert first[1:3] == second[1:3] == (2, 4)
    assert first[3][0] == first[3][1] != second[3][0] == second[3][1]


def numbered(folder: str, in_background: bool) -> tuple[list[int], list[str]]:
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(
        folder, automatic_checkpoint_naming=True, total_limit=2, async_save=in_background
    )
    training = Training(project_config=project)
    numbers: list[int] = []
    for count in range(3):
        training.step()
        if training.accelerator.is_main_process:
            training.accelerator.save_state()
        numbers.append(training.accelerator.save_iteration)
        if count == 1:
            training.step()
            training.accelerator.save_state()
    training.accelerator.wait_for_checkpoint()
    training.accelerator.wait_for_everyone()
    training.accelerator.load_state()
    numbers.append(training.accelerator.save_iteration)
    return numbers, sorted(os.listdir(f"{folder}/checkpoints"))


@pytest.mark.parametrize("in_background", [False, True])
def test_numbers_go_on_where_some_saves_are_by_the_main_process(
    ranks: RankServer, tmp_path: Path, in_background: bool
) -> None:
    zero, one = ranks(2, numbered, str(tmp_path), in_background)
    assert zero == ([1, 2, 4, 4], ["checkpoint_2", "checkpoint_3"])
    assert one == ([0, 0, 3, 4], ["checkpoint_2", "checkpoint_3"])


def after_another_run(folder: str) -> tuple[str, int]:
    """Ranks 0 and 2 save in a folder with a checkpoint of another run; what they are told."""
    from accelerate.utils import ProjectConfiguration

    training = Training(project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True))
    accelerator = training.accelerator
    accelerator.project_configuration.iteration = 5
    accelerator.save_state()
    accelerator.project_configuration.iteration = 0
    training.step()
    address = "" if accelerator.process_index == 1 else str(accelerator.save_state())
    training.step()
    return address, accelerator.save_iteration


@pytest.mark.filterwarnings("ignore:.*has checkpoints of another run")
def test_all_that_call_get_the_number_that_the_main_process_chooses(
    ranks: RankServer, tmp_path: Path
) -> None:
    zero, one, two = ranks(3, after_another_run, str(tmp_path))
    assert zero == two == (str(tmp_path / "checkpoints" / "checkpoint_6"), 7)
    assert one == ("", 0)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_5", "checkpoint_6"]


def while_others_wait_in_a_group_of_the_user(folder: str) -> None:
    """The watchdog counts no collectives of such a group. Rank 2 computes for a while before it saves."""
    speed_up_watchdog()
    training = Training()
    group = torch.distributed.new_group(backend="gloo")
    training.step()
    if training.accelerator.process_index == 2:
        time.sleep(1)
    if training.accelerator.process_index != 1:
        training.accelerator.save_state(folder)
    torch.distributed.barrier(group=group)
    training.accelerator.save_state(f"{folder}-joint")


def test_the_main_process_saves_while_others_wait_in_a_group_of_the_user(
    ranks: RankServer, tmp_path: Path
) -> None:
    ranks(3, while_others_wait_in_a_group_of_the_user, str(tmp_path / "c"), timeout=20)
    assert "random_states_1.pkl" not in os.listdir(tmp_path / "c")
    assert "random_states_2.pkl" in os.listdir(tmp_path / "c-joint")


class Numbers(IterableDataset[torch.Tensor]):
    """A stream, which the main process reads for all."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(128.0).view(-1, 1))


def in_a_loop_over_a_stream(folder: str) -> float:
    """Return the seconds of the longest save.

    In the next micro-batch the gradients are not reduced, so the other ranks wait for data alone.
    """
    from accelerate import Accelerator

    accelerator, longest = Accelerator(cpu=True, gradient_accumulation_steps=2), 0.0
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Numbers(), batch_size=2))
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        began = time.monotonic()
        if number == 5 and accelerator.is_main_process:
            accelerator.save_state(f"{folder}/alone")
        if number == 8 and accelerator.is_main_process:
            time.sleep(1.5)  # the others wait for it, and come to the next save when they have their batch
        if number == 9:
            accelerator.save_state(f"{folder}/joint")
        if number == 13 and accelerator.is_main_process:
            accelerator.save_model(model, f"{folder}/model")
        longest = max(longest, time.monotonic() - began)
    return longest


def test_ranks_that_wait_for_its_next_batch_do_not_hold_up_the_main_process(
    ranks: RankServer, tmp_path: Path
) -> None:
    longest = ranks(2, in_a_loop_over_a_stream, str(tmp_path), timeout=60)
    assert max(longest) < 8, "it does not wait until they have stood still for ten seconds"
    assert "random_states_1.pkl" not in os.listdir(tmp_path / "alone")
    assert "random_states_1.pkl" in os.listdir(tmp_path / "joint")
    assert (tmp_path / "model" / "model.safetensors").is_file()


AT_THE_END = """
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    if accelerator.is_main_process:
        accelerator.save_state("last")
"""


def test_the_last_save_of_a_script_does_not_wait_for_ranks_that_have_ended(
    ranks: RankServer, tmp_path: Path
) -> None:
    ends = run_to_exit(ranks, 2, AT_THE_END, tmp_path)
    assert [code for code, _ in ends] == [0, 0], ends
    assert (tmp_path / "last" / "manifest.json").is_file()


def exported(folder: str, version: int) -> tuple[bool, bool]:
    from accelerate import FullyShardedDataParallelPlugin

    plugin = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=version)} if version else {}
    training = Training(**plugin)
    # Beside sharded models, only one that was never prepared, such as a moving average.
    model = nn.Linear(4, 1) if version else training.model
    file = Path(folder) / "model.safetensors"
    training.step()
    if training.accelerator.is_main_process:
        training.accelerator.save_model(model, folder)
    alone = file.is_file()
    training.step()
    file.unlink(missing_ok=True)
    training.accelerator.wait_for_everyone()
    training.accelerator.save_model(model, folder)
    training.accelerator.save_model(training.model, folder)
    return alone, file.is_file()


@pytest.mark.parametrize("version", [0, 1, 2])
def test_the_main_process_exports_weights_alone(ranks: RankServer, tmp_path: Path, version: int) -> None:
    """And where all call, the file is there for all."""
    (alone, together), (_, also) = ranks(2, exported, str(tmp_path / "m"), version)
    assert (alone, together, also) == (True, True, True)


def exported_to_a_file(strategy: str, folder: str) -> tuple[str, str]:
    """All export to a folder that cannot be made; the type and text of the error."""
    from accelerate import FullyShardedDataParallelPlugin

    training = Training(**{"fsdp_plugin": FullyShardedDataParallelPlugin()} if strategy == "fsdp" else {})
    training.step()
    try:
        training.accelerator.save_model(training.model, folder)
    except CheckpointError as error:
        training.accelerator.wait_for_everyone()
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_raise_why_the_weights_were_not_exported(
    ranks: RankServer, tmp_path: Path, strategy: str
) -> None:
    (tmp_path / "file").write_text("")
    kind, text = same_on_all(ranks(2, exported_to_a_file, strategy, str(tmp_path / "file" / "m")))
    assert kind != "CheckpointPeerError"
    assert "rank 0 of 2: " in text
    assert "Not a directory" in text


def in_a_window(folder: str) -> list[str]:
    training = Training(gradient_accumulation_steps=2)
    training.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if training.accelerator.is_main_process:
            training.accelerator.save_state(folder)
    training.step()
    return [str(each.message) for each in caught]


def test_open_gradients_of_the_others_cannot_be_saved(ranks: RankServer, tmp_path: Path) -> None:
    said, _ = ranks(2, in_a_window, str(tmp_path / "c"))
    assert len(said) == 2
    assert NOTE in said[0]
    assert "in the middle of an accumulation window" in said[1]


def on_another_rank(folder: str) -> None:
    training = Training()
    training.step()
    if training.accelerator.process_index == 1:
        training.accelerator.save_state(folder)
    training.step()


def test_another_rank_does_not_save_alone(ranks: RankServer, tmp_path: Path) -> None:
    with pytest.raises(RanksError) as info:
        ranks(2, on_another_rank, str(tmp_path / "c"))
    outcome = info.value.outcomes[1]
    assert outcome.kind == "CheckpointPeerError"
    assert "rank 1 called save_state, rank 0 did not" in outcome.message
    assert "test_solo_call.py" in outcome.message, "where rank 0 is"
    assert os.listdir(tmp_path) == []


def with_an_error_that_is_caught(folder: str) -> str:
    """Rank 1 saves while rank 0 does not, and both go on; all save later."""
    training, error = Training(), ""
    training.step()
    if training.accelerator.process_index == 1:
        try:
            training.accelerator.save_state(folder)
        except CheckpointError as raised:
            error = str(raised)
    training.step()
    training.accelerator.save_state(folder)
    training.step()
    return error


def test_a_save_that_failed_is_no_part_of_the_next_one(ranks: RankServer, tmp_path: Path) -> None:
    zero, one = ranks(2, with_an_error_that_is_caught, str(tmp_path / "c"), timeout=20)
    assert zero == ""
    assert "rank 1 called save_state, rank 0 did not" in one
    assert (tmp_path / "c" / "random_states_1.pkl").is_file()


def killed(folder: str) -> None:
    training = Training()
    training.step()
    if not training.accelerator.is_main_process:
        os._exit(9)
    training.accelerator.save_state(folder)


def test_a_rank_that_is_killed_meanwhile_is_named(ranks: RankServer, tmp_path: Path) -> None:
    outcome, _ = ranks.outcomes(2, killed, str(tmp_path / "c"), grace=30)
    assert outcome.kind == "CheckpointPeerError"
    assert "rank 1 is gone while rank 0 was in save_state at test_solo_call.py:" in outcome.message
    assert os.listdir(tmp_path) == []


def sharded(folder: str) -> None:
    from accelerate import FullyShardedDataParallelPlugin

    training = Training(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    training.step()
    if training.accelerator.is_main_process:
        training.accelerator.save_state(folder)
    training.step()


def test_where_states_are_sharded_every_rank_must_call(ranks: RankServer, tmp_path: Path) -> None:
    with pytest.raises(RanksError) as info:
        ranks(2, sharded, str(tmp_path / "c"))
    text = "\n".join(outcome.message for outcome in info.value.causes())
    assert "if accelerator.is_main_process" in text
    assert os.listdir(tmp_path) == []
