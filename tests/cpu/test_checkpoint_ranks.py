"""Saving and loading on several ranks: all succeed or all fail, and a killed rank loses nothing."""

from __future__ import annotations

import os
import pickle
import random
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from accelerate.checkpoint import load, save
from accelerate.checkpoint.discovery import ProjectConfiguration
from accelerate.checkpoint.layout import CheckpointContents, StatefulAdapter
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.checkpoint.registered_objects import gather_rank_shards, select_rank_shards
from accelerate.checkpoint.storage import FileRecord, LocalCheckpointStorage
from accelerate.core.errors import AccelerateError, CheckpointError, find_failed_rank
from accelerate.world import collective, rng
from accelerate.world import world as worlds
from tests.support.ranks import RankServer, same_on_all


def open_world(seconds: float = 30) -> worlds.World:
    return worlds.open(cpu=True, timeout=timedelta(seconds=seconds))


def parts(value: float = 0.0, rank: int = 0) -> CheckpointContents:
    """A model that is the same on all ranks and generators that are not."""
    rng.set_seed(int(value) * 10 + rank)
    torch.manual_seed(int(value))
    model = torch.nn.Linear(2, 2)
    torch.manual_seed(int(value) * 10 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=value + 1)
    return CheckpointContents([model], [optimizer], rng=True, step=int(value))


def draws() -> tuple[float, float]:
    return torch.rand(()).item(), random.random()


def outcome(call: Callable[[], object]) -> str:
    """The text of the error that a call raises, ``"fine"`` if none."""
    try:
        call()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


# ---------------------------------------------------------------- what the ranks exchange


def combine_here() -> list[Any]:
    """What rank 0 makes of values of any size, of labels that differ, and of what goes wrong."""
    world = open_world()

    sizes = [collective.combine_objects(bytes(count), _lengths, "test") for count in (3, 10**6 * world.rank)]
    label = f"on line {world.rank}"
    summed = collective.combine_objects(world.rank, sum, "test", label=label)
    with pytest.raises((collective.CollectiveError, TypeError, AttributeError)) as unsent:
        collective.combine_objects((lambda: 0) if world.rank == 1 else 0, sum, "test")
    with (
        pytest.raises(CheckpointError) as refused,
        CheckpointRankGroup.current().collective_section("try", max),
    ):
        pass  # None has no order
    collective.barrier()
    return [sizes, summed, str(refused.value), str(unsent.value)]


def _lengths(values: list[bytes]) -> list[int]:
    return [len(value) for value in values]


def test_rank_0_combines_values_for_all(ranks: RankServer) -> None:
    found = ranks(3, combine_here)
    assert all(each[:2] == found[0][:2] for each in found)
    sizes, summed, refused, unsent = found[0]
    assert sizes == [[3, 3, 3], [0, 10**6, 2 * 10**6]]
    assert summed == 3
    assert "rank 0 of 3: could not try" in refused
    assert "TypeError" in refused
    assert found[1][2] == found[2][2] == refused
    assert "rank 1 cannot send its object" in unsent
    assert found[2][3] == unsent


def combine_against_gather() -> str:
    world = open_world()
    combine, gather = partial(collective.combine_objects, 0, sum), partial(collective.all_gather_object, 0)
    with pytest.raises(collective.CollectiveError) as raised:
        (gather if world.rank == 1 else combine)("test")
    return str(raised.value)


def test_combining_meets_no_other_collective(ranks: RankServer) -> None:
    text = same_on_all(ranks(2, combine_against_gather))
    assert "rank 0: test on rank 0 at" in text
    assert "rank 1: test at" in text


