"""Stages of layers, one after another: each process keeps the weights of its own, and a batch passes through.

pipeline_cut.py cuts a model, pipeline_plan.py finds what travels between the stages, pipeline_conductor.py is
what a call of the model does: by pipeline_flow.py, or with its loss by pipeline_losses.py. pipeline_states.py
puts states together. The user's loop stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.core.errors import PrepareError
from accelerate.strategy.base import Bundle, Step
from accelerate.strategy.parallelism.base import Dimension
from accelerate.strategy.parallelism.pipeline_conductor import Conductor, Pipelined
from accelerate.strategy.parallelism.pipeline_cut import Cut, Names, agree, cut_of, keep
from accelerate.strategy.parallelism.pipeline_grads import Shared
from accelerate.strategy.parallelism.pipeline_options import PipelineParallelConfig
from accelerate.strategy.parallelism.pipeline_plan import Block, become
from accelerate.strategy.parallelism.pipeline_states import (
    Record,
    own_model,
    own_optimizer,
    record_of,
    whole_model,
    whole_optimizer,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Pipeline(Dimension):
    """The dimension of stages."""

    name: ClassVar[str] = "pp"
    spreads: ClassVar[bool] = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._cuts: list[Cut] = []
        # Of every parameter that was there before its model was cut, the number of the model with its first
        # name, and the processes that have it; optimizers may still hold it.
        self._named: Any = WeakIdKeyDictionary()
        # Those that other stages have.
        self._gone: Any = WeakIdKeyDictionary()

    @property
    def options(self) -> PipelineParallelConfig:
        """Chunks, schedule, and where models are cut."""
        return self.config.pp_handler or PipelineParallelConfig()

    @cached_property
    def group(self) -> ProcessGroup:
        """The processes that have the stages of one model."""
        return self.mesh["pp"].get_group()

    @property
    def size(self) -> int:
        """How many processes a pipeline has."""
        return self.config._sizes["pp"]

    @property
    def place(self) -> int:
        """This process's among them."""
        return self.config.layout().coordinates(self.world.rank)["pp"]

    def check(self) -> None:
        """Refuses options that do not go together."""
        self.options.settle(self.size)

    # --- prepare

    def steps(self, bundle: Bundle) -> Iterator[Step]:
        """Cut every model, and take from optimizers what other stages have."""
        models = [model for model in dict.fromkeys(bundle.of("model")) if conductor_of(model) is None]
        for model in models if bundle.training else []:
            cut = cut_of(model, self.options, self.size)
            names = Names.of(model, cut)
            before, after = _bytes(model, names, None), _bytes(model, names, self.place)
            yield Step(
                "stages", self._says(cut), lambda b, m=model: self._cut(m, b.of("optimizer")), before, after
            )
        if bundle.of("optimizer"):
            yield Step("stage", "optimizers hold the parameters of this stage", self._prune_all)

    def _says(self, cut: Cut) -> str:
        where = ", ".join(cut.points())
        options = self.options
        return (
            f"the layers are {cut.count} stages on {self.size} processes, cut before {where}; "
            f"{options.num_microbatches} micro-batches, {options.schedule}"
        )

    def _cut(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        cut = cut_of(model, self.options, self.size)
        names = Names.of(model, cut)
        count = len(self._cuts)
        for name, parameter in model.named_parameters():
            self._named[parameter] = (f"{count}:{name}", names.holders[name])
        self._cuts.append(cut)
        if not agree(model):  # a rehearsal: nothing travels, and nothing runs
            keep(model, names, None, self.place, self.world.device)
            return
        others = [other for other in self.strategy.dimensions if other is not self]
        conductor = Conductor(model, cut, self.options, self.group, self.world.device, others)
        conductor.names = names
        changed = keep(model, names, self.group, self.place, self.world.device)
        for old, new in changed.values():
            if new is None:
                self._gone[old] = True
            else:
                self._named[new] = self._named[old]
        for optimizer in optimizers:
            self._prune(optimizer)
        self.follow({key: pair for key, pair in changed.items() if pair[1] is not None}, list(optimizers))
        for part in self._elsewhere(model, cut):
            vars(part)["_on_another_stage"] = True
        for name in cut.stage_of:
            become(model.get_submodule(name), Block, _conductor=conductor, _block_name=name)
        conductor.model = model
        conductor.shared = _shared(model, names)
        model.register_forward_hook(conductor.expose)
        become(model, Pipelined, _conductor=conductor)

    def _elsewhere(self, model: nn.Module, cut: Cut) -> list[nn.Module]:
        """The modules inside of blocks that other processes have."""
        names = [name for name in cut.stage_of if cut.place(name) != self.place]
        return [part for name in names for part in model.get_submodule(name).modules()]

    def _prune_all(self, bundle: Bundle) -> None:
        for optimizer in bundle.of("optimizer"):
            self._prune(optimizer)

    def _prune(self, optimizer: Any) -> None:
        """Takes from an optimizer what other stages have, with its state."""
        inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
        if record_of(inner) is None:
            inner._pipeline_record = self._record(inner)  # type: ignore[attr-defined]
        for group in inner.param_groups:
            for parameter in [p for p in group["params"] if p in self._gone]:
                inner.state.pop(parameter, None)
            group["params"] = [p for p in group["params"] if p not in self._gone]

    def _record(self, optimizer: Optimizer) -> Record:
        everywhere = tuple(range(self.size))
        cut = (model for model in self.strategy.models if conductor_of(model) is not None)
        made_since = {p for model in cut for p in self.strategy.parameters(model)}
        groups: list[list[str]] = []
        holders: dict[str, tuple[int, ...]] = {}
        for number, group in enumerate(optimizer.param_groups):
            groups.append([])
            for place, parameter in enumerate(group["params"]):
                # What belongs to no model that was cut, every process has.
                if parameter in made_since:
                    raise PrepareError(
                        f"the {type(optimizer).__name__} was made from a model in stages",
                        why="its groups would differ between the stages, and no checkpoint could tell them",
                        fix="make it before: model, optimizer = accelerator.prepare(model, optimizer)",
                    )
                name, held = self._named.get(parameter, (f"{number}.{place}", everywhere))
                groups[-1].append(name)
                holders[name] = held
        return Record(groups, holders)

    # --- states

    def whole(self, model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """The stages' states, one after the other."""
        conductor = conductor_of(model)
        return (
            state if conductor is None else whole_model(state, conductor.names, self.group, self.world.device)
        )

    def own(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool) -> Mapping[str, Any]:
        """Those of this stage."""
        conductor = conductor_of(model)
        own = model.state_dict() if conductor is not None else {}
        return state if conductor is None else own_model(state, conductor.names, own, strict=strict)

    def whole_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """The stages' states, numbered as in one process."""
        record = record_of(optimizer)
        return state if record is None else whole_optimizer(state, record, self.group, self.world.device)

    def own_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those of this stage."""
        record = record_of(optimizer)
        return state if record is None else own_optimizer(state, record, self.place)

    def elsewhere(self, model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
        """What other stages have; and the buffers that this one has first."""
        conductor = conductor_of(model)
        if conductor is None:
            return frozenset(), frozenset()
        names: Names = conductor.names
        others = frozenset(names.order) - model.state_dict().keys()
        return others, frozenset(name for name in names.buffers if names.holders[name][0] == self.place != 0)

    def made_for(self, optimizer: Optimizer) -> list[list[str]] | None:
        """With the parameters of all stages."""
        record = record_of(optimizer)
        return None if record is None else record.called()

    # --- the loop

    def backward_zero(self, loss: torch.Tensor) -> bool:
        """The stages of this process run their backward with zeros: others wait for it."""
        found = [conductor_of(m) for m in self.strategy.models]
        conductors = [conductor for conductor in found if conductor is not None]
        for conductor in conductors:
            conductor.zeroed = True
        try:
            loss.backward()
        finally:
            for conductor in conductors:
                conductor.zeroed = False
        return True

    def counted(self) -> list[torch.Tensor]:
        """Of weights on several stages, the first stage's count."""
        found = [conductor_of(model) for model in self.strategy.models]
        pairs = [(c, one) for c in found if c is not None for one in c.shared if one.holders[0] != self.place]
        held = [one.parameter(conductor.model) for conductor, one in pairs]
        return [parameter for parameter in held if parameter is not None]


def conductor_of(model: Any) -> Conductor | None:
    """What conducts the calls of a model that is cut; None for another."""
    return vars(model).get("_conductor") if isinstance(model, Pipelined) else None


def _shared(model: nn.Module, names: Names) -> list[Shared]:
    """The parameters that several stages hold, and their places here."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for path, module in model.named_modules():
        for label, parameter in module._parameters.items():
            name = f"{path}.{label}" if path else label
            if parameter is not None and name in names.first:
                found.setdefault(names.first[name], (module, label))
    several = {first: names.holders[first] for first in dict.fromkeys(names.first.values())}
    return [
        Shared(first, holders, *found.get(first, (None, "")))
        for first, holders in several.items()
        if len(holders) > 1
    ]


def _bytes(model: nn.Module, names: Names, place: int | None) -> int:
    """Bytes of a model, or of what one process keeps of it."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return sum(t.numel() * t.element_size() for n, t in tensors if place is None or place in names.holders[n])
