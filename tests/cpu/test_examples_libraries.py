"""The examples that need a library: fine-tuning, LoRA, diffusion, stages, a schedule-free optimizer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.environment import ROOT
from tests.support.long_run import LONG_RUN, long_run_param
from tests.support.packages import is_installed
from tests.support.ranks import RankServer
from tests.support.scripts import script_output

# What the rank server imports once for this module, where it is installed.
PRELOAD = tuple(
    name
    for name in (
        *("transformers.models.bert.modeling_bert", "transformers.models.llama.modeling_llama"),
        *("transformers.models.gpt2.modeling_gpt2", "transformers.generation.utils"),
        *("diffusers.pipelines.ddpm", "diffusers.models.unets.unet_2d", "peft", "sklearn.datasets"),
    )
    if is_installed(name.partition(".")[0])
)
BOTH = pytest.mark.parametrize("processes", [long_run_param(1), 2])


def output(ranks: RankServer, processes: int, name: str, *options: str, needs: tuple[str, ...]) -> str:
    """What an example prints on so many processes."""
    for package in needs:
        if not is_installed(package):
            pytest.skip(f"{package} is not installed: pip install {package}")
    return script_output(ranks, processes, ROOT / "examples" / name, *options)


def is_close(text: str) -> bool:
    """Whether the losses are those of the plain loop, up to the order of sums."""
    (difference,) = re.findall(r"largest difference ([\d.e+-]+)", text)
    return float(difference) < 2e-5


@BOTH
def test_fine_tuning_has_the_losses_of_a_plain_loop(
    ranks: RankServer, processes: int, tmp_path: Path
) -> None:
    options = ["--folder", str(tmp_path)]
    text = output(ranks, processes, "fine_tuning.py", *options, needs=("transformers",))
    assert is_close(text)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", text)]
    assert losses[-1] < 0.9 * losses[0]
    (right,) = re.findall(r"(\d+) of 90 lines of the test are right", text)
    assert int(right) > 60
    assert (tmp_path / "trained" / "model.safetensors").is_file()


@BOTH
def test_adapters_on_four_bits_have_the_losses_of_a_plain_loop(
    ranks: RankServer, processes: int, tmp_path: Path
) -> None:
    needs = ("transformers", "peft", "bitsandbytes")
    text = output(ranks, processes, "quantized_lora.py", "--folder", str(tmp_path), needs=needs)
    assert is_close(text)
    trained, base = map(int, re.findall(r"(\d+) parameters train on a base of (\d+)", text)[0])
    assert trained < 0.1 * base
    first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", text)[0])
    assert last < first - 0.1


def test_pictures_are_drawn_alike_on_any_number_of_processes(ranks: RankServer, tmp_path: Path) -> None:
    options = ["--folder", str(tmp_path)]
    alone, pair = (
        output(ranks, count, "distributed_images.py", *options, needs=("diffusers",)).splitlines()
        for count in (1, 2)
    )
    assert alone[0] == "1 processes drew 5 pictures"
    assert alone[1:] == pair[1:]
    assert len({line.split()[-1] for line in alone[1:]}) == 5, "each has noise of its own"
    assert len(list(tmp_path.glob("picture_*.png"))) == 5


def test_texts_are_continued_alike_on_any_number_of_processes(ranks: RankServer) -> None:
    alone, several = (
        output(ranks, count, "distributed_inference.py", needs=("transformers",)).splitlines()
        for count in (1, 3)
    )
    assert alone[0] == "1 processes continued 11 texts"
    assert len({line.partition(": ")[2] for line in alone[1:]}) > 1
    assert several[1:] == alone[1:]


@pytest.mark.skipif(not LONG_RUN, reason="runs in `make test-all`")
def test_a_gpt2_in_stages_continues_texts_as_the_whole_model_does(ranks: RankServer) -> None:
    text = output(ranks, 2, "pipeline_gpt2.py", needs=("transformers",))
    lines = text.splitlines()
    held = [int(size) for size in re.findall(r"process \d holds (\d+) KB", text)]
    assert len(held) == 2
    assert max(held) < 0.7 * sum(held), "the layers are spread over both"
    assert len({line.partition(": ")[2] for line in lines[2:6]}) > 1, "texts that show a difference"
    assert lines[-1] == "as by the whole model: True"


@BOTH
def test_a_schedule_free_optimizer_has_the_losses_of_a_plain_loop(ranks: RankServer, processes: int) -> None:
    text = output(ranks, processes, "schedule_free.py", needs=("schedulefree", "sklearn"))
    assert is_close(text)
    (right,) = re.findall(r"(\d+) of 297 test images right", text)
    assert int(right) > 240
