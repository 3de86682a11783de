"""Calls on models in 8 and 4 bits, for any package named accelerate.

    python -m tests.clients.quantization OUT.json

The public package quantizes on an accelerator only, so loading itself is not among them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate.utils import BnbQuantizationConfig, bnb
from tests.clients.probe import main

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"load_in_8bit": True},
    {"load_in_4bit": True},
    {"load_in_8bit": True, "load_in_4bit": True},
    {"load_in_8bit": "yes"},
    {"load_in_4bit": 1},
    {"load_in_8bit": True, "llm_int8_threshold": 3},
    {"load_in_8bit": True, "llm_int8_threshold": "6"},
    {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    {"load_in_4bit": True, "bnb_4bit_quant_type": "int4"},
    {"load_in_4bit": True, "bnb_4bit_use_double_quant": "a"},
    {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bf16"},
    {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32},
    {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float16"},
    {"load_in_4bit": True, "bnb_4bit_compute_dtype": 3},
    {"load_in_8bit": True, "torch_dtype": "bf16"},
    {"load_in_8bit": True, "torch_dtype": "x"},
    {"load_in_8bit": True, "skip_modules": ["a"]},
    {"load_in_8bit": True, "skip_modules": "a"},
    {"load_in_8bit": True, "keep_in_fp32_modules": ["a"]},
    {"load_in_8bit": True, "keep_in_fp32_modules": "a"},
)


class Net(nn.Module):
    """Two linear layers between an embedding and an output layer, which may be tied."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 64)
        self.block = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.head = nn.Linear(64, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def options(folder: Path) -> list[Any]:
    """The attributes of each configuration, or the class of its error."""
    return [_attributes(given) for given in OPTIONS]


def _attributes(given: dict[str, Any]) -> Any:
    try:
        return {name: str(value) for name, value in vars(BnbQuantizationConfig(**given)).items()}
    except Exception as error:  # noqa: BLE001 - what it is, is the result
        return next(kind.__name__ for kind in (ValueError, TypeError) if isinstance(error, kind))


def output_layers(folder: Path) -> list[list[str]]:
    """The names that are not converted, of plain models and of transformers'."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, LlamaModel

    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 64,
    }  # fmt: skip
    models = (
        Net(),
        Net(tied=True),
        LlamaForCausalLM(LlamaConfig(**sizes)),
        LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)),
        LlamaModel(LlamaConfig(**sizes)),
        GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=64)),
    )
    return [sorted(set(bnb.get_keys_to_not_convert(model))) for model in models]


def replaced_layers(folder: Path) -> list[Any]:
    """Classes of layers, and classes and flags of their weights, after ``replace_with_bnb_layers``."""
    results: list[Any] = []
    for given in ({"load_in_8bit": True}, {"load_in_4bit": True}):
        for names in (None, ["head"], ["block"], ["0"], ["block.2", "head"], ["lock"]):
            model = bnb.replace_with_bnb_layers(Net(), BnbQuantizationConfig(**given), names)
            kinds = {name: type(m).__name__ for name, m in model.named_modules() if not list(m.children())}
            weights = {
                name: [type(p).__name__, str(p.dtype), str(p.device), p.requires_grad]
                for name, p in model.named_parameters()
            }
            results.append([kinds, weights, bnb.has_4bit_bnb_layers(model)])
    return results


def offloaded_weight(folder: Path) -> list[Any]:
    """The index and files of a weight in 8 bits, and what is left in the model."""
    model = bnb.replace_with_bnb_layers(Net(), BnbQuantizationConfig(load_in_8bit=True), ["head"])
    index: dict[str, Any] = {}
    (folder / "o").mkdir(parents=True, exist_ok=True)
    values, scales = torch.ones(64, 64, dtype=torch.int8), torch.ones(64)
    bnb.quantize_and_offload_8bit(model, values, "block.0.weight", torch.float16, folder / "o", index, scales)
    left: Any = model.get_submodule("block.0").weight
    files = {each.name: each.stat().st_size for each in sorted((folder / "o").iterdir())}
    return [index, files, str(left.device), str(left.dtype), list(left.shape)]


JOBS = {job.__name__: job for job in (options, output_layers, replaced_layers, offloaded_weight)}

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main(JOBS)
