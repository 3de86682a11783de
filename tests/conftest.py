"""Fixtures of all tests, their order, and the scheduler that shares them between workers."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator
from typing import Any

import pytest

from tests.support.rank_server import use_huge_pages
from tests.support.ranks import FSDP2_OF_TORCH_2_6, RankServer

gc.disable()  # while modules are imported, which takes seconds; see pytest_collection_finish

# Under nohup, or in the background of a script, these come ignored, and what is started here inherits that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

# The sockets of torch's key-value store ask for the name of ::ffff:127.0.0.1 by DNS. With a name server that
# answered six questions in seven, two ranks that open a group took 0.82 s on average, 0.22 s with a limit of
# one second, and 0.06 s so: no question is sent. Names of this machine are in its files.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

# Folders with long files first: the short files of the others fill the end of a run on several workers.
ORDER = ("sim", "laws", "clients", "cpu", "gpu", "null")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {folder: place for place, folder in enumerate(ORDER)}
    items.sort(key=lambda item: places.get(_folder(item.nodeid), len(ORDER)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Skip what FSDP2 of torch 2.6 refuses: it does not compute on a CPU."""
    report = yield
    error = "" if call.excinfo is None else str(call.excinfo.value)
    if report.failed and FSDP2_OF_TORCH_2_6.search(error):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, "Skipped: FSDP2 of torch 2.6 on a CPU")
    return report


def _folder(nodeid: str) -> str:
    return nodeid.removeprefix("tests/").partition("/")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a file to one worker, for its module fixtures, and ``tests/sim`` to one, for its process."""
    from xdist.scheduler import LoadFileScheduling

    class FileScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/sim" if _folder(nodeid) == "sim" else super()._split_scope(nodeid)

    config.option.loadscopereorder = False  # ORDER is better
    return FileScheduling(config, log)


def pytest_collection_finish() -> None:
    """What all modules have imported stays: no collection in a test, or in what it forks, walks it again."""
    gc.enable()
    gc.collect()
    gc.freeze()
    use_huge_pages()


@pytest.fixture(scope="session")
def ranks() -> Generator[RankServer]:
    """``ranks(n, function, *args)`` runs a function of the test module on n processes (support/ranks.py)."""
    server = RankServer()
    yield server
    server.remove()


@pytest.fixture(scope="module", autouse=True)
def _freeze_heap() -> None:
    """Freeze what tests of other modules have imported, so that collections in this module do not walk it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _clean_process() -> Generator[None]:
    """Every test leaves the process as it found it: no world or state, no command, the same environment."""
    before = dict(os.environ)
    yield
    _reset()
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


def _reset() -> None:
    """Takes back what the package keeps for the whole process."""

    # Only what a test has imported can have left something behind; importing it here would cost seconds.
    def loaded(module: str) -> Any:
        return sys.modules.get(module)

    if command := loaded("tests.support.command"):
        command.sweep()
    if gradient := loaded("accelerate.facade.gradient_state"):
        gradient.GradientState._reset_state()
    if state := loaded("accelerate.facade.state"):
        state.AcceleratorState._reset_state()
    if preemption := loaded("accelerate.world.preemption"):
        preemption.remove_monitor()
    world = loaded("accelerate.world.world")
    if world is not None and world.current() is not None:
        world.close()
        world.forget()
