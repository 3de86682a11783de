"""The rows of a map-style ``datasets.Dataset``, compared over the ranks: does each have its own part?

``split_dataset_by_node`` and ``Dataset.shard`` leave no mark, and fingerprints prove nothing: they also
differ where a transform closes over the rank, or where each machine has its own cache. So a few rows are
compared where the fingerprints differ.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from accelerate.core.errors import CollectiveError
from accelerate.world import collective

# Rows that are compared over the ranks.
COMPARED_ROWS = 16
COMPARED_INDICES = 4096  # of those that select rows of a table
COMPARED_BYTES = 4096  # of a file that a row names


@dataclass(frozen=True)
class RowDigests:
    """The rows of one rank's dataset that are compared.

    Attributes:
        length: number of rows.
        table_length: number of rows of the Arrow table, of which the dataset may select some.
        rows: digests of some rows, one per row, by column.
        table_rows: the same of the Arrow table.
        selected: rows of the table that the dataset selects, of a large one some; None: all are its rows.
    """

    length: int
    table_length: int
    rows: dict[str, list[bytes]]
    table_rows: dict[str, list[bytes]]
    selected: list[int] | None

    @classmethod
    def of(cls, dataset: Any) -> RowDigests:
        """Return the digests of evenly spaced rows, without the dataset's transforms."""
        table, selected = dataset.data.table, None
        rows = dataset.with_format("arrow")[_spaced(len(dataset))]
        if dataset._indices is not None:
            indices = dataset._indices.column(0).to_numpy()
            selected = np.unique(indices[indices % (1 + table.num_rows // COMPARED_INDICES) == 0]).tolist()
        table_rows = _digests(table.take(_spaced(table.num_rows)))
        return cls(len(dataset), table.num_rows, _digests(rows), table_rows, selected)


def find_split_rows(dataset: Any, name: str) -> str | None:
    """Return why each rank seems to have its own part of a dataset; None where all have the same. Collective.

    Args:
        dataset: a map-style ``datasets.Dataset``.
        name: name of its loader, for errors.

    Raises:
        CollectiveError: all ranks have the whole dataset, but not in the same order.
    """
    marks = collective.compare_objects((len(dataset), dataset._fingerprint), "prepare")
    if len(set(marks)) == 1 or min(length for length, _ in marks) == 0:
        return None
    every: list[RowDigests] = collective.all_gather_object(RowDigests.of(dataset), "prepare")
    if len({each.length for each in every}) == 1 and _are_same([each.rows for each in every]):
        return None
    lengths = [each.length for each in every]
    same_table = _are_same([each.table_rows for each in every])
    # Parts of one table have few rows in common, which make them equally long; a random selection has more.
    selected = Counter(row for each in every for row in each.selected or ())
    repeats = max(sum(lengths) - every[0].table_length, sum(selected.values()) - len(selected))
    is_split = repeats < len(every)
    if max(lengths) - min(lengths) <= 1 and (not same_table or is_split):
        return f"its {type(dataset).__name__} has other rows on each process, {sum(lengths)} in all"
    raise CollectiveError(
        f"the processes do not have the same data in {name}: the rows of its {type(dataset).__name__} differ",
        why="to share it out, all must begin with the whole data in one order; rows per process: "
        + ", ".join(map(str, lengths)),
        fix="give shuffle(), train_test_split() and what else is random a seed; where each process shall "
        "keep its own rows, DataLoaderConfiguration(shard=False)",
    )


def _spaced(length: int) -> list[int]:
    count = min(length, COMPARED_ROWS)
    return [index * (length - 1) // max(1, count - 1) for index in range(count)]


def _digests(table: Any) -> dict[str, list[bytes]]:
    return {
        name: [
            hashlib.blake2b(repr(_content(value)).encode(), digest_size=8).digest()
            for value in table.column(name).to_pylist()
        ]
        for name in table.column_names
    }


def _content(value: Any) -> Any:
    """Return a value with the content of files in place of their paths, which may be another cache's."""
    if isinstance(value, dict):
        return {key: _content(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, str) and os.path.isabs(value) and os.path.isfile(value):
        with suppress(FileNotFoundError, PermissionError), open(value, "rb") as file:
            return os.path.basename(value), os.fstat(file.fileno()).st_size, file.read(COMPARED_BYTES)
    return value


def _are_same(every: Sequence[dict[str, list[bytes]]]) -> bool:
    """Return whether the rows are the same, but for columns that depend on the rank.

    A column with few values, as of labels, may be equal by chance; it counts only if there is no other.
    """
    first = every[0]
    equal = [name for name in first if all(each.get(name) == first[name] for each in every)]
    most_values = max((len(set(cells)) for cells in first.values()), default=0)
    return any(2 * len(set(first[name])) >= most_values for name in equal)
