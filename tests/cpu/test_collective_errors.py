"""Failing together: what does not match, and who failed or ended, is the same error on all ranks, soon."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import accelerate.core.errors as errors
from accelerate.core.errors import CollectiveError, SettingError
from accelerate.utils import gather_object
from tests.support.command import Running, launch
from tests.support.free_ports import free_port
from tests.support.long_run import LONG_RUN, long_run_param
from tests.support.ranks import RankServer, same_on_all
from tests.support.scripts import run_to_exit
from tests.support.watchdog import peer_store, record_early_hints, speed_up_watchdog


def message(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(CollectiveError) as error:
        call(*arguments, **options)
    return str(error.value)


# ---------------------------------------------------------------- values


def many() -> int:
    """A long mixture of calls of all sizes, as a program with several loops makes them."""
    from accelerate import Accelerator
    from accelerate.utils import broadcast, gather_object

    accelerator = Accelerator()
    rank, chance = accelerator.process_index, random.Random(7)
    turn = 0
    for turn in range(250):
        rows, kind = chance.choice([0, 1, 3, 40, 5000, 40_000]), chance.choice("grbotp")
        like = torch.arange(rows * 2.0).reshape(rows, 2) + turn
        both = [like + 0.5 * r for r in range(2)]
        if kind == "g":
            assert torch.equal(accelerator.gather(both[rank]), torch.cat(both))
        elif kind == "r":
            assert torch.equal(accelerator.reduce(both[rank], "sum"), both[0] + both[1])
        elif kind == "b":
            assert torch.equal(broadcast(both[rank].clone(), turn % 2), both[turn % 2])
        elif kind == "o":
            assert gather_object(["x" * rows, rank]) == ["x" * rows, 0, "x" * rows, 1]
        elif kind == "t":
            found = accelerator.gather({"a": both[rank], "b": torch.tensor(rank)})
            assert torch.equal(found["a"], torch.cat(both))
            assert found["b"].tolist() == [0, 1]
        else:
            accelerator.wait_for_everyone()
            ragged = both[rank][: rows // (1 + rank)]
            assert torch.equal(accelerator.gather(ragged), torch.cat([both[0], both[1][: rows // 2]]))
    return turn


def test_values_of_all_sizes_arrive_whatever_was_sent_before(ranks: RankServer) -> None:
    assert ranks(2, many) == [249, 249]


def modes() -> list[float]:
    """A letter written in one mode of torch is written again in another."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    weight = torch.ones(2, requires_grad=True)
    found: list[float] = []
    for _ in range(3):
        with torch.inference_mode():
            found += accelerator.gather(torch.ones(2)).tolist()
        gathered = accelerator.gather(weight * 2)
        assert not gathered.requires_grad
        found += gathered.tolist()
    return found


def test_modes_of_torch_do_not_mix(ranks: RankServer) -> None:
    assert same_on_all(ranks(2, modes)) == [1.0, 1, 1, 1, 2, 2, 2, 2] * 3


# ---------------------------------------------------------------- calls that do not match


def other_order() -> list[str]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    x = torch.ones(3)
    first, second = accelerator.gather, accelerator.reduce
    if accelerator.process_index:
        first, second = second, first
    texts = [message(first, x), message(second, x)]
    accelerator.wait_for_everyone()  # they are in step again
    return texts


def test_collectives_in_another_order_are_detected_at_once(ranks: RankServer) -> None:
    """C5."""
    one, two = same_on_all(ranks(2, other_order))
    assert one.startswith("the ranks called different collectives\n")
    assert "rank 0: gather at test_collective_errors.py:" in one
    assert "rank 1: reduce(sum) at test_collective_errors.py:" in one
    assert "rank 0: reduce(sum) at test_collective_errors.py:" in two


