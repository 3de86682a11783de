"""Pipeline stages and schedules: torch's schedules around the user's own forward.

Each process calls the user's forward for every chunk of a batch. Blocks of its stage compute; those of
earlier stages give what was received of them, and those of later stages tensors without values. torch's
``PipelineStage`` carries values and gradients between neighbours.

``gpipe``: all chunks go forward. What the result depends on comes to all stages, and the code after the last
block runs once more over the whole batch, so that the result and its graph are those of one process, whatever
the loss is. The backward of that graph runs the stages' backwards.

``1f1b``: the loss is known in the last stage, so forwards and backwards alternate within one call of the
model, and fewer activations are kept. Gradients are kept apart until the backward of the loss, which adds
them, multiplied by what arrives there.

Of a weight that several stages hold, a tied one or one outside the blocks, each stage computes its part of
the gradient; the sum is the gradient. It is taken of what one backward has added, so that it does not matter
how many there are before a step. All holders add in the same order: their weights stay equal bit by bit.

Source: Huang et al. 2019, "GPipe" (arXiv:1811.06965); Narayanan et al. 2019, "PipeDream" (arXiv:1806.03377);
``torch.distributed.pipelining``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, _utils

from accelerate.core.errors import PrepareError
from accelerate.core.torch_internals import accepts, require
from accelerate.stages.split import flatten_tree, start_transfers, unflatten_tree
from accelerate.strategy.parallelism.pipeline.forward_trace import (
    BlockOutputKey,
    PipelineForwardTrace,
    TensorMeta,
    is_fake,
)
from accelerate.strategy.sharding.grads import (
    fsdp_params,
    local_grad,
    unsharded_param,
)
from accelerate.world.call_site import waits_for_ranks

require("pipeline parallelism")
# Torch 2.6 keeps the outputs of a call until its end.
_DISCARD_OUTPUT: dict[str, Any] = (
    {"save_forward_output": False} if accepts(PipelineStage.forward_one_chunk, "save_forward_output") else {}
)


class StageForward:
    """The forward of one micro-batch in one stage: runs or replaces each block.

    Args:
        trace: the forward trace.
        stage: whose blocks compute; None: no block does.
        inputs: the received block outputs.
        wanted: the block outputs to keep.
        make_fake: makes a fake tensor.
        result: the forward's result is wanted too, so what it depends on stays in it.

    Attributes:
        kept: the block outputs that were wanted.
        outer_weights: the weights between the blocks as the forward saw them; None if nobody wants them.
    """

    def __init__(
        self,
        trace: PipelineForwardTrace,
        stage: int | None,
        inputs: Mapping[BlockOutputKey, torch.Tensor],
        wanted: Sequence[BlockOutputKey],
        make_fake: Callable[[TensorMeta], torch.Tensor],
        *,
        result: bool = False,
    ) -> None:
        self.trace, self.stage, self.inputs, self.make_fake = trace, stage, inputs, make_fake
        self.wanted, self.result = frozenset(wanted), result
        self.kept: dict[BlockOutputKey, torch.Tensor] = {}
        self.outer_weights: list[torch.Tensor] | None = None
        self.count = 0

    def call_block(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the output of a call of a block: computed, received or fake."""
        calls, number = self.trace.calls, self.count
        if number == len(calls) or calls[number].block != name:
            raise _control_flow_error(name)
        self.count += 1
        call = calls[number]
        values = [BlockOutputKey(number, place) for place in range(len(call.metas))]
        if call.stage != self.stage:
            return unflatten_tree(call.form, [self._input_tensor(value) for value in values])
        output = run(*args, **kwargs)
        _, tensors = flatten_tree(output, f"the output of {name} ")
        if len(tensors) != len(values) or any(map(is_fake, tensors)):
            raise _control_flow_error(name)
        self.kept.update({v: t for v, t in zip(values, tensors, strict=True) if v in self.wanted})
        if all(map(self._is_visible, values)):
            return output
        pairs = zip(values, tensors, strict=True)
        seen = [t if self._is_visible(v) else self.make_fake(self.trace.meta(v)) for v, t in pairs]
        return unflatten_tree(flatten_tree(output, "")[0], seen)

    def _input_tensor(self, value: BlockOutputKey) -> torch.Tensor:
        received = self.inputs.get(value)
        return self.make_fake(self.trace.meta(value)) if received is None else received

    def _is_visible(self, value: BlockOutputKey) -> bool:
        """Return whether the rest of the forward in this stage needs the real value."""
        return self.trace.is_used_in_own_stage(value) or (self.result and value in self.trace.result_inputs)

    def stage_outputs(self, values: Sequence[BlockOutputKey]) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the stage, received ones that are passed on included."""
        if self.count != len(self.trace.calls):
            raise _control_flow_error(self.trace.calls[self.count].block, missing=True)
        outputs: list[torch.Tensor] = []
        for value in values:
            tensor = self.kept[value] if value in self.kept else self.inputs[value]
            # Not the very tensor that came in; and only contiguous ones travel over every back end.
            tensor = tensor.view_as(tensor).to(self.trace.meta(value).dtype).contiguous()
            outputs.append(tensor)
        return tuple(outputs)


def _control_flow_error(name: str, *, missing: bool = False) -> PrepareError:
    problem = f"the forward did not call {name}" if missing else f"the forward called {name} out of its turn"
    return PrepareError(
        f"{problem}: it takes another way than with other values of the same shapes",
        why="stages of a pipeline must agree on which layers run, and in which order",
        fix="do not skip layers by values or at random in a pipeline parallel model",
    )


class PipelineStageModule(nn.Module):
    """The module that torch's stage calls for each micro-batch.

    Attributes:
        run_chunk: takes the number of a chunk and what was received; gives what is sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.run_chunk: Callable[[int, tuple[torch.Tensor, ...]], Any] = reject_call

    def forward(self, *tensors: torch.Tensor, chunk: Any) -> Any:
        """Run one micro-batch: from the inputs of this stage to those of the next."""
        return self.run_chunk(int(chunk), tensors)


