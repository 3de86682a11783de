"""Run a script in ranks of the fork server: as Python runs it, but torch is there already.

For tests of what a script does. How it is started is tested by ``command.launch``.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import re
import runpy
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from tests.support.ranks import ALONE, RankServer


def run_script(path: str, arguments: tuple[str, ...]) -> str:
    """What the script writes to stdout on this rank."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path, run_name="__main__")
    return out.getvalue()


def run_as_main(path: str) -> NoReturn:
    """Runs the script and ends this rank as the interpreter does: hooks, exit functions, exit code."""
    os.chdir(Path(path).parent)
    code: Any = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code or 0
    except BaseException:  # noqa: BLE001 - whatever it is, the hook shows it
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def ends_as_main(ranks: RankServer, n: int, text: str, folder: Path) -> list[tuple[int, str]]:
    """Exit status and output of ``n`` ranks that run a script and that nobody watches."""
    script = folder / "script.py"
    script.write_text(text)
    outcomes = ranks.outcomes(n, run_as_main, str(script), timeout=60, grace=60)
    codes = [re.search(r"exit status (\d+)", outcome.message) for outcome in outcomes]
    assert all(codes), "\n".join(map(str, outcomes))
    return [(int(code[1]), outcome.output) for code, outcome in zip(codes, outcomes, strict=True) if code]


def printed(
    ranks: RankServer,
    n: int,
    path: Path,
    *arguments: str,
    timeout: float = 100,
    env: Mapping[str, object | None] | None = None,
) -> str:
    """What the script writes to stdout on ``n`` ranks, rank 0 first; one rank is as if by python alone.

    Raises:
        RanksError: the script raised, or left, on some rank.
    """
    env = {**(ALONE if n == 1 else {}), **(env or {})}
    return "".join(ranks(n, run_script, str(path), arguments, timeout=timeout, env=env))
