"""Gradient accumulation: counts micro-batches, and tells when gradients are reduced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from accelerate.core.argument_checks import KwargsHandler, check_arguments, refuse_assignments
from accelerate.core.errors import PrepareError
from accelerate.core.value_types import PositiveInt
from accelerate.data.active_loaders import UNOWNED, ActiveLoaders


@check_arguments
@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """The options of gradient accumulation.

    Attributes:
        num_steps: micro-batches per optimizer step.
        adjust_scheduler: kept for compatibility: a schedule advances with the optimizer, whatever it says.
        sync_with_dataloader: the last batch of a loader closes the window, however short.
        sync_each_batch: reduce gradients in every micro-batch (less memory under sharding, more traffic).
        step_scheduler_once: each optimizer step advances a schedule by 1, so that the learning rate of step k
            is that of a run on one process; otherwise by the number of processes, as in Accelerate 1.x.
    """

    num_steps: PositiveInt | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    step_scheduler_once: bool = False


# What a ``GradientState`` says of gradients, before there are any.
_WITHOUT_GRADIENTS: dict[str, Any] = {
    "sync_gradients": True,
    "uses_accumulate": False,
    "last_micro_batch_began_at": -1,
    "step": 0,
    "window": None,
    "abandoned_window": "",
    "resumed_window": None,
    "loss_weighting": None,
    "has_unweighted_grads": False,
}


class _SharedStateDescriptor:
    """The descriptor ``Class._shared_state``: the current instance as a dict, empty without one."""

    def __get__(self, instance: object, owner: type[Any]) -> dict[str, Any]:
        return vars(owner._current) if owner._current is not None else {}


class GradientState:
    """The gradient accumulation of one ``Accelerator``; ``GradientState()`` is that of the newest.

    Attributes:
        sync_gradients: gradients are complete after this backward, so the optimizer may step.
        uses_accumulate: under DeepSpeed or Megatron-LM, ``accumulate()`` was entered.
        last_micro_batch_began_at: the ``backward_count`` at which the block ``accumulate()`` of the last of
            several micro-batches began, as long as it is open; else -1.
        plugin_kwargs: the options that were given, by name.
        backward_count: backwards since it was created.
    """

    _current: ClassVar[GradientState | None] = None
    _shared_state = _SharedStateDescriptor()

    sync_gradients: bool
    uses_accumulate: bool
    last_micro_batch_began_at: int
    plugin_kwargs: dict[str, Any]
    loaders: ActiveLoaders
    step: int
    backward_count: int = 0
    # The window that is being iterated, or None; and the description of one that was left early.
    window: Any
    abandoned_window: str
    # The micro-batches that a loaded checkpoint has of the next window of ``windows()``, and whether their
    # losses were divided; or None.
    resumed_window: tuple[int, bool] | None
    # The LossWeighting of ``backward(loss, num_items=...)``, None before its first use; and whether
    # gradients come from a backward without ``num_items``.
    loss_weighting: Any
    has_unweighted_grads: bool

    def __new__(cls, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> GradientState:
        """Return the current one, with the options updated when some are given."""
        if cls._current is None or not vars(cls._current):  # a program has cleared its ``_shared_state``
            return cls.create(gradient_accumulation_plugin, UNOWNED)
        if gradient_accumulation_plugin is not None:
            cls._current.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()
        return cls._current

    @classmethod
    def create(
        cls, plugin: GradientAccumulationPlugin | None = None, loaders: ActiveLoaders | None = None
    ) -> GradientState:
        """Return a new one, which becomes the current, or the one from before the first Accelerator."""
        state = cls._current
        if state is None or getattr(state, "loaders", None) is not UNOWNED:
            state = super().__new__(cls)
        state.plugin_kwargs = plugin.to_kwargs() if plugin is not None else {}
        state.loaders = ActiveLoaders() if loaders is None else loaders
        vars(state).update(_WITHOUT_GRADIENTS)
        state._xla_gradients_synced = False
        cls._current, ActiveLoaders.newest = state, state.loaders
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientState:
        # Copies of prepared objects count the micro-batches of the same Accelerator.
        return self

    def __reduce__(self) -> Any:
        return GradientState, ()

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
        )

    @property
    def initialized(self) -> bool:
        """Return whether an instance exists."""
        return GradientState._current is not None

    @property
    def num_steps(self) -> int:
        """The number of micro-batches per optimizer step."""
        return self.plugin_kwargs.get("num_steps") or 1

    @property
    def adjust_scheduler(self) -> bool:
        """Return the plugin's option; the scheduler advances with the optimizer either way."""
        return self.plugin_kwargs.get("adjust_scheduler", False)

    @property
    def sync_with_dataloader(self) -> bool:
        """Return whether a loader's last batch closes the window."""
        return self.plugin_kwargs.get("sync_with_dataloader", True)

    @property
    def active_dataloader(self) -> Any | None:
        """The prepared loader whose loop is the innermost."""
        return self.loaders.innermost

    @property
    def dataloader_references(self) -> list[Any]:
        """The prepared loaders that are being iterated, the outermost first."""
        return self.loaders.references

    @property
    def in_dataloader(self) -> bool:
        """Return whether a prepared loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Return whether the batch in hand is the innermost loader's last."""
        loader = self.active_dataloader
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """The number of real samples in the innermost loader's last step; -1 when unknown."""
        loader = self.active_dataloader
        return -1 if loader is None else loader.remainder

    @property
    def is_xla_gradients_synced(self) -> bool:
        """The flag of XLA; kept for compatibility."""
        return self._xla_gradients_synced

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, value: bool) -> None:
        self._xla_gradients_synced = value

    def advance(self) -> bool:
        """Begin one more micro-batch; return whether gradients are reduced in it.

        A window closes after ``num_steps``. The last batch of the loader closes it early, but only in the
        last of its micro-batches: their number is expected from the batches before.
        """
        self.step += 1
        loader = self.loaders.innermost
        closes = False
        if loader is not None:
            loader.micro_steps, loader.trains = loader.micro_steps + 1, True
            loader = self.loaders.find_closing(loader)
            last = loader.end_of_dataloader and loader.micro_steps >= loader.expected_micro_steps
            closes = last and self.sync_with_dataloader
        self.sync_gradients = closes or self.step % (self.plugin_kwargs.get("num_steps") or 1) == 0
        if closes:
            self.step = 0
        return self.sync_gradients

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the present counts, windows and loss weighting."""
        kept = {name: getattr(self, name) for name in _WITHOUT_GRADIENTS}
        restore_weighting = None if self.loss_weighting is None else self.loss_weighting.snapshot()

        def restore() -> None:
            vars(self).update(kept)
            if restore_weighting is not None:
                restore_weighting()

        return restore

    def reset(self) -> None:
        """Forget counts, windows and loss weighting: the gradients are gone."""
        vars(self).update(_WITHOUT_GRADIENTS)

    def refuse_abandoned(self, what: str) -> None:
        """Refuse to go on with gradients of a window that was left before its last micro-batch.

        Raises:
            PrepareError: there are some.
        """
        if self.abandoned_window:
            raise PrepareError(
                f"{what} after {self.abandoned_window}",
                why="its gradients are of a part of the window, and were not all-reduced",
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


refuse_assignments(
    GradientState,
    {
        "dataloader_references": (
            "a prepared loader is in it while, and only while, it is iterated",
            "iterate a loader that accelerator.prepare has returned",
        )
    },
)
