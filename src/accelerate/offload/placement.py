"""The placement of a model on devices, and its text when it is printed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeAlias

from accelerate.core.units import show_decimal_bytes

Device: TypeAlias = "int | str"
CPU, DISK = "cpu", "disk"


@dataclass(frozen=True)
class DeviceBudget:
    """The use of a device's memory budget; all in bytes.

    Attributes:
        budget: what may be used; the disk has no end unless it was given one.
        weights: parameters and buffers that are placed on it.
        pinned: buffers of modules on the CPU or the disk, which stay where they are computed.
        cache: keys and values of the blocks that are computed on it.
        reserve: for activations.
        block_buffer: for the largest block that is copied from the CPU or the disk.
    """

    budget: float
    weights: int = 0
    pinned: int = 0
    cache: int = 0
    reserve: int = 0
    block_buffer: int = 0

    @property
    def used(self) -> int:
        """The bytes that are used or reserved."""
        return self.weights + self.pinned + self.cache + self.reserve + self.block_buffer

    @property
    def unused(self) -> float:
        """The bytes that are free."""
        return self.budget - self.used


class PlacementRow(NamedTuple):
    """Consecutive units on one device: first and last of them, how many, bytes, the reason."""

    first: str
    last: str
    units: int
    device: Device
    size: int
    why: str


@dataclass(frozen=True)
class ModelPlacement:
    """The device of every unit of a model; ``print`` shows it as a table.

    Attributes:
        homes: unit -> device, in the order of the model. A unit is never divided (``module_sizes.py``).
        device_map: the same, with the names of whole modules where all of a module has one home.
        sizes: unit -> bytes; a tied weight counts at the first that has it.
        budgets: device -> the use of its budget.
        executor: the device that computes offloaded units; None when there are none.
        tied: groups of names that are one weight.
        why: unit -> the reason, for units that are not on the device of their neighbours.
        notes: a sentence each.
    """

    homes: Mapping[str, Device]
    device_map: Mapping[str, Device]
    sizes: Mapping[str, int]
    budgets: Mapping[Device, DeviceBudget]
    executor: Device | None
    tied: tuple[tuple[str, ...], ...]
    why: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def offloaded(self) -> dict[str, Device]:
        """The units that are stored on another device than the one that computes them."""
        stores = (DISK,) if self.executor in (None, CPU) else (CPU, DISK)
        return {name: device for name, device in self.homes.items() if device in stores}

    @property
    def rows(self) -> tuple[PlacementRow, ...]:
        """The units that have weights, in order; consecutive ones with one device and reason are one row."""
        named = [(name, device) for name, device in self.homes.items() if self.sizes[name]]
        runs = groupby(named, lambda pair: (pair[1], self.why.get(pair[0], "")))
        named_runs = [(device, why, [name for name, _ in run]) for (device, why), run in runs]
        return tuple(
            PlacementRow(names[0], names[-1], len(names), device, sum(self.sizes[n] for n in names), why)
            for device, why, names in named_runs
        )

    def __str__(self) -> str:
        return "\n".join(_format_lines(self))


def format_size(count: float) -> str:
    """Format bytes as budgets are typed: ``24e9`` is ``"24.00 GB"``; an infinite budget is no limit."""
    return "no limit" if math.isinf(count) else show_decimal_bytes(count)


def _format_lines(plan: ModelPlacement) -> Iterator[str]:
    rows = [
        (
            f"{row.first} ... {row.last} ({row.units})" if row.units > 1 else row.first or "the model",
            str(row.device),
            format_size(row.size),
            row.why,
        )
        for row in plan.rows
    ]
    yield from _format_table(("modules", "device", "weights", "why"), rows)
    yield ""
    budgets = [
        (
            str(device),
            *(format_size(size) if (size := getattr(use, name)) else "-" for name in _COLUMNS.values()),
        )
        for device, use in plan.budgets.items()
    ]
    yield from _format_table(("device", *_COLUMNS), budgets)
    for group in plan.tied:
        yield f"tied: {' = '.join(group)}"
    for note in plan.notes:
        yield f"note: {note}"


# What a budget is spent on: title of the column -> attribute of an account.
_COLUMNS = {
    "budget": "budget",
    "weights": "weights",
    "buffers of others": "pinned",
    "keys and values": "cache",
    "activations": "reserve",
    "for the largest block": "block_buffer",
    "left": "unused",
}


def _format_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Format a table; columns that are empty in every row are left out."""
    columns = [i for i in range(len(titles)) if any(row[i] not in ("", "-") for row in rows)]
    lines = [[titles[i] for i in columns], *([row[i] for i in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
