"""A stand-in for an offloaded weight: to torch on meta, to whoever uses it right (TRAPS E1, E6)."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from accelerate.offload.offloaded_tensor import (
    HostMemoryWeightSource,
    MappingSource,
    OffloadedTensor,
    OffloadError,
    TensorSource,
    make_stand_in,
    source_of,
)

CPU = torch.device("cpu")


def stand_in(values: torch.Tensor, **options: Any) -> Any:
    """A stand-in parameter for a tensor in memory."""
    parameter = nn.Parameter(torch.empty_like(values, device="meta"), **options)
    return make_stand_in(parameter, HostMemoryWeightSource("weight", values), CPU)


class Recording(HostMemoryWeightSource):
    """Counts how often the values are read."""

    reads = 0

    def host_tensor(self) -> torch.Tensor:
        self.reads += 1
        return super().host_tensor()


class Frozen(TensorSource):
    """Values that cannot be changed, as in a file."""

    def __init__(self, values: torch.Tensor) -> None:
        self.name, self.values = "weight", values
        self.shape, self.dtype = values.shape, values.dtype

    def host_tensor(self) -> torch.Tensor:
        return self.values


OPERATIONS = {
    "linear": lambda w: F.linear(torch.ones(2, 6), w),
    "matmul": lambda w: torch.ones(2, 6) @ w.T,
    "embedding": lambda w: F.embedding(torch.tensor([0, 3]), w),
    "conv": lambda w: F.conv1d(torch.ones(1, 6, 5), w.unsqueeze(-1)),
    "view": lambda w: w.view(3, 8),
    "index": lambda w: w[1:3, ::2],
    "sum": lambda w: w.sum(),
    "half": lambda w: w.half(),
    "cat": lambda w: torch.cat([w, torch.zeros(1, 6)]),
    "norm": lambda w: torch.linalg.norm(w),
    "compare": lambda w: w == w,
    "numbers": lambda w: torch.tensor(w.tolist()),
    "array": lambda w: torch.from_numpy(w.detach().numpy().copy()),
    "item": lambda w: torch.tensor(w[0, 0].item()),
    "to": lambda w: w.to("cpu", torch.float64),
    "iteration": lambda w: torch.stack(list(w)),
    "foreach": lambda w: torch._foreach_mul([w], 2.0)[0],  # pyright: ignore[reportPrivateImportUsage]
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_every_use_of_a_stand_in_is_a_use_of_its_values(operation: Any) -> None:
    """E1: a weight that is used outside its owner's forward is never uninitialised memory."""
    values = torch.randn(4, 6)
    weight = stand_in(values)
    result = operation(weight)
    assert torch.equal(result, operation(values))
    if not isinstance(result, OffloadedTensor):  # a view
        assert type(result) is torch.Tensor
        assert result.device == CPU


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_also_where_torch_does_not_look_for_gradients(operation: Any) -> None:
    """E1: other operations of torch reach a stand-in under inference mode."""
    values = torch.randn(4, 6)
    weight = stand_in(values)
    with torch.inference_mode():
        assert torch.equal(operation(weight), operation(values))


def test_it_looks_like_what_it_stands_for() -> None:
    weight = stand_in(torch.randn(4, 6, dtype=torch.bfloat16), requires_grad=False)
    assert isinstance(weight, nn.Parameter)
    assert not weight.requires_grad
    assert (weight.shape, weight.dtype, weight.device.type) == ((4, 6), torch.bfloat16, "meta")
    assert "weight" in repr(weight)
    assert isinstance(weight.data, OffloadedTensor)
    assert source_of(weight.detach()) is source_of(weight) is not None


def test_attributes_that_others_set_stay() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.scale = 3  # pyright: ignore[reportAttributeAccessIssue]
    made: Any = make_stand_in(parameter, HostMemoryWeightSource("w", parameter.data), CPU)
    assert made.scale == 3


