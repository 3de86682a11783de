"""Reports of used memory: a picture over time from torch's profiler, and the tensors that hold most of it."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from accelerate.core.units import show_bytes
from accelerate.device.base import Device
from accelerate.world.local_tensor_trees import local_tensor

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
# How many tensors are listed.
ROWS = 30


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


# --- the tensors that hold the most memory, by name where a model or an optimizer has them


def describe_holders(
    hardware: Device, models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> str:
    """Return a table of the tensors of this process that hold the most memory of a device.

    A storage that several tensors share counts once. Tensors that only the graph of a backward holds are not
    objects of Python: they are in the line of the rest, where the device counts what is allocated.

    Args:
        hardware: the device.
        models, optimizers: whose tensors are named.

    Returns:
        Lines: the bytes of each kind of tensor, and the ``ROWS`` largest tensors.
    """
    names = dict(_name_tensors(models, optimizers))
    kinds = Counter[str]()
    rows: dict[int, tuple[int, str, str]] = {}
    for tensor in _live_tensors(hardware.type):
        key, size = _storage(tensor)
        if key and key not in rows:
            kind, name = names.get(key, ("other", ""))
            kinds[kind] += size
            shape = "x".join(map(str, local_tensor(tensor).shape)) or "scalar"
            dtype = str(tensor.dtype).removeprefix("torch.")
            rows[key] = size, f"{name or 'a tensor'} ({shape}, {dtype})", kind
    allocated = hardware.memory_allocated()
    if allocated is not None and allocated > kinds.total():
        kinds["held by the backward's graph, or by libraries"] = allocated - kinds.total()
    lines = [f"{show_bytes(size):>12}  {kind}" for kind, size in kinds.most_common()]
    largest = sorted(rows.values(), key=lambda row: row[0], reverse=True)
    lines += ["", f"the largest of {len(largest)} tensors:"]
    lines += [f"{show_bytes(size):>12}  {kind:15}  {what}" for size, what, kind in largest[:ROWS]]
    return "\n".join(lines) + "\n"


def _storage(tensor: Any) -> tuple[int, int]:
    """Return the address and the bytes of a storage; 0 where there is none: sparse, fake, a wrapper."""
    try:
        storage = local_tensor(tensor).untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):
        return 0, 0


def _live_tensors(device_type: str) -> Iterator[torch.Tensor]:
    """Yield the tensors that Python holds on a type of device."""
    for each in gc.get_objects():
        # Not isinstance: it asks proxies for their class, which may import or compute something.
        if issubclass(type(each), torch.Tensor) and each.device.type == device_type:
            yield each
            if each.is_leaf and each.grad is not None:
                yield each.grad


def _name_tensors(
    models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield the address of the storage of each named tensor, with its kind and name."""
    name_of: dict[Any, str] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            name_of[parameter] = name
            yield _storage(parameter)[0], ("parameters", name)
            if parameter.grad is not None:
                yield _storage(parameter.grad)[0], ("gradients", f"{name}.grad")
        for name, buffer in model.named_buffers():
            yield _storage(buffer)[0], ("buffers", name)
    for optimizer in optimizers:
        state: Mapping[Any, Any] = optimizer.state
        for parameter, values in state.items():
            for key, value in values.items() if isinstance(values, Mapping) else ():
                if isinstance(value, torch.Tensor):
                    owner = name_of.get(parameter, "a parameter of no prepared model")
                    yield _storage(value)[0], ("optimizer state", f"{key} of {owner}")
