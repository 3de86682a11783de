"""Start the command line as people do: a process of its own, in a clean environment, that ends in time.

    result = launch("--cpu", "--num_processes", "2", script_text="print('hello')")
    returncode, stdout, stderr, seconds = result
    assert not result.survivors()

Every process below a command carries a mark in its environment, so that those which moved to a session of
their own are found too; after each test whatever is left is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from tests.support.environment import clean
from tests.support.ranks import NO_LAUNCHER

CONSOLE = (str(Path(sys.executable).with_name("accelerate")),)
MODULE = (sys.executable, "-m", "accelerate")
MARK = "ACCELERATE_TESTS_MARK"
_started: list[Running] = []
_NOISE = re.compile(r"\[Gloo\] Rank |\[W.*\[c10d\] The hostname of the client socket cannot be retrieved")


@dataclass(frozen=True)
class Finished:
    """How a command ended; unpacks to its first four values.

    Attributes:
        returncode: exit status, negative for a signal.
        stdout: what it and its children wrote there.
        stderr: likewise.
        seconds: wall time from start to end.
    """

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    command: Running

    def __iter__(self) -> Iterator[Any]:
        return iter((self.returncode, self.stdout, self.stderr, self.seconds))

    @property
    def output(self) -> str:
        """Both streams, for error texts."""
        return f"exit status {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"

    def survivors(self, seconds: float = 5.0) -> list[str]:
        """Processes of the command that are still there after ``seconds``, described; they are killed."""
        return self.command.survivors(seconds)


class Running:
    """A command that runs.

    Args:
        command: program and arguments.
        env: variables besides the clean environment; None removes one.
        cwd: where it runs; its own fresh folder when None.
        accelerators: whether it may see the machine's accelerators.
        script_text: written to ``script.py`` in its folder, which then ends the command.
        script_args: more arguments, after the script.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, object | None] | None = None,
        cwd: str | Path | None = None,
        accelerators: bool = False,
        script_text: str | None = None,
        script_args: Sequence[str] = (),
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="accelerate-command-"))
        script: list[str] = []
        if script_text is not None:
            script = [str(self.folder / "script.py")]
            Path(*script).write_text(textwrap.dedent(script_text))
        self.mark = uuid.uuid4().hex
        # With the fault handler on, a command that is aborted for being late shows where it was.
        own = {"PYTHONFAULTHANDLER": "1", "HF_HOME": str(self.folder / "home")}
        values = {**own, **(env or {}), MARK: self.mark}
        self._began = time.perf_counter()
        with self._file("stdout").open("wb") as out, self._file("stderr").open("wb") as err:
            self.process = subprocess.Popen(
                [*command, *script, *script_args],
                env=clean(values, accelerators=accelerators),
                cwd=cwd or self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,  # files, not pipes: a child that lives on does not keep the reader waiting
                stderr=err,
                start_new_session=True,
            )
        _started.append(self)

    @property
    def pid(self) -> int:
        """The command's own process, which leads its session."""
        return self.process.pid

    def _file(self, name: str) -> Path:
        return self.folder / f".{name}"

    def text(self, name: str = "stdout") -> str:
        """What was written to ``"stdout"`` or ``"stderr"`` so far."""
        lines = self._file(name).read_text(errors="replace").splitlines(keepends=True)
        # Gloo of torch 2.8 prints how it connects, and c10d that a name server does not answer (RES_OPTIONS).
        return "".join(line for line in lines if not _NOISE.match(line))

    def wait_for(self, text: str, timeout: float = 30, name: str = "stdout") -> None:
        """Returns as soon as ``text`` was written.

        Raises:
            AssertionError: it was not within ``timeout`` seconds, or the command ended without it.
        """
        deadline = time.monotonic() + timeout
        while text not in self.text(name):
            ended = self.process.poll() is not None
            if text not in self.text(name) and (ended or time.monotonic() > deadline):
                raise AssertionError(f"no {text!r} in {name}:\n{self.text()}\n{self.text('stderr')}")
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        """Sends a signal to the command alone, as ``kill PID`` does."""
        self.process.send_signal(number)

    def interrupt(self) -> None:
        """Sends SIGINT to the whole process group, as a terminal does on Ctrl-C."""
        os.killpg(self.pid, signal.SIGINT)

    def wait(self, timeout: float = 60) -> Finished:
        """How it ended.

        Raises:
            AssertionError: it has not ended within ``timeout`` seconds; everything is killed and the error
                shows the output, with the stacks of the Python processes.
        """
        __tracebackhide__ = True
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            for process in self.members():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGABRT)
            time.sleep(0.5)
            self.kill()
            what = f"{self.process.args!r} did not end within {timeout:g} s"
            raise AssertionError(f"{what}\n{self.text()}\n{self.text('stderr')}") from None
        seconds = time.perf_counter() - self._began
        return Finished(code, self.text("stdout"), self.text("stderr"), seconds, self)

    def members(self) -> list[psutil.Process]:
        """The living processes of the command: those of its session and those that carry its mark."""
        return [p for p in psutil.process_iter() if self._is_member(p)]

    def _is_member(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                return False
            return os.getsid(process.pid) == self.pid or process.environ().get(MARK) == self.mark
        return False

    def survivors(self, seconds: float = 5.0) -> list[str]:
        """The members that are still there after ``seconds``, described; they are killed."""
        deadline = time.monotonic() + seconds
        while (alive := self.members()) and time.monotonic() < deadline:
            time.sleep(0.05)
        described = [_describe(process) for process in alive]
        self.kill()
        return described

    def kill(self) -> None:
        """Kills every member, waits until they are gone, and reaps the command."""
        members = self.members()
        for process in members:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
        psutil.wait_procs(members, timeout=5)


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} {' '.join(process.cmdline())}"
    return str(process.pid)


