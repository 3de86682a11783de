"""A second tree of a model's modules: the user's forward, without the layers that it calls.

It rehearses a forward without values, and runs the code between the blocks, a loss at the end for example,
over a whole batch. It shares everything with the model but parameters, buffers, children and hooks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accelerate.strategy.parallelism.pipeline_plan import Block, Rehearsal, Trail, become

# What torch keeps in every module; of it, a twin has its own.
_TORCHS = frozenset(vars(nn.Module())) - {"training"}


class Twin:
    """The second tree.

    Args:
        model: whole, before any of its modules is changed.
        blocks: names of the modules that are called as a whole.
        device: where the model computes.
        mode: of all tensors without values.

    Attributes:
        root: the second model.
        loose: (module, its twin, label) of every parameter between the blocks.
    """

    def __init__(
        self, model: nn.Module, blocks: Collection[str], device: torch.device, mode: FakeTensorMode
    ) -> None:
        self.mode, self.device = mode, device
        self._now: Any = None
        self._dtype: torch.dtype | None = None
        self._fakes: dict[int, torch.Tensor] = {}
        self._twins: dict[int, nn.Module] = {}
        self.weights: dict[str, torch.Tensor] = {}
        # (module, its twin): those inside of blocks, and the others.
        self._inside: list[tuple[nn.Module, nn.Module]] = []
        self._between: list[tuple[nn.Module, nn.Module]] = []
        self.loose: list[tuple[nn.Module, nn.Module, str]] = []
        inner = {id(part) for name in blocks for part in model.get_submodule(name).modules()}
        self.root = self._twin(model, inner)
        self.loose += [(m, t, n) for m, t in self._between for n, p in t._parameters.items() if p is not None]
        for name in blocks:
            block = self.root.get_submodule(name)
            for label, weight in block.named_parameters():
                self.weights.setdefault(f"{name}.{label}", weight)
            become(block, Block, _conductor=self, _block_name=name)

    def _twin(self, module: nn.Module, inner: Collection[int]) -> nn.Module:
        if id(module) in self._twins:
            return self._twins[id(module)]
        twin: nn.Module = object.__new__(type(module))
        self._twins[id(module)] = twin
        mine = dict(vars(module))
        mine.update(
            {name: value.copy() for name, value in mine.items() if name in _TORCHS and hasattr(value, "copy")}
        )
        vars(twin).update(mine)
        inside = id(module) in inner
        (self._inside if inside else self._between).append((module, twin))
        twin._parameters = {n: self._fake(p) for n, p in module._parameters.items()}  # type: ignore[assignment]
        if inside:
            twin._buffers = {n: self._fake(b) for n, b in module._buffers.items()}
        twin._modules = {n: None if m is None else self._twin(m, inner) for n, m in module._modules.items()}
        return twin

    def _fake(self, tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        if id(tensor) not in self._fakes:
            with self.mode:
                like: torch.Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
                if isinstance(tensor, nn.Parameter):
                    like = nn.Parameter(like, tensor.requires_grad)
            self._fakes[id(tensor)] = like
        return self._fakes[id(tensor)]

    def _convert(self, dtype: torch.dtype | None) -> None:
        """Gives the stand-ins of weights the type that these have in a forward."""
        self._dtype = dtype
        made: dict[int, Any] = {}
        for _, twin in [*self._inside, *self._between]:
            for label, old in twin._parameters.items():
                if old is None or not old.is_floating_point():
                    continue
                if id(old) not in made:
                    with self.mode:
                        made[id(old)] = nn.Parameter(torch.empty_like(old, dtype=dtype), old.requires_grad)
                twin._parameters[label] = made[id(old)]
        self.weights = {name: made.get(id(old), old) for name, old in self.weights.items()}

    @property
    def inside(self) -> bool:
        """Whether a block runs just now, in a forward without values."""
        return isinstance(self._now, Rehearsal) and self._now.marks.quiet > 0

    def block(self, name: str, run: Any, args: Any, kwargs: Any) -> Any:
        """A call of a block's twin."""
        return self._now.block(name, run, args, kwargs)

    def rehearse(
        self, stage_of: Mapping[str, int], stages: int, args: Any, kwargs: Any, dtype: torch.dtype | None
    ) -> Trail:
        """A forward without values; draws nothing.

        Args:
            dtype: of the weights in a forward; None: their own.

        Raises:
            PrepareError: see ``Rehearsal.run``.
        """
        if dtype != self._dtype:
            self._convert(dtype)
        devices = [] if self.device.type == "cpu" else [self.device]
        rehearsal = Rehearsal(stage_of, stages)
        with self._conducted(rehearsal), torch.random.fork_rng(devices=devices):
            _follow([*self._inside, *self._between])
            return rehearsal.run(self.root, self.weights, args, kwargs)

    def run(self, conductor: Any, args: Any, kwargs: Any, loose: Sequence[torch.Tensor]) -> Any:
        """A forward whose blocks give what ``conductor`` says.

        Args:
            loose: the values of the parameters between the blocks.
        """
        _follow(self._between)
        fakes = [twin._parameters[label] for _, twin, label in self.loose]
        self._put(loose)
        try:
            with self._conducted(conductor):
                return self.root(*args, **kwargs)
        finally:
            self._put(fakes)

    def _put(self, values: Sequence[Any]) -> None:
        for (_, twin, label), value in zip(self.loose, values, strict=True):
            twin._parameters[label] = value

    @contextmanager
    def _conducted(self, conductor: Any) -> Iterator[None]:
        before, self._now = self._now, conductor
        try:
            yield
        finally:
            self._now = before


def _follow(pairs: list[tuple[nn.Module, nn.Module]]) -> None:
    """Brings the twins up to what was assigned to the modules since."""
    for live, twin in pairs:
        own = _TORCHS | twin._parameters.keys() | twin._buffers.keys() | {"_conductor", "_block_name"}
        vars(twin).update({name: value for name, value in vars(live).items() if name not in own})
        if not any(getattr(b, "fake_mode", None) for b in twin._buffers.values()):
            twin._buffers.update(live._buffers)
