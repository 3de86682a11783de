"""The tutorial as a reader goes through it: test_docs_pages.py runs all but the crash and the resumed run."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from tests.cpu.test_docs_pages import blocks
from tests.null.test_docs import blocks as fenced
from tests.support.command import accelerate, launch, launch_variables
from tests.support.ranks import RankServer
from tests.support.scripts import script_output


def test_the_crash_and_the_run_that_goes_on_print_what_the_page_shows(
    ranks: RankServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crash is launched; what comes after it runs in forked ranks, with the variables of its launch."""
    crashed, resumed = [body for _, body in fenced("docs/tutorial.md", "text")][-2:]
    (script,) = [block for block in blocks("tutorial.md") if block.title]
    path = tmp_path / script.title
    path.write_text(script.code, encoding="utf-8")

    done = launch("--cpu", "--num_processes", "2", path=path, cwd=tmp_path, script_args=["crash"])
    assert done.returncode == 1
    assert done.output.replace(f"{tmp_path}{os.sep}", "").endswith(crashed), done.output
    monkeypatch.chdir(tmp_path)
    again = launch_variables("--cpu", "--num_processes", "2", "--resume", "auto")
    assert script_output(ranks, 2, path, env=again) == resumed
    # The section after it starts the same script in the same folder, with the settings in a file.
    config, start = fenced("docs/tutorial.md", "sh")[-1][1].splitlines()
    assert accelerate(*shlex.split(config)[1:], cwd=tmp_path).returncode == 0
    program, command, *flags, name = shlex.split(start)
    assert (program, command, name) == ("accelerate", "launch", script.title)
    script_output(ranks, 2, path, env=launch_variables("--cpu", *flags, cwd=tmp_path))
