"""The fork servers of ``notebook_launcher`` and ``debug_launcher``, in tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate.launch.notebook import fork_server, fork_server_client

# What a server imports: before the first launch, and while it is idle.
IMPORTED = (*fork_server.FIRST, *fork_server.LATER)
PROGRAM = """
import sys
from accelerate.launch.notebook import fork_server
fork_server.FIRST, fork_server.LATER = {first}, ()
fork_server.main(int(sys.argv[1]))
"""


def _write_program(folder: Path, *first: str) -> Path:
    program = folder / "fork_server.py"
    program.write_text(PROGRAM.format(first=first))
    return program


def share_servers(patch: pytest.MonkeyPatch, folder: Path, *first: str) -> None:
    """Let servers import the modules ``first``, and no more while they are idle."""
    patch.setattr(fork_server_client, "PROGRAM", str(_write_program(folder, *first)))


def kernel_flags(folder: Path, *first: str) -> list[str]:
    """The arguments of a kernel whose servers import ``first``, and no more while they are idle."""
    program = str(_write_program(folder, *first))
    line = f"import {fork_server_client.__name__} as client; client.PROGRAM = {program!r}; del client"
    return [f"--IPKernelApp.exec_lines={line}"]
