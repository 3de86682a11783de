"""diffusers, unmodified: offloaded and placed pipelines draw the image of the plain one, on a CPU alone.

The same on an accelerator is in ``tests/sim/test_sim_clients.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import cpu_offload, disk_offload
from tests.clients.big import devices, drawn, library, needs, painter, parts

pytestmark = [needs("transformers", "diffusers"), pytest.mark.timeout(120)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tokenizer and the saved pipeline lie."""
    return tmp_path_factory.mktemp("painter")


@pytest.fixture(scope="module")
def image(folder: Path) -> torch.Tensor:
    """What the plain pipeline draws."""
    return drawn(painter(folder))


@pytest.fixture(scope="module")
def stored(folder: Path) -> Path:
    """The pipeline, saved."""
    painter(folder).save_pretrained(folder / "stored")
    return folder / "stored"


@pytest.fixture
def pipeline(folder: Path) -> Any:
    return painter(folder)


def test_whole_components_are_offloaded(pipeline: Any, image: torch.Tensor) -> None:
    pipeline.enable_model_cpu_offload(device="cpu")
    hooks = {name: type(part._hf_hook).__name__ for name, part in parts(pipeline).items()}
    assert set(hooks.values()) == {"CpuOffload"}
    assert torch.equal(drawn(pipeline), image)
    assert torch.equal(drawn(pipeline), image)
    pipeline.remove_all_hooks()
    assert not any(hasattr(m, "_hf_hook") for part in parts(pipeline).values() for m in part.modules())
    assert torch.equal(drawn(pipeline), image)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_leaves_are_offloaded(device: str, pipeline: Any, image: torch.Tensor) -> None:
    """There: diffusers asks for cpu:0, which ends in a TypeError in the first forward."""
    pipeline.enable_sequential_cpu_offload(device=device)
    assert str(pipeline._execution_device) in ("cpu", "cpu:0")
    assert all(hasattr(part, "_hf_hook") for part in parts(pipeline).values())
    assert torch.equal(drawn(pipeline), image)
    assert torch.equal(drawn(pipeline), image)
    pipeline.remove_all_hooks()
    assert all(devices(part) == {"cpu"} for part in parts(pipeline).values())
    assert not any(hasattr(m, "_hf_hook") for part in parts(pipeline).values() for m in part.modules())
    assert torch.equal(drawn(pipeline), image)


def test_from_one_way_to_the_other_and_back(pipeline: Any, image: torch.Tensor) -> None:
    """E7."""
    pipeline.enable_sequential_cpu_offload(device="cpu")
    drawn(pipeline)
    pipeline.enable_model_cpu_offload(device="cpu")
    assert torch.equal(drawn(pipeline), image)
    pipeline.enable_sequential_cpu_offload(device="cpu")
    assert torch.equal(drawn(pipeline), image)


@pytest.mark.parametrize("way", ["leaf_level", "block_level", "disk"])
def test_groups_are_offloaded(way: str, pipeline: Any, image: torch.Tensor, tmp_path: Path) -> None:
    """By diffusers' own hooks, beside ours."""
    options: dict[str, Any] = {"onload_device": CPU, "offload_device": CPU, "offload_type": "block_level"}
    if way == "leaf_level":
        options["offload_type"] = "leaf_level"
    else:
        options["num_blocks_per_group"] = 1
    if way == "disk":
        options["offload_to_disk_path"] = str(tmp_path)
    pipeline.unet.enable_group_offload(**options)
    assert torch.equal(drawn(pipeline), image)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_one_component_is_offloaded_by_hand(
    where: str, pipeline: Any, image: torch.Tensor, tmp_path: Path
) -> None:
    if where == "cpu":
        cpu_offload(pipeline.unet, execution_device=CPU)
    else:
        disk_offload(pipeline.unet, str(tmp_path), execution_device=CPU)
    assert torch.equal(drawn(pipeline), image)


def test_saved_and_loaded(stored: Path, image: torch.Tensor) -> None:
    """diffusers makes the models without memory and gives each tensor its value."""
    made = library("diffusers").StableDiffusionPipeline.from_pretrained(stored, local_files_only=True)
    assert all(devices(part) == {"cpu"} for part in parts(made).values())
    assert torch.equal(drawn(made), image)


def test_loaded_over_the_devices_that_there_are(stored: Path, image: torch.Tensor) -> None:
    given = {"device_map": "balanced", "max_memory": {"cpu": "1GB"}, "local_files_only": True}
    made = library("diffusers").StableDiffusionPipeline.from_pretrained(stored, **given)
    assert torch.equal(drawn(made), image)


@pytest.mark.parametrize("kept", [1.2, 0.5], ids=["fits", "disk"])
def test_one_model_is_loaded_where_it_fits(
    kept: float, stored: Path, pipeline: Any, image: torch.Tensor, tmp_path: Path
) -> None:
    """diffusers writes what goes to disk by ``offload_weight`` where it comes from several files."""
    size = sum(p.nbytes for p in pipeline.unet.parameters())
    given: dict[str, Any] = {"max_memory": {"cpu": int(size * kept)}, "offload_folder": str(tmp_path)}
    kind = library("diffusers").UNet2DConditionModel
    unet = kind.from_pretrained(stored / "unet", device_map="auto", **given)
    assert ("disk" in unet.hf_device_map.values()) == (kept < 1)
    pipeline.unet = unet
    assert torch.equal(drawn(pipeline), image)


def test_a_map_and_a_dtype(stored: Path) -> None:
    kind = library("diffusers").UNet2DConditionModel
    unet = kind.from_pretrained(stored / "unet", device_map={"": "cpu"}, torch_dtype=torch.bfloat16)
    plain = kind.from_pretrained(stored / "unet", torch_dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(unet.parameters(), plain.parameters(), strict=True))
