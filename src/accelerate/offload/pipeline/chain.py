"""Stages of a model that cannot be traced: a chain of blocks, each called with what the one before gave.

Whether a model is such a chain is seen on one real forward. Nothing else of its forward would be run, so
every tensor must go from block to block as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.offload.pipeline.graph import Stage
from accelerate.world import collective
from accelerate.world.world import World


class _Watch:
    """The calls of some modules during a forward."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []
        self._handles = [self._hook(model.get_submodule(name), name) for name in names]

    def _hook(self, module: nn.Module, name: str) -> Any:
        def seen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.calls.append((name, args, kwargs, output))

        return module.register_forward_hook(seen, with_kwargs=True)

    def remove(self) -> None:
        """Ends it."""
        for handle in self._handles:
            handle.remove()


def links(model: nn.Module, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The blocks among ``names`` that are called, in their order, if the model is a chain of them.

    Raises:
        PrepareError: it is none; says between which blocks something else happens.
    """
    watch = _Watch(model, names)
    try:
        with torch.no_grad():
            result = model(*args, **kwargs)
    finally:
        watch.remove()
    if len(args) != 1 or kwargs:
        raise _no_chain("it takes more than one tensor")
    value, before = args[0], "the input"
    for name, given, named, output in watch.calls:
        if len(given) != 1 or named or given[0] is not value:
            raise _no_chain(f"between {before} and {name!r} the forward does more than hand on one tensor")
        value, before = output, repr(name)
    if result is not value or not isinstance(value, torch.Tensor):
        raise _no_chain(f"after {before} the forward does more than return its output")
    called = [name for name, *_ in watch.calls]
    if len(set(called)) < len(called):
        raise _no_chain("a block is called more than once")
    return called


def _no_chain(why: str) -> PrepareError:
    return PrepareError("the model is no chain of blocks", why=why)


class _Links(nn.Module):
    """Some blocks of a chain."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor]:
        """One after the other."""
        for block in self.blocks:
            value = block(value)
        return (value,)


def weights(model: nn.Module, names: Sequence[str]) -> frozenset[str]:
    """The full names of what some blocks hold, under every name that it has."""
    return frozenset(
        f"{name}.{inner}"
        for name in names
        for inner, _ in [
            *model.get_submodule(name).named_parameters(remove_duplicate=False),
            *model.get_submodule(name).named_buffers(remove_duplicate=False),
        ]
    )


def rehearse(
    model: nn.Module, parts: Sequence[Sequence[str]], chunk: torch.Tensor | None, world: World
) -> Stage:
    """This rank's stage. One chunk is sent through all of them in turn, to learn the shapes between them.

    Args:
        parts: the blocks of each stage.
        chunk: the first, on rank 0.
    """
    mine = _Links([model.get_submodule(name) for name in parts[world.rank]])
    value = None if chunk is None else chunk.to(world.device)
    metas = [collective.agree(None if value is None else _meta(value))]
    for stage in range(world.size):
        if world.rank == stage:
            assert value is not None
            with torch.no_grad():
                (value,) = mine(value)
        metas.append(
            collective.agree(_meta(value) if world.rank == stage and value is not None else None, stage)
        )
        if world.rank != stage:
            shape, dtype = metas[-1]
            value = torch.empty(shape, dtype=dtype, device=world.device)
        value = collective.broadcast(value, stage)
    before, after = (
        torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in metas[world.rank :][:2]
    )
    return Stage(mine, (before,), (after,), frozenset())  # its weights are in place


def _meta(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype
