"""Weights kept in a small number format: what is cast, what is left alone, and that nothing drifts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.big_modeling import attach_layerwise_casting_hooks
from accelerate.hooks import (
    AlignDevicesHook,
    LayerwiseCastingHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    remove_hook_from_submodules,
)

SMALL, LARGE = torch.float8_e4m3fn, torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 4, 1)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(self.proj(x).mT).mT)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().to(LARGE)


X = torch.ones(1, 3, 4, dtype=LARGE)


def stored(net: nn.Module) -> list[str]:
    """Names of the weights that are kept small."""
    return [name for name, tensor in net.named_parameters() if tensor.dtype == SMALL]


def rounded(net: Net) -> Net:
    """The model whose weights have been through the small format once."""
    twin = copy.deepcopy(net)
    for module in twin.modules():
        if isinstance(module, nn.Linear | nn.Conv1d):
            module.to(SMALL).to(LARGE)
    return twin


def test_linear_layers_and_convolutions_are_kept_small(net: Net) -> None:
    expected = rounded(net)(X)
    attach_layerwise_casting_hooks(net, SMALL, LARGE)
    names = [name for name, _ in net.named_parameters() if "norm" not in name]
    assert len(names) == 10
    assert stored(net) == names
    for _ in range(3):
        assert torch.equal(net(X), expected)
    assert stored(net) == names


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"skip_modules_pattern": "head"}, 8),
        ({"skip_modules_pattern": ("blocks.0", "proj$")}, 4),
        ({"skip_modules_classes": (nn.Conv1d,)}, 6),
        ({"skip_modules_classes": (Block,)}, 2),
        ({"skip_modules_pattern": "", "skip_modules_classes": ()}, 0),
    ],
)
def test_modules_can_be_left_alone(net: Net, options: dict[str, Any], left: int) -> None:
    attach_layerwise_casting_hooks(net, SMALL, LARGE, **options)
    assert len(stored(net)) == left


def test_the_stored_weights_are_the_very_same_after_a_forward(net: Net) -> None:
    """Nothing is cast back: what cannot change cannot drift."""
    hook = LayerwiseCastingHook(SMALL, LARGE, non_blocking=False)
    layer: Any = add_hook_to_module(net.head, hook)
    memory, parameter = layer.weight.data_ptr(), layer.weight
    layer(X)
    assert layer.weight is parameter
    assert layer.weight.data_ptr() == memory


def test_weights_that_a_forward_changes_are_cast() -> None:
    class Counting(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            assert self.weight.dtype == LARGE
            with torch.no_grad():
                self.weight.fill_(2)
            return super().forward(input)

    layer = Counting(4, 4)
    attach_layerwise_casting_hooks(layer, SMALL, LARGE)
    layer(X)
    assert layer.weight.dtype == SMALL
    assert torch.equal(layer.weight.float(), torch.full((4, 4), 2.0))


@pytest.mark.parametrize("dtypes", [(SMALL, LARGE), (torch.float32, LARGE)])
@pytest.mark.parametrize("how", ["assigned", "turned", "written"])
def test_data_that_a_forward_changes_stays(dtypes: Any, how: str) -> None:
    """Torch does not count what is written to ``.data``; the rest keeps its accuracy."""

    class Changing(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if how == "assigned":
                self.weight.data = torch.full_like(self.weight, 2)
            elif how == "turned":
                self.weight.data = self.weight.data.t()
            else:
                self.weight.data[0].fill_(2)
            return super().forward(input)

    layer = Changing(4, 4).requires_grad_(False)
    expected = layer.weight.clone().to(dtypes[0]).float()
    attach_layerwise_casting_hooks(layer, *dtypes)
    layer(X)
    if how == "turned":
        expected = expected.t().to(LARGE).float()
    else:
        expected[: 4 if how == "assigned" else 1] = 2
    assert layer.weight.dtype == dtypes[0]
    if how == "turned":  # where it was changed it was in the compute dtype
        assert torch.equal(layer.weight.to(LARGE).float(), expected)
    else:
        assert torch.equal(layer.weight.float(), expected)


@pytest.mark.parametrize("how", ["in place", "assigned"])
def test_changes_between_hooks_that_are_called_by_hand_stay(how: str) -> None:
    layer = nn.Linear(4, 4).requires_grad_(False)
    attach_layerwise_casting_hooks(layer, SMALL, LARGE)
    hook: Any = vars(layer)["_hf_hook"]
    hook.pre_forward(layer)
    if how == "in place":
        layer.weight.fill_(2)
    else:
        layer.weight.data = torch.full_like(layer.weight, 2)
    hook.post_forward(layer, None)
    assert layer.weight.dtype == SMALL
    assert torch.equal(layer.weight.float(), torch.full((4, 4), 2.0))


def test_weights_that_somebody_casts_are_small_again_after_a_forward(net: Net) -> None:
    attach_layerwise_casting_hooks(net, SMALL, LARGE)
    names = stored(net)
    net.to(LARGE)
    assert not stored(net)
    net(X)
    assert stored(net) == names


def test_an_error_leaves_the_weights_small(net: Net) -> None:
    """E12."""
    attach_layerwise_casting_hooks(net, SMALL, LARGE)
    before = stored(net)
    with pytest.raises(RuntimeError):
        net(torch.ones(1, 3, 5, dtype=LARGE))
    assert stored(net) == before
    assert net(X).shape == (1, 3, 2)


def test_a_call_inside_a_call_keeps_the_weights_large() -> None:
    """E13."""
    hook = LayerwiseCastingHook(SMALL, LARGE, non_blocking=False)
    layer: Any = add_hook_to_module(nn.Linear(4, 4), hook)
    hook.pre_forward(layer)
    layer(X)
    assert layer.weight.dtype == LARGE
    hook.post_forward(layer, None)
    assert layer.weight.dtype == SMALL


def test_after_another_hook(net: Net) -> None:
    """Offloaded weights are cast when they are here, and dropped as they came."""
    expected = rounded(net)(X)
    for module in list(net.modules()):
        if isinstance(module, nn.Linear | nn.Conv1d):
            add_hook_to_module(module.to(SMALL), AlignDevicesHook("cpu", offload=True))
    attach_layerwise_casting_hooks(net, SMALL, LARGE)
    assert isinstance(vars(net.head)["_hf_hook"], SequentialHook)
    for _ in range(2):
        assert torch.equal(net(X), expected)
        assert net.head.weight.dtype == SMALL
    remove_hook_from_submodules(net)
    assert torch.equal(rounded(net)(X), expected)


def test_weights_that_are_offloaded_stay_so(net: Net) -> None:
    expected = rounded(net)(X)
    attach_align_device_hook(net, "cpu", offload=True)
    attach_layerwise_casting_hooks(net, SMALL, LARGE)
    assert len(stored(net)) == 10
    for _ in range(2):
        assert torch.equal(net(X), expected)
        assert {tensor.device.type for tensor in net.parameters()} == {"meta"}


def test_copies_are_independent(net: Net) -> None:
    attach_layerwise_casting_hooks(net, SMALL, LARGE)
    expected = net(X)
    twin = copy.deepcopy(net)
    twin.head.bias.data.zero_()
    assert torch.equal(net(X), expected)
    assert not torch.equal(twin(X), expected)
