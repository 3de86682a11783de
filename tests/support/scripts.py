"""Run a script on forked ranks, which have torch already, for tests of what the script does.

Tests of how a script is started, stopped or killed use ``command.launch``.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import re
import runpy
import sys
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from tests.support.ranks import NO_LAUNCHER, RankServer


def run_script(path: str, arguments: tuple[str, ...]) -> str:
    """Run the script as ``__main__`` on this rank and return what it writes to stdout."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path, run_name="__main__")
    return out.getvalue()


def run_as_interpreter(path: str) -> NoReturn:
    """Run the script and end this rank as the interpreter would: excepthook, exit functions, exit status."""
    os.chdir(Path(path).parent)
    code: Any = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code or 0
    except BaseException:  # noqa: BLE001 - whatever it is, the hook shows it
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_to_exit(
    ranks: RankServer, n: int, text: str, folder: Path, env: Mapping[str, object | None] | None = None
) -> list[tuple[int, str]]:
    """Run a script on ``n`` ranks without a launcher; return the exit status and output of each."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    outcomes = ranks.outcomes(n, run_as_interpreter, str(script), timeout=60, grace=60, env=env)
    codes = [re.search(r"exit status (\d+)", outcome.message) for outcome in outcomes]
    assert all(codes), "\n".join(map(str, outcomes))
    return [(int(code[1]), outcome.output) for code, outcome in zip(codes, outcomes, strict=True) if code]


def script_output(
    ranks: RankServer,
    n: int,
    path: Path,
    *arguments: str,
    timeout: float = 100,
    env: Mapping[str, object | None] | None = None,
) -> str:
    """Run a script on ``n`` ranks and return their stdout, rank 0 first; one rank gets no torchrun variables.

    Raises:
        RanksError: the script raised, or left, on some rank.
    """
    env = {**(NO_LAUNCHER if n == 1 else {}), **(env or {})}
    return "".join(ranks(n, run_script, str(path), arguments, timeout=timeout, env=env))
