"""The pages of the documentation, run: every Python block of a page in turn, on two processes.

What a block prints on the main process must be what the ``text`` block below it shows. A block with a title
is a script of that name, and what is shown below it are the last lines of its output.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.null.test_docs import FENCE, text
from tests.support.command import launch
from tests.support.environment import ROOT
from tests.support.packages import is_installed
from tests.support.ranks import RankServer
from tests.support.scripts import run_as_interpreter

# Pages of other kinds: the start page has a test of its own, the page on notebooks is run as one
# (test_notebook.py), the rest shows no program of a user.
OTHERS = {"index.md", "notebooks.md", "settings.md", "architecture.md", "contributing.md", "changelog.md"}
NEEDS = {
    "deepspeed.md": "deepspeed",
    "fp8.md": "torchao",
    "megatron.md": "megatron.core",
    "quantization.md": "bitsandbytes",
    "sequences.md": "transformers",
}
PRELOAD = ("deepspeed.runtime.zero.muon.muon_optimizer", "transformers.models.llama.modeling_llama")
PAGES = sorted(path.name for path in ROOT.glob("docs/*.md") if path.name not in OTHERS)


@dataclass(frozen=True)
class Block:
    """A Python block, and what the page says it prints; None: it does not say."""

    code: str
    line: int
    printed: str | None
    title: str = ""


def blocks(page: str) -> Iterator[Block]:
    """The Python blocks of a page, in order; a ``text`` block belongs to the one right above it."""
    source = text(f"docs/{page}")
    found = [(m[1], m[2] or "", m[3], source[: m.start()].count("\n") + 2) for m in FENCE.finditer(source)]
    for (kind, title, body, line), (below, _, shown, _) in pairwise([*found, ("", "", "", 0)]):
        if kind == "python":
            yield Block(body, line, shown if below == "text" else None, title)


def programs(page: str) -> list[Block]:
    """The blocks that are one program, in turn."""
    return [block for block in blocks(page) if not block.title]


def run(page: str, folder: str) -> list[tuple[int, str | None, str]]:
    """(line, what the page shows, what was printed) of every block, on this process."""
    os.chdir(folder)
    space: dict[str, Any] = {"__name__": "__main__"}
    results = []
    for block in programs(page):
        # The lines of an error are those of the page.
        program = compile("\n" * (block.line - 1) + block.code, f"docs/{page}", "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
            # What another library calls is its own affair.
            warnings.simplefilter("default" if page in NEEDS else "error", DeprecationWarning)
            exec(program, space)
        results.append((block.line, block.printed, printed.getvalue()))
    return results


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_and_prints_what_it_shows(page: str, ranks: RankServer, tmp_path: Any) -> None:
    expected = programs(page)
    if not expected:
        pytest.skip("a page without programs")
    if not is_installed(NEEDS.get(page, "torch")):
        pytest.skip(f"the package {NEEDS[page]} is not installed")
    main = ranks(2, run, page, str(tmp_path))[0]
    assert len(main) == len(expected)
    for line, shown, printed in main:
        assert printed == (shown or ""), f"docs/{page}, the block at line {line}"


@pytest.mark.parametrize("page", PAGES)
def test_a_script_of_a_page_ends_as_it_shows(page: str, ranks: RankServer, tmp_path: Path) -> None:
    """It is launched where the page shows a traceback: that of a forked rank begins with other frames."""
    scripts = [block for block in blocks(page) if block.title]
    if not scripts:
        pytest.skip("a page without scripts")
    for block in scripts:
        assert block.printed, f"docs/{page}, line {block.line}: what does it print?"
        path = tmp_path / block.title
        path.write_text(block.code, encoding="utf-8")
        if "Traceback" in block.printed:
            done = launch("--cpu", "--num_processes", "2", path=path)
            assert done.returncode, done.output
            outputs = [done.stdout + done.stderr]
        else:
            env = {"ACCELERATE_USE_CPU": "true"}
            outcomes = ranks.outcomes(2, run_as_interpreter, str(path), env=env, grace=60)
            end = f"left with exit status {int('Error: ' in block.printed)} before its function returned"
            assert [outcome.message for outcome in outcomes] == [end] * 2, "\n".join(map(str, outcomes))
            outputs = [outcome.output for outcome in outcomes]
        # Without a launcher torch marks the lines of an error.
        texts = [re.sub(r"(?m)^\[rank\d\]: ", "", output).rstrip("\n") for output in outputs]
        shown = block.printed.rstrip("\n")
        assert any(text.replace(f"{tmp_path}{os.sep}", "").endswith(shown) for text in texts), texts


def test_a_page_that_shows_something_else_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "```python\nprint(1 + 1)\n```\n\nIt prints:\n\n```text\n3\n```\n\n```python\nx = 1\n```\n"
    monkeypatch.setattr(f"{__name__}.text", lambda _: page)
    assert list(blocks("page.md")) == [Block("print(1 + 1)\n", 2, "3\n"), Block("x = 1\n", 12, None)]
    assert [(shown, printed) for _, shown, printed in run("page.md", ".")] == [("3\n", "2\n"), (None, "")]
