"""Detection of data that is sharded already: by its attributes, by its code, or by comparing the ranks.

Sharding such data again would silently drop most of it, and so would reading it on rank 0 for all ranks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, Subset
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.core import tree
from accelerate.core.errors import CollectiveError, PrepareError
from accelerate.data.batch_sampler_shard import slicer_for
from accelerate.data.dataset_rows import COMPARED_ROWS, find_split_rows
from accelerate.data.epoch_order import capture_generators, find_generators, inner_sampler, outer_sampler
from accelerate.data.rank_arithmetic import (
    LIBRARIES,
    RANK_ATTRIBUTES,
    RANK_CALLS,
    SIZE_ATTRIBUTES,
    SIZE_CALLS,
    find_rank_arithmetic,
    function_names,
    has_index_per_rank_part,
    held_functions,
    only_stores_rank,
    own_functions,
)
from accelerate.data.sample_order import is_random
from accelerate.world import collective, watchdog
from accelerate.world import world as worlds

_logger = logging.getLogger(__name__)

# Attributes that may differ between ranks without sharding: parts of names, and names.
_RANK_SPECIFIC = ("seed", "device", "generator", "rng", "cache", "log", "tmp", "temp", "output", "epoch")
_PROCESS_ATTRIBUTES = frozenset(("host", "hostname", "node", "pid", "port", "local_rank"))
COMPARED_VALUES = 64  # of a tensor in a sample
COMPARED_ENDS = 512  # samples at either end of a list
# Streams whose plain values may differ from now on, since rank 0 alone reads them.
_read_by_rank0 = WeakIdKeyDictionary()
_IN_ORDER = "sharded, in order"
_UNPICKED = "seems to pick no samples by it"
_SPLIT = "random_split(dataset, lengths, generator=torch.Generator().manual_seed(0)), or set_seed before it"
_FIX = "set it explicitly: shard=False keeps each process's own part, shard=True shards the data in any case"


def _walk_attributes(start: Any, *names: str) -> Iterator[Any]:
    """Yield an object and those inside it, by attribute names."""
    seen: list[Any] = []
    todo = [start]
    while todo:
        item = todo.pop(0)
        if item is None or any(item is other for other in seen):
            continue
        seen.append(item)
        yield item
        inside = getattr(item, "__dict__", {})
        todo += [inside[name] for name in names if inside.get(name) is not None]


def _sharding_candidates(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the objects that may be sharded: a loader's samplers and data, and the objects that they wrap."""
    if not isinstance(loader.dataset, IterableDataset):
        outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        yield from _walk_attributes(outer, "batch_sampler", "sampler")
    yield from _walk_attributes(loader.dataset, "dataset", "source", "source_dataset")


def find_sharding(
    loader: DataLoader[Any], count: int, index: int, dispatch: bool = False, strict: bool = False
) -> str | None:
    """Return why the loader seems to be sharded over ``count`` processes already, or None.

    Where these are all processes it is collective: they compare the rows of a ``datasets.Dataset``.

    Args:
        loader: the user's.
        count, index: number of data shards, and the index of this process's.
        dispatch: rank 0 reads for all where it is not.
        strict: refuse also a stream that asks for the rank and picks nothing by it.

    Raises:
        PrepareError: its code picks by the rank alone: its purpose is unknown.
        CollectiveError: all have the whole dataset, but not in the same order.
    """
    is_whole_world = count == collective.world_size()
    for holder in _sharding_candidates(loader):
        for item in (holder, getattr(holder, "_distributed", None)):  # datasets' split_dataset_by_node
            names = (*SIZE_ATTRIBUTES, *RANK_ATTRIBUTES)
            numbers = {n: v for n in names if type(v := getattr(item, n, None)) is int}
            size = next((name for name in SIZE_ATTRIBUTES if numbers.get(name) == count), None)
            rank = next((name for name in RANK_ATTRIBUTES if numbers.get(name) == index), None)
            if numbers.get("num_replicas", 0) > 1 and "rank" in numbers:
                size, rank = "num_replicas", "rank"  # perhaps over some of the processes only
            if size is not None and rank is not None:
                why = f"its {type(holder).__name__} has {size}={numbers[size]} and {rank}={numbers[rank]}"
                if _only_stores_rank(item, loader, rank, size):
                    _log_shared_out(loader, why)
                elif is_whole_world and has_index_per_rank_part(item):
                    _log_shared_out(loader, why, "has an index for the part of each process")
                else:
                    return why
    reader = "process 0 reads for all" if dispatch else "each process takes its part of what it reads itself"
    reason = _detect_in_code(loader, is_whole_world, "" if strict else reader)
    if reason is None and is_whole_world:
        for holder in _walk_attributes(loader.dataset, "dataset"):
            if isinstance(getattr(holder, "_fingerprint", None), str) and hasattr(holder, "with_format"):
                return find_split_rows(holder, describe_loader(loader))
    return reason


