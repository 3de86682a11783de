"""Tables: drawn by rich on a terminal, and aligned columns for files and other programs."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence


def print_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    heading: str = "",
    dim: Collection[int] = (),
    wrap: bool = True,
) -> None:
    """Print a table on stdout. A terminal is not shown columns that are empty.

    Args:
        titles: of the columns; none for a table without.
        rows: their cells, which are no markup.
        heading: stands above; empty cells of a table without are ``-`` in files.
        dim: the numbers of rows that matter less.
        wrap: break long cells on a terminal; otherwise only those of the last column.
    """
    lines = [[encodable(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        fill, indent = ("", "  ") if heading else ("-", "")
        lines = [*([titles] if titles else []), *([cell or fill for cell in line] for line in lines)]
        text = [indent + each for each in align_columns(lines)]
        print("\n".join([*([f"{encodable(heading)}:"] if heading else []), *text]))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    title = Text(encodable(heading), style="bold") if heading else None
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )
    table.show_header = bool(titles)
    columns = range(len(lines[0]) if lines else 0)
    shown = [column for column in columns if any(line[column] for line in lines)]
    for column in shown:
        table.add_column(titles[column] if titles else "", no_wrap=not wrap and column != shown[-1])
    for number, line in enumerate(lines):
        table.add_row(*(Text(line[column]) for column in shown), style="dim" if number in dim else None)
    Console(highlight=False).print(table)


def align_columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of cells as texts, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def encodable(text: str) -> str:
    """Return a text as stdout can show it: characters that its encoding lacks are written out."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
