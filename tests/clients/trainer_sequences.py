"""Jobs of transformers' Trainer on sequences that two processes share: python -m ... OUT.json JOB...

Alone a job is what it is to give on two.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from accelerate import ParallelismConfig
from tests.clients.probe import main
from tests.clients.trainer import history, world
from tests.support.sequences import LENGTH, ROWS, llama, texts


def shared(folder: Path, size: str, window: int, **engine: Any) -> dict[str, Any]:
    """Four steps and an evaluation; labels are unevenly shared, and some parts have none."""
    rows: Any = [{**row, "position_ids": torch.arange(LENGTH)} for row in texts(8)]
    sizes: dict[str, Any] = {size: 2}
    more: dict[str, Any] = {"parallelism_config": ParallelismConfig(**sizes), **engine} if world() > 1 else {}
    options: dict[str, Any] = {
        "per_device_train_batch_size": ROWS, "per_device_eval_batch_size": ROWS, "learning_rate": 1e-2,
        "gradient_accumulation_steps": window, "logging_steps": 1, "num_train_epochs": 1, "report_to": [],
        "save_strategy": "no", "seed": 0, "disable_tqdm": True, "use_cpu": True,
        "remove_unused_columns": False,
    }  # fmt: skip
    job = Trainer(
        model=llama(use_cache=False),
        args=TrainingArguments(output_dir=str(folder), **options, **more),
        train_dataset=rows,
        eval_dataset=rows[: 2 * ROWS],
    )
    job.train()
    found = history(job)
    return {
        **{what: found[what] for what in ("loss", "grad_norm", "lr", "epoch")},
        "eval_loss": job.evaluate()["eval_loss"],
    }


def keys(folder: Path) -> dict[str, Any]:
    """Context parallelism."""
    return shared(folder, "cp_size", 1)


def keys_in_windows(folder: Path) -> dict[str, Any]:
    """The same with windows of two micro-batches, weighted by their tokens."""
    return shared(folder, "cp_size", 2)


def heads(folder: Path) -> dict[str, Any]:
    """Ulysses sequence parallelism."""
    return shared(folder, "sp_size", 1)


def heads_with_zero(folder: Path) -> dict[str, Any]:
    """The same by DeepSpeed, with the optimizer state on the host."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    values = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {"zero_optimization": zero, **dict.fromkeys((*values, "gradient_clipping"), "auto")}
    return shared(folder, "sp_size", 1, deepspeed=config)


_ALL = (keys, keys_in_windows, heads, heads_with_zero)
JOBS: dict[str, Callable[[Path], dict[str, Any]]] = {job.__name__: job for job in _ALL}


if __name__ == "__main__":
    main(JOBS)
