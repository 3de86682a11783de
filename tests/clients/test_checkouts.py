"""Scripts of transformers in a checkout: TRANSFORMERS_EXAMPLES=PATH/examples/pytorch make test-clients.

No package has these scripts, so nothing is recorded. On one process the weights are compared with a run
under the public package where ``make record-clients`` has made its environment. On two, a shuffled epoch has
another order than there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients import adopters
from tests.clients.probe import declare_torchvision_operators
from tests.clients.record import ADOPTERS_PEER
from tests.support.environment import ROOT, clean

EXAMPLES = Path(os.environ.get("TRANSFORMERS_EXAMPLES") or "/nowhere")
# Without metrics, which come from the hub.
SCRIPTS = {
    "language-modeling/run_clm_no_trainer.py": ["--block_size", "8"],
    "language-modeling/run_mlm_no_trainer.py": ["--max_seq_length", "8"],
}
LAUNCH = ["-m", "accelerate.commands.launch", "--cpu", "--mixed_precision", "no", "--num_machines", "1"]

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="TRANSFORMERS_EXAMPLES names no folder"),
]


def model(kind: str) -> Any:
    """The smallest model that the script trains."""
    if "clm" in kind:
        return adopters.llama()
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=adopters.VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=16,
        )
    )  # fmt: skip


def trained(python: Path | str, size: int, script: str, folder: Path) -> dict[str, torch.Tensor]:
    """The weights that a script saves after four steps."""
    from safetensors.torch import load_file

    declare_torchvision_operators()
    folder.mkdir()
    start, words = folder / "start", adopters.tokenizer()
    words.add_special_tokens({"mask_token": "w59"})
    words.model_max_length = 16
    model(script).save_pretrained(start)
    words.save_pretrained(start)
    lines = [" ".join(f"w{(i * i + j) % 50}" for j in range(8)) for i in range(40)]
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    command = [
        str(python), *LAUNCH, "--num_processes", str(size), "-m", "tests.clients.probe",
        str(EXAMPLES / script),
        "--model_name_or_path", str(start), "--train_file", str(folder / "text.txt"),
        "--validation_file", str(folder / "text.txt"), "--per_device_train_batch_size", "2",
        "--max_train_steps", "4", "--seed", "0", "--output_dir", str(folder / "out"), *SCRIPTS[script],
    ]  # fmt: skip
    done = subprocess.run(
        command, env=clean({"HOME": folder}), cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return load_file(folder / "out" / "model.safetensors")


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_trains(script: str, tmp_path: Path) -> None:
    one = trained(sys.executable, 1, script, tmp_path / "one")
    two = trained(sys.executable, 2, script, tmp_path / "two")
    start = model(script).state_dict()
    for weights in (one, two):
        assert all(value.isfinite().all() for value in weights.values())
        assert any(not torch.equal(value, start[name]) for name, value in weights.items())
    if ADOPTERS_PEER.exists():
        peer = trained(ADOPTERS_PEER, 1, script, tmp_path / "peer")
        torch.testing.assert_close(one, peer, rtol=0, atol=1e-4)