def caught() -> str:
    from accelerate import Accelerator

    accelerator = Accelerator()
    try:
        if accelerator.process_index == 1:
            raise ValueError("caught")
        accelerator.gather(torch.ones(1))
    except ValueError:
        return message(accelerator.wait_for_everyone)
    except CollectiveError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_caught_an_error_and_goes_on_is_detected(ranks: RankServer) -> None:
    """C4."""
    text = same_on_all(ranks(2, caught))
    assert "rank 0: gather at test_collective_errors.py:" in text
    assert "rank 1: wait_for_everyone at test_collective_errors.py:" in text


def left_out(operation: str) -> str:
    """Rank 1 leaves out one of two equal calls, so that it comes to the next one sooner."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    x = torch.ones(1)
    try:
        if accelerator.process_index == 1:
            raise ValueError("caught")
        (accelerator.gather if operation == "gather" else accelerator.reduce)(x)
    except ValueError:
        pass
    try:
        (accelerator.gather if operation == "gather" else accelerator.reduce)(x)
        accelerator.wait_for_everyone()
    except CollectiveError as error:
        return str(error)
    return "nothing"


def meant() -> list[float]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    if accelerator.is_main_process:
        found = accelerator.gather(torch.zeros(1))
    else:
        found = accelerator.gather(torch.ones(1))
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.wait_for_everyone()
    return found.tolist()


@pytest.mark.parametrize("operation", ["gather", "reduce(sum)"])
def test_a_left_out_call_is_told_where_the_ranks_differ_at_last(ranks: RankServer, operation: str) -> None:
    """Equal calls from two lines may be meant; the error that follows a skipped one says where it began."""
    text = same_on_all(ranks(2, left_out, operation))
    first, earlier = text.split("before, they made a call from different lines")
    assert first.startswith("the ranks called different collectives\n")
    assert "rank 1: wait_for_everyone at test_collective_errors.py:" in first
    lines = re.findall(rf"rank (\d): {re.escape(operation)} at test_collective_errors.py:(\d+)", earlier)
    (zero, line), (one, later) = lines
    assert (zero, one) == ("0", "1")
    assert int(line) < int(later)
    assert same_on_all(ranks(2, meant)) == [0.0, 1.0]


def disagreements() -> dict[str, str]:
    from accelerate import Accelerator
    from accelerate.utils import broadcast, broadcast_object_list, gather_object

    accelerator = Accelerator()
    rank = accelerator.process_index
    two, three = torch.ones(2, 3), torch.ones(3, 3)
    mine = three if rank else two
    large = torch.ones(1000, 2000 + rank)
    found = {
        "reduce": message(accelerator.reduce, mine),
        "broadcast": message(broadcast, mine, 1),
        "large": message(accelerator.gather, {"x": large}),
        "key": message(accelerator.gather, {"a": {"b": two} if rank else {"b": two, "c": two}}),
        "type": message(accelerator.gather, [two, two if rank else [two]]),
        "order": message(accelerator.gather, {"a": two, "b": two} if rank else {"b": two, "a": two}),
    }
    if rank:
        with pytest.raises((TypeError, AttributeError)):
            gather_object([lambda: 0])
    else:
        found["object"] = message(gather_object, ["fine"])
    for source in (2, -1):
        for call, value in ((broadcast, two), (broadcast, large), (broadcast_object_list, [1])):
            with pytest.raises(SettingError, match=rf"from_process is {source}, but"):
                call(value, source)  # type: ignore[operator]
    accelerator.wait_for_everyone()
    return found


def test_what_the_ranks_disagree_about_is_shown_in_a_table(ranks: RankServer) -> None:
    """C2, also for reduce and broadcast, and for trees."""
    zero, one = ranks(2, disagreements)
    assert "rank 1 cannot send its object" in zero.pop("object")
    found = same_on_all([zero, one])
    for operation, label in (("reduce", "reduce(sum)"), ("broadcast", "broadcast")):
        assert f"a tensor to {label}\n  why: rank 0: torch.float32 (2, 3)\n" in found[operation]
        assert "rank 1: torch.float32 (3, 3)" in found[operation]
    assert "a tensor to gather, ['x']\n" in found["large"]
    assert "rank 1: torch.float32 (1000, 2001)" in found["large"]
    assert "at ['a']['c']\n  why: rank 0: a tensor\n       rank 1: nothing there" in found["key"]
    assert "at [1]" in found["type"]
    assert "different orders" in found["order"]


def disagree_in_a_tree() -> list[str]:
    """Rank 3 of five, a grandchild of rank 0, does something else."""
    from accelerate import Accelerator
    from accelerate.utils import broadcast

    accelerator = Accelerator()
    rank = accelerator.process_index
    many = [torch.ones(1)] * 100  # their description is sent as a digest
    texts = [
        message(accelerator.gather, [*many, torch.ones(1, 2 + (rank == 3))]),
        message(broadcast, torch.ones(2), int(rank == 3)),
        message(accelerator.wait_for_everyone) if rank == 3 else message(accelerator.reduce, torch.ones(1)),
    ]
    assert accelerator.reduce(torch.tensor(rank), "sum").item() == 10  # they are in step again
    assert gather_object([rank * "x" * 200_000]) == [r * "x" * 200_000 for r in range(5)]
    return texts


def test_disagreement_deep_in_the_tree_is_the_same_table_on_all_ranks(ranks: RankServer) -> None:
    shapes, sources, calls = same_on_all(ranks(5, disagree_in_a_tree))
    assert "a tensor to gather, [100]\n" in shapes
    assert shapes.count("torch.float32 (1, 2)") == 4
    assert "rank 3: torch.float32 (1, 3)" in shapes
    assert "the ranks broadcast from different ranks" in sources
    assert "rank 0: from rank 0, broadcast at test_collective_errors.py:" in sources
    assert "rank 3: from rank 1, broadcast at test_collective_errors.py:" in sources
    assert "rank 2: reduce(sum) at test_collective_errors.py:" in calls
    assert "rank 3: wait_for_everyone at test_collective_errors.py:" in calls


# ---------------------------------------------------------------- ranks that fail, end or stay away


SCRIPT = """
import sys, time, torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
rank, x = accelerator.process_index, torch.ones(3)
model = accelerator.prepare(torch.nn.Linear(3, 1))

