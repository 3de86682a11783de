"""Data parallelism on PyTorch/XLA: each process holds the model, and one all-reduce averages the gradients.

The all-reduce is recorded with the backward and becomes a part of the graph of the step, in which XLA
overlaps it with computation. So there are no buckets, and nothing here waits for the device.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate.strategy.base import (
    BatchPlacement,
    PrepareBundle,
    PrepareStep,
    Strategy,
    StrategyRequest,
    StrategySelection,
)
from accelerate.strategy.protocol.gradient_sync import OpenGradients, ZeroBackward
from accelerate.world import collective


class XLADataParallel(OpenGradients, BatchPlacement, Strategy):
    """Training of one process, or of several that average gradients, on devices of PyTorch/XLA.

    One process has run on the CPU client of torch_xla 2.9, which has no collectives between processes:
    several are tested with a fake all-reduce. Source: PyTorch/XLA documentation, "API guide", "all_reduce".
    """

    name: ClassVar[str] = "xla"
    selection: ClassVar[StrategySelection] = StrategySelection(device_type="xla")
    replicates_model: ClassVar[bool] = True
    priority: ClassVar[int] = 2
    hardware_tested: ClassVar[bool] = False

    def __init__(self, request: StrategyRequest) -> None:
        super().__init__(request)
        # In the order of their `prepare`, which all ranks share.
        self._models: list[weakref.ref[nn.Module]] = []
        self._local_models: set[int] = set()

    def prepare_steps(self, bundle: PrepareBundle) -> Iterator[PrepareStep]:
        """Return the step that makes the models equal on several processes."""
        if self.world.size > 1 and bundle.training and bundle.objects_of("model"):
            reason = f"{self.world.size} processes average their gradients after backward"
            yield PrepareStep("replicate", reason, self._replicate_models)

    def _replicate_models(self, bundle: PrepareBundle) -> None:
        self._models = [known for known in self._models if known() is not None]
        for model in bundle.objects_of("model"):
            if all(known() is not model for known in self._models):
                self._models.append(weakref.ref(model))
                collective.broadcast([*model.parameters(), *model.buffers()])

    def batch_placer_for(self, loader: Any) -> Callable[[Any], Any] | None:
        """Make a prepared loader an ``MpDeviceLoader`` of torch_xla too: programs for TPUs ask for one.

        It moves batches and ends steps itself. ``_parallel_loader_kwargs`` is where they say how SPMD shards.
        """
        if not hasattr(loader, "_parallel_loader_kwargs"):
            loader.__class__ = _loader_class(type(loader))
            loader._parallel_loader_kwargs = {}
        return None

    # --- the loop

    @contextmanager
    def accumulation_context(self, models: Iterable[nn.Module], *, sync: bool) -> Generator[None]:
        """Return a context in which gradients of ``models`` stay local, where ``sync`` is False."""
        local = set() if sync else {id(model) for model in models} - self._local_models
        self._local_models |= local
        try:
            yield
        finally:
            self._local_models -= local

    def reduces_gradients(self, model: nn.Module) -> bool:
        """Return whether no ``no_sync`` is active."""
        return id(model) not in self._local_models

    def backward(self, loss: torch.Tensor, *, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Run the backward, and average gradients over the processes."""
        loss.backward(**kwargs)
        self._average_gradients()

    def backward_zero(self, zero: ZeroBackward) -> None:
        """Run a backward that adds zero, and take part in the average of the others."""
        super().backward_zero(zero)
        self._average_gradients()

    def _average_gradients(self) -> None:
        """Average all gradients in one all-reduce.

        The graph is the same on all ranks whatever each has used: a parameter without a gradient counts with
        zeros, and gets one, since to ask the other ranks would wait for the device.
        """
        if self.world.size == 1 or self.local_training:
            return
        models = [model for known in self._models if (model := known()) is not None]
        reduced = [model for model in models if self.reduces_gradients(model)]
        parameters = {p: None for model in reduced for p in model.parameters() if p.requires_grad}
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if parameters:
            functions = importlib.import_module("torch_xla.core.xla_model")
            gradients = [parameter.grad for parameter in parameters]
            functions.all_reduce(functions.REDUCE_SUM, gradients, scale=1.0 / self.world.size)


@functools.cache
def _loader_class(kind: type) -> type:
    """Return the class of a prepared loader that is torch_xla's too, by the name that it has in 1.x."""
    parallel_loader = importlib.import_module("torch_xla.distributed.parallel_loader")
    return type("MpDeviceLoaderWrapper", (kind, parallel_loader.MpDeviceLoader), {})


PLUGIN = XLADataParallel
