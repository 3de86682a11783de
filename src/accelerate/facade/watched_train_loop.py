"""The train loop of a run that is recorded, or whose numbers are watched."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate.checkpoint.state_dict_files import is_distributed
from accelerate.facade.numerics_monitor import NumericsMonitor
from accelerate.facade.preparer import PreparedObjects
from accelerate.facade.run_recorder import RunRecorder
from accelerate.facade.runtime import Runtime
from accelerate.facade.train_loop import TrainLoop

_SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class WatchedTrainLoop(TrainLoop):
    """A train loop whose backward a recorder times, and whose losses and norms a monitor sees.

    Args:
        runtime, prepared: as for ``TrainLoop``.
        recorder: of the run, if it is recorded.
        checks_numerics: losses and gradients are watched.
    """

    def __init__(
        self,
        runtime: Runtime,
        prepared: PreparedObjects,
        recorder: RunRecorder | None,
        checks_numerics: bool,
    ) -> None:
        super().__init__(runtime, prepared)
        self._recorder, self._runtime = recorder, runtime
        self._monitor: NumericsMonitor | None = None
        if recorder is not None:
            prepared.on_add += [recorder.watch, self._record_model]
            if checks_numerics:
                recorder.compare_ranks()
        if checks_numerics:
            self._monitor = NumericsMonitor(runtime.world, runtime.strategy, recorder)
            prepared.on_add.append(self._monitor.watch)

    def _record_model(self, kind: str, item: Any) -> None:
        if kind == "model" and self._recorder is not None and self.world.rank == 0:
            self._recorder.record_event({"model": describe_model(self._runtime, item)})

    def backward(self, loss: torch.Tensor, num_items: Any, kwargs: dict[str, Any]) -> None:
        """Run the backward pass, and check the loss; the mean of no items does not count."""
        if self._recorder is not None:
            self._recorder.begin_backward()
        if self._monitor is None or not isinstance(loss, torch.Tensor):
            super().backward(loss, num_items, kwargs)
            return
        seen = loss.detach()
        if self.engine is not None:
            seen = seen.clone()  # it may scale the loss in place
        super().backward(loss, num_items, kwargs)
        if num_items is None or bool(num_items != 0):
            self._monitor.check_loss(seen)

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip, and keep the norm for the record of the step."""
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = super().clip_grad_norm(params, max_norm, norm_type)
        if self._monitor is not None and self.gradients.sync_gradients and norm_type == 2:
            self._monitor.note_norm(params, norm)
        return norm


def describe_model(runtime: Runtime, model: nn.Module) -> dict[str, Any]:
    """Return the parameters of a prepared model, the format of its products and the peak of the device in it.

    A report turns tokens into floating point operations by them.

    Nothing where this rank does not see the whole model: a stage of a pipeline, flat parameters of FSDP1, the
    partitions of an engine.
    """
    strategy = runtime.strategy
    params = list(model.parameters())
    is_sharded = any(is_distributed(p) for p in params)
    has_stages = strategy.mesh is not None and "pp" in (strategy.mesh.mesh_dim_names or ())
    if strategy.owns_step or has_stages or (strategy.shards_params and not is_sharded):
        return {}
    total = sum(p.numel() for p in params)
    weights = {_SHORT_NAMES.get(p.dtype, str(p.dtype)) for p in params}
    dtype = runtime.precision.name
    if dtype == "no":
        dtype = weights.pop() if len(weights) == 1 else "mixed"
    hardware, index = runtime.world.hardware, runtime.world.device.index
    return {
        "parameters": total,
        "trained": sum(p.numel() for p in params if p.requires_grad),
        "format": dtype,
        "device": hardware.name(index),
        "peak_flops": hardware.find_peak_flops(dtype, index),
        "processes": runtime.world.size,
    }
