"""``accelerate plan``: which way to spread a training fits some devices, from a configuration alone."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from accelerate.cli.main import run
from accelerate.core.errors import SettingError
from accelerate.facade.estimate.memory_estimate import MemoryEstimateConfig, ModelSizes, measure_model
from accelerate.facade.estimate.parallel_layouts import (
    SPARE,
    ClusterDeviceMemory,
    ParallelLayoutEstimate,
    explain_choice,
    list_layouts,
    parse_cluster,
    recommend_layout,
)
from accelerate.facade.estimate.skeleton import build_skeleton
from accelerate.offload.module_sizes import build_module_tree
from accelerate.offload.placement_planner import plan_placement
from tests.null.test_cli_estimate import LLAMA, write
from tests.support.environment import ROOT

transformers = pytest.importorskip("transformers")
NUMBERS: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EMBEDDING = 1000 * 64
MATRICES = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128
BLOCK = MATRICES + 2 * 64
Run = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of a small Llama, without weights."""
    path = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(**NUMBERS, dtype="float32", architectures=["LlamaForCausalLM"])
    config.save_pretrained(path)
    return path


@pytest.fixture
def facts(folder: Path) -> ModelSizes:
    return measure_model(build_skeleton(folder), "llama")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Run:
    """``cli("MODEL", ...)`` runs the command and returns code, out, err and, with --json, the object."""

    def call(*args: str | Path) -> SimpleNamespace:
        code = run(["plan", *map(str, args)])
        captured = capsys.readouterr()
        found = json.loads(captured.out) if "--json" in args and not code else None
        return SimpleNamespace(code=code, out=captured.out, err=captured.err, found=found)

    return call


def test_a_stdout_without_lines_of_boxes_costs_no_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file or a pipe on Windows."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "cp1252", write_through=True))
    assert run(["plan", str(folder), "--gpus", "2x1GB", "--write", str(tmp_path / "out.yaml")]) == 0
    assert (tmp_path / "out.yaml").is_file()
    assert b"+----" in written.getvalue()


# ---------------------------------------------------------------- facts and sums


NEWEST_TRANSFORMERS = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="the transformers for Python 3.10 do not split embeddings and heads"
)


@NEWEST_TRANSFORMERS
def test_blocks_and_matrices_are_counted(facts: ModelSizes) -> None:
    assert facts.largest_block == BLOCK
    assert facts.outside_blocks == 2 * EMBEDDING + 64
    # The embeddings and the head are cut by the model's plan too.
    assert facts.tensor_parallel_numbers == 4 * MATRICES + 2 * EMBEDDING


def named(found: list[ParallelLayoutEstimate]) -> dict[str, ParallelLayoutEstimate]:
    return {way.name: way for way in found}


