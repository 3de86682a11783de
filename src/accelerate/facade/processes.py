"""This process among all, and code that runs on some of them only; shared by all views on the world."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from accelerate.core.errors import CollectiveError
from accelerate.world import collective
from accelerate.world.split import split
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
        """This process's contiguous part of a list, tuple, tensor or dataset, or of each value of a dict.

        Args:
            inputs: the whole, the same on every process; a text is not split.
            apply_padding: repeat the last item so that all parts have one length.

        Raises:
            PrepareError: the values of a dict have different lengths, or something has no length.
        """
        yield split(inputs, apply_padding=apply_padding)

    def _goes_first(self, is_main: bool) -> AbstractContextManager[None]:
        return _First(self.process_index, is_main)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Rank 0 runs the block first, then the others.

        Raises:
            CollectiveError: on the others, which have not begun, when rank 0 raised in its block.
        """
        return self._goes_first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """The first process of each machine runs the block first, then the others.

        Raises:
            CollectiveError: on all the others, when one of those that go first raised in its block.
        """
        return self._goes_first(self.is_local_main_process)

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
        """A decorator: the function runs on one rank only. A lone process runs it, whatever the rank."""
        if function is None:
            return partial(self.on_process, process_index=process_index)
        return _only(lambda: self._is(process_index, self.process_index), function)

    def on_local_process(
        self, function: Function | None = None, local_process_index: int | None = None
    ) -> Function:
        """A decorator: the function runs on one local rank of each machine only, or in a lone process."""
        if function is None:
            return partial(self.on_local_process, local_process_index=local_process_index)
        return _only(lambda: self._is(local_process_index, self.local_process_index), function)

    def _is(self, wanted: int | None, own: int) -> bool:
        return wanted is None or wanted == own or not self.use_distributed

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


class _First(ContextDecorator, AbstractContextManager[None]):
    """A block that some processes run before the others, which then hear how it went."""

    def __init__(self, rank: int, first: bool) -> None:
        self.rank, self.first = rank, first

    def __enter__(self) -> None:
        if not self.first:
            self._hear()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # The others have no block to fail in yet. An exit or Ctrl-C ends this process, and they see it go.
        if self.first and (error is None or isinstance(error, Exception)):
            self._hear(error)

    def _hear(self, error: Exception | None = None) -> None:
        """Tells how this process's block ended, when it went first, and hears it of the others."""
        told = None if error is None else f"{type(error).__name__}: {error}"
        failed = [(rank, text) for rank, text in enumerate(collective.all_objects(told)) if text is not None]
        if failed and error is None:
            rank, text = failed[0]
            raise CollectiveError(
                f"rank {rank} failed in a block that it ran first: {text}",
                why=f"rank {self.rank} was to run it after that",
                fix=f"the output of rank {rank} has the traceback",
            )
