"""Jobs of transformers' Trainer on layers that two processes share: python -m ... OUT.json JOB...

Alone a job is what it is to give on two.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed.configuration_utils import DistributedConfig

from accelerate import ParallelismConfig, PartialState
from tests.clients.probe import main
from tests.clients.trainer import history, world
from tests.support.sequences import ROWS, llama, texts


def trained(folder: Path, model: Any, **more: Any) -> dict[str, Any]:
    """Four steps, an evaluation of an odd number of rows, and a model that is written."""
    rows: Any = texts(8)
    options: dict[str, Any] = {
        "per_device_train_batch_size": ROWS, "per_device_eval_batch_size": ROWS, "learning_rate": 1e-2,
        "max_grad_norm": 0.5, "logging_steps": 1, "max_steps": 4, "report_to": [], "save_steps": 4,
        "seed": 0, "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    job = Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **options, **more),
        train_dataset=rows,
        eval_dataset=rows[: ROWS + 1],
    )
    job.train()
    told = history(job)
    found = {what: told[what] for what in ("loss", "grad_norm", "lr", "epoch")}
    found["eval_loss"] = job.evaluate()["eval_loss"]
    PartialState().wait_for_everyone()
    written = LlamaForCausalLM.from_pretrained(folder / "checkpoint-4")
    return {**found, "written": float(sum(p.detach().double().abs().sum() for p in written.parameters()))}


def whole(folder: Path) -> dict[str, Any]:
    """A model that was loaded whole."""
    more = {"parallelism_config": ParallelismConfig(tp_size=2)} if world() > 1 else {}
    return trained(folder, llama(use_cache=False), **more)


def loaded(folder: Path) -> dict[str, Any]:
    """One that transformers has loaded in parts."""
    state = PartialState(cpu=True)
    if state.is_main_process:
        llama(use_cache=False).save_pretrained(folder / "model")
    state.wait_for_everyone()
    parts: dict[str, Any] = {"distributed_config": DistributedConfig(tp_size=2)} if world() > 1 else {}
    model: Any = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, **parts)
    return trained(folder, model, save_only_model=True)


_ALL = (whole, loaded)
JOBS: dict[str, Callable[[Path], dict[str, Any]]] = {job.__name__: job for job in _ALL}


if __name__ == "__main__":
    main(JOBS)
