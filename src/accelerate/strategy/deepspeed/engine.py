"""One engine: made from a model and its optimizer; its window, norm, clipping and step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accelerate.core import environ, tree
from accelerate.core.errors import PrepareError, SettingError
from accelerate.strategy.deepspeed.tree import DummyOptim, DummyScheduler, parameter_groups
from accelerate.strategy.deepspeed.tree import get as config_value
from accelerate.world.world import World


@dataclass
class Made:
    """An engine and what it was made of.

    Attributes:
        engine: DeepSpeed's; it is the prepared model.
        config: the configuration it was made with.
        optimizer: the torch optimizer that steps inside of it; None for a model alone.
        groups: the parameters of the optimizer's groups, as the user made them.
        scheduler: the schedule that the engine advances, or None.
        clip: the limit of the configuration; 0 is none.
        pending: a backward has run since gradients were used or dropped.
        complete: the last one was the last of its window.
        stretch: what gradients are multiplied by when they are used; a short window says so.
        hooks: what was attached to the module beside the engine's own.
    """

    engine: Any
    config: dict[str, Any]
    optimizer: Any = None
    groups: list[list[torch.Tensor]] = field(default_factory=list)
    scheduler: Any = None
    clip: float = 0.0
    pending: bool = False
    complete: bool = False
    stretch: float = 1.0
    hooks: list[Any] = field(default_factory=list)

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return self.engine.module

    @property
    def stage(self) -> int:
        """What is partitioned."""
        return int(self.engine.zero_optimization_stage())

    @property
    def inner(self) -> Any:
        """The optimizer of the engine, around the user's."""
        return self.engine.optimizer

    def owns(self, optimizer: Any) -> bool:
        """Whether ``optimizer`` steps in this engine."""
        return optimizer is not None and optimizer is self.optimizer

    # --- one window

    def backward(self, loss: torch.Tensor, *, complete: bool, **kwargs: Any) -> None:
        """The backward pass of a loss that is divided already; reduces gradients when ``complete``."""
        self.engine.set_gradient_accumulation_boundary(complete)
        # Its share of a short window was divided by what the window holds; the others were not.
        share = loss if self.stretch == 1.0 else loss / self.stretch
        self.pending, self.complete = True, complete
        self.engine.backward(share, scale_wrt_gas=False, **kwargs)

    def step(self) -> None:
        """Takes the step, and clears gradients.

        Raises:
            PrepareError: the last backward was not the last of its window.
        """
        if self.pending and not self.complete:
            raise PrepareError(
                "optimizer.step() with gradients that are not complete",
                why="the last backward ran in no_sync or in the middle of a window, so they were not reduced",
                fix="run the last backward of a step outside no_sync",
            )
        if not self.pending:
            return
        self.engine.set_gradient_accumulation_boundary(True)
        with _scaled(self.inner, self.stretch):
            if self.stretch != 1.0 and not hasattr(self.inner, "loss_scaler"):
                _multiply(self.module.parameters(), self.stretch)
            self.engine.step()
        self.pending, self.stretch = False, 1.0
        self._limit(self.clip)

    def drop(self) -> None:
        """Forgets gradients that were never used."""
        if not self.pending:
            return
        self.pending, self.stretch = False, 1.0
        inner = self.inner
        if hasattr(inner, "averaged_gradients"):
            inner.zero_grad(set_to_none=True)
        else:
            self.engine.zero_grad()
        if hasattr(inner, "clear_hp_grads"):
            inner.clear_hp_grads()
        elif self.stage in (1, 2):
            self._drop_reduced()

    def _drop_reduced(self) -> None:
        """What stages 1 and 2 have reduced already; what the engine itself does after an overflow."""
        inner = self.inner
        inner.micro_step_id = -1
        inner._release_preflattened_grad_buffers()
        if inner.cpu_offload:
            inner.reset_cpu_buffers()
            inner._offload_accumulated_param_ids = set()
        for kept in (inner.averaged_gradients, inner.all_grad_tensors):
            for group in kept:
                kept[group] = None

    @property
    def skipped(self) -> bool:
        """Whether the last step was not taken, because a gradient was not finite."""
        return bool(getattr(self.inner, "overflow", False))

    # --- clipping

    def norm(self) -> torch.Tensor:
        """The norm of all gradients over all processes, unscaled. All processes must call it."""
        inner = self.inner
        if not self.pending:
            last = self.engine.get_global_grad_norm()
            return torch.as_tensor(0.0 if last is None else last, dtype=torch.float32)
        if hasattr(inner, "scaled_global_norm"):
            inner._wait_for_offload_copies() if hasattr(inner, "_wait_for_offload_copies") else None
            found = inner.scaled_global_norm()
        elif hasattr(inner, "_get_norm_groups"):
            from deepspeed.runtime.utils import combine_grad_norm_groups  # type: ignore[import-not-found]

            found = combine_grad_norm_groups(inner._get_norm_groups())
        elif hasattr(inner, "get_grads_for_norm"):
            from deepspeed.runtime.utils import get_global_norm_of_tensors  # type: ignore[import-not-found]

            found = get_global_norm_of_tensors(inner.get_grads_for_norm()[0], mpu=inner.mpu)
        else:
            found = _norm(p.grad for p in self.module.parameters() if p.grad is not None)
        return torch.as_tensor(found, dtype=torch.float32) * (self.stretch / _scale(inner))

    def limit(self, value: float) -> None:
        """The step that comes scales gradients so that their norm is at most ``value``."""
        self._limit(0.0 if value == float("inf") else value)

    def _limit(self, value: float) -> None:
        self.engine._config.gradient_clipping = value
        if hasattr(self.inner, "clip_grad"):
            self.inner.clip_grad = value


