"""Models without weights: from configurations, factories and the headers of files; and what is refused."""

from __future__ import annotations

import json
import socket
import sys
import tracemalloc
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate.core.errors import CheckpointError, MissingExtraError, PrepareError, UnknownNameError
from accelerate.facade.estimate.skeleton import ModelSkeletonError, build_skeleton
from tests.clients.big import needs

transformers = pytest.importorskip("transformers")

BERT = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "vocab_size": 28996,
}


def write(folder: Path, config: Any, name: str = "config.json") -> str:
    """A folder that describes a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


def is_hollow(model: nn.Module) -> bool:
    tensors = [*model.parameters(), *model.buffers()]
    return bool(tensors) and all(tensor.device.type == "meta" for tensor in tensors)


# ---------------------------------------------------------------- configurations


def test_a_folder_of_transformers_is_the_architecture_that_it_names(tmp_path: Path) -> None:
    folder = write(tmp_path, BERT)
    model = build_skeleton(folder)
    assert type(model).__name__ == "BertForMaskedLM"
    assert is_hollow(model)
    words = model.get_parameter("bert.embeddings.word_embeddings.weight")
    assert model.get_parameter("cls.predictions.decoder.weight") is words  # tied, as it will be
    assert type(build_skeleton(f"{folder}/config.json", head=False)).__name__ == "BertModel"


def test_a_model_of_a_hundred_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    large = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 4, "intermediate_size": 28672}
    folder = write(tmp_path, {**large, "architectures": ["LlamaForCausalLM"], "vocab_size": 1_000_000})
    build_skeleton(folder)  # imports
    tracemalloc.start()
    model = build_skeleton(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(parameter.nbytes for parameter in model.parameters()) > 50 * 2**30
    assert is_hollow(model)
    assert peak < 20 * 2**20


def test_the_dtype_is_the_configurations_or_the_one_asked_for(tmp_path: Path) -> None:
    small = {**BERT, "num_hidden_layers": 1, "vocab_size": 8, "dtype": "bfloat16"}
    folder = write(tmp_path, small)
    assert {p.dtype for p in build_skeleton(folder).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in build_skeleton(folder, dtype="float16").parameters()} == {torch.float16}
    assert {p.dtype for p in build_skeleton(folder, dtype=torch.float32).parameters()} == {torch.float32}
    with pytest.raises(PrepareError, match="did you mean 'float16'"):
        build_skeleton(folder, dtype="flaot16")


def test_a_folder_of_diffusers_and_a_pipeline_of_it(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    unet = {
        "_class_name": "UNet2DModel",
        "sample_size": 8,
        "block_out_channels": [32, 64],
        "layers_per_block": 1,
    }
    unet |= {"down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2}
    folder = write(tmp_path / "pipe" / "unet", unet)
    model = build_skeleton(folder, dtype="float16")
    assert type(model).__name__ == "UNet2DModel"
    assert is_hollow(model)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    write(tmp_path / "pipe" / "text_encoder", {**BERT, "num_hidden_layers": 1})
    index = {"_class_name": "DiffusionPipeline", "unet": ["diffusers", "UNet2DModel"]}
    index |= {
        "text_encoder": ["transformers", "BertForMaskedLM"],
        "scheduler": ["diffusers", "DDPMScheduler"],
    }
    index |= {"safety_checker": [None, None]}
    pipeline = build_skeleton(write(tmp_path / "pipe", index, "model_index.json"))
    assert {name: type(part).__name__ for name, part in pipeline.named_children()} == {
        "unet": "UNet2DModel",
        "text_encoder": "BertForMaskedLM",
    }
    assert is_hollow(pipeline)


def timm_like(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stands in for timm, which is not among the packages of the tests; what its maker was called with."""
    calls: list[dict[str, Any]] = []

    def create_model(name: str, **options: Any) -> nn.Module:
        calls.append({"name": name, **options})
        return nn.Conv2d(3, options.get("num_classes", 1000), 1)

    timm: Any = ModuleType("timm")
    timm.create_model, timm.list_models = create_model, lambda: ["resnet18", "resnet50"]
    timm.is_model = lambda name: name in timm.list_models()
    monkeypatch.setitem(sys.modules, "timm", timm)
    return calls


def test_a_folder_and_an_architecture_of_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = timm_like(monkeypatch)
    config = {"architecture": "resnet50", "num_classes": 7, "pretrained_cfg": {"tag": "a1"}}
    folder = write(tmp_path, {**config, "model_args": {"drop_rate": 0.1}})
    assert is_hollow(build_skeleton(folder))
    assert is_hollow(build_skeleton("resnet18", library="timm"))
    assert calls == [
        {"name": "resnet50", "pretrained": False, "num_classes": 7, "drop_rate": 0.1},
        {"name": "resnet18", "pretrained": False},
    ]
    with pytest.raises(UnknownNameError, match="did you mean 'resnet18'"):
        build_skeleton("resnet19", library="timm")
    with pytest.raises(UnknownNameError, match=r"in the config\.json of"):
        build_skeleton(write(tmp_path, {"architecture": "resnet19"}))


