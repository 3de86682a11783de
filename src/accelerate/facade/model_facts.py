"""The numbers of a model by which a report turns tokens into floating point operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate.facade.runtime import Runtime

_SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def describe_model(runtime: Runtime, model: nn.Module) -> dict[str, Any]:
    """Return the parameters of a prepared model, the format of its products and the peak of the device in it.

    Nothing where this rank does not see the whole model: a stage of a pipeline, flat parameters of FSDP1, the
    partitions of an engine.
    """
    strategy = runtime.strategy
    params = list(model.parameters())
    is_sharded = any(isinstance(p, DTensor) for p in params)
    has_stages = strategy.mesh is not None and "pp" in (strategy.mesh.mesh_dim_names or ())
    if strategy.owns_step or has_stages or (strategy.shards_params and not is_sharded):
        return {}
    total = sum(p.numel() for p in params)
    weights = {_SHORT_NAMES.get(p.dtype, str(p.dtype)) for p in params}
    dtype = runtime.precision.name
    if dtype == "no":
        dtype = weights.pop() if len(weights) == 1 else "mixed"
    hardware, index = runtime.world.hardware, runtime.world.device.index
    return {
        "parameters": total,
        "trained": sum(p.numel() for p in params if p.requires_grad),
        "format": dtype,
        "device": hardware.name(index),
        "peak_flops": hardware.find_peak_flops(dtype, index),
        "processes": runtime.world.size,
    }
