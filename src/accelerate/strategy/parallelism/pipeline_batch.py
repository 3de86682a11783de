"""A batch in chunks, what is known of calls of its shape, and whether all stages were given the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from accelerate.core import tree
from accelerate.core.errors import PrepareError
from accelerate.stages import forms
from accelerate.strategy.parallelism.pipeline_plan import Trail


@dataclass
class Batch:
    """The arguments of a call, cut into chunks.

    Attributes:
        form: of (args, kwargs, more); ``tensors`` are theirs, on the device.
        size: samples.
        rows: samples of a chunk; the last ones may be filled up with the last sample.
        chunked: is told of a tensor and its rows of a chunk.
    """

    form: Any
    tensors: list[torch.Tensor]
    size: int
    rows: int
    batched: tuple[bool, ...]
    chunked: Callable[[torch.Tensor, torch.Tensor], None]

    def whole(self) -> tuple[Any, Any, Any]:
        """(args, kwargs, {"target": ...}) of all samples."""
        return forms.put_together(self.form, self.tensors)

    def chunk(self, number: int) -> tuple[Any, Any, Any]:
        """The same of one chunk."""
        pairs = zip(self.tensors, self.batched, strict=True)
        return forms.put_together(self.form, [self._cut(t, number * self.rows) if b else t for t, b in pairs])

    def _cut(self, tensor: torch.Tensor, begin: int) -> torch.Tensor:
        found = _rows(tensor, begin, self.rows)
        self.chunked(tensor, found)
        return found


def _rows(tensor: torch.Tensor, begin: int, count: int) -> torch.Tensor:
    """Rows of a batch; beyond its end the last one again, which is a sample that is valid."""
    found = tensor[begin : begin + count]
    missing = count - found.shape[0]
    if not missing:
        return found
    return torch.cat([found, tensor[-1:].expand(missing, *tensor.shape[1:])])


@dataclass
class Plan:
    """How calls of one shape run.

    Attributes:
        part: the trail of a chunk.
        whole: that of a batch; None where nothing runs over a whole batch.
        per_row: of each value of the tail, how long its dimension 0 is for one sample; 0: there is one chunk.
        idle: schedules that wait for a call.
    """

    part: Trail
    whole: Trail | None = None
    per_row: list[int] = field(default_factory=list)
    idle: list[Any] = field(default_factory=list)


def agree(said: str, tensors: Sequence[torch.Tensor], group: Any, device: torch.device) -> None:
    """Refuses calls that differ between the stages.

    Args:
        said: what must be equal: shapes, types and modes of the call.
        tensors: its arguments, whose values must be equal too.
        group: the processes that have the stages.
        device: of this process.

    Raises:
        PrepareError: on all of them.
    """
    digest = int.from_bytes(hashlib.sha256(said.encode()).digest()[:6], "big")
    total = torch.zeros((), dtype=torch.float64)
    for place, tensor in enumerate(tensors, 1):
        total = total.to(tensor.device) + place * torch.nan_to_num(tensor.detach().double()).sum()
    mine = torch.stack([torch.tensor(float(digest), dtype=torch.float64), total.cpu()]).to(device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    table = torch.stack(every).tolist()
    if any(row[0] != table[0][0] for row in table):
        raise PrepareError(
            "the stages of a pipeline were called in different ways",
            why=f"arguments, shapes and modes must be equal on all of them; here: {said[:300]}",
            fix="give all processes of a pipeline the same batch: prepare the loader",
        )
    if any(row[1] != table[0][1] for row in table):
        raise PrepareError(
            "the stages of a pipeline were given different values",
            why="each reads of the batch what it needs, so all must have the same one",
            fix="prepare the loader; what is drawn at random in the loop, draw on one process and send "
            "to the others (accelerate.utils.broadcast)",
        )


def as_type(given: Any, dtype: torch.dtype) -> Any:
    """A tree with its floating-point tensors in a type."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree.map_tree(cast, given)