def test_a_library_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.core.packages.is_installed", lambda name: name != "timm")
    with pytest.raises(MissingExtraError, match="pip install timm"):
        build_skeleton(write(tmp_path, {"architecture": "resnet50"}))


CODE = """
from transformers import PretrainedConfig, PreTrainedModel
from torch import nn
class OwnConfig(PretrainedConfig):
    model_type = "own-thing"
class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.layer = nn.Linear(3, config.width)
        self.post_init()
"""


def test_code_of_its_own_runs_only_when_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    config = {"model_type": "own-thing", "architectures": ["OwnModel"], "width": 5}
    config["auto_map"] = {"AutoConfig": "own_code.OwnConfig", "AutoModel": "own_code.OwnModel"}
    folder = write(tmp_path / "own", config)
    (tmp_path / "own" / "own_code.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ModelSkeletonError, match=r"own_code\.py(.|\n)*--trust_remote_code"):
        build_skeleton(folder)
    (tmp_path / "own" / "own_code.py").write_text(CODE)
    model = build_skeleton(folder, trust_remote_code=True)
    assert model.get_parameter("layer.weight").shape == (5, 3)
    assert is_hollow(model)


def test_known_configurations_may_name_an_architecture_of_their_own(tmp_path: Path) -> None:
    config = {**BERT, "architectures": ["OwnBert"], "auto_map": {"AutoModel": "own_code.OwnBert"}}
    with pytest.raises(ModelSkeletonError, match=r"OwnBert(.|\n)*--trust_remote_code"):
        build_skeleton(write(tmp_path, config))


# ---------------------------------------------------------------- module:factory

FACTORY = """
import torch
from torch import nn
def build():
    return nn.Linear(4, 5)
def sized(width):
    return nn.Linear(4, width)
def number():
    return 3
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
ready = nn.Linear(2, 2)
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that lies in the working folder."""
    name = f"factories_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    return name


def test_a_factory_of_the_working_folder_is_called_on_the_meta_device(factories: str) -> None:
    assert build_skeleton(f"{factories}:build").get_parameter("weight").shape == (5, 4)
    assert is_hollow(build_skeleton(f"{factories}:Net", dtype="bfloat16"))
    assert is_hollow(build_skeleton(f"{factories}:ready"))
    assert type(build_skeleton("torch.nn:Identity")).__name__ == "Identity"


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("biuld", ["unknown factory", "did you mean 'build'?"]),
        ("sized", ["without arguments", "width"]),
        ("number", ["is a int", "returns an nn.Module"]),
    ],
)
def test_a_factory_that_is_none_is_refused(factories: str, attribute: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are looked at below
        build_skeleton(f"{factories}:{attribute}")
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_module_that_is_not_there_is_told_and_one_that_fails_keeps_its_error(factories: str) -> None:
    with pytest.raises(ModelSkeletonError, match="no module 'no_such_module' here"):
        build_skeleton("no_such_module:build")
    Path(f"{factories}_broken.py").write_text("import no_such_package_either")
    with pytest.raises(ModuleNotFoundError, match="no_such_package_either"):
        build_skeleton(f"{factories}_broken:build")


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{no json", ["config.json is not JSON"]),
        ("[1, 2]", ["holds no JSON object", "list"]),
        ({}, ["describes no model", "'model_type'"]),
        ({"model_type": "lama"}, ["unknown model_type 'lama'", "did you mean 'llama'?"]),
        (
            {**BERT, "architectures": ["BertForMaskedML"]},
            ["'BertForMaskedML'", "did you mean 'BertForMaskedLM'?"],
        ),
        ({"model_type": "llama", "hidden_size": 7}, ["transformers builds no model", "not a multiple"]),
        ({"model_type": "llama", "hidden_size": "x"}, ["transformers builds no model", "'hidden_size'"]),
        pytest.param(
            {"_class_name": "UNet2DModle"},
            ["'UNet2DModle'", "did you mean 'UNet2DModel'?"],
            marks=needs("diffusers"),
        ),
    ],
)
def test_a_configuration_that_describes_nothing_is_refused(
    tmp_path: Path, config: Any, words: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are looked at below
        build_skeleton(write(tmp_path, config))
    assert [word for word in words if word not in str(caught.value)] == []


def test_an_unknown_library_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'transformers'"):
        build_skeleton(str(tmp_path), library="transformer")
    with pytest.raises(ModelSkeletonError, match=r"has no config\.json(.|\n)*module:factory") as caught:
        build_skeleton(str(tmp_path))
    assert isinstance(caught.value, OSError)  # what 1.x raises
    with pytest.raises(FileNotFoundError, match=r"there is no folder \./nowhere"):
        build_skeleton("./nowhere")


def test_a_name_on_the_hub_that_cannot_be_asked_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("huggingface_hub").errors
    raised: list[Exception] = []
    response: Any = SimpleNamespace(headers={}, request=None, status_code=403)

    def fetch(*args: Any, **kwargs: Any) -> str:
        raise raised[0]

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    for error, words in (
        (errors.LocalEntryNotFoundError("no network"), "the hub cannot be reached"),
        (errors.HFValidationError("a--b"), "neither a folder here nor on the hub"),
        (errors.RepositoryNotFoundError("x", response=response), "neither a folder here nor on the hub"),
        (errors.EntryNotFoundError("x"), r"has no config\.json"),
        (errors.GatedRepoError("x", response=response), "does not show 'someone/some-model' to everybody"),
    ):
        raised[:] = [error]
        with pytest.raises(ModelSkeletonError, match=words) as caught:
            build_skeleton("someone/some-model")
        hint = "hf auth login" if "everybody" in words else "a folder with config.json"
        assert "accelerate " not in caught.value.fix, "several commands and a function come here"
        assert hint in caught.value.fix
        assert isinstance(caught.value, OSError)  # what 1.x raises
        assert isinstance(caught.value, ValueError)  # and where the name is invalid


def test_a_name_on_the_hub_gives_its_configuration_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = pytest.importorskip("huggingface_hub").errors
    pytest.importorskip("diffusers")
    unet = {"_class_name": "UNet2DModel", "block_out_channels": [32], "layers_per_block": 1}
    folder = write(tmp_path, {**unet, "down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"]})
    asked: list[str] = []

    def fetch(repository: str, name: str, token: str | None = None, **options: Any) -> str:
        asked.append(f"{repository}/{name} {token}")
        if not Path(folder, name).is_file():
            raise errors.EntryNotFoundError(name)
        return f"{folder}/{name}"

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    assert is_hollow(build_skeleton("someone/some-unet", token="hf_x"))
    assert asked == ["someone/some-unet/model_index.json hf_x", "someone/some-unet/config.json hf_x"]


