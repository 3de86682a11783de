"""Random numbers: named streams, the state of all generators, and seeding.

``derive`` gives the seed of every stream from the seed of a run, the stream's name and its counters, never
from how often a generator was used. So the numbers do not depend on what ran before.

    order   (epoch, ...)                the order of samples: the same on all ranks
    data    (rank, worker, epoch, ...)  augmentation: differs on every rank, worker and epoch
    model   (coordinate, ...)           dropout and initialisation, per rank or mesh coordinate
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from accelerate import device as devices
from accelerate.core import environ
from accelerate.core.errors import SettingError, UnknownNameError, WorldError
from accelerate.world import clusters
from accelerate.world.world import current, get_rank_info

if TYPE_CHECKING:
    import torch

    from accelerate.device.base import Device

STREAMS = ("order", "data", "model")


def derive(seed: int, stream: str, *counters: int) -> int:
    """Derive a seed in [0, 2^63) for one point of a named stream.

    The first 63 bits of the BLAKE2b hash (RFC 7693) of ``seed/stream/counter/counter...`` in decimal:
    the same on every machine and version, and unrelated for any two different arguments.

    Raises:
        UnknownNameError: no stream has that name.
    """
    if stream not in STREAMS:
        raise UnknownNameError("random stream", stream, STREAMS)
    text = "/".join([str(int(seed)), stream, *(str(int(counter)) for counter in counters)])
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"accelerate").digest()
    return int.from_bytes(digest, "big") >> 1


def seed_host(seed: int) -> None:
    """Seed Python, numpy and torch's CPU generator of this process; also called in loader workers.

    numpy takes 32 bits, so it gets the seed modulo 2^32.
    """
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, numpy, torch and the devices.

    Args:
        seed: the seed.
        device_specific: adds the rank of this process, so that ranks draw different numbers.
        deterministic: also asks torch for deterministic kernels; an operation without one then raises.

    Raises:
        WorldError: ``device_specific``, and the environment does not tell the rank.
    """
    import torch

    seed = int(seed) if isinstance(seed, bool) else seed  # torch takes no bool
    if device_specific:
        seed += get_rank_info()[0]
    device = _all_devices()[-1]
    if deterministic:
        device.make_deterministic()
        torch.use_deterministic_algorithms(True)
    seed_host(seed)
    # Also reaches accelerators in use that are not this process's main device.
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    device.seed(seed)


# Generators beside those of torch's devices, by their key: how their state is read and set.
_LIBRARY_STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}


def register_library_states(key: str, get: Callable[[], Any], set_state: Callable[[Any], None]) -> None:
    """Make the random states that a library keeps a part of every ``capture``, under ``key``."""
    _LIBRARY_STATES[key] = get, set_state


def capture() -> dict[str, Any]:
    """Return the states of all generators of this process, under the keys of ``random_states_{rank}.pkl``.

    ``random_state`` (Python), ``numpy_random_seed``, ``torch_manual_seed`` (CPU), and, with an
    accelerator, ``torch_<type>_manual_seed``: a list with the state of every visible device.
    """
    import numpy as np

    state: dict[str, Any] = {"random_state": random.getstate(), "numpy_random_seed": np.random.get_state()}
    for device in _all_devices():
        state[device.rng_key] = device.get_rng_state_all()
    return state | {key: get() for key, (get, _) in _LIBRARY_STATES.items()}


def restore(state: Mapping[str, Any]) -> list[str]:
    """Restore every generator from a ``capture``; ignore other keys of ``state``.

    Returns:
        The names of generators of this process that ``state`` has nothing for; they are unchanged.
    """
    import numpy as np

    missing: list[str] = []
    setters: dict[str, Any] = {"random_state": random.setstate, "numpy_random_seed": np.random.set_state}
    setters.update({device.rng_key: device.set_rng_state_all for device in _all_devices()})
    setters.update({key: setter for key, (_, setter) in _LIBRARY_STATES.items()})
    for key, setter in setters.items():
        if key in state:
            setter(state[key])
        else:
            missing.append(key)
    return missing


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Broadcast a generator state from rank 0 to all ranks.

    Args:
        rng_type: ``"torch"`` (the CPU's), ``"generator"`` (the one given), or a device type, as text or
            ``RNGType``; None does nothing, and so does a device that this process has none of.
        generator: the generator for ``"generator"``.

    Raises:
        SettingError: ``"generator"`` without one.
        UnknownNameError: no generator has that name.
        WorldError: several processes were started and their group is not open yet.
    """
    if rng_type is None:
        return
    name = str(getattr(rng_type, "value", rng_type))
    if current() is None and clusters.detect(environ.snapshot()) is not None:
        raise WorldError(
            "random states cannot be synchronized before the processes know each other",
            fix="create the Accelerator (or PartialState) first",
        )
    from accelerate.world.collective import broadcast_object

    if name == "generator":
        if generator is None:
            raise SettingError(
                "rng_type 'generator' needs a generator", fix="pass generator=torch.Generator()"
            )
        generator.set_state(broadcast_object(generator.get_state()))
    elif name == "torch":
        cpu = devices.get("cpu")
        cpu.set_rng_state(broadcast_object(cpu.get_rng_state()))
    elif name == _all_devices()[-1].type:
        device = devices.get(name)
        device.set_rng_state(broadcast_object(device.get_rng_state()))
    elif name not in devices.DEVICES:
        raise UnknownNameError("random generator", name, ("torch", "generator", *devices.DEVICES.names()))


def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    """Call ``synchronize_rng_state`` for each of ``rng_types``."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator=generator)


def _all_devices() -> list[Device]:
    """Return the CPU, and last the device type of this process, also before the world is open."""
    world = current()
    device = devices.detect() if world is None else world.hardware
    return [device] if device.type == "cpu" else [devices.get("cpu"), device]
