"""The checks, in the order in which they run: what the later ones need is looked at by the earlier ones."""

from __future__ import annotations

from accelerate.check import collectives, loaders, states, training
from accelerate.check.base import Check

ROWS: tuple[tuple[str, Check], ...] = (
    ("ranks", collectives.ranks),
    ("gather", collectives.gather),
    ("reduce", collectives.reduce),
    ("broadcast", collectives.broadcast),
    ("objects", collectives.objects),
    ("data, even", loaders.even),
    ("data, uneven", loaders.uneven),
    ("data, shuffled", loaders.shuffled),
    ("data, dispatched", loaders.dispatched),
    ("precision", training.precision),
    ("training", training.parity),
    ("checkpoint", states.checkpoint),
    ("speed", collectives.speed),
)
