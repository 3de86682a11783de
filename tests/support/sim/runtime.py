"""The device module ``torch.sim``: what torch and its users expect of ``torch.<device type>``.

``load()`` registers this very module under that name, so everything public here is ``torch.sim.<name>``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from types import SimpleNamespace

import torch

from tests.support.sim.build import extension

_C = extension()

TYPE = "sim"  # what torch calls it; ``load`` sets it
Device = torch.device | str | int | None


def _index(device: Device) -> int:
    """The index meant by ``device``; the current one where it names none."""
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != TYPE:
            raise ValueError(f"expected a {TYPE} device, got {device}")
        device = device.index
    return _C.current_device() if device is None or device < 0 else device


# ------------------------------------------------------------------------------------------- the device


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    return _C.device_count()


def current_device() -> int:
    return _C.current_device()


def set_device(device: Device) -> None:
    _C.set_device(_index(device))


class device:  # noqa: N801 - torch's devices all spell it like this
    """``with torch.sim.device(1):`` makes another device the current one."""

    def __init__(self, device: Device) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *raised: object) -> None:
        set_device(self.before)


def synchronize(device: Device = None) -> None:
    """Nothing to wait for: work is done when the call returns."""
    _index(device)


def init() -> None:
    _C.initialize()


_lazy_init = init


def is_initialized() -> bool:
    """Whether this process has used a device; from then on its forks cannot."""
    return _C.initialized() and not _C.in_bad_fork()


def __getattr__(name: str) -> bool:
    # Activation checkpointing asks for this one before it keeps the state of the device's generator.
    if name == "_initialized":
        return is_initialized()
    raise AttributeError(f"module 'torch.sim' has no attribute {name!r}")


def _is_in_bad_fork() -> bool:
    return _C.in_bad_fork()


def get_device_name(device: Device = None) -> str:
    return f"Simulated accelerator {_index(device)}"


def get_device_properties(device: Device = None) -> SimpleNamespace:
    index = _index(device)
    return SimpleNamespace(name=get_device_name(index), total_memory=_C.memory(index)["capacity"])


def get_device_capability(device: Device = None) -> tuple[int, int]:
    _index(device)
    return (1, 0)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


# ----------------------------------------------------------------------------------- streams and events


# torch's own classes make streams and events of the current accelerator. Nothing runs later than it is asked
# for, so a stream orders nothing; the time between two events is the wall clock's.
Stream, Event = torch.Stream, torch.Event


def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Device = None) -> torch.Stream:
    now = current_stream(device)
    return torch.Stream(stream_id=0, device_index=now.device_index, device_type=now.device_type)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Generator[torch.Stream | None]:
    """Makes ``stream`` and its device current for the length of a ``with`` block; None changes nothing."""
    if stream is None:
        yield None
        return
    device, before = current_device(), current_stream(stream.device)
    set_stream(stream)
    try:
        yield stream
    finally:
        set_stream(before)
        set_device(device)


# --------------------------------------------------------------------------------------- random numbers


def _generator(device: Device) -> torch.Generator:
    return _C.default_generator(_index(device))


def manual_seed(seed: int) -> None:
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def seed() -> int:
    return _generator(None).seed()


def initial_seed() -> int:
    return _generator(None).initial_seed()


def get_rng_state(device: Device = None) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# ----------------------------------------------------------------------------------------------- memory


def empty_cache() -> None:
    _C.empty_cache()


def memory_allocated(device: Device = None) -> int:
    return _C.memory(_index(device))["allocated"]["current"]


def max_memory_allocated(device: Device = None) -> int:
    return _C.memory(_index(device))["allocated"]["peak"]


def memory_reserved(device: Device = None) -> int:
    return _C.memory(_index(device))["reserved"]["current"]


def max_memory_reserved(device: Device = None) -> int:
    return _C.memory(_index(device))["reserved"]["peak"]


def reset_peak_memory_stats(device: Device = None) -> None:
    _C.reset_peak(_index(device))


def reset_accumulated_memory_stats(device: Device = None) -> None:
    _C.reset_accumulated(_index(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """(free, total) bytes; what the cache holds is not free."""
    memory = _C.memory(_index(device))
    return memory["capacity"] - memory["reserved"]["current"], memory["capacity"]


_whole: dict[int, int] = {}


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Limit this process to a share of the memory that the device had at the first call."""
    index = _index(device)
    whole = _whole.setdefault(index, _C.memory(index)["capacity"])
    _C.set_capacity(index, int(fraction * whole))