def check_data_shard(loader: DataLoader[Any], count: int, index: int) -> None:
    """Refuse data that is sharded per process, if several processes must read the same shard.

    Args:
        loader: the user's.
        count, index: number of data shards, and the index of this process's.

    Raises:
        PrepareError: the data has another number of shards, or is sharded by rank.
    """
    reason = ""
    for holder in _sharding_candidates(loader):
        numbers = {n: v for n in ("num_replicas", "rank") if type(v := getattr(holder, n, None)) is int}
        if len(numbers) == 2 and numbers["num_replicas"] > 1 and tuple(numbers.values()) != (count, index):
            attributes = " and ".join(f"{name}={value}" for name, value in numbers.items())
            reason = f"its {type(holder).__name__} has {attributes}"
    reason = reason or _detect_in_code(loader) or ""
    if reason:
        raise PrepareError(
            f"{describe_loader(loader)} is sharded by processes ({reason}), of which several share layers or "
            "sequences",
            why=f"those must read the same; the data have {count} parts, and this process reads part {index}",
            fix="leave the sharding to prepare, or shard by these numbers and prepare it with shard=False",
        )


def _only_stores_rank(item: Any, loader: DataLoader[Any], rank: str, size: str) -> bool:
    """Return whether map-style data have the rank and the world size without picking samples by them."""
    is_sampler = hasattr(item, "__iter__") and not hasattr(item, "__getitem__")
    if is_sampler or isinstance(loader.dataset, IterableDataset):
        return False
    return only_stores_rank(item, rank, size)


def _rank_names(holder: Any) -> tuple[list[str], list[str]]:
    """Return the names by which the user's code of an object asks for the rank and the world size."""
    if all(kind.__module__.partition(".")[0] in LIBRARIES for kind in type(holder).__mro__):
        return [], []
    # The results of __init__ are in the attributes.
    functions = own_functions(holder, with_init=False)
    names = {name for function in functions for name in function_names(function)}
    return sorted(names & RANK_CALLS), sorted(names & SIZE_CALLS)


def _detect_in_code(loader: DataLoader[Any], is_whole_world: bool = False, reader: str = "") -> str | None:
    """Return why the user's code of the loader's samplers and stream seems to shard, or None.

    Args:
        loader: the user's.
        is_whole_world: all ranks read data of their own, so those with an index for each part are no shards.
        reader: who reads a stream that asks for the rank alone, to seed or to print; empty: it is refused.
    """
    is_stream = isinstance(loader.dataset, IterableDataset)
    for holder in _sharding_candidates(loader):
        rank, size = _rank_names(holder)
        if not rank:
            continue
        why = f"the code of its {type(holder).__name__} asks for {' and '.join((*rank[:1], *size[:1]))}"
        picks = "rank" in find_rank_arithmetic(own_functions(holder), counts_texts=is_stream)
        if not (picks or is_stream):
            # The order of a sampler, and what such data hold, are compared when they are first used.
            if size:
                _log_shared_out(loader, why)
            continue
        if reader and not (picks or size):
            _log_shared_out(loader, why, f"{_UNPICKED} ({reader})")
            continue
        if size and not is_stream and is_whole_world and has_index_per_rank_part(holder):
            continue
        if size:
            return why
        raise PrepareError(
            f"the code of {type(holder).__qualname__} asks for {rank[0]}: it is unknown whether it "
            "gives each process its own part of the data",
            why="if it does, sharding it again would silently drop samples",
            fix=_FIX,
        )
    for name, functions in held_functions(loader.dataset) if is_stream else ():
        if len(find_rank_arithmetic(functions)) == 2:
            return f"the code of its {name} picks by the rank and the world size"
    return None


