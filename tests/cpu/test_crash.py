"""Killed at every write of a save: a resume finds the checkpoint before it or the new one, whole."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path, PurePosixPath

import pytest

from tests.support import tracer
from tests.support.command import start
from tests.support.crash import Place, Recovered, Training, recover_all
from tests.support.long_run import LONG_RUN, long_run_param
from tests.support.ranks import RankServer, same_on_all
from tests.support.tracer import Change

pytestmark = pytest.mark.skipif(bool(tracer.available()), reason=tracer.available())

OLD, NEW = 2, 3  # the values of the trainings that save the older and the newer checkpoint
Prints = dict[int, dict[str, str]]


@pytest.fixture
def shm(tmp_path: Path) -> Generator[Path]:
    """A folder in memory if there is one: the killed leave the same there, and flushing costs nothing."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="accelerate-crash-", dir=memory))
    yield folder
    shutil.rmtree(folder)


def begin(place: Place) -> Prints:
    """The state before the save that is interrupted; and what its checkpoints, and the next, hold."""
    place.folder.mkdir(parents=True, exist_ok=True)
    prints = {}
    for value in (1, OLD):
        training = Training(value, place)
        training.move(place, value - 1)
        prints[value] = training.prints()
        if place.kind != "first":
            training.save()
    if place.kind == "fixed" and training.accelerator.is_main_process:
        (place.root / "run" / "notes.txt").write_text("mine")
    training = Training(NEW, place)
    return {**prints, NEW: training.prints()}


def check(recovered: Recovered, place: Place, prints: Prints) -> int:
    """Assert what must hold after any crash; return which checkpoint was loaded, 0 for none."""
    hidden = [name for name in recovered.before if name.startswith(".")]
    kept = [name for name in recovered.after if name.startswith(".")]
    assert not kept, f"the next save left {kept}"
    assert recovered.again
    if recovered.error:
        assert place.kind == "first", recovered.error
        assert recovered.error.startswith("CheckpointNotFoundError"), recovered.error
        assert recovered.prints == recovered.untouched
        return 0
    values = [value for value, expected in prints.items() if expected == recovered.prints]
    assert values, f"a mixture, of {[[n for n in p if p[n] == recovered.prints[n]] for p in prints.values()]}"
    assert values[0] in (OLD, NEW), "not the last that was committed"
    mine = ["notes.txt"] if place.kind == "fixed" else []
    assert recovered.inside == [[f"config{values[0]}.json", *mine], ["config5.json", *mine]], (
        "files got mixed"
    )
    if not place.automatic:
        assert recovered.after == ["run"]
        return values[0]
    assert recovered.name == f"checkpoint_{values[0] - 1}"
    assert f"checkpoint_{OLD - 1}" in recovered.before, "the last committed one is never removed"
    told = hidden if place.root.name != "node1" else []  # rank 0 names what is on its machine
    assert [
        name
        for name in told
        if ".lock" not in name and not any(i.startswith(f"{name} (") for i in recovered.ignored)
    ] == []
    assert len(recovered.before) - len(hidden) >= 2, "removed before the new one was committed"
    if place.kind == "each node":  # a machine that had committed keeps what the others have not, for a while
        assert recovered.after[-1] == recovered.saved
        assert len(recovered.after) == 2
    else:
        assert recovered.after == [recovered.name, recovered.saved]
    return values[0]


def is_repeated(before: list[Change], change: Change) -> bool:
    """Return True for a change that finds the disk much as an earlier one did.

    torch makes hundreds of small writes, which only make an incomplete file longer. And below a folder that
    is not a checkpoint, only the manifest and the first file that is made, written or removed count by
    default.
    """
    last = before[-1] if before else change
    if change.size < 64 and last is not change and (last.call, last.path) == ("write", change.path):
        return True
    path = PurePosixPath(change.path)
    hidden = [name for name in path.parent.parts if name.startswith(".")]
    if LONG_RUN or not hidden or path.name == "manifest.json":
        return False
    alike = [each for each in before if each.call == change.call in ("mkdir", "open", "write", "unlink")]
    return any(hidden[0] in PurePosixPath(each.path).parent.parts for each in alike)


def places_to_kill(changes: list[Change]) -> list[tuple[int, str]]:
    """Return the points at which to kill: (number, ``"before"`` or ``"within"``)."""
    points = []
    for number, change in enumerate(changes, 1):
        if not is_repeated(changes[: number - 1], change):
            points.append((number, "before"))
        large = [each for each in changes[: number - 1] if each.size >= 256]
        if change.call == "write" and change.size >= 256 and not is_repeated(large, change):
            points.append((number, "within"))
    return points


