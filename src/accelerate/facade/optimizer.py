"""The prepared optimizer: steps only when gradients are complete, through the precision and the strategy."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod
from zlib import crc32

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from accelerate.core import tree
from accelerate.core.errors import PrepareError, warn_user
from accelerate.facade.gradient_state import GradientState
from accelerate.facade.host_copies import HOST_COPIES, refresh_host_copies
from accelerate.precision.base import Precision
from accelerate.strategy.base import EngineStrategy, Strategy
from accelerate.strategy.protocol.gradient_sync import (
    NO_CONTEXT,
    ParamReplacement,
    ReductionMonitor,
    explain_sharded_step,
)
from accelerate.world import collective

# The kinds of options of a group that all ranks must have alike; a text may name a device.
_PLAIN = (int, float, tuple, type(None))


def move_to_device(state: Any, device: torch.device) -> Any:
    """Return an optimizer state (any tree) with its tensors on ``device``."""
    return tree.map_tree(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, state)


def move_optimizer(optimizer: Optimizer, renewed: dict[int, torch.Tensor], device: torch.device) -> None:
    """Replace parameters of an optimizer, and move its state to the devices of its parameters.

    Args:
        renewed: new parameters by ``id`` of the old ones.
        device: for state that is of no parameter.
    """
    for group in optimizer.param_groups if renewed else ():
        group["params"][:] = [renewed.get(id(p), p) for p in group["params"]]
    # One that steps through optimizers of its own may have no state.
    for old, state in list(getattr(optimizer, "state", {}).items()):
        if not isinstance(old, torch.Tensor):
            optimizer.state[old] = move_to_device(state, device)
            continue
        del optimizer.state[old]
        parameter: Any = renewed.get(id(old), old)
        # A 0-dimensional step counter stays on the host unless the optimizer runs fused.
        optimizer.state[parameter] = {
            name: value if name == "step" else move_to_device(value, parameter.device)
            for name, value in state.items()
        }


class AcceleratedOptimizer(Optimizer):
    """The wrapper of the user's optimizer.

    ``step`` and ``zero_grad`` do nothing while gradients are being accumulated.

    Attributes:
        fuses_backward: it updates weights during ``Accelerator.lomo_backward``, and does not step.
        steps_in_backward: its steps, which the program leaves out, are taken in ``Accelerator.backward``.
        host_copies: host copies of parameters, by parameter, if it steps these; its own hooks copy each
            gradient during the backward.

    Args:
        optimizer: the user's.
        device_placement: kept for compatibility; ``prepare`` places the state.
        scaler: a gradient scaler to step through, when no ``Accelerator`` prepares it.
    """

    optimizer: Optimizer
    device_placement: bool
    gradient_state: GradientState
    fuses_backward: bool
    steps_in_backward: bool = False
    # That of a fused optimizer is True, at which torch's scaler sets the scale and the overflow as attributes
    # of what it is given: this wrapper, where the inner step does not read them.
    _step_supports_amp_scaling = False

    def __init__(
        self, optimizer: Optimizer, device_placement: bool = True, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        # Not Optimizer.__init__: the inner optimizer holds state and groups.
        self.optimizer, self.device_placement, self.scaler = optimizer, device_placement, scaler
        self.gradient_state = GradientState._current or GradientState()
        self._has_own_scaler = scaler is not None
        self._precision: Precision | None = None
        self._strategy: Strategy | None = None
        self._engine: EngineStrategy | None = None
        # The last step: done, or a flag on the device; and the earlier ones that nobody has asked for yet.
        self._has_stepped: bool | torch.Tensor = True
        self._unread_skips: torch.Tensor | None = None
        self._skipped_steps = 0
        # LOMO updates weights during backward; its step and zero_grad have nothing left to do.
        self.fuses_backward = callable(getattr(optimizer, "fused_backward", None))
        self.host_copies: dict[torch.Tensor, Any] = getattr(optimizer, HOST_COPIES, {})
        self._host_versions: dict[torch.Tensor, tuple[int, int]] = {}  # of the parameters, when copied last
        self._checks: tuple[WeakMethod[Callable[[AcceleratedOptimizer], None]], ...] = ()
        self._first_step_checks = self._checks
        self._partial_reads: Any = None  # until a step is taken, and on if that has read such numbers
        self._monitor: ReductionMonitor | None = None
        self._unreduced: set[torch.Tensor] = set()
        # Of a lazy device: it runs what the step has recorded.
        self._run_pending: Callable[[], None] | None = None
        self._is_accelerate_prepared, self._has_warned_of_drop = True, False

    def bind(
        self,
        gradients: GradientState,
        precision: Precision,
        strategy: Strategy,
        first_step_checks: tuple[Callable[[AcceleratedOptimizer], None], ...] = (),
    ) -> AcceleratedOptimizer:
        """Bind it to one ``Accelerator``, which may check it before its first step; return itself.

        The one that has prepared it last counts. It stays as it is if DeepSpeed or Megatron-LM steps it, or a
        scaler that it was made with.

        Args:
            gradients, precision, strategy: those of the ``Accelerator``.
            first_step_checks: bound methods. They hold the ``Accelerator``, and by it this optimizer: a cycle
                would keep models and loaders in memory until a garbage collection.
        """
        is_bound = self._strategy is strategy and self.gradient_state is gradients
        if is_bound or self._engine is not None or self._has_own_scaler:
            return self
        self._checks = self._first_step_checks = tuple(map(WeakMethod, first_step_checks))
        self._monitor = strategy if isinstance(strategy, ReductionMonitor) else None
        self._unreduced = set() if self._monitor is None else self._monitor.unreduced
        self.gradient_state, self._precision, self._strategy = gradients, precision, strategy
        self._engine = strategy if isinstance(strategy, EngineStrategy) else None
        hardware = strategy.world.hardware
        self._run_pending = hardware.run_pending if hardware.is_lazy else None
        self.scaler = precision.scaler if precision.scales_loss else None
        precision.attach_optimizer(self.optimizer)
        # Tensors of groups, such as an estimated learning rate, go where the parameters are now.
        for group in getattr(self.optimizer, "param_groups", ()):
            for name, value in group.items():
                if isinstance(value, torch.Tensor) and group["params"]:
                    group[name] = value.to(group["params"][0].device)
        return self

    def __repr__(self) -> str:
        return f"Accelerated{self.optimizer!r}"

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which steps parameters of its own, without strategy and precision."""
        unbound = dict.fromkeys(
            ("_precision", "_strategy", "_engine", "_monitor", "_run_pending", "_partial_reads")
        )
        checks = {"_checks": (), "_first_step_checks": (), "_unreduced": set[torch.Tensor]()}
        state = {**self.__dict__, **unbound, **checks}
        # Where a scheduler was made for this wrapper, torch has set a ``step`` that steps this one.
        return {name: value for name, value in state.items() if name not in ("step", "_opt_called")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def accelerator_state(self) -> Any:
        """The ``AcceleratorState`` of the newest ``Accelerator``."""
        from accelerate.facade.state import AcceleratorState  # which shows optimizers' gradient state

        return AcceleratorState()

    @property
    def state(self) -> Any:
        """The inner optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:  # type: ignore[override]
        self.optimizer.state = value

    @property
    def param_groups(self) -> Any:
        """The inner optimizer's groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:  # type: ignore[override]
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> Any:
        """The inner optimizer's defaults."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: Any) -> None:  # type: ignore[override]
        self.optimizer.defaults = value

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last ``step`` did not happen because a gradient was not finite."""
        if isinstance(self._has_stepped, torch.Tensor):
            self._has_stepped = bool(self._has_stepped.item())
        return not self._has_stepped

    @property
    def _is_overflow(self) -> bool:
        return self.step_was_skipped  # clients of Accelerate 1.x read it

    @_is_overflow.setter
    def _is_overflow(self, is_overflow: bool) -> None:
        self._has_stepped = not is_overflow  # a subclass, or a program, has a ``step`` of its own

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped because a gradient was not finite.

        Under a fused optimizer this, like ``step_was_skipped``, waits for the device when it is read.
        """
        if self._unread_skips is not None:
            self._skipped_steps += int(self._unread_skips.item())
            self._unread_skips = None
        return self._skipped_steps

    def _record_step(self, stepped: bool | torch.Tensor) -> None:
        self._has_stepped = stepped
        if not isinstance(stepped, torch.Tensor):
            self._skipped_steps += not stepped
        elif self._unread_skips is None:
            self._unread_skips = 1 - stepped.long()
        else:
            self._unread_skips += 1 - stepped.long()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer, whose next step is checked as a first one.

        Raises:
            PrepareError: DeepSpeed or Megatron-LM took the groups in ``prepare``.
        """
        if self._engine is not None:
            raise PrepareError(
                f"add_param_group() of an optimizer that {self._engine.name} steps",
                why="it took the parameters of all groups in prepare, and would not train others",
                fix="give the optimizer all groups before prepare",
            )
        params = param_group["params"]
        if not isinstance(params, set):  # torch refuses it
            entries = [params] if isinstance(params, torch.Tensor) else list(params)
            named = [each if isinstance(each, tuple) else (None, each) for each in entries]
            current = current_params(self._strategy, [p for _, p in named])
            entries = [p if name is None else (name, p) for (name, _), p in zip(named, current, strict=True)]
            param_group = {**param_group, "params": entries}
        self.optimizer.add_param_group(param_group)
        self._first_step_checks = self._checks

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the inner optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the inner optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Call ``train`` of optimizers that have a training mode."""
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # type: ignore[attr-defined]

    def eval(self) -> None:
        """Call ``eval`` of optimizers that have an evaluation mode."""
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients, unless they are being accumulated.

        DeepSpeed and Megatron-LM keep those of the window's earlier micro-batches until its step, as in 1.x.
        """
        gradients = self.gradient_state
        if not gradients.sync_gradients or self.fuses_backward:
            return
        # All gradients are of earlier micro-batches.
        if gradients.last_micro_batch_began_at == gradients.backward_count:
            if self._engine is not None:
                return
            self._warn_of_dropped_gradients()
        zero = self.optimizer.zero_grad
        if set_to_none is not None:
            zero = partial(zero, set_to_none=set_to_none)
        if self._strategy is not None:
            self._strategy.zero_grad(self.optimizer, zero)
        else:
            zero()
        if self._precision is not None and self._precision.loss_scaling is not None:
            self._precision.loss_scaling.note_cleared(self.optimizer)
        gradients.has_unweighted_grads, gradients.abandoned_window = False, ""
        if gradients.loss_weighting is not None:
            gradients.loss_weighting.reset_used(self.optimizer)

    def _warn_of_dropped_gradients(self) -> None:
        if not self._has_warned_of_drop and self._strategy is not None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            self._has_warned_of_drop = bool(self._strategy.gradients(parameters))
            if self._has_warned_of_drop:
                warn_user(
                    "optimizer.zero_grad() before the backward of the last micro-batch of a window drops the "
                    f"gradients of the others, of {self.gradient_state.num_steps} in all: call it after "
                    "optimizer.step()"
                )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step, unless gradients are being accumulated; return the result of the inner ``step``.

        Raises:
            PrepareError: the gradients are those of a window that was left early, or weighted by items and
                not complete; or the optimizer does not know sharded parameters.
        """
        gradients = self.gradient_state
        if not gradients.sync_gradients or self.fuses_backward:
            return None
        if self._engine is None:  # DeepSpeed knows which gradients it has
            gradients.last_micro_batch_began_at = -1
        if gradients.abandoned_window:
            gradients.refuse_abandoned("optimizer.step()")
        if self._first_step_checks:
            checks, self._first_step_checks = self._first_step_checks, ()
            if closure is None:
                for reference in checks:
                    if (check := reference()) is not None:
                        check(self)
            if self._strategy is not None and self._strategy.shards_params:
                from accelerate.strategy.sharding.grads import PartialReads

                self._partial_reads = PartialReads(self.optimizer)
        if self._unreduced and self._monitor is not None:
            self._monitor.report_unreduced(p for group in self.param_groups for p in group["params"])
        if gradients.loss_weighting is not None:
            gradients.loss_weighting.check_complete(self.optimizer)
        if self.host_copies:
            averages = self._strategy is not None and self._strategy.data_shard.count > 1
            refresh_host_copies(self.optimizer, self._host_versions, averages)
        try:
            with self._partial_reads or NO_CONTEXT:
                if self._engine is not None:
                    result = self._engine.optimizer_step(self.optimizer, lambda: self._scaled_step(closure))
                elif self.scaler is not None:
                    result = self._scaled_step(closure)
                else:
                    result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        except (RuntimeError, NotImplementedError) as error:
            explain_sharded_step(self.optimizer, error)
            raise
        # A step that the gradient scaler skipped has read nothing yet; so one that was taken decides.
        if self._partial_reads is not None and not self._partial_reads.is_needed and self._has_stepped:
            self._partial_reads = None
        if self.host_copies:
            self._host_versions = {p: (p.data_ptr(), p._version) for p in self.host_copies}
        gradients.has_unweighted_grads = False
        if gradients.loss_weighting is not None:
            gradients.loss_weighting.reset_used(self.optimizer)
        if self._run_pending is not None:
            self._run_pending()
        return result

    def take_omitted_step(self, signal: str, models: Sequence[Any] | None = None) -> None:
        """Take the step that a program leaves to ``backward``: only under DeepSpeed there is such a program.

        Args:
            signal: the call that shows that no step will come.
            models: those whose gradients count; None for all.
        """

    def warn_of_omitted_step(self, consequence: str) -> None:
        """Warn of such a step, where it cannot be taken."""

    @property
    def is_in_train_mode(self) -> bool:
        """Return whether the weights are those of the training mode of an optimizer that has modes."""
        return any(group.get("train_mode") is True for group in self.optimizer.param_groups)

    def warn_of_unsaved_state(self) -> None:
        """Warn where tensors that it keeps outside of its state, as AdaLOMO does, are in no checkpoint."""
        own = {n: v for n, v in vars(self.optimizer).items() if n != "state" and isinstance(v, dict)}
        kept = [n for n, v in own.items() if any(isinstance(each, torch.Tensor) for each in v.values())]
        if kept:
            warn_user(
                f"{type(self.optimizer).__name__} keeps {', '.join(kept)} outside of its state_dict(), so "
                "the checkpoint is without them: a run that is resumed from it begins them anew"
            )

    def _scaled_step(self, closure: Callable[[], Any] | None) -> Any:
        """Take a step through the gradient scaler, which skips it when a gradient is not finite."""
        if self._precision is not None:
            stepped, result = self._precision.step(self.optimizer, closure)
            self._record_step(stepped)
            return result
        assert self.scaler is not None
        scale = self.scaler.get_scale()
        try:
            result = self.scaler.step(self.optimizer, closure)
        except AssertionError as error:
            if "_scale is None" not in str(error):
                raise
            raise PrepareError(
                f"a step of {type(self.optimizer).__name__}, whose own gradient scaler has scaled no loss",
                why="a copy of a prepared optimizer has a copy of the scaler, and no Accelerator",
                fix="prepare it: optimizer = accelerator.prepare(optimizer)",
            ) from error
        self.scaler.update()
        self._record_step(self.scaler.get_scale() >= scale)
        return result


def patch_optimizer_step(
    accelerated_optimizer: AcceleratedOptimizer, method: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``method`` as it is; kept for compatibility, since skipped steps are known without a patch."""
    return method


def current_params(strategy: Strategy | None, parameters: Any) -> list[torch.Tensor]:
    """Return the parameters that train in the place of ``parameters``; sharding replaces them."""
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return strategy.current_params(params) if isinstance(strategy, ParamReplacement) else params


def agree_on_optimizers(
    optimizers: Iterable[Any], prepared: Container[Any], shards: Container[Any], device: torch.device
) -> None:
    """Check that all ranks prepare optimizers with equal options and state: one all-reduce of four numbers.

    Each rank keeps the state that it has of optimizers that were prepared before, or that hold shards.

    Args:
        optimizers: the optimizers of one ``prepare``.
        prepared: the users' optimizers that were prepared before.
        shards: parameters of models that are sharded already; DTensors are known without.
        device: that of this rank.

    Raises:
        PrepareError: options differ; see ``settle_optimizers``, also about the state.
    """
    fresh = [o for o in optimizers if not isinstance(o, AcceleratedOptimizer) and hasattr(o, "param_groups")]
    options = [
        [{k: v for k, v in group.items() if isinstance(v, _PLAIN)} for group in o.param_groups] for o in fresh
    ]
    shared = [
        place
        for place, o in enumerate(fresh)
        if isinstance(o, Optimizer) and o not in prepared
        if not [p for g in o.param_groups for p in g["params"] if p in shards or hasattr(p, "device_mesh")]
    ]
    states = [
        [(sorted(state), [float(v.float().sum()) for v in state.values() if _has_values(v)])]
        for o in map(fresh.__getitem__, shared)
        for group in o.param_groups
        for p in group["params"]
        if (state := getattr(o, "state", {}).get(p))
    ]
    digests = [crc32(repr(options).encode()), crc32(repr((shared, states)).encode())]
    # Equal where the greatest is the least.
    place = "cpu" if device.type == "meta" else device
    both = torch.tensor([*digests, *(-digest for digest in digests)], dtype=torch.int64, device=place)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    greatest = both.tolist()
    if greatest[:2] != [-least for least in greatest[2:]]:
        settle_optimizers(fresh, options, shared)


def settle_optimizers(optimizers: Sequence[Any], options: list[Any], shared: list[int]) -> None:
    """Refuse optimizers with other options on other ranks; give those with another state that of rank 0.

    Collective; called when a digest has told that they differ.

    Args:
        optimizers: the optimizers of one ``prepare``.
        options: of each, the options of each group.
        shared: the places of those whose state is to be the same on all ranks; this rank has not prepared
            them before.

    Raises:
        PrepareError: options differ, or the weights are on the meta device; on all ranks.
    """
    groups = [group for place in shared for group in optimizers[place].param_groups]
    is_meta = any(p.is_meta for group in groups for p in group["params"])
    answers = collective.all_gather_object((options, is_meta, shared), "prepare(optimizer)")
    _refuse_other_options(optimizers, [options for options, *_ in answers])
    if any(is_meta for _, is_meta, _ in answers):
        raise PrepareError(
            "the state of the optimizer is not the same on all ranks, and parameters are on the meta device",
            why="each rank shards the state that it has",
            fix="load the state after prepare, with accelerator.load_state",
        )
    for place in sorted({place for *_, places in answers for place in places}):
        optimizer = optimizers[place]
        state = optimizer.state_dict()
        # Numbers stand for the parameters, which are each rank's own.
        own = move_to_device(state["state"], torch.device("cpu"))
        first: dict[str, Any] = collective.broadcast_object(own, 0)
        if collective.rank() != 0:
            optimizer.load_state_dict({**state, "state": first})
    if collective.rank() == 0:
        warn_user(
            "the state of an optimizer was not the same on all ranks when it was prepared: that of rank 0 "
            "counts, as the weights of rank 0 do"
        )


def _refuse_other_options(optimizers: Sequence[Any], options_by_rank: list[list[Any]]) -> None:
    first, *others = map(len, options_by_rank)
    for rank, count in enumerate(others, 1):
        if count != first:
            what = f"prepare was given {first} new optimizer(s) on rank 0 and {count} on rank {rank}"
            raise PrepareError(what, fix="prepare the same objects on all ranks")
    for rank, options in enumerate(options_by_rank):
        for optimizer, groups, others in zip(optimizers, options_by_rank[0], options, strict=True):
            if len(groups) != len(others):
                _refuse(optimizer, "the number of groups", len(groups), len(others), rank)
            for number, (group, other) in enumerate(zip(groups, others, strict=True)):
                for name in dict.fromkeys((*group, *other)):
                    if group.get(name) != other.get(name):
                        what = f"{name} of group {number}"
                        _refuse(optimizer, what, group.get(name), other.get(name), rank)


def _refuse(optimizer: Any, what: str, first: Any, other: Any, rank: int) -> None:
    raise PrepareError(
        f"{what} of the {type(optimizer).__name__} is {first} on rank 0 and {other} on rank {rank}",
        why="the ranks train one model: with other options on each, its replicas or shards drift apart",
        fix="make the optimizer with the same options on all ranks",
    )


def _has_values(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_meta
