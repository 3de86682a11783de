"""A plan of who goes where, and how it reads when it is printed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeAlias

Device: TypeAlias = "int | str"
CPU, DISK = "cpu", "disk"


@dataclass(frozen=True)
class Account:
    """What is done with the budget of a device; all in bytes.

    Attributes:
        budget: what may be used; the disk has no end unless it was given one.
        weights: parameters and buffers that are placed on it.
        pinned: buffers of modules on the CPU or the disk, which stay where they are computed.
        cache: keys and values of the blocks that are computed on it.
        reserve: kept for activations.
        kept: kept for the largest block that is brought in from the CPU or the disk.
    """

    budget: float
    weights: int = 0
    pinned: int = 0
    cache: int = 0
    reserve: int = 0
    kept: int = 0

    @property
    def taken(self) -> int:
        """What is spoken for."""
        return self.weights + self.pinned + self.cache + self.reserve + self.kept

    @property
    def left(self) -> float:
        """What nobody needs."""
        return self.budget - self.taken


class Row(NamedTuple):
    """Units that follow one another with one home: first and last of them, how many, bytes, why there."""

    first: str
    last: str
    units: int
    device: Device
    size: int
    why: str


@dataclass(frozen=True)
class Placement:
    """A plan; ``print`` shows it as a table.

    Attributes:
        homes: unit -> device, in the order of the model. A unit is what is never divided (``parts.py``).
        device_map: the same, with the names of whole modules where all of a module has one home.
        sizes: unit -> bytes; a tied weight counts at the first that has it.
        accounts: device -> what is done with its budget.
        executor: the device that computes what is stored elsewhere; None when nothing is.
        tied: groups of names that are one weight.
        why: unit -> why it is where it is; those that are where they should be are not in it.
        notes: what is worth knowing, a sentence each.
    """

    homes: Mapping[str, Device]
    device_map: Mapping[str, Device]
    sizes: Mapping[str, int]
    accounts: Mapping[Device, Account]
    executor: Device | None
    tied: tuple[tuple[str, ...], ...]
    why: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def offloaded(self) -> dict[str, Device]:
        """The units that are stored elsewhere than where they are computed."""
        stores = (DISK,) if self.executor in (None, CPU) else (CPU, DISK)
        return {name: device for name, device in self.homes.items() if device in stores}

    @property
    def rows(self) -> tuple[Row, ...]:
        """The units that have weights, in order, those with one home and reason together."""
        named = [(name, device) for name, device in self.homes.items() if self.sizes[name]]
        runs = groupby(named, lambda pair: (pair[1], self.why.get(pair[0], "")))
        return tuple(self._row(device, why, [name for name, _ in run]) for (device, why), run in runs)

    def _row(self, device: Device, why: str, names: Sequence[str]) -> Row:
        return Row(names[0], names[-1], len(names), device, sum(self.sizes[n] for n in names), why)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def size(count: float) -> str:
    """``24e9`` -> ``"22.35 GiB"``: powers of 1024, and said so, since budgets are often typed as ``24GB``."""
    if math.isinf(count):
        return "no limit"
    amount, units = float(count), ("bytes", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if abs(amount) < 1024 or unit == units[-1]:
            return f"{int(amount)} bytes" if unit == "bytes" else f"{amount:.2f} {unit}"
        amount /= 1024
    raise AssertionError


def _lines(plan: Placement) -> Iterator[str]:
    yield from _table(
        ("modules", "device", "weights", "why"),
        [(_range(row), str(row.device), size(row.size), row.why) for row in plan.rows],
    )
    yield ""
    yield from _table(("device", *_COLUMNS), _accounts(plan))
    for group in plan.tied:
        yield f"tied: {' = '.join(group)}"
    for note in plan.notes:
        yield f"note: {note}"


def _range(row: Row) -> str:
    if row.units == 1:
        return row.first or "the model"
    return f"{row.first} ... {row.last} ({row.units})"


# What a budget is spent on: title of the column -> attribute of an account.
_COLUMNS = {
    "budget": "budget",
    "weights": "weights",
    "buffers of others": "pinned",
    "keys and values": "cache",
    "activations": "reserve",
    "for the largest block": "kept",
    "left": "left",
}


def _accounts(plan: Placement) -> list[tuple[str, ...]]:
    return [
        (
            str(device),
            *(size(getattr(account, name)) if getattr(account, name) else "-" for name in _COLUMNS.values()),
        )
        for device, account in plan.accounts.items()
    ]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as they need to be; those that say nothing in any row are left out."""
    kept = [i for i in range(len(titles)) if any(row[i] not in ("", "-") for row in rows)]
    lines = [[titles[i] for i in kept], *([row[i] for i in kept] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(kept))]
    for line in lines:
        yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