def compare_here() -> dict[str, Any]:
    world = open_world()
    found: dict[str, Any] = {"same": collective.compare_objects({"a": 1, "b": bytes(10**6)}, "test")}
    values = collective.compare_objects([world.rank % 2], "test", label=f"on line {world.rank}")
    found |= {"values": values, "equal ones are one": values[0] is values[2]}
    found["sizes"] = [len(each) for each in collective.compare_objects(bytes(10**6 * world.rank), "test")]
    with pytest.raises(collective.CollectiveError) as raised:
        collective.compare_objects(0, "test" if world.rank else "another test")
    return {**found, "other calls": str(raised.value)}


def test_ranks_compare_values_and_send_those_that_differ(ranks: RankServer) -> None:
    found = same_on_all(ranks(3, compare_here))
    assert found.pop("same") == [{"a": 1, "b": bytes(10**6)}]
    text = found.pop("other calls")
    assert "rank 0: another test at" in text
    assert "rank 2: test at" in text
    assert found == {"values": [[0], [1], [0]], "equal ones are one": True, "sizes": [0, 10**6, 2 * 10**6]}


def count_bytes_of_a_save(folder: str) -> tuple[int, int, bool]:
    """Bytes of values that this rank sends and gets in a sharded save; is a large transfer's group open."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.world import control_channel

    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT"),
    )
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(40)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), foreach=False))
    accelerator.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    tree = control_channel.channel().tree
    exchange, sent, received = tree.exchange, 0, 0

    def counted(header: bytes, values: bytearray, *rest: Any) -> Any:
        nonlocal sent, received
        answer = exchange(header, values, *rest)
        sent, received = sent + len(values), received + len(answer.values)
        return answer

    tree.exchange = counted  # type: ignore[method-assign]
    accelerator.save_state(folder)
    first = sent
    accelerator.save_state(folder)  # the same plan: it is not sent again
    assert sent - first < first * 0.6
    return first, received, control_channel.channel()._group is not None


def test_what_a_rank_gets_in_a_sharded_save_does_not_grow_with_the_world(
    ranks: RankServer, tmp_path: Path
) -> None:
    """Plans and reports of all ranks go to rank 0 alone: at 1,024 ranks those of a 7B model are 270 MB."""
    two, four = (ranks(size, count_bytes_of_a_save, str(tmp_path / str(size))) for size in (2, 4))
    for size, found in ((2, two), (4, four)):
        assert not any(is_open for *_, is_open in found), size
        for rank, (sent, received, _) in enumerate(found):
            assert sent > 20_000, (size, rank)  # its plan and its report
            assert received < 4_000, (size, rank)
    growth = [four[rank][1] - two[rank][1] for rank in range(2)]
    assert max(growth) < 600, growth  # two bits for each of the 320 items that a rank plans, and the rest


# ---------------------------------------------------------------- round trips


def save_here(folder: str) -> tuple[str, tuple[float, float]]:
    world = open_world()
    path = save.save(parts(3, world.rank), folder if world.is_main else f"{folder}-of-rank-{world.rank}")
    return str(path), draws()


def load_here(folder: str) -> tuple[int, torch.Tensor, float, tuple[float, float], tuple[str, ...]]:
    world = open_world()
    fresh = parts(8, world.rank)
    loaded = load.load(fresh, folder)
    lr = fresh.optimizers[0].param_groups[0]["lr"]
    return loaded.step, fresh.models[0].weight.detach(), lr, draws(), loaded.notes


def test_two_ranks_save_and_load_one_checkpoint(ranks: RankServer, tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    saved = ranks(2, save_here, folder)
    assert [path for path, _ in saved] == [folder, folder]  # rank 0's folder counts
    assert sorted(os.listdir(folder)) == [
        "manifest.json", "model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl",
    ]  # fmt: skip
    assert os.listdir(tmp_path) == ["c"]
    loaded = ranks(2, load_here, folder)
    step, weight, lr = same_on_all([values[:3] for values in loaded])
    assert (step, lr) == (3, 4.0)
    assert torch.equal(weight, parts(3).models[0].weight)
    assert [values[3] for values in loaded] == [d for _, d in saved]
    assert loaded[0][3] != loaded[1][3]
    assert loaded[0][4] == ()


def test_another_number_of_ranks_keeps_what_it_can_and_says_so(ranks: RankServer, tmp_path: Path) -> None:
    """Saved by 2, loaded by 1 and by 3: rank 2's random numbers are derived, the same on every load."""
    folder = str(tmp_path / "c")
    saved = ranks(2, save_here, folder)
    (one,) = ranks(1, load_here, folder)
    assert one[3] == saved[0][1]
    assert "saved by 2 process(es), loaded by 1" in one[4][0]
    three, again = ranks(3, load_here, folder), ranks(3, load_here, folder)
    assert [v[3] for v in three] == [v[3] for v in again]
    assert [v[3] for v in three[:2]] == [d for _, d in saved]
    assert len({v[3] for v in three}) == 3
    assert "rank 2 and above are derived" in three[0][4][0]


