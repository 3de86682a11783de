"""Distributed data parallel (DDP): every rank holds the model, gradients are all-reduced during backward.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(arXiv:2006.15704), and ``torch.nn.parallel.DistributedDataParallel``, which does the work.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accelerate.core.argument_checks import KwargsHandler, check_arguments
from accelerate.core.errors import PrepareError, SettingError, list_first, user_line, warn_user
from accelerate.core.option_report import OptionStatus, RequestedOption, non_default_options
from accelerate.core.torch_internals import require
from accelerate.core.value_types import BaseEnum, NonNegativeInt, PositiveNumber
from accelerate.strategy.base import (
    PrepareBundle,
    PrepareStep,
    Strategy,
    StrategyRequest,
    StrategySelection,
    WrapperNames,
)
from accelerate.strategy.protocol.gradient_sync import (
    NO_CONTEXT,
    OpenGradients,
    ReductionMonitor,
    ZeroBackward,
    graph_leaves,
)
from accelerate.strategy.protocol.replicated_module import (
    ReplicaProgress,
    ReplicatedModule,
    reached_copies,
    replica_of,
    replicate,
    watch_frozen,
)
from accelerate.world import collective
from accelerate.world import world as worlds


class DDPCommunicationHookType(BaseEnum):
    """The communication hooks for the all-reduce of gradients."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@check_arguments
@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of ``torch.nn.parallel.DistributedDataParallel`` (see there), and of its communication hook.

    Attributes:
        bucket_cap_mb: MB of gradients in one all-reduce; None is torch's default.
        comm_hook: compression of gradients for the all-reduce.
        comm_wrapper: half precision around the ``comm_hook``.
        comm_state_option: arguments of ``PowerSGDState``, for a ``comm_hook`` of the PowerSGD family.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: NonNegativeInt | PositiveNumber | None = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return the options of torch's class only."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: nn.Module) -> None:
        """Register the requested hook on a replicated model or on torch's own wrapper.

        Raises:
            SettingError: the hook and wrapper do not go together.
        """
        if self.comm_hook == DDPCommunicationHookType.NO:
            return
        replica = replica_of(model)
        if replica is None:
            raise PrepareError("a communication hook was asked for a model that is not replicated")
        state, hook = self._build_hook(replica)
        replica.register_comm_hook(state, hook)

    def _build_hook(self, replica: DistributedDataParallel) -> tuple[Any, Callable[..., Any]]:
        half, power = default_hooks, powerSGD_hook
        hooks = {
            DDPCommunicationHookType.FP16: half.fp16_compress_hook,
            DDPCommunicationHookType.BF16: _bf16_compress,
            DDPCommunicationHookType.POWER_SGD: power.powerSGD_hook,
            DDPCommunicationHookType.BATCHED_POWER_SGD: power.batched_powerSGD_hook,
        }
        wrappers: dict[Any, Callable[..., Any]] = {
            DDPCommunicationHookType.NO: lambda hook: hook,
            DDPCommunicationHookType.FP16: half.fp16_compress_wrapper,
            DDPCommunicationHookType.BF16: _bf16_wrapper,
        }
        kind, wrapper = map(DDPCommunicationHookType, (self.comm_hook, self.comm_wrapper))
        if wrapper not in wrappers:
            raise SettingError(
                f"comm_wrapper {wrapper.value!r} does not exist", fix="use 'no', 'fp16' or 'bf16'"
            )
        state: Any = replica.process_group
        if kind in (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD):
            state = power.PowerSGDState(replica.process_group, **self.comm_state_option)
        return state, wrappers[wrapper](hooks[kind])


# Torch reads the annotations of hooks as objects and refuses text, which they are in this file: none here.
def _bf16_compress(group, bucket):
    # All-reduces in bfloat16; torch's own hook of this kind refuses every back end but NCCL and XCCL.
    shared: Any = group if group is not None else torch.distributed.group.WORLD
    whole = bucket.buffer()
    half = whole.to(torch.bfloat16).div_(shared.size())
    work = torch.distributed.all_reduce(half, group=shared, async_op=True)
    assert work is not None  # it is asynchronous
    return work.get_future().then(lambda done: whole.copy_(done.value()[0]))