def _scale(inner: Any) -> float:
    return float(getattr(inner, "loss_scale", 1.0) or 1.0)


class _scaled:  # noqa: N801 - used as a with block
    """Inside, the engine's optimizer takes gradients for smaller than they are: its step enlarges them."""

    def __init__(self, inner: Any, stretch: float) -> None:
        self.scaler = getattr(inner, "loss_scaler", None) if stretch != 1.0 else None
        self.stretch = stretch

    def __enter__(self) -> None:
        if self.scaler is not None:
            self.scaler.cur_scale /= self.stretch

    def __exit__(self, *error: object) -> None:
        if self.scaler is not None:
            self.scaler.cur_scale *= self.stretch


def _norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(gradient.float()) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _multiply(parameters: Iterable[torch.Tensor], factor: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


# --- making one


def begin(world: World) -> None:
    """Gives DeepSpeed the processes that are there; a world of one gets a group of one."""
    import torch.distributed as dist
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

    # It asks for this name, and world has the number.
    environ.write({"LOCAL_RANK": world.local_rank})
    if not dist.is_initialized():
        backend = "gloo" if world.device.type == "cpu" else None
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    if world.device.type == "cpu" and environ.get("DS_ACCELERATOR") is None:
        environ.write({"DS_ACCELERATOR": "cpu"})
    import deepspeed  # type: ignore[import-not-found]

    if environ.get("DS_BUILD_SHM_COMM") is None:
        # It would be compiled now, for half a minute; gloo exchanges the same.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)


def check_drive(config: Mapping[str, Any]) -> None:
    """Refuses offload to a drive where the engine has nothing to read and write it with.

    Raises:
        SettingError: its reader is not installed, and cannot be built.
    """
    parts = ("offload_optimizer", "offload_param")
    asked = [part for part in parts if config_value(config, f"zero_optimization.{part}.device") == "nvme"]
    if not asked:
        return
    from deepspeed.git_version_info import installed_ops  # type: ignore[import-not-found]
    from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-not-found]

    if not installed_ops.get(AsyncIOBuilder.NAME) and not AsyncIOBuilder().is_compatible(verbose=False):
        raise SettingError(
            f"{asked[0]}: the engine cannot use a drive on this machine",
            why="its reader async_io is compiled when it is used, and libaio or its headers are not there",
            fix="apt install libaio-dev, or offload to the host: device 'cpu'",
        )


def make(model: nn.Module, config: Mapping[str, Any], optimizer: Any, scheduler: Any) -> Made:
    """An engine over ``model``, which stays the module inside of it.

    Args:
        model: the user's.
        config: complete, as ``fill`` makes it.
        optimizer: of torch, or a ``DummyOptim``; None makes an engine that does not train.
        scheduler: a ``DummyScheduler``, or one of the engine's own kind; None leaves schedules to the user.
    """
    import deepspeed  # type: ignore[import-not-found]

    given: dict[str, Any] = {"model": model, "config": dict(config)}
    groups: list[dict[str, Any]] = []
    if isinstance(optimizer, DummyOptim):
        groups = parameter_groups(optimizer.params)
        given["model_parameters"] = groups if len(groups) > 1 else list(groups[0]["params"])
    elif optimizer is not None:
        groups = optimizer.param_groups
        given["optimizer"] = optimizer
    else:
        given["model_parameters"] = [p for p in model.parameters() if p.requires_grad]
    if isinstance(scheduler, DummyScheduler):
        given["lr_scheduler"] = scheduler.lr_scheduler_callable
    elif scheduler is not None:
        given["lr_scheduler"] = scheduler
    kept = [list(group["params"]) for group in groups]
    engine, _, _, schedule = deepspeed.initialize(**given)
    made = Made(engine, dict(config), getattr(engine, "basic_optimizer", None), kept, schedule)
    made.clip = float(engine.gradient_clipping() or 0.0)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float16 if engine.fp16_enabled() else None
    _undo_first_step(made)
    if dtype is not None:
        made.hooks += _convert(model, dtype)
    if made.stage == 3:
        made.hooks.append(_guard(engine))
    return made