def save_numbered(folder: str) -> list[str]:
    world = open_world()
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    names = [save.save(parts(step, world.rank), project=project).name for step in range(4)]
    again = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    loaded = load.load(parts(9, world.rank), project=again)
    names.append(f"{loaded.path.name} {loaded.step} {again.iteration}")
    names.append(save.save(parts(5, world.rank), project=again).name)
    return names


def test_two_ranks_number_and_prune_together(ranks: RankServer, tmp_path: Path) -> None:
    """D4, D5."""
    names = same_on_all(ranks(2, save_numbered, str(tmp_path)))
    assert names == [*(f"checkpoint_{i}" for i in range(4)), "checkpoint_3 3 4", "checkpoint_4"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_3", "checkpoint_4"]


class PerRank:
    """A loader or engine with a state of its own on each rank."""

    name = "engine"

    def __init__(self, value: int = -1) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]

    def save(self, folder: Path) -> list[str]:
        name = f"engine/rank{self.value}.txt"
        (folder / "engine").mkdir(exist_ok=True)
        (folder / name).write_text(str(self.value))
        return [name]

    def load(self, folder: Path) -> None:
        world = worlds.current()
        assert world is not None
        self.value = int((folder / f"engine/rank{world.rank}.txt").read_text())


def states_of_ranks(folder: str) -> tuple[int, int, dict[str, int]]:
    rank = open_world().rank
    path = save.save(CheckpointContents(stateful_loaders=[PerRank(rank)], own_files=[PerRank(rank)]), folder)
    loader, engine = PerRank(), PerRank()
    loaded = load.load(CheckpointContents(stateful_loaders=[loader], own_files=[engine]), path)
    assert loaded.manifest is not None
    return loader.value, engine.value, {name: r.rank for name, r in loaded.manifest.files.items()}


def test_states_that_differ_between_ranks_come_back_to_their_rank(ranks: RankServer, tmp_path: Path) -> None:
    zero, one = ranks(2, states_of_ranks, str(tmp_path / "c"))
    assert (zero[:2], one[:2]) == ((0, 0), (1, 1))
    assert zero[2] == {
        "dl_state_dict.bin": 0, "dl_state_dict_rank1.bin": 1, "engine/rank0.txt": 0, "engine/rank1.txt": 1,
    }  # fmt: skip


# ---------------------------------------------------------------- failing together


class BrokenDisk(LocalCheckpointStorage):
    """Fails when it is asked to write a file."""

    def write(self, name: str, fill: Callable[[Path], None]) -> FileRecord:
        def fail_to_write(path: Path) -> None:
            raise OSError(5, "Input/output error")

        return super().write(name, fail_to_write)


def refuse() -> Any:
    raise ZeroDivisionError("an object of the user")


