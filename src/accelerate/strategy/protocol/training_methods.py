"""The part of the strategy protocol about the loop: backward, accumulation, clipping and the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate.strategy.protocol.data_sharding import NO_CONTEXT


def graph_leaves(loss: torch.Tensor) -> set[torch.Tensor]:
    """Return the parameters and other leaf tensors in the autograd graph of ``loss``."""
    leaves: set[torch.Tensor] = set()
    seen: set[Any] = set()
    pending: list[Any] = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        pending += [following for following, _ in node.next_functions]
    return leaves


@dataclass(frozen=True)
class ZeroBackward:
    """A backward that adds zero to every gradient, so that collectives of other ranks find this one.

    Attributes:
        loss: a mean of nothing, which may be NaN.
        models: those concerned.
        parameters: their trained parameters.
        graph_params: the parameters in the graph of the loss (``reached_params``).
        sync_gradients: as in ``StrategyTrainingBase.backward``.
    """

    loss: torch.Tensor
    models: Sequence[nn.Module]
    parameters: Sequence[torch.Tensor]
    graph_params: set[torch.Tensor]
    sync_gradients: bool = True


def run_with_zero_gradients(leaves: Iterable[torch.Tensor], backward: Callable[[], None]) -> None:
    """Run a whole backward with the gradient of each leaf replaced by zeros before it is used.

    Every all-gather and reduce-scatter takes place, in the order of the other ranks, and the loss may be NaN.

    Args:
        leaves: the tensors in the graph of the loss in which gradients are accumulated or reduced.
        backward: runs it.
    """
    hooks = [leaf.register_hook(torch.zeros_like) for leaf in leaves if leaf.requires_grad]
    try:
        backward()
    finally:
        for hook in hooks:
            hook.remove()


class StrategyTrainingBase:
    """The loop methods of a strategy; by default they train as one process does.

    Attributes:
        owns_step: it runs ``optimizer.step``, ``zero_grad``, the schedule and clipping itself; the wrappers
            around the user's optimizer and scheduler then only pass on to it.
    """

    owns_step: ClassVar[bool] = False

    def backward(self, loss: torch.Tensor, *, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Run the backward pass of a loss that is scaled already.

        Args:
            loss: a scalar.
            sync_gradients: gradients are complete after it; False in the first micro-batches of a window.
            kwargs: arguments of ``loss.backward``.
        """
        loss.backward(**kwargs)

    def should_divide_loss(self, kwargs: dict[str, Any]) -> bool:
        """Return whether the loss is divided by the number of micro-batches before ``backward(**kwargs)``."""
        return not self.owns_step

    def rescale_short_window(self, factor: float) -> None:
        """Multiply accumulated gradients by ``factor``: the next micro-batch closes the window early."""

    def advances_scheduler(self, scheduler: Any) -> bool:
        """Return whether the step of an engine advances this schedule too."""
        return False

    @property
    def accumulation_steps(self) -> int | None:
        """The micro-batches per step in an engine's own configuration; None if it does not say."""
        return None

    def reduces_gradients(self, model: nn.Module) -> bool:
        """Return whether a backward through ``model`` now reduces gradients over the ranks."""
        return True

    def backward_zero(self, zero: ZeroBackward) -> None:
        """Run a backward with zero gradients; parameters that the graph does not use are left alone."""
        used = [parameter for parameter in zero.parameters if parameter in zero.graph_params]
        used = used or list(zero.parameters)
        torch.autograd.backward(tuple(used), tuple(torch.zeros_like(parameter) for parameter in used))

    def reached_params(self, loss: torch.Tensor) -> set[torch.Tensor]:
        """Return the parameters and other leaf tensors in the autograd graph of ``loss``."""
        return graph_leaves(loss)

    def parameters(self, model: nn.Module) -> list[torch.Tensor]:
        """Return the parameters of ``model`` that optimizers hold, also between forward and backward."""
        return list(model.parameters())

    def gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients accumulated for ``parameters`` on this rank; in-place changes take effect."""
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def optimizer_params(self, optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
        """Return the parameters of prepared models that an optimizer changes."""
        return (p for group in optimizer.param_groups for p in group["params"])

    def has_nonzero_grads(self, models: Iterable[nn.Module], parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether ``parameters``, all those of ``models``, have gradients that are not zero."""
        return any(bool(grad.any()) for grad in self.gradients(parameters))

    def rescale_gradients(self, models: Iterable[nn.Module], factor: float) -> bool:
        """Multiply the gradients of ``models``; return False where the caller multiplies ``gradients``."""
        return False

    @property
    def has_unreduced_grads(self) -> bool:
        """True if there may be unreduced gradients that ``zero_grad`` of an optimizer does not see."""
        return False

    def accumulation_context(self, models: Iterable[nn.Module], *, sync: bool) -> AbstractContextManager[Any]:
        """Return a context for one micro-batch; ``sync`` False keeps gradients local (``no_sync``)."""
        return NO_CONTEXT

    def accumulation_bytes(self, models: Iterable[nn.Module]) -> int:
        """Return the extra bytes that unreduced gradients take on this rank during accumulation."""
        return 0

    def local_steps(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for local steps, in which nothing of ``model`` is exchanged.

        Only where the strategy ``replicates_model``.
        """
        return self.accumulation_context((model,), sync=False)

    @staticmethod
    def sync_next_backward(model: nn.Module) -> None:
        """Make the next backward reduce gradients although its forward ran under ``no_sync``."""

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Scale gradients so that their global norm is at most ``max_norm``; return the norm before."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_value(self, parameters: Iterable[torch.Tensor], limit: float) -> None:
        """Clamp each gradient element to ``[-limit, limit]``."""
        nn.utils.clip_grad_value_(parameters, limit)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
        """Take one optimizer step; ``step`` runs the user's optimizer through the precision."""
        return step()

    def zero_grad(self, optimizer: torch.optim.Optimizer, zero: Callable[[], None]) -> None:
        """Clear gradients; ``zero`` clears those of the user's optimizer."""
        zero()

    def flag_reduction(self) -> Callable[[torch.Tensor], None] | None:
        """Return a function that max-reduces a flag over the ranks in place; None where all ranks agree.

        A gradient that is not finite, for example, is seen only by the rank that holds it.
        """
        return None
