"""Comparison of a map-style ``datasets.Dataset`` on all ranks: the same rows, or a part of them on each.

``split_dataset_by_node`` and ``Dataset.shard`` leave no mark in a map-style dataset, and fingerprints prove
nothing: they also differ where a transform closes over the rank, or where each machine has its own cache. So
a few rows are compared where the fingerprints differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.core.errors import CollectiveError
from accelerate.world import collective

COMPARED_ROWS = 16


@dataclass(frozen=True)
class RowDigests:
    """The rows of one rank's dataset that are compared.

    Attributes:
        length: number of rows.
        table_length: number of rows of the Arrow table, of which the dataset may select some.
        rows: digests of some rows, one per row, by column.
        table_rows: the same of the Arrow table.
    """

    length: int
    table_length: int
    rows: dict[str, list[bytes]]
    table_rows: dict[str, list[bytes]]

    @classmethod
    def of(cls, dataset: Any) -> RowDigests:
        """Return the digests of evenly spaced rows, without the dataset's transforms."""
        table = dataset.data.table
        rows = dataset.with_format("arrow")[_spaced(len(dataset))]
        return cls(
            len(dataset), table.num_rows, _digests(rows), _digests(table.take(_spaced(table.num_rows)))
        )


def find_split(dataset: Any, name: str) -> str | None:
    """Return why each rank seems to have its own part of a dataset; None where all have the same. Collective.

    Args:
        dataset: a map-style ``datasets.Dataset``.
        name: name of its loader, for errors.

    Raises:
        CollectiveError: all ranks have the whole dataset, but not in the same order.
    """
    marks = collective.all_gather_object((len(dataset), dataset._fingerprint), "prepare")
    if len(set(marks)) == 1 or min(length for length, _ in marks) == 0:
        return None
    every: list[RowDigests] = collective.all_gather_object(RowDigests.of(dataset), "prepare")
    if len({each.length for each in every}) == 1 and _are_same([each.rows for each in every]):
        return None
    lengths = [each.length for each in every]
    same_table = _are_same([each.table_rows for each in every])
    if max(lengths) - min(lengths) <= 1 and (not same_table or sum(lengths) <= every[0].table_length):
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
            hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
            for value in table.column(name).to_pylist()
        ]
        for name in table.column_names
    }


def _are_same(every: Sequence[dict[str, list[bytes]]]) -> bool:
    """Return whether the rows are the same, but for columns that depend on the rank.

    A column with few values, as of labels, may be equal by chance; it counts only if there is no other.
    """
    first = every[0]
    equal = [name for name in first if all(each.get(name) == first[name] for each in every)]
    most_values = max((len(set(cells)) for cells in first.values()), default=0)
    return any(2 * len(set(first[name])) >= most_values for name in equal)
