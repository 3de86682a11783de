"""Trains on four virtual devices, by SPMD: ``python -m tests.xla.sharded_job fsdp|data FOLDER``.

SPMD is a choice of the whole process, so this is one of its own.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from accelerate import FullyShardedDataParallelPlugin
from tests.xla.training import Training, epoch, prepared


def sharding(tensor: torch.Tensor) -> str:
    """How XLA shards a tensor, in its own words."""
    import torch_xla

    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


def report(training: Training) -> dict[str, Any]:
    """How the objects of a training are sharded."""
    model, optimizer = training.model, training.optimizer
    states = {
        name: sharding(optimizer.state[p]["exp_avg"])
        for name, p in model.named_parameters()
        if p in optimizer.state
    }
    (batch, *_) = training.loader
    return {
        "parameters": {name: sharding(p) for name, p in model.named_parameters()},
        "states": states,
        "batch": sharding(batch["input_ids"]),
    }


def shard_as_asked(loader: Any) -> str:
    """How batches are sharded if a program asks for it as it would ask torch_xla's own loader."""
    import torch_xla.distributed.spmd as spmd
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    assert isinstance(loader, MpDeviceLoader)
    spec = spmd.ShardingSpec(spmd.get_global_mesh(), (None, "fsdp"))
    loader._parallel_loader_kwargs["input_sharding"] = spec
    return sharding(next(iter(loader))["input_ids"])


def main(kind: str, folder: str) -> None:
    """Trains, saves, resumes, and writes what there is to compare."""
    options: dict[str, Any] = {}
    if kind == "fsdp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="TRANSFORMER_BASED_WRAP",
            transformer_cls_names_to_wrap=["Block"],
        )
        options["fsdp_plugin"] = plugin
    else:
        import torch_xla.runtime

        torch_xla.runtime.use_spmd()
    training = prepared(**options)
    result: dict[str, Any] = {"strategy": training.accelerator.strategy.name}
    epoch(training, end=4)
    training.accelerator.save_state(f"{folder}/state")
    again = prepared(seed=1, **options)
    again.accelerator.load_state(f"{folder}/state")
    result["resumed"], result["resumed_compiled"] = epoch(again, begin=4)
    result["resumed_sharding"] = report(again)
    whole = prepared(**options)
    result["numbers"], result["compiled"] = epoch(whole)
    result["sharding"] = report(whole)
    result["distributed_type"] = str(whole.accelerator.distributed_type)
    result["asked_sharding"] = shard_as_asked(whole.loader)
    accumulated = prepared(gradient_accumulation_steps=2, **options)
    result["accumulated"], result["accumulated_compiled"] = epoch(accumulated)
    torch.save(result, f"{folder}/result.pt")


if __name__ == "__main__":
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="4", ACCELERATE_TORCH_DEVICE="xla")
    main(*sys.argv[1:])
