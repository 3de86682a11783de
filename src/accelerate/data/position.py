"""Where a loader is: the epoch, the samples given in it, and what its order was made of.

The samples of all processes together are counted, so a position means the same on any number of processes.
One position is shared by a prepared loader and by the twins that ``skip_first_batches`` makes of it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from accelerate.data.epoch import Readers, Start
from accelerate.data.states import put_back, states_of
from accelerate.world import collective


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

    def plus(self, batches: int, step: int) -> Skip:
        """So many batches more, of ``step`` samples each."""
        samples = None if self.samples is None else self.samples + batches * step
        return Skip(self.batches + batches, samples)


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


@dataclass
class Epoch:
    """One iteration of a loader, and how far it has come.

    Attributes:
        number: of the epoch.
        skip: what it leaves out.
        samples, batches: given so far with those that were left out: of all processes, and of this one.
        complete: the last batch was given.
        active: the iteration has neither ended nor was it broken off.
        start: what the order was made of; the source fills it in, unless it is to begin
        again: as an earlier process began it. The program's generators then stay as they are, or
        natural: move on as if the epoch were new.
        exhausted: the sampler has come to its end.
        warm: an epoch before it, here or before a checkpoint, has started workers that persist.
        now: states that the generators of the loader and its samplers keep, if the order is made again.
        cut_by: world size and samples of a step when it was saved, if it begins again, and
        given: the batches that each process had then.
        length: samples of the whole order, where that is known.
        readers: which part this process reads, where several read the same.
    """

    number: int
    skip: Skip = Skip()
    samples: int = 0
    batches: int = 0
    complete: bool = False
    active: bool = True
    start: Start | None = None
    again: bool = False
    natural: bool = False
    exhausted: bool = False
    warm: bool = False
    now: list[Any] | None = None
    cut_by: tuple[int, int] | None = None
    given: int = 0
    length: int | None = None
    readers: Readers | None = None

    @property
    def parts(self) -> int:
        """Into how many parts the data are shared out."""
        return collective.size() if self.readers is None else self.readers.parts

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "samples": self.samples,
            "batches": self.batches,
            "complete": self.complete,
            "active": self.active,
            "exhausted": self.exhausted,
            "length": self.length,
            "start": None if self.start is None else self.start.state_dict(),
        }


class Position:
    """The progress of one prepared loader.

    Attributes:
        iteration: number of the next epoch, or of the one in progress.
        current: the newest iteration, or None.
        record: where a loaded checkpoint was, as long as the loader has not come further.
        readers: see ``Epoch``.
    """

    def __init__(self, iteration: int = 0) -> None:
        self.iteration = iteration
        self.current: Epoch | None = None
        self.record: Epoch | None = None
        self.readers: Readers | None = None
        self._warm = False
        self._saved: dict[str, Any] = {}

    def begin(self, skip: Skip, *, isolated: bool) -> Epoch:
        """A new iteration begins: the recorded epoch again, if it is that one's turn.

        Args:
            skip: what it leaves out.
            isolated: it goes on inside the recorded epoch, so it draws nothing that was drawn before.
        """
        record, epoch = self.record, self._new(skip)
        if record is not None and (record.complete or record.number != self.iteration):
            self.record = None
        elif record is not None and record.start is not None:
            natural = not isolated and not record.active
            epoch = replace(
                epoch,
                start=record.start,
                again=True,
                natural=natural,
                exhausted=record.exhausted,
                cut_by=record.cut_by,
                given=record.batches,
                length=record.length,
            )
        self.current, self._warm = epoch, True
        return epoch

    def _new(self, skip: Skip) -> Epoch:
        return Epoch(self.iteration, skip, batches=skip.batches, warm=self._warm, readers=self.readers)

    @property
    def _parts(self) -> int:
        return Epoch(0, readers=self.readers).parts

    def end(self, epoch: Epoch) -> None:
        """An iteration ended or was broken off."""
        epoch.active = False
        record = self.record
        if record is not None and (epoch.complete or epoch.samples > record.samples):
            self.record = None

    def close(self) -> None:
        """The recorded epoch was complete, and nothing is left of it."""
        record = self.record
        assert record is not None
        self.record, self.current = None, replace(record, active=False)
        self.iteration = record.number + 1

    def state_dict(self, generators: list[Any], step: int) -> dict[str, Any]:
        """Plain values; ``generators`` are those that the loader and its samplers hold."""
        current = self.current
        if self.record is not None and (current is None or not current.active):
            return dict(self._saved)
        state = {
            "epoch": self.iteration,
            "world_size": self._parts,
            "step": step,
            "warm": self._warm,
            "now": states_of(generators),
            "in_progress": None,
        }
        if current is not None:
            state["in_progress"] = {"epoch": current.number, **current.state_dict()}
            state["epoch"] = max(self.iteration, current.number + current.complete)
        return state

    def load_state_dict(self, state: dict[str, Any], generators: list[Any]) -> None:
        """Takes over what ``state_dict`` gave, here or in another process.

        Raises:
            ValueError: the loader and its samplers hold other generators.
        """
        self.iteration, self.current, self.record = state["epoch"], None, None
        if "in_progress" not in state:
            return
        self._warm = state["warm"]
        put_back(generators, state["now"])
        told = state["in_progress"]
        if told is None or told["start"] is None:
            return
        if not told["complete"]:
            self.iteration = told["epoch"]
        self._saved = state
        self.record = Epoch(
            told["epoch"],
            samples=told["samples"],
            batches=told["batches"],
            complete=told["complete"],
            active=told["active"],
            start=Start.of(told["start"]),
            exhausted=told["exhausted"],
            cut_by=(state["world_size"], state["step"]),
            length=told["length"],
        )

    def skip(self, batches: int | None, step: int, count: int | None) -> Skip:
        """What it means to leave out ``batches``: the recorded position, if it is that many.

        Args:
            batches: as the world counts them that saved the checkpoint, or this one; None: those that are
                recorded, which are none if the loop over the epoch had ended.
            step: samples of a step now.
            count: batches of a whole epoch now, if known.
        """
        record = self.record
        if record is None or (batches is None and record.complete and not record.active):
            return Skip(batches or 0)  # between two epochs nothing is left of one: the next is whole
        here = record.complete and batches == count
        if batches is None:
            batches = record.samples // step if self._other_world(step) else record.batches
            here = True
        if not (here or batches == record.batches or batches * step == record.samples):
            warnings.warn(
                f"{batches} batches are left out, but the checkpoint was saved after {record.batches} "
                f"({record.samples} samples): samples are repeated or lost; "
                "skip_first_batches(loader, None) goes on where it was",
                stacklevel=4,
            )
            return Skip(batches)
        if self._other_world(step) and collective.rank() == 0:
            size, saved = record.cut_by or (1, step)
            warnings.warn(
                f"the checkpoint was saved by {size} process(es) with steps of {saved} samples and is "
                f"continued by {self._parts} with steps of {step}: the remaining samples are the same, "
                "but other processes get them",
                stacklevel=4,
            )
        return Skip(batches, record.samples)

    def _other_world(self, step: int) -> bool:
        return self.record is not None and self.record.cut_by != (self._parts, step)
