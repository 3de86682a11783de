"""The rows of a run as a picture: time of a call over the number of ranks, both on logarithmic scales."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from benchmarks.case import Sample

Times = Mapping[int, float]  # ranks -> microseconds
# Okabe and Ito's colours, which the colour-blind tell apart.
STYLES = {"raw torch": ("#555555", "o"), "ours": ("#0072B2", "s"), "1.15.0": ("#D55E00", "^")}


def times_of(ours: list[Sample] | str, peer: list[Sample] | str) -> dict[str, float]:
    """Microseconds of a call, of each subject that was measured.

    A ratio is to the raw times beside it, in one run; both runs' raw times give the curve of raw torch.
    """
    known = {
        name: part for name, part in (("ours", ours), ("1.15.0", peer)) if isinstance(part, list) and part
    }
    raw = [sample.base for part in known.values() for sample in part]
    if not raw:
        return {}
    base = median(raw)
    ratios = {name: median(sample.figure for sample in part) for name, part in known.items()}
    return {"raw torch": base, **{name: base * ratio for name, ratio in ratios.items()}}


def draw(curves: Mapping[str, Mapping[str, Times]], about: str, path: Path) -> None:
    """One panel for each call, with the curves of all subjects."""
    from matplotlib import ticker
    from matplotlib.figure import Figure

    columns = 3
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(4 * columns, 2.9 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel in panels[len(curves) :]:
        panel.set_axis_off()
    for panel, (title, subjects) in zip(panels, curves.items(), strict=False):
        for name, times in subjects.items():
            colour, marker = STYLES[name]
            panel.plot(
                list(times), [time / 1e3 for time in times.values()], color=colour, marker=marker, label=name
            )
        panel.set(title=title.replace("`", ""), xscale="log", yscale="log")
        logarithms = [math.log10(time / 1e3) for times in subjects.values() for time in times.values()]
        panel.set_ylim(10 ** math.floor(min(logarithms)), 10 ** math.ceil(max(logarithms)))
        sizes = sorted({size for times in subjects.values() for size in times})
        panel.xaxis.set_major_locator(ticker.FixedLocator(sizes))
        panel.xaxis.set_minor_locator(ticker.NullLocator())
        panel.xaxis.set_major_formatter(ticker.ScalarFormatter())
        panel.yaxis.set_minor_formatter(ticker.NullFormatter())
        panel.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        panel.grid(True, which="major", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
    for panel in panels[::columns]:
        panel.set_ylabel("ms for a call")
    for panel in panels[max(0, len(curves) - columns) : len(curves)]:
        panel.set_xlabel("processes")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(STYLES), frameon=False
    )
    figure.supxlabel(about, fontsize=8, color="#555555")
    figure.savefig(path, dpi=110)
