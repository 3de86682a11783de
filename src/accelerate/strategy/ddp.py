"""Distributed data parallel: every process holds the model, gradients are averaged during backward.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(arXiv:2006.15704), and ``torch.nn.parallel.DistributedDataParallel``, which does the work.

torch's class wraps a model and hides what it is. Here the prepared model is a second object over the very
state of the user's module (they share one ``__dict__``), of a subclass of the user's class that does torch's
work around a call. So it keeps methods, attributes and parameter names, every method that calls the model
synchronises, and the user's own object stays as plain as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accelerate.core.effects import Effect, Option, differing
from accelerate.core.enums import BaseEnum
from accelerate.core.errors import PrepareError, SettingError
from accelerate.core.handler import KwargsHandler
from accelerate.strategy.base import NOTHING, Bundle, Request, Step, Strategy

_PREFIX = "module."


class DDPCommunicationHookType(BaseEnum):
    """How gradients travel."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of ``torch.nn.parallel.DistributedDataParallel`` (see there), and how gradients travel.

    Attributes:
        comm_hook: compression of gradients on the way.
        comm_wrapper: half precision around a ``comm_hook`` of the PowerSGD family.
        comm_state_option: arguments of ``PowerSGDState``.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
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
        """The options of torch's class only."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: nn.Module) -> None:
        """Sets the asked compression on a replicated model or on torch's own wrapper.

        Raises:
            SettingError: the hook and wrapper do not go together.
        """
        if self.comm_hook == DDPCommunicationHookType.NO:
            return
        replica = model if isinstance(model, DistributedDataParallel) else replica_of(model)
        if replica is None:
            raise PrepareError("a communication hook was asked for a model that is not replicated")
        state, hook = self._hook(replica)
        replica.register_comm_hook(state, hook)

    def _hook(self, replica: DistributedDataParallel) -> tuple[Any, Callable[..., Any]]:
        halves = {
            DDPCommunicationHookType.FP16: (
                default_hooks.fp16_compress_hook,
                default_hooks.fp16_compress_wrapper,
            ),
            DDPCommunicationHookType.BF16: (_bf16_compress, _bf16_wrapper),
        }
        kind = DDPCommunicationHookType(self.comm_hook)
        if kind in halves:
            return replica.process_group, halves[kind][0]
        hook = {
            DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
            DDPCommunicationHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
        }[kind]
        state = powerSGD_hook.PowerSGDState(replica.process_group, **self.comm_state_option)
        wrapper = DDPCommunicationHookType(self.comm_wrapper)
        if wrapper == DDPCommunicationHookType.NO:
            return state, hook
        if wrapper not in halves:
            raise SettingError(
                f"comm_wrapper {wrapper.value!r} does not exist", fix="use 'no', 'fp16' or 'bf16'"
            )
        return state, halves[wrapper][1](hook)


# Torch reads the annotations of hooks as objects and refuses text, which they are in this file: none here.
def _bf16_compress(group, bucket):
    """bfloat16 on the way; torch's own hook of this kind refuses every back end but NCCL and XCCL."""
    shared: Any = group if group is not None else torch.distributed.group.WORLD
    whole = bucket.buffer()
    half = whole.to(torch.bfloat16).div_(shared.size())
    work = torch.distributed.all_reduce(half, group=shared, async_op=True)
    assert work is not None  # it is asynchronous
    return work.get_future().then(lambda done: whole.copy_(done.value()[0]))


