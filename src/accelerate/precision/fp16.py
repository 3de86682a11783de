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
from accelerate.core.value_types import PositiveInt, PositiveNumber
from accelerate.device.base import Device
from accelerate.precision.autocast import AutocastKwargs, HalfPrecisionAutocast


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
    """Torch's scaler for ranks that hold parts of the gradients: an overflow on one rank counts on all."""

    overflow_sync: Callable[[torch.Tensor], None] | None = None
    # The flags of the last step as the host has read them; None: a fused optimizer reads them on the device.
    has_overflowed: bool | None = None

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


class Float16(HalfPrecisionAutocast):
    """Autocast to float16; the loss is scaled so that small gradients do not underflow."""

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16
    scales_loss: ClassVar[bool] = True
    handler_classes: ClassVar[tuple[type[KwargsHandler], ...]] = (AutocastKwargs, GradScalerKwargs)

    def __init__(self, device: Device, handlers: Mapping[type, KwargsHandler] | None = None) -> None:
        super().__init__(device, handlers)
        options = self.handlers.get(GradScalerKwargs) or GradScalerKwargs()
        self._scaler = _SyncedGradScaler(device.type, **options.to_kwargs())
        self._unscaled: set[int] = set()
        self._stepped = False

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """Torch's gradient scaler."""
        self._update_scale()
        return self._scaler

    def set_overflow_sync(self, agreement: Callable[[torch.Tensor], None] | None) -> None:
        """Set the all-reduce of the overflow flag: a step is skipped on all ranks or on none."""
        self._scaler.overflow_sync = agreement

    def check_trainable(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Refuse float16 parameters: their gradients could not be unscaled.

        Raises:
            PrepareError: a trained parameter is float16 itself; it is named.
        """
        if not self._scaler.is_enabled():
            return
        halves = [name for name, tensor in named if tensor.requires_grad and tensor.dtype == torch.float16]
        if halves:
            more = f" and {len(halves) - 3} more" if len(halves) > 3 else ""
            raise PrepareError(
                f"trained parameters are float16 already: {', '.join(halves[:3])}{more}",
                why="mixed precision keeps float32 weights, and float16 gradients cannot be unscaled",
                fix="load the model in float32 (model.float()), or use mixed_precision='bf16' or 'no'",
            )

    def _explain_error(self, error: Exception, optimizer: torch.optim.Optimizer) -> Exception:
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
                why="trained parameters became float16 after they were prepared",
                fix="keep the weights in float32: mixed_precision='fp16' computes in float16 by itself",
            )
        return error

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by the loss scale."""
        self._update_scale()
        return self._scaler.scale(loss)

    def loss_scale(self) -> float:
        """Return the scaler's current factor."""
        self._update_scale()
        return self._scaler.get_scale()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale once per optimizer and step, however often it is called."""
        if id(optimizer) not in self._unscaled:
            try:
                self._scaler.unscale_(optimizer)
            except (AssertionError, ValueError) as error:
                raise self._explain_error(error, optimizer) from error
            self._unscaled.add(id(optimizer))

    def step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None
    ) -> tuple[bool | torch.Tensor, Any]:
        """Step unless a gradient is not finite; then the scale will be lowered.

        The host waits for the device once, for the flag that decides; not at all with a fused optimizer.
        """
        if closure is not None:
            raise PrepareError(
                "optimizer.step(closure) does not go with mixed_precision='fp16'",
                why="the closure would run backward on a loss that is not scaled",
                fix="use mixed_precision='bf16' or an optimizer that needs no closure",
            )
        if not self._scaler.is_enabled():
            return True, optimizer.step()
        self._scaler.has_overflowed = None
        try:
            result = self._scaler.step(optimizer)
        except (AssertionError, ValueError) as error:
            raise self._explain_error(error, optimizer) from error
        self._unscaled.discard(id(optimizer))
        self._stepped = True
        if self._scaler.has_overflowed is not None:
            return not self._scaler.has_overflowed, result
        first, *others = self._scaler._found_inf_per_device(optimizer).values()
        for flag in others:
            first = first + flag.to(first.device, non_blocking=True)
        return first == 0, result

    def _update_scale(self) -> None:
        """Update the scale after the steps taken since the last backward.

        Not at each step: with several optimizers an update forgets which gradients are unscaled already,
        and those of the next one would be divided twice.
        """
        if self._stepped:
            self._stepped = False
            self._scaler.update()


PLUGIN = Float16
