"""Jobs of transformers' Trainer on a tiny model, for any package named accelerate: no hub, no file of data.

    python -m tests.clients.trainer OUT.json JOB...       one process, or one rank of several

Every job is a function of a folder that returns plain numbers; rank 0 writes them all to OUT.json.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from accelerate import Accelerator, InitProcessGroupKwargs, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from tests.clients.probe import main

VOCABULARY, LENGTH, SAMPLES, STEPS = 64, 8, 24, 6


def samples(count: int = SAMPLES, ragged: bool = False) -> list[dict[str, list[int]]]:
    """``count`` token sequences made by arithmetic, the same everywhere; ragged labels end with -100."""
    rows = []
    for i in range(count):
        tokens = [(7 * i + j * j + 3) % VOCABULARY for j in range(LENGTH)]
        kept = LENGTH - (i % 5 if ragged else 0)
        rows.append({"input_ids": tokens, "labels": tokens[:kept] + [-100] * (LENGTH - kept)})
    return rows


class Rows(Dataset[Any]):
    """A map-style dataset."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Stream(IterableDataset[Any]):
    """An iterable dataset without a length."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def world() -> int:
    """How many processes train."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def model() -> LlamaForCausalLM:
    """Two layers of width 32, the same weights at every call."""
    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
        )
    )  # fmt: skip


def trainer(folder: Path, train: Any = None, evaluation: Any = None, **given: Any) -> Trainer:
    """A Trainer with the arguments that all jobs share; ``given`` comes on top."""
    options: dict[str, Any] = {
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 1e-2,
        "logging_steps": 1, "max_steps": STEPS, "save_strategy": "no", "report_to": [], "seed": 0,
        "disable_tqdm": True, "use_cpu": True, "remove_unused_columns": False,
    }  # fmt: skip
    arguments = TrainingArguments(output_dir=str(folder), **(options | given))
    return Trainer(model=model(), args=arguments, train_dataset=train, eval_dataset=evaluation)


def history(done: Trainer) -> dict[str, Any]:
    """Losses, gradient norms and rates of every step, and the world it ran in."""
    log = [entry for entry in done.state.log_history if "loss" in entry]
    return {
        "world": done.accelerator.num_processes,
        "loss": [entry["loss"] for entry in log],
        "grad_norm": [float(entry["grad_norm"]) for entry in log],
        "lr": [entry["learning_rate"] for entry in log],
        "epoch": [entry["epoch"] for entry in log],
        "weights": sum(p.detach().double().abs().sum().item() for p in done.model.parameters()),
    }


def train(folder: Path, **given: Any) -> dict[str, Any]:
    """Train, then evaluate on a number of samples that no world divides."""
    job = trainer(folder, Rows(samples()), Rows(samples(7, ragged=True)), **given)
    job.train()
    return history(job) | evaluation(job)


def evaluation(job: Trainer) -> dict[str, Any]:
    """The loss of evaluate, and what predict gives back: every sample once, in order."""
    loss = job.evaluate()["eval_loss"]
    predicted: Any = job.predict(job.eval_dataset)
    return {
        "eval_loss": loss,
        "shape": list(predicted.predictions.shape),
        "labels": predicted.label_ids.tolist(),
        "logits": predicted.predictions[:, 0, :3].tolist(),
    }


def bf16(folder: Path) -> dict[str, Any]:
    """The forward under bfloat16."""
    return train(folder, bf16=True)


def accumulate(folder: Path) -> dict[str, Any]:
    """Windows of two micro-batches, weighted by their tokens; an epoch ends within a window."""
    job = trainer(folder, Rows(samples(20, ragged=True)), gradient_accumulation_steps=2)
    job.train()
    return history(job)


def iterable(folder: Path) -> dict[str, Any]:
    """A stream that rank 0 reads, and every rank gets its part of."""
    job = trainer(folder, Stream(samples(14)), Stream(samples(7)))
    job.train()
    return history(job) | evaluation(job)


