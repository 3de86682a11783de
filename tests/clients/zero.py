"""Jobs of transformers' Trainer by the DeepSpeed engine, beside those of ``trainer.py``.

python -m tests.clients.zero OUT.json FOLDER JOB...       one rank of several
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from accelerate.state import AcceleratorState
from tests.clients.probe import main
from tests.clients.trainer import STEPS, Rows, evaluation, history, model, samples, trainer


def config(stage: int, **more: Any) -> dict[str, Any]:
    """The engine's configuration as transformers' documentation writes it, with ``"auto"`` values."""
    return {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        **more,
    }


def numbers(job: Any) -> dict[str, Any]:
    """Losses, norms and rates; the weights of stage 3 are in parts."""
    found = history(job)
    return {name: found[name] for name in ("world", "loss", "grad_norm", "lr")}


def train(folder: Path, stage: int, **more: Any) -> dict[str, Any]:
    """What the job ``train`` of trainer.py does, and whole weights saved by the Trainer."""
    given = {"deepspeed": config(stage, **more)}
    job = trainer(folder, Rows(samples()), Rows(samples(7, ragged=True)), **given)
    job.train()
    assert type(job.model_wrapped).__name__ == "DeepSpeedEngine"
    assert job.accelerator.distributed_type == "DEEPSPEED"
    job.save_model(str(folder / "export"))
    job.accelerator.wait_for_everyone()
    exported = load_file(folder / "export" / "model.safetensors").values()
    total = sum(weight.double().abs().sum().item() for weight in exported)
    return numbers(job) | evaluation(job) | {"weights": total}


def two(folder: Path) -> dict[str, Any]:
    """Gradients and optimizer state in parts."""
    return train(folder, 2)


def three(folder: Path) -> dict[str, Any]:
    """Parameters too."""
    return train(folder, 3)


def engines(folder: Path) -> dict[str, Any]:
    """The engine makes optimizer and schedule, by values of the Trainer."""
    params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    schedule = {
        "warmup_min_lr": "auto", "warmup_max_lr": "auto",
        "warmup_num_steps": "auto", "total_num_steps": "auto",
    }  # fmt: skip
    job = trainer(
        folder,
        Rows(samples()),
        deepspeed=config(
            1,
            optimizer={"type": "AdamW", "params": params},
            scheduler={"type": "WarmupDecayLR", "params": schedule},
        ),
    )
    job.train()
    return numbers(job)


def accumulate(folder: Path) -> dict[str, Any]:
    """Windows of two micro-batches, which the Trainer counts and divides by itself."""
    job = trainer(folder, Rows(samples(20, ragged=True)), gradient_accumulation_steps=2, deepspeed=config(2))
    job.train()
    return numbers(job)


def resume(folder: Path) -> dict[str, Any]:
    """Six steps; then again from the third."""
    given: dict[str, Any] = {"deepspeed": config(2), "max_steps": 6}
    whole = trainer(folder / "whole", Rows(samples()), save_strategy="steps", save_steps=3, **given)
    whole.train()
    again = trainer(folder / "again", Rows(samples()), **given)
    again.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-3"))
    return {"whole": numbers(whole), "again": numbers(again)}


def again(folder: Path) -> dict[str, Any]:
    """In stage 3, evaluate, train, and train on: the Trainer keeps the engine, and makes another optimizer.

    One without a state: without DeepSpeed the Trainer goes on with the optimizer that it has.
    """
    results: dict[str, Any] = {}
    shared: dict[str, Any] = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.5}
    for name, given in {"three": {"deepspeed": config(3)}, "parallel": {}}.items():
        job = trainer(folder, Rows(samples()), Rows(samples(7, ragged=True)), **shared, **given)
        losses = [job.evaluate()["eval_loss"]]
        for _ in range(2):
            job.train()
            losses += numbers(job)["loss"]
        results[name] = losses
        AcceleratorState._reset_state(reset_partial_state=False)
    return results


def pretrained(folder: Path) -> dict[str, Any]:
    """In stage 3, ``from_pretrained`` partitions while it loads."""
    import deepspeed

    source: Any = model()
    if int(os.environ["RANK"]) == 0:
        source.save_pretrained(folder / "source")
    job = trainer(folder, Rows(samples()), deepspeed=config(3))
    partitions = is_deepspeed_zero3_enabled()
    job.accelerator.wait_for_everyone()
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder / "source")
    weight = loaded.get_input_embeddings().weight
    inside = hasattr(weight, "ds_id") and weight.numel() == 0
    with deepspeed.zero.GatheredParameters([weight]):
        same = torch.equal(weight, source.get_input_embeddings().weight)
    job.model = job.model_wrapped = loaded
    job.train()
    return {"partitions": partitions, "inside": inside, "same": same, **numbers(job)}


def loaded_first(folder: Path) -> dict[str, Any]:
    """The order of transformers' own examples: arguments, the model, the Trainer; nothing says CPU."""
    if int(os.environ["RANK"]) == 0:
        model().save_pretrained(folder / "source")
    arguments = TrainingArguments(
        str(folder), deepspeed=config(3), per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        max_steps=STEPS, save_strategy="no", report_to=[], seed=0, disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    torch.distributed.barrier()
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder / "source")
    job = Trainer(model=loaded, args=arguments, train_dataset=Rows(samples()))
    job.train()
    return numbers(job)


JOBS: dict[str, Callable[[Path], dict[str, Any]]] = {
    job.__name__: job for job in (two, three, engines, accumulate, resume, again, pretrained, loaded_first)
}


if __name__ == "__main__":
    main(JOBS)
