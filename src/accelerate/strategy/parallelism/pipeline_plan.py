"""What travels between the stages of a model: found by one forward on tensors without values.

A model is cut between blocks, modules that are called as a whole. The code around the blocks (masks,
residual sums, a loss at the end) runs on every stage, with values where it can: all stages have the batch.
So what a stage needs from those before it are outputs of blocks, and this file finds which.

The rehearsal runs the user's forward on a twin of the model whose blocks have weights without values
(torch's FakeTensorMode): what comes out of a block has a shape and no values, and so has what is computed
from it. Each such tensor is followed through the code between the blocks.
"""

# torch's dispatcher is untyped: what is unknown is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.core import tree
from accelerate.core.errors import PrepareError
from accelerate.stages import forms


class Value(NamedTuple):
    """A tensor among the outputs of blocks: the number of the call that made it, and its place in them."""

    call: int
    place: int


class Meta(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Call:
    """One call of a block.

    Attributes:
        block: its name.
        stage: the stage that computes it.
        form: of its outputs, without the tensors.
        metas: of these.
        needs: the values that its arguments depend on.
    """

    block: str
    stage: int
    form: Any
    metas: tuple[Meta, ...]
    needs: frozenset[Value]


@dataclass(frozen=True)
class Trail:
    """One forward: the calls of blocks in their order, and the values that its result depends on.

    ``result`` is what it gave, without values.
    """

    calls: tuple[Call, ...]
    tail: tuple[Value, ...]
    stages: int
    result: Any

    def meta(self, value: Value) -> Meta:
        """Shape and type of a value."""
        return self.calls[value.call].metas[value.place]

    def border(self, stage: int) -> tuple[Value, ...]:
        """The values that come into a stage: made before it, and needed by it or by a later one."""
        return tuple(sorted(v for v in self._users if self.calls[v.call].stage < stage <= self._last(v)))

    def inside(self, value: Value) -> bool:
        """Whether the stage that makes a value needs it itself."""
        return self.calls[value.call].stage in self._users[value] if value in self._users else False

    def _last(self, value: Value) -> int:
        return max(self.stages - 1 if value in self.tail else 0, *self._users[value], 0)

    @property
    def _users(self) -> dict[Value, set[int]]:
        """The stages whose blocks need a value; of those in the tail, also if there is none."""
        found: dict[Value, set[int]] = {value: set() for value in self.tail}
        for call in self.calls:
            for value in call.needs:
                found.setdefault(value, set()).add(call.stage)
        return found


class Block:
    """The first base of the class of every block: its calls go through the conductor."""

    _conductor: Any
    _block_name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A forward, by whoever conducts."""
        run = super().__call__  # type: ignore[misc]
        return self._conductor.block(self._block_name, run, args, kwargs)


_CLASSES: dict[tuple[type, type], type] = {}


def become(module: nn.Module, base: type, **marks: Any) -> None:
    """Gives ``module`` a class that begins with ``base``, and ``marks`` as attributes; its name stays."""
    own = type(module)
    if (base, own) not in _CLASSES:
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
        _CLASSES[base, own] = type(own.__name__, (base, own), names)
    module.__class__ = _CLASSES[base, own]
    vars(module).update(marks)


class _Marks(TorchDispatchMode):
    """Follows values through operations, outside of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Any = WeakIdKeyDictionary()
        self.quiet = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if not self.quiet:
            came = self.of((args, kwargs))
            if came:
                for leaf in _tensors(output):
                    self.found[leaf] = came | self.found.get(leaf, frozenset())
        return output

    def of(self, values: Any) -> frozenset[Any]:
        """What any tensor in ``values`` depends on."""
        marks = (self.found.get(leaf) for leaf in _tensors(values))
        return frozenset().union(*(mark for mark in marks if mark))


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return (leaf for _, leaf in tree.leaves(values) if isinstance(leaf, torch.Tensor))


class Rehearsal:
    """Conducts a forward of the twin.

    Args:
        stage_of: the stage of each block, by its name.
    """

    def __init__(self, stage_of: Mapping[str, int], stages: int) -> None:
        self.stage_of, self.stages = stage_of, stages
        self.marks = _Marks()
        self.calls: list[Call] = []

    def block(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Lets a block run, and writes down what went in and came out."""
        if self.marks.quiet:  # inside of another block, which holds it as well
            return run(*args, **kwargs)
        needs = self.marks.of((args, kwargs))
        _refuse_weights(needs)
        self.marks.quiet += 1
        try:
            output = run(*args, **kwargs)
        finally:
            self.marks.quiet -= 1
        form, tensors = forms.take_apart(output, f"the output of {name} ")
        for place, tensor in enumerate(tensors):
            self.marks.found[tensor] = frozenset({Value(len(self.calls), place)})
        metas = tuple(Meta(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        stage = self.stage_of[name]
        if self.calls and stage < self.calls[-1].stage:
            raise _out_of_order(name, stage, self.calls[-1])
        self.calls.append(Call(name, stage, form, metas, needs))
        return output

    def run(
        self, twin: Callable[..., Any], weights: Mapping[str, torch.Tensor], args: Any, kwargs: Any
    ) -> Trail:
        """One forward.

        Args:
            twin: calls the model's twin.
            weights: those of blocks, by their names.

        Raises:
            PrepareError: a block of an early stage runs after one of a late stage, or the code between the
                blocks uses a weight of one, or values that are not there.
        """
        for name, weight in weights.items():
            self.marks.found[weight] = frozenset({name})
        try:
            with self.marks:
                output = twin(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if type(error).__module__.startswith("torch._subclasses"):
                raise _looks_at_values(error) from error
            raise
        tail = self.marks.of(output)
        _refuse_weights(tail)
        return Trail(tuple(self.calls), tuple(sorted(tail)), self.stages, output)


def fake_mode() -> FakeTensorMode:
    """One for each model: tensors of several do not mix."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake(mode: FakeTensorMode, meta: Meta, device: torch.device) -> torch.Tensor:
    """A tensor without values."""
    with mode:
        return torch.empty(meta.shape, dtype=meta.dtype, device=device)


def is_fake(value: Any) -> bool:
    """Whether it is a tensor without values."""
    return isinstance(value, FakeTensor)


def _refuse_weights(needs: frozenset[Any]) -> None:
    name = next((need for need in needs if isinstance(need, str)), None)
    if name is not None:
        module = name.rpartition(".")[0]
        raise PrepareError(
            f"the forward uses the weight {name} outside of the module that holds it",
            why="that module is on one stage of the pipeline, and the code between modules runs on all",
            fix=f"PipelineParallelConfig(on_all_stages=[{module!r}]), or call the module",
        )


def _out_of_order(name: str, stage: int, before: Call) -> PrepareError:
    return PrepareError(
        f"{name} is on stage {stage} of the pipeline, and is called after {before.block} of stage "
        f"{before.stage}",
        why="a batch passes through the stages once; split_points='auto' takes modules in the order in which "
        "they were defined",
        fix="give PipelineParallelConfig(split_points=[...]) the first module of each stage but the first so "
        "that they run in that order, or on_all_stages=[...] a small module that several stages call",
    )


def _looks_at_values(error: Exception) -> PrepareError:
    lines = str(error).strip().splitlines() or [""]
    return PrepareError(
        "the model's forward looks at values that are on another stage of the pipeline",
        why=f"torch says: {type(error).__name__}: {lines[0]}",
        fix="write the part between the layers that depends on values as torch operations (torch.where), or "
        "move it into a module",
    )
