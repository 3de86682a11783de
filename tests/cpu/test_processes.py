"""Process control on two processes: who runs what, who goes first, and what they agree on."""

from __future__ import annotations

import os
import sys
import warnings
from collections import UserDict, deque, namedtuple
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate import Accelerator
from accelerate.core.errors import CheckpointError, CollectiveError, PrepareError, WorldError
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    gather_object,
)
from tests.support.ranks import RankServer, same_on_all

# What the rank server imports once for this module.
PRELOAD = ("pandas",)
Triple = namedtuple("Triple", "a b c")


def _decorated() -> dict[str, Any]:
    state = PartialState(cpu=True)
    found: dict[str, Any] = {}

    class Report:
        name = "r"

        @state.on_main_process
        def main(self, value: int, *, twice: bool = False) -> tuple[str, int]:
            """Says it."""
            return self.name, value * (2 if twice else 1)

        @state.on_process(process_index=1)
        def second(self) -> str:
            return self.name

    report = Report()
    found["method"] = report.main(3, twice=True)
    found["other"] = report.second()
    found["doc"] = (Report.main.__name__, Report.main.__doc__)
    for name in ("on_main_process", "on_local_main_process", "on_last_process"):
        found[name] = getattr(state, name)(lambda: "ran")()
    found["on_local_process"] = state.on_local_process(lambda: "ran", local_process_index=1)()
    found["nobody"] = state.on_process(lambda: "ran", process_index=7)()
    found["called"] = state.on_main_process()(lambda: "ran")()
    return found


def test_functions_and_methods_run_where_they_are_asked_to(ranks: RankServer) -> None:
    first, second = ranks(2, _decorated)
    assert first["doc"] == second["doc"] == ("main", "Says it.")
    assert (first["method"], second["method"]) == (("r", 6), None)
    assert (first["other"], second["other"]) == (None, "r")
    ran = ("on_main_process", "on_local_main_process", "on_last_process", "on_local_process", "called")
    assert [first[name] for name in ran] == ["ran", "ran", None, None, "ran"]
    assert [second[name] for name in ran] == [None, None, "ran", "ran", None]
    assert first["nobody"] is second["nobody"] is None


def _threads() -> int:
    """Open a world on a machine of 64 cores, of which a scheduler gives this process two."""
    torch.set_num_threads(7)
    with (
        patch("psutil.cpu_count", return_value=64),
        patch("os.sched_getaffinity", return_value={8, 9}, create=True),
    ):
        PartialState(cpu=True)
    return torch.get_num_threads()