def bad(batch):
    raise ValueError("a bad batch")

def train():
    accelerator.backward(model(x).sum())
"""
WAITS = {
    "gather": "accelerator.gather(x); bad(x) if rank == failing else accelerator.gather(x)",
    "barrier": "bad(x) if rank == failing else accelerator.wait_for_everyone()",
    "save": "bad(x) if rank == failing else accelerator.save_state('c')",
    "backward": "train(); bad(x) if rank == failing else train()",
}


def two_processes(text: str) -> list[tuple[int, str]]:
    """Exit status and stderr of two ranks that nobody watches: each ends by itself or not at all."""
    port = free_port()
    env: dict[str, object] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2}
    running = [
        Running([sys.executable], script_text=text, env={**env, "RANK": rank, "LOCAL_RANK": rank})
        for rank in range(2)
    ]
    ends = [each.wait(60) for each in running]
    return [(end.returncode, end.stderr.replace("[rank0]: ", "").replace("[rank1]: ", "")) for end in ends]


@pytest.mark.parametrize(
    ("how", "failing", "start"),
    [
        ("gather", 0, "forked"),
        ("barrier", 1, "forked"),
        ("save", 1, "forked"),
        ("backward", 1, "forked"),
        long_run_param("gather", 0, "own"),
    ],
)
def test_every_ranks_last_words_are_the_failing_ranks(
    ranks: RankServer, tmp_path: Path, how: str, failing: int, start: str
) -> None:
    """C3, without any launcher that would end them; in the long run in processes of their own too."""
    text = f"{SCRIPT}\nfailing = {failing}\n{WAITS[how]}\n"
    ends = two_processes(text) if start == "own" else run_to_exit(ranks, 2, text, tmp_path)
    for code, text in ends:
        assert code == 1
        assert text.rstrip().endswith("ValueError: a bad batch")
        assert "in bad\n" in text.rpartition("Traceback (most recent call last)")[2]
    waiting = ends[1 - failing][1]
    assert f"Error: rank {failing} failed: ValueError: a bad batch\n" in waiting


@pytest.mark.skipif(not LONG_RUN, reason="runs in `make test-all`")
def test_the_launcher_shows_the_failing_ranks_traceback_once_and_last() -> None:
    """C3, launched by our launcher."""
    result = launch("--cpu", "-n", "2", script_text=f"{SCRIPT}\nfailing = 1\n{WAITS['save']}\n")
    assert result.returncode == 1, result.output
    assert result.stderr.rstrip().endswith("ValueError: a bad batch")
    assert result.stderr.count("Traceback (most recent call last)") == 1
    ended = "rank 0 stopped after it: CheckpointPeerError: rank 1 failed: ValueError: a bad batch"
    assert ended in result.stderr


ONLY_MAIN = "if rank == 0: accelerator.save_state('c', sharded=True)\n"


def test_a_save_on_rank_0_alone_is_an_error_when_the_other_rank_ends(
    ranks: RankServer, tmp_path: Path
) -> None:
    """D3."""
    (code, text), (fine, _) = run_to_exit(ranks, 2, SCRIPT + ONLY_MAIN, tmp_path)
    assert (code, fine) == (1, 0)
    assert "was reached by 1 of 2 ranks" in text
    assert "rank 1 has ended" in text


def test_a_left_out_call_is_told_when_the_rank_that_left_it_out_has_ended(
    ranks: RankServer, tmp_path: Path
) -> None:
    script = f"{SCRIPT}\nif rank == 0:\n    accelerator.gather(x)\naccelerator.gather(x)\n"
    (code, text), (fine, _) = run_to_exit(ranks, 2, script, tmp_path)
    assert (code, fine) == (1, 0)
    assert "was reached by 1 of 2 ranks" in text
    assert "before, they made a call from different lines" in text
    assert "rank 1: gather at script.py:" in text


@pytest.mark.parametrize(("before", "place"), [(1, "a forward of the model"), (2, "backward")])
def test_a_save_on_rank_0_alone_is_an_error_on_both_when_the_other_trains_on(
    ranks: RankServer, tmp_path: Path, before: int, place: str
) -> None:
    """D3: the other waits in torch, in a step that rank 0 never comes to."""
    script = f"{SCRIPT}for _ in range({before}): train()\n{ONLY_MAIN}train()\n"
    ends = run_to_exit(ranks, 2, script, tmp_path)
    for code, text in ends:
        assert code == 1
        assert "was reached by 1 of 2 ranks" in text
        assert "rank 0 is in save_state" in text
        assert f"rank 1 is in {place} at script.py:" in text.rpartition("Error: ")[2]


def only_main(folder: str) -> str:
    from accelerate import Accelerator

    accelerator = Accelerator()
    accelerator.prepare(torch.nn.Linear(1, 1))
    save = partial(accelerator.save_state, sharded=True)
    call = save if accelerator.is_main_process else accelerator.gather
    return message(call, folder if accelerator.is_main_process else torch.ones(1))


def test_a_save_on_rank_0_alone_is_an_error_on_both_when_the_other_gathers(
    ranks: RankServer, tmp_path: Any
) -> None:
    """D3."""
    text = same_on_all(ranks(2, only_main, str(tmp_path / "c")))
    assert "rank 0: save_state" in text
    assert "rank 1: gather at test_collective_errors.py:" in text


def hinted() -> list[str]:
    from accelerate import Accelerator

    records = record_early_hints()
    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    records.clear()  # what a slow start of the other rank has brought
    if accelerator.process_index == 1:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            time.sleep(0.05)
    accelerator.wait_for_everyone()
    return records


def test_a_rank_that_waits_long_says_for_whom_once(ranks: RankServer) -> None:
    waiting, late = ranks(2, hinted)
    assert late == []
    [text] = waiting
    assert text.startswith("rank 0 has waited ")
    assert "in wait_for_everyone at test_collective_errors.py:" in text
    assert "rank 1 is at test_collective_errors.py:" in text


def queue_and_read(file: str) -> list[str]:
    """Rank 1 skips a collective; the others queue it, and wait where they read the device."""
    from accelerate import Accelerator

    records = record_early_hints()
    accelerator = Accelerator()
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    records.clear()
    work: Any = None
    if accelerator.process_index != 1:
        work = torch.distributed.all_reduce(total, async_op=True)
    else:
        threading.Timer(1.5, Path(file).touch).start()
    # A call in C, like item() of a tensor on a GPU.
    wait_in_c(file)
    if work is None:
        torch.distributed.all_reduce(total)
    else:
        work.wait()
    assert total.item() == accelerator.num_processes**2
    return records


def wait_in_c(file: str) -> None:
    """Stay at one instruction until there is the file."""
    lock = threading.Lock()
    lock.acquire()

    def release() -> None:
        wait_for_file(file)
        lock.release()

    threading.Thread(target=release, daemon=True).start()
    lock.acquire()


def test_a_rank_that_waits_for_the_device_names_the_rank_with_the_fewest_collectives(
    ranks: RankServer, tmp_path: Path
) -> None:
    """As under NCCL, where the host waits in ``item()`` and not in a call of torch.distributed."""
    first, behind, last = ranks(3, queue_and_read, str(tmp_path / "go"))
    assert behind == []
    for rank, records in ((0, first), (2, last)):
        [text] = records
        assert text.startswith(f"rank {rank} has been at the same instruction, test_collective_errors.py:")
        assert "after 2 collectives of torch; rank 1 has begun 1 of them, the fewest" in text


def stay_away(how: str, file: str) -> list[str]:
    """Rank 0 waits in torch for rank 1, until it has said so."""
    from accelerate import Accelerator

    records = record_early_hints()
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(3, 1))
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 3)).sum())
    pid = gather_object([os.getpid()])[1]
    records.clear()
    if accelerator.process_index == 0:
        threading.Thread(target=resume_when_told, args=(records, pid, file), daemon=True).start()
    elif how == "hangs":
        wait_for_file(file)
    elif how == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        next(iter(torch.utils.data.DataLoader(Stuck(file), num_workers=1)))
    accelerator.backward(model(torch.ones(2, 3)).sum())
    return records


class Stuck(torch.utils.data.Dataset[int]):
    """Its worker process waits, as one that is in a deadlock would."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        wait_for_file(self.file)
        return index


