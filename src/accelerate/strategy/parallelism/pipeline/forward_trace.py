"""Trace one forward on fake tensors, to find the tensors that pipeline stages exchange.

A model is cut between blocks, modules that are called as a whole. The code around the blocks (masks,
residual sums, a loss at the end) runs on every stage, with values where it can: all stages have the batch.
So what a stage needs from those before it are outputs of blocks, and this file finds which.

The tracer runs the user's forward on a shadow of the model whose blocks have weights without values
(torch's FakeTensorMode): what comes out of a block has a shape and no values, and so has what is computed
from it. Each such tensor is followed through the code between the blocks.
"""

# torch's dispatcher is untyped: what is unknown is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.core import tree
from accelerate.core.errors import PrepareError
from accelerate.core.torch_internals import require
from accelerate.stages.split import flatten_tree

require("fake tensors")

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

# Attributes that torch keeps in every module; a shadow has its own.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}


class BlockOutputKey(NamedTuple):
    """An output tensor of a block: the number of the call, and the position among its outputs."""

    call: int
    position: int


class TensorMeta(NamedTuple):
    """Shape, dtype and ``requires_grad`` of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class TracedBlockCall:
    """One call of a block.

    Attributes:
        block: its name.
        stage: the stage that computes it.
        form: of its outputs, without the tensors.
        metas: of these.
        dependencies: the values that its arguments depend on.
    """

    block: str
    stage: int
    form: Any
    metas: tuple[TensorMeta, ...]
    dependencies: frozenset[BlockOutputKey]


@dataclass(frozen=True)
class PipelineForwardTrace:
    """The trace of one forward: the block calls in order, and the block outputs that its result depends on.

    ``result`` is what it gave, without values.
    """

    calls: tuple[TracedBlockCall, ...]
    result_inputs: tuple[BlockOutputKey, ...]
    stages: int
    result: Any

    def meta(self, value: BlockOutputKey) -> TensorMeta:
        """Return shape and dtype of a block output."""
        return self.calls[value.call].metas[value.position]

    def stage_inputs(self, stage: int) -> tuple[BlockOutputKey, ...]:
        """Return the inputs of a stage: made before it, and needed by it or by a later one."""
        return self._inputs_by_stage[stage]

    def is_used_in_own_stage(self, value: BlockOutputKey) -> bool:
        """Return whether the stage that computes a block output uses it outside the block."""
        return self.calls[value.call].stage in self._stages_using.get(value, ())

    # Asked in every micro-batch, so computed once: it takes time for each call and each stage.
    @cached_property
    def _inputs_by_stage(self) -> list[tuple[BlockOutputKey, ...]]:
        inputs: list[list[BlockOutputKey]] = [[] for _ in range(self.stages)]
        for value, users in sorted(self._stages_using.items()):
            last = self.stages - 1 if value in self.result_inputs else max(users)
            for stage in range(self.calls[value.call].stage + 1, last + 1):
                inputs[stage].append(value)
        return [tuple(values) for values in inputs]

    @cached_property
    def _stages_using(self) -> dict[BlockOutputKey, set[int]]:
        """The stages whose blocks use each block output; result inputs are always listed."""
        stages: dict[BlockOutputKey, set[int]] = {value: set() for value in self.result_inputs}
        for call in self.calls:
            for value in call.dependencies:
                stages.setdefault(value, set()).add(call.stage)
        return stages


class PipelineBlockCallInterceptor:
    """The first base class of every block: its calls go through the runner."""

    _runner: Any
    _block_name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pass the call to the runner."""
        run = super().__call__  # type: ignore[misc]
        return self._runner.call_block(self._block_name, run, args, kwargs)


_CLASSES: dict[tuple[type, type], type] = {}


def add_base_class(module: nn.Module, base: type, **attributes: Any) -> None:
    """Give ``module`` a class that begins with ``base``, and ``attributes``; the name of the class stays."""
    module_class = type(module)
    if (base, module_class) not in _CLASSES:
        names = {
            "__module__": module_class.__module__,
            "__qualname__": module_class.__qualname__,
            "__doc__": module_class.__doc__,
        }
        _CLASSES[base, module_class] = type(module_class.__name__, (base, module_class), names)
    module.__class__ = _CLASSES[base, module_class]
    vars(module).update(attributes)


