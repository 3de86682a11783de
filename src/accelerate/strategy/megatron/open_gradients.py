"""The gradients of a window that is not complete, in Megatron-LM's ``main_grad`` buffers.

Each data parallel rank has those of its own batches until the window ends: a sum over its tokens, or the mean
of its micro-batches. Under another layout, or another strategy, they are loaded as the mean over all data
parallel ranks, in proportion to the micro-batches that the window has had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate.strategy.protocol.gradient_sync import GradientPiece, OpenGradients

if TYPE_CHECKING:
    from accelerate.strategy.megatron.engine import MegatronEngine
    from accelerate.strategy.megatron.full_state import MegatronFullStateConverter
    from accelerate.strategy.megatron.layout import MegatronLayout
    from accelerate.strategy.megatron.model_families import WeightRule


class MegatronOpenGradients(OpenGradients):
    """The capability of the strategy ``Megatron`` to save and restore its open gradients."""

    if TYPE_CHECKING:  # of the strategy
        _engine: MegatronEngine | None

        def _converter(self, model: nn.Module) -> MegatronFullStateConverter: ...

    @property
    def has_readable_gradients(self) -> bool:
        """Return False between clipping and the step: the gradients are reduced then, and scaled."""
        return self._engine is None or not self._engine.grads_complete

    @property
    def gradient_layout(self) -> str:
        """Return what decides which gradients a rank holds: the degrees, and what the mean is taken of."""
        assert self._engine is not None
        layout, weighs = self._engine.layout, self._engine.plugin.weighs_tokens
        degrees = f"tp {layout.tp}, pp {layout.pp}, dp {layout.dp}"
        return f"{self.name}, {degrees}, mean over {'tokens' if weighs else 'micro-batches'}"

    @property
    def micro_batches(self) -> int:
        """Return the number of calls that the open window has had."""
        return 0 if self._engine is None else self._engine.calls

    @torch.no_grad()
    def gradient_pieces(self, model: nn.Module) -> dict[str, list[GradientPiece]]:
        """Return this rank's pieces; collective.

        The ranks that share a tensor share its unsharded gradient in equal parts, each of one dimension.
        """
        from megatron.core import parallel_state

        converter = self._converter(model)
        engine = converter.engine
        if not engine.calls or engine.grads_stale:
            return {}
        divisor = _mean_divisor(engine) * self.window_size
        pieces: dict[str, list[GradientPiece]] = {}
        for rule, parameter in _trained_params(converter):
            gradient: torch.Tensor = parameter.main_grad  # type: ignore[assignment]
            if _is_partial(parameter):
                gradient = gradient.clone()
                group: Any = parallel_state.get_tensor_model_parallel_group()
                dist.all_reduce(gradient, group=group)
            unsharded = rule.join(converter.gather_tp_shards(gradient))
            for name, whole in zip(rule.names, unsharded, strict=True):
                start, stop = _equal_part(whole.numel(), converter.layout)
                values = whole.reshape(-1)[start:stop].clone()
                pieces[name] = [GradientPiece(values, tuple(whole.shape), (start,), divisor)]
        return pieces

    @torch.no_grad()
    def restore_pieces(self, model: nn.Module, pieces: Mapping[str, Sequence[GradientPiece]]) -> None:
        """Put the pieces of an equal layout back; collective."""
        converter = self._converter(model)
        layout = converter.layout
        _drop_gradients(converter.engine)
        for rule, parameter in _trained_params(converter):
            if any(name not in pieces for name in rule.names):
                continue
            unsharded = [_join_parts(pieces[name][0], converter) for name in rule.names]
            gradient = rule.shard(unsharded, layout.tp)[layout.tp_rank]
            if not _is_partial(parameter) or layout.tp_rank == 0:
                parameter.main_grad.copy_(gradient)  # type: ignore[union-attr]

    @torch.no_grad()
    def load_gradients(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Keep this rank's shards of unsharded gradients, to be added when the window ends."""
        converter = self._converter(model)
        engine = converter.engine
        _drop_gradients(engine)
        engine.resumed_grads = [
            (parameter, converter.local_shard(rule, [gradients[name] for name in rule.names]).contiguous())
            for rule, parameter in _trained_params(converter)
            if all(name in gradients for name in rule.names)
        ]

    def resume_window(self, model: nn.Module, micro_batches: int, window_size: int) -> None:
        """Set which part of a window the gradients that ``load_gradients`` has kept are."""
        engine = self._converter(model).engine
        engine.resumed_calls, engine.resumed_window_size = micro_batches, window_size

    def local_buffers(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the calls of the open window and this rank's tokens in them."""
        engine = self._converter(model).engine
        tokens = torch.zeros((), dtype=torch.int) if engine.tokens is None else engine.tokens.detach()
        return {"calls": torch.tensor(engine.calls), "tokens": tokens}

    def restore_local_buffers(self, model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
        """Put both back."""
        engine = self._converter(model).engine
        engine.calls = int(buffers["calls"])
        engine.tokens = buffers["tokens"].to(engine.device, copy=True)


def _trained_params(converter: MegatronFullStateConverter) -> Iterator[tuple[WeightRule, nn.Parameter]]:
    """Yield the parameters of this rank that are trained; of a tied pair on two stages each its own."""
    pairs = (*converter.params, *converter.copies)
    return ((rule, p) for rule, p in pairs if p is not None and p.requires_grad)


def _is_partial(parameter: nn.Parameter) -> bool:
    """Return whether the tensor parallel ranks have to sum the gradients of a replicated parameter."""
    return bool(getattr(parameter, "sequence_parallel", False))


def _mean_divisor(engine: MegatronEngine) -> float:
    """Return by what the sum over the ranks is divided to be a sum of means, one for each call."""
    if not engine.plugin.weighs_tokens:
        return engine.layout.dp
    from megatron.core import parallel_state

    assert engine.tokens is not None
    tokens = engine.tokens.clone()
    group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(tokens, group=group)
    return max(1, tokens.item()) / engine.calls


def _equal_part(numel: int, layout: MegatronLayout) -> tuple[int, int]:
    """Return (start, stop) of this tensor parallel rank's part of a flattened tensor."""
    size = -(-numel // layout.tp)
    start = min(numel, layout.tp_rank * size)
    return start, min(numel, start + size)


def _join_parts(piece: GradientPiece, converter: MegatronFullStateConverter) -> torch.Tensor:
    """Return the unsharded gradient of which each tensor parallel rank has read its equal part."""
    numel = torch.Size(piece.shape).numel()
    size = -(-numel // converter.layout.tp)
    part = piece.values.new_zeros(size, device=converter.engine.device)
    part[: piece.values.numel()] = piece.values
    return torch.cat(converter.gather_tp_shards(part))[:numel].view(piece.shape)


def _drop_gradients(engine: MegatronEngine) -> None:
    (engine if engine.stepper is None else engine.stepper).clear()