def reject_call(*args: Any) -> Any:
    """Raise: stands where a schedule must not call anything."""
    raise AssertionError("a schedule of a pipeline ran without a batch")


@contextmanager
def _unwrapped_errors() -> Iterator[None]:
    """Raise what torch's stage wraps in an error of its own, which no handler would know."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is not None:
            raise error.__cause__ from None
        raise


class TrainingStage(PipelineStage):
    """torch's stage, with a context around each backward.

    Attributes:
        backward_context: makes it from the micro-batch, the stage, and whether it is the last one.
    """

    backward_context: Callable[[int, int, bool], AbstractContextManager[Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._chunks_with_grad: set[int] = set()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a forward; errors of the user's code are raised as they are, not wrapped by torch."""
        with _unwrapped_errors():
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        outputs = output if isinstance(output, tuple) else (output,)
        # The tensors themselves stay with torch, which frees those that are sent.
        if any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in outputs):
            self._chunks_with_grad.add(fwd_chunk_id)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run a backward; where nothing trains, only zeros are sent back."""
        has_loss = isinstance(loss, torch.Tensor) and loss.requires_grad
        if not (has_loss if self.is_last else bwd_chunk_id in self._chunks_with_grad):
            if not self.is_last:
                # A buffer that nobody has taken is not received into again (torch 2.15).
                self._retrieve_recv_grads(bwd_chunk_id)
            self.bwd_cache[bwd_chunk_id] = (None,) * len(self.args_recv_info[bwd_chunk_id])
        else:
            with self.backward_context(bwd_chunk_id, self.stage_index, last_backward), _unwrapped_errors():
                super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if not self.is_first and not hasattr(PipelineStage, "_get_grad_send_meta"):
            self._fill_missing_grads(bwd_chunk_id)

    def _fill_missing_grads(self, chunk: int) -> None:
        """Give inputs without a gradient one of zeros: torch refuses None, and from 2.13 on sends zeros."""
        infos: Any = self.args_recv_info[chunk]
        # Torch 2.12 receives gradients of what has one only, and still wants to send all.
        takes = [getattr(getattr(info, "tensor_meta", info), "requires_grad", True) for info in infos]
        if not all(takes):
            self.grad_send_info = [info.source if t else None for info, t in zip(infos, takes, strict=True)]
        self.bwd_cache[chunk] = tuple(
            torch.zeros_like(info.buffer) if grad is None and taken else grad
            # Behind those of what was received there may be one of the keyword argument.
            for grad, info, taken in zip(self.bwd_cache[chunk], infos, takes, strict=False)
        )

    def clear_runtime_states(self) -> None:
        """Release what the micro-batches of a call have left."""
        super().clear_runtime_states()
        self._chunks_with_grad.clear()


def make_stage(
    worker: PipelineStageModule,
    trace: PipelineForwardTrace,
    stage: int,
    outputs: Sequence[TensorMeta],
    device: torch.device,
    group: Any,
) -> TrainingStage:
    """Make torch's stage from the tensors that it receives and sends."""
    input_args = tuple(_meta_tensor(trace.meta(value)) for value in trace.stage_inputs(stage))
    output_args = tuple(map(_meta_tensor, outputs))
    return TrainingStage(
        worker, stage, trace.stages, device, input_args=input_args, output_args=output_args, group=group
    )


