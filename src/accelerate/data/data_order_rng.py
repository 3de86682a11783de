"""States of the random generators behind an order: capture, restore and isolation.

A sampler or a stream that draws while the program draws too (dropout, augmentation) cannot be reproduced: its
numbers depend on what ran in between. So its first draws use the global generators, as in torch's loader, and
all later ones use isolated generators that are seeded from the first state.
"""

from __future__ import annotations

import base64
import hashlib
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from accelerate.world import collective
from accelerate.world.rng import derive

T = TypeVar("T")

# The two functions that exchange its generator are public, and missing in its stubs.
_numpy: Any = np.random


@dataclass(frozen=True)
class RNGSnapshot:
    """The states of torch's CPU generator, Python's and numpy's at one moment."""

    torch: torch.Tensor
    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> RNGSnapshot:
        """Capture the current states."""
        return cls(torch.default_generator.get_state(), random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Restore the states."""
        torch.default_generator.set_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def digest(self) -> int:
        """Return 63 bits that depend on all three states."""
        text = hashlib.blake2b(self.torch.numpy().tobytes(), digest_size=8)
        text.update(array("Q", self.python[1]).tobytes())
        text.update(self.numpy[1].tobytes() + repr(self.numpy[2:]).encode())
        return int.from_bytes(text.digest(), "big") >> 1

    def is_same(self, other: RNGSnapshot) -> bool:
        """Return True if both would draw the same numbers."""
        return self.digest() == other.digest()

    def state_dict(self) -> dict[str, Any]:
        """Return the states as JSON types."""
        return {
            "torch": to_plain(self.torch),
            "python": to_plain([self.python[0], np.array(self.python[1], np.uint64), self.python[2]]),
            "numpy": to_plain(list(self.numpy)),
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> RNGSnapshot:
        """Restore the object from ``state_dict``."""
        version, state_words, gauss = from_plain(state["python"])
        return cls(
            from_plain(state["torch"]),
            (version, tuple(state_words.tolist()), gauss),
            tuple(from_plain(state["numpy"])),
        )


def torch_digest() -> int:
    """Return 63 bits that depend on the state of torch's CPU generator; draw nothing."""
    state = torch.default_generator.get_state().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "big") >> 1


class IsolatedRNG:
    """Runs calls under isolated random generators, whose states persist between calls.

    numpy's generator is swapped as a whole, since reading and writing its state takes thirty times as long.
    That loses the cached second number of ``np.random.randn``, in every run alike.

    Args:
        snapshot: the states that seed the isolated generators.
    """

    def __init__(self, snapshot: RNGSnapshot) -> None:
        seed = derive(snapshot.digest(), "order")
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._python = random.Random(seed).getstate()
        self._numpy: Any = np.random.MT19937(seed)

    def __call__(self, call: Callable[[], T]) -> T:
        cpu = torch.default_generator
        outside = cpu.get_state(), random.getstate(), _numpy.get_bit_generator()
        cpu.set_state(self._torch)
        random.setstate(self._python)
        _numpy.set_bit_generator(self._numpy)
        try:
            return call()
        finally:
            self._torch, self._python = cpu.get_state(), random.getstate()
            cpu.set_state(outside[0])
            random.setstate(outside[1])
            _numpy.set_bit_generator(outside[2])


def begin_order(
    call: Callable[[], T], start: RNGSnapshot | None, broadcast: Callable[[Any], Any] | None
) -> tuple[T, RNGSnapshot, IsolatedRNG]:
    """Make the first draws of an order; return ``call()``, its initial states, and the runner of later draws.

    Args:
        call: makes the draws.
        start: the states to begin with; the global generators then stay as they are. None: begin with the
            global generators, which advance.
        broadcast: makes all ranks begin with the same states, those of rank 0 for example. The generators of
            a rank that has these states advance, those of other ranks stay as they are.
    """
    local_states = RNGSnapshot.capture()
    first = start or local_states
    if broadcast and collective.world_size() > 1:
        first = broadcast(first)
    uses_other_state = start is not None or not first.is_same(local_states)
    if uses_other_state:
        first.restore()
    try:
        value = call()
        isolated_rng = IsolatedRNG(RNGSnapshot.capture())
    finally:
        if uses_other_state:
            local_states.restore()
    return value, first, isolated_rng


def find_generators(*holders: Any) -> list[Any]:
    """Find the generators that are attributes of ``holders``: torch's, Python's and numpy's, each once."""
    generators: list[Any] = []
    for holder in holders:
        for value in list(getattr(holder, "__dict__", {}).values()):
            kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
            if isinstance(value, kinds) and not any(value is other for other in generators):
                generators.append(value)
    return generators


def capture_generators(generators: Iterable[Any]) -> list[Any]:
    """Capture the state of each generator, as JSON types."""
    return [to_plain(_state(generator)) for generator in generators]


def restore_generators(generators: Sequence[Any], states: Sequence[Any]) -> None:
    """Restore the states of ``capture_generators``.

    Raises:
        ValueError: the number of generators differs from the saved one.
    """
    if len(generators) != len(states):
        raise ValueError(
            f"the loader and its samplers hold {len(generators)} random generators, but {len(states)} were "
            "saved"
        )
    for generator, state in zip(generators, states, strict=True):
        _set_state(generator, from_plain(state))


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, state_words, gauss = generator.getstate()
        return [version, np.array(state_words, np.uint64), gauss]
    if isinstance(generator, np.random.RandomState):
        return list(generator.get_state())
    return generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate((state[0], tuple(state[1].tolist()), state[2]))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(tuple(state))
    else:
        generator.bit_generator.state = state


def to_plain(value: Any) -> Any:
    """Convert ``value`` to JSON types: arrays become base64, and long integers text."""
    if isinstance(value, torch.Tensor):
        return {"dtype": "torch", "base64": _encode_base64(value.numpy())}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "base64": _encode_base64(value)}
    if isinstance(value, dict):
        return {"dict": {key: to_plain(item) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return {"int": str(value)} if isinstance(value, int) and abs(value) >= 2**53 else value


def from_plain(value: Any) -> Any:
    """Restore the value of ``to_plain``; tuples have become lists."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "int" in value:
        return int(value["int"])
    if "dict" in value:
        return {key: from_plain(item) for key, item in value["dict"].items()}
    data = base64.b64decode(value["base64"])
    if value["dtype"] == "torch":
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return np.frombuffer(data, dtype=value["dtype"]).copy()


def _encode_base64(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()