def accelerate(*args: str, timeout: float = 60, **options: Any) -> Finished:
    """Runs ``accelerate ARGS`` to its end; ``options`` are those of ``Running``."""
    __tracebackhide__ = True
    return Running([*CONSOLE, *args], **options).wait(timeout)


def run(args: Sequence[str]) -> int:
    """Run ``accelerate ARGS`` inside the test, where names can be patched; return the exit code."""
    from accelerate.cli import main

    return main.run(args)


def group() -> click.Group:
    """The command ``accelerate`` with its sub-commands, as click knows it."""
    from accelerate.cli import main

    return main.accelerate


def launch(
    *args: str,
    script_text: str | None = None,
    path: str | Path | None = None,
    timeout: float = 60,
    **options: Any,
) -> Finished:
    """Runs ``accelerate launch ARGS SCRIPT`` to its end.

    Args:
        args: flags of the launcher.
        script_text: the script itself; or
        path: where it lies; neither when ``args`` names it (``-m module``).
        timeout: seconds it may take.
        options: those of ``Running``, for example ``env`` and ``script_args``.
    """
    __tracebackhide__ = True
    return start(*args, script_text=script_text, path=path, **options).wait(timeout)


def launch_variables(*args: str, **options: Any) -> dict[str, str | None]:
    """Return what ``accelerate launch ARGS`` sets for its script, for the ``env`` of ``ranks``.

    The script tells it, without torch. Of several ranks each gets its place from the fork server; a single
    one gets that of the launch, or none.
    """
    __tracebackhide__ = True
    tell = "import json, os\nprint(json.dumps(dict(os.environ)))"
    result = launch(*args, script_text=tell, **options)
    assert result.returncode == 0, result.output
    assert "no effect" not in result.stderr
    first, *others = (json.loads(line[line.index("{") :]) for line in result.stdout.splitlines())
    folder_of_launch = "ACCELERATE_STOP_FOLDER"  # it is gone
    names = {name for name in first if name.startswith(("ACCELERATE_", "FSDP_"))} - {MARK, folder_of_launch}
    return {name: first[name] for name in names} | ({} if others else {n: first.get(n) for n in NO_LAUNCHER})


def start(
    *args: str, script_text: str | None = None, path: str | Path | None = None, **options: Any
) -> Running:
    """Like ``launch``, but returns while it runs, for tests that send signals."""
    script = [str(path)] if path is not None else []
    return Running([*CONSOLE, "launch", *args, *script], script_text=script_text, **options)


def sweep() -> None:
    """Kills what commands of the last test left and removes their folders; a fixture calls it."""
    while _started:
        running = _started.pop()
        running.kill()
        shutil.rmtree(running.folder, ignore_errors=True)
