"""The plan of one ``prepare``: what will be done to which object, in order. Printable, then applied."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accelerate.core.errors import PrepareError
from accelerate.core.units import show_bytes
from accelerate.facade.compilation import TorchDynamoPlugin, compile_regions
from accelerate.facade.optimizer import move_to_device
from accelerate.facade.scheduler import AcceleratedScheduler
from accelerate.precision.base import Precision
from accelerate.strategy.base import DataSharding, ObjectKind, PrepareBundle, PrepareStep, Strategy
from accelerate.world.world import World


@dataclass(frozen=True)
class PrepareWrappers:
    """The functions that wrap the user's objects.

    Attributes:
        optimizer, scheduler: from the user's object to the prepared one.
        loader: the same; the second argument says whether its batches go to the device.
    """

    optimizer: Callable[[Any], Any]
    scheduler: Callable[[Any], Any]
    loader: Callable[[Any, bool], Any]


@dataclass(frozen=True)
class PreparePlan:
    """The steps of one ``prepare``."""

    steps: tuple[PrepareStep, ...]

    def __str__(self) -> str:
        rows = [
            f"{number}. {step.name}: {step.reason}{_format_memory(step)}"
            for number, step in enumerate(self.steps, 1)
        ]
        return "\n".join(rows) or "nothing to do"

    def apply(self, bundle: PrepareBundle) -> None:
        """Apply all steps to the bundle."""
        for step in self.steps:
            step.apply(bundle)


def _format_memory(step: PrepareStep) -> str:
    if step.bytes_before == step.bytes_after:
        return ""
    return f" ({show_bytes(step.bytes_before)} -> {show_bytes(step.bytes_after)} here)"


def object_kind(value: Any) -> ObjectKind:
    """Return the kind of an object given to ``prepare``; ``"other"`` comes back as it is."""
    if isinstance(value, DataLoader):
        return "loader"
    stands_for = getattr(type(value), "prepared_as", None)
    if stands_for is not None:
        return stands_for
    if isinstance(value, nn.Module):
        return "model"
    if isinstance(value, Optimizer) or (hasattr(value, "param_groups") and hasattr(value, "step")):
        return "optimizer"
    return "scheduler" if isinstance(value, LRScheduler | AcceleratedScheduler) else "other"


def make_bundle(
    objects: tuple[Any, ...], place: list[bool] | None, default: bool, training: bool = True
) -> PrepareBundle:
    """Return the bundle of one ``prepare`` call.

    Args:
        objects: the arguments of ``prepare``.
        place: per object, whether it goes to the device; None places all as ``default`` says.
        training: False when the models are only evaluated.

    Raises:
        PrepareError: nothing is given, or ``place`` has another length.
    """
    if not objects:
        raise PrepareError("prepare() was given nothing", fix="accelerator.prepare(model, optimizer, loader)")
    if place is not None and len(place) != len(objects):
        raise PrepareError(f"device_placement has {len(place)} entries for {len(objects)} objects")
    placed = [default if wish is None else wish for wish in place or [None] * len(objects)]
    return PrepareBundle(list(objects), [object_kind(item) for item in objects], training, placed)


def make_plan(
    bundle: PrepareBundle,
    world: World,
    precision: Precision,
    strategy: Strategy,
    wrappers: PrepareWrappers,
    compiler: TorchDynamoPlugin,
) -> PreparePlan:
    """Return the plan for ``bundle``. Changes nothing.

    Raises:
        PrepareError: parameters cannot be trained in this precision.
    """
    if not strategy.owns_step:
        _refuse_dummies(bundle, strategy)
    if bundle.training and not strategy.owns_step:
        _check_trainable(bundle, precision)
    steps = [*_model_steps(bundle, world, precision, strategy)]
    if compiler.is_enabled and bundle.objects_of("model"):
        if isinstance(strategy, DataSharding):
            strategy.check_compiler()
        scope = "block by block" if compiler.use_regional_compilation else "as a whole"
        reason = f"torch.compile, {str(compiler.backend).lower()}, {scope}, in place"
        steps.append(
            PrepareStep("compile", reason, lambda b: _compile_models(b, compiler, strategy, precision))
        )
    return PreparePlan((*steps, *_wrapping_steps(bundle, world, wrappers)))


def _model_steps(
    bundle: PrepareBundle, world: World, precision: Precision, strategy: Strategy
) -> Iterator[PrepareStep]:
    device, models = world.device, bundle.objects_of("model")
    # A strategy that shards places its own shards: the whole model might not fit.
    if not strategy.shards_params and any(
        bundle.place_on_device[i] and _is_elsewhere(bundle.objects[i], device)
        for i in bundle.positions("model")
    ):
        size = sum(_model_bytes(model) for model in models)
        yield PrepareStep(
            "place",
            f"the weights go to {device}",
            lambda b: _place_models(b, device),
            _bytes_on_device(models, device),
            size,
        )
    replaces_attached = any(precision.replaces_attached(model) for model in models)
    if models and (precision.describe_conversion() or replaces_attached) and not strategy.owns_step:
        reason = precision.describe_conversion() or "the model computes in the format of its weights again"
        yield PrepareStep("precision", reason, lambda b: _attach_precision(b, precision))
    yield from strategy.prepare_steps(bundle)


def _wrapping_steps(bundle: PrepareBundle, world: World, wrappers: PrepareWrappers) -> Iterator[PrepareStep]:
    if bundle.objects_of("optimizer"):
        reason = "steps only when gradients are complete"
        yield PrepareStep("optimizer", reason, lambda b: b.replace("optimizer", wrappers.optimizer))
    if bundle.objects_of("scheduler"):
        reason = "advances with the optimizer"
        yield PrepareStep("scheduler", reason, lambda b: b.replace("scheduler", wrappers.scheduler))
    if bundle.objects_of("loader"):
        many = world.size
        reason = (
            f"each of {many} processes takes its own samples" if many > 1 else f"batches go to {world.device}"
        )
        yield PrepareStep("data", reason, lambda b: _wrap_loaders(b, wrappers))


def _is_elsewhere(model: nn.Module, device: torch.device) -> bool:
    return any(t.device != device for t in (*model.parameters(), *model.buffers()))


def _model_bytes(model: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def _bytes_on_device(models: list[nn.Module], device: torch.device) -> int:
    tensors = (t for model in models for t in (*model.parameters(), *model.buffers()))
    return sum(t.numel() * t.element_size() for t in tensors if t.device.type == device.type)


def _place_models(bundle: PrepareBundle, device: torch.device) -> None:
    """Move the models, and keep the optimizers on their parameters."""
    for index in bundle.positions("model"):
        model = bundle.objects[index]
        if not bundle.place_on_device[index] or hasattr(model, "hf_device_map"):
            continue
        before = list(model.parameters())
        model.to(device)
        # Some devices cannot swap a parameter's data in place: torch then makes new parameters.
        renewed = {
            id(old): new for old, new in zip(before, model.parameters(), strict=True) if old is not new
        }
        for optimizer in bundle.objects_of("optimizer"):
            replace_parameters(optimizer, renewed)
            _move_state(optimizer)


def replace_parameters(optimizer: Optimizer, renewed: dict[int, torch.Tensor]) -> None:
    """Replace parameters of an optimizer, and move their optimizer state to the new ones.

    Args:
        renewed: new parameters by ``id`` of the old ones.
    """
    if not renewed:
        return
    for group in optimizer.param_groups:
        for place, old in enumerate(group["params"]):
            new = renewed.get(id(old))
            if new is not None:
                group["params"][place] = new
                if old in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(old)


def _move_state(optimizer: Optimizer) -> None:
    """Move the optimizer state to the devices of the parameters."""
    for parameter, state in optimizer.state.items():
        # A 0-dimensional step counter stays on the host unless the optimizer runs fused.
        optimizer.state[parameter] = {
            name: value if name == "step" else move_to_device(value, parameter.device)
            for name, value in state.items()
        }


def _check_trainable(bundle: PrepareBundle, precision: Precision) -> None:
    """Refuse parameters that cannot be trained: of the models, and those only in optimizers."""
    for model in bundle.objects_of("model"):
        precision.check_trainable(model.named_parameters())
    named = {p for model in bundle.objects_of("model") for p in model.parameters()}
    for optimizer in bundle.objects_of("optimizer"):
        groups = enumerate(group["params"] for group in optimizer.param_groups)
        rest = ((f"parameter {i} of group {g}", p) for g, group in groups for i, p in enumerate(group))
        precision.check_trainable((name, p) for name, p in rest if p not in named)


def _refuse_dummies(bundle: PrepareBundle, strategy: Strategy) -> None:
    """Refuse dummy optimizers and schedulers, which only DeepSpeed and Megatron-LM replace."""
    for item in bundle.objects:
        if hasattr(type(item), "prepared_as"):
            raise PrepareError(
                f"a {type(item).__name__} stands for one of DeepSpeed or Megatron-LM, and the strategy is "
                f"{strategy.name!r}",
                fix="prepare an optimizer and a scheduler of torch, or launch with DeepSpeed or Megatron-LM",
            )


def _attach_precision(bundle: PrepareBundle, precision: Precision) -> None:
    for model in bundle.objects_of("model"):
        if precision.replaces_attached(model):
            warnings.warn(
                f"a {type(model).__name__} was prepared with another precision before, by another "
                f"Accelerator: from now on mixed_precision={precision.name!r} holds for it",
                stacklevel=6,
            )
        precision.attach(model)


def _compile_models(
    bundle: PrepareBundle, compiler: TorchDynamoPlugin, strategy: Strategy, precision: Precision
) -> None:
    """Compile the models in place: class, names and state stay, and there is nothing to unwrap."""
    for model in map(strategy.unwrap, bundle.objects_of("model")):
        if compiler.use_regional_compilation:
            compile_regions(model, **compiler.to_kwargs())
        else:
            model.compile(**compiler.to_kwargs())
            precision.adapt_to_compile(model)


def _wrap_loaders(bundle: PrepareBundle, wrappers: PrepareWrappers) -> None:
    for index in bundle.positions("loader"):
        bundle.objects[index] = wrappers.loader(bundle.objects[index], bundle.place_on_device[index])