def _undo_first_step(made: Made) -> None:
    """Stage 0 in 16 bits has stepped once, without gradients, to make the optimizer's state.

    So weights have decayed, and Adam would count from 2.
    """
    inner = made.inner
    if made.stage or made.optimizer is None or not hasattr(inner, "fp16_groups"):
        return
    flat = hasattr(inner, "fp32_groups_flat")
    pairs = [(inner.fp32_groups_flat, inner.fp16_groups_flat)] if flat else []
    pairs += [] if flat else list(zip(inner.fp32_groups, inner.fp16_groups, strict=True))
    for highs, lows in pairs:
        for high, low in zip(highs, lows, strict=True):
            high.data.copy_(low.data)
    made.optimizer.state.clear()


def _convert(module: nn.Module, dtype: torch.dtype) -> list[Any]:
    """The weights are in 16 bits: so become the inputs, and outputs become float32 again."""

    def narrow(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    def widen(leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype is dtype else leaf

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree.map_tree(narrow, (args, kwargs))

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        return tree.map_tree(widen, output)

    ahead = module.register_forward_pre_hook(before, with_kwargs=True)
    return [ahead, module.register_forward_hook(after)]


def _guard(engine: Any) -> Any:
    """``state_dict()`` of a partitioned model would be of empty tensors: it says so instead."""
    inside: list[bool] = []
    ask = engine.module_state_dict

    def by_engine(*args: Any, **kwargs: Any) -> Any:
        inside.append(True)
        try:
            return ask(*args, **kwargs)
        finally:
            inside.pop()

    def check(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not inside and not keep_vars and any(is_partitioned(p) for p in module.parameters()):
            raise PrepareError(
                f"state_dict() of a {type(module).__name__} whose weights are partitioned over the processes",
                why="in stage 3 each process holds a part of every weight, and the tensors here are empty",
                fix="state = accelerator.get_state_dict(model), on all processes; process 0 gets it",
            )

    engine.module_state_dict = by_engine
    return engine.module.register_state_dict_pre_hook(check)


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Whether the values of a parameter are elsewhere now, in parts."""
    status = getattr(parameter, "ds_status", None)
    return status is not None and status.name != "AVAILABLE"


def adopt(old: Made, new: Made) -> Made:
    """The engine that users hold becomes the new one over the same module."""
    kept = old.engine
    # Hooks hold the new one: both share everything, and end together.
    vars(new.engine)["_twin"] = new.engine
    object.__setattr__(kept, "__dict__", vars(new.engine))
    new.engine = kept
    return new


def release(made: Made) -> None:
    """Takes an engine off its module, so that another one may take its place."""
    engine = made.engine
    for handle in (engine.module_forward_pre_hook, engine.module_forward_post_hook, *made.hooks):
        handle.remove()
    if hasattr(engine.optimizer, "destroy"):
        engine.optimizer.destroy()


class Engines:
    """The engines of one ``Accelerator``, as long as somebody holds them."""

    def __init__(self) -> None:
        self._made: list[Made] = []

    def __iter__(self) -> Iterator[Made]:
        return iter(self._made)

    def add(self, made: Made) -> None:
        """One more, or in the place of one over the same module."""
        self._made = [known for known in self._made if known.engine is not made.engine]
        self._made.append(made)

    def clear(self) -> None:
        """Lets all go, and takes them off their modules."""
        for made in self._made:
            release(made)
        self._made = []

    def of(self, model: Any) -> Made | None:
        """The engine of a model: prepared, or the user's own."""
        return next((m for m in self._made if m.engine is model or m.module is model), None)

    def stepping(self, optimizer: Any) -> Made | None:
        """The engine in which an optimizer steps."""
        return next((m for m in self._made if m.owns(optimizer)), None)

    def trained(self) -> list[Made]:
        """Those with an optimizer."""
        return [made for made in self._made if made.optimizer is not None]
