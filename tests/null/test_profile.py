"""Traces and pictures of the memory: what they show, when they are written, and that none is half."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import profile

from accelerate import Accelerator, ProfileKwargs
from accelerate.core.errors import MissingExtraError, SettingError
from accelerate.watch import memory_report
from accelerate.watch.profile import record_profile
from tests.support.packages import pretend_installed

MB = 2**20


def train(steps: int = 2) -> None:
    """A weight of 1 MB, its Adam state of 2 MB, activations of 4 MB."""
    model = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(torch.ones(2048, 512)).relu().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def events(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"]]


def test_a_trace_and_a_picture_of_what_fills_the_memory(tmp_path: Path) -> None:
    options = ProfileKwargs(output_trace_dir=str(tmp_path / "new" / "traces"), memory_timeline=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    with accelerator.profile() as profiler:
        train()
    folder = tmp_path / "new" / "traces"
    assert sorted(path.name for path in folder.iterdir()) == ["memory_0.png", "profile_0.json"]
    assert "aten::mm" in events(folder / "profile_0.json")

    (line,) = memory_report.read_timelines(profiler)
    assert line.device == "cpu"
    top = {name: values.max() / MB for name, values in line.bytes.items()}
    assert top["optimizer state"] >= 2
    assert top["gradients"] >= 1
    assert top["activations"] >= 4
    assert (line.total >= 0).all()
    assert (np.diff(line.seconds) >= 0).all()

    colors, image = import_module("matplotlib.colors"), import_module("matplotlib.image")
    pixels = image.imread(folder / "memory_0.png")[..., :3]
    for name in ("optimizer state", "gradients", "activations"):
        near = np.abs(pixels - np.array(colors.to_rgb(memory_report.KINDS[name]))).max(axis=2) < 0.02
        assert near.mean() > 0.001, f"{name} is an area of the picture"


def test_without_torchs_memory_profile_the_total_is_drawn(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delattr(
        next(each for each in profile.__mro__ if "_memory_profile" in vars(each)), "_memory_profile"
    )
    with record_profile(ProfileKwargs(output_trace_dir=str(tmp_path), memory_timeline=True), 3) as profiler:
        kept = torch.ones(MB)
        train()
    (line,) = memory_report.read_timelines(profiler)
    assert list(line.bytes) == ["other"]
    assert line.total.max() >= 4 * MB + 4 * MB
    assert line.total[-1] >= kept.nbytes
    assert (tmp_path / "memory_3.png").stat().st_size > 5000


def test_where_torch_loses_its_way_the_total_is_drawn_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def raise_mismatch(self: Any) -> None:
        raise AssertionError("version mismatch: {id=10: (0, 2)}")

    holder = next(each for each in profile.__mro__ if "_memory_profile" in vars(each))
    monkeypatch.setattr(holder, "_memory_profile", raise_mismatch)
    options = ProfileKwargs(output_trace_dir=str(tmp_path), memory_timeline=True)
    with (
        pytest.warns(UserWarning, match="shown as other: version mismatch"),
        record_profile(options, 0) as profiler,
    ):
        train()
    with pytest.warns(UserWarning, match="shown as other"):
        (line,) = memory_report.read_timelines(profiler)
    assert list(line.bytes) == ["other"]


def test_many_moments_are_thinned_to_the_fullest() -> None:
    count = 10 * memory_report.MOMENTS
    seconds = np.linspace(5, 6, count)
    steps = np.zeros(count, dtype=np.int64)
    steps[12345] = 7 * MB
    line = memory_report._make_timeline("cpu", seconds, {"other": steps, "inputs": np.zeros_like(steps)})
    assert len(line.seconds) == memory_report.MOMENTS
    assert line.total.max() == 7 * MB
    assert list(line.bytes) == ["other"]


def test_the_colours_have_numbers_of_the_fullest_moment() -> None:
    sizes = {"parameters": np.array([2, 2, 2]) * MB, "activations": np.array([0, 3, 1]) * MB}
    line = memory_report._make_timeline("cpu", np.array([0.0, 0.5, 1.0]), sizes)
    axes = import_module("matplotlib.figure").Figure().subplots()
    memory_report._draw_panel(axes, line)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "activations: 3.00 MB",
        "parameters: 2.00 MB",
    ]


def test_no_allocation_makes_a_picture_too(tmp_path: Path) -> None:
    memory_report.draw_timelines([], tmp_path / "empty.png")
    image = import_module("matplotlib.image")
    assert image.imread(tmp_path / "empty.png").shape[0] > 100


def steps(options: ProfileKwargs, count: int) -> None:
    with record_profile(options, 0) as profiler:
        for index in range(count):
            with torch.profiler.record_function(f"step {index}"):
                torch.ones(4).sum()
            profiler.step()


@pytest.mark.parametrize("count", [3, 4, 5])
def test_a_complete_cycle_is_kept_whatever_comes_after(tmp_path: Path, count: int) -> None:
    """The profile may end while torch warms up for the next cycle, or records it: that one is left out."""
    cycle = {"wait": 1, "warmup": 1, "active": 1}
    seen: list[Any] = []
    steps(ProfileKwargs(["cpu"], cycle, seen.append, output_trace_dir=str(tmp_path)), count)
    assert len(seen) == (2 if count == 5 else 1), "torch calls it for a cycle that was cut short, too"
    names = events(tmp_path / "profile_0.json")
    assert "step 2" in names
    assert "step 4" not in names


def test_a_later_cycle_replaces_the_trace(tmp_path: Path) -> None:
    steps(ProfileKwargs(["cpu"], {"wait": 0, "warmup": 1, "active": 1}, output_trace_dir=str(tmp_path)), 4)
    names = events(tmp_path / "profile_0.json")
    assert "step 3" in names
    assert "step 1" not in names


def test_a_schedule_that_never_records_is_announced(tmp_path: Path) -> None:
    options = ProfileKwargs(["cpu"], {"wait": 9, "warmup": 1, "active": 1}, output_trace_dir=str(tmp_path))
    with pytest.warns(UserWarning, match=r"no trace was written.*profiler\.step\(\)"):
        steps(options, 2)
    assert not list(tmp_path.iterdir())


def test_an_error_in_the_block_leaves_the_trace_until_then(tmp_path: Path) -> None:
    def fail() -> None:
        torch.ones(4).sum()
        raise KeyError("no such column")

    with pytest.raises(KeyError), record_profile(ProfileKwargs(output_trace_dir=str(tmp_path)), 0):
        fail()
    assert "aten::sum" in events(tmp_path / "profile_0.json")


def test_an_error_of_writing_leaves_no_half_file(tmp_path: Path, monkeypatch) -> None:
    def fill_the_disk(lines: Any, path: Path) -> None:
        path.write_text("half")
        raise OSError("no space left on device")

    monkeypatch.setattr(memory_report, "draw_timelines", fill_the_disk)
    options = ProfileKwargs(output_trace_dir=str(tmp_path), memory_timeline=True)
    with pytest.raises(OSError, match="no space"), record_profile(options, 0):
        train(1)
    assert [path.name for path in tmp_path.iterdir()] == ["profile_0.json"]


def test_options_that_cannot_take_effect_are_refused(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(SettingError, match="no folder is given"):
        ProfileKwargs(memory_timeline=True).build()

    def export(profiler: Any) -> None:
        profiler.export_chrome_trace(str(tmp_path / "own.json"))

    options = ProfileKwargs(["cpu"], on_trace_ready=export, output_trace_dir=str(tmp_path))
    with pytest.raises(SettingError, match="leave one of the two out"), record_profile(options, 0):
        torch.ones(4).sum()
    assert [path.name for path in tmp_path.iterdir()] == ["own.json"]

    pretend_installed(monkeypatch, lambda module: module != "matplotlib")
    with pytest.raises(MissingExtraError, match="pip install matplotlib"):
        ProfileKwargs(memory_timeline=True, output_trace_dir=str(tmp_path)).build()


def operator_rows(table: str) -> list[str]:
    """The names in a table of operators, in its order, as torch shortens them."""
    ruled = [
        n for n, line in enumerate(table.splitlines()) if set(line.strip()) <= {"-", " "} and "-" in line
    ]
    return [re.split(" {2,}", line.strip())[0] for line in table.splitlines()[ruled[1] + 1 : ruled[2]]]


def test_the_costliest_operators_are_beside_the_trace(tmp_path: Path) -> None:
    options = ProfileKwargs(output_trace_dir=str(tmp_path), operator_table=3)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    with accelerator.profile() as profiler:
        train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["operators_0.txt", "profile_0.json"]
    rows = operator_rows((tmp_path / "operators_0.txt").read_text())
    costs = {each.key: each.self_cpu_time_total for each in profiler.key_averages()}
    costliest = sorted(costs, key=lambda key: -costs[key])[:3]
    assert len(rows) == 3
    for row, key in zip(rows, costliest, strict=True):  # torch shortens names of about 60 letters and more
        assert row == key or (row.endswith("...") and len(row) == 60 and key.startswith(row[:-3]))


def test_without_a_folder_the_operators_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with Accelerator(cpu=True).profile(ProfileKwargs(operator_table=2)):
        train()
    text = capsys.readouterr().out
    assert text.startswith("the costliest operators of rank 0:")
    assert len(operator_rows(text)) == 2


def test_the_printed_operators_are_those_of_the_last_complete_cycle(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The block ends in the warm-up of the second cycle, for which torch has begun a new record."""
    schedule = {"wait": 2, "warmup": 1, "active": 1, "repeat": 0}
    with Accelerator(cpu=True).profile(ProfileKwargs(operator_table=2, schedule_option=schedule)) as profiler:
        for _ in range(6):
            train(1)
            profiler.step()
    assert len(operator_rows(capsys.readouterr().out)) == 2


