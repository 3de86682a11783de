"""Trains a Llama by transformers' Trainer: ``python -m tests.xla.trainer_job cpu|fsdp FILE``.

``fsdp`` asks for torch_xla's FSDP by SPMD through the Trainer's own keys, on four virtual devices. The
Trainer wraps the model; its loader and its optimizer are prepared by this package.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

KEYS = {"xla": True, "xla_fsdp_v2": True, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}


class WrappingTrainer(Trainer):
    """A Trainer that makes its optimizer once it has wrapped the model: transformers 5.23 then has none."""

    def _wrap_model(self, model: Any, training: bool = True) -> Any:
        wrapped = super()._wrap_model(model, training)
        if self.optimizer is None:
            self.create_optimizer(wrapped)
        return wrapped


def main(kind: str, file: str) -> None:
    """Trains four steps and writes the losses, and how a parameter is sharded."""
    options: dict[str, Any] = {"use_cpu": True}
    if kind == "fsdp":
        import torch_xla.runtime

        torch_xla.runtime.use_spmd()
        options = {"fsdp": "full_shard", "fsdp_config": KEYS}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (32, 16))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=8,
            max_steps=4,
            logging_steps=1,
            learning_rate=1e-2,
            optim="adamw_torch",  # the default is fused, which torch does not have for XLA
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **options,
        )
        trainer = WrappingTrainer(model, arguments, train_dataset=rows)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result: dict[str, Any] = {"losses": losses}
    if kind == "fsdp":
        import torch_xla

        parameters = trainer.model.named_parameters()
        result["shardings"] = {n: torch_xla._XLAC._get_xla_sharding_spec(p) for n, p in parameters}
    Path(file).write_text(json.dumps(result))


if __name__ == "__main__":
    if sys.argv[1] == "fsdp":
        os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="4", ACCELERATE_TORCH_DEVICE="xla")
    main(*sys.argv[1:])