def wait_for_file(file: str) -> None:
    until = time.monotonic() + 30
    while not os.path.exists(file) and time.monotonic() < until:
        time.sleep(0.02)


def resume_when_told(records: list[str], pid: int, file: str) -> None:
    """Let rank 1 go on as soon as this rank has said that it waits."""
    until = time.monotonic() + 30
    while not records and time.monotonic() < until:
        time.sleep(0.02)
    Path(file).touch()
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("how", "shown"),
    [
        ("hangs", "in wait_for_file\n    time.sleep"),
        ("stops", "is stopped (SIGSTOP, Ctrl-Z or a debugger)"),
        ("loader", "in wait_for_file"),
    ],
)
def test_who_waits_in_torch_says_for_whom_and_where_that_rank_is(
    ranks: RankServer, tmp_path: Path, how: str, shown: str
) -> None:
    """G11: with the stack of a rank that answers, and the state of a process that does not."""
    waiting, late = ranks(2, stay_away, how, str(tmp_path / "file"))
    assert late == []
    [text] = waiting
    assert text.startswith("rank 0 has waited ")
    assert "in backward at test_collective_errors.py:" in text
    assert shown in text


def lose_peer_before_the_first_exchange() -> str:
    from accelerate import Accelerator

    speed_up_watchdog()
    accelerator = Accelerator()
    # A wait for the store alone: the control channel, which would break, is not open yet.
    peer_store().put(f"open/{accelerator.process_index}", "")
    peer_store().wait(["open/0", "open/1", "process/0", "process/1"], 20)
    if accelerator.process_index == 1:
        os._exit(3)
    return message(accelerator.wait_for_everyone)


