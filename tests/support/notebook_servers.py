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


def share_servers(patch: pytest.MonkeyPatch, folder: Path, *first: str) -> None:
    """Let servers import the modules ``first``, and no more while they are idle."""
    program = folder / "fork_server.py"
    program.write_text(PROGRAM.format(first=first))
    patch.setattr(fork_server_client, "PROGRAM", str(program))
