"""Draws docs/figures.png from the newest results: 1.15.0's figures as multiples of ours.

``python docs/draw_figures.py`` after ``make bench``. One bar for each figure that is a time, a memory, or a
ratio to raw torch, and that both packages have. What is added to a time can be negative, so it has no bar.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from generate import figure_rows, newest_results


def median(cell: str) -> float | None:
    """Return the number of ``1.02x [0.97, 1.05]`` or ``75.1 ms [73, 76]``; None where there is none."""
    number = cell.partition(" [")[0].split(" ")[0].rstrip("x")
    try:
        return None if number.startswith(("+", "-")) else float(number)
    except ValueError:
        return None


def multiples() -> dict[str, float]:
    """Return by title how many times as much 1.15.0 takes, the largest first."""
    pairs = {title: (median(cells[1]), median(cells[2])) for title, cells in figure_rows().items()}
    values = {
        title.replace("`", "").partition(", against")[0]: theirs / ours
        for title, (ours, theirs) in pairs.items()
        if ours and theirs
    }
    return dict(sorted(values.items(), key=lambda item: -item[1]))


def main() -> None:
    """Write the picture."""
    values = multiples()
    height = 0.26 * len(values) + 1
    figure, axes = plt.subplots(figsize=(10, height), layout="constrained")
    bars = axes.barh(
        [*values], [value - 1 for value in values.values()], left=1, color="#3a7ca5", height=0.62
    )
    axes.set_xscale("log", subs=[])
    axes.set_xlim(0.8, 2 * max(values.values()))
    texts = [f"{value:,.0f} x" if value >= 10 else f"{value:.2f} x" for value in values.values()]
    for bar, label in zip(bars, texts, strict=True):
        place = max(1.0, bar.get_x() + bar.get_width()) * 1.06
        axes.text(place, bar.get_y() + bar.get_height() / 2, label, va="center", fontsize=9)
    axes.axvline(1, color="#444444", linewidth=1)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel("1.15.0 / this package: 1 x is equal, more is in favour of this package")
    axes.set_title(f"Measured on {newest_results()[0].strip()}, 2 CPU cores", fontsize=11)
    axes.tick_params(axis="y", labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_name("figures.png"), dpi=110)


if __name__ == "__main__":
    main()