def _meta_tensor(meta: TensorMeta) -> torch.Tensor:
    tensor = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
    return tensor.requires_grad_(meta.requires_grad and tensor.is_floating_point())


class GPipeSchedule:
    """The GPipe schedule of a process's stages, in two calls: all forwards, and later all backwards.

    Several stages take turns after as many micro-batches as there are processes, so that each has what it
    needs from its neighbour one step before. The processes form a ring then: each sends and receives in one
    batch, since NCCL runs single transfers in their order, and all would wait to send.

    Args:
        stages: the stages of this process.
        n_microbatches: how many there are.
        trains: backwards follow.
    """

    def __init__(self, stages: Sequence[Any], n_microbatches: int, *, trains: bool) -> None:
        self.stages, self._n_microbatches = stages, n_microbatches
        for stage in stages:
            stage.has_backward = trains
            # The receive buffers. Torch's schedules let neighbours send a number first (2.10), or the stages
            # vote whether shapes are known (2.12). They are; and of several stages on one process, the
            # second would not be there to answer.
            options: dict[str, Any] = {}
            if hasattr(stage, "_inference_mode"):
                stage._inference_mode = _utils.InferenceMode.STATIC
                options = {"has_backward": trains}
            stage._prepare_forward_infra(n_microbatches, (), {}, **options)
            if trains:
                stage._prepare_backward_infra(n_microbatches)

    def run_forwards(self) -> None:
        """Run the forward of every micro-batch."""

        def compute(stage: TrainingStage, chunk: int) -> None:
            stage.forward_one_chunk(chunk, (), {"chunk": chunk}, **_DISCARD_OUTPUT)

        self._run("fwd", self.stages, compute)

    def run_backwards(
        self,
        gradients: Sequence[Sequence[torch.Tensor | None]],
        outputs: Sequence[tuple[torch.Tensor, ...]],
        outer_weights: Sequence[torch.Tensor] = (),
    ) -> None:
        """Run the backward of every micro-batch.

        Args:
            gradients: on the last stage, for each chunk those of its outputs; for the first chunk also those
                of ``outer_weights``.
            outputs: on the last stage, what it computed for each chunk.
            outer_weights: weights between the blocks, as the first chunk saw them.
        """

        def compute(stage: TrainingStage, chunk: int) -> None:
            loss, last = None, chunk == self._n_microbatches - 1
            if stage.is_last:
                results = [*outputs[chunk], *(outer_weights if chunk == 0 else ())]
                loss = _weighted_sum(results, gradients[chunk])
                # A micro-batch without gradients has no backward that could reduce those of earlier ones.
                last = all(gradient is None for row in gradients[chunk + 1 :] for gradient in row)
            stage.backward_one_chunk(chunk, loss=loss, last_backward=last)

        self._run("bwd", self.stages[::-1], compute)

    def _run(self, kind: str, stages: Sequence[Any], compute: Callable[[TrainingStage, int], None]) -> None:
        """Run every micro-batch of ``stages``, each between what it receives and what it sends."""
        total, turn = self._n_microbatches, stages[0].group_size
        pending: list[dist.Work] = []
        sends: list[dist.P2POp] = []
        for stage, chunk in [
            (stage, chunk)
            for first in range(0, total, turn)
            for stage in stages
            for chunk in range(first, min(first + turn, total))
        ]:
            receives = getattr(stage, f"get_{kind}_recv_ops")(chunk)
            if len(stages) == 1:
                wait_all(start_transfers(receives))
            elif sends or receives:
                wait_all(dist.batch_isend_irecv([*sends, *receives]))
            compute(stage, chunk)
            sends = getattr(stage, f"get_{kind}_send_ops")(chunk)
            if len(stages) == 1:
                pending += start_transfers(sends)
        wait_all(pending if len(stages) == 1 or not sends else dist.batch_isend_irecv(sends))


