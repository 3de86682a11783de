"""Pipeline-parallel inference: ``prepare_pippy`` splits a model into stages, one for each process.

``accelerate.stages`` chooses the split points, inference_stages.py builds the stages, and
inference_pipeline.py runs torch's GPipe schedule. Each process keeps the weights of its own stage.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import PrepareError, SettingError, UnknownNameError
from accelerate.core.units import parse_bytes
from accelerate.offload.module_tensors import tensor_slots
from accelerate.offload.pipeline.inference_pipeline import (
    AFTER_BATCH,
    InferencePipeline,
    PipelineInputSignature,
    ResultLayout,
    no_result_error,
    run_collectively,
)
from accelerate.offload.pipeline.inference_stages import (
    InferenceStage,
    TracedForward,
    TraceError,
    block_weight_names,
    build_chain_stage,
    find_chain,
)
from accelerate.stages import split
from accelerate.stages.split import TensorLeafIndex, flatten_tree, unflatten_tree
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
        PrepareError: fewer blocks than processes, weights without values, or a forward that can neither be
            traced nor is a chain of blocks; on all ranks.
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
    cut = _ModelSplit(model, world, split_points, no_split_module_classes)
    extra: dict[str, Any] = {"_original_forward": original, "_original_call": model.__call__}
    if world.size == 1:
        run = _make_single_process_forward(model, original, world)
    else:
        pipeline = cut.build_pipeline(tuple(example_args or ()), dict(example_kwargs or {}), num_chunks)
        run = pipeline.step
        extra |= {"pippy_stage": pipeline, "pipeline_timeline": pipeline.timeline}

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if gather_output and world.size > 1:
            return _gather_output(lambda: run(*args, **kwargs), world)
        return run(*args, **kwargs)

    for name, value in (extra | {"hf_split_points": list(cut.points), "forward": forward}).items():
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
    return _ModelSplit(model, world, split_points, None).build_pipeline(
        tuple(args), dict(kwargs or {}), num_chunks
    )


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


class _ModelSplit:
    """A model and its split into stages.

    Attributes:
        points: the names of the first module of every stage but the first, once they are known.
    """

    def __init__(
        self, model: nn.Module, world: World, points: str | list[str] | None, closed: list[str] | None
    ) -> None:
        self.model, self.world, self.forward = model, world, model.forward
        self.no_split = _no_split_classes(model, closed)
        self.is_auto = points is None or points == "auto"
        if isinstance(points, str) and not self.is_auto:
            points = [points]
        self.points: list[str] = (
            [] if self.is_auto else split.check_split_points(model, points or [], world.size)
        )
        takes = inspect.signature(model.forward).parameters
        self.cache_options = {"use_cache": False} if "use_cache" in takes else {}
        self.own_weights: frozenset[str] | None = None
        self.parts: list[list[str]] = []
        for name, tensor in model.named_parameters():
            if tensor.device.type == "meta":
                raise PrepareError(
                    f"the weight {name!r} has no values",
                    why="it is on the meta device, or offloaded",
                    fix="load the model into host memory before prepare_pippy",
                )

    def build_pipeline(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], num_chunks: int | None
    ) -> InferencePipeline:
        """Build the stages for an example, and drop the weights of the other ranks' stages."""
        chunks = self.world.size if num_chunks is None else num_chunks
        if chunks < 1:
            raise SettingError(f"num_chunks is {chunks}, but it is at least 1", fix="leave it out")
        form, tensors = flatten_tree((args, kwargs), "the example argument ")
        if not tensors:
            raise PrepareError(
                "prepare_pippy was given no example",
                why="the shapes of what goes from stage to stage are learned from one",
                fix="prepare_pippy(model, example_args=(input,))",
            )

        def make_pipeline(
            build_stage: Callable[..., tuple[InferenceStage, ResultLayout]],
        ) -> InferencePipeline:
            return InferencePipeline(
                build_stage, self.load_stage_weights, chunks, self.world, lambda: self.model.training
            )

        traced = make_pipeline(self.build_traced_stage)
        shapes, size = collective.broadcast_object(traced.measure_call(form, tensors), 0, "prepare_pippy")
        try:
            traced.find_schedule(shapes, size, tensors)
            return traced
        except TraceError as error:
            self._split_as_chain(args, kwargs, error)
        chained = make_pipeline(self.build_chain_stage)
        chained.find_schedule(shapes, size, tensors)
        return chained

    def build_traced_stage(
        self, shapes: PipelineInputSignature, rows: int, tensors: Sequence[torch.Tensor]
    ) -> tuple[InferenceStage, ResultLayout]:
        """Trace this rank's stage for inputs of these shapes, and the layout of the model's result."""

        def call(flat: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
            args, kwargs = unflatten_tree(shapes.form, flat)
            # A cache of keys and values would be spread over the stages, and is of no use to one forward.
            return flatten_tree(self.forward(*args, **(self.cache_options | kwargs)), "the result")

        traced = TracedForward(self.model, call, shapes.make_inputs, rows, self.world.device)
        if self.is_auto and not self.points:
            self._choose_points(
                split.list_blocks(self.model, self.no_split, self.world.size, traced.computing_modules)
            )
        stage = traced.build_stage(self.points, self.world.rank)
        dropped_weights = stage.weights - self.own_weights if self.own_weights is not None else ()
        if dropped_weights:
            raise PrepareError(
                f"this call uses the weight {min(dropped_weights)!r} in stage {self.world.rank}",
                why="the example did not, so this process has let go of it",
                fix="give prepare_pippy an example that calls the model in the same way",
            )
        return stage, ResultLayout(traced.output_form, traced.per_row)

    def _choose_points(self, blocks: list[split.ModelBlock]) -> None:
        self.points = [blocks[index].name for index in split.find_even_cuts(blocks, self.world.size)]

    def load_stage_weights(self, stage: InferenceStage) -> None:
        """Move the weights of this rank's stage to its device; the first time, drop all others."""
        if self.own_weights is None:
            self.own_weights = stage.weights
            _keep_weights(self.model, stage.weights, self.world.device)
        stage.load_weights(_named_tensors(self.model))

    def _split_as_chain(self, args: tuple[Any, ...], kwargs: dict[str, Any], error: TraceError) -> None:
        """Split a model that cannot be traced, if it is a chain of blocks."""
        blocks = split.list_blocks(self.model, self.no_split, self.world.size)
        names = [block.name for block in blocks]
        try:
            called = run_collectively(lambda: find_chain(self.model, names, args, kwargs))
        except PrepareError as no_chain:
            raise PrepareError(
                error.what,
                why=f"{error.why}\n       It is no chain of blocks either: {no_chain.why}.",
                fix=f"{error.fix}, or hand one tensor from block to block, as nn.Sequential does",
            ) from error
        blocks = [blocks[names.index(name)] for name in called]
        if self.is_auto:
            self._choose_points(blocks)
        wrong = [point for point in self.points if point not in called[1:]]
        if wrong:
            raise UnknownNameError(
                "split point", wrong[0], called[1:], why=f"it cannot be traced, so it is cut at {called[1:]}"
            )
        borders = [0, *sorted(called.index(point) for point in self.points), len(called)]
        self.parts = [called[a:b] for a, b in pairwise(borders)]
        weight_names = block_weight_names(self.model, self.parts[self.world.rank])
        self.own_weights = weight_names
        _keep_weights(self.model, weight_names, self.world.device)

    def build_chain_stage(
        self, shapes: PipelineInputSignature, rows: int, tensors: Sequence[torch.Tensor]
    ) -> tuple[InferenceStage, ResultLayout]:
        """Build this rank's stage of a chain of blocks, and the layout of the model's result."""
        chunk = None
        if self.world.rank == 0:
            chunk = tensors[0][: min(rows, len(tensors[0]))]
            chunk = torch.cat([chunk, chunk[-1:].expand(rows - len(chunk), *chunk.shape[1:])])
        return build_chain_stage(self.model, self.parts, chunk, self.world), ResultLayout(
            TensorLeafIndex(0), [1]
        )


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers, tied ones under each of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _keep_weights(model: nn.Module, names: Iterable[str], device: torch.device) -> None:
    """Move some weights to ``device`` and drop all others; tied ones stay tied."""
    named = _named_tensors(model)
    weight_ids = {id(named[name]) for name in names}
    relocated: dict[int, torch.Tensor] = {}

    def relocate(tensor: torch.Tensor) -> torch.Tensor:
        target = device if id(tensor) in weight_ids else torch.device("meta")
        if tensor.device == target:
            return tensor
        if id(tensor) not in relocated:
            moved = tensor.detach().to(target)
            if isinstance(tensor, nn.Parameter):
                moved = nn.Parameter(moved, tensor.requires_grad)
            vars(moved).update(vars(tensor))
            relocated[id(tensor)] = moved
        return relocated[id(tensor)]

    for table, name, tensor in tensor_slots(model.modules()):
        table[name] = relocate(tensor)
