"""The tests of this folder run in a process that has the simulated accelerator (tests/support/sim)."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support import sim
from tests.support.sim.session import Inner, run_inside

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
    config = session.config
    wanted = any(map(_is_ours, session.items)) and not config.option.collectonly
    if not wanted or sim.missing() or sim.autoloaded():
        return (yield)
    # Started here and not in the first test, whose time limit is not made for building a device.
    inner = config.stash[INNER] = Inner(config)
    inner.start()
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