def test_a_rank_killed_before_its_first_collective_is_noticed(ranks: RankServer) -> None:
    """G11: it is in no connection of the collectives of this package yet."""
    waiting, killed = ranks.outcomes(2, lose_peer_before_the_first_exchange, grace=60)
    assert killed.status == "died"
    assert waiting.status == "returned", waiting
    text = pickle.loads(waiting.value or b"")
    assert text.startswith(
        "rank 1 is gone while rank 0 was in wait_for_everyone at test_collective_errors.py:"
    )


SHARDED = {
    "fsdp2": (2, "fsdp_plugin=FullyShardedDataParallelPlugin()"),
    "fsdp1": (2, "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1)"),
    "hsdp": (4, "parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)"),
    "cp": (2, "parallelism_config=ParallelismConfig(cp_size=2)"),
}


@pytest.mark.parametrize("kind", SHARDED)
def test_a_rank_that_ends_well_while_others_wait_in_a_sharded_model_is_named(
    ranks: RankServer, tmp_path: Path, kind: str
) -> None:
    """G11: in groups of their own; all-gathers of a forward too."""
    world, argument = SHARDED[kind]
    imports = "from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig"
    script = SCRIPT.replace("from accelerate import Accelerator\n", imports + "\n")
    script = script.replace("cpu=True", f"cpu=True, {argument}")
    ends = run_to_exit(ranks, world, f"{script}\ntrain()\nif rank == 1: sys.exit(0)\ntrain()\n", tmp_path)
    assert [code for code, _ in ends] == [int(rank != 1) for rank in range(world)]
    for rank in set(range(world)) - {1}:
        message = ends[rank][1].rpartition("Error: ")[2]
        assert re.search(rf"was reached by [123] of {world} ranks", message), message
        assert "rank 1 has ended" in message