def fail_on(fail_to_write: int, how: str, folder: str) -> tuple[str, list[str]]:
    rank = open_world().rank
    mine = parts(4, rank)
    store: Callable[[Path], LocalCheckpointStorage] = LocalCheckpointStorage
    if rank == fail_to_write and how == "disk":
        store = BrokenDisk
    if rank == fail_to_write and how == "object":
        mine.schedulers = [StatefulAdapter("mine", refuse, dict)]
    if rank == fail_to_write and how == "engine":
        mine.own_files = [FailingOwnFiles()]

    def attempt() -> None:
        with pytest.raises(AccelerateError) as caught:
            save.save(mine, folder, store=store)
        # Only the rank that failed is a cause.
        assert find_failed_rank(caught.value) == (None if rank == fail_to_write else fail_to_write)
        raise caught.value

    text = outcome(attempt)
    collective.barrier()
    left = sorted(os.listdir(Path(folder).parent))
    # All is in order afterwards: the same ranks save again.
    assert outcome(lambda: save.save(parts(5, rank), folder)) == "fine"
    return text, left


class FailingOwnFiles(PerRank):
    def save(self, folder: Path) -> list[str]:
        raise ZeroDivisionError("an object of the user")


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("how", ["disk", "object", "engine"])
def test_a_failure_on_one_rank_is_the_same_error_on_all(
    ranks: RankServer, tmp_path: Path, how: str, broken: int
) -> None:
    folder = str(tmp_path / "c")
    ranks(2, save_here, folder)
    text, left = same_on_all(ranks(2, fail_on, broken, how, folder))
    kind = "FileAccessError" if how == "disk" else "CheckpointError"
    assert text.startswith(f"{kind}: rank {broken} of 2: ")
    if how == "disk":
        assert "random_states_1.pkl" in text or broken == 0
        assert "Input/output error" in text
    else:
        assert "ZeroDivisionError: an object of the user" in text
    assert left == ["c"]  # no folder of the failed save


def save_too_much(folder: str, safe: bool, optimizer: bool) -> str:
    import resource

    open_world()
    model = torch.nn.Linear(1000, 1000, bias=False)
    mine = CheckpointContents([torch.nn.Linear(1, 1)], [model]) if optimizer else CheckpointContents([model])
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    return outcome(lambda: save.save(mine, folder, safe_serialization=safe))


@pytest.mark.parametrize(
    ("safe", "optimizer", "file"),
    [(True, False, "model.safetensors"), (False, False, "pytorch_model.bin"), (True, True, "optimizer.bin")],
)
def test_a_file_system_that_takes_no_more_is_an_error_that_names_the_file(
    ranks: RankServer, tmp_path: Path, safe: bool, optimizer: bool, file: str
) -> None:
    """The operating system really refuses; what was there stays."""
    folder = tmp_path / "c"
    ranks(1, save_here, str(folder))
    (text,) = ranks(1, save_too_much, str(folder), safe, optimizer)
    assert text.startswith("FileAccessError: cannot write ")
    assert file in text
    assert os.listdir(tmp_path) == ["c"]
    assert value_in(folder) == (3, 4.0)


def save_in(folder: str) -> str:
    rank = open_world().rank
    return outcome(lambda: save.save(parts(1, rank), folder))


def test_a_folder_that_takes_no_files_is_named(ranks: RankServer) -> None:
    text = same_on_all(ranks(2, save_in, "/proc/c"))
    assert "ranks 0-1 of 2: cannot make the folder /proc/.c.tmp-" in text