def _own_group(method: str, local_ranks: list[str] | None, hosts: list[str]) -> tuple[int, ...]:
    """Open a process group by hand, without the variables of a launcher but for ``LOCAL_RANK``."""
    import torch.distributed as dist

    from accelerate.logging import get_logger

    rank, port = int(os.environ["RANK"]), os.environ["MASTER_PORT"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        os.environ.pop(name, None)
    if local_ranks is not None:
        os.environ["LOCAL_RANK"] = local_ranks[rank]
    dist.init_process_group("gloo", init_method=method.format(port=port), rank=rank, world_size=2)
    get_logger(__name__).warning("said before there is a state")
    with patch("socket.gethostname", return_value=hosts[rank]):
        state = PartialState(cpu=True)
    assert gather_object([state.process_index]) == [0, 1]
    world = state.world
    return state.process_index, state.local_process_index, world.local_size, world.node, world.nodes


@pytest.mark.parametrize(
    ("local_ranks", "hosts", "places"),
    [
        (["0", "1"], ["one", "one"], [(0, 0, 2, 0, 1), (1, 1, 2, 0, 1)]),
        (["1", "0"], ["one", "one"], [(0, 1, 2, 0, 1), (1, 0, 2, 0, 1)]),
        (["0", "0"], ["one", "other"], [(0, 0, 1, 0, 2), (1, 0, 1, 1, 2)]),
        (None, ["one", "other"], [(0, 0, 1, 0, 2), (1, 0, 1, 1, 2)]),
    ],
)
def test_a_group_that_the_program_has_opened_counts(
    ranks: RankServer,
    tmp_path: Path,
    local_ranks: list[str] | None,
    hosts: list[str],
    places: list[tuple[int, ...]],
) -> None:
    """With ``LOCAL_RANK`` as the program has set it, on one machine or on several."""
    assert ranks(2, _own_group, f"file://{tmp_path}/store", local_ranks, hosts) == places


def test_ranks_that_have_met_at_a_loopback_address_share_a_machine(ranks: RankServer) -> None:
    places = ranks(2, _own_group, "tcp://127.0.0.1:{port}", ["0", "1"], ["one", "other"])
    assert places == [(0, 0, 2, 0, 1), (1, 1, 2, 0, 1)]


def _alone_in_own_group(path: str) -> str:
    import torch.distributed as dist

    rank, timeout = int(os.environ["RANK"]), timedelta(seconds=2)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    dist.init_process_group("gloo", f"file://{path}", timeout, rank=rank, world_size=2)
    if rank == 0:
        with pytest.raises(WorldError) as error:
            PartialState(cpu=True)
        return str(error.value)
    return ""


def test_a_rank_of_an_opened_group_that_does_not_come_is_named(ranks: RankServer, tmp_path: Path) -> None:
    said, _ = ranks(2, _alone_in_own_group, str(tmp_path / "store"))
    assert "1 of 2 ranks of the process group have not come: 1" in said


def test_processes_use_the_cores_that_they_are_bound_to(ranks: RankServer) -> None:
    assert ranks(2, _threads, env={"OMP_NUM_THREADS": None}) == [2, 2]


def _in_order(path: str) -> tuple[str, bool]:
    state = PartialState(cpu=True)
    with state.main_process_first(), state.local_main_process_first():
        if state.is_main_process:
            with open(path, "w") as file:
                file.write("downloaded")
        state.wait_for_everyone()  # these meet the entries and exits of the other rank
        state.wait_for_everyone()
        with open(path) as file:
            text = file.read()
    assert gather_object([state.process_index]) == [0, 1]

    decorator: Any = state.main_process_first()

    @decorator
    def again() -> bool:
        return True

    return text, again()


def test_the_main_process_goes_first(ranks: RankServer, tmp_path: Any) -> None:
    assert ranks(2, _in_order, str(tmp_path / "data")) == [("downloaded", True)] * 2


def _fails_first(local: bool) -> tuple[str, str, list[int]]:
    """The error is caught on both, so that both must have heard of it; then they work together again."""
    accelerator = Accelerator(cpu=True)
    block = accelerator.local_main_process_first if local else accelerator.main_process_first
    entered, kind, text = False, "", ""
    try:
        with block():
            entered = True
            if accelerator.is_main_process:
                raise FileNotFoundError("no such data set")
    except (FileNotFoundError, CollectiveError) as error:
        kind, text = type(error).__name__, str(error)
    assert entered is accelerator.is_main_process
    return kind, text, accelerator.gather(torch.tensor([accelerator.process_index])).tolist()


@pytest.mark.parametrize("local", [False, True])
def test_an_error_of_who_goes_first_is_told_to_the_others(ranks: RankServer, local: bool) -> None:
    first, second = ranks(2, _fails_first, local, timeout=20)
    assert first == ("FileNotFoundError", "no such data set", [0, 1])
    assert second[0] == "PeerError"
    assert "rank 0 failed in a block that it ran first: FileNotFoundError: no such data set" in second[1]
    assert 'raise FileNotFoundError("no such data set")\nFileNotFoundError: no such data set' in second[1]
    assert second[2] == [0, 1]


def _fails_after_barrier() -> tuple[bool, str, list[int]]:
    """Two machines of two ranks; rank 0 fails between two barriers, in which the others are."""
    node, local = divmod(int(os.environ["RANK"]), 2)
    os.environ.update(LOCAL_RANK=str(local), LOCAL_WORLD_SIZE="2", GROUP_RANK=str(node))
    state, entered, kind = PartialState(cpu=True), False, ""
    try:
        with state.local_main_process_first():
            entered = True
            state.wait_for_everyone()
            if state.is_main_process:
                raise FileNotFoundError("no such data set")
            state.wait_for_everyone()
    except (FileNotFoundError, CollectiveError) as error:
        kind = type(error).__name__
    return entered, kind, gather_object([state.process_index])


def test_an_error_after_a_barrier_in_such_a_block_is_told_to_the_others(ranks: RankServer) -> None:
    first, *others = ranks(4, _fails_after_barrier, timeout=20)
    assert first == (True, "FileNotFoundError", [0, 1, 2, 3])
    assert others == [(True, "PeerError", [0, 1, 2, 3])] * 3


def _barrier_of_one_rank() -> str:
    accelerator = Accelerator(cpu=True)
    try:
        with accelerator.main_process_first():
            if accelerator.is_main_process:
                accelerator.wait_for_everyone()
        accelerator.wait_for_everyone()
    except CollectiveError as error:
        return str(error)
    return ""


def test_a_barrier_of_one_rank_in_such_a_block_is_an_error(ranks: RankServer) -> None:
    text = same_on_all(ranks(2, _barrier_of_one_rank, timeout=20))
    assert text.startswith("the ranks called different collectives")
    assert "rank 0: main_process_first at" in text
    assert "rank 1: wait_for_everyone at" in text


def _fails_second() -> str:
    accelerator = Accelerator(cpu=True)
    caught = ""
    try:
        with accelerator.main_process_first():
            if not accelerator.is_main_process:
                raise KeyError("column")
    except KeyError as error:
        caught = str(error)
    accelerator.wait_for_everyone()
    return caught


def test_an_error_of_who_comes_second_is_its_own(ranks: RankServer) -> None:
    assert ranks(2, _fails_second, timeout=20) == ["", "'column'"]


def _checkpoint_in_turn(folder: str, local: bool) -> list[Any]:
    """Save, load, save and export in such blocks; what was restored on this rank, and the checkpoints."""
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    block = accelerator.local_main_process_first if local else accelerator.main_process_first
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    torch.manual_seed(accelerator.process_index)
    accelerator.save_state()
    drawn, weights = torch.rand(2), [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.zero_()
    with block():
        accelerator.load_state()
    is_restored = [torch.equal(*pair) for pair in zip(weights, model.parameters(), strict=True)]
    is_restored += [torch.equal(torch.rand(2), drawn), len(optimizer.state_dict()["state"]) == 2]
    said = (
        pytest.warns(UserWarning, match="main process alone")
        if accelerator.is_main_process
        else nullcontext()
    )
    with block(), said:
        accelerator.save_state()
        accelerator.save_model(model, f"{folder}/export")
    accelerator.save_state()
    with pytest.raises(CollectiveError if accelerator.process_index else CheckpointError), block():
        accelerator.load_state(f"{folder}/none")
    return [is_restored, sorted(os.listdir(f"{folder}/checkpoints")), os.listdir(f"{folder}/export")]


@pytest.mark.parametrize("local", [False, True])
def test_checkpoints_are_saved_and_loaded_by_one_process_after_the_other(
    ranks: RankServer, tmp_path: Path, local: bool
) -> None:
    """As in 1.x, where no rank waits for another one there. Random states are those of the rank."""
    restored, checkpoints, exported = same_on_all(ranks(2, _checkpoint_in_turn, str(tmp_path), local))
    assert restored == [True] * 4
    assert checkpoints == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert exported == ["model.safetensors"]


def _first_save_in_turn(folder: str) -> list[str]:
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(torch.nn.Linear(2, 1))
    with accelerator.main_process_first():
        saved = [accelerator.save_state() for _ in range(2)]
    return [os.path.basename(path) for path in (*saved, accelerator.save_state())]


def test_ranks_that_save_in_turn_number_from_the_checkpoints_of_another_run(
    ranks: RankServer, tmp_path: Path
) -> None:
    """The second rank looks into the folder when the first one has saved there."""
    accelerator = Accelerator(
        project_config=ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, iteration=5)
    )
    accelerator.save_state()
    names = same_on_all(ranks(2, _first_save_in_turn, str(tmp_path)))
    assert names == ["checkpoint_6", "checkpoint_7", "checkpoint_8"]


def _trigger() -> list[bool]:
    accelerator = Accelerator(cpu=True)
    found = [accelerator.check_trigger()]
    if accelerator.process_index == 1:
        accelerator.set_trigger()
    return [*found, accelerator.check_trigger(), accelerator.check_trigger()]


def test_a_trigger_of_one_process_is_seen_by_all_once(ranks: RankServer) -> None:
    assert same_on_all(ranks(2, _trigger)) == [False, True, False]


class Table:
    """Stands for a ``datasets.Dataset``: slicing gives columns, ``select`` gives a table."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> Any:
        return {"x": self.rows[key]}

    def select(self, positions: list[int]) -> Table:
        return Table([self.rows[position] for position in positions])


def _split() -> dict[str, Any]:
    import pyarrow

    class Polars:
        """Stands for a table of polars: ``select`` takes columns, and a list of numbers rows."""

        columns = ("x",)

        def select(self, columns: list[str]) -> Any:
            raise AssertionError(columns)

        def __len__(self) -> int:
            return 3

        def __getitem__(self, rows: list[int]) -> list[int]:
            return [row + 1 for row in rows]

    state = PartialState(cpu=True)
    sys.modules["datasets"] = SimpleNamespace(Dataset=Table)  # type: ignore[assignment]

    def part(items: Any, **options: Any) -> Any:
        with state.split_between_processes(items, **options) as mine:
            return mine

    arrow = pyarrow.table({"x": [1, 2, 3], "y": [4, 5, 6]})
    found: dict[str, Any] = {
        "arrow": part(arrow).to_pydict(),
        "padded arrow": part(arrow, apply_padding=True).to_pydict(),
        "polars": part(Polars()),
        "text": part("prompt"),
        "range": part(range(5)),
        "padded range": part(range(5), apply_padding=True),
        "table": part(Table([1, 2, 3])).rows,
        "padded table": part(Table([1, 2, 3]), apply_padding=True).rows,
        "dict": part({"prompt": ["a", "b", "c"], "style": "short"}),
        "nested": part({"ids": [1, 2, 3], "more": {"mask": (4, 5, 6)}}),
        "padded tuple": part((1, 2, 3), apply_padding=True),
        "nothing": part([], apply_padding=True),
    }
    with pytest.raises(PrepareError, match="int cannot be split"):
        part(5)
    for values in ({"a": [1], "b": [1, 2]}, {"a": {"b": [1]}, "c": [1, 2]}):
        with pytest.raises(PrepareError, match=r"different lengths: \[1, 2\]"):
            part(values)
    return found


def test_what_can_be_split_and_what_cannot(ranks: RankServer) -> None:
    first, second = ranks(2, _split)
    assert first["text"] == second["text"] == "prompt"
    assert (first["range"], second["range"]) == (range(3), range(3, 5))
    assert (first["padded range"], second["padded range"]) == (range(3), [3, 4, 4])
    assert (first["table"], second["table"]) == ([1, 2], [3])
    assert second["padded table"] == [3, 3]
    assert first["arrow"] == {"x": [1, 2], "y": [4, 5]}
    assert second["padded arrow"] == {"x": [3, 3], "y": [6, 6]}
    assert (first["polars"], second["polars"]) == ([1, 2], [3])
    assert first["dict"] == {"prompt": ["a", "b"], "style": "short"}
    assert second["dict"] == {"prompt": ["c"], "style": "short"}
    assert first["nested"] == {"ids": [1, 2], "more": {"mask": (4, 5)}}
    assert second["padded tuple"] == (3, 3)
    assert first["nothing"] == second["nothing"] == []


def _afresh() -> tuple[Any, ...]:
    """Two accelerators of different settings, and a start from nothing in between."""
    one = Accelerator(cpu=True, gradient_accumulation_steps=2)
    two = Accelerator(cpu=True, mixed_precision="bf16")
    views = one.mixed_precision, two.mixed_precision, AcceleratorState().mixed_precision
    steps = one.gradient_accumulation_steps, two.gradient_accumulation_steps
    AcceleratorState._reset_state(reset_partial_state=True)
    gone = hasattr(PartialState, "_shared_state") and PartialState._shared_state == {}
    state = PartialState(cpu=True)
    return views, steps, gone, state.num_processes, state._shared_state["num_processes"]


def test_several_accelerators_and_a_fresh_start(ranks: RankServer) -> None:
    assert same_on_all(ranks(2, _afresh)) == (("no", "bf16", "bf16"), (2, 1), True, 2, 2)


def _continued() -> tuple[Any, ...]:
    """``Accelerator()`` of one rank alone, as in a library; the others make none."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    again = Accelerator() if accelerator.is_main_process else accelerator
    accelerator.wait_for_everyone()
    state = AcceleratorState()
    return again.distributed_type, state.distributed_type, state.fsdp_plugin is accelerator.state.fsdp_plugin


def test_another_accelerator_is_sharded_alike(ranks: RankServer) -> None:
    fsdp = DistributedType.FSDP
    assert same_on_all(ranks(2, _continued)) == (fsdp, fsdp, True)


def _containers() -> dict[str, Any]:
    import pandas as pd

    state = PartialState(cpu=True)

    def part(items: Any, **options: Any) -> Any:
        with state.split_between_processes(items, **options) as mine:
            return mine

    pair = part(UserDict(a=[1, 2, 3]))
    frame = part(pd.DataFrame({"a": [1, 2, 3]}), apply_padding=True)
    subset = part(TensorDataset(torch.arange(3)), apply_padding=True)
    found = {
        "array": part(np.arange(5), apply_padding=True).tolist(),
        "rows": part(np.arange(6.0).reshape(3, 2), apply_padding=True).tolist(),
        "mapping": (type(pair).__name__, dict(pair)),
        "frame": (type(frame).__name__, frame["a"].tolist()),
        "subset": (type(subset).__name__, [int(row[0]) for row in subset]),
        "deque": list(part(deque([1, 2, 3]))),
        "named tuple": part(Triple(1, 2, 3), apply_padding=True),
    }
    for items in ({1, 2}, {"a": frozenset({1, 2})}):
        with pytest.raises(PrepareError, match="it has no order"):
            part(items)
    return found


class SizedStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(2))

    def __len__(self) -> int:
        return 2


