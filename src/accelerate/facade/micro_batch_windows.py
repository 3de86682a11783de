"""Windows: an inner loop over the micro-batches of each optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.data.active_loaders import DataLoaderStateMixin
from accelerate.facade.gradient_state import GradientState
from accelerate.facade.loss_weighting import scale_gradients
from accelerate.strategy.base import EngineStrategy, Strategy

_END = object()


class GradientAccumulationWindows:
    """The windows of one pass over a loader; iterate it once per epoch. Its length is their number.

    Args:
        gradients, strategy: of the ``Accelerator``.
        loader: a prepared loader, or anything with a length.
        n: micro-batches of a full window.
        models: gives the models whose gradients accumulate, at each micro-batch.
        trained: gives all parameters that a loss may have gradients for.

    Raises:
        PrepareError: the end of ``loader`` cannot be known, or ``n`` is not a whole number above 0.
    """

    gradients: GradientState
    strategy: Strategy
    models: Callable[[], Sequence[nn.Module]]
    trained_params: Callable[[], Iterable[torch.Tensor]]

    def __init__(
        self,
        gradients: GradientState,
        strategy: Strategy,
        loader: Any,
        n: int,
        models: Callable[[], Sequence[nn.Module]],
        trained: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        if not isinstance(n, int) or n < 1:
            raise PrepareError(f"a window of {n!r} micro-batches", fix="use a whole number, 1 or more")
        if not isinstance(loader, DataLoaderStateMixin) and not hasattr(loader, "__len__"):
            raise PrepareError(
                f"the end of a {type(loader).__name__} cannot be known before it is there",
                why="the last window may be shorter, and its gradients are reduced in its last micro-batch",
                fix="give the prepared loader itself: for window in accelerator.windows(loader, n)",
            )
        self.gradients, self.strategy = gradients, strategy
        self.models, self.trained_params = models, trained
        self.loader: Any = loader
        self.n = n

    def __len__(self) -> int:
        return -(-len(self.loader) // self.n)

    def __iter__(self) -> Iterator[GradientAccumulationWindow]:
        self.gradients.refuse_abandoned("windows() began")
        source = _LastBatchAwareIterator(self.loader)
        # The first batch of a window is read before the window is yielded, or an empty window could
        # follow the last. This prefetches nothing: the window before it has ended.
        try:
            while source.advance():
                window = GradientAccumulationWindow(self, source)
                yield window
                self.gradients.refuse_abandoned("the next window began")
                if not window.done:
                    raise PrepareError(
                        "a window was not iterated",
                        fix="for window in accelerator.windows(loader, n):\n"
                        "           for batch in window: ...",
                    )
        finally:
            source.iterator = iter(())  # a window that is kept alive does not keep the loader's iterator


class _LastBatchAwareIterator:
    """The iterator over a loader that knows whether the current batch is the last.

    Attributes:
        is_last: the current batch is the last one; another pass over the loader does not change it.
    """

    def __init__(self, loader: Any) -> None:
        self.loader, self.iterator, self.batch, self.count = loader, iter(loader), _END, 0
        self.is_last = False

    def advance(self) -> bool:
        """Read the next batch; False at the end."""
        self.batch = next(self.iterator, _END)
        self.count += 1
        prepared = isinstance(self.loader, DataLoaderStateMixin)
        self.is_last = self.loader.end_of_dataloader if prepared else self.count >= len(self.loader)
        return self.batch is not _END


class GradientAccumulationWindow:
    """The micro-batches between two optimizer steps. Gradients stay local until the last of them.

    Attributes:
        n: how many micro-batches it is planned to have; the loader's end may close it earlier.
        count: the number of the current micro-batch, from 1.
        done: its last micro-batch was yielded.
        is_loss_divided: whether losses of its micro-batches were divided by their number.
    """

    def __init__(self, windows: GradientAccumulationWindows, source: _LastBatchAwareIterator) -> None:
        self.gradients, self.strategy = windows.gradients, windows.strategy
        # A window that was saved open has had some of its micro-batches.
        count, self.is_loss_divided = self.gradients.resumed_window or (0, False)
        self.gradients.resumed_window = None
        self.n, self.count, self.done = windows.n, min(count, windows.n - 1), False
        self._windows, self._source = windows, source
        self._inner: AbstractContextManager[Any] | None = None
        self._begun = False

    @property
    def divisor(self) -> int:
        """The divisor of the loss of this micro-batch."""
        return self.count if self.done else self.n

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            raise PrepareError("a window can be iterated once", why="its batches were yielded already")
        if self.gradients.window is not None:
            self.gradients.window.leave()
            raise _nested_window_error()
        self.gradients.window, self._begun = self, True
        try:
            yield from self._batches()
        finally:
            self.leave()

    def _batches(self) -> Iterator[Any]:
        while True:
            self._begin_micro_batch()
            yield self._source.batch
            if self.gradients.window is not self:
                raise _nested_window_error()
            self._end_micro_batch()
            if self.done:
                return
            if not self._source.advance():
                raise PrepareError(
                    f"the loader said {len(self._source.loader)} batches and ended after "
                    f"{self._source.count - 1}",
                    why="the window waits for its last micro-batch, in which gradients are reduced",
                    fix="give accelerator.windows() a prepared loader, which knows its end",
                )

    def _begin_micro_batch(self) -> None:
        """Begin a micro-batch."""
        gradients = self.gradients
        self.count += 1
        self.done = self._source.is_last or self.count == self.n
        models = self._windows.models()
        if self.done and self.count < self.n and self.is_loss_divided:
            # Earlier losses were divided by n, before it was known that the window is shorter.
            factor = self.n / self.count
            if isinstance(self.strategy, EngineStrategy):
                self.strategy.rescale_short_window(factor)
            else:
                scale_gradients(self.strategy.gradients(self._windows.trained_params()), factor)
        gradients.sync_gradients = self.done
        sync = self.done or gradients.plugin_kwargs.get("sync_each_batch", False)
        self._inner = self.strategy.accumulation_context(models, sync=sync)
        self._inner.__enter__()

    def _end_micro_batch(self) -> None:
        if self._inner is not None:
            self._inner.__exit__(None, None, None)
            self._inner = None

    def leave(self) -> None:
        """End the window, finished or not."""
        self._end_micro_batch()
        gradients = self.gradients
        if gradients.window is self:
            gradients.window, gradients.sync_gradients = None, True
            if not self.done:
                gradients.abandoned_window = f"a window that was left in micro-batch {self.count} of {self.n}"


def _nested_window_error() -> PrepareError:
    return PrepareError(
        "a window began inside another one",
        why="an Accelerator has one state of gradient accumulation",
        fix="finish a window before the next one, or take another Accelerator",
    )