def stay_away_from_a_sharded_model(kind: str, file: str) -> list[str]:
    """The last rank hangs until rank 0 has said where that rank is."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.utils import PipelineParallelConfig, TorchTensorParallelConfig

    records = record_early_hints()
    arguments: dict[str, Any] = {
        "hsdp": {"dp_replicate_size": 2, "dp_shard_size": 2},
        "cp": {"cp_size": 2},
        "tp": {"tp_size": 2, "tp_handler": TorchTensorParallelConfig(plan={"0": "colwise", "1": "rowwise"})},
        "pp": {"pp_size": 2, "pp_handler": PipelineParallelConfig(num_microbatches=2)},
    }
    mesh = ParallelismConfig(**arguments[kind]) if kind in arguments else None
    plugin = FullyShardedDataParallelPlugin(fsdp_version=int(kind[-1])) if mesh is None else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=mesh)
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)))
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 3)).sum())
    pid = gather_object([os.getpid()])[-1]
    records.clear()
    if accelerator.is_main_process:
        threading.Thread(target=resume_when_told, args=(records, pid, file), daemon=True).start()
    elif accelerator.process_index == accelerator.num_processes - 1:
        wait_for_file(file)
    accelerator.backward(model(torch.ones(2, 3)).sum())
    return records


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("fsdp1", "a forward of the model|backward"),
        ("fsdp2", "a forward of the model|backward"),
        ("hsdp", "a forward of the model|backward"),
        ("cp", "a forward of the model|backward"),
        ("tp", "an exchange of distributed tensors"),
        ("pp", "[a-z_]*broadcast[a-z_]*|a transfer between stages|all_gather"),
    ],
)
def test_who_waits_in_a_sharded_model_says_for_whom(
    ranks: RankServer, tmp_path: Path, kind: str, call: str
) -> None:
    """G11: also where some wait in other groups than the first."""
    world = 4 if kind == "hsdp" else 2
    waiting, *_, late = ranks(world, stay_away_from_a_sharded_model, kind, str(tmp_path / "file"))
    assert late == []
    [text] = waiting
    assert re.match(rf"rank 0 has waited .* in ({call}) at test_collective_errors", text), text
    assert f"rank {world - 1} is at test_collective_errors.py:" in text
    assert "in wait_for_file" in text


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_ends_well_while_another_is_in_backward_is_named(
    ranks: RankServer, tmp_path: Path, leaver: int
) -> None:
    """G11: not the rank that waits, and not in raw words of gloo; also when the store ends with that rank."""
    script = f"{SCRIPT}\ntrain()\nif rank == {leaver}: sys.exit(0)\ntrain()\n"
    ends = run_to_exit(ranks, 2, script, tmp_path)
    assert [code for code, _ in ends] == [int(rank != leaver) for rank in range(2)]
    message = ends[1 - leaver][1].rpartition("Error: ")[2]
    assert "was reached by 1 of 2 ranks" in message
    assert f"rank {leaver} has ended" in message
    assert f"rank {1 - leaver} is in " in message


# ---------------------------------------------------------------- processes, threads, worlds


def interrupted() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    if accelerator.process_index == 1:
        assert peer_store().wait(["interrupted"], 30)
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        accelerator.wait_for_everyone()
    peer_store().put("interrupted", "")


def test_ctrl_c_ends_a_wait(ranks: RankServer) -> None:
    ranks(2, interrupted, timeout=20)


def forked() -> int:
    from accelerate import Accelerator

    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    child = os.fork()
    if child == 0:
        try:
            text = message(accelerator.wait_for_everyone)
            os._exit(0 if "takes no part" in text and threading.active_count() == 1 else 1)
        finally:
            os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    accelerator.wait_for_everyone()
    return status


def test_a_forked_process_is_no_rank(ranks: RankServer) -> None:
    assert ranks(2, forked) == [0, 0]


def reopened() -> tuple[list[float], int]:
    from accelerate import Accelerator

    found: list[float] = []
    for _ in range(2):
        accelerator = Accelerator()
        inner = Accelerator()
        found += inner.gather(torch.tensor([float(accelerator.process_index)])).tolist()
        accelerator.end_training()
        assert type(sys.excepthook).__name__ != "_WatchdogExceptHook"
    return found, threading.active_count()


def test_a_world_can_be_opened_again_and_leaves_nothing_behind(ranks: RankServer) -> None:
    assert same_on_all(ranks(2, reopened)) == ([0.0, 1.0, 0.0, 1.0], 1)


def lose_peer_before_first_collective() -> None:
    """Rank 0 ends when rank 1 has connected to it, and has not answered."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    if accelerator.process_index == 0:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = ["0" * 32, "127.0.0.1", listener.getsockname()[1]]
            peer_store().put("tree/0", json.dumps(address))
            listener.accept()
            raise ValueError("a bad batch")
    accelerator.gather(torch.ones(1))


