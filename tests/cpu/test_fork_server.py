"""The fork server behind notebook_launcher and debug_launcher: its ranks, and what happens without it."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest

from accelerate import debug_launcher
from accelerate.core.errors import LaunchError
from tests.support.command import Running
from tests.support.notebook_servers import share_servers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems start fresh processes")


def describe() -> dict[str, Any]:
    return {
        "parent": os.getppid(),
        "session": os.getsid(0) == os.getpid(),
        "word": os.environ.get("WORD"),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "folder": os.getcwd(),
        "random": random.random(),
        "numpy": float(numpy.random.rand()),
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "children": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "open": sorted(os.readlink(f"/proc/self/fd/{name}").split(":")[0] for name in ("0", "1", "2")),
        "sockets": sum("socket" in _target(name) for name in os.listdir("/proc/self/fd")),
    }


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""  # the listing's own


def test_ranks_of_all_launches_are_forks_of_one_server_and_as_fresh_processes_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = debug_launcher(describe)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGXCPU):  # as schedulers signal each process
        os.kill(first[0]["parent"], number)
    # No reasons for another server; pytest changes the second one for each test.
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another")
    monkeypatch.chdir(tmp_path)
    second = debug_launcher(describe)
    ranks = first + second
    (server,) = {rank["parent"] for rank in ranks}
    assert psutil.Process(server).ppid() == os.getpid() != server
    assert all(rank["session"] and rank["interrupt"] and rank["children"] for rank in ranks)
    assert not any(rank["blocked"] for rank in ranks)
    assert {rank["folder"] for rank in second} == {str(tmp_path)}
    for kind in ("random", "numpy"):
        assert len({rank[kind] for rank in ranks}) == 4  # no two have the same random numbers
    assert second[1]["open"] == ["/dev/null", "pipe", "pipe"]
    assert {rank["sockets"] for rank in ranks} == {0}  # a rank does not keep the server's end open


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Servers that have imported this module alone."""
    share_servers(monkeypatch, tmp_path, __name__)
    monkeypatch.setenv("WORD", "without torch")  # no test of another module takes such a server


@pytest.mark.usefixtures("without_torch")
def test_launches_of_two_threads_share_it() -> None:
    results: list[Any] = []

    def launch() -> None:
        results.append(debug_launcher(describe))

    threads = [threading.Thread(target=launch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 2
    assert len({rank["parent"] for result in results for rank in result}) == 1


@pytest.mark.usefixtures("without_torch")
def test_a_server_that_has_ended_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, _) = debug_launcher(describe)
    psutil.Process(first["parent"]).kill()
    psutil.wait_procs([psutil.Process(first["parent"])], timeout=5)
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/no/text")])  # Python takes no notice of it
    (second, _) = debug_launcher(describe)
    assert second["parent"] not in (first["parent"], os.getpid())
    assert psutil.Process(second["parent"]).ppid() == os.getpid()


@pytest.mark.usefixtures("without_torch")
def test_ranks_do_not_outlive_their_server() -> None:
    def wait() -> None:
        import time

        if os.environ["RANK"] == "0":
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(LaunchError, match="SIGKILL"):
        debug_launcher(wait)


@pytest.mark.usefixtures("without_torch")
def test_other_variables_at_the_import_of_torch_need_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (first, _) = debug_launcher(describe)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("WORD", "other")
    (second, _) = debug_launcher(describe)
    assert first["parent"] != second["parent"]
    assert not psutil.pid_exists(first["parent"])
    assert (second["threads"], second["word"]) == ("2", "other")


ON_DEVICE = """
import sys
from accelerate.launch.notebook import fork_server
class InitializedDevice:
    def is_initialized(self):
        return True
import accelerate.device
accelerate.device.accelerators = lambda: [InitializedDevice()]
fork_server.FIRST = ()
fork_server.main(int(sys.argv[1]))
"""


def test_a_server_that_uses_a_device_forks_no_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A driver does not survive a fork: the ranks are fresh processes."""
    program = tmp_path / "program.py"
    program.write_text(ON_DEVICE)
    monkeypatch.setattr("accelerate.launch.notebook.fork_server_client.PROGRAM", str(program))
    monkeypatch.setenv("WORD", "another server")
    assert {rank["parent"] for rank in debug_launcher(describe)} == {os.getpid()}


def test_it_ends_with_the_process_that_uses_it() -> None:
    script = """
    import os
    from accelerate import debug_launcher
    if __name__ == "__main__":
        print(debug_launcher(os.getppid), flush=True)
        os.kill(os.getpid(), 9)
    """
    result = Running((sys.executable,), script_text=script).wait()
    assert result.returncode == -signal.SIGKILL
    assert "[" in result.stdout
    assert not result.survivors()
