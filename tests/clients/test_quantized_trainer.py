"""transformers' Trainer trains adapters of peft on a base that ``load_and_quantize_model`` has quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.utils import BnbQuantizationConfig, load_and_quantize_model
from tests.clients.big import library, llama, needs

pytestmark = [needs("transformers", "peft", "bitsandbytes"), pytest.mark.timeout(120)]


def test_adapters_are_trained_on_a_base_of_4_bits(tmp_path: Path) -> None:
    transformers, peft = library("transformers"), library("peft")
    config = BnbQuantizationConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="fp32"
    )
    base: Any = load_and_quantize_model(llama(), config)
    frozen = {name: value.clone() for name, value in base.state_dict().items()}
    assert type(base.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    assert type(base.lm_head) is torch.nn.Linear
    torch.manual_seed(0)
    lora = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, lora)
    tokens = [(7 * i + 3) % 61 for i in range(8)]
    rows = [{"input_ids": tokens, "labels": tokens} for _ in range(32)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=8, per_device_train_batch_size=4, learning_rate=0.05, logging_steps=1,
        report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 8
    assert losses[-1] < 0.9 * losses[0], losses
    torch.testing.assert_close(model.unload().state_dict(), frozen, rtol=0, atol=0)
