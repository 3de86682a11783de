"""Where a loader is in its epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Skip:
    """What an epoch leaves out at its beginning.

    Attributes:
        batches: so many batches of this process, as this world counts them.
        samples: exactly so many samples of the order, of all processes together; None: what ``batches`` are.
    """

    batches: int = 0
    samples: int | None = None

    def __bool__(self) -> bool:
        return bool(self.batches or self.samples)


class Given(NamedTuple):
    """One batch of this process, as its source gives it to the prepared loader.

    Attributes:
        batch: on the host.
        last: no batch follows in this epoch, on this process.
        samples: how many samples of the order all processes together have taken with this step, fillers not
            counted; None: the loader's ``total_batch_size``.
        remainder: how many samples of this step are real when it was filled, all processes together; 0 when
            none is a filler, -1 when unknown. Only that of the last batch is looked at.
        real: rows of this process's batch that are no fillers; None: unknown, or all.
    """

    batch: Any
    last: bool = False
    samples: int | None = None
    remainder: int = -1
    real: int | None = None