def plain(changes: list[Change]) -> list[tuple[str, ...]]:
    """The changes without what differs from run to run."""
    return [
        (c.call, *(re.sub(r"[-.][0-9a-f]{12}", "", name) for name in (c.path, c.target))) for c in changes
    ]


def act(what: str, training: Training, place: Place, go: Callable[[], None]) -> bool:
    """Run what is interrupted: a save or a load."""
    training.move(place, NEW - 1)
    go()
    (training.load if what == "load" else training.save)()
    return True


# ---------------------------------------------------------------- one process


def kill_everywhere(what: str, start: Place, root: Path, prints: Prints) -> tuple[list[Change], set[int]]:
    """Kills a save or load before each change of the disk, and in the middle of each larger write."""
    places, told, training = [start.copy(root / "whole")], ["not killed"], Training(NEW, start)
    whole = tracer.run(lambda go: act(what, training, places[0], go), places[0].root)
    assert whole.result()
    for at, how in places_to_kill(whole.changes):
        place, kill = start.copy(root / f"{at} {how}"), tracer.kill_at(at, how)
        ended = tracer.run(lambda go, place=place: act(what, training, place, go), place.root, kill)
        assert ended.killed, ended.error
        assert len(ended.changes) == at
        assert place.way or plain(ended.changes) == plain(whole.changes)[:at]
        places.append(place)
        told.append(f"killed {how} {whole.changes[at - 1]}")
    seen = check_all(places, told, tracer.alone(lambda: recover_all(places)), prints)
    return whole.changes, seen


def check_all(places: list[Place], told: list[str], recoveries: list[Recovered], prints: Prints) -> set[int]:
    """Checks each, and tells which of them fails; returns which checkpoints were found."""
    seen = set()
    for place, what, recovered in zip(places, told, recoveries, strict=True):
        try:
            seen.add(check(recovered, place, prints))
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}\n{recovered}") from error
        assert what != "not killed" or recovered.prints == prints[NEW]
    return seen


def one_process(kind: str, root: Path) -> tuple[list[str], set[int]]:
    start = Place(kind, root / "start")
    prints = tracer.alone(lambda: begin(start))
    changes, seen = kill_everywhere("save", start, root, prints)
    # Some file goes first, and what is left then must not be taken for anything else.
    assert [
        c for c in changes if c.call == "unlink" and ".gone-" not in c.path and ".lock" not in c.path
    ] == []
    return [c.call for c in changes], seen


@pytest.mark.parametrize("kind", ["fixed", "numbered", "first", "fixed/async"])
def test_one_process_killed_at_every_write(ranks: RankServer, shm: Path, kind: str) -> None:
    """D1, D5: SIGKILL before every system call that changes the disk, and in the middle of writes."""
    ((calls, seen),) = ranks(1, one_process, kind, shm, timeout=100)
    assert seen == ({0, NEW} if kind == "first" else {OLD, NEW})
    assert {"mkdir", "open", "write", "fsync", "rename"} <= set(calls)
    assert kind == "first" or {"unlink", "rmdir"} <= set(calls)
    assert len(calls) > 20


def after_a_crash(what: str, root: Path) -> tuple[list[str], set[int]]:
    """The same for what begins between the two renames that another save was killed at."""
    start = Place("fixed", root / "start")
    prints = tracer.alone(lambda: begin(start))
    training, spare = Training(NEW, start), start.copy(root / "spare")
    whole = tracer.run(lambda go: act("save", training, spare, go), spare.root)
    at = next(number for number, c in enumerate(whole.changes, 1) if c.target == "run")
    kill = tracer.kill_at(at, "before")
    assert tracer.run(lambda go: act("save", training, start, go), start.root, kill).killed
    assert [entry.partition("-")[0] for entry in start.entries()] == [".run.lock", ".run.old", ".run.tmp"]
    changes, seen = kill_everywhere(what, start, root / "again", prints)
    return [c.call for c in changes], seen


@pytest.mark.parametrize("what", ["load", "save"])
def test_a_crash_while_a_crash_is_mended(ranks: RankServer, shm: Path, what: str) -> None:
    """D1: a load or save that finishes what another one began may be killed anywhere, too."""
    ((calls, seen),) = ranks(1, after_a_crash, what, shm, timeout=100)
    assert seen == {NEW}
    assert {"rename", "unlink"} <= set(calls)
    assert ("write" in calls) == (what == "save")


# ---------------------------------------------------------------- power


