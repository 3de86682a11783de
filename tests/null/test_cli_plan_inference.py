"""``accelerate plan-inference``: the table and its numbers, from a configuration alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.cli.main import run
from accelerate.core.errors import SettingError
from accelerate.facade.estimate.activation_formula import (
    TransformerShape,
    activation_bytes,
    reserve_for_inference,
    transformer_shape,
)
from accelerate.facade.estimate.skeleton import build_skeleton

transformers = pytest.importorskip("transformers")

NUMBERS: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EMBEDDING = 1000 * 64 * 4
BLOCK = 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64)
# 2 x batch x length x kv_heads x head_size x bytes
CACHE = 2 * 3 * 100 * 2 * 16 * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of a small Llama, without weights."""
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaConfig(**NUMBERS, dtype="float32", architectures=["LlamaForCausalLM"]).save_pretrained(
        path
    )
    return path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """``cli("MODEL", ...)`` runs the command and returns code, out, err and, with --json, the object."""

    def call(*args: str | Path) -> SimpleNamespace:
        code = run(["plan-inference", *map(str, args)])
        captured = capsys.readouterr()
        found = json.loads(captured.out) if "--json" in args and not code else None
        return SimpleNamespace(code=code, out=captured.out, err=captured.err, found=found)

    return call


def test_a_model_that_fits(cli, folder):
    result = cli(folder, "--device", "24GB", "--cpu", "60GB")
    assert result.code == 0
    lines = result.out.splitlines()
    assert re.split("  +", lines[0]) == ["modules", "device", "weights"]
    assert re.split("  +", lines[1])[:2] == ["model.embed_tokens ... lm_head (8)", "0"]
    assert "note: only weights are counted; with --length so are activations, keys and values" in lines


def test_blocks_stay_whole_and_the_rest_is_stored(cli, folder):
    size = 2 * EMBEDDING + 2 * BLOCK + 2 * 32
    found = cli(folder, "--device", str(size), "--cpu", "1GB", "--json").found
    homes = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.layers.1"), 0)
    assert {name: found["device_map"].get(name) for name in homes} == homes
    assert {found["device_map"][f"model.layers.{n}"] for n in (2, 3)} == {"cpu"}
    assert found["executor"] == 0
    assert found["devices"]["0"]["largest_block"] == EMBEDDING
    assert found["devices"]["0"]["buffers_of_others"] == 2 * 32
    assert found["devices"]["disk"]["budget"] is None


def test_several_devices_and_other_formats(cli, folder):
    found = cli(
        folder, "--device", "1MB", "--device", "300KB", "--cpu", "0", "--dtype", "bf16", "--json"
    ).found
    total = 2 * EMBEDDING + 4 * BLOCK + 64 * 4
    weights = [found["devices"][name]["weights"] for name in ("0", "1", "cpu", "disk")]
    assert sum(weights) == total // 2 + 8 * 4
    small = cli(folder, "--cpu", "1GB", "--dtype", "int4", "--json").found
    assert small["devices"]["cpu"]["weights"] == total // 8 + 2 * 4


def test_keys_values_and_activations_are_part_of_the_plan(cli, folder):
    """PAINS 15: for a given batch and length."""
    result = cli(folder, "--device", "1GB", "--batch", "3", "--length", "100")
    assert "keys and values" in result.out
    assert "3 x 100 tokens: keys and values of 4 blocks x 2 x 2 heads x 16 x 4 bytes" in result.out
    found = cli(folder, "--device", "1GB", "--batch", "3", "--length", "100", "--json").found
    assert found["devices"]["0"]["keys_and_values"] == 4 * CACHE
    assert (
        found["devices"]["0"]["activations"]
        == reserve_for_inference(build_skeleton(str(folder)), 3, 100, 4).working
    )
    tight = cli(folder, "--device", "2MB", "--cpu", "1GB", "--batch", "3", "--length", "100", "--json").found
    devices = tight["devices"]
    assert devices["0"]["keys_and_values"] + devices["cpu"]["keys_and_values"] == 4 * CACHE
    assert sum(value or 0 for name, value in devices["0"].items() if name != "budget") <= 2 * 10**6
    assert devices["0"]["keys_and_values"] == 4 * CACHE, "also of blocks that are stored on the CPU"
    assert set(tight["device_map"].values()) == {0, "cpu"}


def test_the_formulas(folder):
    model = build_skeleton(str(folder))
    need = reserve_for_inference(model, 3, 100, 4)
    assert need.cache == {f"model.layers.{n}": CACHE for n in range(4)}
    assert transformer_shape(model) is not None
    one = TransformerShape(1, 64, 4, 2, 16, 128, gated=True)
    assert need.working == activation_bytes(one, 3, 100, 4) + 3 * 1000 * 8
    body = transformers.AutoModel.from_config(transformers.BertConfig(num_hidden_layers=2))
    assert reserve_for_inference(body, 1, 10, 4).cache == {}
    with torch.device("meta"):
        both = transformers.T5ForConditionalGeneration(transformers.T5Config(num_layers=2, d_model=64))
    assert list(reserve_for_inference(both, 1, 10, 4).cache) == ["decoder.block.0", "decoder.block.1"]
    with pytest.raises(SettingError, match="cannot be counted"):
        reserve_for_inference(nn.Linear(2, 2), 1, 10, 4)
    with pytest.raises(SettingError, match="a batch of 0"):
        reserve_for_inference(model, 0, 10, 4)


def test_this_machine_is_asked_where_nothing_is_typed(cli, folder):
    found = cli(folder, "--json").found
    assert found["device_map"] == {"": "cpu"}
    assert found["devices"]["cpu"]["budget"] > 10**8


def test_a_factory_of_the_working_folder(cli, tmp_path, monkeypatch):
    text = (
        "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))\n"
    )
    (tmp_path / "my_plan_models.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    found = cli("my_plan_models:build", "--device", "400", "--device", "400", "--json").found
    assert found["device_map"] == {"0": 0, "1": 1}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--device", "100KB", "--cpu", "1GB"], "less than the largest block model.embed_tokens"),
        (["--device", "many"], "'many' is not a size"),
        (["--device", "0", "--cpu", "0"], "every budget is 0"),
        (["--device", "1GB", "--dtype", "float17"], "unknown dtype 'float17'"),
        (["--device", "1MB", "--length", "1000000"], "are reserved"),
        (["--devise", "1MB"], "--device"),
    ],
)
def test_what_cannot_be_planned_is_refused(cli, folder, flags, said):
    """E5: before anything is loaded."""
    result = cli(folder, *flags)
    assert result.code != 0
    assert said in result.err
    assert not result.out


def test_an_unknown_model_is_refused(cli, tmp_path):
    result = cli(tmp_path / "nowhere", "--device", "1GB")
    assert result.code != 0
    assert "nowhere" in result.err