class _BlockDependencyMode(TorchDispatchMode):
    """A dispatch mode that tracks which block outputs a tensor depends on, outside of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.origins: Any = WeakIdKeyDictionary()
        self.paused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(func) == "aten._grouped_mm.default":  # torch's meta kernel refuses types that its kernels take
            halves = [matrix.bfloat16() for matrix in args[:2]]
            output = func(*halves, *args[2:], **kwargs).to(args[0].dtype)
        else:
            output = func(*args, **kwargs)
        if not self.paused:
            came = self.origins_of((args, kwargs))
            if came:
                for leaf in _tensor_leaves(output):
                    self.origins[leaf] = came | self.origins.get(leaf, frozenset())
        return output

    def origins_of(self, values: Any) -> frozenset[Any]:
        """Return the block outputs that any tensor in ``values`` depends on."""
        marks = (self.origins.get(leaf) for leaf in _tensor_leaves(values))
        return frozenset().union(*(mark for mark in marks if mark))


def _tensor_leaves(values: Any) -> Iterable[torch.Tensor]:
    return (leaf for _, leaf in tree.iterate_leaves(values) if isinstance(leaf, torch.Tensor))


class PipelineForwardTracer:
    """Traces a forward of the shadow model.

    Args:
        stage_of: the stage of each block, by its name.
    """

    def __init__(self, stage_of: Mapping[str, int], stages: int) -> None:
        self.stage_of, self.stages = stage_of, stages
        self.tracker = _BlockDependencyMode()
        self.calls: list[TracedBlockCall] = []

    def call_block(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block on fake tensors, and record its dependencies and outputs."""
        if self.tracker.paused:  # inside of another block, which holds it as well
            return run(*args, **kwargs)
        dependencies = self.tracker.origins_of((args, kwargs))
        _refuse_weights(dependencies)
        self.tracker.paused += 1
        try:
            output = run(*args, **kwargs)
        finally:
            self.tracker.paused -= 1
        form, tensors = flatten_tree(output, f"the output of {name} ")
        for place, tensor in enumerate(tensors):
            self.tracker.origins[tensor] = frozenset({BlockOutputKey(len(self.calls), place)})
        metas = tuple(TensorMeta(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        stage = self.stage_of[name]
        if self.calls and stage < self.calls[-1].stage:
            raise _block_order_error(name, stage, self.calls[-1])
        self.calls.append(TracedBlockCall(name, stage, form, metas, dependencies))
        return output

    def trace(
        self, shadow: Callable[..., Any], weights: Mapping[str, torch.Tensor], args: Any, kwargs: Any
    ) -> PipelineForwardTrace:
        """Trace one forward.

        Args:
            shadow: calls the model's twin.
            weights: those of blocks, by their names.

        Raises:
            PrepareError: a block of an early stage runs after one of a late stage, or the code between the
                blocks uses a weight of one, or values that are not there.
        """
        for name, weight in weights.items():
            self.tracker.origins[weight] = frozenset({name})
        try:
            with self.tracker:
                output = shadow(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if type(error).__module__.startswith("torch._subclasses"):
                raise _data_dependent_error(error) from error
            raise
        result_inputs = self.tracker.origins_of(output)
        _refuse_weights(result_inputs)
        return PipelineForwardTrace(tuple(self.calls), tuple(sorted(result_inputs)), self.stages, output)


class FakeTensorModel:
    """The shadow of a model: a second module tree, which runs the user's forward without its layers.

    It traces a forward on fake tensors, and runs the code between the blocks, a loss at the end for example,
    over a whole batch. It shares everything with the model but parameters, buffers, children and hooks.

    Args:
        model: whole, before any of its modules is changed.
        blocks: names of the modules that are called as a whole.
        device: where the model computes.

    Attributes:
        root: the second model.
        outer_weights: (module, its twin, label) of every parameter between the blocks.
    """

    def __init__(self, model: nn.Module, blocks: Collection[str], device: torch.device) -> None:
        self.device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)  # tensors of several modes do not mix
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
            with self._mode:
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
                    with self._mode:
                        cast_params[id(old)] = nn.Parameter(
                            torch.empty_like(old, dtype=dtype), old.requires_grad
                        )
                shadow._parameters[label] = cast_params[id(old)]
        self.weights = {name: cast_params.get(id(old), old) for name, old in self.weights.items()}

    def make_fake(self, meta: TensorMeta) -> torch.Tensor:
        """Make a fake tensor in place of one that another stage computes."""
        with self._mode:
            return torch.empty(meta.shape, dtype=meta.dtype, device=self.device)

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
        with self._use_handler(tracer), torch.random.fork_rng(devices, device_type=self.device.type):
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


def is_fake(value: Any) -> bool:
    """Return whether a value is a fake tensor."""
    return isinstance(value, FakeTensor)


def _refuse_weights(dependencies: frozenset[Any]) -> None:
    name = next((need for need in dependencies if isinstance(need, str)), None)
    if name is not None:
        module = name.rpartition(".")[0]
        raise PrepareError(
            f"the forward uses the weight {name} outside of the module that holds it",
            why="that module is on one stage of the pipeline, and the code between modules runs on all",
            fix=f"PipelineParallelConfig(on_all_stages=[{module!r}]), or call the module",
        )


def _block_order_error(name: str, stage: int, before: TracedBlockCall) -> PrepareError:
    return PrepareError(
        f"{name} is on stage {stage} of the pipeline, and is called after {before.block} of stage "
        f"{before.stage}",
        why="a batch passes through the stages once; split_points='auto' takes modules in the order in which "
        "they were defined",
        fix="give PipelineParallelConfig(split_points=[...]) the first module of each stage but the first so "
        "that they run in that order, or on_all_stages=[...] a small module that several stages call",
    )


def _data_dependent_error(error: Exception) -> PrepareError:
    lines = str(error).strip().splitlines() or [""]
    return PrepareError(
        "the model's forward looks at values that are on another stage of the pipeline",
        why=f"torch says: {type(error).__name__}: {lines[0]}",
        fix="write the part between the layers that depends on values as torch operations (torch.where), or "
        "move it into a module",
    )