def find_unflushed(changes: list[Change], folder: str) -> tuple[set[str], set[str]]:
    """Return the files that a power failure could take away: (at the commit, in the end)."""
    loose: set[str] = set()
    at_commit: set[str] = set()
    for change in changes:
        name = PurePosixPath(change.path)
        if change.call == "fsync":
            loose.discard(change.path)
        elif change.call in ("write", "writev", "truncate", "sendfile", "copy", "mmap"):
            loose.add(change.path)
        elif change.call in ("open", "mkdir"):
            loose |= {change.path, str(name.parent)}
        elif change.target == folder:
            at_commit = {path for path in loose if PurePosixPath(path).is_relative_to(name)}
            loose = {path for path in loose if path not in at_commit} | {str(name.parent)}
        elif at_commit or change.call in ("unlink", "rmdir"):
            loose.discard(change.path)
    return at_commit, loose


def flushes(root: Path, kind: str) -> list[Change]:
    root.mkdir()
    place = Place(kind, root / "new" / "runs")
    training = Training(NEW, place)
    ended = tracer.run(lambda go: act("save", training, place, go), root)
    assert ended.result()
    return ended.changes


@pytest.mark.parametrize("kind", ["first", "numbered"])
def test_nothing_is_committed_before_it_is_on_the_disk(ranks: RankServer, shm: Path, kind: str) -> None:
    """D1, when the power fails: files and folders are flushed before the rename, and the rename after it."""
    (changes,) = ranks(1, flushes, shm / "root", kind)
    (folder,) = [c.target for c in changes if c.call == "rename"]
    assert find_unflushed(changes, folder) == (set(), set())


# ---------------------------------------------------------------- two processes


def machine(kind: str, root: Path) -> Place:
    """The place of this rank, which is a machine of its own if each is to save."""
    rank = os.environ["RANK"]
    if kind != "each node":
        return Place(kind, root)
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=rank)
    return Place(kind, root / f"node{rank}")


def begin_ranks(kind: str, root: Path) -> Prints:
    return begin(machine(kind, root / "start"))


def copy_changing_folder(source: Path, target: Path) -> None:
    """Copy a folder that another process changes meanwhile; copy again when an entry has gone."""
    for _ in range(20):
        with contextlib.suppress(shutil.Error):
            shutil.copytree(source, target)
            return
        shutil.rmtree(target)
    raise AssertionError(f"{source} did not stand still for one copy in twenty")


def save_and_watch(kind: str, root: Path, watcher: int) -> tuple[list[Change], list[str]]:
    """One save of two ranks; the disk is copied whenever one of them is about to change it."""
    place, told, seen = machine(kind, root / f"run{watcher}"), [], []

    def look(number: int, change: Change) -> str:
        if not is_repeated(seen, change):
            copy_changing_folder(root / f"run{watcher}", root / f"{watcher}-{number}")
            told.append(f"killed all when rank {watcher} was before {change}")
        seen.append(change)
        return ""

    def work(go: Callable[[], None]) -> bool:
        training = Training(NEW, place)
        act("save", training, place, go)
        training.accelerator.wait_for_everyone()  # who leaves takes the store of the group along
        return True

    if os.environ["RANK"] != str(watcher):
        work(lambda: None)
        return [], []
    # A rank that others wait for is a child: it may open its group, and the parent looks on.
    ended = tracer.run(work, root, look)
    assert ended.result()
    return ended.changes, told


def recover_ranks(kind: str, roots: list[Path]) -> list[Recovered]:
    return recover_all([machine(kind, root) for root in roots])


@pytest.mark.parametrize(
    "kind",
    [
        "fixed",
        long_run_param("numbered"),
        "each node",
        long_run_param("fixed/async"),
        long_run_param("fixed/sharded"),
        "numbered/fsdp",
    ],
)
def test_two_processes_killed_together_at_every_write(ranks: RankServer, shm: Path, kind: str) -> None:
    """D1, D5: as when the machine goes, or the launcher takes its processes with it."""
    prints = ranks(2, begin_ranks, kind, shm)
    roots, told = [], []
    for watcher in (0, 1):
        shutil.copytree(shm / "start", shm / f"run{watcher}")
        changes, texts = ranks(2, save_and_watch, kind, shm, watcher)[watcher]
        numbers = [n for n, change in enumerate(changes, 1) if not is_repeated(changes[: n - 1], change)]
        roots += [shm / f"{watcher}-{number}" for number in numbers]
        told += texts
    check_ranks(ranks(2, recover_ranks, kind, roots, timeout=100), kind, roots, told, prints)
    assert len(told) > (25 if LONG_RUN else 15)


