"""``examples/big_model.py`` on an accelerator: the tokens of the CPU, wherever the layers are."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.support.environment import ROOT

BIG = ROOT / "examples" / "big_model.py"


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str) -> list[str]:
    monkeypatch.setattr(sys, "argv", [str(BIG), *options])
    runpy.run_path(str(BIG), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_the_same_tokens_with_layers_on_device_host_and_disk(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    here = printed(capsys, monkeypatch, "--cpu")
    assert here[0] == "cpu: everything"
    small = printed(capsys, monkeypatch, "--device-memory", "20MB", "--cpu-memory", "10MB")
    assert small[-1] == here[-1]
    assert small[0].startswith("0: embedding blocks.0")
    assert any(line.startswith("cpu: blocks.") for line in small)
    assert any(line.startswith("disk: blocks.") for line in small)