def test_every_part_is_the_sum_that_it_says(facts: ModelSizes) -> None:
    on = ClusterDeviceMemory(2, 4, 10**9)
    found = named(list_layouts(facts, MemoryEstimateConfig(mixed_precision="bf16"), on))
    n = facts.parameters
    buffers = facts.buffers
    copies, sharded = found["DDP"].estimate, found["FSDP2"].estimate
    assert (copies.weights, copies.gradients, copies.optimizer) == (4 * n + buffers, 4 * n, 8 * n)
    assert sharded.weights == -(-4 * n // 8) + buffers
    inside = found["FSDP2, HSDP"].estimate
    assert inside.optimizer == 8 * n // 4
    # Around the blocks 16 bits all the time; two blocks; the gradients of one in 16 and 32 bits.
    assert sharded.copies == 2 * (facts.outside_blocks + 2 * BLOCK) + 6 * BLOCK
    assert found["FSDP2, reshard_after_forward=false"].estimate.copies == 2 * n + 6 * BLOCK
    tensor = found["FSDP2 x TP 2, activation checkpointing"].estimate
    assert tensor.gradients == pytest.approx((4 * n - 2 * facts.tensor_parallel_numbers) / 4, abs=1)
    host = found["FSDP2, activation checkpointing, CPU offload"].estimate
    assert (host.weights, host.gradients, host.optimizer) == (buffers, 0, 0)
    assert host.host == sharded.weights - buffers + sharded.gradients + sharded.optimizer


def test_whole_gradients_wait_for_the_last_micro_batch(facts: ModelSizes) -> None:
    """Sharding reduces once in a window, an engine in every micro-batch; copies have whole ones anyway."""
    on = ClusterDeviceMemory(2, 4, 10**9)
    how = MemoryEstimateConfig(mixed_precision="bf16")
    before, after = (named(list_layouts(facts, replace(how, accumulation=n), on)) for n in (1, 4))
    for name, way in after.items():
        more = way.estimate.total - before[name].estimate.total
        assert more == way.estimate.unreduced == way.estimate.gradients - before[name].estimate.gradients
        assert bool(more) == ("FSDP2" in name), name
    # In float32, in which they are reduced; layers over 2 have a part of them.
    n = 4 * facts.parameters
    assert after["FSDP2"].estimate.gradients == n
    assert after["FSDP2, HSDP"].estimate.unreduced == n - n // 4
    tensor = after["FSDP2 x TP 2, activation checkpointing"].estimate
    assert tensor.gradients == pytest.approx(n - 2 * facts.tensor_parallel_numbers, abs=1)
    host = after["FSDP2, activation checkpointing, CPU offload"].estimate
    assert (host.gradients, host.host) == (
        n,
        before["FSDP2, activation checkpointing, CPU offload"].estimate.host,
    )
    with pytest.raises(SettingError, match="accumulation is 0"):
        MemoryEstimateConfig(accumulation=0)


def test_layers_are_divided_only_where_heads_allow(facts: ModelSizes) -> None:
    found = named(list_layouts(facts, MemoryEstimateConfig(), ClusterDeviceMemory(1, 8, 10**9)))
    assert [name for name in found if "TP" in name] == ["FSDP2 x TP 2, activation checkpointing"]
    plain = replace(facts, tensor_parallel_numbers=0)
    assert not [
        way
        for way in list_layouts(plain, MemoryEstimateConfig(), ClusterDeviceMemory(1, 8, 10**9))
        if "TP" in way.name
    ]


def test_one_device_exchanges_nothing(facts: ModelSizes) -> None:
    (only,) = list_layouts(facts, MemoryEstimateConfig(), ClusterDeviceMemory(1, 1, 10**9))
    assert only.estimate.weights == 4 * facts.parameters + facts.buffers


def test_the_first_that_fits_is_recommended(facts: ModelSizes) -> None:
    how = MemoryEstimateConfig(length=128)
    found = list_layouts(facts, how, ClusterDeviceMemory(1, 4, 1))
    for way in found:
        on = ClusterDeviceMemory(1, 4, int(way.estimate.total / (1 - SPARE)) + 1)
        assert way.fits(on)
        best = recommend_layout(found, on)
        if way.needs_library:
            continue
        assert best is not None
        assert found.index(best) <= found.index(way)
        assert best.name in explain_choice(best, found, on)
    assert recommend_layout(found, ClusterDeviceMemory(1, 4, 1000)) is None
    assert explain_choice(None, found, ClusterDeviceMemory(1, 4, 1000)).startswith(
        "Nothing fits: the leanest, "
    )
    roomy = ClusterDeviceMemory(1, 4, 10**12)
    assert found[0] is recommend_layout(found, roomy)
    assert "no way exchanges less" in explain_choice(found[0], found, roomy)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("8x80GB", ClusterDeviceMemory(1, 8, 80 * 10**9)),
        ("4x8x80GiB", ClusterDeviceMemory(4, 8, 80 * 2**30)),
        ("2 x 24gb", ClusterDeviceMemory(1, 2, 3 * 10**9)),
    ],
)
def test_devices_are_read(text: str, found: ClusterDeviceMemory) -> None:
    assert parse_cluster(text.replace("gb", "GB")) in (found, replace(found, memory=24 * 10**9))


@pytest.mark.parametrize("text", ["", "80GB", "0x80GB", "8x", "axb", "1x2x3x4GB", "8x80XB", "8x80"])
def test_what_says_no_devices_is_refused(text: str) -> None:
    with pytest.raises(SettingError):
        parse_cluster(text)


# ---------------------------------------------------------------- the command


@NEWEST_TRANSFORMERS
def test_the_page_shows_what_the_command_prints(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "Llama-3-8B", LLAMA)
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    found = re.search(r"```sh\naccelerate plan ([^\n]*)\n```\n\n```text\n(.*?)```", page, re.DOTALL)
    assert found is not None
    assert cli(*found.group(1).split()).out == found.group(2)


def test_it_prints_a_table_bars_and_a_reason(cli: Run, folder: Path) -> None:
    result = cli(folder, "--gpus", "4x1GB", "--length", "64")
    assert result.code == 0
    assert "What each of 4 devices holds" in result.out
    assert "│take│" in result.out
    assert max(map(len, result.out.splitlines())) <= 100
    assert "█ weights   ▓ gradients   ▒ optimizer   ░ copies   # activations" in result.out
    assert result.out.rstrip().splitlines()[-1].startswith("Take: DDP. It fits with ")


