"""The tests of this folder run in a process that has the simulated accelerator (tests/support/sim)."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support import sim
from tests.support.sim.session import START, Inner, run_inside

HERE = Path(__file__).parent
INNER = pytest.StashKey[Inner]()


def _is_ours(item: pytest.Item | None) -> bool:
    return item is not None and HERE in item.path.parents


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if why := sim.missing():
        for item in filter(_is_ours, items):
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    config, wanted = session.config, [item for item in session.items if _is_ours(item)]
    if not wanted or sim.missing() or sim.autoloaded() or config.option.collectonly:
        return (yield)
    # The process is started by the first test, on the one worker that runs this folder; it may have to build.
    wanted[0].add_marker(pytest.mark.timeout(START))
    inner = config.stash[INNER] = Inner(config)
    try:
        return (yield)
    finally:
        inner.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not _is_ours(item) or INNER not in item.config.stash:
        return None
    run_inside(item.config.stash[INNER], item, nextitem if _is_ours(nextitem) else None)
    return True
