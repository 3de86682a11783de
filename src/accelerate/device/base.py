"""The base class of device types, and the machine on which devices are counted without importing torch.

``Device`` itself works for every type that ``torch.get_device_module`` knows. A file of this folder
declares the properties of one type and overrides only what its torch module does differently. Importing a
module of this folder does not import torch.

The launcher decides how many processes to start before any of them has loaded torch. It looks at device
nodes, at driver files, at the variables that hide devices, and at the build of torch (``DeviceProbeHost``).
Nothing of it initializes a driver, so the process may still fork.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from accelerate.core import environ
from accelerate.core.errors import DeviceError
from accelerate.core.value_types import frozen_dataclass

if TYPE_CHECKING:
    import torch


def is_package_installed(package: str) -> bool:
    """Return True when a top-level package could be imported; it is not imported."""
    return package in sys.modules or find_spec(package) is not None


@functools.cache
def torch_build() -> Mapping[str, str | None]:
    """Return the constants of torch's ``version.py``: ``{"cuda": "12.8", "hip": None, ...}``.

    Empty when torch is not installed. The file is run by itself; it imports nothing of torch.
    """
    import runpy  # few launches ask

    spec = find_spec("torch")
    path = None if spec is None or spec.origin is None else Path(spec.origin).with_name("version.py")
    return runpy.run_path(str(path)) if path is not None and path.is_file() else {}


@frozen_dataclass
class DeviceProbeHost:
    """The machine as ``Device.probe_count`` sees it; tests pass a folder that looks like one.

    Attributes:
        root: the folder that holds ``dev``, ``proc`` and ``sys``.
        env: the environment variables; an empty value counts as set.
        build: returns the build of torch (see ``torch_build``); few launches need to know.
        has_package: whether a top-level package is installed.
    """

    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=environ.snapshot)
    build: Callable[[], Mapping[str, str | None]] = torch_build
    has_package: Callable[[str], bool] = is_package_installed

    def find_device_nodes(self, *patterns: str) -> list[Path]:
        """Return paths below the root that match a glob pattern and end in a number, sorted."""
        paths = {path for pattern in patterns for path in self.root.glob(pattern)}
        return sorted(path for path in paths if path.name[-1].isdigit())

    def exists(self, path: str) -> bool:
        """Return True when a path below the root exists."""
        return (self.root / path).exists()

    def read(self, path: str | Path) -> str:
        """Return the text of a file below the root, "" when it is absent or not readable."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""