def log_not_sharded(loader: DataLoader[Any], why: str) -> None:
    """Log, once and on rank 0, that a loader is not sharded again."""
    if collective.rank() == 0:
        _logger.warning(
            "%s is sharded already (%s): each process keeps its own part. To share it out all the same, "
            "prepare it with shard=True.",
            describe_loader(loader),
            why,
        )


def _log_shared_out(loader: DataLoader[Any], why: str, but: str = "picks no samples by it") -> None:
    """Log, once and on rank 0, that data which know their rank are taken for the whole data."""
    if collective.rank() == 0:
        _logger.warning(
            "%s knows its rank (%s) but %s: it is shared out over the processes. If each "
            "has its own part already, prepare it with shard=False.",
            describe_loader(loader),
            why,
            but,
        )


def describe_loader(loader: DataLoader[Any]) -> str:
    """Return a name of the loader for error texts."""
    kind = type(loader.dataset)
    return f"{type(loader).__name__}({kind.__qualname__}, batch_size={loader.batch_size})"


# --- facts that the ranks compare when the loader is first iterated


def loader_facts(
    loader: DataLoader[Any],
    is_order_compared: bool = False,
    is_rank0_read: bool = False,
    strict: bool = False,
) -> dict[str, str]:
    """Return facts that must be equal on all ranks if they shard this data, as short texts by name.

    Args:
        loader: the user's.
        is_order_compared: the ranks also compare the first batch of a sampler of the user's.
        is_rank0_read: rank 0 reads for all, as the user says: only what shows shards is compared.
        strict: compare also the rank that a stream stores and picks nothing by.
    """
    data: Any = loader.dataset
    facts = {"its length": length} if (length := _length_text(data)) else {}
    is_stream = isinstance(data, IterableDataset)
    datasets = [*_walk_attributes(data, "dataset", "source", "source_dataset")]
    for holder in _sharding_candidates(loader):
        # Plain values of a map-style dataset of the user's may differ for other reasons. Those of a stream
        # are all there is, and those of torch's classes (``Subset.indices``) say what the data are.
        is_data = any(holder is each for each in datasets)
        is_torch = type(holder).__module__.startswith("torch.") and not isinstance(holder, IterDataPipe)
        is_marked = is_data and not is_stream and _knows_rank(holder)
        is_described = is_stream or is_marked or not (is_data or is_order_compared)
        everything = is_torch or (is_described and not is_rank0_read)
        if isinstance(holder, list | tuple | range):
            ends = ", ".join(map(_sample_text, _first_and_last(holder)))
            facts["its order"] = _shorten_text(f"{len(holder)} samples [{ends}]")
        for name, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
            plain = name.lower()
            if any(part in plain for part in _RANK_SPECIFIC) or plain.strip("_") in _PROCESS_ATTRIBUTES:
                continue
            if name.strip("_") in RANK_ATTRIBUTES:
                # One of the user's own part is no number.
                is_number = is_stream and everything and type(value) is int
                if is_number and not strict and only_stores_rank(holder, name):
                    _log_shared_out(loader, f"its {type(holder).__name__} has {name}", _UNPICKED)
                    continue
                if is_marked:
                    continue
            if isinstance(holder, Subset) and isinstance(value, torch.Tensor | np.ndarray):
                text = _shorten_text(f"{len(value)} numbers {[int(v) for v in _first_and_last(value)]}")
            else:
                text = _short_text(value, everything)
            if is_marked and not is_rank0_read:
                text = text or _data_text(value)
            if text is not None:
                facts[f"{type(holder).__name__}.{name}"] = text
    return facts


def _length_text(dataset: Any) -> str:
    with suppress(TypeError, NotImplementedError):  # it has no __len__, or one that raises
        return str(len(dataset))
    return ""


def _knows_rank(dataset: Any) -> bool:
    """Return whether a dataset of the user's has, or asks for, its rank and the world size."""
    numbers = {
        name.strip("_") for name, value in getattr(dataset, "__dict__", {}).items() if type(value) is int
    }
    has_both = numbers.intersection(RANK_ATTRIBUTES) and numbers.intersection(SIZE_ATTRIBUTES)
    return bool(has_both) or all(_rank_names(dataset))