def test_a_peer_that_is_gone_before_the_first_collective_is_named(ranks: RankServer) -> None:
    """C3: torch's own words for it name no rank."""
    first, second = ranks.outcomes(2, lose_peer_before_first_collective, grace=30)
    assert first.kind == "ValueError"
    assert issubclass(getattr(errors, second.kind, object), CollectiveError), second
    told = (
        "rank 0 failed: ValueError: a bad batch",
        "rank 0, or the launcher, is gone",
        "rank 0 is gone while rank 1 was in gather",
    )
    assert any(text in second.message for text in told), second


def lose_peer_while_the_group_opens() -> None:
    import torch.distributed as dist

    from accelerate import Accelerator

    def raise_reset(**arguments: object) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", raise_reset)
        Accelerator()


def test_a_peer_that_is_gone_while_the_group_opens_is_named(ranks: RankServer) -> None:
    """C3: a rank that has opened the group may fail before the others have."""
    for outcome in ranks.outcomes(2, lose_peer_while_the_group_opens, grace=30):
        assert issubclass(getattr(errors, outcome.kind, object), CollectiveError), outcome
        assert "is gone while rank" in outcome.message


def die_before_the_group_is_complete(moment: str) -> None:
    """Rank 1 is gone while it waits for rank 2, which never comes; or in torch's own part."""
    import torch.distributed as dist

    from accelerate import PartialState

    rank = int(os.environ["RANK"])
    if rank == 2:
        return
    if rank == 1 and moment == "waiting":
        open_store = dist.TCPStore

        def open_and_die(*args: object, **options: object) -> object:
            store = open_store(*args, **options)
            threading.Timer(1.0, os._exit, (3,)).start()  # it says first that it has come
            return store

        dist.TCPStore = open_and_die
    elif rank == 1:
        dist.init_process_group = lambda **_: os._exit(3)
    PartialState(cpu=True)


