"""Gradient accumulation: which micro-batch of a window is this, and do gradients synchronise now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from accelerate.core.errors import PrepareError
from accelerate.core.handler import KwargsHandler
from accelerate.data.active import UNOWNED, ActiveLoaders


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated.

    Attributes:
        num_steps: micro-batches per optimizer step.
        adjust_scheduler: kept for compatibility: a schedule advances with the optimizer, whatever it says.
        sync_with_dataloader: the last batch of a loader closes the window, however short.
        sync_each_batch: reduce gradients in every micro-batch (less memory under sharding, more traffic).
        step_scheduler_once: each optimizer step advances a schedule by 1, so that the learning rate of step k
            is that of a run on one process; otherwise by the number of processes, as in Accelerate 1.x.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    step_scheduler_once: bool = False


class _SharedState:
    """``Class._shared_state``: the state of the current instance as a dict, empty when there is none."""

    def __get__(self, instance: object, owner: type[Any]) -> dict[str, Any]:
        return vars(owner._current) if owner._current is not None else {}


class GradientState:
    """The accumulation of one ``Accelerator``; ``GradientState()`` is that of the newest.

    Attributes:
        sync_gradients: gradients are complete after this backward, so the optimizer may step.
        plugin_kwargs: the options that were given, by name.
    """

    _current: ClassVar[GradientState | None] = None
    _shared_state = _SharedState()

    sync_gradients: bool
    plugin_kwargs: dict[str, Any]
    loaders: ActiveLoaders
    step: int
    # The Window whose micro-batches are handed out now, or None; and what is said of one that was left early.
    window: Any
    abandoned: str
    # The Items that ``backward(loss, num_items=...)`` counts, None before its first use; and whether
    # gradients come from a backward without it.
    items: Any
    uncounted: bool

    def __new__(cls, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> GradientState:
        """The current one, with the options updated when some are given."""
        if cls._current is None:
            return cls.own(gradient_accumulation_plugin, UNOWNED)
        if gradient_accumulation_plugin is not None:
            cls._current.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()
        return cls._current

    @classmethod
    def own(
        cls, plugin: GradientAccumulationPlugin | None = None, loaders: ActiveLoaders | None = None
    ) -> GradientState:
        """A new one, which becomes the current."""
        state = super().__new__(cls)
        state.sync_gradients = True
        state.plugin_kwargs = plugin.to_kwargs() if plugin is not None else {}
        state.loaders = ActiveLoaders() if loaders is None else loaders
        state.step = 0
        state.window, state.abandoned = None, ""
        state.items, state.uncounted = None, False
        state._synced_elsewhere = False
        cls._current = state
        return state

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
        )

    @property
    def initialized(self) -> bool:
        """Whether there is one."""
        return GradientState._current is not None

    @property
    def num_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.plugin_kwargs.get("num_steps") or 1

    @property
    def adjust_scheduler(self) -> bool:
        """Whether the plugin asked for it; the scheduler only advances with the optimizer either way."""
        return self.plugin_kwargs.get("adjust_scheduler", False)

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether a loader's last batch closes the window."""
        return self.plugin_kwargs.get("sync_with_dataloader", True)

    @property
    def active_dataloader(self) -> Any | None:
        """The prepared loader whose loop is the innermost."""
        return self.loaders.innermost

    @property
    def dataloader_references(self) -> list[Any]:
        """All prepared loaders in iteration, the outermost first."""
        return self.loaders.references

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch in hand is the innermost loader's last."""
        loader = self.active_dataloader
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """How many samples of the innermost loader's last step are real; -1 when unknown."""
        loader = self.active_dataloader
        return -1 if loader is None else loader.remainder

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Kept for compatibility."""
        return self._synced_elsewhere

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, value: bool) -> None:
        self._synced_elsewhere = value

    def advance(self) -> bool:
        """One more micro-batch begins; whether gradients synchronise after it.

        A window closes after ``num_steps``. The last batch of the loader closes it early, but only in the
        last of its micro-batches: their number is taken from the batch before.
        """
        self.step += 1
        loader = self.loaders.innermost
        closes = False
        if loader is not None:
            loader.micro_steps += 1
            last = loader.end_of_dataloader and loader.micro_steps >= loader.micro_steps_before
            closes = last and self.sync_with_dataloader
        self.sync_gradients = closes or self.step % (self.plugin_kwargs.get("num_steps") or 1) == 0
        if closes:
            self.step = 0
        return self.sync_gradients

    def refuse_abandoned(self, what: str) -> None:
        """Refuses to go on with gradients of a window that was left before its last micro-batch.

        Raises:
            PrepareError: there are some.
        """
        if self.abandoned:
            raise PrepareError(
                f"{what} after {self.abandoned}",
                why="its gradients are of a part of the window, and were not reduced over the processes",
                fix="drop them with optimizer.zero_grad(), or let every window run to its end",
            )

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, dataloader: Any) -> None:
        self.loaders.add(dataloader)

    def _remove_dataloader(self, dataloader: Any) -> None:
        self.loaders.remove(dataloader)

    @staticmethod
    def _reset_state() -> None:
        GradientState._current = None
