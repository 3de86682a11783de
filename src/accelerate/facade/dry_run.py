"""The dry run: shard a model over processes that are not there, on meta tensors, in this one process.

All is done that ``prepare`` does to a model - the device mesh, tensor parallelism, FSDP units, sharding of
parameters - over a fake process group that moves nothing. The memory of a rank is counted, not estimated.

As a program (``python -m accelerate.facade.dry_run MODEL 512 64``: a model, processes, machines) it takes
its settings from the variables of a launch, as a script does.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from accelerate.core.errors import AccelerateError, PrepareError
from accelerate.core.setting import load_settings
from accelerate.core.torch_internals import require
from accelerate.core.units import show_count
from accelerate.core.units import show_decimal_bytes as show_bytes
from accelerate.facade import runtime
from accelerate.facade.estimate.memory_estimate import model_state_bytes
from accelerate.facade.estimate.skeleton import build_skeleton
from accelerate.facade.launch_settings import PrecisionSettings
from accelerate.precision import PRECISIONS
from accelerate.strategy.base import PrepareBundle, StrategyRequest
from accelerate.world.local_tensor_trees import local_tensor
from accelerate.world.world import World


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank.

    Attributes:
        rank: its rank.
        place: its rank on each mesh dimension.
        parameters: the number of parameters on this rank.
        weights, gradients, optimizer: bytes between two steps; gradients once there are some.
        buffers: bytes that every rank has.
    """

    rank: int
    place: dict[str, int]
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    buffers: int


@dataclass(frozen=True)
class PrepareDryRunReport:
    """The result of a dry run.

    Attributes:
        model: the class of the model.
        parameters: the number of parameters of the whole model.
        strategy: the name of the chosen strategy.
        mesh: size of each dimension, outermost first; empty without a mesh.
        steps: what ``prepare`` does, step by step.
        wrapped: the number of FSDP units by class of module.
        parts: the memory of some ranks.
    """

    model: str
    parameters: int
    strategy: str
    mesh: dict[str, int]
    steps: list[str]
    wrapped: dict[str, int]
    parts: list[RankMemory] = field(default_factory=list)


@contextmanager
def fake_process_group(rank: int, size: int) -> Iterator[None]:
    """Open a fake process group of ``size`` ranks, this one ``rank``, that moves no data.

    Raises:
        PrepareError: this process is in a real group.
    """
    import torch.distributed as dist

    require("fake process group")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise PrepareError("a dry run inside a process group", fix="run it in a process of its own")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def dry_run_model(
    make: Any,
    size: int,
    *,
    nodes: int = 1,
    ranks: Sequence[int] = (0,),
    plugins: tuple[Any, ...] = (),
    parallelism: Any = None,
    precision: str = "no",
    optimizer: str = "adamw",
) -> PrepareDryRunReport:
    """Prepare a model on the meta device for ``size`` processes, as each of ``ranks``.

    Args:
        make: builds the model on the meta device; called once for each rank.
        size: processes.
        nodes: machines.
        ranks: the ranks whose memory is counted.
        plugins: of strategies, as the ``Accelerator`` takes them.
        parallelism: a ``ParallelismConfig``.
        precision: name of the precision.
        optimizer: its kind, a name of ``OPTIMIZERS``.

    Raises:
        AccelerateError: the model cannot be prepared so; the error of a real ``prepare``.
    """
    report: PrepareDryRunReport | None = None
    formats = PRECISIONS.get(precision).autocast_format
    for rank in ranks:
        world = World.fake(size, rank, nodes=nodes)
        with fake_process_group(rank, size):
            rank_report = _dry_run_rank(
                make(), StrategyRequest(world, plugins, {}, precision, formats, parallelism), optimizer
            )
        report = rank_report if report is None else report
        if rank_report is not report:
            report.parts.extend(rank_report.parts)
    if report is None:
        raise PrepareError("a dry run of no rank", fix="ranks=(0,)")
    return report


