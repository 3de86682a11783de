"""Stages of a model that cannot be traced: a chain of blocks, each called with the output of the one before.

One real forward shows if a model is such a chain. Nothing else of its forward would be run, so
every tensor must go from block to block as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.offload.pipeline.traced_forward import InferenceStage
from accelerate.world import collective
from accelerate.world.world import World


class _ModuleCallRecorder:
    """A recorder of the calls of some modules during a forward."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []
        self._handles = [self._hook(model.get_submodule(name), name) for name in names]

    def _hook(self, module: nn.Module, name: str) -> Any:
        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.calls.append((name, args, kwargs, output))

        return module.register_forward_hook(record, with_kwargs=True)

    def remove_hooks(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def find_chain(
    model: nn.Module, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    """Return the blocks among ``names`` in the order of their calls, if the model is a chain of them.

    Raises:
        PrepareError: it is no chain; the error names the blocks between which something else happens.
    """
    watch = _ModuleCallRecorder(model, names)
    try:
        with torch.no_grad():
            result = model(*args, **kwargs)
    finally:
        watch.remove_hooks()
    if len(args) != 1 or kwargs:
        raise _no_chain_error("it takes more than one tensor")
    value, before = args[0], "the input"
    for name, inputs, named, output in watch.calls:
        if len(inputs) != 1 or named or inputs[0] is not value:
            raise _no_chain_error(
                f"between {before} and {name!r} the forward does more than hand on one tensor"
            )
        value, before = output, repr(name)
    if result is not value or not isinstance(value, torch.Tensor):
        raise _no_chain_error(f"after {before} the forward does more than return its output")
    called = [name for name, *_ in watch.calls]
    if len(set(called)) < len(called):
        raise _no_chain_error("a block is called more than once")
    return called


def _no_chain_error(why: str) -> PrepareError:
    return PrepareError("the model is no chain of blocks", why=why)


class _BlockRangeStage(nn.Module):
    """Consecutive blocks of a chain as one module."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor]:
        """Run one block after the other."""
        for block in self.blocks:
            value = block(value)
        return (value,)


def block_weight_names(model: nn.Module, names: Sequence[str]) -> frozenset[str]:
    """Return the full names of some blocks' parameters and buffers, tied ones under each name."""
    return frozenset(
        f"{name}.{inner}"
        for name in names
        for inner, _ in [
            *model.get_submodule(name).named_parameters(remove_duplicate=False),
            *model.get_submodule(name).named_buffers(remove_duplicate=False),
        ]
    )


def build_chain_stage(
    model: nn.Module, parts: Sequence[Sequence[str]], chunk: torch.Tensor | None, world: World
) -> InferenceStage:
    """Build this rank's stage: one chunk is sent through all stages, to learn the shapes between them.

    Args:
        parts: the blocks of each stage.
        chunk: the first, on rank 0.
    """
    chain = _BlockRangeStage([model.get_submodule(name) for name in parts[world.rank]])
    value = None if chunk is None else chunk.to(world.device)
    metas = [collective.broadcast_object(None if value is None else _shape_and_dtype(value))]
    for stage in range(world.size):
        if world.rank == stage:
            assert value is not None
            with torch.no_grad():
                (value,) = chain(value)
        metas.append(
            collective.broadcast_object(
                _shape_and_dtype(value) if world.rank == stage and value is not None else None, stage
            )
        )
        if world.rank != stage:
            shape, dtype = metas[-1]
            value = torch.empty(shape, dtype=dtype, device=world.device)
        value = collective.broadcast(value, stage)
    before, after = (
        torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in metas[world.rank :][:2]
    )
    return InferenceStage(chain, (before,), (after,), frozenset())  # its weights are in place


def _shape_and_dtype(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype
