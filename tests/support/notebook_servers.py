"""The fork servers of ``notebook_launcher`` and ``debug_launcher``, in tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate.launch.notebook import fork_server_client

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
