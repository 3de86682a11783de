"""Training steps: how a micro-batch is read, how the model is called with it, and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from accelerate.core.errors import FeatureNotBuiltError, PrepareError

IGNORED = -100
_BATCH_KEYS = ("input_ids", "attention_mask", "position_ids", "labels")


class AbstractTrainStep(ABC):
    """The training step of one kind of model by Megatron-LM.

    Args:
        name: of this kind of step.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[[Iterator[Any]], Any]:
        """A function from an iterator of micro-batches to the parts that the model is called with."""

    @abstractmethod
    def get_forward_step_func(self) -> Callable[[Iterator[Any], Any], Any]:
        """A function ``(iterator, model) -> (output, function of it)``, as Megatron-LM's schedules take."""

    @abstractmethod
    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """A function ``(loss_mask, output) -> (loss, values to report)``."""


class GPTTrainStep(AbstractTrainStep):
    """Causal language models: the loss of each token given those before it, as transformers counts it.

    Args:
        accelerator: the ``Accelerator``, or its strategy.
        args: what the step looks up: ``eod_token``, ``words`` (size of the vocabulary without filling),
            ``rotary`` (positions are those of the sequence).

    Attributes:
        model_output_class: what a forward returns.
    """

    args: Any
    plugin: Any
    eod_token: int | None
    pad_token: int | None
    eod_mask_loss: bool
    get_batch: Callable[[Iterator[Any]], Any]
    loss_func: Callable[..., Any]
    forward_step: Callable[[Iterator[Any], Any], Any]

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("GPTTrainStep")
        from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

        plugin = getattr(accelerator, "strategy", accelerator).plugin
        self.args, self.plugin = args, plugin
        self.eod_token = self.pad_token = getattr(args, "eod_token", None)
        self.eod_mask_loss = bool(plugin.eod_mask_loss)
        self.reset_attention_mask = self.reset_position_ids = False
        self.get_batch = self.get_batch_func(accelerator, plugin.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()
        self.model_output_class = CausalLMOutputWithCrossAttentions

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[[Iterator[Any]], Any]:
        """Return a function that reads tokens, labels, loss mask, attention mask and positions."""
        return self.plugin.custom_get_batch_function or self._batch

    def _batch(self, iterator: Iterator[Any]) -> Any:
        batch: Mapping[str, torch.Tensor] = next(iterator)
        tokens, labels, positions = batch["input_ids"], batch.get("labels"), batch.get("position_ids")
        if labels is not None:
            # The label of a token is the next one; the last has none.
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        order = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        if positions is not None and self.args.rotary and not torch.equal(positions.expand_as(order), order):
            raise PrepareError(
                "position_ids other than 0, 1, 2, ... for a model with rotary positions",
                why="Megatron-LM's rotary positions are those of the sequence",
                fix="leave position_ids out",
            )
        mask = None if labels is None else labels != IGNORED
        if mask is not None and self.eod_mask_loss:
            mask = mask & (tokens != self.eod_token)
        labels = None if labels is None else labels.clamp(min=0)
        hidden = _attention_mask(batch.get("attention_mask"), tokens)
        return tokens, labels, mask, hidden, order if positions is None else positions

    def get_forward_step_func(self) -> Callable[[Iterator[Any], Any], Any]:
        """Return the forward step: the last stage returns a loss per token, or logits without labels."""

        def forward_step(iterator: Iterator[Any], model: Any) -> Any:
            from megatron.core import parallel_state

            tokens, labels, mask, hidden, positions = self.get_batch(iterator)
            output = model(tokens, positions, hidden)
            if not parallel_state.is_pipeline_last_stage():
                return output, lambda *_, **__: None
            logits = self.mask_vocab_padding(output)
            if labels is None:
                return logits, partial(_logits_only)
            saved_logits = logits.detach().clone() if self.plugin.return_logits else None
            return token_losses(logits, labels), partial(self._loss_with_logits, mask, saved_logits)

        return forward_step

    def mask_vocab_padding(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask the logits of tokens that only pad the vocabulary."""
        from megatron.core import parallel_state

        width = logits.shape[-1]
        start = width * parallel_state.get_tensor_model_parallel_rank()
        if start + width <= self.args.words:
            return logits
        token_ids = torch.arange(start, start + width, device=logits.device)
        return logits.masked_fill(token_ids >= self.args.words, torch.finfo(logits.dtype).min)

    def _loss_with_logits(
        self, mask: torch.Tensor, logits: torch.Tensor | None, output: torch.Tensor, **_: Any
    ) -> Any:
        *result, report = self.loss_func(mask, output)
        return (*result, {**report, "logits": logits})

    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """Return the loss function: sum and number of tokens, or the mean of a micro-batch."""
        custom = self.plugin.custom_loss_function
        if custom is not None:
            return custom
        return _sum_of_tokens if self.plugin.weighs_tokens else _mean_of_tokens


def _sum_of_tokens(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    total, count = (losses.float() * mask).sum(), mask.sum()
    return total, count.to(torch.int), {"sum": total.detach(), "count": count}


def _mean_of_tokens(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    mean = (losses.float() * mask).sum() / mask.sum().clamp(min=1)
    # Megatron-LM divides its first value in place.
    return mean.clone(), {"lm loss": mean.detach()}


def _logits_only(output: torch.Tensor, **_: Any) -> Any:
    # No loss, so Megatron-LM divides what nobody reads.
    return output.detach().float().mean(), {"logits": output.detach().clone()}


def _attention_mask(kept: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor | None:
    """Return the attention mask, (batch, 1, query, key), True where masked; None is the causal mask."""
    if kept is None or bool(kept.all()):
        return None
    length = tokens.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
    return later | ~kept.bool()[:, None, None, :]


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each token, from logits sharded over the vocabulary."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    # It computes in the memory of its argument.
    return vocab_parallel_cross_entropy(logits.float().clone(), labels)


def check_batch(batch: Mapping[str, Any]) -> None:
    """Refuse a batch that the step does not understand.

    Raises:
        PrepareError: it has no tokens, or more than the step reads.
    """
    more = sorted(name for name, value in batch.items() if name not in _BATCH_KEYS and value is not None)
    if more or batch.get("input_ids") is None:
        problem = f"has {', '.join(more)}" if more else "has no input_ids"
        raise PrepareError(
            f"the batch for Megatron-LM {problem}",
            why=f"Megatron-LM computes the loss of a causal language model from {', '.join(_BATCH_KEYS)}",
            fix="leave other columns out, or give MegatronLMPlugin(custom_get_batch_function=...)",
        )


class BertTrainStep(AbstractTrainStep):
    """Encoders with masked words: refused, with what is missing."""

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("BertTrainStep")
        raise _not_built_error("BERT")

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """Refused."""
        raise _not_built_error("BERT")

    def get_forward_step_func(  # type: ignore[override] - as promised
        self, pretraining_flag: Any, bert_binary_head: Any
    ) -> Any:
        """Refused."""
        raise _not_built_error("BERT")

    def get_loss_func(  # type: ignore[override] - as promised
        self, accelerator: Any, pretraining_flag: Any, num_labels: Any
    ) -> Any:
        """Refused."""
        raise _not_built_error("BERT")


class T5TrainStep(AbstractTrainStep):
    """Encoders with decoders: refused, with what is missing. The masks can be computed."""

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("T5TrainStep")
        raise _not_built_error("T5")

    @staticmethod
    def attn_mask_postprocess(attention_mask: torch.Tensor) -> torch.Tensor:
        """(batch, length), 1 where a token is seen -> (batch, length, length), True where it is hidden."""
        seen = attention_mask.unsqueeze(1) * attention_mask.unsqueeze(2)
        return seen < 0.5

    @staticmethod
    def get_decoder_mask(seq_length: int, device: torch.device) -> torch.Tensor:
        """(1, length, length), True where a token comes later."""
        ones = torch.ones((1, seq_length, seq_length), device=device)
        return ones.tril() < 0.5

    @staticmethod
    def get_enc_dec_mask(
        attention_mask: torch.Tensor, dec_seq_length: int, device: torch.device
    ) -> torch.Tensor:
        """(batch, encoder length) -> (batch, decoder length, encoder length), True where it is hidden."""
        seen = attention_mask.unsqueeze(1) * torch.ones(
            (attention_mask.shape[0], dec_seq_length, 1), device=device
        )
        return seen < 0.5

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """Refused."""
        raise _not_built_error("T5")

    def get_forward_step_func(self) -> Any:
        """Refused."""
        raise _not_built_error("T5")

    def get_loss_func(self, accelerator: Any) -> Any:
        """Refused."""
        raise _not_built_error("T5")


def _not_built_error(kind: str) -> FeatureNotBuiltError:
    return FeatureNotBuiltError(
        f"training {kind} by Megatron-LM is not built",
        why="its models for this lie in Megatron-LM's repository (megatron.legacy), not in the package "
        "megatron-core; Megatron-LM's GPT is what has been seen to train",
        fix="train it with data parallelism, sharded, or with a ParallelismConfig",
    )
