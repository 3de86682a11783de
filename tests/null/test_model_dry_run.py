"""A model spread over processes that are not there: the mesh, what is wrapped, and the bytes of each rank."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import DeepSpeedPlugin
from accelerate.core.errors import AccelerateError
from accelerate.facade.dry_run import dry_run_model, fake_process_group, format_report, main
from accelerate.facade.estimate.memory_estimate import MemoryEstimateConfig, measure_model
from accelerate.facade.estimate.parallel_layouts import ClusterDeviceMemory, list_layouts
from accelerate.parallelism_config import ParallelismConfig
from tests.support.command import launch
from tests.support.parity import Decoder

transformers = pytest.importorskip("transformers")
NUMBERS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}


def llama() -> Any:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**NUMBERS))


def empty() -> nn.Module:
    with torch.device("meta"):
        return Decoder()


def layers() -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")


def test_every_rank_has_its_rows() -> None:
    size, model = 3, empty()
    found = dry_run_model(empty, size, ranks=range(size), plugins=(layers(),))
    assert (found.strategy, found.model, found.mesh) == ("fsdp", "Decoder", {})
    assert found.wrapped == {"Decoder": 1, "Block": 4}
    for part in found.parts:
        rows = [
            (
                len(
                    range(
                        *slice(part.rank * -(-len(p) // size), (part.rank + 1) * -(-len(p) // size)).indices(
                            len(p)
                        )
                    )
                ),
                p,
            )
            for p in model.parameters()
        ]
        numbers = [(n * p[0].numel(), p.requires_grad) for n, p in rows]
        assert part.parameters == sum(n for n, _ in numbers)
        assert part.weights == 4 * part.parameters
        assert part.gradients == 4 * sum(n for n, trained in numbers if trained)
        assert part.optimizer == 2 * part.gradients
    assert sum(part.parameters for part in found.parts) == sum(p.numel() for p in model.parameters())


def test_512_processes_on_a_mesh() -> None:
    sizes = {"dp_replicate": 2, "dp_shard": 32, "tp": 8}
    config = ParallelismConfig(**{f"{name}_size": size for name, size in sizes.items()})
    found = dry_run_model(llama, 512, nodes=64, ranks=(0, 300), plugins=(layers(),), parallelism=config)
    assert found.mesh == sizes
    assert found.wrapped == {"LlamaForCausalLM": 1, "LlamaDecoderLayer": 8}
    assert [part.place for part in found.parts] == [
        {"dp_replicate": 0, "dp_shard": 0, "tp": 0},
        {"dp_replicate": 1, "dp_shard": 5, "tp": 4},
    ]
    on = ClusterDeviceMemory(64, 8, 10**9)
    told = measure_model(llama(), "llama")
    numbers = (told.parameters - told.tensor_parallel_numbers) / 32 + told.tensor_parallel_numbers / (32 * 8)
    for part in found.parts:
        assert part.parameters == pytest.approx(numbers, rel=0.001)
    assert math.prod(found.mesh.values()) == on.count


def test_a_plan_says_what_a_dry_run_counts() -> None:
    bill = {
        way.name: way.estimate
        for way in list_layouts(
            measure_model(llama(), "llama"), MemoryEstimateConfig(), ClusterDeviceMemory(1, 8, 10**9)
        )
    }
    (part,) = dry_run_model(llama, 8, plugins=(layers(),)).parts
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(part, name) == pytest.approx(getattr(bill["FSDP2"], name), rel=0.001)
    config = ParallelismConfig(dp_shard_size=4, tp_size=2)
    (part,) = dry_run_model(llama, 8, plugins=(layers(),), parallelism=config).parts
    told = bill["FSDP2 x TP 2, activation checkpointing"]
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(part, name) == pytest.approx(getattr(told, name), rel=0.001)


def test_replicas_hold_everything() -> None:
    """DDP compares the shapes of all ranks first, which the meta device does not have as numbers."""
    found = dry_run_model(empty, 2, ranks=(0, 1))
    weights = sum(p.numel() * p.element_size() for p in empty().parameters())
    assert (found.strategy, found.wrapped) == ("ddp", {})
    assert [(part.rank, part.weights) for part in found.parts] == [(0, weights), (1, weights)]
    assert "FSDP unit none" in format_report(found)


def test_what_prepare_would_refuse_is_refused() -> None:
    with pytest.raises(AccelerateError, match="6"):
        dry_run_model(empty, 6, parallelism=ParallelismConfig(dp_shard_size=4))
    with pytest.raises(AccelerateError, match="has weights"):
        dry_run_model(Decoder, 2, plugins=(layers(),))
    engine = DeepSpeedPlugin(zero_stage=2)
    with pytest.raises(AccelerateError, match="cannot be run dry"):
        dry_run_model(empty, 2, plugins=(engine,))
    # The group that moves nothing is gone after each.
    assert not torch.distributed.is_initialized()
    with fake_process_group(0, 2), pytest.raises(AccelerateError, match="inside a process group"):
        dry_run_model(empty, 2)


def test_as_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    transformers.LlamaConfig(**NUMBERS, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert main([str(tmp_path), "4", "1", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [part["rank"] for part in found["parts"]] == [0, 3]
    assert main([str(tmp_path / "nowhere"), "4", "1"]) == 2
    assert "dry run: " in capsys.readouterr().err


def test_a_model_that_is_gathered_at_once_is_named(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    transformers.LlamaConfig(**NUMBERS, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for policy, at_once in (("NO_WRAP", True), ("TRANSFORMER_BASED_WRAP", False)):
        monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", policy)
        assert main([str(tmp_path), "4", "1"]) == 0
        text = capsys.readouterr().out
        assert ("one FSDP unit" in text) is at_once
        # In powers of 1000, as `accelerate plan` prints the same shards.
        assert f"weights {sum(p.numel() for p in llama().parameters()) / 1e6:.2f} MB" in text


def test_a_dry_run_shows_mesh_wrapping_and_bytes(tmp_path: Path) -> None:
    """B7: a layout of 512 devices, on this machine, and the script never runs."""
    transformers.LlamaConfig(**NUMBERS, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it ran')\n")
    machines = ["--num_machines=64", "--num_processes=512", "--machine_rank=0", "--main_process_ip=10.0.0.1"]
    mesh = [f"--parallelism_config_{name}_size={size}" for name, size in (("dp_shard", 64), ("tp", 8))]
    how = ["--use_fsdp", "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP", "--mixed_precision=bf16"]
    asked = ["--dry-run", "--cpu", "--use_parallelism_config", *machines, *mesh, *how]
    done = launch(*asked, f"--dry_run_model={tmp_path}", path=script)
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "mesh dp_shard 64 x tp 8 = 512 processes" in lines
    assert "mesh dp_shard 64 x tp 8" in lines
    assert "FSDP unit 1 x LlamaForCausalLM, 8 x LlamaDecoderLayer" in lines
    assert any(line.startswith("rank 511 (dp_shard 63, tp 7): ") for line in lines)
    assert "it ran" not in done.stdout + done.stderr


def test_a_mesh_of_another_size_is_refused_before_anything_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    done = launch(
        *(
            "--dry-run",
            "--cpu",
            "-n",
            "6",
            "--use_parallelism_config",
            "--parallelism_config_dp_shard_size=4",
        ),
        path=script,
    )
    assert done.returncode != 0
    assert "4" in done.stderr
    assert "6" in done.stderr
    assert "Traceback" not in done.stderr
