"""The loop: backward, accumulation, clipping and the step, for models that are spread over processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate.strategy.protocol.data import NOTHING


def leaves(loss: torch.Tensor) -> set[torch.Tensor]:
    """The parameters and other leaves that the graph of ``loss`` reaches."""
    found: set[torch.Tensor] = set()
    seen: set[Any] = set()
    ahead: list[Any] = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        ahead += [following for following, _ in node.next_functions]
    return found


class Trains:
    """By default as one process trains.

    Attributes:
        owns_step: it runs ``optimizer.step``, ``zero_grad``, the schedule and clipping itself; the wrappers
            around the user's optimizer and scheduler then only pass on to it.
    """

    owns_step: ClassVar[bool] = False

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Runs the backward pass of a loss that is scaled already."""
        loss.backward(**kwargs)

    def divides(self, kwargs: dict[str, Any]) -> bool:
        """Whether a loss is divided by its micro-batches before ``backward``, which gets ``kwargs``."""
        return not self.owns_step

    def shortened(self, factor: float) -> None:
        """The next micro-batch closes a window early: an engine multiplies what it holds by ``factor``."""

    def advances(self, scheduler: Any) -> bool:
        """Whether the step of an engine advances this schedule too."""
        return False

    @property
    def accumulation(self) -> int | None:
        """How many micro-batches a step has, as an engine's own configuration says; None if it does not."""
        return None

    def synchronises(self, model: nn.Module) -> bool:
        """Whether a backward through ``model`` now leaves gradients that are reduced over the processes."""
        return True

    def backward_zero(
        self,
        models: Iterable[nn.Module],
        parameters: Sequence[torch.Tensor],
        reached: set[torch.Tensor],
        loss: torch.Tensor,
    ) -> None:
        """A backward that adds zero to gradients, in which other processes find what they wait for.

        Args:
            models: those concerned.
            parameters: their trained parameters.
            reached: what the graph of the loss reaches; parameters that it does not use are left alone.
            loss: a mean of nothing, which may be NaN.
        """
        used = [parameter for parameter in parameters if parameter in reached] or parameters
        torch.autograd.backward(tuple(used), tuple(torch.zeros_like(parameter) for parameter in used))

    def reached(self, loss: torch.Tensor) -> set[torch.Tensor]:
        """The parameters and other leaves that the graph of ``loss`` reaches."""
        return leaves(loss)

    def parameters(self, model: nn.Module) -> list[torch.Tensor]:
        """The parameters of ``model`` that optimizers hold, also between a forward and its backward."""
        return list(model.parameters())

    def gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """What has accumulated for ``parameters`` on this process; changing it changes the gradients."""
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def held(self, optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
        """The parameters of prepared models that an optimizer changes."""
        return (p for group in optimizer.param_groups for p in group["params"])

    def holds(self, models: Iterable[nn.Module], parameters: Iterable[torch.Tensor]) -> bool:
        """Whether anything but zeros has accumulated for ``parameters``: all those of ``models``."""
        return any(bool(grad.any()) for grad in self.gradients(parameters))

    def rescale(self, models: Iterable[nn.Module], factor: float) -> bool:
        """Multiplies what has accumulated for ``models``; False where that is done to ``gradients``."""
        return False

    @property
    def holds_back(self) -> bool:
        """Whether there may be gradients that ``zero_grad`` of an optimizer does not know."""
        return False

    def accumulating(self, models: Iterable[nn.Module], *, sync: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro-batch; ``sync`` False keeps gradients local."""
        return NOTHING

    def waiting(self, models: Iterable[nn.Module]) -> int:
        """Bytes that gradients take more on this process between the micro-batches of a window."""
        return 0

    def apart(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Around steps that this process takes by itself: nothing of ``model`` is exchanged.

        Only where the strategy ``replicates``.
        """
        return self.accumulating((model,), sync=False)

    @staticmethod
    def sync_next_backward(model: nn.Module) -> None:
        """Makes the next backward reduce gradients though its forward ran without."""

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Scales gradients so that their global norm is at most ``max_norm``; the norm before."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_value(self, parameters: Iterable[torch.Tensor], limit: float) -> None:
        """Clamps each gradient element to ``[-limit, limit]``."""
        nn.utils.clip_grad_value_(parameters, limit)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
        """Takes one optimizer step; ``step`` runs the user's optimizer through the precision."""
        return step()

    def zero_grad(self, optimizer: torch.optim.Optimizer, zero: Callable[[], None]) -> None:
        """Clears gradients; ``zero`` clears those of the user's optimizer."""
        zero()

    def agreement(self) -> Callable[[torch.Tensor], None] | None:
        """Makes a flag of each process the greatest of all, in place; None where all find the same.

        A gradient that is not finite, say, is seen by the process that has it.
        """
        return None
