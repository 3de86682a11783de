"""The checks in the order in which they run: later checks rely on what earlier ones test."""

from __future__ import annotations

from accelerate.check import checkpoints, collectives, loaders, training
from accelerate.check.base import Check

CHECKS: tuple[tuple[str, Check], ...] = (
    ("ranks", collectives.check_ranks),
    ("gather", collectives.check_gather),
    ("reduce", collectives.check_reduce),
    ("broadcast", collectives.check_broadcast),
    ("objects", collectives.check_objects),
    ("data, even", loaders.check_even_epochs),
    ("data, uneven", loaders.check_uneven_epochs),
    ("data, shuffled", loaders.check_shuffled_epochs),
    ("data, dispatched", loaders.check_dispatched_epochs),
    ("precision", training.check_precision),
    ("training", training.check_parity),
    ("checkpoint", checkpoints.check_checkpoint),
    ("speed", collectives.measure_all_reduce),
)
