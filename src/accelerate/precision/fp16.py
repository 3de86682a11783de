"""float16 autocast with a scaled loss.

Source: Micikevicius et al. 2018, "Mixed Precision Training" (arXiv:1710.03740), by torch.amp.GradScaler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from accelerate.core.argument_checks import check_arguments
from accelerate.core.errors import PrepareError
from accelerate.core.kwargs_handler import KwargsHandler
from accelerate.core.user_warning import warn_user
from accelerate.core.value_types import PositiveInt, PositiveNumber
from accelerate.device.base import Device
from accelerate.precision.autocast import AutocastKwargs, HalfPrecisionAutocast
from accelerate.world import world as worlds


@check_arguments
@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of ``torch.amp.GradScaler`` (see there)."""

    init_scale: PositiveNumber = 65536.0
    growth_factor: PositiveNumber = 2.0
    backoff_factor: PositiveNumber = 0.5
    growth_interval: PositiveInt = 2000
    enabled: bool = True


class _SyncedGradScaler(torch.amp.GradScaler):
    """Torch's scaler for ranks that hold parts of the gradients: an overflow on one rank counts on all.

    Programs keep it, and read or scale by it: then it makes an update that is due.
    """

    overflow_sync: Callable[[torch.Tensor], None] | None = None
    # The flags of the last step as the host has read them; None: a fused optimizer reads them on the device.
    has_overflowed: bool | None = None
    is_update_due = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The optimizers whose gradients are unscaled and wait for their step, by id.
        self.unscaled: dict[int, torch.optim.Optimizer] = {}

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        self.is_update_due = False
        self.unscaled.clear()
        super().update(new_scale)

    def scale(self, outputs: Any) -> Any:
        if self.is_update_due:
            self.update()
        return super().scale(outputs)

    def get_scale(self) -> float:
        if self.is_update_due:
            self.update()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        if self.is_update_due:
            self.update()
        return super().state_dict()

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


class LossScaling:
    """Losses and optimizer steps through a gradient scaler: that of fp16, or one that the user assigned.

    Args:
        scaler: torch's, or one derived from it.
        updates_at_once: tells whether the scale is updated after each step, not before the next backward. Not
            with several optimizers: an update forgets which gradients are unscaled already, and those of the
            next one would be divided twice.
    """

    def __init__(
        self, scaler: torch.amp.GradScaler, updates_at_once: Callable[[], bool] = lambda: False
    ) -> None:
        self._scaler, self._updates_at_once = scaler, updates_at_once
        self._overflow_sync: Callable[[torch.Tensor], None] | None = None
        self._unscaled: dict[int, torch.optim.Optimizer] = getattr(scaler, "unscaled", {})
        self._stepped = False

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """Torch's gradient scaler, with the scale of the next backward."""
        self.update_scale()
        return self._scaler

    @property
    def is_enabled(self) -> bool:
        """Return whether losses are scaled: a disabled scaler lets everything pass."""
        return self._scaler.is_enabled()

    def set_overflow_sync(self, agreement: Callable[[torch.Tensor], None] | None) -> None:
        """Set the all-reduce of the overflow flag: a step is skipped on all ranks or on none."""
        if isinstance(self._scaler, _SyncedGradScaler):
            self._scaler.overflow_sync = agreement
        else:
            self._overflow_sync = agreement

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by the loss scale."""
        for optimizer in [*self._unscaled.values()]:
            if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
                self.note_cleared(optimizer)
        return self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale once per optimizer and step, however often it is called."""
        if id(optimizer) in self._unscaled or not self.is_enabled:
            return
        if isinstance(self._scaler, _SyncedGradScaler):
            self._scaler.is_update_due = False  # an update would forget that this optimizer is unscaled
        # The user may have called ``unscale_`` of a scaler of his own.
        if isinstance(self._scaler, _SyncedGradScaler) or not self._scaler._found_inf_per_device(optimizer):
            try:
                self._scaler.unscale_(optimizer)
            except (AssertionError, ValueError) as error:
                raise _explain_error(error, optimizer) from error
        self._unscaled[id(optimizer)] = optimizer
        if self._overflow_sync is not None:
            self._sync_overflow(optimizer, self._overflow_sync)

    def note_cleared(self, optimizer: torch.optim.Optimizer) -> None:
        """Take a step that will not come as done: its gradients were unscaled, and then cleared.

        Those of the next backward have a scale again; an overflow of the ones before lowers it all the same.
        """
        if self._unscaled.pop(id(optimizer), None) is not None:
            self._note_done()

    def _note_done(self) -> None:
        self._stepped = True
        if isinstance(self._scaler, _SyncedGradScaler):
            self._scaler.is_update_due = not self._unscaled

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
        if closure is not None:
            cause = "mixed_precision='fp16'" if precision == "fp16" else "a gradient scaler"
            raise PrepareError(
                f"optimizer.step(closure) does not go with {cause}",
                why="the closure would run backward on a loss that is not scaled",
                fix="use mixed_precision='bf16' or an optimizer that needs no closure",
            )
        if self._overflow_sync is not None:
            self.unscale(optimizer)
        own = self._scaler if isinstance(self._scaler, _SyncedGradScaler) else None
        if own is not None:
            own.has_overflowed = None
        try:
            result = self._scaler.step(optimizer)
        except (AssertionError, ValueError) as error:
            raise _explain_error(error, optimizer) from error
        self._unscaled.pop(id(optimizer), None)
        self._note_done()
        if own is not None and own.has_overflowed is not None:
            stepped: bool | torch.Tensor = not own.has_overflowed
        else:
            first, *others = self._scaler._found_inf_per_device(optimizer).values()
            for flag in others:
                first = first + flag.to(first.device, non_blocking=True)
            stepped = first == 0
        if self._updates_at_once():
            self.update_scale()
        return stepped, result

    def update_scale(self) -> None:
        """Update the scale after the steps taken since the last update, unless more of them are to come."""
        if not self._stepped or self._unscaled:
            return
        self._stepped = False
        if not isinstance(self._scaler, _SyncedGradScaler) or self._scaler.is_update_due:
            self._scaler.update()