def _bf16_wrapper(hook: Callable[..., Any]) -> Callable[..., Any]:
    def compress_and_call(state, bucket):
        whole = bucket.buffer()
        bucket.set_buffer(whole.to(torch.bfloat16))
        return hook(state, bucket).then(lambda done: whole.copy_(done.value()))

    return compress_and_call


class DDP(OpenGradients, Strategy, ReductionMonitor, WrapperNames):
    """Data parallel training with replicas, by torch's reducer."""

    name: ClassVar[str] = "ddp"
    selection: ClassVar[StrategySelection] = StrategySelection(min_world_size=2)
    replicates_model: ClassVar[bool] = True
    priority: ClassVar[int] = 1
    handler_class: ClassVar[type[KwargsHandler] | None] = DistributedDataParallelKwargs

    def __init__(self, request: StrategyRequest) -> None:
        super().__init__(request)
        self.unreduced = self._unreduced = set[torch.Tensor]()
        self._progress: list[ReplicaProgress] = []
        self._local_gradients: dict[torch.Tensor, torch.Tensor | None] = {}
        self._unreduced_backward = ""
        self._unfinished: set[ReplicaProgress] = set()
        self._reported: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        # Copies of replicated modules are not replicated, and those of parameters stand in no reducer.
        return {**vars(self), "_progress": [], "_unfinished": set()}

    def check(self) -> None:
        """Refuse a torch whose ``DistributedDataParallel`` lacks what this file uses of it.

        Raises:
            FeatureNotBuiltError: it does.
        """
        require("DDP")

    def option_statuses(self, models: Sequence[nn.Module]) -> Iterator[OptionStatus]:
        """Return the status of each option, read from torch's reducers."""
        replicas = [replica for replica in map(replica_of, models) if replica is not None]
        for option in non_default_options(self.handler):
            if option.name == "check_reduction":
                yield option.report_not_applied("torch ignores it")
            elif not replicas:
                yield option.report_pending("no model that trains is prepared")
            else:
                yield option.report_unless(
                    next(filter(None, (_describe_difference(option, r) for r in replicas)), "")
                )

    def prepare_steps(self, bundle: PrepareBundle) -> Iterator[PrepareStep]:
        """Return the step that replicates every model that trains, unless the program reduces gradients."""
        models = bundle.objects_of("model")
        trains = bundle.training and not bundle.program_reduces_gradients
        replicate_model = partial(self._replicate_model, given_unwrapped=bundle.given_unwrapped)
        if trains and any(p.requires_grad for model in models for p in model.parameters()):
            yield PrepareStep(
                "replicate",
                f"{self.world.size} processes average their gradients during backward",
                partial(PrepareBundle.replace, kind="model", function=replicate_model),
            )

    def _replicate_model(self, model: nn.Module, given_unwrapped: list[nn.Module]) -> nn.Module:
        replica = replica_of(model)
        trains = any(parameter.requires_grad for parameter in model.parameters())
        is_view = isinstance(model, ReplicatedModule)
        if is_view and model._progress not in self._progress:
            self._progress.append(model._progress)
        # Other ranks may give a module that was not prepared before: all make their reducers together.
        is_renewed = is_view and trains and model in given_unwrapped
        if replica is None or is_renewed:
            watch_frozen(model, self._unreduced.add)
        if is_renewed:
            self._renew_replica(model)
        if replica is not None or not trains:
            return model
        for name, parameter in model.named_parameters():
            mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", ())
            if mesh is not None and mesh.size() == self.world.size and any(p.is_shard() for p in placements):
                raise PrepareError(
                    f"{type(model).__name__} cannot be replicated: it is sharded over all processes",
                    why=f"{name} is a DTensor on {self.world.size} processes, and DDP was chosen",
                    fix="launch with --use_fsdp: FSDP2 takes models that fully_shard has sharded; a tensor "
                    "parallel one wants Accelerator(parallelism_config=ParallelismConfig(tp_size=...))",
                )
        is_dry_run = self.world.device.type == "meta"  # there are no values to compare and to broadcast
        devices = None if is_dry_run or self.world.device.type == "cpu" else [self.world.device]
        # Torch needs no output_device; programs that replace the wrapper's __init__ take both.
        options = {"device_ids": devices, "output_device": devices and devices[0]}
        if is_dry_run:
            options["init_sync"] = False
        view = replicate(model, **options, **self.handler.to_kwargs())
        if self.handler.comm_hook != DDPCommunicationHookType.NO:
            self.handler.register_comm_hook(view)
        self._progress = [each for each in self._progress if each.replica() is not None]
        self._progress.append(view._progress)  # type: ignore[arg-type]
        worlds.add_group_user(view, self._use_new_group)
        return view

    def _use_new_group(self, view: Any) -> None:
        view._user_module.zero_grad()  # reduced on some ranks only
        self._renew_replica(view)

    def _renew_replica(self, view: Any) -> None:
        """Make torch's reducer anew, over the process group and the trained parameters of now."""
        devices = view._replica.device_ids
        view.set_replica(None)
        gc.collect()  # the reducer before takes its hooks from the parameters
        options = {"device_ids": devices, "output_device": devices and devices[0]}
        view.set_replica(DistributedDataParallel(view._user_module, **options, **self.handler.to_kwargs()))
        view._progress.follow(view._replica)
        self._unfinished.discard(view._progress)
        self.handler.register_comm_hook(view)

    # --- the loop

    def backward(self, loss: torch.Tensor, *, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Run the backward; note the parameters that get a gradient which no reducer waits for.

        Gradients of deep copies of replicated modules are averaged here, as copies of torch's wrapper do it.
        """
        for progress in self._progress:
            if progress.is_armed:
                break
        else:
            if sync_gradients and self._progress:
                self._note_unreduced(loss)
        loss.backward(**kwargs)
        for progress in self._progress:
            if not progress.reached and not progress.is_armed:
                continue
            if sync_gradients and (replica := progress.replica()) is not None:
                try:
                    replica._check_reducer_finalized()
                except RuntimeError:
                    self._note_unfinished(progress)
                    continue
            if progress.reached:
                progress.reached.clear()
                progress.is_armed = False
            if progress in self._unfinished:
                self._unfinished.remove(progress)
                self._unreduced.difference_update(progress.params)
        if self._unreduced:
            self._local_gradients = {p: p.grad for p in self._unreduced}
        if reached_copies and sync_gradients:
            self._average_copies()

    @torch.no_grad()
    def _average_copies(self) -> None:
        reached = sorted(reached_copies, key=reached_copies.__getitem__)
        reached_copies.clear()
        reduced = {p for progress in self._progress for p in progress.params}
        gradients = [p.grad for p in reached if p.grad is not None and p not in reduced]
        if gradients and not self.local_training:
            for gradient, mean in zip(gradients, collective.reduce(gradients, "mean"), strict=True):
                gradient.copy_(mean)

    def _note_unfinished(self, progress: ReplicaProgress) -> None:
        """Note a backward that reached some parameters only; the reducer stays armed for the others."""
        progress.reached.clear()
        progress.is_armed = True
        self._unfinished.add(progress)
        self._unreduced.update(progress.params)
        self._unreduced_backward = user_line()

    def _note_unreduced(self, loss: torch.Tensor) -> None:
        replicas = [replica for progress in self._progress if (replica := progress.replica()) is not None]
        waiting = [replica for replica in replicas if replica.require_backward_grad_sync]
        if waiting and not self.local_training:
            params = {p for replica in waiting for p in replica.module.parameters() if p.requires_grad}
            self._unreduced |= params & graph_leaves(loss)
            self._unreduced_backward = user_line()

    def report_unreduced(self, parameters: Iterable[torch.Tensor]) -> None:
        """Say once which of ``parameters`` are stepped with a gradient that was not reduced; forget all.

        Where another tensor has taken the gradient's place since the backward, the program has reduced it.
        """
        local = self._local_gradients
        own = (p for p in parameters if p in self._unreduced and local.get(p, p.grad) is p.grad)
        stepped = {p for p in own if p.grad is not None and p.grad.any()}
        self._unreduced.clear()
        local.clear()
        if self.world.rank != 0 or not stepped or self.local_training:
            return
        reduced = {p for progress in self._progress for p in progress.params}
        waiting = {p for progress in self._unfinished for p in progress.params}
        models = [replica.module for each in self._progress if (replica := each.replica()) is not None]
        names = {p: name for model in models for name, p in model.named_parameters() if p in stepped}
        unfinished = [name for p, name in names.items() if p in waiting and name not in self._reported]
        self._reported.update(unfinished)
        unfrozen = [name for p, name in names.items() if p not in reduced and name not in self._reported]
        around = [name for p, name in names.items() if p in reduced and name not in self._reported]
        self._reported.update(unfrozen, around)
        if unfinished:
            warn_user(
                f"optimizer.step() with gradients of {list_first(unfinished)} that are not averaged over "
                f"{self.world.size} processes, so their copies drift apart: DDP averages when all parameters "
                f"have a gradient, and the backward at {self._unreduced_backward} gave some none. "
                "Step after the last backward of the forward, or add the losses for one backward"
            )
        if unfrozen:
            warn_user(
                f"optimizer.step() with gradients of {list_first(unfrozen)} that are not averaged over "
                f"{self.world.size} processes, so their copies drift apart: these parameters were frozen "
                "when the model was prepared. Prepare it with all that will ever train, and freeze after "
                "prepare, with DistributedDataParallelKwargs(find_unused_parameters=True)"
            )
        if around:
            warn_user(
                f"optimizer.step() with gradients of {list_first(around)} that are not averaged over "
                f"{self.world.size} processes, so their copies drift apart, unless the loss is computed from "
                f"the weights alone: that of the backward at {self._unreduced_backward} came from no forward "
                "of the prepared model since the last backward. Call the model, or a method of it that calls "
                "self(...), once for each backward; not a submodule, nor the object that was given to prepare"
            )

    def late_parameters(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the trained parameters that no reducer has, and that were not frozen either.

        A ``DTensor`` is reduced by what has sharded it: ``fully_shard`` of the program's own.
        """
        if self.local_training:
            return []
        reduced = {p for progress in self._progress for p in progress.params}
        whole = (p for p in parameters if not hasattr(p, "device_mesh"))
        trained = (p for p in whole if p.requires_grad and p.grad is not None)
        return [p for p in trained if p not in reduced and p not in self._unreduced]

    def zero_grad(self, optimizer: torch.optim.Optimizer, zero: Callable[[], None]) -> None:
        """Clear gradients; what was not reduced is not stepped either."""
        if self._unreduced:
            self._unreduced.difference_update(p for group in optimizer.param_groups for p in group["params"])
            self._local_gradients.clear()
        zero()

    def accumulation_context(self, models: Iterable[nn.Module], *, sync: bool) -> AbstractContextManager[Any]:
        """Return torch's ``no_sync`` where ``sync`` is False."""
        return NO_CONTEXT if sync else _no_sync(models)

    def local_steps(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return ``no_sync``, and skip the reducer's broadcast of buffers in the first forward."""
        replica = replica_of(model)
        if replica is not None:
            replica.require_forward_param_sync = False
        return self.accumulation_context((model,), sync=False)

    def reduces_gradients(self, model: nn.Module) -> bool:
        """Return whether no ``no_sync`` is active."""
        replica = replica_of(model)
        return replica is None or replica.require_backward_grad_sync

    def backward_zero(self, zero: ZeroBackward) -> None:
        """Run a zero backward over all parameters that the reducer waits for."""
        replicas = [replica for replica in map(replica_of, zero.models) if replica is not None]
        if any(map(_is_learning_static_graph, replicas)):
            raise PrepareError(
                "the first micro-batch that reduces gradients has num_items=0, and static_graph=True",
                why="torch learns a static graph from the first backward through the model",
                fix="begin with a batch that has items, or leave static_graph out",
            )
        if not any(replica.find_unused_parameters for replica in replicas):
            zero = dataclasses.replace(zero, graph_params=set(zero.parameters))
        super().backward_zero(zero)
        for progress in self._progress:
            if progress.reached:
                progress.reached.clear()
                progress.is_armed = False

    @staticmethod
    def sync_next_backward(model: nn.Module) -> None:
        """Prepare the reducer for a backward whose forward ran under ``no_sync``."""
        replica = replica_of(model)
        if replica is not None:
            replica.require_backward_grad_sync = True
            replica.require_forward_param_sync = True
            replica.reducer.prepare_for_backward([])
            if isinstance(model, ReplicatedModule):
                model._progress.is_armed = True

    def local_buffers(self, model: nn.Module) -> dict[str, torch.Tensor] | None:
        """Return the persistent buffers if torch's reducer does not broadcast before the next forward."""
        replica = replica_of(model)
        if replica is None or not replica.broadcast_buffers or replica.require_forward_param_sync:
            return None
        if self.world.rank == 0:
            return {}
        names = replica.module.state_dict().keys()
        return {name: buffer for name, buffer in replica.module.named_buffers() if name in names}

    def restore_local_buffers(self, model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
        """Put the buffers back; they are broadcast after the window, or before an evaluation in it."""
        replica = replica_of(model)
        if replica is None:
            return
        with torch.no_grad():
            for name, buffer in replica.module.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
        replica.require_forward_param_sync = False
        if isinstance(model, ReplicatedModule):
            model._progress.buffers_differ = True

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the state by the names of the user's module."""
        return self.unwrap(model).state_dict()

    def wrapped_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the state with the prefix ``module.``, as torch's wrapper names it."""
        return {f"module.{name}": value for name, value in self.model_state(model).items()}

    def load_model(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Load a state by the names of the user's module."""
        return self.unwrap(model).load_state_dict(state, strict=strict)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module, also inside a wrapper that the user made."""
        if isinstance(model, ReplicatedModule):
            return model._user_module
        return model.module if isinstance(model, DistributedDataParallel) else model


def _describe_difference(option: RequestedOption, replica: DistributedDataParallel) -> str:
    logged: dict[str, Any] = replica._get_ddp_logging_data()
    if option.name == "comm_hook":
        hooked = logged.get("comm_hook", "")
        return "" if hooked else "no communication hook is registered"
    if option.name == "comm_wrapper":
        return "" if replica._comm_hooks else "there is no comm_hook that it could belong to"
    if option.name == "comm_state_option":
        has_state = any(isinstance(state, powerSGD_hook.PowerSGDState) for _, state in replica._comm_hooks)
        return "" if has_state else "there is no comm_hook of the PowerSGD family that it could belong to"
    name, actual = option.name, logged.get(option.name, getattr(replica, option.name, None))
    if name == "bucket_cap_mb":
        if option.value is None or int(option.value * 2**20) == logged["bucket_cap_bytes"]:
            return ""
        actual = f"{logged['bucket_cap_bytes'] / 2**20:g}"
    return "" if actual == option.value else f"the reducer has {actual}"


def _is_learning_static_graph(replica: DistributedDataParallel) -> bool:
    # Torch learns a static graph in the first backward that reduces.
    return replica.static_graph and not getattr(replica, "_static_graph_delay_allreduce_enqueued", False)


@contextmanager
def _no_sync(models: Iterable[nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for model in models:
            replica = replica_of(model)
            if replica is not None and not _is_learning_static_graph(replica):
                stack.enter_context(replica.no_sync())
        yield


PLUGIN = DDP
