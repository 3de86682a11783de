"""The random numbers an order is made of: found, kept, put back, and kept apart from the program's own.

A sampler or a stream that draws while the program draws too (dropout, augmentation) cannot be repeated: what
it gets depends on what ran in between. So its first draws come from the program's generators, as in torch's
loader, and all later ones from generators of its own, that are a function of the first.
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
class Hosts:
    """The states of torch's CPU generator, Python's and numpy's at one moment."""

    torch: torch.Tensor
    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> Hosts:
        """As they are now."""
        return cls(torch.default_generator.get_state(), random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Puts them back."""
        torch.default_generator.set_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def digest(self) -> int:
        """63 bits that depend on all three."""
        text = hashlib.blake2b(self.torch.numpy().tobytes(), digest_size=8)
        text.update(array("Q", self.python[1]).tobytes())
        text.update(self.numpy[1].tobytes() + repr(self.numpy[2:]).encode())
        return int.from_bytes(text.digest(), "big") >> 1

    def same(self, other: Hosts) -> bool:
        """Whether both would draw the same numbers."""
        return self.digest() == other.digest()

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "torch": pack(self.torch),
            "python": pack([self.python[0], np.array(self.python[1], np.uint64), self.python[2]]),
            "numpy": pack(list(self.numpy)),
        }

    @classmethod
    def of(cls, state: dict[str, Any]) -> Hosts:
        """From ``state_dict``."""
        version, words, gauss = unpack(state["python"])
        return cls(
            unpack(state["torch"]), (version, tuple(words.tolist()), gauss), tuple(unpack(state["numpy"]))
        )


def torch_digest() -> int:
    """63 bits that depend on the state of torch's CPU generator; draws nothing."""
    state = torch.default_generator.get_state().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "big") >> 1


class Apart:
    """Runs calls under random numbers of their own, which go on from call to call.

    numpy's generator is exchanged as a whole, since to read and write its state takes thirty times as long.
    That forgets the second of a pair of ``np.random.randn`` numbers, in every run alike.

    Args:
        hosts: they are a function of these.
    """

    def __init__(self, hosts: Hosts) -> None:
        seed = derive(hosts.digest(), "order")
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


def begin(
    call: Callable[[], T], start: Hosts | None, agree: Callable[[Any], Any] | None
) -> tuple[T, Hosts, Apart]:
    """Makes the first draws of an order: ``call()``, the state it began in, and what runs the later ones.

    Args:
        call: draws.
        start: begin as then, and leave the program's generators as they are now; None: begin with the
            program's own, which move on.
        agree: all ranks are here and begin with a state that this gives, rank 0's say. The generators of a
            rank that was in the same state move on as that one's do, those of another rank stay as they are.
    """
    mine = Hosts.capture()
    first = start or mine
    if agree and collective.size() > 1:
        first = agree(first)
    foreign = start is not None or not first.same(mine)
    if foreign:
        first.restore()
    try:
        value = call()
        apart = Apart(Hosts.capture())
    finally:
        if foreign:
            mine.restore()
    return value, first, apart


def owned(*holders: Any) -> list[Any]:
    """Generators that are attributes of ``holders``: torch's, Python's and numpy's, each once."""
    found: list[Any] = []
    for holder in holders:
        for value in list(getattr(holder, "__dict__", {}).values()):
            kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
            if isinstance(value, kinds) and not any(value is other for other in found):
                found.append(value)
    return found


def states_of(generators: Iterable[Any]) -> list[Any]:
    """The state of each, as plain values."""
    return [pack(_state(generator)) for generator in generators]


def put_back(generators: Sequence[Any], states: Sequence[Any]) -> None:
    """Gives each the state that ``states_of`` found.

    Raises:
        ValueError: these are not the generators that were saved.
    """
    if len(generators) != len(states):
        raise ValueError(
            f"the loader and its samplers hold {len(generators)} random generators, but {len(states)} were "
            "saved"
        )
    for generator, state in zip(generators, states, strict=True):
        _set_state(generator, unpack(state))


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return [version, np.array(words, np.uint64), gauss]
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


def pack(value: Any) -> Any:
    """``value`` with JSON's types only: arrays become base64, and long integers text."""
    if isinstance(value, torch.Tensor):
        return {"dtype": "torch", "base64": _text(value.numpy())}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "base64": _text(value)}
    if isinstance(value, dict):
        return {"dict": {key: pack(item) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return [pack(item) for item in value]
    return {"int": str(value)} if isinstance(value, int) and abs(value) >= 2**53 else value


def unpack(value: Any) -> Any:
    """What ``pack`` was given; tuples have become lists."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "int" in value:
        return int(value["int"])
    if "dict" in value:
        return {key: unpack(item) for key, item in value["dict"].items()}
    data = base64.b64decode(value["base64"])
    if value["dtype"] == "torch":
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return np.frombuffer(data, dtype=value["dtype"]).copy()


def _text(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()
