"""Batches in micro-batches, the plans of their calls, and the check that all stages get the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from accelerate.core import tree
from accelerate.core.errors import PrepareError
from accelerate.stages import tensor_tree
from accelerate.strategy.parallelism.pipeline.forward_trace import PipelineForwardTrace


@dataclass
class PipelineBatch:
    """The arguments of a call, split into micro-batches.

    Attributes:
        form: of (args, kwargs, more); ``tensors`` are theirs, on the device.
        size: samples.
        rows: samples of a micro-batch; the last one may be padded with the last sample.
        register_chunk: called with a tensor and its rows in a micro-batch.
    """

    form: Any
    tensors: list[torch.Tensor]
    size: int
    rows: int
    batched: tuple[bool, ...]
    register_chunk: Callable[[torch.Tensor, torch.Tensor], None]

    def all_samples(self) -> tuple[Any, Any, Any]:
        """Return (args, kwargs, {"target": ...}) of all samples."""
        return tensor_tree.unflatten_tree(self.form, self.tensors)

    def chunk(self, number: int) -> tuple[Any, Any, Any]:
        """Return (args, kwargs, {"target": ...}) of one micro-batch."""
        pairs = zip(self.tensors, self.batched, strict=True)
        return tensor_tree.unflatten_tree(
            self.form, [self._cut(t, number * self.rows) if b else t for t, b in pairs]
        )

    def _cut(self, tensor: torch.Tensor, begin: int) -> torch.Tensor:
        rows = _padded_rows(tensor, begin, self.rows)
        self.register_chunk(tensor, rows)
        return rows


def _padded_rows(tensor: torch.Tensor, begin: int, count: int) -> torch.Tensor:
    """Return rows of a batch, padded beyond its end with the last sample."""
    rows = tensor[begin : begin + count]
    missing = count - rows.shape[0]
    if not missing:
        return rows
    return torch.cat([rows, tensor[-1:].expand(missing, *tensor.shape[1:])])


@dataclass
class PipelineExecutionPlan:
    """The plan by which calls of one shape run.

    Attributes:
        chunk_trace: the forward trace of a micro-batch.
        batch_trace: the forward trace of a batch; None where nothing runs over a full batch.
        rows_per_sample: the length of dimension 0 for one sample, for each result input; 0: there is one
            micro-batch.
        idle_schedules: schedules that wait for a call.
    """

    chunk_trace: PipelineForwardTrace
    batch_trace: PipelineForwardTrace | None = None
    rows_per_sample: list[int] = field(default_factory=list)
    idle_schedules: list[Any] = field(default_factory=list)


def check_same_call(
    description: str, tensors: Sequence[torch.Tensor], group: Any, device: torch.device
) -> None:
    """Refuse calls that differ between the stages.

    Args:
        description: what must be equal: shapes, types and modes of the call.
        tensors: its arguments, whose values must be equal too.
        group: the processes that have the stages.
        device: of this process.

    Raises:
        PrepareError: on all of them.
    """
    digest = int.from_bytes(hashlib.sha256(description.encode()).digest()[:6], "big")
    total = torch.zeros((), dtype=torch.float64)
    for place, tensor in enumerate(tensors, 1):
        total = total.to(tensor.device) + place * torch.nan_to_num(tensor.detach().double()).sum()
    fingerprint = torch.stack([torch.tensor(float(digest), dtype=torch.float64), total.cpu()]).to(device)
    fingerprints = [torch.empty_like(fingerprint) for _ in range(dist.get_world_size(group))]
    dist.all_gather(fingerprints, fingerprint, group=group)
    table = torch.stack(fingerprints).tolist()
    if any(row[0] != table[0][0] for row in table):
        raise PrepareError(
            "the stages of a pipeline were called in different ways",
            why=f"arguments, shapes and modes must be equal on all of them; here: {description[:300]}",
            fix="give all processes of a pipeline the same batch: prepare the loader",
        )
    if any(row[1] != table[0][1] for row in table):
        raise PrepareError(
            "the stages of a pipeline were given different values",
            why="each reads of the batch what it needs, so all must have the same one",
            fix="prepare the loader; what is drawn at random in the loop, draw on one process and send "
            "to the others (accelerate.utils.broadcast)",
        )


def cast_floats(given: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors of a tree to a dtype."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree.map_tree(cast, given)
