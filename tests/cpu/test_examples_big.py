"""The examples of large models: spread over processes, and placed on devices, host and disk."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.environment import ROOT
from tests.support.ranks import RankServer
from tests.support.scripts import script_output

# What the rank server imports once for this module.
PRELOAD = ("matplotlib.pyplot",)

PIPELINE, BIG = (ROOT / "examples" / name for name in ("pipeline.py", "big_model.py"))
SMALL = ["--cpu", "--width", "32", "--layers", "4", "--sequences", "6", "--chunks", "4"]


def test_a_model_split_over_processes_scores_as_one_process_does(ranks: RankServer, tmp_path: Path) -> None:
    picture = tmp_path / "timeline.png"
    alone = script_output(ranks, 1, PIPELINE, *SMALL)
    pair = script_output(ranks, 2, PIPELINE, *SMALL, "--picture", str(picture))

    def scored(text: str) -> list[str]:
        return re.findall(r"scored 6 sequences, the mean score is [-\d.]+", text)

    assert scored(alone) == scored(pair)
    assert len(scored(alone)) == 1
    shares = [float(held) for held in re.findall(r"holds ([\d.]+) of", pair)]
    assert len(shares) == 2
    assert "cut before layers.1" in pair
    assert f"timeline: {picture}" in pair

    from matplotlib.image import imread

    pixels = imread(picture)
    colourful = pixels[..., :3].max(axis=2) - pixels[..., :3].min(axis=2) > 0.2
    assert colourful.mean() > 0.02, "bars in colour"


def test_a_model_generates_the_same_wherever_its_layers_are(ranks: RankServer, tmp_path: Path) -> None:
    """On the host, partly and mostly in the files of its checkpoint; which are read in place, not copied."""

    def lines(*options: str) -> list[str]:
        return script_output(ranks, 1, BIG, *options).splitlines()

    checkpoint, offload = tmp_path / "model", tmp_path / "offload"
    options = ["--checkpoint", str(checkpoint), "--offload-folder", str(offload)]
    whole = lines(*options)
    written = sorted(checkpoint.iterdir())
    assert len(written) > 2, "several files and an index"
    assert whole[:-1] == ["cpu: everything"]

    partly = lines(*options, "--cpu-memory", "15MB")
    mostly = lines(*options, "--cpu-memory", "3MB")
    assert whole[-1] == partly[-1] == mostly[-1]
    tokens = whole[-1].removeprefix("generated: ").split()
    assert len(tokens) == 12
    assert len(set(tokens)) > 3, "a sequence that shows a difference"
    assert any(line.startswith("disk: blocks.2") for line in partly)
    assert any(line.startswith("disk: blocks") for line in mostly)
    assert not offload.exists()
    assert sorted(checkpoint.iterdir()) == written
