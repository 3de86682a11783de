"""A picture of the memory over time, by kind of tensor, from the records of torch's profiler."""

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

# The kinds in drawing order, from below: long-lived memory comes first.
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
# A picture shows no more moments; of moments that fall together the one with most memory is shown.
MOMENTS = 3000


@dataclass(frozen=True)
class DeviceMemoryTimeline:
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


def read_timelines(profiler: profile) -> list[DeviceMemoryTimeline]:
    """Return one timeline per device with allocations while ``profiler`` recorded.

    Where torch knows the category of a tensor (it needs recorded shapes and stacks), memory is split by it,
    and tensors from before the recording count. Otherwise, and where torch's analysis fails (with a warning),
    all memory allocated since is "other".

    Args:
        profiler: a profiler whose recording with ``profile_memory=True`` is complete.
    """
    # Torch has no stable interface to its memory profile: it may go.
    if hasattr(profiler, "_memory_profile"):
        try:
            return _timelines_by_kind(profiler._memory_profile())
        except (AssertionError, ImportError) as error:
            # Torch tracks every write to a tensor, and fails where several threads write to one.
            warnings.warn(
                f"torch cannot tell what fills the memory in this profile, so all of it is shown as other: "
                f"{str(error).partition(':')[0]}",
                stacklevel=2,
            )
    return _total_timelines(profiler)


def _timelines_by_kind(memory: Any) -> list[DeviceMemoryTimeline]:
    from torch.profiler._memory_profiler import _CATEGORY_TO_INDEX, MemoryProfileTimeline

    devices = sorted({str(key.device) for _, _, (key, _), _ in memory.timeline})
    timelines: list[DeviceMemoryTimeline] = []
    for device in devices:
        moments, sizes = MemoryProfileTimeline(memory)._coalesce_timeline(device)  # in microseconds
        table = np.asarray(sizes, dtype=np.int64)
        kinds = {"other": table[:, 0]}
        for category, index in _CATEGORY_TO_INDEX.items():
            name = _TORCH_NAMES.get(category.name, "other") if category else "other"
            kinds[name] = kinds.get(name, 0) + table[:, index + 1]
        timelines.append(_make_timeline(device, np.asarray(moments) / 1e6, kinds))
    return timelines


def _total_timelines(profiler: profile) -> list[DeviceMemoryTimeline]:
    results: Any = profiler.profiler
    rows: dict[str, list[tuple[int, int]]] = {}
    for event in results.kineto_results.events():
        if event.name() == "[memory]":
            kind = str(event.device_type()).rpartition(".")[2].lower()
            device = kind if event.device_index() < 0 else f"{kind}:{event.device_index()}"
            rows.setdefault(device, []).append((event.start_ns(), event.nbytes()))
    timelines: list[DeviceMemoryTimeline] = []
    for device, changes in sorted(rows.items()):
        moments, steps = np.asarray(sorted(changes)).T
        timelines.append(_make_timeline(device, moments / 1e9, {"other": np.cumsum(steps)}))
    return timelines


def _make_timeline(
    device: str, seconds: NDArray[np.float64], sizes: dict[str, NDArray[np.int64]]
) -> DeviceMemoryTimeline:
    """Return a timeline of the kinds that occur, in drawing order, thinned to ``MOMENTS``."""
    kinds = {name: sizes[name] for name in KINDS if name in sizes and sizes[name].any()}
    seconds = seconds - seconds.min()
    if len(seconds) > MOMENTS:
        total = np.sum(list(kinds.values()), axis=0)
        groups = np.array_split(np.arange(len(seconds)), MOMENTS)
        shown = np.array([group[np.argmax(total[group])] for group in groups])
        seconds, kinds = seconds[shown], {name: values[shown] for name, values in kinds.items()}
    return DeviceMemoryTimeline(device, seconds, kinds)


def draw_timelines(timelines: list[DeviceMemoryTimeline], path: Path) -> None:
    """Draw a PNG at ``path``: one panel per device, kinds stacked over time, the peak marked."""
    from matplotlib.figure import Figure  # a figure without a window: needs no display

    count = max(1, len(timelines))
    figure = Figure(figsize=(10, 0.6 + 3.9 * count), layout="constrained")
    panels = figure.subplots(count, 1, squeeze=False)[:, 0]
    for axes, line in zip(panels, timelines, strict=False):
        _draw_panel(axes, line)
    if not timelines:
        panels[0].set_title("no memory was allocated while recording")
    figure.savefig(path, format="png", dpi=120)


def _draw_panel(axes: Any, line: DeviceMemoryTimeline) -> None:
    unit, scale = _choose_unit(int(line.total.max()))
    below = np.zeros(len(line.seconds))
    milliseconds = line.seconds * 1e3
    peak = int(np.argmax(line.total))
    for name, values in line.bytes.items():
        above = below + values / scale
        label = f"{name}: {show_bytes(int(values[peak]))}"
        axes.fill_between(milliseconds, below, above, step="post", color=KINDS[name], label=label, lw=0)
        below = above
    axes.step(milliseconds, below, where="post", color="black", lw=0.6)
    axes.plot(milliseconds[peak], below[peak], "kv", ms=6)
    axes.set_title(f"memory of {line.device}: at most {show_bytes(int(line.total.max()))}")
    axes.set(xlabel="milliseconds", ylabel=unit, xlim=(0, max(milliseconds[-1], 1e-3)))
    axes.set_ylim(0, max(below.max() * 1.08, 1e-3))
    axes.grid(alpha=0.3)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],
        names[::-1],
        title="at the mark",
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
    )


def _choose_unit(size: int) -> tuple[str, float]:
    """Return a readable unit for ``size`` and its number of bytes."""
    for unit, scale in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if size >= scale:
            return unit, float(scale)
    return "bytes", 1.0
