"""Handles of DeepSpeed engines: making one from a model and its optimizer; its window, norm and step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from accelerate.core import environ
from accelerate.core.errors import PrepareError, SettingError, list_first, warn_user
from accelerate.strategy.deepspeed import reduced_gradients
from accelerate.strategy.deepspeed.config_tree import DummyOptim, DummyScheduler, as_param_groups
from accelerate.strategy.deepspeed.config_tree import get_key as config_value
from accelerate.strategy.deepspeed.layer_inputs import cast_layer_inputs
from accelerate.strategy.deepspeed.omitted_steps import OmittedStepWatch
from accelerate.strategy.deepspeed.stage3_states import complete_optimizer_states, guard_state_dict
from accelerate.strategy.protocol.replicated_buffers import broadcast_tensors, sync_buffers
from accelerate.world import call_site, watchdog
from accelerate.world.world import World

_REQUIRES_GRAD = attrgetter("requires_grad")
_NO_BACKWARD = (
    "optimizer.step() before any accelerator.backward(loss): it has no gradients to step with, and changes "
    "nothing. Those of loss.backward() are not used, and those of engine.backward(loss) by engine.step() "
    "alone: call accelerator.backward(loss)"
)


@dataclass
class EngineHandle:
    """A ``DeepSpeedEngine`` and the objects it was made of.

    Attributes:
        engine: the ``DeepSpeedEngine``; it is the prepared model.
        config: the configuration it was made with.
        optimizer: the torch optimizer that steps inside of it; None for a model alone.
        groups: the parameters of the optimizer's groups, as the user made them.
        scheduler: the schedule that DeepSpeed advances, or None.
        clip_norm: ``gradient_clipping`` of the configuration; 0 is none.
        is_strict: another limit in ``clip_grad_norm_`` is an error, not one warning.
        has_warned_of_limit: that warning was given.
        has_gradients: whether a backward has run since gradients were used or cleared.
        has_run_backward: whether one has ever run, or its lack was told.
        window_complete: whether the last backward was the last of its window.
        grad_factor: the factor for gradients when they are used, set for a short window.
        reduced: the gradients of complete backwards, while another one runs.
        hooks: the hooks on the module besides DeepSpeed's own.
        trained: of the parameters in ``groups``, which trained when DeepSpeed took them.
        omitted_steps: notices steps that the program leaves out.
    """

    engine: Any
    config: dict[str, Any]
    optimizer: Any = None
    groups: list[list[torch.Tensor]] = field(default_factory=list)
    scheduler: Any = None
    clip_norm: float = 0.0
    is_strict: bool = False
    has_warned_of_limit: bool = False
    has_gradients: bool = False
    has_run_backward: bool = False
    window_complete: bool = False
    grad_factor: float = 1.0
    reduced: reduced_gradients.ReducedGradients = field(default_factory=dict)
    hooks: list[Any] = field(default_factory=list)
    trained: list[bool] = field(init=False)
    omitted_steps: OmittedStepWatch = field(init=False)

    def __post_init__(self) -> None:
        self.trained = list(map(_REQUIRES_GRAD, chain(*self.groups)))
        self.omitted_steps = OmittedStepWatch(self.engine, lambda: self._is_trainability_changed)

    @property
    def _is_trainability_changed(self) -> bool:
        return list(map(_REQUIRES_GRAD, chain(*self.groups))) != self.trained

    @property
    def trained_params(self) -> set[torch.Tensor]:
        """The parameters that DeepSpeed trains."""
        return {p for p, trained in zip(chain(*self.groups), self.trained, strict=True) if trained}

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return self.engine.module

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return int(self.engine.zero_optimization_stage())

    @property
    def engine_optimizer(self) -> Any:
        """DeepSpeed's optimizer, around the user's."""
        return self.engine.optimizer

    @property
    def has_fp32_copies(self) -> bool:
        """True if DeepSpeed keeps its own float32 copies of the weights, in flat vectors."""
        return self.engine_optimizer is not self.optimizer and self.optimizer is not None

    def change_weights(self, change: Callable[[], None]) -> None:
        """Call what changes the optimizer's float32 vectors, and copy these to the model; collective."""
        inner = self.engine_optimizer
        if self.stage < 3:
            change()
            if hasattr(inner, "update_lp_params"):
                inner.update_lp_params()
            elif self.has_fp32_copies:
                for high, low in _weights_of_stage0(inner):
                    low.data.copy_(high.data)
            return
        inner._set_fp32_optimizer_param_groups()
        try:
            change()
        finally:
            inner._clear_fp32_optimizer_param_groups()
        inner.checkpoint_event_prologue()  # partitions small parameters, which stay all-gathered
        for number in range(len(inner.fp32_partitioned_groups_flat)):
            inner._reassign_or_swap_out_partitioned_parameters(number)
        inner.checkpoint_event_epilogue()

    # --- one window

    def backward(self, loss: torch.Tensor, *, complete: bool, **kwargs: Any) -> None:
        """Run the backward pass of a loss that is divided already; reduce gradients when ``complete``.

        Raises:
            PrepareError: it comes after a complete one, and the gradients of both cannot be added up.
        """
        self.omitted_steps.pause()
        is_open = self.has_gradients and not self.window_complete
        if self.has_gradients and self.window_complete:
            self.reduced = reduced_gradients.take_reduced(self.engine_optimizer)
        reduced_gradients.begin_backward(self.engine_optimizer)
        self.engine.set_gradient_accumulation_boundary(complete)
        # In a short window only this loss was divided by the window's true number of micro-batches.
        share = loss if self.grad_factor == 1.0 else loss / self.grad_factor
        self.has_gradients, self.window_complete, self.has_run_backward = True, complete, True
        self.engine.backward(share, scale_wrt_gas=False, **kwargs)
        if complete:
            reduced_gradients.finish_window(self.engine_optimizer)
        if complete and self.reduced:
            reduced_gradients.add_reduced(self.engine_optimizer, self.reduced)
            self.reduced = {}
        if complete:
            self.omitted_steps.note_complete_backward(ends_window=is_open)

    def step(self) -> None:
        """Take the step, and clear gradients.

        Raises:
            PrepareError: the last backward was not the last of its window, or parameters were frozen or
                unfrozen after ``prepare``.
        """
        if self._is_trainability_changed:
            self._refuse_changed()
        self._refuse_open_window("optimizer.step()")
        if not self.has_gradients:
            if not self.has_run_backward:
                self.has_run_backward = True
                warn_user(_NO_BACKWARD)
            return
        self.engine.set_gradient_accumulation_boundary(True)
        if self.grad_factor != 1.0 and not hasattr(self.engine_optimizer, "loss_scaler"):
            own = getattr(self.engine_optimizer, "fp32_groups_gradients_flat", ())
            for gradient in own or (p.grad for p in self.module.parameters()):
                if gradient is not None:
                    gradient.mul_(self.grad_factor)
        with self._changed_loss_scale():
            self.engine.step()
        reduced_gradients.clear_reduced(self.engine_optimizer)
        self.has_gradients, self.grad_factor = False, 1.0
        self.omitted_steps.reset()
        self.set_clipping(self.clip_norm)

    @contextmanager
    def _changed_loss_scale(self) -> Iterator[None]:
        """Let a step multiply gradients by ``grad_factor``, where DeepSpeed scales losses; a context."""
        scaler = getattr(self.engine_optimizer, "loss_scaler", None) if self.grad_factor != 1.0 else None
        if scaler is None:
            yield
            return
        scaler.cur_scale /= self.grad_factor
        try:
            yield
        finally:
            scaler.cur_scale *= self.grad_factor

    def _refuse_open_window(self, call: str) -> None:
        if self.has_gradients and not self.window_complete:
            raise PrepareError(
                f"{call} with gradients that are not complete",
                why="the last backward ran in no_sync or in the middle of a window, so they were not reduced",
                fix="run the last backward of a step outside no_sync",
            )

    def _refuse_changed(self) -> None:
        pairs = zip(chain(*self.groups), self.trained, strict=True)
        changed = {id(p) for p, trained in pairs if p.requires_grad is not trained}
        names = [name for name, p in self.module.named_parameters() if id(p) in changed]
        raise PrepareError(
            f"requires_grad of {list_first(names)} was changed after prepare",
            why="DeepSpeed has partitioned the parameters that trained then: it would go on to change frozen "
            "ones, and never change the others",
            fix="set requires_grad before prepare, or prepare the model and its optimizer anew",
        )

    def clear_gradients(self) -> None:
        """Clear gradients that were never used."""
        if not self.has_gradients:
            return
        self.has_gradients, self.grad_factor, self.reduced = False, 1.0, {}
        self.omitted_steps.reset()
        inner = self.engine_optimizer
        if hasattr(inner, "averaged_gradients"):
            inner.zero_grad(set_to_none=True)
        else:
            self.engine.zero_grad()
        if hasattr(inner, "clear_hp_grads"):
            inner.clear_hp_grads()
        elif self.stage in (1, 2):
            self._clear_window()
        reduced_gradients.clear_reduced(self.engine_optimizer)

    def _clear_window(self) -> None:
        # Stages 1 and 2 have reduced already; this is what DeepSpeed itself does after an overflow.
        inner = self.engine_optimizer
        inner.micro_step_id = -1
        inner._release_preflattened_grad_buffers()
        if inner.cpu_offload:
            inner.reset_cpu_buffers()
            inner._offload_accumulated_param_ids = set()
        for buffers in (inner.averaged_gradients, inner.all_grad_tensors):
            for group in buffers:
                buffers[group] = None

    @property
    def skipped_step(self) -> bool:
        """True if the last step was skipped because a gradient was not finite."""
        return bool(getattr(self.engine_optimizer, "overflow", False))

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped so; a checkpoint of DeepSpeed keeps it."""
        return int(self.engine.skipped_steps)

    # --- clipping

    def global_norm(self) -> torch.Tensor:
        """Return the norm of all gradients over all ranks, unscaled; collective."""
        inner = self.engine_optimizer
        if not self.has_gradients:
            last = self.engine.get_global_grad_norm()
            return torch.as_tensor(0.0 if last is None else last, dtype=torch.float32)
        self.omitted_steps.has_read_norm = True
        if hasattr(inner, "scaled_global_norm"):
            inner._wait_for_offload_copies() if hasattr(inner, "_wait_for_offload_copies") else None
            norm = inner.scaled_global_norm()
        elif hasattr(inner, "_get_norm_groups"):
            from deepspeed.runtime.utils import combine_grad_norm_groups  # type: ignore[import-not-found]

            norm = combine_grad_norm_groups(inner._get_norm_groups())
        elif hasattr(inner, "get_grads_for_norm"):
            from deepspeed.runtime.utils import get_global_norm_of_tensors  # type: ignore[import-not-found]

            norm = get_global_norm_of_tensors(inner.get_grads_for_norm()[0], mpu=inner.mpu)
        else:
            norm = _grad_norm(p.grad for p in self.module.parameters() if p.grad is not None)
        loss_scale = float(getattr(inner, "loss_scale", 1.0) or 1.0)
        norm = torch.as_tensor(norm, dtype=torch.float32) * (self.grad_factor / loss_scale)
        # Trainers ask for it after clipping, when DeepSpeed would tell that of the step before.
        self.engine._global_grad_norm = norm
        return norm

    def clip_next_step(self, max_norm: float) -> None:
        """Clip by ``max_norm`` in the next step; a limit in the configuration counts instead, as in 1.x.

        Raises:
            PrepareError: the last backward was not the last of its window.
            SettingError: the run is strict, and the configuration has another limit, or forbids clipping.
        """
        self._refuse_open_window("clip_grad_norm_")
        limit = self.clip_norm
        if max_norm in (limit, float("inf")):
            return
        computes_norm = config_value(self.config, "zero_optimization.compute_grad_norm", True)
        if not limit and computes_norm:
            self.set_clipping(max_norm)
            return
        if computes_norm:
            is_set = "gradient_clipping" in self.config
            says = "says gradient_clipping:" if is_set else "has no gradient_clipping, and DeepSpeed takes"
            says, fix = f"{says} {limit}", 'write "gradient_clipping": "auto" there'
        else:
            says = "says compute_grad_norm: false, without which DeepSpeed clips nothing"
            fix = "leave that out"
        claim = f"clip_grad_norm_ was given {max_norm}, but the DeepSpeed configuration {says}"
        if self.is_strict:
            raise SettingError(claim, why="the run is strict", fix=fix)
        if not self.has_warned_of_limit:
            self.has_warned_of_limit = True
            counts = ", which counts, as in 1.x" if computes_norm else ""
            warn_user(f"{claim}{counts}: for the argument to count, {fix}")

    def set_clipping(self, value: float) -> None:
        """Make the next step scale gradients so that their norm is at most ``value``; 0 scales nothing."""
        self.engine._config.gradient_clipping = value
        if hasattr(self.engine_optimizer, "clip_grad"):
            self.engine_optimizer.clip_grad = value


def _grad_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(gradient.float()) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


# --- making one


def init_deepspeed(world: World) -> None:
    """Initialize DeepSpeed with the process group of this world; a world of one gets a group of one."""
    import torch.distributed as dist
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

    # DeepSpeed reads this variable.
    environ.set_variables({"LOCAL_RANK": world.local_rank})
    if not dist.is_initialized():
        backend = "gloo" if world.device.type == "cpu" else None
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    if world.device.type == "cpu" and environ.get("DS_ACCELERATOR") is None:
        environ.set_variables({"DS_ACCELERATOR": "cpu"})
    import deepspeed  # type: ignore[import-not-found]

    if environ.get("DS_BUILD_SHM_COMM") is None:
        # It would be compiled now, for half a minute; gloo does the same.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)


def make_engine(model: nn.Module, config: Mapping[str, Any], optimizer: Any, scheduler: Any) -> EngineHandle:
    """Make a ``DeepSpeedEngine`` over ``model``, which stays the module inside of it.

    Args:
        model: the user's.
        config: complete, as ``build_config`` makes it.
        optimizer: of torch, or a ``DummyOptim``; None for a model that is not trained.
        scheduler: a ``DummyScheduler``, or a schedule of DeepSpeed; None leaves schedules to the user.
    """
    import deepspeed  # type: ignore[import-not-found]

    arguments: dict[str, Any] = {"model": model, "config": dict(config)}
    groups: list[dict[str, Any]] = []
    if isinstance(optimizer, DummyOptim):
        groups = as_param_groups(optimizer.params)
        has_options = len(groups) > 1 or groups[0].keys() != {"params"}
        arguments["model_parameters"] = groups if has_options else list(groups[0]["params"])
    elif optimizer is not None:
        groups = optimizer.param_groups
        arguments["optimizer"] = optimizer
    else:
        arguments["model_parameters"] = [p for p in model.parameters() if p.requires_grad]
    if isinstance(scheduler, DummyScheduler):
        arguments["lr_scheduler"] = scheduler.lr_scheduler_callable
    elif scheduler is not None:
        arguments["lr_scheduler"] = scheduler
    user_groups = [list(group["params"]) for group in groups]
    configured = str(config_value(config, "optimizer.type")).lower()
    is_adagrad = isinstance(optimizer, torch.optim.Adagrad) or configured == "adagrad"
    if is_adagrad and config_value(config, "zero_optimization.stage") in (1, 2):
        # They have no vector until ``_restore_adagrad`` links those of each group to theirs.
        for parameter in chain(*user_groups):
            parameter._hp_mapping = None
    for tensor in chain(model.parameters(), model.buffers()):
        if not tensor.is_contiguous():  # DeepSpeed broadcasts views of them, of bytes
            tensor.data = tensor.data.contiguous()
    engine, _, _, schedule = deepspeed.initialize(**arguments)
    handle = EngineHandle(
        engine, dict(config), getattr(engine, "basic_optimizer", None), user_groups, schedule
    )
    _restore_adagrad(handle)
    _track_groups(engine)
    handle.clip_norm = float(engine.gradient_clipping() or 0.0)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float16 if engine.fp16_enabled() else None
    _undo_first_step(handle)
    replicate_buffers(model)
    if dtype is not None:
        handle.hooks += cast_layer_inputs(model, dtype)
    if handle.stage == 3:
        handle.hooks.append(guard_state_dict(engine))
        handle.hooks += complete_optimizer_states(handle.optimizer, handle.engine_optimizer)
    return handle


def _restore_adagrad(handle: EngineHandle) -> None:
    """Put the user's ``torch.optim.Adagrad`` back, which ZeRO replaces by one of a single group.

    Groups keep their options, and schedules act on the optimizer that steps.
    """
    inner, optimizer = handle.engine_optimizer, handle.optimizer
    if not isinstance(optimizer, torch.optim.Adagrad) or getattr(inner, "optimizer", optimizer) is optimizer:
        return
    optimizer.state.clear()
    optimizer.state.update(inner.optimizer.state)
    inner.optimizer = optimizer
    owners = getattr(inner, "sub_group_to_group_id", range(len(optimizer.param_groups)))
    for number, values in enumerate(optimizer.state.values()):
        values["sum"].fill_(optimizer.param_groups[owners[number]]["initial_accumulator_value"])
    if handle.stage < 3:
        inner._link_all_hp_params()
        inner._param_slice_mappings = inner._create_param_mapping()
        if inner.cpu_offload:
            inner._create_optimizer_mapping()


def _track_groups(engine: Any) -> None:
    """Let the watchdog count the collectives of DeepSpeed's own groups, and name the user's lines."""
    import deepspeed  # type: ignore[import-not-found]

    call_site.add_training_library(deepspeed)
    watch = watchdog.current()
    if watch is not None:
        for group in (engine.data_parallel_group, engine.seq_data_parallel_group):
            watch.track_group(group)


def replicate_buffers(model: nn.Module) -> None:
    """Give all ranks the buffers of rank 0, now and while they train: DeepSpeed does it with parameters."""
    import torch.distributed as dist

    everyone: Any = dist.group.WORLD
    if dist.get_world_size() > 1:
        broadcast_tensors(model.buffers(), [everyone])
        sync_buffers(model, [everyone])


def _undo_first_step(handle: EngineHandle) -> None:
    """Undo the step that stage 0 in 16 bits has taken to initialize the optimizer state.

    Without this, weights have decayed, and Adam would count from 2.
    """
    engine_optimizer = handle.engine_optimizer
    if handle.stage or handle.optimizer is None or not hasattr(engine_optimizer, "fp16_groups"):
        return
    for high, low in _weights_of_stage0(engine_optimizer):
        high.data.copy_(low.data)
    handle.optimizer.state.clear()


def _weights_of_stage0(engine_optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the float32 and the 16-bit tensors of stage 0 in 16 bits: weights, or flat vectors of them."""
    if hasattr(engine_optimizer, "fp32_groups_flat"):
        yield from zip(engine_optimizer.fp32_groups_flat, engine_optimizer.fp16_groups_flat, strict=True)
        return
    for highs, lows in zip(engine_optimizer.fp32_groups, engine_optimizer.fp16_groups, strict=True):
        yield from zip(highs, lows, strict=True)


