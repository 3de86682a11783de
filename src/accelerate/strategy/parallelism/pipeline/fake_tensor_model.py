"""The shadow of a model: a second module tree that runs the user's forward without its layers.

It traces a forward on fake tensors, and runs the code between the blocks, a loss at the end for example,
over a whole batch. It shares everything with the model but parameters, buffers, children and hooks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accelerate.strategy.parallelism.pipeline.forward_trace import (
    FakeTensorMode,
    PipelineBlockCallInterceptor,
    PipelineForwardTrace,
    PipelineForwardTracer,
    add_base_class,
)

# Attributes that torch keeps in every module; a shadow has its own.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}


class FakeTensorModel:
    """The second module tree of a model.

    Args:
        model: whole, before any of its modules is changed.
        blocks: names of the modules that are called as a whole.
        device: where the model computes.
        mode: the FakeTensorMode of all its fake tensors.

    Attributes:
        root: the second model.
        outer_weights: (module, its twin, label) of every parameter between the blocks.
    """

    def __init__(
        self, model: nn.Module, blocks: Collection[str], device: torch.device, mode: FakeTensorMode
    ) -> None:
        self.mode, self.device = mode, device
        self._call_handler: Any = None
        self._dtype: torch.dtype | None = None
        self._fakes: dict[int, torch.Tensor] = {}
        self._shadows: dict[int, nn.Module] = {}
        self.weights: dict[str, torch.Tensor] = {}
        # (module, its twin): those inside of blocks, and the others.
        self._block_modules: list[tuple[nn.Module, nn.Module]] = []
        self._outer_modules: list[tuple[nn.Module, nn.Module]] = []
        self.outer_weights: list[tuple[nn.Module, nn.Module, str]] = []
        inner = {id(part) for name in blocks for part in model.get_submodule(name).modules()}
        self.root = self._shadow_of(model, inner)
        self.outer_weights += [
            (m, t, n) for m, t in self._outer_modules for n, p in t._parameters.items() if p is not None
        ]
        for name in blocks:
            block = self.root.get_submodule(name)
            for label, weight in block.named_parameters():
                self.weights.setdefault(f"{name}.{label}", weight)
            add_base_class(block, PipelineBlockCallInterceptor, _runner=self, _block_name=name)

    def _shadow_of(self, module: nn.Module, inner: Collection[int]) -> nn.Module:
        if id(module) in self._shadows:
            return self._shadows[id(module)]
        shadow: nn.Module = object.__new__(type(module))
        self._shadows[id(module)] = shadow
        attributes = dict(vars(module))
        attributes.update(
            {
                name: value.copy()
                for name, value in attributes.items()
                if name in _MODULE_ATTRIBUTES and hasattr(value, "copy")
            }
        )
        vars(shadow).update(attributes)
        inside = id(module) in inner
        (self._block_modules if inside else self._outer_modules).append((module, shadow))
        shadow._parameters = {n: self._fake_like(p) for n, p in module._parameters.items()}  # type: ignore[assignment]
        if inside:
            shadow._buffers = {n: self._fake_like(b) for n, b in module._buffers.items()}
        shadow._modules = {
            n: None if m is None else self._shadow_of(m, inner) for n, m in module._modules.items()
        }
        return shadow

    def _fake_like(self, tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        if id(tensor) not in self._fakes:
            with self.mode:
                like: torch.Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
                if isinstance(tensor, nn.Parameter):
                    like = nn.Parameter(like, tensor.requires_grad)
            self._fakes[id(tensor)] = like
        return self._fakes[id(tensor)]

    def _cast_weights(self, dtype: torch.dtype | None) -> None:
        """Cast the fake weights to the dtype that the weights have in a forward."""
        self._dtype = dtype
        cast_params: dict[int, Any] = {}
        for _, shadow in [*self._block_modules, *self._outer_modules]:
            for label, old in shadow._parameters.items():
                if old is None or not old.is_floating_point():
                    continue
                if id(old) not in cast_params:
                    with self.mode:
                        cast_params[id(old)] = nn.Parameter(
                            torch.empty_like(old, dtype=dtype), old.requires_grad
                        )
                shadow._parameters[label] = cast_params[id(old)]
        self.weights = {name: cast_params.get(id(old), old) for name, old in self.weights.items()}

    @property
    def is_inside_block(self) -> bool:
        """Return whether a block runs just now, in a traced forward."""
        return isinstance(self._call_handler, PipelineForwardTracer) and self._call_handler.tracker.paused > 0

    def call_block(self, name: str, run: Any, args: Any, kwargs: Any) -> Any:
        """Handle a call of a block's shadow."""
        return self._call_handler.call_block(name, run, args, kwargs)

    def trace(
        self, stage_of: Mapping[str, int], stages: int, args: Any, kwargs: Any, dtype: torch.dtype | None
    ) -> PipelineForwardTrace:
        """Trace a forward on fake tensors; the RNG state stays as it was.

        Args:
            dtype: of the weights in a forward; None: their own.

        Raises:
            PrepareError: see ``PipelineForwardTracer.trace``.
        """
        if dtype != self._dtype:
            self._cast_weights(dtype)
        devices = [] if self.device.type == "cpu" else [self.device]
        tracer = PipelineForwardTracer(stage_of, stages)
        with self._use_handler(tracer), torch.random.fork_rng(devices=devices):
            _sync_attributes([*self._block_modules, *self._outer_modules])
            return tracer.trace(self.root, self.weights, args, kwargs)

    def run_outer_code(
        self, handler: Any, args: Any, kwargs: Any, outer_weights: Sequence[torch.Tensor]
    ) -> Any:
        """Run the code between the blocks, whose outputs ``handler`` gives.

        Args:
            outer_weights: the values of the parameters between the blocks.
        """
        _sync_attributes(self._outer_modules)
        fakes = [shadow._parameters[label] for _, shadow, label in self.outer_weights]
        self._set_outer_weights(outer_weights)
        try:
            with self._use_handler(handler):
                return self.root(*args, **kwargs)
        finally:
            self._set_outer_weights(fakes)

    def _set_outer_weights(self, values: Sequence[Any]) -> None:
        for (_, shadow, label), value in zip(self.outer_weights, values, strict=True):
            shadow._parameters[label] = value

    @contextmanager
    def _use_handler(self, handler: Any) -> Iterator[None]:
        before, self._call_handler = self._call_handler, handler
        try:
            yield
        finally:
            self._call_handler = before


def _sync_attributes(pairs: list[tuple[nn.Module, nn.Module]]) -> None:
    """Copy attributes that were assigned to the modules since to their shadows."""
    for live, shadow in pairs:
        excluded_names = (
            _MODULE_ATTRIBUTES
            | shadow._parameters.keys()
            | shadow._buffers.keys()
            | {"_runner", "_block_name"}
        )
        vars(shadow).update({name: value for name, value in vars(live).items() if name not in excluded_names})
        if not any(getattr(b, "fake_mode", None) for b in shadow._buffers.values()):
            shadow._buffers.update(live._buffers)
