"""Tensors put into modules one by one, and offloaded ones made real for a while."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import cpu_offload, load_checkpoint_in_model
from accelerate.accelerator import get_state_dict_offloaded_model as from_the_accelerators_module
from accelerate.core.errors import PrepareError
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, attach_align_device_hook
from accelerate.utils import (
    OffloadedWeightsLoader,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    set_module_tensor_to_device,
)
from accelerate.utils.modeling import (
    align_module_device,
    check_device_same,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
    retie_parameters,
)
from tests.support.offloaded import is_offloaded, offload_fails

META = torch.device("meta")


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3)))


def offloaded_net() -> Any:
    model = net()
    attach_align_device_hook(model, "cpu", offload=True)
    return model


# -------------------------------------------------------------------- set_module_tensor_to_device


def test_values_reach_parameters_and_buffers_by_their_paths() -> None:
    model = net().to("meta")
    value = torch.ones(3, 3)
    set_module_tensor_to_device(model, "2.0.weight", "cpu", value=value)
    set_module_tensor_to_device(model, "1.running_mean", "cpu:0", value=torch.ones(3))
    weight = model[2][0].weight
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert weight.data_ptr() == value.data_ptr()
    assert model[1].running_mean.device == torch.device("cpu")
    assert not isinstance(model[1].running_mean, nn.Parameter)


def test_values_stay_values_under_another_default_device(tmp_path: Path) -> None:
    """Loaded or given ones: torch would make tensors on the default device of them."""
    value, (given, loaded, spread) = torch.full((2, 2), 3.0), [nn.Linear(2, 2, bias=False) for _ in range(3)]
    save_file({"weight": value}, tmp_path / "model.safetensors")
    with META:
        set_module_tensor_to_device(given, "weight", "cpu", value=value)
        load_checkpoint_in_model(loaded, tmp_path)
        spread = cpu_offload(spread, "cpu", state_dict={"weight": value})
    for layer in given, loaded, spread:
        assert layer(torch.ones(2)).tolist() == [6.0, 6.0]


@pytest.mark.parametrize("given", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_a_tensor_that_is_there_is_left_alone(given: Any) -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight
    set_module_tensor_to_device(layer, "weight", given)
    assert layer.weight is before


def test_meta_drops_the_values() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    set_module_tensor_to_device(layer, "weight", "meta")
    assert layer.weight.device == META
    assert not layer.weight.requires_grad
    with pytest.raises(PrepareError, match="weight is on the meta device, and has no values to put on cpu"):
        set_module_tensor_to_device(layer, "weight", "cpu")


def test_an_offloaded_tensor_brings_its_own_values() -> None:
    model = offloaded_net()
    expected = model[0].weight.clone()
    set_module_tensor_to_device(model, "0.weight", "cpu")
    assert model[0].weight.device.type == "cpu"
    assert torch.equal(model[0].weight, expected)
    assert model(torch.ones(2, 2)).shape == (2, 3)
    assert model[0].weight.device.type == "cpu"


def test_dtypes() -> None:
    layer: Any = nn.Linear(2, 2, dtype=torch.float16)
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2))
    assert layer.weight.dtype == torch.float16
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2), dtype=torch.float64)
    assert layer.weight.dtype == torch.float64
    set_module_tensor_to_device(layer, "weight", "cpu", dtype="torch.bfloat16")
    assert layer.weight.dtype == torch.bfloat16
    with pytest.warns(UserWarning, match=r"weight stays torch.bfloat16: .* not truncated to torch.int8"):
        set_module_tensor_to_device(layer, "weight", "cpu", dtype=torch.int8)
    assert layer.weight.dtype == torch.bfloat16
    with pytest.warns(UserWarning, match="not truncated to torch.int8"):
        set_module_tensor_to_device(layer, "bias", "meta", dtype=torch.int8)  # it is trained
    layer.requires_grad_(False)
    set_module_tensor_to_device(layer, "bias", "meta", dtype=torch.int8)  # nothing to truncate
    assert layer.bias.dtype == torch.int8
    layer.register_buffer("steps", torch.tensor(0))
    set_module_tensor_to_device(layer, "steps", "cpu", value=torch.tensor(3), dtype=torch.float16)
    assert layer.steps.dtype == torch.int64
    with pytest.raises(PrepareError, match="dtype 'half8'"):
        set_module_tensor_to_device(layer, "weight", "cpu", dtype="half8")


def test_wrong_shapes_and_names_are_told() -> None:
    model = net()
    with pytest.raises(
        ValueError, match=r"0\.weight has the shape \[3, 2\], and the values for it have \[2, 3\]"
    ):
        set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"no parameter or buffer '0\.wieght'") as error:
        set_module_tensor_to_device(model, "0.wieght", "cpu")
    assert "did you mean '0.weight'?" in str(error.value)
    with pytest.raises(ValueError, match=r"'9\.weight'"):
        set_module_tensor_to_device(model, "9.weight", "cpu")
    with pytest.raises(ValueError, match="'2'"):
        set_module_tensor_to_device(model, "2", "cpu")


def test_attributes_of_a_parameter_stay() -> None:
    layer: Any = nn.Linear(2, 2)
    layer.weight.mark = "mine"
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2))
    assert layer.weight.mark == "mine"


class State:
    """The quantization state of a parameter; it moves in place, as that of bitsandbytes does."""

    def __init__(self) -> None:
        self.device = "cpu"

    def to(self, device: Any) -> None:
        self.device = str(device)


class Quantised(nn.Parameter):
    """A parameter of a class of its own."""

    quant_state: Any
    SCB: Any


def quantised() -> Any:
    layer: Any = nn.Linear(2, 2)
    layer.weight = Quantised(torch.ones(2, 2), requires_grad=False)
    layer.weight.quant_state = State()
    layer.weight.SCB = None
    return layer


def test_a_quantised_parameter_keeps_its_class_and_state() -> None:
    layer = quantised()
    state = layer.weight.quant_state
    scales = torch.ones(2)
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.zeros(2, 2), fp16_statistics=scales)
    assert type(layer.weight) is Quantised
    assert not layer.weight.requires_grad
    assert layer.weight.quant_state is not state
    assert torch.equal(layer.weight.SCB, scales)
    set_module_tensor_to_device(layer, "weight", "cpu", value=Quantised(torch.ones(2, 2)))
    assert type(layer.weight) is Quantised
    assert not layer.weight.requires_grad
    set_module_tensor_to_device(layer, "weight", "meta")
    assert type(layer.weight) is Quantised
    assert (layer.weight.quant_state.device, state.device) == ("meta", "cpu")


def test_an_offloaded_quantised_parameter_keeps_its_class_and_state() -> None:
    layer = quantised()
    seen: list[Any] = []
    layer.register_forward_hook(lambda module, *_: seen.append(module.weight))
    values = {"weight": torch.full((2, 2), 3.0), "bias": torch.zeros(2)}
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True, weights_map=values))
    vars(layer)["_old_forward"] = lambda x: (seen.append(layer.weight), x @ layer.weight)[1]
    assert layer(torch.ones(1, 2)).tolist() == [[6, 6]]
    assert type(seen[0]) is Quantised
    assert isinstance(seen[0].quant_state, State)
    assert layer.weight.device == META


def test_8_bit_values_come_in_with_their_scales() -> None:
    layer: Any = nn.Linear(2, 2, bias=False)
    layer.weight = Quantised(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    layer.weight.SCB = None
    scales = torch.tensor([2.0, 3.0])
    values = {"weight": torch.ones(2, 2, dtype=torch.int8), "SCB": scales}
    hook = AlignDevicesHook("cpu", offload=True, weights_map=values)
    add_hook_to_module(layer, hook)
    hook.pre_forward(layer)
    assert type(layer.weight) is Quantised
    assert torch.equal(layer.weight.SCB, scales)
    hook.post_forward(layer, ())
    assert layer.weight.device == META


def test_tied_tensors_are_copied_once() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    address = first.weight.data_ptr()
    ties: Any = {address: {}}
    for layer in (first, second):
        set_module_tensor_to_device(layer, "weight", "cpu", tied_params_map=ties)
    assert first.weight is second.weight is ties[address][torch.device("cpu")]


# -------------------------------------------------------------------- devices and ties


def test_names_of_one_device_are_one_device() -> None:
    assert check_device_same("cpu", torch.device("cpu", 0))
    assert check_device_same(META, "meta")
    assert not check_device_same("cpu", "meta")


@pytest.mark.skipif(torch.xpu.is_available(), reason="the current device decides")
def test_index_0_is_meant_where_a_type_has_no_device() -> None:
    assert check_device_same(torch.device("xpu"), torch.device("xpu:0"))
    assert not check_device_same(torch.device("xpu"), torch.device("xpu:1"))


def test_tied_parameters_become_one_again() -> None:
    model = net()
    model[2][0].weight = nn.Parameter(torch.empty(3, 3, device="meta"))
    real = model[2][0].bias
    model[1].bias = nn.Parameter(torch.empty(3, device="meta"))
    retie_parameters(model, [["1.bias", "2.0.bias"], ["2.0.weight"]])
    assert model[1].bias is model[2][0].bias is real


# -------------------------------------------------------------------- offloaded modules


def test_offloaded_parameters_are_told_from_others() -> None:
    model = offloaded_net()
    assert has_offloaded_params(model[0])
    assert not has_offloaded_params(model[2])
    assert not has_offloaded_params(net()[0])
    assert not has_offloaded_params(add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook("cpu")))


def test_offloaded_parameters_are_here_for_a_while() -> None:
    layer = offloaded_net()[0]
    expected = layer.weight.clone()
    with align_module_device(layer):
        assert layer.weight.device.type == "cpu"
        assert torch.equal(layer.weight, expected)
        with torch.no_grad():
            layer.weight.add_(1)
    assert is_offloaded(layer.weight)
    assert torch.equal(layer.weight, expected + 1)
    with pytest.raises(KeyError), align_module_device(layer):
        raise KeyError
    assert is_offloaded(layer.weight)


def test_offloaded_buffers_are_here_for_a_while() -> None:
    model = net()
    attach_align_device_hook(model, "cpu", offload=True, offload_buffers=True)
    norm = model[1]
    with align_module_device(norm, "cpu"):
        assert not is_offloaded(norm.running_mean)
        norm.running_mean.data.fill_(2)
    assert is_offloaded(norm.running_mean)
    assert norm.running_mean.sum() == 2 * 3


def test_a_change_of_a_weight_in_a_file_is_refused(tmp_path: Path) -> None:
    layer: Any = nn.Linear(2, 2)
    offload_state_dict(tmp_path, layer.state_dict())
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    add_hook_to_module(layer.to("meta"), AlignDevicesHook("cpu", offload=True, weights_map=weights))
    before = weights["weight"].clone()

    def change() -> None:
        with align_module_device(layer, "cpu"), torch.no_grad():
            layer.weight.data = layer.weight.data.clone()
            layer.weight.add_(1)

    with offload_fails(match="weight is offloaded to a file"):
        change()
    assert is_offloaded(layer.weight)
    assert torch.equal(layer.weight, before)


def test_a_clients_new_map_is_what_comes() -> None:
    layer = offloaded_net()[0]
    vars(layer)["_hf_hook"].weights_map = {"weight": torch.full((3, 2), 5.0)}
    with align_module_device(layer):
        assert torch.equal(layer.weight, torch.full((3, 2), 5.0))
    layer.bias = nn.Parameter(torch.empty(3, device="meta"))
    with offload_fails(match="bias cannot be brought in"), align_module_device(layer):
        pass
    assert is_offloaded(layer.weight)


def test_parameters_that_are_there_are_left_alone() -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight
    for device in (None, "cpu:0"):
        with align_module_device(layer, device):
            assert layer.weight is before


def test_a_whole_state_dict_of_real_values(tmp_path: Path) -> None:
    """Also those of the model itself, and of modules in files; a value that is nowhere is an error."""
    model = net()
    model.register_parameter("scale", nn.Parameter(torch.randn(2)))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    offload_state_dict(tmp_path, model[2].state_dict())
    model[2].to("meta")
    attach_align_device_hook(
        model[2], "cpu", offload=True, weights_map=OffloadedWeightsLoader(save_folder=tmp_path)
    )
    for module in (model, model[0], model[1]):
        add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, offload_buffers=True))
    found = get_state_dict_offloaded_model(model)
    assert found.keys() == expected.keys()
    assert all(type(v) is torch.Tensor and torch.equal(v, expected[name]) for name, v in found.items())
    model[2][0].bias = nn.Parameter(torch.empty(3, device="meta"))
    with offload_fails(match=r"2\.0\.bias cannot be saved"):
        get_state_dict_offloaded_model(model)
    assert from_the_accelerators_module is get_state_dict_offloaded_model


def test_the_entries_of_one_module_get_real_values() -> None:
    model = offloaded_net()
    state: dict[str, Any] = {"0.weight": "", "1.weight": ""}
    assert get_state_dict_from_offload(model[0], "0.weight", state) is state
    assert torch.equal(state["0.weight"], model[0].weight)
    assert type(state["0.weight"]) is torch.Tensor
    assert state["1.weight"] == ""


def test_a_folder_is_loaded_into_a_model(tmp_path: Path) -> None:
    """diffusers does so; the folder is gone afterwards."""
    model = net()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    index: Any = {}
    for name, value in expected.items():
        index = offload_weight(value, name, tmp_path, index)
    model.to("meta")
    load_offloaded_weights(model, index, tmp_path)
    for file in tmp_path.iterdir():
        file.unlink()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    model(torch.ones(2, 2)).sum().backward()
    load_offloaded_weights(model, None, tmp_path)
