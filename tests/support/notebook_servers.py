"""The fork servers of ``notebook_launcher`` and ``debug_launcher``, in tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate.launch.notebook import fork_server, fork_server_client

PROGRAM = """
import sys
from accelerate.launch.notebook import fork_server
fork_server.FIRST, fork_server.LATER = {first}, ()
fork_server.main(int(sys.argv[1]))
"""


def write_server_program(folder: Path, *first: str) -> Path:
    """Write the program of servers that import the modules ``first``, and no more while they are idle."""
    program = folder / "fork_server.py"
    program.write_text(PROGRAM.format(first=first))
    return program


def share_servers(patch: pytest.MonkeyPatch, folder: Path, *first: str) -> None:
    """Let the servers of this process run the program of :func:`write_server_program`."""
    patch.setattr(fork_server_client, "PROGRAM", str(write_server_program(folder, *first)))


def all_modules() -> tuple[str, ...]:
    """The modules that a server imports at once, and those that it imports while it is idle."""
    return *fork_server.FIRST, *fork_server.LATER


def server_flags(folder: Path, *first: str) -> list[str]:
    """The arguments of a kernel whose fork servers run the program of :func:`write_server_program`."""
    program = str(write_server_program(folder, *first))
    line = f"import {fork_server_client.__name__} as client; client.PROGRAM = {program!r}; del client"
    return [f"--IPKernelApp.exec_lines={line}"]
