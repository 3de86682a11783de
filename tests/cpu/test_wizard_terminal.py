"""The wizard on a real terminal: arrow keys, Ctrl-C, and what is on the screen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
import yaml

from tests.support.command import CONSOLE
from tests.support.environment import clean

DOWN, ENTER, ESC = "\x1b[B", "\r", "\x1b"


@pytest.fixture
def wizard(tmp_path: Path) -> Iterator[pexpect.spawn]:
    """``accelerate config --config_file job.yaml`` on a terminal of its own."""
    env = clean({"TERM": "xterm", "HF_HOME": str(tmp_path / "home")})
    arguments = ["config", "--config_file", str(tmp_path / "job.yaml")]
    child = pexpect.spawn(
        CONSOLE[0], arguments, env=env, cwd=str(tmp_path), encoding="utf-8", timeout=30, dimensions=(50, 120)
    )
    yield child
    child.close(force=True)


HINT, LAST = "(Use arrow keys)", "Write this file?"


def choose(child: pexpect.spawn, keys: str = "") -> str:
    """Presses keys and Enter when something can be chosen; returns what was shown before."""
    child.expect_exact(HINT)
    shown = str(child.before)
    child.send(keys + ENTER)
    return shown


def test_arrow_keys_lead_to_a_file(wizard: pexpect.spawn, tmp_path: Path) -> None:
    assert "Where will you run it?" in choose(wizard)
    assert "On which devices?" in choose(wizard, DOWN)  # one process, on the CPU
    while "Mixed precision?" not in choose(wizard):
        pass
    wizard.expect_exact(LAST)
    assert "use_cpu: true" in str(wizard.before), "the file is shown before it is written"
    assert not (tmp_path / "job.yaml").exists()
    choose(wizard, DOWN)  # change an answer
    assert "Which one?" in choose(wizard)
    assert "Where will you run it?" in choose(wizard)
    wizard.expect_exact(LAST)
    choose(wizard)
    wizard.expect_exact("accelerate configuration saved at ")
    wizard.expect(pexpect.EOF)
    wizard.close()
    assert wizard.exitstatus == 0
    told = yaml.safe_load((tmp_path / "job.yaml").read_text())
    assert (told["distributed_type"], told["use_cpu"]) == ("NO", True)


def test_ctrl_c_leaves_nothing_and_says_130(wizard: pexpect.spawn, tmp_path: Path) -> None:
    choose(wizard)
    wizard.expect_exact("On which devices?")
    wizard.sendcontrol("c")
    wizard.expect(pexpect.EOF)
    wizard.close()
    assert wizard.exitstatus == 130
    assert "Traceback" not in str(wizard.before)
    assert [path.name for path in tmp_path.iterdir()] == []


def test_esc_goes_back_and_help_and_errors_are_whole(wizard: pexpect.spawn) -> None:
    """On 60 columns: help stands under its question, an error is broken between words."""
    wizard.setwinsize(50, 60)
    choose(wizard)
    choose(wizard, DOWN * 2)  # several processes, on the CPU
    wizard.expect_exact("Number of machines?")
    wizard.send(ESC)
    wizard.expect_exact("On which devices?")
    choose(wizard)
    wizard.expect_exact("Number of machines?")
    wizard.expect_exact("how many machines take part")
    wizard.expect_exact("> ")  # keys that come before are read as lines of text
    wizard.send("\x150" + ENTER)
    wizard.expect(r"the\s+answer\s+is\s+0,[^>]*>")  # the error, and the question again
    error = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", str(wizard.after)).partition("?")[0].strip()
    assert "the answer is 0, but num_machines is a whole number (1 to 1000000)" in " ".join(error.split())
    assert max(map(len, error.splitlines())) <= 60
