"""Pipeline-parallel inference: ``prepare_pippy`` splits a model into stages, one for each process.

``accelerate.stages`` chooses the split points, inference_stages.py builds the stages, and
inference_pipeline.py sends a batch through them in chunks. Each process keeps the weights of its own stage.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.core.units import parse_bytes
from accelerate.offload.pipeline.inference_pipeline import AFTER_BATCH, InferencePipeline, no_result_error
from accelerate.stages import split
from accelerate.stages.split import flatten_tree, unflatten_tree
from accelerate.world import collective
from accelerate.world import world as worlds
from accelerate.world.local_tensor_trees import ignorant_find_batch_size, pad_input_tensors, send_to_device
from accelerate.world.world import World


def prepare_pippy(
    model: nn.Module,
    split_points: str | list[str] | None = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: tuple[Any] | None = (),  # type: ignore[assignment]
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> nn.Module:
    """Split a model over the processes for inference; a batch goes through the stages in chunks.

    Its ``forward`` is replaced (the one before is ``model.forward.__wrapped__``); it takes the batch on rank
    0 and gives the result on the last rank, None on the others. ``model.hf_split_points`` says where it was
    cut. ``model.pipeline_timeline(...)`` runs a batch and says when each stage worked on which chunk.

    Args:
        model: whole, on the host, equal on all processes. Each keeps the weights of its stage, on its device;
            those of the others become meta tensors.
        split_points: names of the first module of every stage but the first; ``"auto"`` makes the stages even
            in bytes.
        no_split_module_classes: class names of modules that ``"auto"`` does not open; None takes what the
            model itself says (``_no_split_modules``).
        example_args, example_kwargs: what the model is called with; other shapes may come later.
        num_chunks: how many chunks a batch is cut into; None takes the number of processes.
        gather_output: give the result on all ranks.

    Raises:
        UnknownNameError: a split point is no module of the model.
        PrepareError: fewer blocks than processes, weights without values, or a forward that cannot be traced;
            on all ranks.
        SettingError: ``num_chunks`` is less than 1.
    """
    world = worlds.open()
    original = model.forward
    if hasattr(model, "hf_split_points"):
        raise PrepareError(
            f"this {type(model).__name__} is a pipeline already",
            why="each process holds the weights of one stage only",
            fix="build the model again for another division",
        )
    no_split = _no_split_classes(model, no_split_module_classes)
    pipeline = InferencePipeline(model, world, split_points, no_split, num_chunks)
    extra: dict[str, Any] = {"_original_forward": original, "_original_call": model.__call__}
    if world.size == 1:
        run = _make_single_process_forward(model, original, world)
    else:
        pipeline.plan_example(tuple(example_args or ()), dict(example_kwargs or {}))
        run = pipeline.step
        extra |= {"pippy_stage": pipeline, "pipeline_timeline": pipeline.timeline}

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if gather_output and world.size > 1:
            return _gather_output(lambda: run(*args, **kwargs), world)
        return run(*args, **kwargs)

    for name, value in (extra | {"hf_split_points": list(pipeline.points), "forward": forward}).items():
        setattr(model, name, value)
    return model


def _make_single_process_forward(
    model: nn.Module, original: Callable[..., Any], world: World
) -> Callable[..., Any]:
    """Return the forward of the whole model, which moves its inputs to the device."""
    warnings.warn("prepare_pippy: there is one process, so the model runs whole on it", stacklevel=3)
    model.to(world.device)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return original(*send_to_device(args, world.device), **send_to_device(kwargs, world.device))

    return run


def build_pipeline(
    model: nn.Module,
    split_points: str | list[str] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    num_chunks: int | None,
) -> InferencePipeline:
    """Build the pipeline that ``prepare_pippy`` puts behind a model's forward; ``step(...)`` runs a batch.

    Raises:
        PrepareError: there is one process; and see ``prepare_pippy``.
    """
    world = worlds.open()
    if world.size == 1:
        raise PrepareError(
            "a pipeline needs several processes, and this is the only one",
            why="each process runs one stage",
            fix="accelerate launch --num_processes 2 ...",
        )
    pipeline = InferencePipeline(model, world, split_points, _no_split_classes(model, None), num_chunks)
    pipeline.plan_example(tuple(args), dict(kwargs or {}))
    return pipeline


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: list[str] | None = None,
    max_memory: dict[Any, Any] | None = None,
) -> dict[str, int]:
    """Return the stage of each block, so that the largest stage is as small as can be.

    Args:
        model: its blocks are taken in the order in which they were defined.
        num_processes: how many stages.
        no_split_module_classes: class names of modules that are not opened.
        max_memory: the most bytes of each stage (a number, or text like ``"2GB"``), by its number.

    Raises:
        PrepareError: fewer blocks than stages, or no division keeps to ``max_memory``.
    """
    if num_processes == 1:
        return {"": 0}
    chained = split.list_blocks(model, _no_split_classes(model, no_split_module_classes), num_processes)
    budgets = None
    if max_memory:
        budgets = [
            parse_bytes(max_memory[n]) if n in max_memory else float("inf") for n in range(num_processes)
        ]
    return split.stage_map(chained, split.find_even_cuts(chained, num_processes, budgets))


def find_pippy_batch_size(args: tuple[Any, ...] | None, kwargs: dict[str, Any] | None) -> int | None:
    """Return the length of dimension 0 of the first tensor in the arguments, None without one."""
    return ignorant_find_batch_size([args or (), kwargs or {}])


def pippy_forward(
    forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any
) -> Any:
    """Call a schedule's ``forward``: rank 0 with the inputs, the others without.

    Args:
        forward: gives the result on the last rank.
        num_chunks: a batch that does not divide by it is padded, and the result cut back.
        gather_output: give the result on all ranks.
        args, kwargs: the inputs; those of rank 0 count.
    """
    world = worlds.open()
    if gather_output and world.size > 1:
        return _gather_output(lambda: pippy_forward(forward, num_chunks, False, *args, **kwargs), world)
    size: int = collective.broadcast_object(find_pippy_batch_size(args, kwargs)) or 0
    missing = -size % num_chunks
    if world.rank == 0:
        if missing:
            args, kwargs = (pad_input_tensors(tree, size, num_chunks) for tree in (args, kwargs))
        output = forward(*args, **kwargs)
    else:
        output = forward()
    if world.is_last and missing:
        form, tensors = flatten_tree(output, "the result")
        cut = [t[:size] if t.dim() and t.shape[0] == size + missing else t for t in tensors]
        output = unflatten_tree(form, cut)
    return output


def _gather_output(run: Callable[[], Any], world: World) -> Any:
    """Broadcast the last rank's result to all ranks, or raise on all that there is none."""
    last = world.size - 1
    try:
        output = run()
    except Exception as error:
        if AFTER_BATCH in vars(error):  # the other ranks wait for a result
            collective.broadcast_object(None, last, "gather_output")
        raise
    form, tensors = flatten_tree(output if world.is_last else None, "the result")
    metas = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    message = collective.broadcast_object((form, metas), last, "gather_output")
    if message is None:
        raise no_result_error()
    form, metas = message
    if not world.is_last:
        tensors = [torch.empty(shape, dtype=dtype, device=world.device) for shape, dtype in metas]
    return unflatten_tree(form, collective.broadcast(tensors, last))


def _no_split_classes(model: nn.Module, asked: Iterable[str] | None) -> list[str]:
    return list(asked if asked is not None else getattr(model, "_no_split_modules", None) or ())
