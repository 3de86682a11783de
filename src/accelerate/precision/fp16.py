"""float16 autocast with a scaled loss.

Source: Micikevicius et al. 2018, "Mixed Precision Training" (arXiv:1710.03740), by torch.amp.GradScaler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from accelerate.core.argument_checks import KwargsHandler, check_arguments
from accelerate.core.errors import PrepareError, list_first, warn_user
from accelerate.core.value_types import PositiveInt, PositiveNumber
from accelerate.device.base import Device
from accelerate.precision.autocast import AutocastKwargs, HalfPrecisionAutocast
from accelerate.precision.loss_scaling import LossScaling, SyncedGradScaler
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


class Float16(HalfPrecisionAutocast):
    """Autocast to float16; the loss is scaled so that small gradients do not underflow."""

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16
    handler_classes: ClassVar[tuple[type[KwargsHandler], ...]] = (AutocastKwargs, GradScalerKwargs)

    def __init__(self, device: Device, handlers: Mapping[type, KwargsHandler] | None = None) -> None:
        super().__init__(device, handlers)
        options = self.handlers.get(GradScalerKwargs) or GradScalerKwargs()
        self.set_loss_scaling(LossScaling(SyncedGradScaler(device.type, **options.to_kwargs())))

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
            error = PrepareError(
                f"trained parameters are float16 already: {list_first(halves)}",
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
