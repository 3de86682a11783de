"""Models in 8 and 4 bits by torchao, through the same function."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.core.errors import CheckpointError, DeviceError, PrepareError, SettingError
from accelerate.utils import load_and_quantize_model
from accelerate.utils.dataclasses import TorchAOQuantizationConfig
from tests.clients.big import library, needs
from tests.null.test_quantization import check_compiled_adapters, empty, inputs, net, relative_error

pytestmark = needs("torchao")

# The relative error of the output of two layers; measured: 0.004, 0.01, 0.08.
ERRORS = {"int8_weight_only": 0.02, "int8_dynamic": 0.03, "int4_weight_only": 0.15}


def config(scheme: str = "int8_weight_only", **others: Any) -> TorchAOQuantizationConfig:
    return TorchAOQuantizationConfig(scheme, **{"torch_dtype": torch.float32, **others})


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    library("safetensors.torch").save_file(net().state_dict(), tmp_path / "model.safetensors")
    return tmp_path


def skip_on_saturating_processor(scheme: str) -> None:
    """As in ``make test-processors ONLY=avx2``."""
    if scheme == "int8_dynamic" and config().make_quantizer().saturates():
        with pytest.raises(DeviceError, match="wrong results on this processor"):
            load_and_quantize_model(net(), config(scheme))
        pytest.skip("this processor computes wrong products of 8-bit numbers, and that was refused")


@pytest.mark.parametrize("scheme", ERRORS)
def test_weights_are_quantized(scheme: str, weights: Path) -> None:
    skip_on_saturating_processor(scheme)
    expected = net()(inputs())
    loaded = load_and_quantize_model(empty(), config(scheme), weights)
    with torch.no_grad():
        got = loaded(inputs())
        assert torch.equal(load_and_quantize_model(net(), config(scheme))(inputs()), got)
    assert 0 < relative_error(got, expected) < ERRORS[scheme]
    first: Any = loaded.get_submodule("block.0")
    assert first.weight.qdata.dtype == torch.int8
    assert type(loaded.get_submodule("head").weight) is torch.nn.Parameter


@pytest.mark.parametrize("scheme", ERRORS)
def test_a_quantized_model_is_saved_and_loaded(scheme: str, tmp_path: Path) -> None:
    skip_on_saturating_processor(scheme)
    model = load_and_quantize_model(net(), config(scheme))
    Accelerator(cpu=True).save_model(model, tmp_path / "folder")
    torch.save(model.state_dict(), tmp_path / "file.bin")
    with torch.no_grad():
        expected = model(inputs())
        for source in (tmp_path / "folder", tmp_path / "file.bin"):
            loaded = load_and_quantize_model(empty(), config(scheme), source)
            assert torch.equal(loaded(inputs()), expected)
            assert load_and_quantize_model(loaded, config(scheme), source) is loaded
            assert torch.equal(loaded(inputs()), expected)
            torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
        torch.manual_seed(5)
        other = load_and_quantize_model(type(net())().eval(), config(scheme))
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(inputs()), expected)


def test_a_model_that_torchao_has_quantized_itself_goes_into_torch_files(tmp_path: Path) -> None:
    torchao = library("torchao.quantization")
    accelerator, model = Accelerator(cpu=True), net()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    accelerator.prepare(model)
    for save in (accelerator.save_state, partial(accelerator.save_model, model)):
        with pytest.raises(CheckpointError, match=r"weight is a \w+, which .*\n.*safe_serialization=False"):
            save(tmp_path / "weights")
    accelerator.save_model(model, tmp_path / "weights", safe_serialization=False)
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["pytorch_model.bin"]


def test_a_processor_with_wrong_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch computes them without VNNI instructions: sums of two products end at 2**15."""
    linear = torch.nn.Linear.forward

    def saturate(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return linear(layer, x) / 127

    monkeypatch.setattr(torch.nn.Linear, "forward", saturate)
    with pytest.raises(DeviceError, match=r"(?s)wrong results on this processor.*int8_weight_only"):
        load_and_quantize_model(net(), config("int8_dynamic"))
    load_and_quantize_model(net(), config("int8_weight_only"))


def test_weights_in_another_format_are_refused(tmp_path: Path) -> None:
    Accelerator(cpu=True).save_model(load_and_quantize_model(net(), config()), tmp_path)
    with pytest.raises(CheckpointError, match="were not quantized by torchao to int4_weight_only"):
        load_and_quantize_model(empty(), config("int4_weight_only"), tmp_path)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scheme": "int8"}, "unknown scheme 'int8'"),
        ({"group_size": 0}, "group_size is 0"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'"),
        ({"skip_modules": "head"}, "skip_modules is 'head'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        TorchAOQuantizationConfig(**options)


def test_what_cannot_be_done_is_refused(weights: Path) -> None:
    with pytest.raises(SettingError, match=r"group_size is 48, and a layer has 64 inputs"):
        load_and_quantize_model(net(), config("int4_weight_only", group_size=48))
    places: Any = {"": "cpu", "block.0": "disk"}
    with pytest.raises(PrepareError, match=r"block.0 cannot be offloaded: .* quantized by torchao"):
        load_and_quantize_model(empty(), config(), weights, places, offload_folder=weights)
    with pytest.raises(PrepareError, match=r"the model is quantized already: block.0 is a layer of torchao"):
        load_and_quantize_model(load_and_quantize_model(net(), config()), config())


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.core.packages.is_installed", lambda name: name != "torchao")
    with pytest.raises(ImportError, match="pip install torchao"):
        load_and_quantize_model(net(), config())


def test_training_without_adapters_is_refused() -> None:
    model = load_and_quantize_model(net(), config())
    with pytest.raises(PrepareError, match="has no adapters"):
        Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.get_submodule("head").parameters(), lr=0.1))


@pytest.mark.parametrize("scheme", ["int8_weight_only", "int4_weight_only"])
def test_a_quantized_base_trains_compiled(scheme: str) -> None:
    """B9: with adapters, in one graph, to the losses of the model that is not compiled."""
    check_compiled_adapters(config(scheme))
