"""peft, unmodified, on a base of which a part lies on disk: the same numbers as in memory.

On the public package, what is trained here fails in the backward pass, and what is merged without having been
loaded is wrong: offloaded weights show the meta device, also on a CPU, and peft moves new adapters there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients import big
from tests.clients.big import generated, library, logits, needs, saved, split, tokens

pytestmark = [needs("transformers", "peft"), pytest.mark.timeout(120)]
KINDS = ("llama", "gpt2")
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}
LAYERS = {"llama": "model.layers", "gpt2": "transformer.h"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``folders(kind)``: a checkpoint, with an adapter of random numbers in its subfolder ``adapter``."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            # peft derives names of files of its own from the part of a path that has two dashes.
            made[kind] = saved(kind, tmp_path_factory.mktemp("saved") / f"models--{kind}")
            for seed, name in enumerate(("adapter", "other")):
                torch.manual_seed(seed)
                adapted(base(made[kind]), kind).save_pretrained(made[kind].parent / name)
        return made[kind]

    return folder


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """peft makes files below the working directory."""
    monkeypatch.chdir(tmp_path)


def base(folder: Path, **given: Any) -> Any:
    return library("transformers").AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, **given
    )


def on_disk(folder: Path, kind: str, offload: Path, *homes: str) -> Any:
    places = split(base(folder), LAYERS[kind], *(homes or ("cpu", "disk")), rest="cpu")
    return base(folder, device_map=places, offload_folder=str(offload))


def adapted(model: Any, kind: str, **given: Any) -> Any:
    """With LoRA of rank 4 whose both factors are random."""
    peft = library("peft")
    options = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "fan_in_fan_out": kind == "gpt2"} | given
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=TARGETS[kind], **options)).eval()


def loaded(model: Any, folder: Path, **given: Any) -> Any:
    return library("peft").PeftModel.from_pretrained(model, folder.parent / "adapter", **given).eval()


def trained(model: Any, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of a few steps on two rows, and the adapter at the end."""
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(tokens(), labels=tokens()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in weights.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_loaded_onto_a_base_on_disk(
    kind: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """There: GPT-2 ends in a KeyError, for weights that no index names and the new map puts on disk."""
    folder = folders(kind)
    expected = loaded(base(folder), folder)
    size = sum(p.nbytes for p in base(folder).parameters())
    model = loaded(
        on_disk(folder, kind, tmp_path / "offload"), folder,
        offload_folder=str(tmp_path / "again"), max_memory={"cpu": int(size * 0.8)},
    )  # fmt: skip
    assert "disk" in model.hf_device_map.values()
    assert torch.allclose(logits(model), logits(expected), atol=1e-6)
    assert generated(model) == generated(expected)


def test_a_second_adapter_and_a_change_between_them(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """There: where all fits in memory, what was on disk fails to come there."""
    folder = folders("llama")
    expected, model = base(folder), on_disk(folder, "llama", tmp_path / "offload")
    outputs = []
    for one in (expected, model):
        one = loaded(one, folder, offload_folder=str(tmp_path / "again"))
        one.load_adapter(folder.parent / "other", adapter_name="other")
        seen = []
        for name in ("default", "other", "default"):
            one.set_adapter(name)
            seen.append(logits(one))
        with one.disable_adapter():
            seen.append(logits(one))
        outputs.append(torch.stack(seen))
    assert not torch.equal(outputs[0][0], outputs[0][1])
    assert torch.allclose(outputs[0], outputs[1], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("homes", [("disk",), ("cpu", "disk")], ids=["disk", "mixed"])
def test_an_adapter_is_trained_through_a_frozen_base_on_disk(
    kind: str, homes: tuple[str, ...], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Gradients pass through weights that have left memory after the forward pass."""
    folder, results = folders(kind), []
    for one in (base(folder), on_disk(folder, kind, tmp_path, *homes)):
        torch.manual_seed(5)
        model = adapted(one, kind)
        model.train()
        results.append(trained(model))
    (losses, weights), (mine, own) = results
    assert losses[0] > losses[-1]
    assert mine == pytest.approx(losses, abs=1e-6)
    for name, value in weights.items():
        assert torch.allclose(own[name], value, atol=1e-6), name


def test_gradients_of_an_adapter_are_those_in_memory(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder, found = folders("llama"), []
    for one in (base(folder), on_disk(folder, "llama", tmp_path)):
        torch.manual_seed(5)
        model = adapted(one, "llama")
        model(tokens(), labels=tokens()).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all("lora" in name for name in found[0])
    for name, value in found[0].items():
        assert torch.allclose(found[1][name], value, atol=1e-7), name


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_merged_into_a_base_on_disk(
    kind: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """peft brings each layer in by its hook, changes it, and gives the hook a new map of weights."""
    folder = folders(kind)
    expected = loaded(base(folder), folder).merge_and_unload()
    size = sum(p.nbytes for p in base(folder).parameters())
    model = loaded(
        on_disk(folder, kind, tmp_path / "offload"), folder,
        offload_folder=str(tmp_path / "again"), max_memory={"cpu": int(size * 0.8)},
    )  # fmt: skip
    before = logits(model)
    model = model.merge_and_unload()
    assert torch.allclose(logits(model), logits(expected), atol=1e-6)
    assert torch.allclose(logits(model), before, atol=1e-5)
    assert generated(model) == generated(expected)


def test_the_base_on_disk_is_not_changed_by_a_merge(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folders("llama")
    before = big.entries(folder)
    model = adapted(on_disk(folder, "llama", tmp_path / "offload"), "llama")
    expected = logits(model)
    merged = model.merge_and_unload()
    assert torch.allclose(logits(merged), expected, atol=1e-5)
    big.same_tensors(big.entries(folder), before)


def test_modules_that_are_trained_whole_get_a_hook_of_their_own(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """peft copies such a module and makes the copy's hook anew, from the attributes of the old one."""
    folder, results = folders("llama"), []
    for one in (base(folder), on_disk(folder, "llama", tmp_path)):
        torch.manual_seed(5)
        model = adapted(one, "llama", modules_to_save=["lm_head"])
        model.train()
        results.append(trained(model))
    assert results[1][0] == pytest.approx(results[0][0], abs=1e-6)
    assert any("modules_to_save" in name for name in results[1][1])
    for name, value in results[0][1].items():
        assert torch.allclose(results[1][1][name], value, atol=1e-6), name


def test_the_trainer_of_transformers(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Its model has a device map with the disk in it; only the adapter is trained."""
    tf, folder, losses = library("transformers"), folders("llama"), []
    rows = [{"input_ids": row, "labels": row} for row in tokens().tolist() * 2]
    for one in (base(folder), on_disk(folder, "llama", tmp_path / "offload")):
        torch.manual_seed(5)
        arguments = tf.TrainingArguments(
            str(tmp_path / "out"), use_cpu=True, per_device_train_batch_size=2, max_steps=3, logging_steps=1,
            learning_rate=1e-2, report_to=[], disable_tqdm=True, save_strategy="no", seed=0,
        )  # fmt: skip
        trainer = tf.Trainer(adapted(one, "llama"), arguments, train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0][0] > losses[0][-1]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


def test_an_adapter_is_saved_without_its_base(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folders("llama")
    torch.manual_seed(5)
    model = adapted(on_disk(folder, "llama", tmp_path / "offload"), "llama")
    trained(model)
    model.eval().save_pretrained(tmp_path / "mine")
    again = library("peft").PeftModel.from_pretrained(base(folder), tmp_path / "mine").eval()
    assert torch.allclose(logits(again), logits(model), atol=1e-6)
