"""Optimizer states that are read into the tensors which the optimizer already has.

A process that loads again, as to go back to the best checkpoint, has memory for the state already. Reading
the file into it takes a fraction of the time that filling fresh memory takes, and no second copy. A tensor
that somebody else refers to, as through ``optimizer.state_dict()``, keeps its values: then new memory takes
the saved ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from accelerate.checkpoint.durable_file import usable_cores
from accelerate.checkpoint.errors import file_errors
from accelerate.checkpoint.file_reads import CHUNK, is_plain, memory_of, read_at

_LARGE = 2**16  # bytes; less is not worth a read of its own


@dataclass(frozen=True)
class MappedFile:
    """A file that is open, and mapped as a whole.

    Attributes:
        path: its name.
        handle: its descriptor, open for reading.
        start, end: the addresses at which it is mapped.
    """

    path: Path
    handle: int
    start: int
    end: int

    def fill_owned_tensors(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Read saved tensors into those that an optimizer has; these take their places in ``state``.

        It serves as a hook of ``Optimizer.register_load_state_dict_pre_hook``.

        Args:
            optimizer: its ``load_state_dict`` is about to take ``state``.
            state: a state dict with tensors that are mapped from the file.

        Raises:
            CheckpointError: the file cannot be read.
        """
        jobs: list[tuple[int, memoryview]] = []
        filled: list[torch.Tensor] = []
        for values, name, owned in _find_pairs(optimizer, state):
            address = values[name].data_ptr()
            if not self.start <= address < self.end:
                continue
            offset, memory = address - self.start, memory_of(owned)
            jobs += [(offset + at, memory[at : at + CHUNK]) for at in range(0, len(memory), CHUNK)]
            values[name] = owned
            filled.append(owned)
        with file_errors("read", self.path), ThreadPoolExecutor(usable_cores(), "read") as pool:
            for _ in pool.map(self._read, jobs):
                pass
        for tensor in filled:
            torch.autograd.graph.increment_version(tensor)

    def _read(self, job: tuple[int, memoryview]) -> None:
        offset, memory = job
        if read_at(self.handle, memory, offset) < len(memory):
            raise EOFError(f"it ends before {offset + len(memory)} bytes")


def _find_pairs(
    optimizer: Optimizer, state: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yield the saved values of a parameter, a name in them, and the optimizer's tensor that can take it.

    None where torch does not say how many tensors share a memory.
    """
    if not hasattr(torch._C, "_storage_Use_Count"):
        return
    alone = _reference_counts({0: {"": torch.zeros(1)}}, 0, "")
    for ours, theirs in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for parameter, number in zip(ours["params"], theirs["params"], strict=False):
            if parameter not in optimizer.state:
                continue
            values, saved = optimizer.state[parameter], state["state"].get(number, {})
            names = [name for name, value in saved.items() if _fits(values.get(name), value)]
            del values  # which would count as a reference
            for name in names:
                if _reference_counts(optimizer.state, parameter, name) == alone:
                    yield saved, name, optimizer.state[parameter][name]


def _fits(owned: Any, saved: Any) -> bool:
    """Return True for two plain tensors of the same dtype and shape, which are large."""
    if not (is_plain(owned) and is_plain(saved)) or saved.nbytes < _LARGE:
        return False
    return bool(owned.dtype == saved.dtype and owned.shape == saved.shape)


def _reference_counts(states: Mapping[Any, dict[str, Any]], key: Any, name: str) -> tuple[int, int, int]:
    """Return how many refer to the values of a parameter, to one of its tensors, and to its memory."""
    values = states[key]
    tensor = values[name]
    storage = tensor.untyped_storage()
    uses = torch._C._storage_Use_Count(storage._cdata)
    return sys.getrefcount(values), sys.getrefcount(tensor), uses