def load_damaged(folder: str) -> tuple[str, bool]:
    rank = open_world().rank
    fresh = parts(8, rank)
    weight = fresh.models[0].weight.detach().clone()
    text = outcome(lambda: load.load(fresh, folder))
    return text, torch.equal(fresh.models[0].weight, weight)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.bin", "random_states_1.pkl", "manifest.json"]
)
@pytest.mark.parametrize("how", ["flip", "remove"])
def test_damage_is_the_same_error_on_all_ranks(
    ranks: RankServer, tmp_path: Path, name: str, how: str
) -> None:
    """D2: also when one rank alone would read the file."""
    folder = tmp_path / "c"
    ranks(2, save_here, str(folder))
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    saved_at = (folder / name).stat().st_mtime_ns
    (folder / name).write_bytes(data)
    os.utime(folder / name, ns=(saved_at, saved_at))  # a newer one counts as written anew by a program
    if how == "remove":
        (folder / name).unlink()
    text, unchanged = same_on_all(ranks(2, load_damaged, str(folder)))
    if how == "remove" and name in ("manifest.json", "random_states_1.pkl"):
        # What is left is a folder of the public format, or lacks what training can go on without.
        assert text == "fine"
        return
    assert text.startswith(("CheckpointError: rank 0 of 2: ", "CheckpointError: rank 1 of 2: "))
    assert name in text
    assert unchanged


def only_rank_0(folder: str) -> str:
    world = open_world(seconds=5)
    if world.rank == 0:
        return outcome(lambda: save.save(parts(), folder))
    return "not called"


def test_a_save_on_rank_0_alone_ends_with_the_reason(ranks: RankServer, tmp_path: Path) -> None:
    """D3: within the timeout of the group."""
    text, _ = ranks(2, only_rank_0, str(tmp_path / "c"))
    assert "save the checkpoint" in text
    assert "was reached by 1 of 2 ranks within 5 s" in text
    assert "on every rank" in text
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- killed