@pytest.mark.parametrize(("size", "moment"), [(3, "waiting"), (2, "opening")])
def test_a_rank_that_dies_before_the_group_is_complete_is_named(
    ranks: RankServer, size: int, moment: str
) -> None:
    """C3, G11: without a launcher too, in seconds and not at the timeout."""
    began = time.monotonic()
    first, second, *_ = ranks.outcomes(size, die_before_the_group_is_complete, moment, timeout=100, grace=80)
    assert time.monotonic() - began < 60
    assert second.status == "died"
    assert first.kind == "PeerError", first
    assert "rank 1 is gone while rank 0 was in the opening of the process group" in first.message


def die_when_the_group_is_open(dead: int) -> None:
    """A rank ends when both have opened the group, before it says so; the other is a second later."""
    import torch.distributed as dist

    from accelerate import Accelerator

    rank, default_store = int(os.environ["RANK"]), dist.distributed_c10d._get_default_store

    def die_or_wait() -> object:  # called first when the group is open
        time.sleep(0.5)  # the other may still open it: then that fails
        if rank == dead:
            os._exit(3)
        time.sleep(1.0)
        return default_store()

    dist.distributed_c10d._get_default_store = die_or_wait
    Accelerator(cpu=True).wait_for_everyone()


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_when_the_group_is_open_is_named(ranks: RankServer, dead: int) -> None:
    """The other waited for the timeout: for the host of the store, or for a process it did not know."""
    outcomes = ranks.outcomes(2, die_when_the_group_is_open, dead, timeout=100, grace=60)
    other = outcomes[1 - dead]
    assert outcomes[dead].status == "died"
    assert issubclass(getattr(errors, other.kind, object), CollectiveError), other
    assert f"rank {dead}" in other.message
    assert f"is gone while rank {1 - dead} was " in other.message


def wait_for_nobody(present: int) -> None:
    from accelerate import Accelerator, InitProcessGroupKwargs

    if int(os.environ["RANK"]) == present:
        Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=1))])


def test_a_rank_that_never_comes_is_named_at_the_timeout(ranks: RankServer) -> None:
    """C9: torch says how many came, and not who."""
    first, *_ = ranks.outcomes(3, wait_for_nobody, 0, grace=20)
    assert first.kind == "WorldError", first
    assert "1 of 3 ranks came to the process group within 1 s" in first.message
    assert "missing: rank 1, 2" in first.message


def test_a_store_that_nobody_hosts_is_no_error_of_torch(ranks: RankServer) -> None:
    """C9: rank 0 never comes, and the others have nowhere to say so."""
    _, second, _ = ranks.outcomes(3, wait_for_nobody, 1, grace=20)
    assert second.kind == "WorldError", second
    assert "found no store of the process group within 1 s" in second.message
    assert "rank 0 does not host it: " in second.message


def fail_and_end_training() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    try:
        if accelerator.process_index == 0:
            raise ValueError("bad row")
        accelerator.gather(torch.ones(1))
    finally:
        accelerator.end_training()


def test_a_rank_that_closes_its_world_as_it_fails_says_why(ranks: RankServer) -> None:
    """The interpreter knows of no error yet where a ``finally`` ends the training."""
    first, second = ranks.outcomes(2, fail_and_end_training, grace=20)
    assert (first.kind, second.kind) == ("ValueError", "PeerError"), second
    assert "ValueError: bad row" in second.message
