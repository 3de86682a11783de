"""A batch on its way through the stages: torch's schedules around the user's own forward.

Each process calls the user's forward for every chunk of a batch. Blocks of its stage compute; those of
earlier stages give what was received of them, and those of later stages tensors without values. torch's
``PipelineStage`` carries values and gradients between neighbours.

``gpipe``: all chunks go forward. What the result depends on comes to all stages, and the code after the last
block runs once more over the whole batch, so that the result and its graph are those of one process, whatever
the loss is. The backward of that graph runs the stages' backwards.

``1f1b``: the loss is known in the last stage, so forwards and backwards alternate within one call of the
model, and fewer activations are kept. Gradients are kept apart until the backward of the loss, which adds
them, multiplied by what arrives there.

Source: Huang et al. 2019, "GPipe" (arXiv:1811.06965); Narayanan et al. 2019, "PipeDream" (arXiv:1806.03377);
``torch.distributed.pipelining``.
"""

# torch's schedules are partly untyped: what is unknown is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, _utils

from accelerate.core.errors import PrepareError
from accelerate.stages import forms
from accelerate.strategy.parallelism.pipeline_plan import Meta, Trail, Value, is_fake


class Run:
    """One chunk in one stage: says what each block gives.

    Args:
        trail: what goes where.
        stage: whose blocks compute; None: no block does.
        inbox: the values that are there.
        wanted: those that are to be kept.
        stand_in: makes a tensor without values.
        result: the forward's result is wanted too, so what it depends on stays in it.

    Attributes:
        kept: the values that were wanted.
        loose: the weights between the blocks as the forward saw them; None if nobody wants them.
    """

    def __init__(
        self,
        trail: Trail,
        stage: int | None,
        inbox: Mapping[Value, torch.Tensor],
        wanted: Sequence[Value],
        stand_in: Callable[[Meta], torch.Tensor],
        *,
        result: bool = False,
    ) -> None:
        self.trail, self.stage, self.inbox, self.stand_in = trail, stage, inbox, stand_in
        self.wanted, self.result = frozenset(wanted), result
        self.kept: dict[Value, torch.Tensor] = {}
        self.loose: list[torch.Tensor] | None = None
        self.count = 0

    def block(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a call of a block gives."""
        calls, number = self.trail.calls, self.count
        if number == len(calls) or calls[number].block != name:
            raise _other_way(name)
        self.count += 1
        call = calls[number]
        values = [Value(number, place) for place in range(len(call.metas))]
        if call.stage != self.stage:
            return forms.put_together(call.form, [self._given(value) for value in values])
        output = run(*args, **kwargs)
        _, tensors = forms.take_apart(output, f"the output of {name} ")
        if len(tensors) != len(values) or any(map(is_fake, tensors)):
            raise _other_way(name)
        self.kept.update({v: t for v, t in zip(values, tensors, strict=True) if v in self.wanted})
        if all(map(self._stays, values)):
            return output
        pairs = zip(values, tensors, strict=True)
        seen = [t if self._stays(v) else self.stand_in(self.trail.meta(v)) for v, t in pairs]
        return forms.put_together(forms.take_apart(output, "")[0], seen)

    def _given(self, value: Value) -> torch.Tensor:
        found = self.inbox.get(value)
        return self.stand_in(self.trail.meta(value)) if found is None else found

    def _stays(self, value: Value) -> bool:
        """Whether the rest of the forward is to see a value: nobody computes what nobody needs."""
        return self.trail.inside(value) or (self.result and value in self.trail.tail)

    def sent(self, values: Sequence[Value]) -> tuple[torch.Tensor, ...]:
        """The values that leave the stage, those made before it passed on."""
        if self.count != len(self.trail.calls):
            raise _other_way(self.trail.calls[self.count].block, missing=True)
        found: list[torch.Tensor] = []
        for value in values:
            tensor = self.kept[value] if value in self.kept else self.inbox[value]
            # Not the very tensor that came in; and only contiguous ones travel over every back end.
            tensor = tensor.view_as(tensor).to(self.trail.meta(value).dtype).contiguous()
            found.append(tensor)
        return tuple(found)


def _other_way(name: str, *, missing: bool = False) -> PrepareError:
    what = f"the forward did not call {name}" if missing else f"the forward called {name} out of its turn"
    return PrepareError(
        f"{what}: it takes another way than with other values of the same shapes",
        why="stages of a pipeline must agree on which layers run, and in which order",
        fix="do not skip layers by values or at random in a model that is cut into stages",
    )


class Worker(nn.Module):
    """What torch's stage calls for each chunk.

    Attributes:
        run: takes the number of a chunk and what was received; gives what is sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.run: Callable[[int, tuple[torch.Tensor, ...]], Any] = unused

    def forward(self, *tensors: torch.Tensor, chunk: Any) -> Any:
        """One chunk: the tensors of its border to those of the next."""
        return self.run(int(chunk), tensors)


def unused(*args: Any) -> Any:
    """In the place of what a schedule does not call."""
    raise AssertionError("a schedule of a pipeline ran without a batch")


class Carrier(PipelineStage):
    """torch's stage, with a context around each backward.

    Attributes:
        around: makes it, of the chunk, the stage, and whether it is the last chunk.
    """

    around: Callable[[int, int, bool], AbstractContextManager[Any]]

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """An error of the user's own code comes as it was raised, not in torch's frame."""
        try:
            return super().forward_one_chunk(*args, **kwargs)
        except RuntimeError as error:
            if error.__cause__ is not None:
                raise error.__cause__ from None
            raise

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Where nothing trains, nothing is sent back but zeros."""
        outputs, _ = self.fwd_cache[bwd_chunk_id]
        roots = (loss,) if self.is_last else outputs
        if not any(isinstance(root, torch.Tensor) and root.requires_grad for root in roots):
            self.fwd_cache.pop(bwd_chunk_id)
            self.bwd_cache[bwd_chunk_id] = (None,) * len(self.args_recv_info[bwd_chunk_id])
            return
        with self.around(bwd_chunk_id, self.stage_index, last_backward):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


def carrier(
    worker: Worker, trail: Trail, stage: int, outputs: Sequence[Meta], device: torch.device, group: Any
) -> Carrier:
    """torch's stage: what it receives and sends."""
    comes = tuple(_empty(trail.meta(value)) for value in trail.border(stage))
    goes = tuple(map(_empty, outputs))
    return Carrier(worker, stage, trail.stages, device, input_args=comes, output_args=goes, group=group)


def _empty(meta: Meta) -> torch.Tensor:
    tensor = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
    return tensor.requires_grad_(meta.requires_grad and tensor.is_floating_point())


class Halves(ScheduleGPipe):
    """torch's GPipe schedule in two calls: all forwards, and later all backwards."""

    _stage: Any

    def ahead(self) -> None:
        """The forward of every chunk."""
        stage = self._stage
        stage.has_backward = self._has_backward
        stage.clear_runtime_states()
        self._prepare()
        sent: list[dist.Work] = []
        for chunk in range(self._n_microbatches):
            _wait(_start(stage.get_fwd_recv_ops(chunk)))
            stage.forward_one_chunk(chunk, (), {"chunk": chunk}, save_forward_output=False)
            sent += _start(stage.get_fwd_send_ops(chunk))
        _wait(sent)

    def _prepare(self) -> None:
        """Makes the memory for what is received, once.

        Torch's newer versions let the stages vote first whether shapes are known. They are; and of several
        stages on one process, the second would not be there to vote.
        """
        if self._stage_forward_initialized:
            return
        stage = self._stage
        if not hasattr(stage, "_inference_mode"):
            self._initialize_stage((), {})
            return
        stage._inference_mode = _utils.InferenceMode.STATIC
        stage._prepare_forward_infra(self._n_microbatches, (), {}, has_backward=self._has_backward)
        if self._has_backward:
            stage._prepare_backward_infra(self._n_microbatches)
        self._stage_forward_initialized = True

    def back(
        self, gradients: Sequence[Sequence[torch.Tensor | None]], loose: Sequence[torch.Tensor] = ()
    ) -> None:
        """The backward of every chunk.

        Args:
            gradients: on the last stage, for each chunk those of its outputs; for the first chunk also those
                of ``loose``.
            loose: weights between the blocks, as the first chunk saw them.
        """
        stage = self._stage
        sent: list[dist.Work] = []
        for chunk in range(self._n_microbatches):
            _wait(_start(stage.get_bwd_recv_ops(chunk)))
            outputs = [*stage.fwd_cache[chunk][0], *(loose if chunk == 0 else ())]
            loss = _pulled(outputs, gradients[chunk]) if stage.is_last else None
            stage.backward_one_chunk(chunk, loss=loss, last_backward=chunk == self._n_microbatches - 1)
            sent += _start(stage.get_bwd_send_ops(chunk))
        _wait(sent)


def _pulled(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """A number whose gradient for ``outputs`` is ``gradients``."""
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
    with torch.enable_grad():
        return (
            sum(((o * g).sum() for o, g in pairs[1:]), start=(pairs[0][0] * pairs[0][1]).sum())
            if pairs
            else None
        )


def _start(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Begins them, one by one: operations between two processes keep their order."""
    works = [op.op(op.tensor, op.peer, op.group, op.tag) for op in operations]
    return [work for work in works if work is not None]


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