def _explain_error(error: Exception, optimizer: torch.optim.Optimizer) -> Exception:
    """Return an error with a cause and a fix for an error of torch's scaler, or the same error."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not grads:
        return PrepareError(
            "a step, or unscaling, of an optimizer none of whose parameters has a gradient",
            why="no backward has run since the last step, or the optimizer was made for other parameters",
            fix="call accelerator.backward(loss) first, and make the optimizer from the prepared model's "
            "parameters()",
        )
    if any(grad.dtype == torch.float16 for grad in grads):
        return PrepareError(
            "float16 gradients cannot be unscaled",
            why="trained parameters are float16, and mixed precision keeps float32 weights",
            fix="load the model in float32 (model.float()): mixed_precision='fp16' computes in float16 by "
            "itself",
        )
    return error


class Float16(HalfPrecisionAutocast):
    """Autocast to float16; the loss is scaled so that small gradients do not underflow."""

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16
    handler_classes: ClassVar[tuple[type[KwargsHandler], ...]] = (AutocastKwargs, GradScalerKwargs)

    def __init__(self, device: Device, handlers: Mapping[type, KwargsHandler] | None = None) -> None:
        super().__init__(device, handlers)
        options = self.handlers.get(GradScalerKwargs) or GradScalerKwargs()
        self.set_loss_scaling(LossScaling(_SyncedGradScaler(device.type, **options.to_kwargs())))

    def check_trainable(self, named: Iterable[tuple[str, torch.Tensor]], *, strict: bool) -> None:
        """Warn of float16 parameters: torch does not unscale their gradients, and the first step fails.

        Programs replace the scaler's ``_unscale_grads_`` to train them all the same (``--full_fp16`` of
        sd-scripts and others), which is not known before that step.

        Raises:
            PrepareError: the run is strict, and a trained parameter is float16 itself; it is named.
        """
        if self.loss_scaling is None or not self.loss_scaling.is_enabled:
            return
        halves = [name for name, tensor in named if tensor.requires_grad and tensor.dtype == torch.float16]
        if halves:
            more = f" and {len(halves) - 3} more" if len(halves) > 3 else ""
            error = PrepareError(
                f"trained parameters are float16 already: {', '.join(halves[:3])}{more}",
                why="mixed precision keeps float32 weights, and float16 gradients cannot be unscaled",
                fix="load the model in float32 (model.float()), or use mixed_precision='bf16' or 'no'",
            )
            if strict:
                raise error
            if worlds.get_rank_info()[0] == 0:
                warn_user(
                    f"{error.what}; the first step will fail, unless the program makes the scaler take their "
                    f"gradients: {error.why}; {error.fix}"
                )


PLUGIN = Float16