def test_a_network_that_comes_back_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one the hub's library would try for half a minute, so that its cache is looked at alone."""
    errors = pytest.importorskip("huggingface_hub").errors
    cache_only: list[bool] = []

    def look_up(*_: Any) -> list[Any]:
        if not cache_only:
            raise socket.gaierror
        return []

    def fetch(*_: Any, local_files_only: bool, **options: Any) -> str:
        cache_only.append(local_files_only)
        raise errors.LocalEntryNotFoundError("no such file")

    monkeypatch.setattr("accelerate.facade.estimate.skeleton.getproxies", dict)
    monkeypatch.setattr("socket.getaddrinfo", look_up)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    for _ in range(2):
        with pytest.raises(ModelSkeletonError, match="the hub cannot be reached"):
            build_skeleton("someone/some-model")
    assert cache_only == [True, False]


# ---------------------------------------------------------------- headers of files

TENSORS = {
    "a.weight": torch.zeros(3, 4),
    "a.bias": torch.zeros(3, dtype=torch.float16),
    "b.0.scale": torch.zeros((), dtype=torch.bfloat16),
    "b.0.packed": torch.zeros(5, dtype=torch.uint8),
    "c": torch.zeros(2, 2, dtype=torch.float8_e4m3fn),
}
if hasattr(torch, "float4_e2m1fn_x2"):  # two numbers in a byte; the file's shape counts each
    TENSORS["d"] = torch.zeros(2, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


def dtypes_and_shapes(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in model.state_dict().items()}


def test_a_folder_of_weights_alone_is_a_tree_of_their_names(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = build_skeleton(tmp_path)
    assert is_hollow(model)
    assert dtypes_and_shapes(model) == {name: (t.dtype, t.shape) for name, t in TENSORS.items()}
    assert [name for name, _ in model.named_buffers()] == ["b.0.packed"]


def test_an_index_stands_for_its_shards(tmp_path: Path) -> None:
    names = list(TENSORS)
    for number, part in enumerate((names[:2], names[2:])):
        save_file({name: TENSORS[name] for name in part}, tmp_path / f"part-{number}.safetensors")
    save_file({"stray": torch.zeros(1)}, tmp_path / "other.safetensors")
    held = {name: f"part-{0 if name in names[:2] else 1}.safetensors" for name in names}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": held}))
    assert sorted(dtypes_and_shapes(build_skeleton(tmp_path))) == sorted(names)
    index.write_text(json.dumps(held))  # some tools write the table alone
    assert sorted(dtypes_and_shapes(build_skeleton(tmp_path))) == sorted(names)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors is missing"):
        build_skeleton(tmp_path)
    index.write_text(json.dumps({"weight_map": {"gone": "part-0.safetensors"}}))
    with pytest.raises(CheckpointError, match="does not hold gone"):
        build_skeleton(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="no index of shards"):
        build_skeleton(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[:4],
        lambda data: data[:40],
        lambda data: data[:-1],
        lambda data: data[:8] + b"x" + data[9:],
        lambda data: data.replace(b'"F32"', b'"F99"'),
    ],
)
def test_a_damaged_file_is_told_before_anything_is_read(tmp_path: Path, change: Any) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        build_skeleton(tmp_path)


def test_a_weight_may_be_called_as_the_module_of_others(tmp_path: Path) -> None:
    """Files may hold ``a`` and ``a.b``; a tree of modules may not."""
    save_file({"a": torch.zeros(2), "a.b": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelSkeletonError, match="'a'"):
        build_skeleton(tmp_path)
