"""Optimizers that compute with whole parameters, where each rank steps pieces of them in one dimension."""

from __future__ import annotations

from typing import Any

from accelerate.core.errors import PrepareError, warn_user
from accelerate.world import collective

# By the names of their classes: pieces of one dimension are another problem to these, or none that they take.
_NEEDS_MATRICES = frozenset({"LBFGS", "Muon"})
_TAKES_STATISTICS = frozenset(
    (
        *("AdaFactor", "Adafactor", "AdafactorBigVision", "AdamP", "CAME", "Fromage", "Kron", "LAMB", "LARS"),
        *("Lamb", "Lars", "MARS", "NovoGrad", "Ranger", "SCION", "SGDP", "SM3", "SOAP", "SPlus", "Shampoo"),
        "StableAdamW",
    )
)


def check_elementwise(optimizer: Any, strategy: str) -> None:
    """Refuse optimizers that cannot step pieces of parameters.

    Raises:
        PrepareError: LBFGS or Muon.
    """
    if names := _class_names(optimizer) & _NEEDS_MATRICES:
        raise PrepareError(
            f"{min(names)} cannot train under {strategy}",
            why="it computes with whole parameters, and each rank steps its own piece of them",
            fix="an optimizer that computes element by element (AdamW, SGD, ...), or train under ddp",
        )


def warn_of_statistics(optimizer: Any, strategy: str) -> None:
    """Warn on rank 0 of an optimizer that takes means over a parameter, which are those of a piece here."""
    names = _class_names(optimizer) & _TAKES_STATISTICS
    if names and collective.rank() == 0:
        warn_user(
            f"{min(names)} under {strategy} takes its means over this rank's piece of each parameter, not "
            "over its rows and columns: the run is not that of one process. Train under ddp, or with AdamW"
        )


def _class_names(optimizer: Any) -> set[str]:
    return {kind.__name__ for kind in type(optimizer).__mro__}
