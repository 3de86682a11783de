"""Models in 8 and 4 bits: the options, the choice of layers, and loading, with bitsandbytes itself."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, dispatch_model, init_empty_weights
from accelerate.core.errors import AccelerateError, CheckpointError, PrepareError, SettingError
from accelerate.utils import BnbQuantizationConfig, CustomDtype, bnb, load_and_quantize_model
from accelerate.utils.modeling import load_checkpoint_in_model
from accelerate.utils.offload import load_offloaded_weight
from tests.clients.big import library, llama, needs

pytestmark = needs("bitsandbytes")

FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "int8, all columns": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "fp32"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": "fp32"},
    "nf4, double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.float32,
    },
}
# The relative error of the output; measured: 0.007, 0.007, 0.09, 0.13, 0.09.
ERRORS = {"int8": 0.02, "int8, all columns": 0.02, "nf4": 0.15, "fp4": 0.2, "nf4, double": 0.15}


class Net(nn.Module):
    """An embedding, two linear layers, a norm, and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 64)
        self.block = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        self.norm = nn.LayerNorm(64)
        self.register_buffer("shift", torch.full((64,), 0.5))
        self.head = nn.Linear(64, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(self.embed(x))) + self.shift)


class TiedNet(Net):
    """The same with an output layer that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def net(kind: type[Net] = Net) -> Any:
    torch.manual_seed(0)
    return kind().eval()


def empty(kind: type[Net] = Net) -> Any:
    with init_empty_weights():
        return kind().eval()


def config(name: str = "int8", **others: Any) -> BnbQuantizationConfig:
    return BnbQuantizationConfig(**{"torch_dtype": torch.float32, **FORMATS[name], **others})


def kinds(model: nn.Module) -> dict[str, str]:
    return {name: type(m).__name__ for name, m in model.named_modules() if not list(m.children())}


def inputs() -> torch.Tensor:
    return torch.arange(12).view(3, 4)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """The weights of ``net()`` in a file."""
    library("safetensors.torch").save_file(net().state_dict(), tmp_path / "model.safetensors")
    return tmp_path


# ------------------------------------------------------------------------------------------------ options


def test_options_that_follow_from_others() -> None:
    eight, four = BnbQuantizationConfig(load_in_8bit=True), BnbQuantizationConfig(load_in_4bit=True)
    assert (eight.target_dtype, four.target_dtype) == (torch.int8, CustomDtype.INT4)
    assert eight.torch_dtype is four.torch_dtype is four.bnb_4bit_compute_dtype is torch.float16
    named = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16")
    assert named.bnb_4bit_compute_dtype is named.torch_dtype is torch.bfloat16
    given = BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32", skip_modules=["a"])
    assert (given.torch_dtype, given.skip_modules) == (torch.float32, ["a"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "neither of load_in_8bit and load_in_4bit is chosen"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "both of load_in_8bit and load_in_4bit"),
        ({"load_in_8bit": "yes"}, "load_in_8bit is 'yes', and is to be True or False"),
        ({"load_in_4bit": 1}, "load_in_4bit is 1"),
        ({"load_in_8bit": True, "llm_int8_threshold": "6"}, "llm_int8_threshold is '6'"),
        ({"load_in_8bit": True, "llm_int8_threshold": -1}, "llm_int8_threshold is -1"),
        ({"load_in_8bit": True, "llm_int8_threshold": float("nan")}, "llm_int8_threshold is nan"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf5"}, "unknown bnb_4bit_quant_type 'nf5'"),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": "a"}, "bnb_4bit_use_double_quant is 'a'"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "x"}, "bnb_4bit_compute_dtype is 'x'"),
        ({"load_in_4bit": True, "torch_dtype": torch.int8}, "torch_dtype is torch.int8"),
        ({"load_in_8bit": True, "skip_modules": "head"}, "skip_modules is 'head', and is to be a list"),
        ({"load_in_8bit": True, "keep_in_fp32_modules": [1]}, r"keep_in_fp32_modules is \[1\]"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=text) as caught:
        BnbQuantizationConfig(**options)
    assert isinstance(caught.value, ValueError)


# ------------------------------------------------------------------------------------------------ layers


def test_the_output_layer_and_tied_ones_keep_their_precision() -> None:
    assert bnb.get_keys_to_not_convert(net()) == ["head"]
    assert set(bnb.get_keys_to_not_convert(net(TiedNet))) == {"embed", "head"}
    assert bnb.get_keys_to_not_convert(nn.Linear(2, 2)) == []
    causal: Any = llama()
    assert bnb.get_keys_to_not_convert(causal) == ["lm_head"]
    assert bnb.get_keys_to_not_convert(causal.model) == []


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_linear_layers_are_replaced(name: str) -> None:
    model = net()
    before = model.block[0].weight.clone()
    bias = model.block[0].bias
    assert bnb.replace_with_bnb_layers(model, config(name), ["head"]) is model
    kind = "Linear8bitLt" if name == "int8" else "Linear4bit"
    found = kinds(model)
    assert found["block.0"] == found["block.2"] == kind
    assert (found["head"], found["embed"], found["norm"]) == ("Linear", "Embedding", "LayerNorm")
    assert bnb.has_4bit_bnb_layers(model) is (name == "nf4")
    first = model.block[0]
    assert torch.equal(first.weight, before)
    assert first.bias is bias
    assert not any(p.requires_grad for p in first.parameters())
    assert not first.training


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["block"], {"block.0", "block.2"}),
        (["0"], {"block.0"}),
        (["block.0"], {"block.0"}),
        (["lock", "hea", ".0"], set()),
        ([], set()),
    ],
)
def test_modules_are_kept_by_their_names_at_any_depth(names: list[str], kept: set[str]) -> None:
    found = kinds(bnb.replace_with_bnb_layers(net(), config(), names))
    assert {name for name, kind in found.items() if kind == "Linear"} == kept


def test_a_shared_layer_stays_shared_and_a_tied_one_stays_tied() -> None:
    model: Any = net(TiedNet)
    model.block.append(model.block[0])
    bnb.replace_with_bnb_layers(model, config())
    assert model.block[3] is model.block[0]
    assert type(model.block[0]) is not nn.Linear
    assert model.head.weight is model.embed.weight


def test_a_model_without_linear_layers(caplog: pytest.LogCaptureFixture) -> None:
    plain = nn.Sequential(nn.ReLU())
    with caplog.at_level(logging.WARNING):
        bnb.replace_with_bnb_layers(plain, config())
    assert "Sequential has no linear layer to quantize" in caplog.text
    with pytest.raises(PrepareError, match="Sequential has no layer to quantize"):
        load_and_quantize_model(plain, config())


# ------------------------------------------------------------------------------------------------ loading


@pytest.mark.parametrize("name", FORMATS)
def test_weights_of_a_file_are_quantized(name: str, weights: Path) -> None:
    expected = net()(inputs())
    model = empty()
    assert load_and_quantize_model(model, config(name), weights, device_map={"": "cpu"}) is model
    quantized: Any = model.block[0]
    assert quantized.weight.dtype == (torch.int8 if "int8" in name else torch.uint8)
    assert type(model.head) is nn.Linear
    assert 0 < relative_error(model(inputs()), expected) < ERRORS[name]
    assert getattr(model, f"is_loaded_in_{8 if 'int8' in name else 4}bit") is True
    assert not any(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("name", FORMATS)
def test_weights_in_memory_are_quantized_to_the_same_values(name: str, weights: Path) -> None:
    loaded = load_and_quantize_model(empty(), config(name), weights)
    model = load_and_quantize_model(net(), config(name))
    assert torch.equal(model(inputs()), loaded(inputs()))


def test_a_layer_that_no_file_holds_is_quantized_with_its_own_weight(tmp_path: Path) -> None:
    state = {name: value for name, value in net().state_dict().items() if "block.2" not in name}
    torch.save(state, tmp_path / "pytorch_model.bin")
    model = load_and_quantize_model(net(), config("nf4"), tmp_path)
    assert torch.equal(model(inputs()), load_and_quantize_model(net(), config("nf4"))(inputs()))
    with pytest.raises(CheckpointError, match=r"missing: block\.2\.weight, block\.2\.bias"):
        load_and_quantize_model(empty(), config("nf4"), tmp_path)


def test_what_is_not_quantized_has_its_dtype(weights: Path) -> None:
    asked = config(torch_dtype="bf16", keep_in_fp32_modules=["norm", "shift"])
    for model in (load_and_quantize_model(empty(), asked, weights), load_and_quantize_model(net(), asked)):
        dtypes = {name: value.dtype for name, value in (*model.named_parameters(), *model.named_buffers())}
        assert dtypes["norm.weight"] == dtypes["norm.bias"] == torch.float32
        assert dtypes["embed.weight"] == dtypes["head.weight"] == dtypes["block.0.bias"] == torch.bfloat16
        assert dtypes["block.0.weight"] == torch.int8


def test_skipped_modules_are_not_quantized(weights: Path) -> None:
    model: Any = load_and_quantize_model(empty(), config("nf4", skip_modules=["block.2"]), weights)
    assert kinds(model) | {"norm": "", "embed": ""} == {
        "embed": "", "block.0": "Linear4bit", "block.1": "ReLU", "block.2": "Linear", "norm": "",
        "head": "Linear4bit",
    }  # fmt: skip
    assert model.block[2].weight.dtype == torch.float32


def test_a_name_that_the_model_does_not_have_is_said(weights: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_and_quantize_model(empty(), config(skip_modules=["lm_head"]), weights)
    assert "Net has no module lm_head, which is to keep its precision" in caplog.text


@pytest.mark.parametrize(
    ("make", "where", "error", "text"),
    [
        (empty, None, SettingError, "weights_location is not given, and embed.weight has no values"),
        (
            lambda: load_and_quantize_model(net(), config()),
            None,
            PrepareError,
            "the model is quantized already",
        ),
        (net, "nowhere", CheckpointError, "nowhere"),
    ],
)
def test_wrong_use_is_refused(make: Any, where: Any, error: type[AccelerateError], text: str) -> None:
    with pytest.raises(error, match=text):
        load_and_quantize_model(make(), config(), where)


def test_the_output_layer_alone_is_not_quantized_unless_asked() -> None:
    only = nn.Sequential(nn.Linear(4, 64))
    with pytest.raises(PrepareError, match=r"has no layer to quantize\n  why: only nn.Linear is .*: 0"):
        load_and_quantize_model(only, config())
    assert type(load_and_quantize_model(only, config(skip_modules=[]))[0]) is not nn.Linear  # pyright: ignore[reportIndexIssue]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.core.packages.is_installed", lambda name: name != "bitsandbytes")
    with pytest.raises(ImportError, match="pip install bitsandbytes"):
        load_and_quantize_model(net(), config())
    assert bnb.has_4bit_bnb_layers(net()) is False


# ------------------------------------------------------------------------------------------------ saving


@pytest.mark.parametrize("after_a_forward", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_model_is_saved_and_loaded(name: str, after_a_forward: bool, tmp_path: Path) -> None:
    """Values and scales come back as they were, also those that the library moves in the first forward."""
    model = load_and_quantize_model(net(), config(name))
    if after_a_forward:
        model(inputs())
    Accelerator(cpu=True).save_model(model, tmp_path / "folder")
    torch.save(model.state_dict(), tmp_path / "file.bin")
    expected = model(inputs())
    for source in (tmp_path / "folder", tmp_path / "file.bin"):
        other = net()
        for weight in other.parameters():
            weight.data.neg_()
        for target in (empty(), net(), load_and_quantize_model(other, config(name))):
            loaded = load_and_quantize_model(target, config(name), source)
            assert kinds(loaded) == kinds(model)
            torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
            assert torch.equal(loaded(inputs()), expected)


@pytest.mark.parametrize(
    ("saved", "asked", "text"),
    [
        ("nf4", "fp4", r"were quantized to nf4, and fp4 is requested\n  fix: bnb_4bit_quant_type='nf4'"),
        ("int8", "nf4", "were quantized to no 4-bit format, and nf4 is requested"),
        ("nf4", "int8", "the file holds no 8-bit weights, but torch.uint8"),
    ],
)
def test_weights_in_another_format_are_refused(saved: str, asked: str, text: str, tmp_path: Path) -> None:
    model = load_and_quantize_model(net(), config(saved))
    Accelerator(cpu=True).save_model(model, tmp_path)
    with pytest.raises(CheckpointError, match=text):
        load_and_quantize_model(empty(), config(asked), tmp_path)


def test_a_layout_of_an_old_library_is_refused(tmp_path: Path) -> None:
    model = load_and_quantize_model(net(), config())
    state = {**model.state_dict(), "block.0.weight_format": torch.tensor(2, dtype=torch.uint8)}
    torch.save(state, tmp_path / "old.bin")
    with pytest.raises(CheckpointError, match="8-bit weights are not saved row by row"):
        load_and_quantize_model(empty(), config(), tmp_path / "old.bin")


# ------------------------------------------------------------------------------------------------ device maps


@pytest.mark.parametrize("name", FORMATS)
def test_layers_on_disk_compute_on_the_cpu(name: str, weights: Path, tmp_path: Path) -> None:
    """Quantized weights are written once, and mapped; those of a quantized checkpoint are mapped from it."""
    expected = load_and_quantize_model(empty(), config(name), weights)
    places: Any = {"": "cpu", "block.0": "disk", "norm": "disk"}
    folder = tmp_path / "offloaded"
    model: Any = load_and_quantize_model(
        empty(), config(name), weights, device_map=places, offload_folder=folder
    )
    assert {each.name for each in folder.iterdir()} == {"block.0.weight.dat", "index.json"}
    held = model.block[0].weight
    assert getattr(held, "CB", None) is None or held.CB.data_ptr() == held.data_ptr()
    for _ in range(2):
        assert torch.equal(model(inputs()), expected(inputs()))
    Accelerator(cpu=True).save_model(model, tmp_path / "saved")
    again = load_and_quantize_model(
        empty(), config(name), tmp_path / "saved", device_map=places, offload_folder=tmp_path / "unused"
    )
    assert not (tmp_path / "unused").exists()
    assert torch.equal(again(inputs()), expected(inputs()))


def test_quantized_layers_on_disk_need_a_folder(weights: Path) -> None:
    with pytest.raises(PrepareError, match=r"block.0 is to be on disk, and there is no folder"):
        load_and_quantize_model(empty(), config(), weights, device_map={"": "cpu", "block.0": "disk"})


def test_weights_in_memory_go_to_disk_too(tmp_path: Path) -> None:
    expected = load_and_quantize_model(net(), config("nf4"))(inputs())
    places: Any = {"": "cpu", "block": "disk"}
    model = load_and_quantize_model(net(), config("nf4"), device_map=places, offload_folder=tmp_path)
    assert torch.equal(model(inputs()), expected)
    assert (tmp_path / "block.2.weight.dat").stat().st_size == 128 * 64 // 2


def test_a_map_that_is_made_counts_quantized_sizes() -> None:
    """8192 weights a layer: in fp32 32 KB each, in 8 bits 8 KB, in 4 bits 4 KB."""
    whole = nn.Sequential(*[nn.Linear(64, 128, bias=False) for _ in range(4)])
    budgets: Any = {"cpu": 17_000, "disk": 10**6}

    def on_cpu(**others: Any) -> int:
        places = bnb.get_quantized_model_device_map(
            whole, config(skip_modules=[], **others), "sequential", budgets
        )
        return sum(place == "cpu" for place in places.values())

    assert on_cpu() == 2
    assert bnb.get_quantized_model_device_map(
        whole, config("nf4", skip_modules=[]), "sequential", budgets
    ) == {"": "cpu"}
    assert on_cpu(keep_in_fp32_modules=["0", "1", "2", "3"]) == 0
    assert bnb.get_quantized_model_device_map(whole, config()) == {"": "cpu"}
    assert bnb.get_quantized_model_device_map(whole, config(), {"": 3}) == {"": 3}


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_a_checkpoint_is_loaded_into_8_bit_layers(place: str, weights: Path, tmp_path: Path) -> None:
    """The steps of ``load_and_quantize_model`` by hand: replace the layers, load, dispatch."""
    expected = load_and_quantize_model(empty(), config(), weights)(inputs())
    model = bnb.replace_with_bnb_layers(empty(), config(), ["head"])
    places: Any = {"": "cpu", "block": place}
    folder = tmp_path / "offloaded"
    load_checkpoint_in_model(model, weights, device_map=places, offload_folder=folder, offload_8bit_bnb=True)
    first: Any = model.get_submodule("block.0")
    assert first.weight.dtype == torch.int8
    assert torch.equal(dispatch_model(model, places, offload_dir=folder)(inputs()), expected)
    if place == "disk":
        assert (folder / "block.0.weight.dat").stat().st_size == 64 * 128


def test_layers_that_a_file_lacks_are_quantized_once_in_8_bits(tmp_path: Path) -> None:
    """Shards are loaded one after the other; a shared layer has several names."""
    torch.manual_seed(0)
    shared, x = nn.Linear(64, 64), torch.randn(2, 64)
    model: Any = nn.Sequential(shared, nn.Linear(64, 64), shared)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    bnb.replace_with_bnb_layers(model, config(), [])
    results: list[torch.Tensor] = []
    for prefix in ("1.", "0.bias"):
        torch.save({n: v for n, v in state.items() if n.startswith(prefix)}, tmp_path / "w.bin")
        load_checkpoint_in_model(model, tmp_path / "w.bin", {"": "cpu"}, offload_8bit_bnb=True)
        assert {layer.weight.dtype for layer in model} == {torch.int8}
        results.append(model(x))
    assert torch.equal(*results)


def test_a_weight_is_quantized_and_offloaded(tmp_path: Path) -> None:
    """Two files, for values and scales; the same for those that are quantized already."""
    weight = net().block[0].weight.detach()
    for name, statistics in (("fresh", None), ("given", torch.ones(128))):
        model = bnb.replace_with_bnb_layers(net(), config(), ["head"])
        index: dict[str, Any] = {}
        value = weight if statistics is None else torch.ones(128, 64, dtype=torch.int8)
        folder = tmp_path / name
        bnb.quantize_and_offload_8bit(
            model, value, "block.0.weight", torch.float16, folder, index, statistics
        )
        assert index == {
            "block.0.weight": {"dtype": "int8", "shape": [128, 64]},
            "block.0.SCB": {"dtype": "float32", "shape": [128]},
        }
        assert {each.name for each in folder.iterdir()} == {"block.0.weight.dat", "block.0.SCB.dat"}
        left: Any = model.get_submodule("block.0").weight
        assert (left.device.type, left.dtype, left.shape) == ("meta", torch.float16, (128, 64))
    values = load_offloaded_weight(
        tmp_path / "fresh" / "block.0.weight.dat", {"dtype": "int8", "shape": [128, 64]}
    )
    scales = load_offloaded_weight(
        tmp_path / "fresh" / "block.0.SCB.dat", {"dtype": "float32", "shape": [128]}
    )
    assert relative_error(values * scales[:, None] / 127, weight) < 0.01


def test_a_weight_of_no_8_bit_layer_is_offloaded_as_it_is(tmp_path: Path) -> None:
    model, index = net(), {}
    bnb.quantize_and_offload_8bit(
        model, model.head.weight, "head.weight", torch.float16, tmp_path, index, None
    )
    assert index == {"head.weight": {"dtype": "float32", "shape": [16, 64]}}
    assert bnb.get_parameter_device(model.head) == torch.device("meta")
    assert bnb.get_parameter_device(model) == torch.device("cpu")


# ------------------------------------------------------------------------------------------------ training


def lora(model: Any) -> Any:
    """Adapters of rank 4 on the two layers of the block; everything else is frozen."""
    torch.manual_seed(1)
    peft = library("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["block.0", "block.2"]))


@pytest.mark.parametrize("name", ["nf4", "nf4, double", "int8"])
def test_adapters_are_trained_on_a_quantized_base(name: str) -> None:
    accelerator = Accelerator(cpu=True)
    base: Any = load_and_quantize_model(net(), config(name))
    before = {key: value.clone() for key, value in base.state_dict().items()}
    model: Any = lora(base).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses: list[float] = []
    for _ in range(10):
        loss = nn.functional.cross_entropy(model(inputs()).flatten(0, 1), inputs().flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0], losses
    frozen = accelerator.unwrap_model(model).unload().state_dict()
    torch.testing.assert_close(frozen, before, rtol=0, atol=0)


def quantized_by_library(model: Net, name: str) -> Net:
    """The model with layers that bitsandbytes has made and quantized, as transformers makes them."""
    layers = library("bitsandbytes").nn
    for place in (0, 2):
        linear: Any = model.block[place]
        sizes = linear.in_features, linear.out_features
        if name == "int8":
            new = layers.Linear8bitLt(*sizes, has_fp16_weights=False)
        else:
            new = layers.Linear4bit(
                *sizes, torch.float32, quant_type="nf4", compress_statistics="double" in name
            )
        new.load_state_dict(linear.state_dict())
        model.block[place] = new.requires_grad_(False).to("cpu")
    return model


def adapted(base: Any) -> tuple[Accelerator, Any, Any]:
    """An Accelerator, and a quantized base with adapters and their optimizer, prepared."""
    accelerator, model = Accelerator(cpu=True), lora(base).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    return accelerator, *accelerator.prepare(model, optimizer)


@pytest.mark.parametrize("by", ["load_and_quantize_model", "bitsandbytes"])
@pytest.mark.parametrize("name", ["int8", "nf4", "nf4, double"])
def test_a_training_is_saved_and_goes_on(name: str, by: str, tmp_path: Path) -> None:
    """Weights and scales come back: in the run that saved, and in one whose base had other weights."""

    def losses(accelerator: Accelerator, model: Any, optimizer: Any) -> list[float]:
        values = []
        for _ in range(2):
            loss = nn.functional.cross_entropy(model(inputs()).flatten(0, 1), inputs().flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        return values

    def quantized(model: Net) -> Any:
        if by == "bitsandbytes":
            return quantized_by_library(model, name)
        return load_and_quantize_model(model, config(name))

    first = adapted(quantized(net()))
    losses(*first)
    first[0].save_state(tmp_path / "state")
    expected = losses(*first)
    first[0].load_state(tmp_path / "state")
    assert losses(*first) == expected
    other = adapted(quantized(Net()))
    assert losses(*other) != expected
    other[0].load_state(tmp_path / "state")
    assert losses(*other) == expected


def test_a_training_in_another_format_is_refused(tmp_path: Path) -> None:
    accelerator, *_ = adapted(load_and_quantize_model(net(), config("nf4")))
    accelerator.save_state(tmp_path / "state")
    accelerator, *_ = adapted(load_and_quantize_model(net(), config("fp4")))
    with pytest.raises(CheckpointError, match=r"was quantized to nf4 of \(128, 64\), the model has fp4"):
        accelerator.load_state(tmp_path / "state")


@pytest.mark.parametrize("name", ["int8", "nf4", "nf4, double"])
def test_a_quantized_base_trains_compiled(name: str) -> None:
    """B9: with its adapters, in one graph without breaks, to the losses of the model that is not compiled."""
    check_compiled_adapters(config(name))


def check_compiled_adapters(bits: Any) -> None:
    from torch._dynamo.utils import counters

    from accelerate.utils import TorchDynamoPlugin

    losses: dict[str, list[float]] = {"no": [], "aot_eager": []}
    for backend, values in losses.items():
        torch._dynamo.reset()
        counters.clear()
        accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend=backend))
        base = load_and_quantize_model(net(), bits).train()
        torch.manual_seed(1)
        model: Any = lora(base)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(inputs()).flatten(0, 1), inputs().flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
    assert losses["aot_eager"] == pytest.approx(losses["no"], abs=1e-5)
    assert losses["no"][-1] < losses["no"][0]
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]


# ------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_training_without_adapters_is_refused(name: str) -> None:
    """What is not quantized may be trained if some of it is chosen; evaluation takes the model as it is."""

    def quantized() -> Any:
        return load_and_quantize_model(Net(), BnbQuantizationConfig(**FORMATS[name]))

    def prepare(model: nn.Module, params: Any) -> Any:
        return Accelerator(cpu=True).prepare(model, torch.optim.SGD(list(params), lr=0.1))

    model = quantized()
    with pytest.raises(PrepareError, match="all but its quantized linear layers") as error:
        prepare(model, model.parameters())
    assert "get_peft_model" in error.value.fix
    with pytest.raises(PrepareError, match="has no adapters"):
        prepare(nn.Sequential(model), (p for p in model.parameters() if p.requires_grad))
    frozen = quantized().requires_grad_(False)
    with pytest.raises(PrepareError, match="would train nothing"):
        prepare(frozen, frozen.parameters())
    prepare(model, model.head.parameters())
    head = quantized().requires_grad_(False)
    head.head.requires_grad_(True)
    prepare(head, head.parameters())
    adapted = nn.ModuleList([quantized(), nn.Linear(64, 16)])
    prepare(adapted, adapted.parameters())
    assert Accelerator(cpu=True).prepare(quantized())(torch.zeros(1, 2, dtype=torch.long)).shape == (1, 2, 16)


def test_one_weight_at_a_time_has_full_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is left is what the format says: half a byte and a sixteenth for each weight."""
    whole = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])
    halves = {name: value.half() for name, value in whole.state_dict().items()}
    library("safetensors.torch").save_file(halves, tmp_path / "model.safetensors")
    quantizer: Any = type(config("nf4").make_quantizer())
    quantize = quantizer.quantize
    seen: list[weakref.ref[torch.Tensor]] = []

    def watch(self: Any, layer: nn.Module, weight: torch.Tensor, device: torch.device) -> Any:
        assert not [each for each in seen if each() is not None]
        seen.append(weakref.ref(weight))
        assert weight.dtype == torch.float32
        return quantize(self, layer, weight, device)

    monkeypatch.setattr(quantizer, "quantize", watch)
    with init_empty_weights():
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])
    load_and_quantize_model(model, config("nf4", skip_modules=[]), tmp_path)
    assert len(seen) == 6
    held = sum(value.nbytes for value in model.state_dict().values())
    assert held == pytest.approx(6 * 256 * 256 * 0.5625, rel=0.05)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sides", [(96, 160), (33, 66), (7, 63)])
def test_pieces_are_quantized_to_the_values_of_the_library(
    name: str, sides: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU a weight is quantized in pieces: the library's kernels take several times its memory."""
    module = "accelerate.offload.quantization.bitsandbytes"
    monkeypatch.setattr(f"{module}._CPU_PIECE", 2**10)
    functional: Any = library("bitsandbytes.functional")
    weight, options = torch.randn(sides), config(name)
    quantizer: Any = options.make_quantizer()
    layer = quantizer.make_layer(nn.Linear(sides[1], sides[0], bias=False))
    ours = quantizer.quantize(layer, weight, torch.device("cpu"))
    if options.load_in_8bit:
        values, scales, _ = functional.int8_vectorwise_quant(weight.half())
        assert torch.equal(ours.SCB, scales)
    else:
        values, state = functional.quantize_4bit(
            weight,
            compress_statistics=options.bnb_4bit_use_double_quant,
            quant_type=options.bnb_4bit_quant_type,
        )
        assert_equal = torch.testing.assert_close
        assert_equal(ours.quant_state.as_dict(packed=True), state.as_dict(packed=True), rtol=0, atol=0)
    assert torch.equal(ours.data, values)
