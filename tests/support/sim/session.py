"""Runs the tests of ``tests/sim`` in a process that has the simulated accelerator, and reports them here.

The outer pytest collects and reports; for each test it sends the node id to an inner pytest, which runs the
test with all its fixtures and sends the reports back, as plain data by pytest's own hooks for that. A test
that kills the inner process fails, and the next one gets a new process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.support import sim
from tests.support.environment import clean

START = 600.0  # seconds until the inner process is ready; the first time it builds the device
END = 10.0  # seconds it may take to leave


class InnerDiedError(Exception):
    """The inner process went away without reporting a test."""


# -------------------------------------------------------------------------------------- the outer process


class Inner:
    """The inner process, as the outer one sees it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="accelerate-sim-")

    def start(self) -> None:
        """Starts the process unless it runs, and waits until it has the device and has found its tests."""
        if self._channel is not None:
            return
        ours, theirs = socket.socketpair()
        capture: Any = self._config.pluginmanager.getplugin("capturemanager")
        visible = capture.global_and_fixture_disabled() if capture else contextlib.nullcontext()
        # With the ports of this worker: without its name it would take those of the first one.
        worker = {"PYTEST_XDIST_WORKER": os.environ.get("PYTEST_XDIST_WORKER")}
        # What the inner process itself says belongs on the terminal: that it builds, or why it cannot.
        with theirs, visible, Path(self._folder.name, "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()})"],
                cwd=sim.ROOT, env=clean({**sim.environment(), **worker}), pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=log, start_new_session=True,
            )  # fmt: skip
            theirs.close()
            self._channel = Connection(ours.detach())
            try:
                if not self._channel.poll(START):
                    raise EOFError
                self._channel.recv()
            except (EOFError, ConnectionError) as error:
                said = Path(self._folder.name, "log").read_text(errors="replace")[-4000:]
                self.close()
                raise pytest.UsageError(f"the process of the sim tests did not start\n{said}") from error

    def run(self, nodeid: str, following: str | None) -> list[pytest.TestReport]:
        """Runs one test; ``following`` is the next one, for which fixtures of a wider scope are kept.

        Raises:
            InnerDiedError: the process ended before the test did.
        """
        self.start()
        assert self._channel is not None
        reports: list[pytest.TestReport] = []
        finished = False
        try:
            self._channel.send((nodeid, following))
            while (data := self._channel.recv()) is not None:
                reports.append(
                    self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
                )
            finished = True
        except (EOFError, ConnectionError) as error:
            code = self._process.wait(END) if self._process else None
            raise InnerDiedError(f"this test ended its process (exit status {code})") from error
        finally:
            if not finished:  # also after Ctrl-C
                self.close()
        return reports

    def close(self) -> None:
        """Ends the process; it leaves by itself when its channel is closed."""
        process, channel = self._process, self._channel
        self._process = self._channel = None
        if channel is not None:
            channel.close()
        if process is not None:
            try:
                process.wait(END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run_inside(inner: Inner, item: pytest.Item, following: pytest.Item | None) -> None:
    """Runs ``item`` in the inner process and reports it as if it had run here."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    try:
        reports = inner.run(item.nodeid, following.nodeid if following else None)
    except InnerDiedError as error:
        reports = [
            pytest.TestReport(
                item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", str(error), "call"
            )
        ]
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


# -------------------------------------------------------------------------------------- the inner process


class Served:
    """The pytest plugin that takes tests from the outer process instead of running all there are."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self._channel.send("ready")
        with contextlib.suppress(EOFError):
            while True:
                nodeid, following = self._channel.recv()
                item, nextitem = items[nodeid], items.get(following)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
                self._channel.send(None)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._channel.send(
            self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        )

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config: Any = config


def serve(descriptor: int) -> None:
    """Runs the tests whose ids come over the channel, until it is closed."""
    sim.load()
    channel = Connection(descriptor)
    arguments = [str(sim.ROOT / "tests" / "sim"), "--rootdir", str(sim.ROOT), "-p", "no:cacheprovider"]
    sys.exit(pytest.main(arguments, plugins=[Served(channel)]))
