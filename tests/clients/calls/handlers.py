"""Kwargs handlers, configurations, plug-ins and enumerations: defaults, types, what they refuse and give."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch

from accelerate import utils
from accelerate.utils import dataclasses
from tests.clients.probe import Probe

HANDLERS: dict[str, list[dict[str, Any]]] = {
    "AutocastKwargs": [{"enabled": False}, {"cache_enabled": False}],
    "GradScalerKwargs": [{"init_scale": 2.0}, {"enabled": False, "growth_interval": 3}],
    "DistributedDataParallelKwargs": [
        {"find_unused_parameters": True, "bucket_cap_mb": 5},
        {"comm_hook": utils.DDPCommunicationHookType.FP16, "static_graph": True},
        {"comm_state_option": {"matrix_approximation_rank": 2}},
    ],
    "InitProcessGroupKwargs": [
        {"timeout": timedelta(seconds=5)},
        {"backend": "gloo", "init_method": "env://"},
    ],
    "ProfileKwargs": [
        {"activities": ["cpu"], "record_shapes": True},
        {"schedule_option": {"wait": 1, "active": 2}},
    ],
    "DataLoaderConfiguration": [{"split_batches": True}, {"use_seedable_sampler": True, "data_seed": 3}],
    "GradientAccumulationPlugin": [{"num_steps": 4}, {"num_steps": 2, "sync_each_batch": True}],
    "ProjectConfiguration": [
        {"project_dir": "p"},
        {"project_dir": "p", "logging_dir": "l", "total_limit": 3},
    ],
    "TorchDynamoPlugin": [
        {"backend": "inductor", "mode": "default"},
        {"backend": "EAGER", "fullgraph": True},
        {"backend": "no", "dynamic": False},
        {"use_regional_compilation": True, "backend": "aot_eager"},
    ],
}
ENUMS = (
    "DynamoBackend LoggerType PrecisionType RNGType CustomDtype ComputeEnvironment DDPCommunicationHookType "
    "SageMakerDistributedType FP8BackendType DistributedType"
)


def handlers(folder: Path) -> dict[str, Any]:
    """Every handler by default and with options."""
    probe = Probe()
    for name, given in HANDLERS.items():
        kind = getattr(utils, name)
        probe(f"{name} fields", lambda kind=kind: [field.name for field in fields(kind)])
        probe(f"{name} handler", lambda kind=kind: hasattr(kind, "to_kwargs"))
        for options in ({}, *given):
            value = kind(**options)
            probe(f"{name}({options})", lambda value=value: value)
            if hasattr(value, "to_kwargs"):
                probe(f"{name}({options}).to_kwargs", value.to_kwargs)
                probe(f"{name}({options}).to_dict", value.to_dict)
        probe(f"{name}(unknown)", lambda kind=kind: kind(nothing_like_this=1))
    probe("dynamo wrong", utils.TorchDynamoPlugin, backend="nothing")
    probe("dynamo wrong mode", utils.TorchDynamoPlugin, backend="eager", mode="fast")
    probe("profile wrong", lambda: utils.ProfileKwargs(activities=["gpu"]).build())
    probe("profile build", lambda: type(utils.ProfileKwargs(activities=["cpu"]).build()).__name__)
    probe("profile schedule wrong", lambda: utils.ProfileKwargs(schedule_option={"nothing": 1}).build())
    probe("project set", _project)
    return probe.notes


def _project() -> Any:
    made = utils.ProjectConfiguration(logging_dir="kept")
    made.set_directories("p")
    return made


def enums(folder: Path) -> dict[str, Any]:
    """Members, values, comparisons with text, and how they print."""
    probe = Probe()
    for name in ENUMS.split():
        kind = getattr(dataclasses, name)
        probe(f"{name} members", lambda kind=kind: sorted(f"{m.name}={m.value}" for m in kind))
        first = getattr(kind, "NO", None) or next(iter(kind))
        probe(f"{name} is text", isinstance, first, str)
        probe(f"{name} equals its value", lambda first=first: first == first.value)
        probe(f"{name} str", str, first)
        probe(f"{name} of value", kind, first.value)
        probe(f"{name} of another", kind, "nothing")
        probe(f"{name} in", lambda kind=kind, first=first: first.value in kind)
        if hasattr(kind, "list"):
            probe(f"{name} list", lambda kind=kind: sorted(kind.list()))
    return probe.notes


def random(folder: Path) -> dict[str, Any]:
    """Seeds and the synchronisation of random streams."""
    import random as python

    from accelerate import Accelerator
    from accelerate.utils import set_seed, synchronize_rng_state, synchronize_rng_states
    from accelerate.utils.dataclasses import RNGType

    probe, rank = Probe(), Accelerator(cpu=True).process_index

    def draws() -> list[Any]:
        return [python.random(), float(numpy.random.rand()), torch.rand(2)]

    for seed in (0, 42):
        set_seed(seed)
        probe(f"set_seed({seed})", draws)
    set_seed(5, device_specific=True)
    probe("set_seed device specific", draws)
    set_seed(5, deterministic=True)
    probe("deterministic", torch.are_deterministic_algorithms_enabled)
    torch.use_deterministic_algorithms(False)
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(rank)
    synchronize_rng_states(["torch", "generator"], generator)
    probe("synchronised", lambda: [torch.rand(1), torch.rand(1, generator=generator)])
    synchronize_rng_state(RNGType.TORCH)
    probe("one", torch.rand, 1)
    probe("no generator", synchronize_rng_states, ["generator"])
    probe("unknown stream", synchronize_rng_states, ["nothing"])
    probe("returns", set_seed, 1)
    return probe.notes


JOBS = {"handlers": handlers, "enums": enums, "random": random}
