"""Ways to spread one training over some devices: what a rank of each holds, which fit, and which to take.

The ways are tried from the one that exchanges least to the one that exchanges most. For a model of ``m``
numbers a step exchanges, by each rank (Rajbhandari et al. 2020, "ZeRO", section 7):

- copies, and optimizer state or gradients divided: ``2 m``, of which half are weights;
- weights divided, and kept whole from the forward on: ``2 m``; gathered again in the backward: ``3 m``;
- the same within each machine: ``3 m`` inside, and ``m`` divided by its devices between machines;
- layers divided too: four times the activations of each block in every micro-batch, so within a machine;
- recomputation exchanges nothing and computes a third more;
- what rests on the host crosses its bus in every step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from accelerate.core.errors import SettingError
from accelerate.core.units import parse_bytes, show_bytes
from accelerate.offload.estimate.bill import Bill, Facts, Training, training

# Of each device, for its context, what kernels take for a moment, and gaps between what is allocated.
SPARE = 0.1
_SHAPE = re.compile(r"(?:(\d+)x)?(\d+)x(\d[\w.]*)", re.IGNORECASE)


# Bytes of the smallest memory that is meant: below it a unit was left out.
_LEAST = 1000


@dataclass(frozen=True)
class Devices:
    """The devices of a training.

    Attributes:
        nodes: machines.
        each: devices of a machine.
        memory: bytes of a device.
    """

    nodes: int
    each: int
    memory: int

    @property
    def count(self) -> int:
        """All of them."""
        return self.nodes * self.each

    @property
    def usable(self) -> int:
        """Bytes of a device without what is kept free."""
        return int(self.memory * (1 - SPARE))

    def __str__(self) -> str:
        where = f"{self.nodes} machines of {self.each}" if self.nodes > 1 else f"{self.each}"
        return f"{where} device{'s' * (self.count > 1)} with {show_bytes(self.memory)}"


def devices(text: str) -> Devices:
    """``8x80GB`` is one machine with eight devices, ``4x8x80GB`` four such machines.

    Raises:
        SettingError: it is neither, or a number without a unit.
    """
    match = _SHAPE.fullmatch(text.replace(" ", ""))
    if match is None or "0" in (match.group(1), match.group(2)):
        raise SettingError(
            f"{text!r} does not say how many devices there are",
            fix="write 8x80GB for a machine with eight devices of 80 GB, or 4x8x80GB for four machines",
        )
    found = Devices(int(match.group(1) or 1), int(match.group(2)), parse_bytes(match.group(3)))
    if found.memory < _LEAST:
        raise SettingError(
            f"{text!r} are devices of {found.memory} bytes",
            why="a number without a unit counts bytes",
            fix=f"write {text}GB" if text[-1:].isdigit() else "write 8x80GB",
        )
    return found


@dataclass(frozen=True)
class Way:
    """One way to spread a training.

    Attributes:
        name: for tables.
        bill: what a rank holds.
        why: what speaks for it, or against it, as a clause.
        job: the settings of a launch.
        engine: it needs another library.
    """

    name: str
    bill: Bill
    why: str
    job: Mapping[str, Any] = field(default_factory=dict)
    engine: bool = False

    def fits(self, on: Devices) -> bool:
        """Whether a device holds it."""
        return self.bill.total <= on.usable


Counted = Callable[..., Bill]


def ways(
    facts: Facts, how: Training, on: Devices, kept: Callable[[Training], Any] = lambda how: None
) -> list[Way]:
    """Every way that makes sense on these devices, the one that exchanges least first.

    Args:
        facts: the model.
        how: its training; strategy and number of processes are filled in.
        on: the devices.
        kept: tells of a training what its forward keeps; see ``bill.training``.
    """
    if on.count == 1:
        how = replace(how, strategy="single", num_processes=1)
        return [Way("one device", training(facts, how, kept(how)), "nothing is exchanged")]

    def counted(**changes: Any) -> Bill:
        asked = replace(how, num_processes=on.count, **changes)
        return training(facts, asked, kept(asked))

    return [*_copies(counted), *_sharded(counted, on), *_layers(facts, counted, on), *_hosted(counted)]


def _copies(counted: Counted) -> Iterator[Way]:
    """Every rank has all weights."""
    yield Way(
        "copies (DDP)",
        counted(strategy="ddp"),
        "only gradients are exchanged",
        {"distributed_type": "MULTI_GPU"},
    )
    for stage, what in ((1, "optimizer state is divided"), (2, "optimizer state and gradients are divided")):
        job = {"distributed_type": "DEEPSPEED", "zero_stage": stage}
        yield Way(f"ZeRO {stage}", counted(strategy=f"zero{stage}"), what, job, engine=True)


def _sharded(counted: Counted, on: Devices) -> Iterator[Way]:
    """Weights are divided too."""
    job = {"distributed_type": "FSDP", "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    keeps = {**job, "fsdp_reshard_after_forward": False}
    yield Way(
        "sharded, whole in the step (FSDP)",
        counted(strategy="fsdp", keeps=True),
        "weights are gathered once a step",
        keeps,
    )
    if on.nodes > 1:
        copies = {**job, **_grid(dp_replicate=on.nodes, dp_shard=on.each)}
        yield Way(
            "sharded in each machine (HSDP)",
            counted(strategy="fsdp", shard=on.each),
            "only gradients cross between machines",
            copies,
        )
    again = "weights are gathered twice a step"
    yield Way("sharded (FSDP)", counted(strategy="fsdp"), again, job)
    yield Way(
        "ZeRO 3",
        counted(strategy="zero3"),
        again,
        {"distributed_type": "DEEPSPEED", "zero_stage": 3},
        engine=True,
    )
    full = {**job, "fsdp_activation_checkpointing": True}
    yield Way(
        "sharded, recomputed (FSDP)",
        counted(strategy="fsdp", recompute="full"),
        "activations are computed again: a third more to compute",
        full,
    )


def _layers(facts: Facts, counted: Counted, on: Devices) -> Iterator[Way]:
    """Layers are divided within a machine, and what is left of them over the rest."""
    job = {"distributed_type": "FSDP", "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    heads = facts.layers.kv_heads if facts.layers is not None else 0
    for tensor in (2, 4, 8):
        if not facts.matrices or on.each % tensor or heads % tensor or on.count == tensor:
            continue
        grid = _grid(dp_shard=on.count // tensor, tp=tensor)
        yield Way(
            f"sharded, layers over {tensor}, recomputed (FSDP x TP)",
            counted(strategy="fsdp", tensor=tensor, recompute="full"),
            f"{tensor} devices compute each layer together: activations are exchanged in every block",
            {**job, **grid, "fsdp_activation_checkpointing": True},
        )


def _hosted(counted: Counted) -> Iterator[Way]:
    """Weights, gradients and optimizer rest on the host."""
    job = {"distributed_type": "FSDP", "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    job |= {"fsdp_offload_params": True, "fsdp_activation_checkpointing": True}
    yield Way(
        "sharded, recomputed, on the host (FSDP)",
        counted(strategy="fsdp", recompute="full", offload=True),
        "everything crosses the bus in every step, and the host runs the optimizer",
        job,
    )


def _grid(**sizes: int) -> dict[str, Any]:
    """Sizes of a mesh as settings."""
    return {f"parallelism_config_{name}_size": size for name, size in sizes.items()}


def recommended(found: list[Way], on: Devices) -> Way | None:
    """The first that fits, of those that need no other library; None if none does."""
    return next((way for way in found if way.fits(on) and not way.engine), None)


def reason(way: Way | None, found: list[Way], on: Devices) -> str:
    """Why that one, as a sentence."""
    if way is None:
        least = min(found, key=lambda each: each.bill.total)
        missing = least.bill.total - on.usable
        return (
            f"Nothing fits: the leanest, {least.name}, needs {show_bytes(least.bill.total)} of each device, "
            f"{show_bytes(missing)} more than there is. Take more devices, or a smaller batch or length."
        )
    before = found[: found.index(way)]
    left = on.usable - way.bill.total
    if not before or all(each.engine for each in before):
        why = "no way exchanges less"
    else:
        tight = next(each for each in reversed(before) if not each.engine)
        why = f"{tight.name} would exchange less, but needs {show_bytes(tight.bill.total)}"
    engines = [each.name for each in before if each.engine and each.fits(on)]
    why += f"; {engines[0]} fits too, and needs another library" if engines else ""
    return f"Take: {way.name}. It fits with {show_bytes(left)} to spare; {why}. {way.why.capitalize()}."
