"""Jobs of trl's trainers on a tiny model, for any package named accelerate: no hub, no file of data.

    python -m tests.clients.adopters_trl OUT.json FOLDER JOB...       one process, or one rank of several

Each job gives the losses and gradient norms of every step, and the weights in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from accelerate import PartialState
from tests.clients.adopters import WORDS, llama, tokenizer, weights
from tests.clients.probe import main

STEPS = 4


def sentence(index: int, length: int = 6) -> str:
    """Words chosen by arithmetic, the same everywhere."""
    return " ".join(WORDS[(5 * index + j * j + j) % len(WORDS)] for j in range(length))


def rows(columns: Callable[[int], dict[str, Any]], count: int = 24) -> Any:
    """A dataset of ``count`` rows."""
    import datasets

    return datasets.Dataset.from_list([columns(i) for i in range(count)])


def pairs() -> Any:
    """Prompts with an answer that is preferred to another one, of other lengths."""
    return rows(
        lambda i: {
            "prompt": sentence(i) + " ",
            "chosen": sentence(i + 1, 3 + i % 3),
            "rejected": sentence(i + 2, 5 - i % 3),
        }
    )


def train(kind: str, folder: Path, data: Any, model: Any = None, *, extra: Any = None, **given: Any) -> Any:
    """Train with the trainer of that name; ``given`` goes into its configuration, ``extra`` into it."""
    import trl

    torch.manual_seed(0)
    options: dict[str, Any] = {
        "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1, "max_steps": STEPS,
        "save_strategy": "no", "report_to": [], "seed": 0, "disable_tqdm": True, "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip
    # trl reads the model again from where it was, as its reference.
    model, place = llama() if model is None else model, folder / "model"
    state = PartialState(cpu=True)
    with state.main_process_first():
        if state.is_main_process:
            model.save_pretrained(place)
    model = type(model).from_pretrained(place)
    config = getattr(trl, kind + "Config")(output_dir=str(folder), **(options | given))
    trainer = getattr(trl, kind + "Trainer")(
        model=model,
        args=config,
        train_dataset=data,
        processing_class=tokenizer(),
        **(extra or {}),
    )
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "world": trainer.accelerator.num_processes,
        "loss": [entry["loss"] for entry in log],
        "grad_norm": [float(entry["grad_norm"]) for entry in log],
        "weights": weights(trainer.model),
    }


def lora() -> dict[str, Any]:
    """A configuration of peft."""
    import peft

    return {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}


def sft(folder: Path) -> Any:
    """Texts, padded to the longest of a batch, in windows of two micro-batches."""
    data = rows(lambda i: {"text": sentence(i, 4 + i % 4)})
    return train("SFT", folder, data, gradient_accumulation_steps=2)


def sft_packed(folder: Path) -> Any:
    """Texts packed to one length, with the adapters of peft, evaluated in the end."""
    data = rows(lambda i: {"text": sentence(i, 4 + i % 4)}, 40)
    return train("SFT", folder, data, extra=lora(), packing=True, max_length=16)


def dpo(folder: Path) -> Any:
    """Preferences against a copy of the model."""
    return train("DPO", folder, pairs())


def dpo_lora(folder: Path) -> Any:
    """Preferences against the model without its adapters."""
    return train("DPO", folder, pairs(), extra=lora())


def kto(folder: Path) -> Any:
    """Answers that are wanted or not."""

    def columns(i: int) -> dict[str, Any]:
        return {"prompt": sentence(i) + " ", "completion": sentence(i + 1, 3 + i % 3), "label": i % 2 == 0}

    return train("KTO", folder, rows(columns))


def reward(folder: Path) -> Any:
    """A model with one number for a text, from preferences."""
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(0)
    config = llama().config
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    return train("Reward", folder, pairs(), model)


def grpo(folder: Path) -> Any:
    """Answers drawn from the model, with a reward that counts a word."""

    def count(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    data = rows(lambda i: {"prompt": sentence(i)})
    return train(
        "GRPO", folder, data, extra={"reward_funcs": count}, num_generations=2, max_completion_length=4
    )


_ALL = (sft, sft_packed, dpo, dpo_lora, kto, reward, grpo)
JOBS: dict[str, Callable[[Path], dict[str, Any]]] = {job.__name__: job for job in _ALL}
if __name__ == "__main__":
    main(JOBS)
