"""Pipeline parallelism: each process keeps the layers of its stages, and micro-batches pass through.

``model_split.py`` splits a model, ``forward_trace.py`` finds the tensors that stages exchange, ``runner.py``
runs the calls of the model: by ``gpipe.py``, or with its loss by ``one_f_one_b.py``. ``state_dicts.py``
gathers states. The user's loop stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.core.errors import PrepareError, warn_user
from accelerate.strategy.base import PrepareBundle, PrepareStep
from accelerate.strategy.parallelism.config import PipelineParallelConfig
from accelerate.strategy.parallelism.pipeline.forward_trace import (
    PipelineBlockCallInterceptor,
    add_base_class,
)
from accelerate.strategy.parallelism.pipeline.model_split import (
    FullModelStateNames,
    StageAssignment,
    assign_stages,
    check_same_model,
    keep_local_stages,
)
from accelerate.strategy.parallelism.pipeline.runner import PipelinedModel, PipelineParallelRunner
from accelerate.strategy.parallelism.pipeline.stage import StageSharedParam
from accelerate.strategy.parallelism.pipeline.state_dicts import (
    UnsplitOptimizerParamGroups,
    gather_model_state,
    gather_optimizer_state,
    original_groups_of,
    select_model_state,
    select_optimizer_state,
)
from accelerate.strategy.parallelism.strategy import MeshDimension

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class PipelineParallel(MeshDimension):
    """The pipeline parallel dimension, ``pp``."""

    name: ClassVar[str] = "pp"

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self._assignments: list[StageAssignment] = []
        # Of every parameter that was there before its model was cut, the number of the model with its first
        # name, and the processes that have it; optimizers may still hold it.
        self._param_names: Any = WeakIdKeyDictionary()
        # The parameters that other stages have.
        self._removed_params: Any = WeakIdKeyDictionary()

    @property
    def options(self) -> PipelineParallelConfig:
        """The options: micro-batches, schedule, split points."""
        return self.config.pp_handler or PipelineParallelConfig()

    @cached_property
    def group(self) -> ProcessGroup:
        """The process group of the pipeline."""
        return self.mesh["pp"].get_group()

    @property
    def size(self) -> int:
        """The pipeline parallel size."""
        return self.config._sizes["pp"]

    @property
    def pp_rank(self) -> int:
        """The pipeline parallel rank."""
        return self.config.layout().coordinates(self.world.rank)["pp"]

    def check(self) -> None:
        """Refuse options that do not go together."""
        self.options.settle(self.size)

    # --- prepare

    def prepare_steps(self, bundle: PrepareBundle) -> Iterator[PrepareStep]:
        """Split every model, and remove other stages' parameters from optimizers."""
        models = [model for model in dict.fromkeys(bundle.objects_of("model")) if runner_of(model) is None]
        for model in models if bundle.training else []:
            cut = assign_stages(model, self.options, self.size)
            names = FullModelStateNames.from_model(model, cut)
            yield PrepareStep(
                "stages",
                self._describe(cut),
                lambda b, m=model: self._split_model(m, b.objects_of("optimizer")),
                lambda m=model, n=names: (_model_bytes(m, n, None), _model_bytes(m, n, self.pp_rank)),
            )
        if bundle.objects_of("optimizer"):
            yield PrepareStep("stage", "optimizers hold the parameters of this stage", self._prune_optimizers)

    def _describe(self, cut: StageAssignment) -> str:
        split_points = ", ".join(cut.split_points())
        options = self.options
        return (
            f"{cut.count} pipeline stages on {self.size} processes, split before {split_points}; "
            f"{options.num_microbatches} micro-batches, {options.schedule}"
        )

    def _split_model(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        cut = assign_stages(model, self.options, self.size)
        names = FullModelStateNames.from_model(model, cut)
        count = len(self._assignments)
        for name, parameter in model.named_parameters():
            self._param_names[parameter] = (f"{count}:{name}", names.holders[name])
        self._assignments.append(cut)
        empty_ranks = check_same_model(model)
        if empty_ranks is None:  # a rehearsal: nothing travels, and nothing runs
            keep_local_stages(model, names, None, self.pp_rank, self.world.device)
            return
        self._warn_of_batch_norms(model)
        others = [other for other in self.strategy.dimensions if other is not self]
        runner = PipelineParallelRunner(model, cut, self.options, self.group, self.world.device, others)
        runner.names = names
        first = torch.distributed.get_global_rank(self.group, 0)
        senders = None if first in empty_ranks else self.group
        changed = keep_local_stages(model, names, senders, self.pp_rank, self.world.device)
        for old, new in changed.values():
            if new is None:
                self._removed_params[old] = True
            else:
                self._param_names[new] = self._param_names[old]
        self.remap_optimizer_params(
            {key: pair for key, pair in changed.items() if pair[1] is not None}, list(optimizers)
        )
        blocks = {name: model.get_submodule(name) for name in cut.stage_of}
        for part in set(model.modules()).difference(*(block.modules() for block in blocks.values())):
            vars(part)["_outside_pipeline_blocks"] = True
        for name, block in blocks.items():
            for part in block.modules() if cut.rank_of(name) != self.pp_rank else ():
                vars(part)["_on_another_stage"] = True
            add_base_class(block, PipelineBlockCallInterceptor, _runner=runner, _block_name=name)
        runner.model = model
        runner.shared = _find_shared_params(model, names)
        model.register_forward_hook(runner.expose_stage_outputs)
        add_base_class(model, PipelinedModel, _runner=runner)

    def _warn_of_batch_norms(self, model: nn.Module) -> None:
        count = self.options.num_microbatches or 1
        names = [name for name, part in model.named_modules() if isinstance(part, _BATCH_NORMS)]
        if names and count > 1 and self.pp_rank == 0:
            warn_user(
                f"{names[0]}, one of {len(names)} batch norms, takes its statistics over each of the {count} "
                "micro-batches, and not over the batch as one process does. The numbers of one process come "
                "with PipelineParallelConfig(num_microbatches=1), or with another kind of norm"
            )

    def _prune_optimizers(self, bundle: PrepareBundle) -> None:
        """Remove other stages' parameters, with their state; all models of the bundle are split by now."""
        for optimizer in bundle.objects_of("optimizer"):
            inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
            if original_groups_of(inner) is None:
                inner._pipeline_record = self._optimizer_layout(inner)  # type: ignore[attr-defined]
            for group in inner.param_groups:
                for parameter in [p for p in group["params"] if p in self._removed_params]:
                    inner.state.pop(parameter, None)
                group["params"] = [p for p in group["params"] if p not in self._removed_params]

    def _optimizer_layout(self, optimizer: Optimizer) -> UnsplitOptimizerParamGroups:
        everywhere = tuple(range(self.size))
        made_since = {p for runner in self._runners() for p in self.strategy.parameters(runner.model)}
        groups: list[list[str]] = []
        holders: dict[str, tuple[int, ...]] = {}
        for number, group in enumerate(optimizer.param_groups):
            groups.append([])
            for place, parameter in enumerate(group["params"]):
                # What belongs to no model that was cut, every process has.
                if parameter in made_since:
                    raise PrepareError(
                        f"the {type(optimizer).__name__} was made from a model split into stages",
                        why="its groups would differ between the stages, and no checkpoint could tell them",
                        fix="make it before: model, optimizer = accelerator.prepare(model, optimizer)",
                    )
                name, param_holders = self._param_names.get(parameter, (f"{number}.{place}", everywhere))
                groups[-1].append(name)
                holders[name] = param_holders
        return UnsplitOptimizerParamGroups(groups, holders)

    def _runners(self) -> list[PipelineParallelRunner]:
        """Return the runners of the models that are split."""
        return [runner for runner in map(runner_of, self.strategy.models) if runner is not None]

    # --- states

    def gather_state(self, model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Gather the states of all stages."""
        runner = runner_of(model)
        if runner is None:
            return state
        return gather_model_state(state, runner.names, self.group, self.world.device)

    def select_state(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool) -> Mapping[str, Any]:
        """Select the state of this stage."""
        runner = runner_of(model)
        if runner is None:
            return state
        return select_model_state(state, runner.names, model.state_dict(), strict=strict)

    def gather_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Gather the optimizer states of all stages, numbered as in one process."""
        layout = original_groups_of(optimizer)
        if layout is None:
            return state
        return gather_optimizer_state(state, layout, self.group, self.world.device)

    def select_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Select the state of this stage."""
        layout = original_groups_of(optimizer)
        return state if layout is None else select_optimizer_state(state, layout, self.pp_rank)

    def partial_state_names(self, model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
        """Return the names that other stages hold, and the buffers that this one holds first."""
        runner = runner_of(model)
        if runner is None:
            return frozenset(), frozenset()
        names: FullModelStateNames = runner.names
        # Modules of other stages still have an extra state, which is not the one that they have there.
        unused = {name for name in names.buffers if self.pp_rank not in names.holders[name]}
        others = frozenset(names.order) - model.state_dict().keys() | unused
        # Of the replicas of a stage the first one's buffers count.
        saves = self.pp_rank != 0 and self.strategy._is_leader
        return others, frozenset(
            name for name in names.buffers if saves and names.holders[name][0] == self.pp_rank
        )

    def original_group_names(self, optimizer: Optimizer) -> list[list[str]] | None:
        """Return the group names of an optimizer with the parameters of all stages."""
        layout = original_groups_of(optimizer)
        return None if layout is None else layout.checkpoint_names()

    # --- the loop

    def backward_zero(self, loss: torch.Tensor, run: Callable[[], Any]) -> bool:
        """Run the stages' backward with zero gradients: other stages wait for it."""
        runners = self._runners()
        for runner in runners:
            runner.zero_gradients = True
        try:
            loss.backward()
        finally:
            for runner in runners:
                runner.zero_gradients = False
        return True

    def duplicate_params(self) -> list[torch.Tensor]:
        """Return the weights that an earlier stage holds too, and counts in a norm."""
        params = [
            shared.optimizer_param(runner.model)
            for runner in self._runners()
            for shared in runner.shared
            if shared.holders[0] != self.pp_rank
        ]
        return [parameter for parameter in params if parameter is not None]


def runner_of(model: Any) -> PipelineParallelRunner | None:
    """Return the runner of a pipelined model; None for another."""
    return vars(model).get("_runner") if isinstance(model, PipelinedModel) else None


def _find_shared_params(model: nn.Module, names: FullModelStateNames) -> list[StageSharedParam]:
    """Return the parameters that several stages hold, with their modules here."""
    owners: dict[str, tuple[nn.Module, str]] = {}
    for path, module in model.named_modules():
        for label, parameter in module._parameters.items():
            name = f"{path}.{label}" if path else label
            if parameter is not None and name in names.first:
                owners.setdefault(names.first[name], (module, label))
    several = {first: names.holders[first] for first in dict.fromkeys(names.first.values())}
    return [
        StageSharedParam(first, holders, *owners.get(first, (None, "")))
        for first, holders in several.items()
        if len(holders) > 1
    ]


def _model_bytes(model: nn.Module, names: FullModelStateNames, place: int | None) -> int:
    """Return the bytes of a model, or of what one process keeps of it."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return sum(t.numel() * t.element_size() for n, t in tensors if place is None or place in names.holders[n])
