"""A simulated accelerator: the torch device type ``sim``, for tests of what needs one where there is none.

    from tests.support import sim

    sim.load()                                   # builds once per environment (about 25 s), else a moment
    model.to("sim:1")                            # two devices, of 1 GiB each
    with sim.capacity(10 * 2**20):               # ... or of less
        torch.empty(11 * 2**20, device="sim")    # torch.OutOfMemoryError

To torch it is one accelerator among others, reached through the same doors: ``torch.accelerator``,
``torch.get_device_module("sim")`` (``torch.sim``), ``torch.autocast``, ``torch.amp.GradScaler``,
``torch.Stream``, ``torch.Event``, ``torch.Generator``, ``torch.load(map_location=...)``, pinned memory,
and ``torch.distributed`` with the back end ``simccl``. What is real about it:

- Tensors live on a device, and operators refuse to mix devices. Fresh memory holds NaN, not zeros.
- Memory is limited and accounted for exactly, per device and process: allocated, reserved (freed memory
  stays reserved until ``empty_cache``), peak, and a real ``torch.OutOfMemoryError``. Only tensors count;
  what a kernel needs while it runs does not.
- Each device has a generator of its own; random operators draw from it. The same seed gives the numbers
  that the CPU gives, so a run on ``sim`` can be compared with one on the CPU, dropout and all.
- A fork of a process that has used a device cannot use one.
- Collectives are asynchronous and go through gloo, without copies.

What is not: time. Every operator is a CPU kernel and done when the call returns, so neither overlap nor a
missing synchronization can show. ``set_count`` may raise the number of devices only before the first
backward pass of the process. Recurrent layers (``nn.LSTM``, ``nn.GRU``), sparse and quantized tensors
are not there.

**Using it in tests.** Loading it changes the process for good: torch has an accelerator from then on. Tests
that need it therefore lie in ``tests/sim``, and are plain tests: ``tests/sim/conftest.py`` runs them in a
process of its own where it is loaded from the start, and so it is in every process they start (ranks,
scripts, loader workers). Any other process gets it by its environment:

    environment = environ.make_child_environment(sim.environment())
    subprocess.run(["accelerate", "launch", "script.py"], env=environment)

To run and debug the tests without that process in between:

    eval "$(python -m tests.support.sim)" && pytest --pdb tests/sim
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.core import environ
from tests.support.sim.build import compiler, extension

__all__ = [
    "Traffic",
    "autoloaded",
    "capacity",
    "environment",
    "load",
    "loaded",
    "missing",
    "pinned",
    "set_count",
    "traffic",
]

ROOT = Path(__file__).resolve().parents[3]
AUTOLOAD = Path(__file__).resolve().parent / "autoload"


def loaded() -> bool:
    """Whether this process has the device."""
    return "tests.support.sim.runtime" in sys.modules


def autoloaded() -> bool:
    """Whether this process runs with ``environment()``: torch brings the device whenever it is imported."""
    return str(AUTOLOAD) in sys.path


def missing() -> str | None:
    """Why the device cannot be had here; None where it can."""
    if sys.platform != "linux":
        return "the simulated accelerator is built on Linux only"
    return None if compiler() else "the simulated accelerator needs a C++ compiler"


def load(type: str = "sim", backend: str = "simccl") -> None:
    """Gives this process the device, building it first where that has not been done; again is no matter.

    Args:
        type: what torch calls it. Vendors without a type of their own in torch rename the same one
            (``rename_privateuse1_backend``), so the device can stand in for theirs.
        backend: the torch.distributed backend of its collectives.
    """
    import torch  # which may call this very function, see environment()

    if loaded():
        return
    from torch.utils import backend_registration

    from tests.support.sim import runtime

    runtime.TYPE = type
    backend_registration.rename_privateuse1_backend(type)
    torch._register_device_module(type, runtime)
    backend_registration.generate_methods_for_privateuse1_backend()  # tensor.sim(), module.sim()
    _register_collectives(type, backend)


def environment() -> dict[str, str]:
    """Variables with which a new process has the device as soon as it imports torch."""
    paths = [str(ROOT), str(AUTOLOAD)]
    kept = [p for p in (environ.get("PYTHONPATH") or "").split(os.pathsep) if p and p not in paths]
    return {"PYTHONPATH": os.pathsep.join([*paths, *kept])}


@contextmanager
def capacity(size: int, device: int | None = None) -> Generator[None]:
    """Limits the memory of one device, or of each, to ``size`` bytes for the length of a ``with`` block."""
    sim = extension()
    which = range(sim.device_count()) if device is None else [device]
    before = {index: sim.memory(index)["capacity"] for index in which}
    try:
        for index in which:
            sim.set_capacity(index, size)
        yield
    finally:
        for index, bytes_ in before.items():
            sim.set_capacity(index, bytes_)


def set_count(count: int) -> None:
    """How many devices there are; see the top of this file for when."""
    extension().set_device_count(count)


def pinned() -> int:
    """Bytes of pinned host memory in use."""
    return extension().pinned_bytes()


@dataclass
class Traffic:
    """Copies and bytes that went to the devices, from them to the host, and from one to another."""

    to_device: int = 0
    to_device_bytes: int = 0
    to_host: int = 0
    to_host_bytes: int = 0
    between: int = 0
    between_bytes: int = 0


@contextmanager
def traffic() -> Generator[Traffic]:
    """Counts the copies made inside a ``with`` block; the numbers are there when it ends."""
    before = extension().traffic()
    seen = Traffic()
    yield seen
    for name, number in extension().traffic().items():
        setattr(seen, name, number - before[name])


def _register_collectives(type: str, backend: str) -> None:
    import torch.distributed as dist

    if not dist.is_available():
        return

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return extension().make_simccl(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend(backend, create, devices=[type])