def test_looking_reads_nothing() -> None:
    source = Recording("weight", torch.ones(3))
    weight = OffloadedTensor(source, CPU)
    assert (weight.detach().shape, weight.data.dtype, weight.numel()) == ((3,), torch.float32, 3)
    assert source.reads == 0


def test_gradients_of_inputs_go_through_it() -> None:
    values, x = torch.randn(4, 6), torch.randn(2, 6, requires_grad=True)
    F.linear(x, stand_in(values, requires_grad=False)).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, values.sum(0).expand(2, 6))


def test_changes_in_place_reach_the_memory() -> None:
    values = torch.zeros(2, 2)
    weight = stand_in(values)
    with torch.no_grad():
        assert weight.add_(1) is weight
        weight.copy_(weight * 3)
        weight.data.mul_(2)
    assert torch.equal(values, torch.full((2, 2), 6.0))


def test_values_that_are_assigned_reach_the_memory() -> None:
    values = torch.arange(4.0).reshape(2, 2)
    weight = stand_in(values)
    weight.data = weight.data.T
    assert values.tolist() == [[0, 2], [1, 3]]
    weight.data = torch.ones(2, 2, device="meta")
    weight.data = weight.data + 1
    assert values.tolist() == [[1, 3], [2, 4]]
    for other in (torch.zeros(2), torch.zeros(2, 2, dtype=torch.int8)):
        with pytest.raises(OffloadError, match="and cannot become"):
            weight.data = other


@pytest.mark.parametrize("is_file", [False, True])
def test_a_weight_is_cast_by_an_assignment(is_file: bool) -> None:
    """The tutorials of peft: ``param.data = param.data.to(torch.float32)``. The values stay as they are."""
    values = torch.tensor([1.0, 1 / 3])
    source = Frozen(values) if is_file else HostMemoryWeightSource("weight", values)
    weight: Any = nn.Parameter(OffloadedTensor(source, CPU))
    for dtype in (torch.float64, torch.float16, torch.float32):
        weight.data = weight.data.to(dtype)
        assert (weight.dtype, weight.data.dtype, weight.device.type) == (dtype, dtype, "meta")
    assert torch.equal(weight.cpu(), values.half().float())
    weight.data = torch.empty(2, dtype=torch.float16, device="meta")
    assert torch.equal(weight.cpu(), values.half())
    assert values.dtype == torch.float32
    if is_file:
        with pytest.raises(OffloadError, match="cannot be changed in place"):
            weight.data = torch.ones(2)
    else:
        weight.data = torch.ones(2, dtype=torch.float64)
        assert torch.equal(values, torch.ones(2))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_changes_of_a_view_reach_the_memory(mode: Any) -> None:
    values = torch.zeros(3, 2)
    weight = stand_in(values)
    with mode():
        weight[0] = 1
        weight.data[1:, 0].fill_(2)
        weight.T[1, 2] = 3
        weight[torch.tensor([1]), 1] = 4
        weight.view(-1)[0] = 5
    assert values.tolist() == [[5, 1], [2, 4], [2, 3]]


def test_changes_of_a_view_reach_values_that_are_cast() -> None:
    """Also of a view of a view, and of one of several."""
    values = torch.zeros(3, 2)
    weights = {"w": values}
    weight: Any = OffloadedTensor(MappingSource("w", weights, "w", torch.zeros(3, 2, dtype=torch.half)), CPU)
    weight[0] = 1
    weight.data[1:].T[0].fill_(2)
    weight.unbind()[2][1] = 3
    assert values.tolist() == [[1, 1], [2, 0], [2, 3]]


def test_a_view_knows_its_strides() -> None:
    turned = stand_in(torch.randn(3, 2)).T
    assert turned.stride() == (1, 2)
    assert not turned.is_contiguous()
    assert turned.contiguous().stride() == (3, 1)