def check_ranks(
    recoveries: list[list[Recovered]], kind: str, roots: list[Path], told: list[str], prints: list[Prints]
) -> None:
    """Checks what each rank has found after each crash."""
    for rank, recovered in enumerate(recoveries):
        places = [Place(kind, root / f"node{rank}" if kind == "each node" else root) for root in roots]
        assert check_all(places, told, recovered, prints[rank]) == {OLD, NEW}
    same_on_all([[(f.name, f.saved) for f in recovered] for recovered in recoveries])


# Where one rank of two is killed: which, how, by which call, on what.
POINTS = (
    (0, "before", "mkdir", r"\.tmp-"),
    (0, "within", "write", r"model\.safetensors"),
    (0, "within", "write", r"manifest\.json"),
    (0, "before", "rename", r"(run|checkpoint_2)$"),
    (0, "before", "unlink", r"model\.safetensors"),
    (1, "within", "write", r"random_states_1"),
    (1, "before", "fsync", r"random_states_1"),
)


def save_and_kill(kind: str, root: Path, point: tuple[int, str, str, str]) -> str:
    """One save of two ranks, of which one is killed; what the other one is told."""
    from accelerate.core.errors import CheckpointError

    place, (victim, how, call, name) = machine(kind, root), point

    def look(number: int, change: Change) -> str:
        there = change.call == call and re.search(name, change.target or change.path)
        return how if there and (how == "before" or change.size > 99) else ""

    if os.environ["RANK"] == str(victim):
        ended = tracer.run(lambda go: act("save", Training(NEW, place), place, go), root, look)
        assert ended.killed, ended.error
        return "killed"
    try:
        act("save", Training(NEW, place), place, lambda: None)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize(("kind", "points"), [("fixed", POINTS), ("numbered", POINTS[3:5])])
def test_one_rank_of_two_killed(
    ranks: RankServer, shm: Path, kind: str, points: tuple[tuple[int, str, str, str], ...]
) -> None:
    """D1, D3: the other rank is told that it is gone, and does no harm to what is there."""
    prints = ranks(2, begin_ranks, kind, shm)
    roots = [shm / str(number) for number in range(len(points))]
    for root, point in zip(roots, points, strict=True):
        shutil.copytree(shm / "start", root)
        texts = ranks(2, save_and_kill, kind, root, point, timeout=20)
        assert texts[point[0]] == "killed"
        heard = texts[1 - point[0]]
        late = kind == "numbered" and point[2] == "unlink"  # all have agreed by then
        gone = re.match(r"CheckpointPeerError: .* gone", heard)
        assert heard == "saved" if late else gone, heard
    told = [f"rank {point[0]} killed {point[1:]}" for point in points]
    check_ranks(ranks(2, recover_ranks, kind, roots, timeout=100), kind, roots, told, prints)


# ---------------------------------------------------------------- the launcher

SCRIPT = """
    import os, sys, time
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from tests.support.crash import Place, Training

    def stop(event, arguments):
        if event != {event!r} or os.environ["RANK"] != {rank!r}:
            return
        made = arguments[1] if event == "os.rename" else arguments[0] if arguments[2] & os.O_CREAT else ""
        if str(made).endswith({name!r}):
            print("here", flush=True)
            while True:
                time.sleep(1)

    place = Place("fixed", Path({root!r}))
    training = Training({value}, place)
    sys.addaudithook(stop)
    training.save()
    print("saved", flush=True)
"""


@pytest.mark.parametrize(
    ("event", "name", "rank"),
    [("open", "/random_states_1.pkl", "1"), long_run_param("os.rename", "/run", "0")],
)
def test_the_launcher_killed_in_the_middle_of_a_save(
    ranks: RankServer, shm: Path, event: str, name: str, rank: str
) -> None:
    """D1: its processes end with it; between the two renames the new checkpoint is there already."""
    prints = ranks(2, begin_ranks, "fixed", shm)
    root, tests = shm / "start", str(Path(__file__).parents[2])
    script = SCRIPT.format(tests=tests, event=event, name=name, rank=rank, root=str(root), value=NEW)
    running = start("--cpu", "-n", "2", script_text=script)
    running.wait_for("here")
    running.signal(signal.SIGKILL)
    running.wait()
    assert running.survivors(10) == []
    assert "saved" not in running.text()
    for rank_prints, recovered in zip(prints, ranks(2, recover_ranks, "fixed", [root]), strict=True):
        assert check(recovered[0], Place("fixed", root), rank_prints) == (
            NEW if event == "os.rename" else OLD
        )