def test_a_block_that_ends_before_the_first_cycle_warns_in_place_of_a_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ProfileKwargs(operator_table=2, schedule_option={"wait": 2, "warmup": 1, "active": 1})
    with (
        pytest.warns(UserWarning, match="no table was made: the profile ended before"),
        Accelerator(cpu=True).profile(options) as profiler,
    ):
        profiler.step()
    assert capsys.readouterr().out == ""


def test_nothing_is_printed_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    with Accelerator(cpu=True).profile():
        train(1)
    assert capsys.readouterr().out == ""


def test_a_block_that_runs_out_of_memory_names_who_holds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1024, 1024, bias=False)  # 4 MB, its gradient too, and 8 MB of Adam's state
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))

    def step_and_fail() -> None:
        kept = torch.zeros(16 * MB // 4)
        accelerator.backward(model(kept[:1024]).sum())
        optimizer.step()
        raise torch.OutOfMemoryError("the device is full")

    with (
        pytest.raises(torch.OutOfMemoryError),
        accelerator.profile(ProfileKwargs(output_trace_dir=str(tmp_path))),
    ):
        step_and_fail()
    text = (tmp_path / "out_of_memory_0.txt").read_text()
    for kind, size in (("parameters", "4.00 MB"), ("gradients", "4.00 MB"), ("optimizer state", "8.00 MB")):
        assert any(line.split(maxsplit=2) == [*size.split(), kind] for line in text.splitlines()), text
    largest = text.partition("the largest of")[2].splitlines()[1:]
    assert any("a tensor (4194304, float32)" in line and "16.00 MB" in line for line in largest)
    assert any("weight (1024x1024, float32)" in line for line in largest)
    assert any("exp_avg_sq of weight" in line for line in largest)
    assert "out_of_memory_0.txt says which tensors hold it" in capsys.readouterr().err


def test_another_error_leaves_no_list_of_holders(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="no"),
        Accelerator(cpu=True).profile(ProfileKwargs(output_trace_dir=str(tmp_path))),
    ):
        raise RuntimeError("no")
    assert not list(tmp_path.glob("out_of_memory*"))
