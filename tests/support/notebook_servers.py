"""The fork servers of ``notebook_launcher`` and ``debug_launcher``, in tests."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from accelerate.launch.notebook import fork_server_client

PROGRAM = """
import sys
from accelerate.launch.notebook import fork_server
fork_server.FIRST, fork_server.LATER = {first}, ()
fork_server.main(int(sys.argv[1]))
"""


def share_servers(patch: pytest.MonkeyPatch, folder: Path, *first: str) -> None:
    """Let tests share servers, which import the modules ``first`` and no more while they are idle.

    The variable in which pytest names the running test would ask for a server in each test.
    """
    request_server = fork_server_client.request_server

    def request(env: dict[str, str], job_variables: Collection[str]) -> Any:
        return request_server(env, {*job_variables, "PYTEST_CURRENT_TEST"})

    program = folder / "fork_server.py"
    program.write_text(PROGRAM.format(first=first))
    patch.setattr(fork_server_client, "request_server", request)
    patch.setattr(fork_server_client, "PROGRAM", str(program))