def sharded_stream(folder: Path) -> dict[str, Any]:
    """A stream of `datasets` of which every rank reads files of its own: as many samples on any world."""
    stream = datasets.Dataset.from_list(samples(30)).to_iterable_dataset(num_shards=2)
    shared = {"per_device_train_batch_size": 4 // world()}
    job = trainer(folder, stream, accelerator_config={"dispatch_batches": False}, **shared)
    job.train()
    return history(job)


def arrow(folder: Path) -> dict[str, Any]:
    """A `datasets.Dataset`, with workers, that splits each batch over the ranks."""
    rows = datasets.Dataset.from_list(samples())
    config = {"split_batches": True}
    job = trainer(folder, rows, accelerator_config=config, dataloader_num_workers=1)
    job.train()
    return history(job)


def resume(folder: Path, rows: Any = None) -> dict[str, Any]:
    """Ten steps of two and a half epochs; then again from within the first epoch and from its end."""
    rows = rows or Rows(samples(8 * world()))
    given = {"save_strategy": "steps", "save_steps": 1, "max_steps": 10}
    whole = trainer(folder / "whole", rows, **given)
    whole.train()
    result = {"whole": history(whole)}
    for step in (3, 4):
        again = trainer(folder / f"from-{step}", rows, **given | {"save_strategy": "no"})
        again.train(resume_from_checkpoint=str(folder / "whole" / f"checkpoint-{step}"))
        result[f"from-{step}"] = history(again)
    return result


def resume_stream(folder: Path) -> dict[str, Any]:
    """The same with a stream."""
    return resume(folder, Stream(samples(8 * world())))


def uneven(folder: Path) -> dict[str, Any]:
    """Samples that the world does not divide, without a last short batch and with one."""
    one = trainer(folder, Rows(samples(11)))
    one.train()
    two = trainer(folder, Rows(samples(11)), dataloader_drop_last=True)
    two.train()
    return {"kept": history(one), "dropped": history(two)}


def configured(folder: Path) -> dict[str, Any]:
    """A second set of arguments over the state that is there; arguments before any state."""
    AcceleratorState._reset_state(reset_partial_state=True)
    before = dict(PartialState._shared_state)
    config = {"use_configured_state": True}
    try:
        str(TrainingArguments(str(folder), use_cpu=True, accelerator_config=config).device)
        refused = ""
    except ValueError as error:
        refused = type(error).__name__
    first = TrainingArguments(str(folder), use_cpu=True)
    alive = [first.world_size, first.process_index, PartialState._shared_state == {}]
    second = TrainingArguments(str(folder), use_cpu=True, accelerator_config=config)
    return {"before": before, "refused": refused, "alive": alive, "second": second.world_size}


def loaders(folder: Path) -> dict[str, Any]:
    """What the Trainer does to a loader of evaluation, and to a sharded batch sampler, by hand."""
    job = trainer(folder, Rows(samples()), Rows(samples(7)))
    job.evaluate()
    prepared = job.accelerator.prepare(DataLoader(Rows(samples(8)), batch_size=2, collate_fn=list))
    sampler = prepared.batch_sampler
    if world() > 1:
        original = sampler.batch_sampler
        sampler.num_processes, sampler.process_index = 1, 0
        kept = prepared.batch_sampler.batch_sampler is original
    else:
        kept = True
    lengths = [len(list(prepared)), len(prepared)]
    watched = weakref.ref(prepared)
    job.accelerator.free_memory()
    del prepared, sampler
    gc.collect()
    return {"kept": kept, "lengths": lengths, "collected": watched() is None, "synced": synced(job)}


def synced(job: Trainer) -> list[bool]:
    """The Trainer says itself when gradients are complete."""
    state, seen = job.accelerator.gradient_state, []
    for value in (False, True):
        state._set_sync_gradients(value)
        seen.append(job.accelerator.sync_gradients)
    return [*seen, bool(state.plugin_kwargs.get("sync_each_batch", False))]


def harness(folder: Path) -> dict[str, Any]:
    """What an evaluation harness does: ranks, device, and gathering; no model is prepared."""
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(weeks=52))])
    rank = accelerator.process_index
    gathered = accelerator.gather(torch.tensor([rank, 10 + rank]))
    longest = accelerator.pad_across_processes(torch.ones(1, 2 + rank), dim=1, pad_index=-100)
    return {
        "place": [accelerator.num_processes, accelerator.device.type, len(accelerator._models)],
        "gathered": gathered.tolist(),
        "padded": accelerator.gather(longest).tolist(),
        "objects": gather_object([{"rank": rank}]),
        "unwrapped": accelerator.unwrap_model(job := model(), keep_torch_compile=False) is job,
    }


_ALL = (
    train, bf16, accumulate, iterable, sharded_stream, arrow, resume, resume_stream, uneven, configured,
    loaders, harness,
)  # fmt: skip
JOBS: dict[str, Callable[[Path], dict[str, Any]]] = {job.__name__: job for job in _ALL}


if __name__ == "__main__":
    main(JOBS)