def _bf16_wrapper(hook: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(state, bucket):
        whole = bucket.buffer()
        bucket.set_buffer(whole.to(torch.bfloat16))
        return hook(state, bucket).then(lambda done: whole.copy_(done.value()))

    return wrapped


class Replicated:
    """What a replicated module does around a call; the first base of its class.

    A copied or pickled one is a plain module: the copy is not replicated.
    """

    _replica: ClassVar[DistributedDataParallel]
    _user_module: ClassVar[nn.Module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A forward between torch's work before and after it."""
        replica = self._replica
        args, kwargs = replica._pre_forward(*args, **kwargs)
        DistributedDataParallel._active_ddp_module = replica
        try:
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            DistributedDataParallel._active_ddp_module = None
        return replica._post_forward(output)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self._user_module,)


def _itself(module: nn.Module) -> nn.Module:
    return module


def replica_of(module: nn.Module) -> DistributedDataParallel | None:
    """Torch's object behind a replicated module, or None."""
    return module._replica if isinstance(module, Replicated) else None


def replicate(module: nn.Module, **options: Any) -> nn.Module:
    """A replicated view of ``module``: another object of (a subclass of) its class over the same state.

    Args:
        module: the model, on its device; equal on all ranks afterwards (rank 0's values).
        options: arguments of ``torch.nn.parallel.DistributedDataParallel``.
    """
    own = type(module)
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    parts = {"_replica": DistributedDataParallel(module, **options), "_user_module": module}
    view: Any = object.__new__(type(own.__name__, (Replicated, own), {**names, **parts}))
    view.__dict__ = module.__dict__
    return view


class DDP(Strategy):
    """Replicated data parallel training by torch's reducer."""

    name: ClassVar[str] = "ddp"
    replicates: ClassVar[bool] = True
    priority: ClassVar[int] = 1
    handler_class: ClassVar[type[KwargsHandler] | None] = DistributedDataParallelKwargs

    @classmethod
    def claims(cls, request: Request) -> bool:
        """Several processes and no other wish."""
        return request.world.size > 1

    def effects(self, models: Sequence[nn.Module]) -> Iterator[Effect]:
        """Read back from torch's reducers."""
        replicas = [replica for replica in map(_replica, models) if replica is not None]
        for option in differing(self.handler):
            if option.name == "check_reduction":
                yield option.failed("torch ignores it")
            elif not replicas:
                yield option.pending("no model that trains is prepared")
            else:
                yield option.seen(next(filter(None, (_differs(option, r) for r in replicas)), ""))

    def steps(self, bundle: Bundle) -> Iterator[Step]:
        """Replicate every model that trains."""
        if bundle.training and any(_trains(model) for model in bundle.of("model")):
            size = self.world.size
            yield Step(
                "replicate", f"{size} processes average their gradients during backward", self._replicate_all
            )

    def _replicate_all(self, bundle: Bundle) -> None:
        bundle.replace("model", self._replicated)

    def _replicated(self, model: nn.Module) -> nn.Module:
        if not _trains(model) or _replica(model) is not None:
            return model
        devices = None if self.world.device.type == "cpu" else [self.world.device]
        view = replicate(model, device_ids=devices, **self.handler.to_kwargs())
        self.handler.register_comm_hook(view)
        return view

    def accumulating(self, models: Iterable[nn.Module], *, sync: bool) -> AbstractContextManager[Any]:
        """Without ``sync`` the reducers stay quiet."""
        return NOTHING if sync else _quiet(models)

    def apart(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Also buffers stay: the reducer would send them once more in the first forward."""
        replica = _replica(model)
        if replica is not None:
            replica.require_forward_param_sync = False
        return self.accumulating((model,), sync=False)

    def synchronises(self, model: nn.Module) -> bool:
        """Unless ``no_sync`` is around it."""
        replica = _replica(model)
        return replica is None or replica.require_backward_grad_sync

    def backward_zero(
        self,
        models: Iterable[nn.Module],
        parameters: Sequence[torch.Tensor],
        reached: set[torch.Tensor],
        loss: torch.Tensor,
    ) -> None:
        """The reducer waits for every parameter, but for those that it has found unused itself."""
        replicas = [replica for replica in map(_replica, models) if replica is not None]
        if any(map(_learning, replicas)):
            raise PrepareError(
                "the first micro-batch that reduces gradients has num_items=0, and static_graph=True",
                why="torch learns a static graph from the first backward through the model",
                fix="begin with a batch that has items, or leave static_graph out",
            )
        if not any(replica.find_unused_parameters for replica in replicas):
            reached = set(parameters)
        super().backward_zero(models, parameters, reached, loss)

    @staticmethod
    def sync_next_backward(model: nn.Module) -> None:
        """Arms the reducer for a backward whose forward ran quietly."""
        replica = _replica(model)
        if replica is not None:
            replica.require_backward_grad_sync = True
            replica.require_forward_param_sync = True
            replica.reducer.prepare_for_backward([])

    def state(self, model: nn.Module) -> dict[str, Any]:
        """With the prefix that torch's wrapper gives to names, so that checkpoints can be exchanged."""
        return {f"{_PREFIX}{name}": value for name, value in self.unwrap(model).state_dict().items()}

    def load(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """With or without that prefix."""
        plain = {name.removeprefix(_PREFIX): value for name, value in state.items()}
        module = self.unwrap(model)
        own = module.state_dict().keys()
        # A model whose own names begin with the prefix keeps them.
        return module.load_state_dict(plain if plain.keys() & own or not own else state, strict=strict)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own object, also inside torch's wrapper when the user made one."""
        if isinstance(model, Replicated):
            return model._user_module
        return model.module if isinstance(model, DistributedDataParallel) else model


def _trains(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _replica(model: nn.Module) -> DistributedDataParallel | None:
    return model if isinstance(model, DistributedDataParallel) else replica_of(model)


def _differs(option: Option, replica: DistributedDataParallel) -> str:
    """What torch's reducer has instead of an option; empty when it has it."""
    found: dict[str, Any] = replica._get_ddp_logging_data()
    if option.name == "comm_hook":
        hooked = found.get("comm_hook", "")
        return "" if hooked else "no communication hook is registered"
    if option.name in ("comm_wrapper", "comm_state_option"):
        return "" if replica._comm_hooks else "there is no comm_hook that it could belong to"
    name, here = option.name, found.get(option.name, getattr(replica, option.name, None))
    if name == "bucket_cap_mb":
        here = found["bucket_cap_bytes"] // 2**20
    return "" if here == option.value else f"the reducer has {here}"


def _learning(replica: DistributedDataParallel) -> bool:
    """Whether a static graph is still to be learnt: torch does that in a backward that reduces."""
    return replica.static_graph and not getattr(replica, "_static_graph_delay_allreduce_enqueued", False)


@contextmanager
def _quiet(models: Iterable[nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for model in models:
            replica = _replica(model)
            if replica is not None and not _learning(replica):
                stack.enter_context(replica.no_sync())
        yield


PLUGIN = DDP
