"""Losses and optimizer steps through a gradient scaler, with several optimizers and several ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from accelerate.core.errors import PrepareError, warn_user


def _is_prepared(optimizer: Any) -> bool:
    return getattr(optimizer, "_is_accelerate_prepared", False)


def _is_update_due(scaler: torch.amp.GradScaler) -> bool:
    states = scaler._per_optimizer_states.values() if scaler.is_enabled() else ()
    return any(each["found_inf_per_device"] for each in states if each["stage"] is not OptState.UNSCALED)


def _update_scale(scaler: torch.amp.GradScaler, unscaled: dict[int, torch.optim.Optimizer]) -> None:
    """Update the scale if an optimizer has stepped since the last update.

    Torch forgets all optimizers then. Those of ``unscaled`` (by id) wait for their step, and may do so for
    ever, as after an interrupt in a notebook: they stay unscaled, and their overflows count with their step.
    """
    if _is_update_due(scaler):
        states = scaler._per_optimizer_states
        waiting, kept = dict(unscaled), {key: states.pop(key) for key in unscaled if key in states}
        scaler.update()
        unscaled.update(waiting)
        scaler._per_optimizer_states.update(kept)


class SyncedGradScaler(torch.amp.GradScaler):
    """Torch's scaler for ranks that hold parts of the gradients: an overflow on one rank counts on all.

    Programs keep it, and read or scale by it. An update that is due is made by ``scale``. To read shows its
    result only: gradients of other optimizers may wait for a step still, which have the scale before.
    """

    overflow_sync: Callable[[torch.Tensor], None] | None = None
    # The flags of the last step as the host has read them; None: a fused optimizer reads them on the device.
    has_overflowed: bool | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The optimizers whose gradients are unscaled and wait for their step, by id.
        self.unscaled: dict[int, torch.optim.Optimizer] = {}

    def __getstate__(self) -> dict[str, Any]:
        if not self.is_enabled():
            return super().__getstate__()
        # A copy begins an iteration: optimizers that wait here for their step or an update are not its own.
        state_copy, states = object.__new__(type(self)), self._per_optimizer_states.copy()
        states.clear()
        vars(state_copy).update(vars(self), _per_optimizer_states=states, unscaled={})
        return torch.amp.GradScaler.__getstate__(state_copy)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        if new_scale is None and self.is_enabled() and not (_is_update_due(self) or self.unscaled):
            return  # a step inside of an accumulation window is none
        self.unscaled.clear()
        super().update(new_scale)

    def scale(self, outputs: Any) -> Any:
        _update_scale(self, self.unscaled)
        return super().scale(outputs)

    def get_scale(self) -> float:
        return super(SyncedGradScaler, self._copy_updated()).get_scale()

    def state_dict(self) -> dict[str, Any]:
        return super(SyncedGradScaler, self._copy_updated()).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        _update_scale(self, self.unscaled)  # by steps before those of the state
        super().load_state_dict(state_dict)

    def unscale_(self, optimizer: Any) -> None:
        # A prepared optimizer steps by the one that it wraps, whose gradients would be unscaled again.
        super().unscale_(optimizer.optimizer if _is_prepared(optimizer) else optimizer)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_prepared(optimizer):  # its step comes back here
            return optimizer.step(*args, **kwargs)
        return super().step(optimizer, *args, **kwargs)

    def _copy_updated(self) -> SyncedGradScaler:
        if not _is_update_due(self):
            return self
        scaler: SyncedGradScaler = object.__new__(type(self))
        vars(scaler).update(vars(self), unscaled=dict(self.unscaled))
        scaler._scale, scaler._growth_tracker = copy.deepcopy((self._scale, self._growth_tracker))
        scaler._per_optimizer_states = self._per_optimizer_states.copy()
        _update_scale(scaler, scaler.unscaled)
        return scaler

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        flag_by_device = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if self.overflow_sync is None:
            return flag_by_device
        # A rank without gradients takes part too: the others wait for it.
        flags = [flag.to(inv_scale.device) for flag in flag_by_device.values()] or [
            torch.zeros_like(found_inf)
        ]
        flag = torch.stack(flags).max()
        self.overflow_sync(flag)
        return {inv_scale.device: flag}

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        # Torch's own reads the same flags, and does not tell what it has read.
        flags: Iterable[torch.Tensor] = optimizer_state["found_inf_per_device"].values()
        self.has_overflowed = any(flag.item() for flag in flags)
        return None if self.has_overflowed else optimizer.step(*args, **kwargs)


# Torch's words where no loss was scaled since the start, or since the last step of an optimizer.
_NOTHING_SCALED = ("unscale_() is being called after", "step() has already been called", "_scale is None")


class LossScaling:
    """Losses and optimizer steps through a gradient scaler: that of fp16, or one that the user assigned.

    Args:
        scaler: torch's, or one derived from it.
        updates_early: the scale is updated as soon as no optimizer waits for a step with gradients that have
            the scale before; otherwise only before the next backward.

    Attributes:
        optimizers: returns the wrappers of all that it steps.
        gradients: returns the gradients of parameters; in-place changes take effect.
    """

    def __init__(self, scaler: torch.amp.GradScaler, updates_early: bool = False) -> None:
        self._scaler, self._updates_early = scaler, updates_early
        self.optimizers: Callable[[], Iterable[Any]] = tuple
        self.gradients: Callable[[Iterable[torch.Tensor]], list[torch.Tensor]] = list
        self._overflow_sync: Callable[[torch.Tensor], None] | None = None
        self._unscaled: dict[int, torch.optim.Optimizer] = getattr(scaler, "unscaled", {})
        # Of these, by id, those whose gradients a backward with scaled ones has changed since.
        self._mixed: set[int] = set()

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """Torch's gradient scaler."""
        return self._scaler

    @property
    def is_enabled(self) -> bool:
        """Return whether losses are scaled: a disabled scaler lets everything pass."""
        return self._scaler.is_enabled()

    @property
    def is_bypassed(self) -> bool:
        """Return whether no loss was ever scaled on a CPU, where fp16 of 1.x has no scaler."""
        return self._scaler._scale is None and self._scaler._device == "cpu"

    def set_overflow_sync(self, agreement: Callable[[torch.Tensor], None] | None) -> None:
        """Set the all-reduce of the overflow flag: a step is skipped on all ranks or on none."""
        if isinstance(self._scaler, SyncedGradScaler):
            self._scaler.overflow_sync = agreement
        else:
            self._overflow_sync = agreement

    def scale(
        self, loss: torch.Tensor, reached_params: Callable[[torch.Tensor], set[torch.Tensor]] | None = None
    ) -> torch.Tensor:
        """Multiply the loss by the loss scale.

        Args:
            loss: backward runs on it next.
            reached_params: returns the parameters in the graph of the loss; None: not known.
        """
        sync: Any = getattr(self._scaler, "overflow_sync", self._overflow_sync)
        for optimizer in [*self._unscaled.values()]:
            params = _parameters(optimizer)
            has_gradient = any(p.grad is not None for p in params)
            if sync is not None:
                # The shards of one rank may hold none of the trained elements, and never have a gradient.
                flag = torch.full((), float(has_gradient), device=loss.device)
                sync(flag)
                has_gradient = bool(flag.item())
            if not has_gradient:
                self.note_cleared(optimizer)
            elif reached_params is not None and not reached_params(loss).isdisjoint(params):
                self._mixed.add(id(optimizer))
        self.update_scale()
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale once per optimizer and step, however often it is called.

        Raises:
            PrepareError: the gradients are unscaled in part.
        """
        if id(optimizer) in self._unscaled or not self.is_enabled or self.is_bypassed:
            self._refuse_mixed(optimizer)
            return
        # The user may have called ``unscale_`` of a scaler of his own.
        if self._scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.UNSCALED:
            try:
                self._scaler.unscale_(optimizer)
            except (AssertionError, RuntimeError, ValueError) as error:
                _explain_error(error, optimizer)
                raise
        self._unscaled[id(optimizer)] = optimizer
        self._mixed.discard(id(optimizer))
        if self._overflow_sync is not None:
            self._sync_overflow(optimizer, self._overflow_sync)

    def note_cleared(self, optimizer: torch.optim.Optimizer) -> None:
        """Take a step that will not come as done: its gradients were unscaled, and then cleared.

        Those of the next backward have a scale again; an overflow of the ones before lowers it all the same.
        """
        if self._unscaled.pop(id(optimizer), None) is not None:
            self._scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
            self._note_done()

    def _note_done(self) -> None:
        if self._updates_early:
            states, optimizers = self._scaler._per_optimizer_states, [o.optimizer for o in self.optimizers()]
            waiting = [each for each in optimizers if states[id(each)]["stage"] is not OptState.STEPPED]
            if all(p.grad is None for optimizer in waiting for p in _parameters(optimizer)):
                self.update_scale()

    def _refuse_mixed(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._mixed and id(optimizer) in self._unscaled:
            raise PrepareError(
                f"gradients of {_describe(optimizer)} that are unscaled in part are clipped or stepped",
                why="they were unscaled, as for clipping, and then a backward added gradients that are "
                "multiplied by the loss scale",
                fix="clip once, between the last backward and optimizer.step(); in `with "
                "accelerator.accumulate(model):` clipping waits for the last micro-batch by itself",
            )

    def forget_optimizers(self) -> None:
        """Forget the optimizers that wait for their step; the scale stays, with the steps that were taken."""
        self.update_scale()
        self._unscaled.clear()
        if self.is_enabled:
            self._scaler._per_optimizer_states.clear()

    def _sync_overflow(
        self, optimizer: torch.optim.Optimizer, all_reduce: Callable[[torch.Tensor], None]
    ) -> None:
        """Let an overflow on one rank count on all; a rank without gradients takes part, too."""
        flags = self._scaler._found_inf_per_device(optimizer)
        place = next(iter(flags), optimizer.param_groups[0]["params"][0].device)
        flag = torch.stack(
            [each.to(place) for each in flags.values()] or [torch.zeros((), device=place)]
        ).max()
        all_reduce(flag)
        flags.clear()
        flags[place] = flag

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, precision: str
    ) -> tuple[bool | torch.Tensor, Any]:
        """Step unless a gradient is not finite; then the scale will be lowered.

        The host waits for the device once, for the flag that decides; not at all with a fused optimizer.
        """
        if not self.is_enabled:
            return True, optimizer.step() if closure is None else optimizer.step(closure)
        if self.is_bypassed and closure is None:
            warn_user("fp16 without a loss scale: the step comes before the first accelerator.backward(loss)")
            return True, optimizer.step()
        if callable(closure):  # the ``step`` of some wrappers takes the name of an optimizer
            cause = "mixed_precision='fp16'" if precision == "fp16" else "a gradient scaler"
            raise PrepareError(
                f"optimizer.step(closure) does not go with {cause}",
                why="the closure would run backward on a loss that is not scaled",
                fix="use mixed_precision='bf16' or an optimizer that needs no closure",
            )
        if self._mixed:
            self._refuse_mixed(optimizer)
        if self._overflow_sync is not None:
            self.unscale(optimizer)
        own = self._scaler if isinstance(self._scaler, SyncedGradScaler) else None
        if own is not None:
            own.has_overflowed = None
        try:
            result = self._scaler.step(optimizer, *(() if closure is None else (closure,)))
            if not self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]:
                raise AssertionError("a fused optimizer has stepped without a gradient")
        except BaseException as error:
            vars(optimizer).pop("grad_scale", None)  # torch multiplies one that is left by the next scale
            state = self._scaler._per_optimizer_states[id(optimizer)]
            if not state["found_inf_per_device"]:
                state["stage"] = OptState.READY
                self._unscaled.pop(id(optimizer), None)
            elif state["stage"] is OptState.UNSCALED:
                self._unscaled[id(optimizer)] = optimizer  # its own ``step`` has raised
            _explain_error(error, optimizer)
            raise
        self._unscaled.pop(id(optimizer), None)
        if own is not None and own.has_overflowed is not None:
            stepped: bool | torch.Tensor = not own.has_overflowed
        else:
            first, *others = self._scaler._found_inf_per_device(optimizer).values()
            for flag in others:
                first = first + flag.to(first.device, non_blocking=True)
            stepped = first == 0
        self._note_done()
        return stepped, result

    def update_scale(self) -> None:
        """Update the scale if an optimizer has stepped since the last update.

        Gradients of other optimizers, as those of a window that the step of a discriminator ends before the
        generator's, get the new scale too.
        """
        if not _is_update_due(self._scaler):
            return
        scaler: Any = self._scaler
        states, optimizers = scaler._per_optimizer_states, [each.optimizer for each in self.optimizers()]
        scaled = [each for each in optimizers if states[id(each)]["stage"] is OptState.READY]
        grads = self.gradients(p for optimizer in scaled for p in _parameters(optimizer))
        before = scaler._scale.clone() if grads else None
        _update_scale(scaler, self._unscaled)
        if before is not None:
            factor = scaler._scale / before  # not read by the host
            for grad in grads:
                grad.mul_(factor.to(grad.device, non_blocking=True))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _describe(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__name__} of {len(_parameters(optimizer))} parameters"


def _explain_error(error: BaseException, optimizer: torch.optim.Optimizer) -> None:
    """Raise an error with a cause and a fix for an error of torch's scaler, if there is one.

    Raises:
        PrepareError: gradients are missing, or float16, or not those of a scaled loss.
    """
    is_unscaled = any(words in str(error) for words in _NOTHING_SCALED)
    if not is_unscaled and not isinstance(error, AssertionError | ValueError):
        return
    grads = [p.grad for p in _parameters(optimizer) if p.grad is not None]
    if not grads:
        raise PrepareError(
            "a step, or unscaling, of an optimizer none of whose parameters has a gradient",
            why="no backward has run since the last step, or the optimizer was made for other parameters",
            fix="call accelerator.backward(loss) first, and make the optimizer from the prepared model's "
            "parameters()",
        ) from error
    if is_unscaled:
        raise PrepareError(
            f"{_describe(optimizer)} is clipped or stepped without a scaled backward since its last step",
            why="its gradients would be divided by a loss scale that they do not have",
            fix="call accelerator.backward(loss) before, instead of loss.backward()",
        ) from error
    if any(grad.dtype == torch.float16 for grad in grads):
        raise PrepareError(
            "float16 gradients cannot be unscaled",
            why="trained parameters are float16, and mixed precision keeps float32 weights",
            fix="load the model in float32 (model.float()): mixed_precision='fp16' computes in float16 by "
            "itself",
        ) from error