def test_a_change_in_place_of_a_file_is_refused() -> None:
    values = torch.zeros(2)
    weight = OffloadedTensor(Frozen(values), CPU)
    with pytest.raises(OffloadError, match="cannot be changed in place"):
        weight.add_(1)
    with pytest.raises(OffloadError, match="cannot be changed in place"):
        weight[0] = 1
    assert torch.equal(values, torch.zeros(2))


def test_it_can_be_read_into_another_tensor() -> None:
    target = torch.zeros(3)
    target.copy_(stand_in(torch.arange(3.0)).detach())
    assert torch.equal(target, torch.arange(3.0))


def test_a_copy_is_of_its_own() -> None:
    """E6."""
    weight = stand_in(torch.zeros(2))
    twin = copy.deepcopy(weight)
    with torch.no_grad():
        twin.add_(1)
    assert isinstance(twin, nn.Parameter)
    assert (weight.tolist(), twin.tolist()) == ([0, 0], [1, 1])


def test_copies_keep_ties() -> None:
    """E6."""
    weights = {"a": torch.zeros(2)}
    pair = [OffloadedTensor(MappingSource(n, weights, "a", weights["a"]), CPU) for n in "ab"]
    twins, kept = copy.deepcopy((pair, weights))
    twins[0].add_(1)
    assert twins[1].tolist() == [1, 1]
    assert kept["a"].tolist() == [1, 1]
    assert weights["a"].tolist() == [0, 0]


def test_pickles_and_files_hold_the_values(tmp_path: Path) -> None:
    """E6."""
    values = torch.randn(3, 2)
    weight = stand_in(values)
    assert torch.equal(pickle.loads(pickle.dumps(weight)), values)
    file = io.BytesIO()
    torch.save({"w": weight, "d": weight.detach()}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert isinstance(found["w"], nn.Parameter)
    assert torch.equal(found["w"], values)
    assert torch.equal(found["d"], values)
    save_file({"w": weight.detach()}, tmp_path / "w.safetensors")
    assert torch.equal(load_file(tmp_path / "w.safetensors")["w"], values)


def test_loading_a_state_dict_changes_the_memory_without_a_false_warning() -> None:
    layer = nn.Linear(2, 2, bias=False)
    values = torch.zeros(2, 2)
    layer.weight = stand_in(values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch says that copying to a meta parameter is a no-op
        layer.load_state_dict({"weight": torch.ones(2, 2)})
    assert torch.equal(values, torch.ones(2, 2))
    assert isinstance(layer.weight, OffloadedTensor)


def test_loading_a_state_dict_over_a_file_is_refused() -> None:
    layer = nn.Linear(2, 2, bias=False)
    frozen = Frozen(torch.zeros(2, 2))
    layer.weight = nn.Parameter(OffloadedTensor(frozen, CPU))
    with pytest.raises(RuntimeError, match="cannot be changed in place"):
        layer.load_state_dict({"weight": torch.ones(2, 2)})
    assert torch.equal(frozen.values, torch.zeros(2, 2))


def test_moving_a_module_brings_its_weights() -> None:
    """E6: ``.to()``."""
    layer = nn.Linear(2, 2, bias=False)
    values = torch.randn(2, 2)
    layer.weight = stand_in(values)
    layer.to("cpu", torch.float64)
    assert layer.weight.device == CPU
    assert torch.equal(layer.weight, values.double())


def test_a_mapping_is_read_when_it_is_needed_and_says_what_is_wrong() -> None:
    weights: dict[str, Any] = {"w": torch.ones(2, dtype=torch.float16)}
    source = MappingSource("block.w", weights, "w", torch.empty(2))
    assert source.host_tensor().dtype == torch.float32
    weights["w"] = torch.ones(3)
    with pytest.raises(OffloadError, match=r"block\.w have the shape \[3\], and the module expects \[2\]"):
        source.host_tensor()
    del weights["w"]
    with pytest.raises(OffloadError, match=r"block\.w"):
        source.read(CPU)