def _dry_run_rank(model: nn.Module, request: StrategyRequest, optimizer: str) -> PrepareDryRunReport:
    if any(not parameter.is_meta for parameter in model.parameters()):
        raise PrepareError(
            f"the {type(model).__name__} has weights",
            why="a dry run shards tensors on the meta device",
            fix="build it under torch.device('meta') or init_empty_weights()",
        )
    total = sum(parameter.numel() for parameter in model.parameters())
    strategy = runtime.choose_strategy(request)
    if strategy.owns_step:
        raise PrepareError(
            f"the strategy {strategy.name} cannot be run dry on the meta device",
            why="DeepSpeed and Megatron-LM fill and move the weights while they are initialized",
            fix="accelerate plan MODEL counts the memory of its ZeRO stages",
        )
    for plugin in strategy.plugins.values():
        if hasattr(plugin, "param_init_fn") and plugin.param_init_fn is None:
            plugin.param_init_fn = _keep_empty
    bundle = PrepareBundle([model], ["model"], place_on_device=[True])
    step_lines = []
    for step in strategy.prepare_steps(bundle):
        step_lines.append(str(step))
        step.apply(bundle)
    trained: nn.Module = bundle.objects[0]
    mesh = strategy.mesh
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)) if mesh is not None else {}
    place = {name: mesh.get_local_rank(name) for name in sizes} if mesh is not None else {}
    wrapped = Counter(
        _class_name(part) for part in trained.modules() if hasattr(part, "set_requires_gradient_sync")
    )
    part = _count_rank_memory(trained, request.world.rank, place, optimizer)
    return PrepareDryRunReport(
        _class_name(trained), total, strategy.name, sizes, step_lines, dict(wrapped), [part]
    )


def _keep_empty(module: nn.Module) -> None:
    """Keep tensors on the meta device."""


def _class_name(module: nn.Module) -> str:
    """Return the user's class name: FSDP2 makes a subclass of its own."""
    kinds = [kind for kind in type(module).__mro__ if not hasattr(kind, "set_requires_gradient_sync")]
    return kinds[0].__name__


def _count_rank_memory(model: nn.Module, rank: int, place: dict[str, int], optimizer: str) -> RankMemory:
    local_params = [(local_tensor(parameter), parameter.requires_grad) for parameter in model.parameters()]
    rows = ((tuple(tensor.shape), tensor.element_size(), trained) for tensor, trained in local_params)
    weights, gradients, optimizer_bytes = model_state_bytes(rows, optimizer)
    buffers = sum(local_tensor(buffer).nbytes for buffer in model.buffers())
    numbers = sum(tensor.numel() for tensor, _ in local_params)
    return RankMemory(rank, place, numbers, weights, gradients, optimizer_bytes, buffers)


# ---------------------------------------------------------------- as a program


def format_report(report: PrepareDryRunReport) -> str:
    """Format the report as text."""
    sizes = " x ".join(f"{name} {size}" for name, size in report.mesh.items()) or "none"
    wrapped = ", ".join(f"{count} x {name}" for name, count in report.wrapped.items()) or "none"
    if report.wrapped == {report.model: 1}:
        wrapped += ": one FSDP unit; --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP makes one of each layer"
    lines = [
        f"Dry run on the meta device: {report.model}, {show_count(report.parameters)} parameters",
        f"  strategy  {report.strategy}",
        f"  mesh      {sizes}",
        f"  FSDP unit {wrapped}",
        *(f"  step      {text}" for text in report.steps),
    ]
    for part in report.parts:
        at = ", ".join(f"{name} {index}" for name, index in part.place.items())
        place = f" ({at})" if at else ""
        kinds = ("weights", "gradients", "optimizer", "buffers")
        sums = ", ".join(f"{name} {show_bytes(getattr(part, name))}" for name in kinds)
        total = sum(getattr(part, name) for name in kinds)
        lines.append(f"  rank {part.rank}{place}: {show_bytes(total)}: {sums}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m accelerate.facade.dry_run MODEL PROCESSES MACHINES [json]``."""
    model, count, machines, *form = sys.argv[1:] if arguments is None else arguments
    size, nodes = int(count), int(machines)
    precision = load_settings(PrecisionSettings).value.mixed_precision or "no"
    last = size - 1
    try:
        report = dry_run_model(
            lambda: build_skeleton(model),
            size,
            nodes=nodes,
            ranks=(0, last) if last else (0,),
            parallelism=runtime.resolve_parallelism(None),
            precision=precision,
        )
    except AccelerateError as error:
        print(f"dry run: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(report)) if form == ["json"] else format_report(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
