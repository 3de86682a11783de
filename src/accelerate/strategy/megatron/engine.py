"""The Megatron-LM engine: the prepared model, whose forward also runs the backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.core.errors import FeatureNotBuiltError, PrepareError
from accelerate.strategy.megatron.layout import MegatronLayout, share_rng_state
from accelerate.strategy.megatron.train_step import GPTTrainStep, check_batch

if TYPE_CHECKING:
    from accelerate.strategy.megatron.user_optimizer_adapter import MegatronOptimizerStepper


class MegatronEngine(nn.Module):
    """The model that Megatron-LM trains.

    In training, a call with labels runs forward and backward of all micro-batches of the batch, and returns
    the loss; gradients add up until the optimizer steps. ``accelerator.backward(loss)`` then has nothing left
    to do but to see that it is this loss. In evaluation, or without gradients, only the forward runs.

    Args:
        accelerator: the ``Accelerator``, or its strategy.
        model: this process's shard of Megatron-LM's model, in its data parallel wrapper.
        optimizer: what steps it; None as long as none was prepared.
        scheduler: kept for compatibility.

    Attributes:
        base_model: the user's own module, without values.
        calls: forwards with a backward since the gradients were cleared.
        resumed_grads: (parameter, gradient) pairs of a window that was saved under another layout: a sum of
            means over micro-batches, divided by ``resumed_window_size``; added when the window ends.
        resumed_calls: the micro-batches that they come from; 0 where that is not known.
        resumed_window_size: the micro-batches of that window.
    """

    base_model: nn.Module

    def __init__(self, accelerator: Any, model: Any, optimizer: Any = None, scheduler: Any = None) -> None:
        super().__init__()
        strategy = getattr(accelerator, "strategy", accelerator)
        self.module, self.scheduler = model, scheduler
        self.stepper: MegatronOptimizerStepper | None = optimizer
        self.plugin, self.device = strategy.plugin, strategy.world.device
        self.layout: MegatronLayout = strategy.layout
        self.module_config = self.get_module_config()
        self.iteration = self.calls = self.resumed_calls = 0
        self.resumed_window_size = 1
        self.resumed_grads: list[tuple[nn.Parameter, torch.Tensor]] = []
        self.tokens: torch.Tensor | None = None
        self.grads_complete, self.grads_stale, self.backward_pending = False, False, False
        self.train_step_handler: Any = None
        self._shares_rng_state = False

    def _set_base_model(self, base: nn.Module, words: int, rotary: bool) -> None:
        """Keep the user's module for its names and its configuration."""
        # Not a part of this module: it has no values.
        object.__setattr__(self, "base_model", base)
        config: Any = base.config
        args = SimpleNamespace(eod_token=config.eos_token_id, words=words, rotary=rotary)
        custom = self.plugin.custom_train_step_class
        more = self.plugin.custom_train_step_kwargs or {}
        accelerator_stub = SimpleNamespace(plugin=self.plugin)
        self.train_step_handler = (
            GPTTrainStep(accelerator_stub, args) if custom is None else custom(accelerator_stub, args, **more)
        )

    @property
    def config(self) -> Any:
        """The user's configuration."""
        return self.base_model.config

    def get_module_config(self) -> Any:
        """Megatron-LM's ``TransformerConfig``."""
        from megatron.core.utils import get_model_config

        return get_model_config(self.module)

    @property
    def optimizer(self) -> Any:
        """Megatron-LM's optimizer, None without one."""
        return None if self.stepper is None else self.stepper.megatron_optimizer

    # --- one batch

    def forward(self, **batch_data: Any) -> Any:
        """Return the loss, and logits where they are wanted; in training, run the backward too.

        Args:
            batch_data: ``input_ids``, ``labels``, ``attention_mask``, ``position_ids``; (batch, length) each.

        Raises:
            PrepareError: the batch has other parts, does not divide into micro-batches, or has no labels in
                training.
        """
        training = self.training and torch.is_grad_enabled()
        loss, logits = (self.train_step if training else self.eval_step)(**batch_data)
        return self.train_step_handler.model_output_class(loss=loss, logits=logits)

    def train_step(self, **batch_data: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run forward and backward of one batch, and accumulate its gradients."""
        if self.plugin.custom_get_batch_function is None and batch_data.get("labels") is None:
            raise PrepareError(
                "a batch without labels was given to a model in training",
                why="Megatron-LM runs the backward together with the forward, so it computes the loss itself",
                fix="model(input_ids=ids, labels=ids); or call model.eval() for a forward alone",
            )
        if self.backward_pending:
            raise PrepareError(
                "a model was called again before its loss was given to backward",
                why="Megatron-LM runs the backward together with the forward: the gradients of the first "
                "call are counted already",
                fix="call accelerator.backward(loss) after each call in training; model.eval() or "
                "torch.no_grad() for a call that only looks",
            )
        if self.grads_stale:
            self.clear()
        if self.grads_complete:
            raise PrepareError(
                "a model was called in training between clipping its gradients and the optimizer's step",
                fix="call optimizer.step() or optimizer.zero_grad() after clipping",
            )
        self.module.config.no_sync_func = None
        if not self._shares_rng_state:
            share_rng_state(self.device, self.layout)
            self._shares_rng_state = True
        loss, logits = self._run(batch_data, forward_only=False)
        self.calls += 1
        self.backward_pending = True
        assert loss is not None
        return _ComputedLoss.apply(loss, torch.zeros((), requires_grad=True), self), logits

    def eval_step(self, **batch_data: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run the forward of one batch."""
        with torch.no_grad():
            return self._run(batch_data, forward_only=True)

    def get_batch_data_iterator(self, batch_data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Split a batch into micro-batches.

        Raises:
            PrepareError: they would not be equally large.
        """
        if self.plugin.custom_get_batch_function is None:
            check_batch(batch_data)
        columns = {name: value for name, value in batch_data.items() if value is not None}
        count, rows = self.plugin.num_micro_batches, len(next(iter(columns.values())))
        if rows % count:
            raise PrepareError(
                f"a batch of {rows} samples does not divide into {count} micro-batches",
                fix=f"use a batch size that {count} divides, drop_last=True in evaluation too, or another "
                "num_micro_batches",
            )
        parts = {name: value.to(self.device).chunk(count) for name, value in columns.items()}
        return ({name: values[index] for name, values in parts.items()} for index in range(count))

    def _run(self, batch: Mapping[str, Any], forward_only: bool) -> tuple[Any, Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        iterator = self.get_batch_data_iterator(batch)
        rows, length = next(value for value in batch.values() if value is not None).shape[:2]
        reports: list[Mapping[str, Any]] = get_forward_backward_func()(
            forward_step_func=self.train_step_handler.forward_step,
            data_iterator=iterator,
            model=[self.module],
            num_microbatches=self.plugin.num_micro_batches,
            seq_length=length,
            micro_batch_size=rows // self.plugin.num_micro_batches,
            forward_only=forward_only,
        )
        has_loss = self.plugin.custom_get_batch_function is not None or batch.get("labels") is not None
        loss, tokens = self._mean_loss(reports) if has_loss else (None, None)
        if not forward_only and tokens is not None:
            self.tokens = tokens if self.tokens is None else self.tokens + tokens
        returns_logits = loss is None or self.plugin.return_logits
        return loss, self._logits(reports, (rows, length)) if returns_logits else None

    def _mean_loss(self, reports: list[Mapping[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss of this process's batch and its number of tokens, on all stages."""
        both = torch.zeros(2, dtype=torch.float64, device="cpu" if self.device.type == "cpu" else self.device)
        for report in reports:
            if "sum" in report:
                both += torch.stack([report["sum"].double(), report["count"].double()])
            else:
                value = next(v for name, v in report.items() if name != "logits")
                both += torch.stack([value.double(), torch.ones_like(value, dtype=torch.float64)])
        both = self._broadcast_from_last(both)
        return (both[0] / both[1].clamp(min=1)).float(), both[1].round().to(torch.int)

    def _logits(self, reports: list[Mapping[str, Any]], shape: tuple[int, int]) -> torch.Tensor:
        """Return the full logits, (batch, length, vocabulary), on all stages."""
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as gather_logits

        vocab_size = self.train_step_handler.args.words
        if self.layout.pp_rank < self.layout.pp - 1:
            return self._broadcast_from_last(torch.empty(*shape, vocab_size, device=self.device))
        local = torch.cat([report["logits"] for report in reports]).float()
        return self._broadcast_from_last(gather_logits(local)[..., :vocab_size].contiguous())

    def _broadcast_from_last(self, value: torch.Tensor) -> torch.Tensor:
        """Broadcast a tensor from the last pipeline stage to all stages."""
        if self.layout.pp > 1:
            from megatron.core import parallel_state

            source = parallel_state.get_pipeline_model_parallel_last_rank()
            group: Any = parallel_state.get_pipeline_model_parallel_group()
            torch.distributed.broadcast(value, src=source, group=group)
        return value

    # --- gradients

    @property
    def has_gradients(self) -> bool:
        """True if there is something to reduce or to step with."""
        return bool(self.calls or self.resumed_grads)

    def finish_gradients(self) -> None:
        """Reduce the gradients of an accumulation window: once, on all processes."""
        if self.grads_complete or not self.has_gradients:
            return
        from megatron.core.distributed import finalize_model_grads

        if self.calls:
            weighs = self.plugin.weighs_tokens
            finalize_model_grads([self.module], self.tokens if weighs else None)
            if not weighs and self.calls > 1:
                self.module.scale_gradients(1.0 / self.calls)
        if self.resumed_grads:
            self._add_resumed_grads()
        self.grads_complete = True

    @torch.no_grad()
    def _add_resumed_grads(self) -> None:
        """Make the mean of the calls since the resume the mean of the whole window."""
        size = self.resumed_window_size
        calls = self.resumed_calls + self.calls if self.resumed_calls else size
        self.module.scale_gradients(self.calls / calls)
        for parameter, gradient in self.resumed_grads:
            parameter.main_grad.add_(gradient, alpha=size / calls)  # type: ignore[union-attr]

    def clear(self) -> None:
        """Drop the gradients."""
        self.module.zero_grad_buffer()
        self.tokens, self.calls = None, 0
        self.resumed_grads, self.resumed_calls, self.resumed_window_size = [], 0, 1
        self.grads_complete = self.grads_stale = self.backward_pending = False

    def mark_stepped(self) -> None:
        """Mark the gradients as used: the next call begins with none."""
        self.iteration += 1
        self.grads_stale, self.grads_complete, self.backward_pending = True, False, False

    # --- the public package's names for states and reports

    def save_checkpoint(self, output_dir: Any) -> None:
        """Refused: ``accelerator.save_state`` saves the whole training."""
        raise PrepareError("MegatronEngine.save_checkpoint", fix="accelerator.save_state(output_dir)")

    def load_checkpoint(self, input_dir: Any) -> None:
        """Refused: ``accelerator.load_state`` loads the whole training."""
        raise PrepareError("MegatronEngine.load_checkpoint", fix="accelerator.load_state(input_dir)")

    def megatron_generate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Refused: Megatron-LM's text generation lies in its repository."""
        raise FeatureNotBuiltError(
            "megatron_generate does not generate text",
            why="Megatron-LM's text generation lies in its repository, not in the package megatron-core",
            fix="state = accelerator.get_state_dict(model), and generate(...) of transformers' model with it",
        )

    def log_eval_results(self) -> None:
        """Nothing: losses are returned, and ``accelerator.log`` takes them."""


class _ComputedLoss(torch.autograd.Function):
    """A loss whose backward has run; backward looks whether it is still that loss."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, anchor: torch.Tensor, engine: MegatronEngine) -> torch.Tensor:
        ctx.engine = engine
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        if grad.item() != 1.0:
            raise PrepareError(
                f"backward was given a loss that is the model's times {grad.item():g}, or contains it so",
                why="Megatron-LM runs the backward together with the forward, so its gradients are there",
                fix="give outputs.loss itself; MegatronLMPlugin(custom_loss_function=...) changes the loss",
            )
        ctx.engine.backward_pending = False
        return None, None, None
