"""A device type: its facts, and the calls that differ from one device to the next.

``Device`` itself works for every type that ``torch.get_device_module`` knows. A file of this folder
declares the facts of one type and overrides only what its torch module does differently. No module of
this folder imports torch when it is imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from accelerate.core.errors import DeviceError
from accelerate.device.machine import Machine, count_visible

if TYPE_CHECKING:
    import torch


class Device:
    """One type of device.

    Attributes:
        type: torch's device type, ``"cuda"``.
        backend: the torch.distributed backend it prefers; "" when none is known.
        fallbacks: backends that also work, in order, where the preferred one is missing.
        visible_variable: the variable that hides devices from a process, or None.
        distributed_type: the value of ``DistributedType`` for several of them.
        priority: order of detection, the highest first; 0 is never detected.
        dtypes: the mixed precisions it may do; ``supports`` asks the device at hand.
        extension: the module that registers it with torch; "" when torch knows it by itself.
        group_extension: the module that registers its backend with torch.distributed, if another.
        files: glob patterns of its device nodes, relative to the root of the machine.
        rng_key: its key in a saved ``random_states_*.pkl``.
        out_of_memory: fragments of the messages of its out-of-memory errors.
        pins: its copies to pinned host memory go on while the program does.
        starts_ranks: its runtime starts the processes of a function itself (``start_ranks``).
        environment: variables of the processes that compute on it; one that is set already is left alone.
            Launchers set them before torch is loaded, and a process that none has started sets them itself.

    ``index`` is the number of a device among the visible ones everywhere; None means the current one.
    """

    type: str = ""
    backend: str = ""
    fallbacks: tuple[str, ...] = ()
    visible_variable: str | None = None
    distributed_type: str = "MULTI_GPU"
    priority: int = 0
    dtypes: frozenset[str] = frozenset({"bf16", "fp16"})
    extension: str = ""
    group_extension: str = ""
    files: tuple[str, ...] = ()
    rng_key: str = ""
    out_of_memory: tuple[str, ...] = ("out of memory",)
    pins: bool = False
    starts_ranks: bool = False
    environment: Mapping[str, str] = MappingProxyType({})

    def __init__(self, type: str | None = None) -> None:
        self.type = type or self.type
        self.rng_key = self.rng_key or f"torch_{self.type}_manual_seed"

    def __repr__(self) -> str:
        return f"<device {self.type}>"

    # --- is it here

    def load(self, extension: str | None = None) -> None:
        """Imports what registers the device with torch (or the ``extension`` given).

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
                fix="install the vendor's driver and a build of the package that matches torch",
            ) from error

    @property
    def module(self) -> Any:
        """The torch module of the device: ``torch.cuda``.

        Raises:
            DeviceError: torch has none, or the extension that brings it is missing or broken.
        """
        import torch

        self.load()
        # Not torch.get_device_module: it accepts only names that torch.device knows, and remembers them.
        module = getattr(torch, self.type, None)
        if module is None:
            raise DeviceError(
                f"torch has no module for {self.type!r} devices",
                why=f"{self.extension or 'this build of torch'} does not register torch.{self.type}",
                fix="install a build of it that matches torch",
            )
        return module

    def installed(self, machine: Machine) -> bool:
        """Whether the software that drives the device is there; it is not imported."""
        return not self.extension or machine.has(self.extension.partition(".")[0])

    def available(self) -> bool:
        """Whether at least one device can be used by this process.

        Raises:
            DeviceError: the machine has such devices and the extension that drives them is broken.
        """
        machine = Machine()
        if not self.installed(machine):
            return False
        try:
            return self.ready()
        except DeviceError:
            # A broken extension is an error only where it hides a device that is there.
            if self.present(machine):
                raise
            return False

    def ready(self) -> bool:
        """What the device's own module says; it may be missing or broken (``available`` decides then)."""
        return bool(self.module.is_available())

    def count(self) -> int:
        """How many devices this process sees."""
        return int(self.module.device_count()) if self.available() else 0

    def used(self) -> bool:
        """Whether this process has used the device; its forks cannot, then. Asking starts nothing."""
        ask = getattr(getattr(sys.modules.get("torch"), self.type, None), "is_initialized", None)
        return ask is not None and bool(ask())

    def start_ranks(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Calls ``function(index, *args)`` on every device, each in a process of its own."""
        raise NotImplementedError(f"processes on {self.type} devices are started by the launcher")

    def probe(self, machine: Machine | None = None) -> int:
        """How many devices a new process would see, found without torch; 0 where that cannot be told."""
        machine = machine or Machine()
        if not self.installed(machine):
            return 0
        return count_visible(self.present(machine), self.visible(machine))

    def present(self, machine: Machine) -> int:
        """How many devices the machine has, hidden ones too."""
        return len(machine.nodes(*self.files))

    def visible(self, machine: Machine) -> str | None:
        """The value of the variable that hides devices; None when unset."""
        return machine.env.get(self.visible_variable) if self.visible_variable else None

    # --- facts of the device at hand

    def name(self, index: int | None = None) -> str:
        """The product name, or the type where the device does not tell."""
        ask = getattr(self.module, "get_device_name", None)
        return str(ask(self._index(index))) if ask else self.type

    def supports(self, dtype: str) -> bool:
        """Whether the device at hand computes in ``"fp32"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``."""
        if dtype in ("no", "fp32"):
            return True
        if dtype not in self.dtypes:
            return False
        ask = getattr(self.module, "is_bf16_supported", None)
        return bool(ask()) if dtype == "bf16" and ask else True

    def group_backend(self) -> str:
        """The torch.distributed backend that works here: the preferred one, else the first fallback.

        Raises:
            DeviceError: none of them is available in this build of torch.
        """
        from torch import distributed

        self.load()
        if self.group_extension:
            self.load(self.group_extension)
        wanted = (self.backend, *self.fallbacks) if self.backend else self.fallbacks
        for name in wanted:
            if distributed.is_available() and distributed.is_backend_available(name):
                return name
        raise DeviceError(
            f"no process group can be made for {self.type!r} devices",
            why=f"this torch has none of the backends it could use: {', '.join(wanted) or 'none is known'}",
            fix="install a torch built with one of them, or pass cpu=True",
        )

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error means that the device's memory is full."""
        import torch

        if isinstance(error, torch.OutOfMemoryError):
            return True
        text = str(error).lower()
        return isinstance(error, RuntimeError) and any(part.lower() in text for part in self.out_of_memory)

    # --- the current device

    def torch_device(self, index: int | None = None) -> torch.device:
        """``torch.device(type, index)``; without an index, the plain type."""
        import torch

        return torch.device(self.type) if index is None else torch.device(self.type, index)

    def bind(self, index: int) -> torch.device:
        """Makes a device the current one of this process.

        Raises:
            DeviceError: there is no device of that index.
        """
        self._require(index)
        self.module.set_device(index)
        return self.torch_device(index)

    def _require(self, index: int) -> None:
        count = self.count()
        if 0 <= index < count:
            return
        limited = self.visible(Machine()) is not None
        raise DeviceError(
            f"device {self.type}:{index} does not exist",
            why=f"this process sees {count} {self.type!r} device(s)"
            + (f", limited by {self.visible_variable}" if limited else ""),
            fix="start at most one process per device",
        )

    def current(self) -> int:
        """The index of the current device."""
        return int(self.module.current_device())

    def synchronize(self, index: int | None = None) -> None:
        """Waits until all work given to the device is done."""
        self.module.synchronize(self._index(index))

    def stream(self, index: int | None = None) -> Any:
        """A new stream beside the default one, or None when the device has no streams."""
        make = getattr(self.module, "Stream", None)
        return None if make is None else make(device=self._index(index))

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which work goes to ``stream`` (None: where it goes anyway)."""
        return nullcontext() if stream is None else self.module.stream(stream)

    def current_stream(self, index: int | None = None) -> Any:
        """The stream that work goes to now, or None when the device has no streams."""
        ask = getattr(self.module, "current_stream", None)
        return None if ask is None else ask(self._index(index))

    def mark(self, stream: Any, timed: bool = False) -> Any:
        """An event that is over when all work given to ``stream`` until now is done; None without streams.

        Args:
            stream: of ``stream`` or ``current_stream``.
            timed: the time between two such events can be asked for: ``first.elapsed_time(second)``, in ms.
        """
        if stream is None:
            return None
        event = self.module.Event(enable_timing=timed)
        stream.record_event(event)
        return event

    def wait(self, event: Any, stream: Any) -> None:
        """Work that is given to ``stream`` from now on begins when ``event`` is over. The program goes on."""
        if event is not None and stream is not None:
            stream.wait_event(event)

    def _index(self, index: int | None) -> int:
        return self.current() if index is None else index

    # --- random numbers

    def rng(self, index: int | None = None) -> Any:
        """The state of the device's default generator: a uint8 tensor on the CPU, or a number."""
        return self.module.get_rng_state(self._index(index))

    def set_rng(self, state: Any, index: int | None = None) -> None:
        """Sets the state of the device's default generator to what ``rng`` gave."""
        self.module.set_rng_state(state, self._index(index))

    def rng_all(self) -> Any:
        """The states of all visible devices, as a checkpoint holds them: a list in order of index."""
        return [self.rng(index) for index in range(self.count())]

    def set_rng_all(self, states: Any) -> None:
        """Sets what ``rng_all`` gave; with fewer or more devices than then, those that both have."""
        for index, state in zip(range(self.count()), states, strict=False):
            self.set_rng(state, index)

    def deterministic(self) -> None:
        """Makes the vendor's libraries deterministic, beyond ``torch.use_deterministic_algorithms``."""

    def seed(self, seed: int) -> None:
        """Seeds the default generators of all visible devices."""
        module = self.module
        (getattr(module, "manual_seed_all", None) or module.manual_seed)(seed)

    # --- memory, in bytes

    def memory(self, index: int | None = None) -> tuple[int, int]:
        """(free, total) bytes of the device, other processes counted in.

        Raises:
            DeviceError: the device does not tell.
        """
        ask = getattr(self.module, "mem_get_info", None) or self._accelerator("get_memory_info")
        if ask is None:
            raise DeviceError(
                f"{self.type!r} devices do not tell how much memory they have",
                fix="give the sizes yourself, for example max_memory={0: '10GB'}",
            )
        free, total = ask(self._index(index))
        return int(free), int(total)

    def allocated(self, index: int | None = None) -> int | None:
        """Bytes that live tensors of this process take, or None when unknown."""
        return self._statistic("memory_allocated", index)

    def peak(self, index: int | None = None) -> int | None:
        """The most bytes allocated since the start or the last ``reset_peak``, or None when unknown."""
        return self._statistic("max_memory_allocated", index)

    def reset_peak(self, index: int | None = None) -> bool:
        """Starts a new measurement of ``peak``; False when the device cannot."""
        reset = self._function("reset_peak_memory_stats")
        if reset is not None:
            reset(self._index(index))
        return reset is not None

    def host_memory(self, size: int) -> torch.Tensor:
        """``size`` bytes of host memory (uint8) to copy to from the device; pinned where that helps."""
        import torch

        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pins)

    def empty_cache(self) -> None:
        """Gives cached, unused memory back to the device; nothing where there is no cache."""
        empty = getattr(self.module, "empty_cache", None)
        if empty is not None:
            empty()

    def _statistic(self, name: str, index: int | None) -> int | None:
        ask = self._function(name)
        return None if ask is None else int(ask(self._index(index)))

    def _function(self, name: str) -> Any:
        return getattr(self.module, name, None) or self._accelerator(name)

    def _accelerator(self, name: str) -> Any:
        """A function of ``torch.accelerator``, if that is this device and this torch has it."""
        import torch

        accelerator = getattr(torch, "accelerator", None)
        if accelerator is None or not accelerator.is_available():
            return None
        mine = accelerator.current_accelerator().type == self.type
        return getattr(accelerator, name, None) if mine else None