def _data_text(value: Any) -> str | None:
    """Return a short text of data in an attribute: an array, samples, a table or a part of a dataset."""
    if hasattr(value, "head") and hasattr(value, "to_dict"):  # pandas
        value = value.head(COMPARED_ROWS).to_dict()
    if isinstance(value, torch.Tensor | np.ndarray):
        return _shorten_text(_leaf_text(value))
    if isinstance(value, list | tuple | dict | Subset):
        items: Any = [*value.items()] if isinstance(value, dict) else getattr(value, "indices", value)
        return _shorten_text(f"{len(items)} samples {[*map(_sample_text, _first_and_last(items))]}")
    return getattr(value, "_fingerprint", None) if hasattr(value, "with_format") else None


def _sample_text(sample: Any) -> str:
    """Return a text that is the same on all ranks for a sample that is: no address in memory."""
    leaves = [_leaf_text(leaf) for _, leaf in tree.iterate_leaves(sample)]
    return leaves[0] if len(leaves) == 1 else f"({', '.join(leaves)})"


def _leaf_text(leaf: Any) -> str:
    if isinstance(leaf, str | bytes | int | float | complex | PurePath | None):
        return repr(_without_folder(leaf))
    if isinstance(leaf, torch.Tensor):
        has_values = type(leaf) is torch.Tensor and leaf.is_cpu and leaf.layout is torch.strided
    elif isinstance(leaf, np.ndarray):
        has_values = not leaf.dtype.hasobject
    else:
        return type(leaf).__qualname__  # its own text often holds its address
    values = leaf.reshape(-1)[:COMPARED_VALUES].tolist() if has_values else ""
    return f"{leaf.dtype}{[*leaf.shape]} {values}"


def _without_folder(value: Any) -> Any:
    """Return the name alone of an absolute path, if there are several machines: each may have its copy."""
    world = worlds.current()
    if world is None or world.nodes == 1 or not isinstance(value, str | PurePath):
        return value
    return os.path.basename(value) if os.path.isabs(value) else value


def _short_text(value: Any, everything: bool) -> str | None:
    """Return a short text of a list of names, or (``everything``) of any plain value, else None."""
    if isinstance(value, list | tuple) and value and all(isinstance(item, str | PurePath) for item in value):
        names = [str(_without_folder(item)) for item in _first_and_last(value)]
        return _shorten_text(f"{len(value)} names {names}")
    if not everything:
        return None
    if isinstance(value, str | int | PurePath | range) and not isinstance(value, bool):
        # A flag asks for the main process, and a float is a time.
        return _shorten_text(str(_without_folder(value)))
    if isinstance(value, list | tuple) and all(isinstance(item, int | float) for item in value[:64]):
        return _shorten_text(f"{len(value)} numbers {_first_and_last(value)}")
    return None  # tensors hold samples or weights, which a program may make anew on each rank


def _first_and_last(values: Any) -> list[Any]:
    """Return the first and the last values of many, or all."""
    return (
        [*values] if len(values) <= 2 * COMPARED_ENDS else [*values[:COMPARED_ENDS], *values[-COMPARED_ENDS:]]
    )


def _shorten_text(text: str) -> str:
    if len(text) <= 80:
        return text
    return f"{text[:60]}... ({hashlib.blake2b(text.encode(), digest_size=6).hexdigest()})"