def count_visible(present: int, variable: str | None) -> int:
    """Return how many of ``present`` devices a visible-devices variable leaves.

    The rules are CUDA's, which every vendor follows: unset shows all; the list ends at the first entry
    that names no device ("", -1, "NoDevFiles", an index too large); an entry that stands twice hides
    everything; identifiers (``GPU-...``, ``MIG-...``) cannot be checked without the driver and count one.
    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    if variable is None:
        return present
    shown: list[str] = []
    for entry in (part.strip() for part in variable.split(",")):
        number = re.match(r"[+-]?\d+", entry)
        if number is None and not entry.startswith(("GPU-", "MIG-")):
            break
        if number is not None and not 0 <= int(number[0]) < present:
            break
        name = entry if number is None else str(int(number[0]))
        if name in shown:
            return 0
        shown.append(name)
    return len(shown) if present else 0


# Files of a control group below sys/fs/cgroup, version 2 and 1: limit, usage, statistics, file cache.
CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def container_limit(machine: DeviceProbeHost | None = None) -> tuple[int, int] | None:
    """Return (free, total) bytes of this process's control group, or None when it has no limit.

    File cache that the kernel would drop counts as free. Source: Linux Documentation/admin-guide,
    cgroup-v2.rst (memory.max, memory.current, memory.stat) and cgroup-v1/memory.rst.
    """
    machine = machine or DeviceProbeHost()
    for limit, usage, stat, cache in CGROUPS:
        total, used = machine.read(f"sys/fs/cgroup/{limit}"), machine.read(f"sys/fs/cgroup/{usage}")
        if not (total.isdigit() and used.isdigit()):
            continue
        lines = (line.split() for line in machine.read(f"sys/fs/cgroup/{stat}").splitlines())
        reclaimable = sum(int(line[1]) for line in lines if line and line[0] == cache)
        return max(0, int(total) - max(0, int(used) - reclaimable)), int(total)
    return None


def count_cores(machine: DeviceProbeHost, sharers: int = 1) -> int:
    """Return the number of cores for this process: those it is bound to, at most its share of a container.

    A container has ``quota / period`` of cgroup v2's ``cpu.max``. Source: kernel.org, admin-guide/cgroup-v2.

    Args:
        machine: this machine.
        sharers: processes that share the container, this one included.
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = machine.read("sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit() and int(period):
        return max(1, min(bound, -(-int(quota) // int(period)) // sharers))
    return bound


class Device:
    """A type of device.

    Attributes:
        type: torch's device type, ``"cuda"``.
        backend: the torch.distributed backend it prefers; "" when none is known.
        fallbacks: backends that also work, in order, where the preferred one is missing.
        bound_backends: those that open their communicator at once, and on the right device, where the group
            is given that device.
        visible_variable: the environment variable that hides devices from a process, or None.
        distributed_type: the value of ``DistributedType`` for several devices of this type.
        priority: order of detection, the highest first; 0 is never detected.
        is_most_common: whether it is the one that most machines have; lists of devices begin with it.
        dtypes: the mixed precisions the type may support; ``supports`` asks the device at hand.
        extension: the module that registers the device with torch; "" when torch has it built in.
        extension_variable: a yes/no variable by which users hide an extension that is merely installed.
        extension_fix: what to do where it cannot be imported.
        group_extension: the module that registers its backend with torch.distributed, if it is another one.
        node_patterns: glob patterns of its device nodes, relative to the root of the machine.
        rng_key: the key of its RNG state in a saved ``random_states_*.pkl``.
        out_of_memory_messages: fragments of the messages of its out-of-memory errors.
        compile_backend: the backend of ``torch.compile`` that generates code for it; "" when none is known.
        pins_memory: whether copies to pinned host memory are asynchronous.
        starts_ranks: whether its runtime starts the processes of a function itself (``start_ranks``).
        environment: variables of the processes that compute on it; a variable that is set already stays.
            Launchers set them before torch is loaded; a process without a launcher sets them itself.
        check_environment: variables that make torch ask whether there is a device without initializing the
            driver, after which this process could fork no workers.
        peak_flops: words of a product name -> format -> floating point operations per second that its maker
            gives for dense matrix products; the first that fits counts.
        has_index: whether a process chooses among several devices of the type.
        is_lazy: whether operations are recorded, and run when ``run_pending`` is called or a value is read.

    ``index`` is the number of a device among the visible ones everywhere; None means the current one.
    """

    type: str = ""
    backend: str = ""
    fallbacks: tuple[str, ...] = ()
    bound_backends: frozenset[str] = frozenset()
    visible_variable: str | None = None
    distributed_type: str = "MULTI_GPU"
    priority: int = 0
    is_most_common: bool = False
    dtypes: frozenset[str] = frozenset({"bf16", "fp16"})
    extension: str = ""
    extension_variable: str = ""
    extension_fix: str = "install the vendor's driver and a build of the package that matches torch"
    group_extension: str = ""
    node_patterns: tuple[str, ...] = ()
    rng_key: str = ""
    out_of_memory_messages: tuple[str, ...] = ("out of memory",)
    compile_backend: str = "inductor"
    pins_memory: bool = False
    starts_ranks: bool = False
    environment: Mapping[str, str] = MappingProxyType({})
    check_environment: Mapping[str, str] = MappingProxyType({})
    peak_flops: Mapping[str, Mapping[str, float]] = MappingProxyType({})
    has_index: bool = True
    is_lazy: bool = False

    def __init__(self, type: str | None = None) -> None:
        self.type = type or self.type
        self.rng_key = self.rng_key or f"torch_{self.type}_manual_seed"

    def __repr__(self) -> str:
        return f"<device {self.type}>"

    # --- availability

    def load_extension(self, extension: str | None = None) -> None:
        """Import the module that registers the device with torch (or the given ``extension``).

        Raises:
            DeviceError: it is missing or broken.
        """
        name = extension or self.extension
        if not name:
            return
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            raise DeviceError(
                f"the module {name!r}, which drives {self.type!r} devices, cannot be imported",
                why=f"{type(error).__name__}: {error}",
                fix=self.extension_fix,
            ) from error

    @property
    def module(self) -> Any:
        """The torch module of the device: ``torch.cuda``.

        Raises:
            DeviceError: torch has none, or the extension that brings it is missing or broken.
        """
        import torch

        if self.extension:
            self.load_extension()
        # Not torch.get_device_module: it accepts only names that torch.device knows, and remembers them.
        module = getattr(torch, self.type, None)
        if module is None:
            raise DeviceError(
                f"torch has no module for {self.type!r} devices",
                why=f"{self.extension or 'this build of torch'} does not register torch.{self.type}",
                fix="install a build of it that matches torch",
            )
        return module

    def is_installed(self, has_package: Callable[[str], bool] = is_package_installed) -> bool:
        """Return True when the software that drives the device is installed and not hidden.

        Args:
            has_package: whether a top-level package is installed.
        """
        if not self.extension or not has_package(self.extension.partition(".")[0]):
            return not self.extension
        return not self.extension_variable or environ.get_flag(self.extension_variable, default=True)

    def is_available(self) -> bool:
        """Return True when this process can use at least one device.

        Raises:
            DeviceError: the machine has such devices and the extension that drives them is broken.
        """
        if not self.is_installed():
            return False
        try:
            with environ.patch_environment(self.check_environment):
                return self.is_usable()
        except DeviceError:
            # A broken extension is an error only where it hides a device that is there.
            if self.count_physical(DeviceProbeHost()):
                raise
            return False

    def is_usable(self) -> bool:
        """Ask the device's torch module; it may be missing or broken (``is_available`` handles that)."""
        return bool(self.module.is_available())

    def count(self) -> int:
        """Return the number of devices that this process sees."""
        return int(self.module.device_count()) if self.is_available() else 0

    def is_initialized(self) -> bool:
        """Return True when this process has initialized the device, so that its forks cannot use it."""
        is_initialized = getattr(getattr(sys.modules.get("torch"), self.type, None), "is_initialized", None)
        return is_initialized is not None and bool(is_initialized())

    def start_ranks(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Call ``function(index, *args)`` for every device, each in a process of its own."""
        raise NotImplementedError(f"processes on {self.type} devices are started by the launcher")

    def runtime_rank(self) -> Mapping[str, object]:
        """Return the variables of torchrun for a process that the runtime has started as one of several.

        There are none for any other process; the runtime is not started for it.

        Raises:
            DeviceError: the runtime drives several devices in this process.
        """
        return {}

    def probe_count(self, machine: DeviceProbeHost | None = None) -> int:
        """Return how many devices a new process would see, without torch; 0 where that is unknown."""
        machine = machine or DeviceProbeHost()
        if not self.is_installed(machine.has_package):
            return 0
        return count_visible(self.count_physical(machine), self.visible_devices(machine))

    def count_physical(self, machine: DeviceProbeHost) -> int:
        """Return how many devices the machine has, hidden ones included."""
        return len(machine.find_device_nodes(*self.node_patterns))

    def visible_devices(self, machine: DeviceProbeHost) -> str | None:
        """Return the value of the variable that hides devices; None when unset."""
        return machine.env.get(self.visible_variable) if self.visible_variable else None

    # --- properties of the device at hand

    def name(self, index: int | None = None) -> str:
        """Return the product name, or the type where the device has no name."""
        get_name = getattr(self.module, "get_device_name", None)
        return str(get_name(self._index_or_current(index))) if get_name else self.type

    def supports(self, dtype: str) -> bool:
        """Return True when the device at hand computes in ``"fp32"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``."""
        if dtype in ("no", "fp32"):
            return True
        if dtype not in self.dtypes:
            return False
        is_bf16_supported = getattr(self.module, "is_bf16_supported", None)
        return bool(is_bf16_supported()) if dtype == "bf16" and is_bf16_supported else True

    @property
    def has_tf32(self) -> bool:
        """True if float32 matrix products can round their inputs to TF32 here."""
        return False

    def allow_tf32(self) -> None:
        """Let float32 matrix products do so, unless the script has chosen their precision."""

    def find_peak_flops(self, dtype: str, index: int | None = None) -> float | None:
        """Return the peak of dense matrix products in ``"bf16"`` or ``"fp16"`` per second; None: unknown."""
        if not self.peak_flops:
            return None
        name = self.name(index)
        for words, peaks in self.peak_flops.items():
            if re.search(rf"\b{re.escape(words)}\b", name):
                return peaks.get(dtype)
        return None

    def group_backend(self) -> str:
        """Return the torch.distributed backend that works here: the preferred one, else the first fallback.

        Raises:
            DeviceError: none of them is available in this build of torch.
        """
        from torch import distributed

        self.load_extension()
        if self.group_extension:
            self.load_extension(self.group_extension)
        backends = (self.backend, *self.fallbacks) if self.backend else self.fallbacks
        for name in backends:
            if distributed.is_available() and distributed.is_backend_available(name):
                return name
        raise DeviceError(
            f"no process group can be made for {self.type!r} devices",
            why=f"this torch has none of the backends it could use: {', '.join(backends) or 'none is known'}",
            fix="install a torch built with one of them, or pass cpu=True",
        )

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return True when an error means that the device's memory is full."""
        import torch

        if isinstance(error, torch.OutOfMemoryError):
            return True
        text = str(error).lower()
        return isinstance(error, RuntimeError) and any(
            part.lower() in text for part in self.out_of_memory_messages
        )

    # --- the current device

    def torch_device(self, index: int | None = None) -> torch.device:
        """Return ``torch.device(type, index)``; the plain type without an index or ``has_index``."""
        import torch

        if index is None or not self.has_index:
            return torch.device(self.type)
        return torch.device(self.type, index)

    def bind(self, index: int) -> torch.device:
        """Make a device the current one of this process.

        Raises:
            DeviceError: there is no device of that index.
        """
        self._check_index(index)
        self.module.set_device(index)
        return self.torch_device(index)

    def _check_index(self, index: int) -> None:
        count = self.count()
        if 0 <= index < count:
            return
        if not count:
            raise DeviceError(
                f"there is no {self.type!r} device for this process",
                why=self._explain_absence(),
                fix="leave out ACCELERATE_TORCH_DEVICE: a device that is there is found without it",
            )
        limited = self.visible_devices(DeviceProbeHost()) is not None
        raise DeviceError(
            f"device {self.type}:{index} does not exist",
            why=f"this process sees {count} {self.type!r} device(s)"
            + (f", limited by {self.visible_variable}" if limited else ""),
            fix="start at most one process per device",
        )

    def _explain_absence(self) -> str:
        """Say why this process sees no device: software, hidden devices, or none on the machine."""
        import torch

        machine = DeviceProbeHost()
        physical, visible = self.count_physical(machine), self.visible_devices(machine)
        if not self.is_installed():
            return f"the package {self.extension!r}, which drives it, is not installed, or is hidden"
        if physical and visible is not None:
            return f"the machine has {physical}, and {self.visible_variable}={visible!r} hides them"
        return f"torch {torch.__version__} finds none" + (f" of the machine's {physical}" if physical else "")

    def current(self) -> int:
        """Return the index of the current device."""
        return int(self.module.current_device())

    def synchronize(self, index: int | None = None) -> None:
        """Wait until all work of the device is done."""
        self.module.synchronize(*self._arguments(index))

    def run_pending(self) -> None:
        """Start the recorded operations of a device that ``is_lazy``, and return; do nothing on others.

        The loader calls it before each batch and the optimizer after each step, so that the operations of
        every step are the same graph, which is compiled once.
        """

    def stream(self, index: int | None = None) -> Any:
        """Return a new stream beside the default one, or None when the device has no streams."""
        make = getattr(self.module, "Stream", None)
        return None if make is None else make(device=self._index_or_current(index))

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which work goes to ``stream`` (None: to the current stream)."""
        return nullcontext() if stream is None else self.module.stream(stream)

    def current_stream(self, index: int | None = None) -> Any:
        """Return the current stream, or None when the device has no streams."""
        current_stream = getattr(self.module, "current_stream", None)
        return None if current_stream is None else current_stream(*self._arguments(index))

    def record_event(self, stream: Any, timed: bool = False) -> Any:
        """Record an event on ``stream`` that completes after all its work so far; None without streams.

        Args:
            stream: a result of ``stream`` or ``current_stream``.
            timed: enables ``first.elapsed_time(second)`` between two such events, in ms.
        """
        if stream is None:
            return None
        event = self.module.Event(enable_timing=timed)
        stream.record_event(event)
        return event

    def wait_event(self, event: Any, stream: Any) -> None:
        """Make later work of ``stream`` wait for ``event``; the host does not wait."""
        if event is not None and stream is not None:
            stream.wait_event(event)

    def _index_or_current(self, index: int | None) -> int:
        return self.current() if index is None else index

    def _arguments(self, index: int | None) -> tuple[int, ...]:
        """Return what names a device in calls of its module; nothing where a process has one device."""
        return (self._index_or_current(index),) if self.has_index else ()

    # --- random numbers

    def get_rng_state(self, index: int | None = None) -> Any:
        """Return the state of the device's default generator: a uint8 tensor on the CPU, or a number."""
        return self.module.get_rng_state(*self._arguments(index))

    def set_rng_state(self, state: Any, index: int | None = None) -> None:
        """Set the state of the device's default generator to a result of ``get_rng_state``."""
        self.module.set_rng_state(state, *self._arguments(index))

    def get_rng_state_all(self) -> Any:
        """Return the RNG states of all visible devices as checkpoints hold them: a list in order of index."""
        return [self.get_rng_state(index) for index in range(self.count())]

    def set_rng_state_all(self, states: Any) -> None:
        """Set a result of ``get_rng_state_all``; with another number of devices, only the common ones."""
        for index, state in zip(range(self.count()), states, strict=False):
            self.set_rng_state(state, index)

    def make_deterministic(self) -> None:
        """Make the vendor's libraries deterministic, beyond ``torch.use_deterministic_algorithms``."""

    def seed(self, seed: int) -> None:
        """Seed the default generators of all visible devices."""
        module = self.module
        (getattr(module, "manual_seed_all", None) or module.manual_seed)(seed)

    # --- memory, in bytes

    def get_memory_info(self, index: int | None = None) -> tuple[int, int]:
        """Return (free, total) bytes of the device.

        Memory of other processes is not free; what this process's allocator keeps for its next tensors is.

        Raises:
            DeviceError: the device does not report it.
        """
        get_info = getattr(self.module, "mem_get_info", None) or self._accelerator("get_memory_info")
        if get_info is None and getattr(self.module, "get_device_properties", None) is not None:
            return self._estimate_memory_info(self._index_or_current(index))
        if get_info is None:
            raise DeviceError(
                f"{self.type!r} devices do not report how much memory they have",
                fix="give the sizes yourself, for example max_memory={0: '10GB'}",
            )
        free, total = get_info(self._index_or_current(index))
        return min(int(free) + self.cached_memory(index), int(total)), int(total)

    def _estimate_memory_info(self, index: int) -> tuple[int, int]:
        """Return (free, total) bytes of a device that tells its size alone: other processes are not seen."""
        total = int(self.module.get_device_properties(index).total_memory)
        return total - (self.memory_allocated(index) or 0), total

    def cached_memory(self, index: int | None = None) -> int:
        """Return the bytes of the free memory that torch's allocator keeps."""
        return max(0, (self._statistic("memory_reserved", index) or 0) - (self.memory_allocated(index) or 0))

    def memory_allocated(self, index: int | None = None) -> int | None:
        """Return the bytes of live tensors of this process, or None when unknown."""
        return self._statistic("memory_allocated", index)

    def max_memory_allocated(self, index: int | None = None) -> int | None:
        """Return the most bytes allocated since the start or ``reset_peak_memory``, or None when unknown."""
        return self._statistic("max_memory_allocated", index)

    def reset_peak_memory(self, index: int | None = None) -> bool:
        """Start a new measurement of ``max_memory_allocated``; return False when the device cannot."""
        reset = getattr(self.module, "reset_peak_memory_stats", None) or self._accelerator(
            "reset_peak_memory_stats"
        )
        if reset is not None:
            reset(self._index_or_current(index))
        return reset is not None

    def allocator_retries(self, index: int | None = None) -> int | None:
        """Return how often the allocator had to release its unused memory to get some, or None: unknown.

        The device is idle meanwhile: the allocator waits for its work.
        """
        statistics = self._statistic("memory_stats", index)
        # torch: torch.cuda.memory_stats, "num_alloc_retries"
        return None if statistics is None else statistics.get("num_alloc_retries")

    def host_memory(self, size: int) -> torch.Tensor:
        """Return ``size`` bytes of host memory (uint8) for copies from the device, pinned if useful."""
        import torch

        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.pins_memory)

    def empty_cache(self) -> None:
        """Release cached, unused memory to the device; do nothing where there is no cache."""
        empty = getattr(self.module, "empty_cache", None)
        if empty is not None:
            empty()

    def empty_host_cache(self) -> None:
        """Release pinned host memory that no tensor uses, which torch keeps; do nothing where it cannot."""

    def _statistic(self, name: str, index: int | None) -> Any:
        own, index = getattr(self.module, name, None), self._index_or_current(index)
        if own is not None:
            return own(index)
        shared = self._accelerator(name)
        try:
            return None if shared is None else shared(index)
        except RuntimeError:  # torch 2.9 to 2.12: an allocator that is no ``DeviceAllocator`` refuses
            return None

    def _accelerator(self, name: str) -> Any:
        """Return a function of ``torch.accelerator``, if that is this device and this torch has it."""
        import torch

        accelerator: Any = torch.accelerator
        is_current = accelerator.is_available() and accelerator.current_accelerator().type == self.type
        return getattr(accelerator, name, None) if is_current else None