def test_sizes_are_printed_in_the_units_in_which_they_are_typed(cli: Run, folder: Path) -> None:
    """80 GB are 80 GB, in both plans, and both say what a GB is."""
    result = cli(folder, "--gpus", "8x80GB", "--length", "64")
    assert "on 8 devices with 80.00 GB." in result.out
    assert "so 72.00 GB count as fitting; 1 GB is 1000^3 bytes." in result.out
    placed = plan_placement(build_module_tree(build_skeleton(str(folder))), {0: "80GB"})
    assert "\n0       80.00 GB  " in str(placed)


def test_json_has_every_number(cli: Run, folder: Path) -> None:
    found = cli(folder, "--gpus", "4x1GB", "--json").found
    assert found["recommended"] == "DDP"
    for way in found["ways"]:
        parts = ("weights", "gradients", "optimizer", "copies", "activations")
        assert way["peak"] == sum(way[name] for name in parts)


def test_accumulation_is_said_and_written(cli: Run, folder: Path, tmp_path: Path) -> None:
    asked = (folder, "--gpus", "4x1GB", "--accumulation", "8")
    result = cli(*asked, "--take", "5", "--write", tmp_path / "a.yaml")
    assert "keep unsharded gradients until the last micro-batch: up to" in " ".join(result.out.split())
    assert yaml.safe_load((tmp_path / "a.yaml").read_text())["gradient_accumulation_steps"] == 8
    waiting = {way["name"]: way["waiting"] for way in cli(*asked, "--json").found["ways"]}
    assert waiting["FSDP2"] > 0 == waiting["ZeRO 3"] == waiting["DDP"]
    assert "until the last micro-batch" not in cli(folder, "--gpus", "4x1GB").out


def written(cli: Run, folder: Path, path: Path, *more: str) -> dict[str, Any]:
    result = cli(folder, "--gpus", "8x1GB", "--write", path, *more)
    assert result.code == 0, result.err
    assert f"accelerate launch --config_file {path}" in result.err
    return yaml.safe_load(path.read_text())


def test_what_is_written_is_what_a_launch_takes(cli: Run, folder: Path, tmp_path: Path) -> None:
    """Every row: ``accelerate launch --dry-run`` takes the file."""
    rows = cli(folder, "--gpus", "8x1GB", "--json").found["ways"]
    script = tmp_path / "train.py"
    script.write_text("")
    for number, way in enumerate(rows, 1):
        path = tmp_path / f"{number}.yaml"
        config = written(cli, folder, path, "--take", str(number))
        assert config["num_processes"] == 8
        assert config["mixed_precision"] == "bf16"
        if "TP" in way["name"]:
            assert config["parallelism_config"] == {
                "parallelism_config_dp_shard_size": 4,
                "parallelism_config_tp_size": 2,
            }
        if "ZeRO" in way["name"]:
            assert config["deepspeed_config"]["zero_stage"] == int(way["name"][-1])
        code = run(["launch", "--dry-run", "--cpu", "--config_file", str(path), str(script)])
        assert code == 0, way["name"]


def test_nothing_is_overwritten(cli: Run, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("mine: 1\n")
    result = cli(folder, "--gpus", "8x1GB", "--write", path)
    assert result.code == 2
    assert "is there already" in result.err
    assert path.read_text() == "mine: 1\n"


def test_a_picture_is_drawn(cli: Run, folder: Path, tmp_path: Path) -> None:
    assert cli(folder, "--gpus", "2x1GB", "--plot", tmp_path / "a.png").code == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--gpus", "many"), "'many' does not say how many devices there are"),
        (("--gpus", "8x80GB", "--optimizer", "adamv"), "did you mean 'adam'"),
        (("--gpus", "8x80GB", "--mixed-precision", "bf61"), "unknown mixed precision 'bf61'"),
        (("--gpus", "8x80GB", "--take", "99", "--write", "x.yaml"), "there is no row 99"),
        (
            ("--gpus", "8x1KB", "--write", "x.yaml"),
            "nothing to write\n  fix: more or larger devices",
        ),
        ((), "fix: --gpus NxSIZE: 8x80GB, or"),
    ],
)
def test_mistakes_are_said_in_words(cli: Run, folder: Path, more: tuple[str, ...], words: str) -> None:
    result = cli(folder, *more)
    assert result.code == 2
    assert words in result.err
    assert "Traceback" not in result.err
