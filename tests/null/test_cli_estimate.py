"""``accelerate estimate-memory``: what it prints, draws and refuses, and the functions of 1.x behind it."""

from __future__ import annotations

import io
import json
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from accelerate.cli import bar_charts
from accelerate.cli.estimate_memory import PLUGIN
from accelerate.cli.main import run
from accelerate.commands import estimate
from tests.laws.test_8_no_torch import command as without_torch
from tests.null.test_estimate import LLAMA
from tests.null.test_meta_models import BERT, FACTORY, write
from tests.support.environment import ROOT

pytest.importorskip("transformers")
Run = Callable[..., SimpleNamespace]
WIDE = "─" * 7


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``cli("./bert", ...)`` runs the command in a folder with a few models."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "bert", BERT)
    small = {**LLAMA, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100}
    write(tmp_path / "llama", {**small, "num_attention_heads": 4, "num_key_value_heads": 2})

    def call(*args: str) -> SimpleNamespace:
        code = run(["estimate-memory", *args])
        captured = capsys.readouterr()
        return SimpleNamespace(code=code, out=captured.out, err=captured.err)

    return call


def cells(out: str) -> list[list[str]]:
    """The cells of all tables, row by row."""
    lines = [line for line in out.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


# ---------------------------------------------------------------- what is shown


def test_the_tables_of_bert(cli: Run) -> None:
    """SEEDS D, as the command shows them."""
    result = cli("./bert")
    assert (result.code, result.err) == (0, "")
    assert cells(result.out) == [
        ["Memory Usage for loading `./bert`"],
        ["dtype", "Largest Layer", "Total Size", "Training using Adam"],
        ["float32", "86.47 MB", "413.18 MB", "1.61 GB"],
        ["float16", "43.23 MB", "206.59 MB", "826.36 MB"],
        ["int8", "21.62 MB", "103.29 MB", "N/A"],
        ["int4", "10.81 MB", "51.65 MB", "N/A"],
        ["Training with Adam, batch size 1, activations left out"],
        ["dtype", "Model", "Gradients", "Backward pass", "Optimizer step", "Highest"],
        ["float32", "413.18 MB", "413.18 MB", "826.36 MB", "1.61 GB", "1.61 GB"],
        ["float16", "413.18 MB", "619.77 MB", "826.36 MB", "826.36 MB", "826.36 MB"],
    ]
    assert "BertModel, 108.31M parameters." in result.out
    assert "BertForMaskedLM has" in result.out


def test_a_head_is_counted_when_it_is_asked_for(cli: Run) -> None:
    result = cli("bert", "--head", "--dtypes", "float32")
    assert "BertForMaskedLM, 108." in result.out
    assert "Without its head" not in result.out
    assert "BertForMaskedLM, 108." in cli("bert", "--training").out


def test_a_training_is_shown_part_by_part_for_one_rank(cli: Run) -> None:
    asked = ("--mixed_precision", "bf16", "--batch", "2", "--length", "32", "--strategy", "fsdp")
    result = cli("./llama", *asked, "--num_processes", "2")
    assert result.code == 0
    titles, row = cells(result.out)[-2:]
    assert titles == ["weights in", "weights", "gradients", "optimizer", "copies", "activations", "total"]
    assert row[0] == "float32 + bf16"
    assert "each of 2 under fsdp" in result.out
    parts = json.loads(cli("./llama", *asked, "--num_processes", "2", "--json").out)["training"][0]
    assert parts["total"] == sum(parts[name] for name in titles[1:-1])
    assert parts["optimizer"] == pytest.approx(2 * parts["weights"], abs=500)
    assert parts["activations"] > 0
    one = json.loads(cli("./llama", *asked[:-2], "--json").out)["training"][0]
    assert one["activations"] == parts["activations"]
    assert one["gradients"] == 2 * parts["gradients"]


def test_the_bar_is_as_long_as_its_parts(cli: Run) -> None:
    result = cli("./llama", "--training", "--length", "16", "--dtypes", "float32", "bfloat16")
    drawn = [line for line in result.out.splitlines() if bar_charts.SIGNS[0] * 3 in line]
    assert [line.split()[0] for line in drawn] == ["float32", "bfloat16"]
    (legend,) = [line for line in result.out.splitlines() if f"{bar_charts.SIGNS[0]} weights" in line]
    lengths = [sum(line.count(sign) for sign in bar_charts.SIGNS) for line in drawn]
    assert lengths[0] == bar_charts.WIDTH
    assert lengths[1] == pytest.approx(bar_charts.WIDTH / 2, abs=1)
    for name in ("weights", "gradients", "optimizer", "copies", "activations"):
        assert f" {name}" in legend


def test_rounding_keeps_the_length_of_a_bar() -> None:
    rows = {"a": dict.fromkeys("vwxyz", 1), "b": dict.fromkeys("vwxyz", 7)}
    first, second, _ = bar_charts.draw_bars(rows).splitlines()
    assert sum(second.count(sign) for sign in bar_charts.SIGNS) == bar_charts.WIDTH
    assert sum(first.count(sign) for sign in bar_charts.SIGNS) == round(bar_charts.WIDTH / 7)
    assert bar_charts.draw_bars({}) == "  "


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "ascii", "utf-8"])
def test_a_chart_shows_what_stdout_can_show(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """A file or a pipe on Windows has no lines of boxes."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding, write_through=True))
    bar_charts.print_chart(estimate.create_ascii_table(["a"], [["模"]], "t"))
    bar_charts.print_chart(bar_charts.draw_bars({"one": {"weights": 1}}))
    table, bars = written.getvalue().decode(encoding).split("one")
    if encoding == "utf-8":
        assert "┌" in table
        assert "模" in table
        assert "█ weights" in bars
    else:
        assert table.splitlines()[0].startswith("+-")
        assert r"\u6a21" in table
        assert "@@@" in bars
        assert "@ weights" in bars


def test_a_picture_is_drawn(cli: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, more in (("loaded.png", ()), ("trained.png", ("--training", "--length", "16"))):
        assert cli("./llama", "--plot", name, *more).code == 0
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    result = cli("./llama", "--plot", "nowhere/x.png")
    assert result.code == 2
    assert "--plot cannot write nowhere/x.png" in result.err


def test_json_is_all_that_is_printed(cli: Run) -> None:
    told = json.loads(cli("./bert", "--json", "--dtypes", "float32", "fp8").out)
    assert told["class"] == "BertModel"
    assert told["parameters"] == 108310272
    rows = {row["dtype"]: row["total"] for row in told["rows"]}
    assert rows == {"float32": 4 * 108310272 + 8192, "fp8": 108310272 + 2048}
    assert "training" not in told


def test_a_factory_and_a_folder_of_weights_alone(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "estimated_factory.py").write_text(FACTORY)
    told = json.loads(cli("estimated_factory:build", "--json").out)
    assert (told["class"], told["parameters"]) == ("Linear", 25)
    (tmp_path / "weights").mkdir()
    save_file(
        {"a.weight": torch.zeros(300, 1000, dtype=torch.bfloat16)}, tmp_path / "weights" / "model.safetensors"
    )
    result = cli("weights", "--dtypes", "float32", "int4")
    assert [row[2] for row in cells(result.out)[2:4]] == ["1.14 MB", "146.48 KB"]
    assert "Its files hold 585.94 KB: 1 tensor(s) of bfloat16." in result.out


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("m --dtypes a b --json", ("a", "b")),
        ("--dtypes float32 int8 m", ("float32", "int8")),
        ("--dtypes=float32 int8 m", ("float32", "int8")),
        ("m --dtypes flaot32", ("flaot32",)),
        ("m --dtypes int8 flaot32", ("int8", "flaot32")),
        ("--dtypes int8 --json m", ("int8",)),
    ],
)
def test_dtypes_are_words_up_to_the_next_flag(typed: str, meant: tuple[str, ...]) -> None:
    params = PLUGIN.make_context("estimate-memory", typed.split()).params
    assert (params["model_name"], params["dtypes"]) == ("m", meant)


def test_the_page_shows_what_the_commands_print(cli: Run, tmp_path: Path) -> None:
    write(tmp_path / "bert-base-cased", BERT)
    write(tmp_path / "Llama-3-8B", LLAMA)
    page = (ROOT / "docs" / "estimate.md").read_text(encoding="utf-8")
    shown = re.findall(
        r"```sh\naccelerate estimate-memory ([^\n]*)\n```\n\n```text\n(.*?)```", page, re.DOTALL
    )
    assert len(shown) == 2
    for typed, expected in shown:
        assert cli(*typed.split()).out == expected


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["./bert", "--dtypes", "flaot32"], ["unknown dtype 'flaot32'", "did you mean 'float32'?"]),
        (["./bert", "--dtypes"], ["'--dtypes' requires an argument"]),
        (["./bert", "--library_name", "tim"], ["unknown library 'tim'", "did you mean 'timm'?"]),
        (["./bert", "--optimizer", "adamv"], ["unknown optimizer 'adamv'", "did you mean 'adam"]),
        (["./bert", "--strategy", "zero33"], ["unknown strategy 'zero33'", "did you mean 'zero3'?"]),
        (["./bert", "--training", "--dtypes", "int8"], ["a model is not trained in int8"]),
        (["./bert", "--num_processes", "2"], ["2 processes under the strategy 'single'", "ddp"]),
        (["./bert", "--bach", "2"], ["unknown flag '--bach'", "did you mean '--batch'?"]),
        (["./bert", "--batch", "two"], ["'two' is not a valid integer"]),
        (["./berd"], ["there is no folder ./berd"]),
        (["./empty"], ["./empty has no config.json", "module:factory"]),
        (["./lama"], ["unknown model_type 'lama'", "did you mean 'llama'?"]),
        (["./own"], ["brings its own code", "own_code.py", "--trust_remote_code"]),
        ([], ["Missing argument 'MODEL'"]),
    ],
)
def test_a_mistake_says_what_to_type(cli: Run, tmp_path: Path, args: list[str], words: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "lama", {"model_type": "lama"})
    write(tmp_path / "own", {"model_type": "own", "auto_map": {"AutoConfig": "own_code.Config"}})
    result = cli(*args)
    assert result.code == 2
    assert result.err.startswith("accelerate estimate-memory")
    assert [word for word in words if word not in result.err] == []
    assert result.out == ""


def test_help_imports_no_torch_and_names_every_format() -> None:
    """F10"""
    shown = without_torch("estimate-memory", "--help")
    for word in (
        "--dtypes",
        "bfloat16",
        "int4",
        "--trust_remote_code",
        "--library_name",
        "zero3",
        "adafactor",
    ):
        assert word in shown


# ---------------------------------------------------------------- accelerate.commands.estimate


def test_the_parser_takes_what_1_x_takes() -> None:
    parser = estimate.estimate_command_parser()
    args = parser.parse_args(["m"])
    wanted = {"model_name": "m", "library_name": None, "trust_remote_code": False}
    assert {name: getattr(args, name) for name in wanted} == wanted
    assert args.dtypes == ["float32", "float16", "int8", "int4"]
    args = parser.parse_args(["m", "--dtypes", "int8", "float16", "--library-name", "timm"])
    assert (args.dtypes, args.library_name) == (["int8", "float16"], "timm")
    subparsers = ArgumentParser().add_subparsers()
    args = estimate.estimate_command_parser(subparsers).parse_args(["m"])
    assert args.func is estimate.estimate_command


def test_the_functions_of_1_x(cli: Run, capsys: pytest.CaptureFixture[str]) -> None:
    args = Namespace(
        model_name="bert", library_name=None, dtypes=["float32", "int8"], trust_remote_code=False
    )
    first, second = estimate.gather_data(args)
    size = 4 * 108310272 + 8192
    steps = {"model": size, "optimizer": 2 * size, "gradients": size, "step": 4 * size}
    assert first == ["float32", 90669056, size, steps]
    assert second == ["int8", 90669056 // 4, size // 4, dict.fromkeys(steps, -1)]
    assert type(estimate.create_empty_model("bert", "transformers")).__name__ == "BertModel"
    estimate.estimate_command(args)
    assert "413.18 MB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("precision", "msamp", "usage"),
    [
        ("float32", None, [100, 200, 100, 400]),
        ("float16", None, [100, 200, 150, 200]),
        ("bfloat16", None, [100, 200, 150, 200]),
        ("fp8", None, [100, 200, 150, 200]),
        ("fp8", "O1", [-1] * 4),
        ("int8", None, [-1] * 4),
        ("fp16", None, [-1] * 4),
    ],
)
def test_the_rule_is_that_of_1_x(precision: str, msamp: str | None, usage: list[int]) -> None:
    found = estimate.estimate_training_usage(100, precision, msamp)
    assert found == dict(zip(("model", "optimizer", "gradients", "step"), usage, strict=True))


def test_a_table_in_a_box_is_as_wide_as_its_title() -> None:
    table = estimate.create_ascii_table(["a", "bb"], [["1", "22"], ["333", 4]], "a title that is long")
    lines = table.splitlines()
    assert {len(line) for line in lines} == {len(lines[0])}
    assert cells(table) == [["a title that is long"], ["a", "bb"], ["1", "22"], ["333", "4"]]


def test_an_error_tells_whose_model_is_missing() -> None:
    assert estimate.check_has_model(RuntimeError("Unknown model (x)")) == "timm"
    assert estimate.check_has_model(OSError("x does not appear to have a file named y")) == "transformers"
    assert estimate.check_has_model(OSError()) == "unknown"
    assert estimate.add_timm_hub_prefix("timm/x") == "hf-hub:timm/x"
    assert estimate.add_timm_hub_prefix("resnet50") == "resnet50"
    assert estimate.add_timm_hub_prefix("hf-hub:timm/x") == "hf-hub:timm/x"


def test_the_hub_says_whether_it_has_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    hub: Any = pytest.importorskip("huggingface_hub")
    response = SimpleNamespace(headers={}, request=None, status_code=404)
    answers: list[Any] = [
        hub.errors.GatedRepoError("x", response=response),
        hub.errors.RepositoryNotFoundError("x", response=response),
    ]

    def ask(*args: Any, **kwargs: Any) -> Any:
        raise answers.pop(0)

    monkeypatch.setattr(hub, "model_info", ask)
    assert [estimate.verify_on_hub("x"), estimate.verify_on_hub("x")] == ["gated", "repo"]


def test_it_is_a_script_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, BERT)
    monkeypatch.setattr(sys, "argv", ["accelerate-estimate-memory", str(tmp_path)])
    (script,) = entry_points(group="console_scripts", name="accelerate-estimate-memory")
    assert not script.load()()
    assert "413.18 MB" in capsys.readouterr().out