def _unsplit() -> list[str]:
    """Give what has a length and no positions, and return the warnings."""
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(TensorDataset(torch.arange(3)), batch_size=2)
    pairs = {"a": 1, "b": 2}.items()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for items in (loader, pairs, SizedStream(), accelerator.prepare(loader)):
            with accelerator.split_between_processes(items) as whole:
                assert whole is items
        with accelerator.split_between_processes({"x": [1, 2], "y": pairs}, apply_padding=True) as part:
            assert part == {"x": [1 + accelerator.process_index], "y": pairs}
    return [str(each.message) for each in caught]


def test_what_has_no_positions_is_given_whole_with_a_warning(ranks: RankServer) -> None:
    warned, others = ranks(2, _unsplit)
    kinds = (
        "reads all of the DataLoader",
        *(f"has the whole {kind}" for kind in ("dict_items", "SizedStream")),
    )
    assert [kind in message for kind, message in zip((*kinds, kinds[1]), warned, strict=True)] == [True] * 4
    assert "accelerator.prepare(loader)" in warned[0]
    assert others == []


def test_any_container_is_split_in_its_kind(ranks: RankServer) -> None:
    zero, one = ranks(2, _containers)
    assert zero == {
        "array": [0, 1, 2],
        "rows": [[0.0, 1.0], [2.0, 3.0]],
        "mapping": ("UserDict", {"a": [1, 2]}),
        "frame": ("DataFrame", [1, 2]),
        "subset": ("Subset", [0, 1]),
        "deque": [1, 2],
        "named tuple": (1, 2),
    }
    assert one == {
        "array": [3, 4, 4],
        "rows": [[4.0, 5.0], [4.0, 5.0]],
        "mapping": ("UserDict", {"a": [3]}),
        "frame": ("DataFrame", [3, 3]),
        "subset": ("Subset", [2, 2]),
        "deque": [3],
        "named tuple": (3, 3),
    }
