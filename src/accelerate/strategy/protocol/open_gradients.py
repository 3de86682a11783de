"""The capability of strategies whose open gradients are saved: those of a window that is not complete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

if TYPE_CHECKING:
    from accelerate.world.world import World


@dataclass(frozen=True)
class GradientPiece:
    """A piece of the gradient of one parameter on one rank.

    Attributes:
        values: the piece, local to this rank.
        shape: of the parameter, unsharded.
        offsets: where the piece begins in it, in every dimension; a single number counts the elements of the
            flattened parameter, and ``values`` has one dimension then.
        ranks: the number of ranks that hold the same piece with values of their own, of which the mean
            counts; 0 for a piece that is reduced already, and equal on all ranks that hold it.
    """

    values: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    ranks: int


def join_pieces(pieces: Iterable[GradientPiece]) -> torch.Tensor:
    """Return the unsharded gradient of one parameter, reduced, from the pieces of all ranks, on the host."""
    total: torch.Tensor | None = None
    reduced: set[tuple[Any, ...]] = set()
    for piece in pieces:
        if total is None:
            total = torch.zeros(piece.shape, dtype=torch.promote_types(piece.values.dtype, torch.float32))
        key = (piece.offsets, tuple(piece.values.shape))
        if piece.ranks == 0 and key in reduced:
            continue
        flat = len(piece.offsets) == 1 != len(piece.shape)
        target = total.view(-1) if flat else total
        for dim, (start, size) in enumerate(zip(piece.offsets, piece.values.shape, strict=True)):
            target = target.narrow(dim, start, size)
        target.add_(piece.values.to("cpu", total.dtype), alpha=1.0 / (piece.ranks or 1))
        if piece.ranks == 0:
            reduced.add(key)
    assert total is not None
    return total


class OpenGradients:
    """The methods for gradients that wait for the rest of their window; by default ``parameter.grad``.

    Names are those of the user's module, a tied parameter goes by its first one.
    """

    if TYPE_CHECKING:  # of the strategy that has the capability
        world: World
        name: ClassVar[str]

        def unwrap(self, model: nn.Module) -> nn.Module: ...

    @property
    def gradient_layout(self) -> str:
        """Pieces that were saved under an equal layout are given back to the ranks that held them."""
        return f"{self.name} of {self.world.size}"

    def gradient_pieces(self, model: nn.Module) -> dict[str, list[GradientPiece]]:
        """Return this rank's pieces by the names of their parameters; may be collective."""
        return {
            name: [whole_piece(p.grad, self.world.size)]
            for name, p in self.unwrap(model).named_parameters()
            if p.grad is not None
        }

    def restore_pieces(self, model: nn.Module, pieces: Mapping[str, Sequence[GradientPiece]]) -> None:
        """Put this rank's own pieces back."""
        self.load_gradients(model, {name: held[0].values for name, held in pieces.items()})

    def load_gradients(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Make unsharded gradients, the same on all ranks, the open ones; each rank keeps its shard."""
        for name, parameter in self.unwrap(model).named_parameters():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.device, parameter.dtype, copy=True)


def whole_piece(gradient: torch.Tensor, ranks: int) -> GradientPiece:
    """Return the piece that is the whole gradient of a parameter."""
    return GradientPiece(gradient.detach(), tuple(gradient.shape), (0,) * gradient.dim(), ranks)
