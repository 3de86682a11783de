"""Jobs on models that two processes share, by transformers' Trainer or a loop: python -m ... OUT.json JOB...

Alone a job is what it is to give on two.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments
from transformers.distributed.configuration_utils import DistributedConfig

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
from tests.clients.probe import main
from tests.clients.trainer import history, world
from tests.support.sequences import ROWS, WORDS, llama, texts


def trained(folder: Path, model: Any, copies: int = 1, **more: Any) -> dict[str, Any]:
    """Four steps, an evaluation of an odd number of rows, and a model that is written.

    Args:
        copies: how many processes read different rows.
    """
    rows: Any = texts(8)
    # The Trainer weighs the rows of an evaluation by their labels, one by one or all that are read at a time.
    equal_rows: Any = [{**row, "labels": row["input_ids"]} for row in rows[: ROWS + 1]]
    options: dict[str, Any] = {
        "per_device_train_batch_size": ROWS // copies, "per_device_eval_batch_size": 1, "learning_rate": 1e-2,
        "max_grad_norm": 0.5, "logging_steps": 1, "max_steps": 4, "report_to": [], "save_steps": 4,
        "seed": 0, "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    job = Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **options, **more),
        train_dataset=rows,
        eval_dataset=equal_rows,
    )
    job.train()
    told = history(job)
    found = {what: told[what] for what in ("loss", "grad_norm", "lr", "epoch")}
    found["eval_loss"] = job.evaluate()["eval_loss"]
    PartialState().wait_for_everyone()
    written = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-4")
    return {**found, "written": float(sum(p.detach().double().abs().sum() for p in written.parameters()))}


def whole(folder: Path) -> dict[str, Any]:
    """A model that was loaded whole."""
    more = {"parallelism_config": ParallelismConfig(tp_size=2)} if world() > 1 else {}
    return trained(folder, llama(use_cache=False), **more)


def loaded_in_parts(folder: Path, whole_model: Any, **sizes: int) -> Any:
    """Write a model, and read it as transformers shards it while it reads."""
    state = PartialState(cpu=True)
    if state.is_main_process:
        whole_model.save_pretrained(folder / "model")
    state.wait_for_everyone()
    parts: dict[str, Any] = {"distributed_config": DistributedConfig(**sizes)} if world() > 1 else {}
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, **parts)


def loaded(folder: Path) -> dict[str, Any]:
    """One whose layers transformers has split."""
    return trained(folder, loaded_in_parts(folder, llama(use_cache=False), tp_size=2), save_only_model=True)


def sharded(folder: Path) -> dict[str, Any]:
    """One that transformers has sharded by FSDP2."""
    model = loaded_in_parts(folder, llama(use_cache=False), fsdp_size=2)
    return trained(folder, model, copies=world(), save_only_model=True)


def experts(folder: Path) -> dict[str, Any]:
    """A mixture of experts: half of them on each process, and tokens sent to them by all-to-all."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    routed = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    whole_model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=WORDS, use_cache=False, **sizes, **routed))
    model = loaded_in_parts(folder, whole_model, fsdp_size=2, ep_size=2)
    return trained(folder, model, copies=world(), save_only_model=True)


def looped(folder: Path, copies: int, model: Any, accelerator: Accelerator) -> dict[str, Any]:
    """A loop of its own over a model that transformers has shared out: losses, norms, and a saved state."""
    rows: Any = [row["input_ids"] for row in texts(3)]
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=ROWS // copies)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    told: dict[str, Any] = {"loss": [], "grad_norm": []}
    for tokens in loader:
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        norm: Any = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        told["loss"].append(accelerator.gather(loss.detach()).mean().item())
        told["grad_norm"].append(norm.item())
    accelerator.save_state(str(folder / "state"))
    accelerator.load_state(str(folder / "state"))
    state = accelerator.get_state_dict(model)
    return {**told, "weights": float(sum(value.double().abs().sum() for value in state.values()))}


def looped_in_shards(folder: Path) -> dict[str, Any]:
    """By FSDP2."""
    plugin = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)} if world() > 1 else {}
    accelerator = Accelerator(cpu=True, **plugin)
    model = loaded_in_parts(folder, llama(use_cache=False), fsdp_size=2)
    return looped(folder, world(), model, accelerator)


def looped_in_tensors(folder: Path) -> dict[str, Any]:
    """By tensor parallelism."""
    more = {"parallelism_config": ParallelismConfig(tp_size=2)} if world() > 1 else {}
    accelerator = Accelerator(cpu=True, **more)
    return looped(folder, 1, loaded_in_parts(folder, llama(use_cache=False), tp_size=2), accelerator)


_ALL = (whole, loaded, sharded, experts, looped_in_shards, looped_in_tensors)
JOBS: dict[str, Callable[[Path], dict[str, Any]]] = {job.__name__: job for job in _ALL}


if __name__ == "__main__":
    main(JOBS)
