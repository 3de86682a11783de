"""The tutorial as a reader goes through it: test_docs_pages.py runs all but the crash and the resumed run."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from tests.cpu.test_docs_pages import blocks
from tests.null.test_docs import blocks as fenced
from tests.support.command import accelerate, launch


def test_the_crash_and_the_run_that_goes_on_print_what_the_page_shows(tmp_path: Path) -> None:
    crashed, resumed = [body for _, body in fenced("docs/tutorial.md", "text")][-2:]
    (script,) = [block for block in blocks("tutorial.md") if block.title]
    path = tmp_path / script.title
    path.write_text(script.code, encoding="utf-8")

    done = launch("--cpu", "--num_processes", "2", path=path, cwd=tmp_path, script_args=["crash"])
    assert done.returncode == 1
    assert done.output.replace(f"{tmp_path}{os.sep}", "").endswith(crashed), done.output
    done = launch("--cpu", "--num_processes", "2", "--resume", "auto", path=path, cwd=tmp_path)
    assert done.returncode == 0, done.output
    assert done.stdout == resumed
    # The section after it starts the same script in the same folder, with the settings in a file.
    config, start = fenced("docs/tutorial.md", "sh")[-1][1].splitlines()
    assert accelerate(*shlex.split(config)[1:], cwd=tmp_path).returncode == 0
    done = accelerate(*shlex.split(start)[1:], cwd=tmp_path, env={"ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, done.output
