"""A rehearsal: a model is spread over processes that are not there, on empty tensors, by this one process.

All is done that ``prepare`` does to a model - the mesh is made, layers are divided, blocks are wrapped,
parameters are cut - over a process group that moves nothing. What a rank then has is counted, not estimated.

As a program (``python -m accelerate.facade.rehearsal MODEL 512 64``: a model, processes, machines) it takes
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

import torch
from torch import nn

from accelerate.core.errors import AccelerateError, PrepareError
from accelerate.core.setting import load
from accelerate.core.units import show_bytes, show_count
from accelerate.facade import options
from accelerate.offload.estimate.bill import OPTIMIZERS
from accelerate.offload.estimate.skeleton import skeleton
from accelerate.precision.settings import PrecisionSettings
from accelerate.strategy import choose
from accelerate.strategy.base import Bundle, Request
from accelerate.world.world import World


@dataclass(frozen=True)
class Part:
    """What one rank has.

    Attributes:
        rank: which.
        place: its place on each dimension of the mesh.
        parameters: numbers of parameters here.
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
class Rehearsal:
    """What came of it.

    Attributes:
        model: its class.
        parameters: numbers of the whole model.
        strategy: which one was chosen.
        mesh: size of each dimension, outermost first; empty without a mesh.
        steps: what ``prepare`` does, step by step.
        wrapped: how many modules of each class are gathered by themselves.
        parts: what some ranks have.
    """

    model: str
    parameters: int
    strategy: str
    mesh: dict[str, int]
    steps: list[str]
    wrapped: dict[str, int]
    parts: list[Part] = field(default_factory=list)


@contextmanager
def processes(rank: int, size: int) -> Iterator[None]:
    """A group of ``size`` processes in which this one is ``rank`` and that moves nothing.

    Raises:
        PrepareError: this process is in a real group.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise PrepareError("a rehearsal inside a process group", fix="run it in a process of its own")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rehearse(
    make: Any,
    size: int,
    *,
    nodes: int = 1,
    ranks: Sequence[int] = (0,),
    plugins: tuple[Any, ...] = (),
    parallelism: Any = None,
    precision: str = "no",
    optimizer: str = "adamw",
) -> Rehearsal:
    """Spreads a model over ``size`` processes, as each of ``ranks``.

    Args:
        make: builds the model on the meta device; called once for each rank.
        size: processes.
        nodes: machines.
        ranks: those whose parts are counted.
        plugins: of strategies, as the ``Accelerator`` takes them.
        parallelism: a ``ParallelismConfig``.
        precision: name of the precision.
        optimizer: its kind, a name of ``OPTIMIZERS``.

    Raises:
        AccelerateError: the model cannot be spread so; what a real ``prepare`` would say.
    """
    found: Rehearsal | None = None
    for rank in ranks:
        world = World.fake(size, rank, nodes=nodes)
        with processes(rank, size):
            one = _once(make(), Request(world, plugins, {}, precision, parallelism), optimizer)
        found = one if found is None else found
        if one is not found:
            found.parts.extend(one.parts)
    if found is None:
        raise PrepareError("a rehearsal of no rank", fix="ranks=(0,)")
    return found


def _once(model: nn.Module, request: Request, optimizer: str) -> Rehearsal:
    if any(not parameter.is_meta for parameter in model.parameters()):
        raise PrepareError(
            f"the {type(model).__name__} has weights",
            why="a rehearsal spreads empty tensors",
            fix="build it under torch.device('meta') or init_empty_weights()",
        )
    total = sum(parameter.numel() for parameter in model.parameters())
    strategy = choose(request)
    if strategy.owns_step:
        raise PrepareError(
            f"the strategy {strategy.name} cannot be rehearsed with empty tensors",
            why="its engine is another library, which fills and moves the weights while it is made",
            fix="accelerate plan MODEL counts what its stages hold",
        )
    for plugin in strategy.plugins.values():
        if hasattr(plugin, "param_init_fn") and plugin.param_init_fn is None:
            plugin.param_init_fn = _leave
    bundle = Bundle([model], ["model"], place=[True])
    said = []
    for step in strategy.steps(bundle):
        said.append(f"{step.name}: {step.reason}")
        step.apply(bundle)
    trained: nn.Module = bundle.objects[0]
    mesh = strategy.mesh
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)) if mesh is not None else {}
    place = {name: mesh.get_local_rank(name) for name in sizes} if mesh is not None else {}
    wrapped = Counter(
        _class(part) for part in trained.modules() if hasattr(part, "set_requires_gradient_sync")
    )
    part = _counted(trained, request.world.rank, place, optimizer)
    return Rehearsal(_class(trained), total, strategy.name, sizes, said, dict(wrapped), [part])


def _leave(module: nn.Module) -> None:
    """Empty tensors stay empty."""


def _class(module: nn.Module) -> str:
    """The user's name of its class: sharding puts one of its own before it."""
    kinds = [kind for kind in type(module).__mro__ if not hasattr(kind, "set_requires_gradient_sync")]
    return kinds[0].__name__


def _counted(model: nn.Module, rank: int, place: dict[str, int], optimizer: str) -> Part:
    here = [(_local(parameter), parameter.requires_grad) for parameter in model.parameters()]
    weights = sum(tensor.nbytes for tensor, _ in here)
    gradients = sum(tensor.nbytes for tensor, trained in here if trained)
    state = OPTIMIZERS[optimizer]
    kept = sum(state(tuple(tensor.shape), tensor.element_size()) for tensor, trained in here if trained)
    buffers = sum(_local(buffer).nbytes for buffer in model.buffers())
    numbers = sum(tensor.numel() for tensor, _ in here)
    return Part(rank, place, numbers, weights, gradients, kept, buffers)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor is here."""
    find = getattr(tensor, "to_local", None)
    return tensor if find is None else find()


# ---------------------------------------------------------------- as a program


def show(found: Rehearsal) -> str:
    """The rehearsal as text."""
    sizes = " x ".join(f"{name} {size}" for name, size in found.mesh.items()) or "none"
    wrapped = ", ".join(f"{count} x {name}" for name, count in found.wrapped.items()) or "nothing by itself"
    if found.wrapped == {found.model: 1}:
        wrapped += ": the whole model at once; --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP gathers layers"
    lines = [
        f"Rehearsal with empty tensors: {found.model}, {show_count(found.parameters)} parameters",
        f"  strategy  {found.strategy}",
        f"  mesh      {sizes}",
        f"  gathered  {wrapped}",
        *(f"  step      {text}" for text in found.steps),
    ]
    for part in found.parts:
        at = ", ".join(f"{name} {index}" for name, index in part.place.items())
        where = f" ({at})" if at else ""
        kinds = ("weights", "gradients", "optimizer", "buffers")
        sums = ", ".join(f"{name} {show_bytes(getattr(part, name))}" for name in kinds)
        total = sum(getattr(part, name) for name in kinds)
        lines.append(f"  rank {part.rank}{where}: {show_bytes(total)}: {sums}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m accelerate.facade.rehearsal MODEL PROCESSES MACHINES [json]``."""
    model, count, machines, *form = sys.argv[1:] if arguments is None else arguments
    size, nodes = int(count), int(machines)
    precision = load(PrecisionSettings).value.mixed_precision or "no"
    last = size - 1
    try:
        found = rehearse(
            lambda: skeleton(model),
            size,
            nodes=nodes,
            ranks=(0, last) if last else (0,),
            parallelism=options.of_layout(None, None),
            precision=precision,
        )
    except AccelerateError as error:
        print(f"rehearsal: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(found)) if form == ["json"] else show(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
