"""DiLoCo: every rank trains locally, and an outer optimizer steps along the mean of their updates.

Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models"
(arXiv:2311.08105), algorithm 1, with its outer optimizer: SGD with Nesterov momentum, learning rate 0.7,
momentum 0.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import SettingError
from accelerate.outer.bucketed_averaging import iterate_means
from accelerate.outer.local_training import LocalSGDContext


class DiLoCo(LocalSGDContext):
    """Every rank takes ``inner_steps`` local steps; then all take one step of an outer optimizer.

        diloco = DiLoCo(accelerator, model, inner_steps=100)
        accelerator.register_for_checkpointing(diloco)
        with diloco:
            for batch in loader:
                ...
                optimizer.step()
                optimizer.zero_grad()
                diloco.step()

    The outer gradient is the difference between the weights of the last round (the anchor) and the mean of
    the copies now. Anchor and momentum are kept in float32 at least, twice the size of the model. With
    ``outer_lr=1`` and ``outer_momentum=0`` this is LocalSGD. One process also uses the outer optimizer,
    so that a script runs the same algorithm with any world size.

    Buffers are averaged, integer ones become those of rank 0. Frozen parameters are not sent.

    Args:
        accelerator: the ``Accelerator`` that has prepared the model and its (inner) optimizers.
        model: the prepared model.
        inner_steps: optimizer steps between two rounds; hundreds for large models.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: its Nesterov momentum, 0 for none.
        enabled: False turns it off, so that gradients are all-reduced in every step.

    Raises:
        SettingError: a value is out of its range; otherwise see ``LocalSGDContext``.
    """

    def __init__(
        self,
        accelerator: Any,
        model: nn.Module,
        inner_steps: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        enabled: bool = True,
    ) -> None:
        if not outer_lr > 0:
            raise SettingError(f"outer_lr is {outer_lr}, but it is greater than 0")
        if not 0 <= outer_momentum < 1:
            raise SettingError(f"outer_momentum is {outer_momentum}, but it is at least 0 and less than 1")
        super().__init__(accelerator, model, inner_steps, enabled, "inner_steps")
        self.inner_steps = inner_steps
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self._start_outer_optimizer(self._trainable_parameters() if enabled else {})

    def _start_outer_optimizer(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Start the outer optimizer at these weights."""
        self._anchor = {name: _make_anchor(each) for name, each in weights.items()}
        group = {"params": list(self._anchor.values())}
        lr, momentum = self.outer_lr, self.outer_momentum
        self._outer = torch.optim.SGD([group], lr=lr, momentum=momentum, nesterov=momentum > 0)

    def __enter__(self) -> Any:
        super().__enter__()
        if self.enabled and not self._steps_since_sync:
            self._refresh_anchor()
        return self

    @torch.no_grad()
    def _refresh_anchor(self) -> None:
        """Copy the weights to the anchor: outside of a block they may have been trained or loaded."""
        for name, parameter in self._trainable_parameters().items():
            anchor = self._anchor.get(name)
            if anchor is not None and not torch.equal(anchor.to(parameter.dtype), parameter):
                anchor.copy_(parameter)

    @torch.no_grad()
    def _combine_copies(self) -> None:
        parameters = self._trainable_parameters()
        names = {id(parameter): name for name, parameter in parameters.items()}
        for parameter, mean in iterate_means(parameters.values()):
            name = names[id(parameter)]
            if name in self._anchor:
                self._anchor[name].grad = self._anchor[name] - mean
            else:  # it was frozen until now: this mean is where it starts from
                self._anchor[name] = _make_anchor(mean)
                self._outer.param_groups[0]["params"].append(self._anchor[name])
        self._outer.step()
        self._outer.zero_grad()
        for name, parameter in parameters.items():
            parameter.copy_(self._anchor[name])
        self._average_buffers()

    def state_dict(self) -> dict[str, Any]:
        """Return also the anchor and the outer optimizer; see ``LocalSGDContext.state_dict``."""
        outer_state = {"anchor": dict(self._anchor), "outer": self._outer.state_dict()}
        return {**super().state_dict(), **outer_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load also the anchor and the outer optimizer; see ``LocalSGDContext.load_state_dict``."""
        super().load_state_dict(state_dict)
        if not self.enabled or state_dict["ranks"] is None:
            return
        devices = {name: parameter.device for name, parameter in self._trainable_parameters().items()}
        self._start_outer_optimizer(
            {name: value.to(devices.get(name)) for name, value in state_dict["anchor"].items()}
        )
        self._outer.load_state_dict(state_dict["outer"])


def _make_anchor(value: torch.Tensor) -> torch.Tensor:
    """Return a copy for the outer optimizer, in float32 at least."""
    return value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
