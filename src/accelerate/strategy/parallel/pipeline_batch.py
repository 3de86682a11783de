"""A batch in chunks, and what is known of calls of its shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from accelerate.stages import forms
from accelerate.strategy.parallel.pipeline_plan import Trail


@dataclass
class Batch:
    """The arguments of a call, cut into chunks.

    Attributes:
        form: of (args, kwargs, more); ``tensors`` are theirs, on the device.
        size: samples.
        rows: samples of a chunk; the last ones may be filled up with the last sample.
    """

    form: Any
    tensors: list[torch.Tensor]
    size: int
    rows: int
    batched: tuple[bool, ...]

    def whole(self) -> tuple[Any, Any, Any]:
        """(args, kwargs, {"target": ...}) of all samples."""
        return forms.put_together(self.form, self.tensors)

    def chunk(self, number: int) -> tuple[Any, Any, Any]:
        """The same of one chunk."""
        begin = number * self.rows
        cut = [
            _rows(t, begin, self.rows) if b else t for t, b in zip(self.tensors, self.batched, strict=True)
        ]
        return forms.put_together(self.form, cut)


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
