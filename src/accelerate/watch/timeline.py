"""A picture of the memory over time, by what fills it, from what torch's profiler has recorded."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accelerate.core.units import show_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.profiler import profile

# What is drawn from below, in this order: what stays comes first.
KINDS = {
    "parameters": "tab:blue",
    "optimizer state": "tab:cyan",
    "gradients": "tab:orange",
    "activations": "tab:red",
    "inputs": "tab:green",
    "autograd": "tab:pink",
    "temporary": "tab:purple",
    "other": "tab:gray",
}
_TORCH_NAMES = {
    "PARAMETER": "parameters",
    "OPTIMIZER_STATE": "optimizer state",
    "GRADIENT": "gradients",
    "ACTIVATION": "activations",
    "INPUT": "inputs",
    "AUTOGRAD_DETAIL": "autograd",
    "TEMPORARY": "temporary",
}
# A picture shows no more; of the moments that fall together the fullest is kept.
MOMENTS = 3000


@dataclass(frozen=True)
class Timeline:
    """The memory of one device.

    Attributes:
        device: its name, ``"cuda:0"``.
        seconds: moments since the first, shape (moments,).
        bytes: kind -> bytes in use from that moment on, each of shape (moments,).
    """

    device: str
    seconds: NDArray[np.float64]
    bytes: dict[str, NDArray[np.int64]]

    @property
    def total(self) -> NDArray[np.int64]:
        """Bytes of all kinds, shape (moments,)."""
        return np.sum(list(self.bytes.values()), axis=0)


def read(profiler: profile) -> list[Timeline]:
    """One timeline per device that something was allocated on while ``profiler`` recorded.

    Where torch tells what a tensor is for (it needs recorded shapes and stacks), memory is told apart by
    that, and tensors that were there before count. Otherwise, and where torch loses its way (a warning says
    so), all that was allocated since is "other".

    Args:
        profiler: one whose recording with ``profile_memory=True`` is complete.
    """
    # Torch has no lasting interface to this: what it calls a memory profile may go.
    if hasattr(profiler, "_memory_profile"):
        try:
            return _by_kind(profiler._memory_profile())
        except AssertionError as error:
            # Torch follows every write to a tensor, and loses its way where several threads write to one.
            warnings.warn(
                f"torch cannot tell what fills the memory in this profile, so all of it is shown as other: "
                f"{str(error).partition(':')[0]}",
                stacklevel=2,
            )
    return _totals(profiler)


def _by_kind(memory: Any) -> list[Timeline]:
    from torch.profiler._memory_profiler import _CATEGORY_TO_INDEX, MemoryProfileTimeline

    devices = sorted({str(key.device) for _, _, (key, _), _ in memory.timeline})
    timelines: list[Timeline] = []
    for device in devices:
        moments, sizes = MemoryProfileTimeline(memory)._coalesce_timeline(device)  # in microseconds
        table = np.asarray(sizes, dtype=np.int64)
        found = {"other": table[:, 0]}
        for category, index in _CATEGORY_TO_INDEX.items():
            name = _TORCH_NAMES.get(category.name, "other") if category else "other"
            found[name] = found.get(name, 0) + table[:, index + 1]
        timelines.append(_timeline(device, np.asarray(moments) / 1e6, found))
    return timelines


def _totals(profiler: profile) -> list[Timeline]:
    results: Any = profiler.profiler
    rows: dict[str, list[tuple[int, int]]] = {}
    for event in results.kineto_results.events():
        if event.name() == "[memory]":
            kind = str(event.device_type()).rpartition(".")[2].lower()
            device = kind if event.device_index() < 0 else f"{kind}:{event.device_index()}"
            rows.setdefault(device, []).append((event.start_ns(), event.nbytes()))
    timelines: list[Timeline] = []
    for device, changes in sorted(rows.items()):
        moments, steps = np.asarray(sorted(changes)).T
        timelines.append(_timeline(device, moments / 1e9, {"other": np.cumsum(steps)}))
    return timelines


def _timeline(device: str, seconds: NDArray[np.float64], found: dict[str, NDArray[np.int64]]) -> Timeline:
    """With the kinds that occur, in the order of the picture, thinned to what a picture can show."""
    kinds = {name: found[name] for name in KINDS if name in found and found[name].any()}
    seconds = seconds - seconds.min()
    if len(seconds) > MOMENTS:
        total = np.sum(list(kinds.values()), axis=0)
        groups = np.array_split(np.arange(len(seconds)), MOMENTS)
        kept = np.array([group[np.argmax(total[group])] for group in groups])
        seconds, kinds = seconds[kept], {name: values[kept] for name, values in kinds.items()}
    return Timeline(device, seconds, kinds)


def draw(timelines: list[Timeline], path: Path) -> None:
    """A PNG at ``path``: one panel per device, kinds stacked over time, the peak marked."""
    from matplotlib.figure import Figure  # a figure without a window: needs no display

    count = max(1, len(timelines))
    figure = Figure(figsize=(10, 0.6 + 3.9 * count), layout="constrained")
    panels = figure.subplots(count, 1, squeeze=False)[:, 0]
    for axes, line in zip(panels, timelines, strict=False):
        _panel(axes, line)
    if not timelines:
        panels[0].set_title("no memory was allocated while recording")
    figure.savefig(path, format="png", dpi=120)


def _panel(axes: Any, line: Timeline) -> None:
    unit, scale = _unit(int(line.total.max()))
    below = np.zeros(len(line.seconds))
    milliseconds = line.seconds * 1e3
    for name, values in line.bytes.items():
        above = below + values / scale
        axes.fill_between(milliseconds, below, above, step="post", color=KINDS[name], label=name, lw=0)
        below = above
    axes.step(milliseconds, below, where="post", color="black", lw=0.6)
    top = int(np.argmax(below))
    axes.plot(milliseconds[top], below[top], "kv", ms=6)
    axes.set_title(f"memory of {line.device}: at most {show_bytes(int(line.total.max()))}")
    axes.set(xlabel="milliseconds", ylabel=unit, xlim=(0, max(milliseconds[-1], 1e-3)))
    axes.set_ylim(0, max(below.max() * 1.08, 1e-3))
    axes.grid(alpha=0.3)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _unit(size: int) -> tuple[str, float]:
    """A unit in which ``size`` is a number to read, and its bytes."""
    for unit, scale in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if size >= scale:
            return unit, float(scale)
    return "bytes", 1.0
