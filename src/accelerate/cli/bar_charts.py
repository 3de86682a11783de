"""Boxes of tables and stacked bars, on a terminal and in a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.core.errors import MissingExtraError, SettingError
from accelerate.core.tables import encodable
from accelerate.core.units import show_bytes

WIDTH = 60  # columns of the longest bar, where a line of LINE columns has room for it
LINE = 100
# Signs, so that bars can be read without colours; colours, so that they are read at a glance.
SIGNS = "█▓▒░#"
# In their place where stdout has no such characters: a file or a pipe on Windows, or LC_ALL=en_US.ISO-8859-1.
_PLAIN = str.maketrans({**dict.fromkeys("┌┐├┤┬┼└┴┘", "+"), **dict(zip("─│█▓▒░", "-|@=:.", strict=True))})
COLOURS = ("blue", "cyan", "yellow", "magenta", "green")


def print_chart(text: str) -> None:
    """Print a table or bars, with signs and lines that stdout can show."""
    import click

    click.echo(text if encodable(text) == text else encodable(text.translate(_PLAIN)))


def create_ascii_table(headers: list[str], rows: list[list[Any]], title: str) -> str:
    """A table in a box of lines, its title in a box above.

    Args:
        headers: names of the columns.
        rows: their cells.
        title: shown in the middle; a table is as wide as it at least.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in [headers, *cells]) for column in range(len(headers))]
    missing = len(title) - (sum(widths) + len(widths) - 1)
    if missing > 0:
        widths[-1] += missing
    inner = sum(widths) + len(widths) - 1

    def format_rule(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * width for width in widths) + right

    def line(row: Sequence[str]) -> str:
        return "│" + "│".join(cell.center(width) for cell, width in zip(row, widths, strict=True)) + "│"

    top = [
        f"┌{'─' * inner}┐",
        f"│{title.center(inner)}│",
        format_rule("├", "┬", "┤"),
        line(headers),
        format_rule("├", "┼", "┤"),
    ]
    return "\n".join([*top, *map(line, cells), format_rule("└", "┴", "┘")])


def size_text(size: float) -> str:
    """Bytes as 1.x writes them: ``1.5 GB``, no zero that says nothing."""
    number, _, unit = show_bytes(size).partition(" ")
    return f"{float(number)} {unit}" if "." in number else f"{number} {unit}"


def draw_bars(
    rows: Mapping[str, Mapping[str, int]],
    *,
    colour: bool = False,
    show: Callable[[float], str] = size_text,
) -> str:
    """Stacked bars, the longest as wide as the line allows, each with its sum; below them what is what.

    Args:
        rows: title -> part -> bytes; the same parts in each.
        colour: paint them for a terminal.
        show: formats a sum.
    """
    longest = max((sum(parts.values()) for parts in rows.values()), default=0) or 1
    names = list(next(iter(rows.values()), {}))
    wide = max(map(len, rows), default=0)
    sums = [show(sum(parts.values())) for parts in rows.values()]
    width = min(WIDTH, LINE - wide - 4 - max(map(len, sums), default=0))
    lines: list[str] = []
    for (title, parts), total in zip(rows.items(), sums, strict=True):
        columns = _bar_widths(list(parts.values()), longest, width)
        drawn = "".join(_color_text(SIGNS[i] * n, i, colour) for i, n in enumerate(columns))
        lines.append(f"{title.ljust(wide)}  {drawn}  {total}")
    legend = "   ".join(f"{_color_text(SIGNS[i], i, colour)} {name}" for i, name in enumerate(names))
    indent = min(wide + 2, LINE - len("   ".join(f"# {name}" for name in names)))
    return "\n".join([*lines, f"{' ' * indent}{legend}"])


def _bar_widths(sizes: list[int], longest: int, width: int) -> list[int]:
    """Columns for each size: their sum is the bar's own length, rounded once."""
    ends = [round(width * sum(sizes[: index + 1]) / longest) for index in range(len(sizes))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _color_text(text: str, index: int, colour: bool) -> str:
    import click

    return click.style(text, fg=COLOURS[index]) if colour and text else text


def plot_bars(
    file: Path,
    rows: Mapping[str, Mapping[str, int]],
    title: str,
    *,
    show: Callable[[float], str] = size_text,
    base: int = 1024,
) -> None:
    """Draw the stacked bars into a picture, PNG or what the end of the name says.

    Args:
        file: the picture.
        rows: title -> part -> bytes; the same parts in each.
        title: of the picture.
        show: formats a sum.
        base: bytes of a KB.

    Raises:
        MissingExtraError: matplotlib is not installed.
        SettingError: it cannot be written there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "--plot") from error

    figure = Figure(figsize=(9, 1.6 + 0.55 * len(rows)), layout="constrained")
    axes: Any = figure.add_subplot()
    totals = {name: sum(parts.values()) for name, parts in rows.items()}
    longest = max(totals.values(), default=0) or 1
    units = (("GB", base**3), ("MB", base**2))
    unit, size = next(((u, s) for u, s in units if longest >= s), ("KB", base))
    left = dict.fromkeys(rows, 0.0)
    for index, part in enumerate(next(iter(rows.values()), {})):
        widths = [parts[part] / size for parts in rows.values()]
        starts = list(left.values())
        axes.barh(list(rows), widths, left=starts, label=part, color=f"C{index}", height=0.6)
        left = {name: left[name] + width for name, width in zip(left, widths, strict=True)}
    for place, name in enumerate(rows):
        axes.text(left[name] + 0.01 * longest / size, place, show(totals[name]), va="center")
    axes.set_xlim(0, 1.18 * longest / size)
    axes.set_xlabel(f"{unit} of one device (1 GB = {base} MB)")
    axes.set_title(title)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    if len(next(iter(rows.values()), {})) > 1:
        figure.legend(loc="outside lower center", ncols=len(SIGNS), frameon=False)
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        raise SettingError(f"--plot cannot write {file}", why=str(error)) from error
