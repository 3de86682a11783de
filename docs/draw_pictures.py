"""Draws the pictures of the manual that explain where tensors go: ``python docs/draw_pictures.py``.

They show an order of events, and no measured time. Pictures of runs are drawn by the examples and by
``draw_figures.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

HERE = Path(__file__).resolve().parent
BLUE, ORANGE, GREEN, GREY = "#4c72b0", "#dd8452", "#55a868", "#c5c8ce"
LIGHT = {BLUE: "#dbe4f2", ORANGE: "#f9e3d5", GREEN: "#d9ecdd", GREY: "#f0f1f3"}


def make_axes(width: float, height: float) -> tuple[Figure, Any]:
    """Axes of so many units, without a frame; a unit is 0.6 inches."""
    figure = Figure(figsize=(0.6 * width, 0.6 * height), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    return figure, axes


def draw_box(axes: Any, place: Sequence[float], text: str, color: str, *, filled: bool = False) -> None:
    """A box at (left, top, width, height)."""
    left, top, width, height = place
    face = color if filled else LIGHT[color]
    axes.add_patch(Rectangle((left, top), width, height, facecolor=face, edgecolor=color, linewidth=1.2))
    ink = "white" if filled else "#222222"
    axes.text(left + width / 2, top + height / 2, text, ha="center", va="center", fontsize=9, color=ink)


def draw_arrow(axes: Any, start: Sequence[float], end: Sequence[float], color: str = "#444444") -> None:
    """An arrow from one point to another."""
    style = {"arrowstyle": "-|>", "mutation_scale": 11, "shrinkA": 1, "shrinkB": 1}
    axes.add_patch(FancyArrowPatch(start, end, color=color, linewidth=1.2, **style))


def label(axes: Any, left: float, top: float, text: str, **options: Any) -> None:
    axes.text(left, top, text, fontsize=9, va="center", **{"ha": "left", **options})


def draw_prepare() -> Figure:
    """Data parallelism: what each process reads, holds and exchanges."""
    figure, axes = make_axes(17, 6.4)
    label(axes, 0.2, 0.5, "the data set, in the order of the epoch", color="#555555")
    for number in range(8):
        owner = BLUE if number // 2 % 2 == 0 else ORANGE
        draw_box(axes, (0.2 + number, 0.9, 0.9, 0.8), str(number), owner, filled=True)
    label(axes, 8.6, 1.3, "DataLoader(batch_size=2): rank 0 and rank 1 read batches in turn")
    for rank, (color, numbers) in enumerate(((BLUE, "0 1"), (ORANGE, "2 3"))):
        top, left = 2.5 + 1.9 * rank, 0.2 + 1.5 * rank
        middle = 1.15 + 2 * rank
        draw_arrow(axes, (middle, 1.75), (middle, top - 0.02), color)
        draw_box(axes, (left, top, 2.4, 1.2), f"rank {rank}\nbatch {numbers}", color)
        draw_arrow(axes, (left + 2.4, top + 0.6), (4.7, top + 0.6))
        draw_box(axes, (4.7, top, 2.8, 1.2), "forward, backward\nby the whole model", color)
        draw_arrow(axes, (7.5, top + 0.6), (8.3, top + 0.6))
        draw_box(axes, (8.3, top, 2.4, 1.2), "gradients of\nits batch", color)
        draw_arrow(axes, (10.7, top + 0.6), (11.6, top + 0.6))
        draw_arrow(axes, (13.2, top + 0.6), (14.1, top + 0.6))
        draw_box(axes, (14.1, top, 2.7, 1.2), "optimizer.step:\nequal weights", color)
    draw_box(axes, (11.6, 2.5, 1.6, 3.1), "all-reduce:\nthe mean", GREEN, filled=True)
    return figure


def draw_fsdp() -> Figure:
    """FSDP: what one rank of four does with the parameters of three units."""
    figure, axes = make_axes(17, 6.2)
    label(axes, 0.2, 0.4, "held by rank 0 of 4: a quarter of each unit", color="#555555")
    for unit in range(3):
        for rank in range(4):
            place = (0.2 + 5.0 * unit + 1.1 * rank, 0.8, 1.0, 0.8)
            draw_box(axes, place, f"rank {rank}", BLUE if rank == 0 else GREY, filled=rank == 0)
        label(axes, 2.4 + 5.0 * unit, 2.0, f"unit {unit}", ha="center")
    label(axes, 0.2, 2.9, "time", color="#555555")
    draw_arrow(axes, (1.0, 2.9), (16.8, 2.9), "#888888")
    rows = {"network": 3.3, "compute": 4.3}
    for name, top in rows.items():
        label(axes, 0.2, top + 0.4, name)
    network = ["gather 0", "gather 1", "gather 2", "", "gather 2", "gather 1"]
    network += ["scatter 2\ngather 0", "scatter 1", "scatter 0"]
    compute = ["", "forward 0", "forward 1", "forward 2", "", "backward 2", "backward 1", "backward 0"]
    for top, texts in ((rows["network"], network), (rows["compute"], compute)):
        for number, text in enumerate(texts):
            color = GREEN if texts is compute else ORANGE if "scatter" in text else BLUE
            if text:
                draw_box(axes, (2.0 + 1.65 * number, top, 1.55, 0.8), text, color)
    meaning = (
        "gather: all-gather of a unit's parameters, which are freed after it has computed.  "
        "scatter: reduce-scatter of its gradients"
    )
    label(axes, 0.2, 5.6, meaning)
    return figure


def draw_offload() -> Figure:
    """Offloading: where the weights of blocks are, and when they are on the device."""
    figure, axes = make_axes(17, 6.4)
    for top, text in ((0.3, "files"), (1.3, "host memory"), (2.3, "device")):
        label(axes, 0.2, top + 0.4, text)
    homes = {0: 2.3, 1: 1.3, 2: 1.3, 3: 0.3}
    for block in range(4):
        for top in (0.3, 1.3, 2.3):
            place = (2.8 + 3.3 * block, top, 3.0, 0.8)
            here = homes[block] == top
            draw_box(axes, place, f"block {block}" if here else "", BLUE if here else GREY, filled=here)
    label(axes, 0.2, 3.6, "time", color="#555555")
    draw_arrow(axes, (1.0, 3.6), (16.8, 3.6), "#888888")
    label(axes, 0.2, 4.4, "copies")
    label(axes, 0.2, 5.4, "compute")
    for number, text in ((0, "block 1 to device"), (1, "block 2 to device"), (2, "block 3 from its file")):
        draw_box(axes, (2.8 + 3.3 * number, 4.0, 3.0, 0.8), text, ORANGE)
    for block in range(4):
        draw_box(axes, (2.8 + 3.3 * block, 5.0, 3.0, 0.8), f"forward of block {block}", GREEN)
    label(
        axes,
        2.8,
        6.15,
        "each block is copied while the one before it computes, and dropped after its own forward",
    )
    return figure


PICTURES = {"prepare.png": draw_prepare, "fsdp.png": draw_fsdp, "offload.png": draw_offload}


def main() -> None:
    for name, draw in PICTURES.items():
        draw().savefig(HERE / name, dpi=130)
        print(f"docs/{name}")


if __name__ == "__main__":
    main()