class Deadly(LocalCheckpointStorage):
    """Kills its own process at the n-th operation, for real."""

    left = 0

    @classmethod
    def tick(cls) -> None:
        cls.left -= 1
        if cls.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, name: str, fill: Callable[[BinaryIO], Any]) -> FileRecord:
        def half(file: BinaryIO) -> None:
            whole = BytesIO()
            fill(whole)
            data = whole.getvalue()
            file.write(data[: len(data) // 2])
            self.tick()
            file.write(data[len(data) // 2 :])

        self.tick()
        return super().write(name, half)

    def rename(self, source: str, target: str) -> None:
        self.tick()
        super().rename(source, target)

    def remove(self, name: str) -> None:
        self.tick()
        super().remove(name)


def save_and_die(folder: str, victim: int, at: int) -> str:
    rank = open_world().rank
    Deadly.left = at if rank == victim else 0
    return outcome(lambda: save.save(parts(5, rank), folder, store=Deadly))


def value_in(folder: Path) -> tuple[int, float]:
    fresh = parts(8)
    loaded = load.load(fresh, folder, ranks=CheckpointRankGroup())
    return loaded.step, fresh.optimizers[0].param_groups[0]["lr"]


def test_a_process_killed_at_any_write_loses_nothing(ranks: RankServer, tmp_path: Path) -> None:
    """D1, with SIGKILL."""
    folder = tmp_path / "c"
    seen = set()
    for at in range(1, 100):
        save.save(parts(3), folder, ranks=CheckpointRankGroup())
        (end,) = ranks.outcomes(1, save_and_die, str(folder), 0, at)
        value = value_in(folder)
        seen.add(value)
        assert value in {(3, 4.0), (5, 6.0)}
        if end.status == "returned":
            break
        assert "SIGKILL" in end.message
    assert at > 10
    assert value == (5, 6.0)
    assert len(seen) == 2
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize(("victim", "at"), [(0, 2), (0, 7), (0, 9), (1, 1), (1, 2)])
def test_a_killed_rank_loses_nothing_and_its_peer_is_told(
    ranks: RankServer, tmp_path: Path, victim: int, at: int
) -> None:
    """D1, with SIGKILL on one rank of two; the next save succeeds and clears what was left."""
    folder = tmp_path / "c"
    ranks(2, save_here, str(folder))
    ends = ranks.outcomes(2, save_and_die, str(folder), victim, at, grace=30)
    assert "SIGKILL" in ends[victim].message
    peer = ends[1 - victim]
    assert peer.status == "returned", peer
    text = pickle.loads(peer.value or b"")
    assert "save the checkpoint" in text
    assert "gone" in text
    value = value_in(folder)
    assert value in {(3, 4.0), (5, 6.0)}
    ranks(2, save_here, str(folder))
    assert value_in(folder) == (3, 4.0)
    assert os.listdir(tmp_path) == ["c"]


# ---------------------------------------------------------------- a disk per machine


def machine(rank: int) -> CheckpointRankGroup:
    """Two machines of one process each."""
    return CheckpointRankGroup(rank, 2, local_rank=0, local_size=1, node=rank)


def each_node(folder: str, mixed: bool) -> tuple[list[str], str]:
    rank = open_world().rank
    mine = Path(folder) / f"node{rank}"
    project = ProjectConfiguration(str(mine), save_on_each_node=True, automatic_checkpoint_naming=True)
    path = save.save(parts(3, rank), project=project, ranks=machine(rank))
    if mixed and rank == 1:
        save.save(parts(4), path, ranks=CheckpointRankGroup())
    if rank == 0:
        return sorted(os.listdir(path)), outcome(lambda: load.load(parts(8, 0), path, ranks=machine(0)))
    return sorted(os.listdir(path)), outcome(lambda: load.load(parts(8, 1), path, ranks=machine(1)))


def test_each_machine_may_have_a_whole_checkpoint(ranks: RankServer, tmp_path: Path) -> None:
    zero, one = ranks(2, each_node, str(tmp_path), False)
    shared = ["manifest.json", "model.safetensors", "optimizer.bin"]
    assert zero == ([*shared, "random_states_0.pkl"], "fine")
    assert one == ([*shared, "random_states_1.pkl"], "fine")


def load_after_crash_of_a_machine(folder: str) -> str:
    """Load a named checkpoint that the second machine was replacing when it lost power."""
    rank = open_world().rank
    mine, project = Path(folder) / f"node{rank}" / "last", ProjectConfiguration(save_on_each_node=True)
    save.save(parts(3, rank), mine, project=project, ranks=machine(rank))
    if rank == 1:
        mine.rename(mine.parent / ".last.old-aaaaaaaaaaaa")
    return outcome(lambda: load.load(parts(8, rank), mine, project=project, ranks=machine(rank)))


def test_a_commit_that_was_interrupted_on_one_machine_is_mended_by_a_load(
    ranks: RankServer, tmp_path: Path
) -> None:
    assert ranks(2, load_after_crash_of_a_machine, str(tmp_path)) == ["fine", "fine"]
    assert os.listdir(tmp_path / "node1") == ["last"]


def gather_own(each_node: bool) -> tuple[list[float], float | None]:
    """The shards of both ranks where they are saved, and what this rank gets of them."""
    rank, shape = open_world().rank, torch.Size([2])
    state = {"average": torch.full(shape, float(rank)), "equal": torch.zeros(2)}
    gathered = gather_rank_shards(state, {shape}, "an average", each_node=each_node)
    (shards,) = gathered["accelerate_rank_shards"].values() or [[]]
    own = select_rank_shards(gathered, machine(rank), "the file")["average"] if shards else None
    return [each[0].item() for each in shards], None if own is None else own[0].item()


def test_shards_of_a_registered_object_are_saved_on_each_machine(ranks: RankServer) -> None:
    assert ranks(2, gather_own, False) == [([0.0, 1.0], 0.0), ([], None)]
    assert ranks(2, gather_own, True) == [([0.0, 1.0], 0.0), ([0.0, 1.0], 1.0)]


def test_machines_with_different_checkpoints_do_not_mix_them(ranks: RankServer, tmp_path: Path) -> None:
    text = same_on_all([text for _, text in ranks(2, each_node, str(tmp_path), True)])
    assert "rank 1 of 2" in text
    assert "is another checkpoint here than on rank 0" in text
