"""What a shell offers after ``accelerate``, asked for as shells do, and by a real bash."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from tests.laws.test_8_no_torch import run as without_torch
from tests.support.command import CONSOLE, Running, group, run
from tests.support.launch_plans import launch_flags
from tests.support.registries import REGISTRIES


def offered(*words: str) -> list[str]:
    """What is offered for the last of ``words``."""
    *args, incomplete = words
    shell = ShellComplete(group(), {}, "accelerate", "_ACCELERATE_COMPLETE")
    return [
        item.value if item.type == "plain" else item.type for item in shell.get_completions(args, incomplete)
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["la"], ["launch"]),
        (["launch", "--fsdp_v"], ["--fsdp_version"]),
        (["launch", "--fsdp-v"], ["--fsdp-version"]),
        (["launch", "--cpu", "--mixed_precision", "B"], ["bf16"]),
        (["launch", "--fsdp_version", ""], ["1", "2"]),
        (["launch", "--fsdp_offload_params", ""], ["true", "false"]),
        (["launch", "--config_file", "my"], ["file"]),
        (["launch", "--log_dir", ""], ["dir"]),
        (["launch", "--cpu", "tr"], ["file"]),
        (["launch", "train.py", ""], ["file"]),
        (["launch", "train.py", "--n"], []),
        (["env", "--expl"], ["--explain"]),
        (["completion", "z"], ["zsh"]),
        (["lunch", "--n"], []),
        (["launch", "--no_such_flag", "--fsdp_v"], ["--fsdp_version"]),
    ],
)
def test_what_is_offered(words: list[str], expected: list[str]) -> None:
    assert offered(*words) == expected


def test_all_commands_and_all_flags_are_offered_once() -> None:
    assert offered("") == sorted(name.replace("_", "-") for name in REGISTRIES["COMMANDS"].names())
    found = offered("launch", "--")
    flags = launch_flags()
    assert set(found) - flags == {"--help", "--help_all"}
    assert not {flag for flag in flags if "-" not in flag[2:]} - set(found)
    assert len(found) == len(set(found))


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_real_bash_completes(tmp_path: Path) -> None:
    """The script is read by bash, which then calls what it registers, as on the Tab key."""
    (tmp_path / "ask.sh").write_text(
        'eval "$(accelerate completion bash)"\n'
        "complete -p accelerate\n"
        'ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); '
        '_accelerate_completion accelerate; echo "${COMPREPLY[*]}"; }\n'
        "ask accelerate lau\n"
        "ask accelerate launch --mixed_precision fp1\n"
        "ask accelerate launch --num_proc\n"
    )
    path = f"{Path(CONSOLE[0]).parent}{os.pathsep}{os.environ['PATH']}"
    done = Running(["bash", "--norc", str(tmp_path / "ask.sh")], env={"PATH": path}).wait()
    registered, *answers = done.stdout.splitlines()
    assert "-F _accelerate_completion accelerate" in registered, done.output
    assert answers == ["launch", "fp16", "--num_processes"], done.output


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_the_script_says_how_to_install_it(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    last = script.splitlines()[-1]
    assert last.startswith(f"# to install: accelerate completion {shell} > ")
    assert "_ACCELERATE_COMPLETE" in script
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    assert run(["completion"]) == 0
    assert capsys.readouterr().out == script


def test_other_shells_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert run(["completion"]) == 2
    assert "there is no completion for the shell 'tcsh' ($SHELL)" in capsys.readouterr().err
    assert run(["completion", "cmd"]) == 2


def test_completing_imports_no_torch() -> None:
    """F10: a key press is no reason to wait."""
    asked = {
        "_ACCELERATE_COMPLETE": "bash_complete",
        "COMP_WORDS": "accelerate launch --fsdp_v",
        "COMP_CWORD": "2",
    }
    body = "sys.argv = ['accelerate']; from accelerate.cli.main import main; main()"
    assert without_torch(f"os.environ.update({asked!r}); {body}") == "plain,--fsdp_version\n"
    done = Running([sys.executable, "-m", "accelerate"], env=asked).wait()
    assert done.stdout == "plain,--fsdp_version\n", done.output