def _weighted_sum(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> torch.Tensor | None:
    """Return a scalar whose gradient for ``outputs`` is ``gradients``."""
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
    with torch.enable_grad():
        terms = [(o * g).sum() for o, g in pairs]
        return sum(terms[1:], start=terms[0]) if terms else None


@waits_for_ranks("a transfer between stages")
def wait_all(works: list[dist.Work]) -> None:
    """Wait until transfers between stages have ended."""
    for work in works:
        work.wait()


@dataclass
class StageSharedParam:
    """A parameter that several stages hold.

    Attributes:
        name: its first name in the user's model.
        holders: the places in the pipeline that have it.
        module, label: where it is here; None where it is not.
    """

    name: str
    holders: tuple[int, ...]
    module: nn.Module | None
    label: str

    def optimizer_param(self, model: nn.Module) -> torch.Tensor | None:
        """Return it as optimizers hold it; None where this process does not hold it, or it does not train."""
        if self.module is None:
            return None
        now: Any = self.module._parameters[self.label]
        whole = {unsharded_param(place): p for p, place in fsdp_params([model]).items()}
        param = whole.get(now, now)
        return param if param is not None and param.requires_grad else None


def trainable_params(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters that train, as optimizers hold them."""
    whole = {unsharded_param(place): p for p, place in fsdp_params([model]).items()}
    return [p for p in dict.fromkeys(whole.get(p, p) for p in model.parameters()) if p.requires_grad]


@contextmanager
def sum_shared_grads(
    model: nn.Module, shared: Sequence[StageSharedParam], group: Any, *, sync: bool
) -> Iterator[None]:
    """Sum the gradients that a backward adds to shared parameters over their holders; a context.

    Args:
        sync: False while gradients are kept back elsewhere: there is nothing to be summed yet.
    """
    pairs = [
        (shared_param, p) for shared_param in shared if (p := shared_param.optimizer_param(model)) is not None
    ]
    before = [p.grad for _, p in pairs]
    for _, p in pairs:
        p.grad = None
    yield
    for (shared_param, p), old in zip(pairs, before, strict=True):
        new = p.grad
        if sync:
            if new is None:
                new = torch.zeros_like(p)
            with torch.no_grad():
                _sum_over_holders(local_grad(new), shared_param.holders, group)
        p.grad = old if new is None else new if old is None else old.add_(new)
    if sync and any(held.module._parameters[held.label] is not p for held, p in pairs if held.module):
        # Nothing of this stage had a backward, which reshards: the model shows parameters without gradients.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _sum_over_holders(mine: torch.Tensor, holders: Sequence[int], group: Any) -> None:
    """Sum a tensor over the holders, in place."""
    rank = dist.get_rank(group)
    parts = {place: mine.clone(memory_format=torch.contiguous_format) for place in holders}
    # One batch: NCCL runs single transfers of two processes one after another, and both would send first.
    transfers = [
        dist.P2POp(op, parts[rank if op is dist.isend else place], dist.get_global_rank(group, place), group)
        for place in holders
        for op in (dist.isend, dist.irecv)
        if place != rank
    ]
    wait_all(dist.batch_isend_irecv(transfers))
    total = parts[holders[0]].clone()
    for place in holders[1:]:
        total += parts[place]
    mine.copy_(total)