def compare_ranks(
    loader: DataLoader[Any],
    how: str,
    is_rank0_read: bool = False,
    number: int | None = None,
    strict: bool = False,
) -> None:
    """Compare the facts of a loader on all ranks. Collective where its epochs are.

    Where they are not, rank 0 may iterate it alone, as for a validation. So no rank waits there, and each
    compares its facts with those of the rank that came first. All ranks leave them, also those that wait:
    they may not agree on whether the epochs are collective.

    Args:
        loader: the user's.
        how: the way it is used: "kept", "sharded" or "dispatched".
        is_rank0_read: it is dispatched because the user says so.
        number: of the loaders that were prepared, alike on all ranks unless one has prepared more; None: all
            ranks iterate it.
        strict: see ``loader_facts``.

    Raises:
        CollectiveError: it is used in different ways, or is to be sharded and differs. On every rank if this
            is collective, else on those that came later.
    """
    world = worlds.current()
    if world is not None and world.is_closed:  # data in order are evaluated after end_training, too
        return
    data, name = loader.dataset, describe_loader(loader)
    sampler, watch = outer_sampler(loader), None if number is None else watchdog.current()
    is_in_order = slicer_for(sampler) is not None and not is_random(inner_sampler(sampler))
    is_waiting = watch is None or how != "sharded" or not is_in_order
    seen = {"how it is used": how if is_waiting else _IN_ORDER}
    if how == "dispatched" and isinstance(data, IterableDataset):
        is_rank0_read, _read_by_rank0[data] = is_rank0_read or data in _read_by_rank0, None
    seen |= {} if how == "kept" else loader_facts(loader, how == "sharded", is_rank0_read, strict)
    seen |= shuffle_facts(data) if how == "sharded" else {}
    # Of one number, a loader of another length and another batch size may be another one.
    keys = [f"{type(data).__qualname__}/{_length_text(data)}", *([] if is_waiting else [name])]
    keys, writer = [f"loader/{number}/{key}" for key in keys], -1
    for key in keys:
        if watch and (first := watch.store.put_if_absent(key, json.dumps([watch.rank, seen]))):
            rank, facts = json.loads(first)
            writer = rank if is_waiting else -1
            if _IN_ORDER in (seen["how it is used"], facts["how it is used"]):
                _refuse_differences(name, {rank: facts, watch.rank: seen})
    if is_waiting:
        check_same(name, seen, is_rank0_read)
    if watch is not None:
        _delete_compared(watch, f"loader/{number}", keys, writer)


def _delete_compared(watch: watchdog.Watchdog, prefix: str, keys: list[str], writer: int) -> None:
    """Delete the facts of a loader that this rank has compared, if all ranks have.

    Args:
        watch: whose store has them.
        prefix: of the keys of this loader.
        keys: those of the facts.
        writer: the rank that has written them, if all ranks have met since; else -1.
    """
    counter = f"{prefix}/ranks"
    have_all_compared = watch.store.add(counter) == watch.size if writer < 0 else writer == watch.rank
    if have_all_compared:
        for key in (*keys, counter):
            watch.store.delete(key)


def shuffle_facts(dataset: Any) -> dict[str, str]:
    """Return the generators by which a stream of ``datasets`` shuffles itself, as short texts."""
    facts: dict[str, str] = {}
    for stream in _walk_attributes(dataset, "dataset"):
        for layer in _walk_attributes(getattr(stream, "_ex_iterable", None), "ex_iterable"):
            for generator in find_generators(layer):
                state = str(capture_generators([generator]))
                name = f"the seed of its shuffle() ({type(layer).__name__})"
                facts[name] = hashlib.blake2b(state.encode(), digest_size=6).hexdigest()
    return facts


def check_same(name: str, seen: Any, is_rank0_read: bool = False) -> None:
    """Raise on every rank if the ranks do not have the same facts.

    Args:
        name: name of the loader.
        seen: facts by name, as texts; None takes part without comparing.
        is_rank0_read: rank 0 reads for all, so others may have no files.

    Raises:
        CollectiveError: with the facts of each rank, and the options.
    """
    facts_by_rank = collective.compare_objects(seen, "the data of a loader")
    _refuse_differences(name, dict(enumerate(facts_by_rank)), is_rank0_read)


def _refuse_differences(name: str, rank_facts: dict[int, Any], is_rank0_read: bool = False) -> None:
    compared_facts = [row for row in rank_facts.values() if row is not None]
    for key in dict.fromkeys(key for row in compared_facts for key in row):
        if len({row.get(key) for row in compared_facts if key in row or not is_rank0_read}) > 1:
            table = "\n       ".join(
                f"rank {rank}: {row and row.get(key)}" for rank, row in sorted(rank_facts.items())
            )
            fix = f"{_FIX}; with dispatch_batches=True and shard=True rank 0's data is read for all"
            if key == "Subset.indices":
                fix = f"give a random split the same seed on all processes: {_SPLIT}; or {fix}"
            raise CollectiveError(
                f"the processes do not have the same data in {name}: {key} differs",
                why=f"to share it out, all must begin with the whole data in one order\n       {table}",
                fix=fix,
            )


def check_first_batch(batches: Iterator[Any], loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the same batches of indices; before the first one, compare it on all ranks.

    Args:
        batches: those of the whole data, in the order that all ranks should have.
        loader: the user's.
    """
    first = next(batches, None)
    name = describe_loader(loader)
    check_same(name, {"its first batch of indices": "none" if first is None else _shorten_text(str(first))})
    if first is not None:
        yield first
        yield from batches