def replace_engine(user_engine: Any, new: EngineHandle) -> EngineHandle:
    """Make the engine object that users hold the new engine over the same module."""
    # Hooks hold the new object: both share one ``__dict__``, and are freed together.
    vars(new.engine)["_twin"] = new.engine
    object.__setattr__(user_engine, "__dict__", vars(new.engine))
    new.engine = user_engine
    return new


def release_engine(handle: EngineHandle) -> None:
    """Remove an engine from its module, so that another one may replace it."""
    engine = handle.engine
    for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook, *handle.hooks):
        hook.remove()
    handle.omitted_steps.reset()
    if hasattr(engine.optimizer, "destroy"):
        engine.optimizer.destroy()


class DeepSpeedEngineRegistry:
    """The engine handles of one ``Accelerator``."""

    def __init__(self) -> None:
        self._handles: list[EngineHandle] = []
        # By the id of its module, which it keeps: the newest engine, as long as the program holds it.
        self._released: WeakValueDictionary[int, Any] = WeakValueDictionary()

    def __iter__(self) -> Iterator[EngineHandle]:
        return iter(self._handles)

    def add(self, handle: EngineHandle) -> None:
        """Add a handle, in the place of one with the same engine object."""
        self._handles = [h for h in self._handles if h.engine is not handle.engine]
        self._handles.append(handle)
        self._released.pop(id(handle.module), None)

    def clear(self) -> None:
        """Release all engines from their modules."""
        for handle in self._handles:
            release_engine(handle)
            self._released[id(handle.module)] = handle.engine
        self._handles = []

    def released_engines(self) -> list[Any]:
        """Return each ``DeepSpeedEngine`` that ``clear`` has released, and that the program still holds."""
        return list(self._released.values())

    def find(self, model: Any) -> EngineHandle | None:
        """Return the handle of a model, prepared or the user's own, or None."""
        return next((m for m in self._handles if m.engine is model or m.module is model), None)

    def find_by_optimizer(self, optimizer: Any) -> EngineHandle | None:
        """Return the handle of the engine in which an optimizer steps, or None."""
        return next((m for m in self.trained_engines() if m.optimizer is optimizer), None)

    def trained_engines(self) -> list[EngineHandle]:
        """Return the handles with an optimizer."""
        return [handle for handle in self._handles if handle.optimizer is not None]
