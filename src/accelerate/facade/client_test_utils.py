"""Helpers for the tests of other projects."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from accelerate.core import environ
from accelerate.core.errors import LaunchError

FIRST_PORT = 29500


@dataclass(frozen=True)
class RunOutput:
    """The exit status and output of a command.

    Attributes:
        returncode: its exit status.
        stdout, stderr: its lines, without line ends.
    """

    returncode: int
    stdout: list[str]
    stderr: list[str]


def execute_subprocess_async(
    cmd: Sequence[str],
    env: Mapping[str, str] | None = None,
    stdin: int | IO[bytes] | None = None,
    timeout: float | None = 180,
    quiet: bool = False,
    echo: bool = True,
) -> RunOutput:
    """Run a command, showing its output while it runs, and return the output.

    Args:
        cmd: program and arguments.
        env: its whole environment; None passes this process's on.
        stdin: as for ``subprocess``.
        timeout: seconds until it is killed; None waits for ever.
        quiet: do not show its output.
        echo: first show the command.

    Raises:
        LaunchError: it failed or ran out of time; the end of its output is in the message.
    """
    if echo:
        print("\nRunning:", " ".join(cmd), flush=True)
    return asyncio.run(_run(cmd, env, stdin, timeout, quiet))


async def _run(
    cmd: Sequence[str],
    env: Mapping[str, str] | None,
    stdin: int | IO[bytes] | None,
    timeout: float | None,
    quiet: bool,
) -> RunOutput:
    process = await asyncio.create_subprocess_exec(
        *cmd, stdin=stdin, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    out: list[str] = []
    err: list[str] = []
    reading = asyncio.gather(
        _read(process.stdout, out, None if quiet else sys.stdout),
        _read(process.stderr, err, None if quiet else sys.stderr),
        process.wait(),
    )
    try:
        await asyncio.wait_for(reading, timeout)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
        raise LaunchError(
            f"{_quote_command(cmd)} ran for more than {timeout} s", why=_output_tail(out, err)
        ) from None
    if process.returncode:
        raise LaunchError(
            f"{_quote_command(cmd)} failed with exit status {process.returncode}", why=_output_tail(out, err)
        )
    return RunOutput(process.returncode or 0, out, err)


async def _read(stream: asyncio.StreamReader, lines: list[str], shown: IO[str] | None) -> None:
    async for raw in stream:
        line = raw.decode(errors="replace").rstrip("\r\n")
        lines.append(line)
        if shown is not None:
            print(line, file=shown, flush=True)


def _quote_command(cmd: Sequence[str]) -> str:
    return f"the command {' '.join(cmd)!r}"


def _output_tail(out: list[str], err: list[str]) -> str:
    return "\n".join((err or out)[-20:])


def get_torch_dist_unique_port() -> int:
    """Return a port for rank 0 of this pytest-xdist worker: 29500 plus the number of the worker."""
    worker = environ.get("PYTEST_XDIST_WORKER", "gw0") or "gw0"
    return FIRST_PORT + int(worker.removeprefix("gw"))


def path_in_accelerate_package(*components: str) -> Path:
    """Return a path inside the installed package."""
    return Path(__file__).resolve().parents[1].joinpath(*components)
