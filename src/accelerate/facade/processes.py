"""This process among all, and code that runs on some of them only; shared by all views on the world."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from accelerate.world import collective
from accelerate.world.world import World

if TYPE_CHECKING:
    import torch

Function = Callable[..., Any]


class Processes:
    """Facts of this process, barriers, and decorators; needs a ``world``."""

    @property
    def world(self) -> World:
        """The open world."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.world.device

    @property
    def num_processes(self) -> int:
        """World size."""
        return self.world.size

    @property
    def process_index(self) -> int:
        """Rank."""
        return self.world.rank

    @property
    def local_process_index(self) -> int:
        """Rank on this machine."""
        return self.world.local_rank

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.world.size > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.world.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.world.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.world.is_last

    def wait_for_everyone(self) -> None:
        """Waits until every process is here."""
        collective.barrier()

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Generator[Any]:
        """This process's contiguous part of a list, tuple, dict of these, or tensor.

        Args:
            inputs: the whole, the same on every process.
            apply_padding: repeat the last item so that all parts have one length.
        """
        yield collective.split(inputs, apply_padding=apply_padding)

    @contextmanager
    def _goes_first(self, is_main: bool) -> Generator[None]:
        if not is_main:
            self.wait_for_everyone()
        yield
        if is_main:
            self.wait_for_everyone()

    @contextmanager
    def main_process_first(self) -> Generator[None]:
        """Rank 0 runs the block first, then the others."""
        with self._goes_first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Generator[None]:
        """The first process of each machine runs the block first, then the others."""
        with self._goes_first(self.is_local_main_process):
            yield

    def on_main_process(self, function: Function | None = None) -> Function:
        """A decorator: the function runs on rank 0 only and gives None elsewhere."""
        return _only(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Function | None = None) -> Function:
        """A decorator: the function runs on the first process of each machine only."""
        return _only(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Function) -> Function:
        """A decorator: the function runs on the last rank only."""
        return _only(lambda: self.is_last_process, function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Function:
        """A decorator: the function runs on one rank only."""
        if function is None:
            return partial(self.on_process, process_index=process_index)
        return _only(lambda: process_index is None or self.process_index == process_index, function)

    def on_local_process(
        self, function: Function | None = None, local_process_index: int | None = None
    ) -> Function:
        """A decorator: the function runs on one local rank of each machine only."""
        if function is None:
            return partial(self.on_local_process, local_process_index=local_process_index)
        return _only(
            lambda: local_process_index is None or self.local_process_index == local_process_index, function
        )

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on the first process of each machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)


def _only(condition: Callable[[], bool], function: Function | None) -> Function:
    if function is None:
        return partial(_only, condition)

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if condition() else None

    return guarded
