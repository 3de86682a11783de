"""Data that is sharded already: recognised by what it says of itself, by its code, or by comparing the ranks.

Sharding such data again would leave out most of it without a word, and so would reading it on rank 0 for all.
"""

from __future__ import annotations

import hashlib
import logging
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import PurePath
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accelerate.core.errors import CollectiveError, PrepareError
from accelerate.world import collective

_logger = logging.getLogger(__name__)

# How samplers and streams call the number of shards and which one is theirs.
_SIZES = (
    *("num_replicas", "num_processes", "world_size", "world", "num_ranks", "num_shards", "n_shards"),
    *("dp_size", "dp_world_size", "data_parallel_size"),
)
_RANKS = (
    *("rank", "process_index", "global_rank", "shard_index", "shard_id", "shard_rank", "shard"),
    *("dp_rank", "data_parallel_rank"),
)
# Names by which code asks which process it runs in, and among how many.
_RANK = frozenset(("get_rank", "process_index", "RANK", "get_node_local_rank", "local_process_index"))
_SIZE = frozenset(("get_world_size", "num_processes", "WORLD_SIZE"))
_LIBRARIES = frozenset(("torch", "accelerate", "datasets", "torchdata", "numpy", "builtins"))
# Attributes that differ between ranks for reasons of their own.
_OWN = ("seed", "device", "generator", "rng", "cache", "log", "tmp", "temp", "output", "epoch")
_CHOICES = "say so: shard=False keeps each process's own part, shard=True shares the data out all the same"


def _chain(start: Any, *names: str) -> Iterator[Any]:
    """An object and those inside it, by attribute names."""
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


def _holders(loader: DataLoader[Any]) -> Iterator[Any]:
    """What may have been sharded: the samplers and the data of a loader, and what they wrap."""
    if not isinstance(loader.dataset, IterableDataset):
        yield from _chain(loader.batch_sampler or loader.sampler, "batch_sampler", "sampler")
    yield from _chain(loader.dataset, "dataset", "source", "source_dataset")


def recognise(loader: DataLoader[Any], count: int, index: int) -> str | None:
    """Why the loader gives each of ``count`` processes its own part already; None if nothing tells so."""
    for holder in _holders(loader):
        split = getattr(holder, "_distributed", None)  # datasets.distributed.split_dataset_by_node
        for item in (holder, split):
            sizes, ranks = _numbers(item, _SIZES), _numbers(item, _RANKS)
            size = next((name for name in sizes if sizes[name] == count), None)
            rank = next((name for name in ranks if ranks[name] == index), None)
            if "num_replicas" in sizes and sizes["num_replicas"] > 1 and "rank" in ranks:
                size, rank = "num_replicas", "rank"  # of a part of the processes, perhaps
            if size is not None and rank is not None:
                return f"its {type(holder).__name__} has {size}={sizes[size]} and {rank}={ranks[rank]}"
    return None


def check_parts(loader: DataLoader[Any], count: int, index: int) -> None:
    """Refuses data that are sharded by processes of which several are to read the same.

    Args:
        loader: the user's.
        count, index: into how many parts the data are shared out, and this process's.

    Raises:
        PrepareError: the data are cut into another number of parts, or by the rank.
    """
    why = ""
    for holder in _holders(loader):
        found = _numbers(holder, ("num_replicas", "rank"))
        if len(found) == 2 and found["num_replicas"] > 1 and tuple(found.values()) != (count, index):
            said = " and ".join(f"{name}={value}" for name, value in found.items())
            why = f"its {type(holder).__name__} has {said}"
    why = why or by_code(loader) or ""
    if why:
        raise PrepareError(
            f"{name_of(loader)} is sharded by processes ({why}), of which several share layers or sequences",
            why=f"those must read the same; the data have {count} parts, and this process reads part {index}",
            fix="leave the sharding to prepare, or shard by these numbers and prepare it with shard=False",
        )


def _numbers(item: Any, names: Iterable[str]) -> dict[str, int]:
    found = {name: getattr(item, name, None) for name in names}
    return {name: value for name, value in found.items() if type(value) is int}


def by_code(loader: DataLoader[Any]) -> str | None:
    """Why the code of the loader's own samplers and stream seems to shard, or None.

    Raises:
        PrepareError: the code asks for the rank alone, and it cannot be told what for.
    """
    for holder in _holders(loader):
        names = set(_names(holder))
        rank, size = sorted(names & _RANK), sorted(names & _SIZE)
        if rank and size:
            return f"the code of its {type(holder).__name__} asks for {rank[0]} and {size[0]}"
        if rank:
            raise PrepareError(
                f"the code of {type(holder).__qualname__} asks for {rank[0]}: it cannot be told whether it "
                "gives each process its own part of the data",
                why="if it does, sharing it out once more would leave out samples without a word",
                fix=_CHOICES,
            )
    return None


def _names(holder: Any) -> Iterator[str]:
    """Names and texts in the code of an object's class, as far as a user wrote it."""
    for base in type(holder).__mro__:
        if base.__module__.partition(".")[0] not in _LIBRARIES:
            for name, member in vars(base).items():
                if name != "__init__":  # what it found is in the attributes
                    yield from _of_code(getattr(member, "__func__", getattr(member, "fget", member)), 3)


def _of_code(function: Any, depth: int) -> Iterator[str]:
    """Names and texts in a function and in those of the user's that it calls by their global names."""
    code = function if isinstance(function, types.CodeType) else getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType):
        return
    yield from code.co_names
    outside: dict[str, Any] = getattr(function, "__globals__", {})
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _of_code(constant, depth)
    for name in code.co_names if depth else ():
        called = outside.get(name)
        if isinstance(called, types.FunctionType):
            if called.__module__.partition(".")[0] not in _LIBRARIES:
                yield from _of_code(called, depth - 1)
            else:
                yield called.__name__


def say_kept(loader: DataLoader[Any], why: str) -> None:
    """Tells, once and on rank 0, that a loader is not shared out."""
    if collective.rank() == 0:
        _logger.warning(
            "%s is sharded already (%s): each process keeps its own part. To share it out all the same, "
            "prepare it with shard=True.",
            name_of(loader),
            why,
        )


def name_of(loader: DataLoader[Any]) -> str:
    """The loader in words."""
    kind = type(loader.dataset)
    return f"{type(loader).__name__}({kind.__qualname__}, batch_size={loader.batch_size})"


# --- facts that the ranks compare when the loader is first iterated


def facts(loader: DataLoader[Any]) -> dict[str, str]:
    """What must be alike on all ranks if all of them are to share this data, as short texts by name."""
    found: dict[str, str] = {}
    data: Any = loader.dataset
    if hasattr(type(data), "__len__"):
        with suppress(TypeError, NotImplementedError):  # a stream that has the method only
            found["its length"] = str(len(data))
    for holder in _chain(data, "dataset"):
        mark = getattr(holder, "_fingerprint", None)
        if isinstance(mark, str):
            found["its fingerprint"] = mark
    for holder in _holders(loader):
        # A map-style dataset may differ for many reasons; what gives the order may not.
        everything = holder is not data or isinstance(data, IterableDataset)
        if isinstance(holder, list | tuple | range):
            found["its order"] = _short(f"{len(holder)} samples {[*holder[:512], *holder[-512:]]}")
        for name, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
            text = _plain(value, everything)
            if text is not None and not any(part in name.lower() for part in _OWN):
                found[f"{type(holder).__name__}.{name}"] = text
    return found


def _plain(value: Any, everything: bool) -> str | None:
    """A short text of a list of names, or (``everything``) of any plain value; None of what is no such."""
    if isinstance(value, list | tuple) and value and all(isinstance(item, str | PurePath) for item in value):
        return _short(repr([str(item) for item in value]))
    if not everything:
        return None
    if isinstance(value, str | int | float | PurePath | range):
        return _short(str(value))
    if isinstance(value, list | tuple) and all(isinstance(item, int | float) for item in value[:64]):
        return _short(f"{len(value)} numbers {[*value[:512], *value[-512:]]}")
    return None


def _short(text: str) -> str:
    if len(text) <= 80:
        return text
    return f"{text[:60]}... ({hashlib.blake2b(text.encode(), digest_size=6).hexdigest()})"


def compare_ranks(loader: DataLoader[Any], how: str) -> None:
    """Compares what the ranks know of a loader; all take part.

    Args:
        loader: the user's.
        how: it is used: "kept", "shared out" or "dispatched".

    Raises:
        CollectiveError: on every rank, when it is used in different ways, or is to be shared and differs.
    """
    seen = {"how it is used": how}
    compare(name_of(loader), seen if how == "kept" else {**seen, **facts(loader)})


def compare(name: str, seen: Any) -> None:
    """Raises on every rank if the ranks do not see the same.

    Args:
        name: the loader in words.
        seen: by name, as texts; None compares nothing but takes part.

    Raises:
        CollectiveError: what each rank saw, and the options.
    """
    every = collective.all_objects(seen)
    known = [row for row in every if row is not None]
    names: Iterable[str] = dict.fromkeys(key for row in known for key in row)
    for key in names:
        if len({row.get(key) for row in known}) > 1:
            table = "\n       ".join(f"rank {rank}: {row and row.get(key)}" for rank, row in enumerate(every))
            raise CollectiveError(
                f"the processes do not have the same data in {name}: {key} differs",
                why=f"to share it out, all must begin with the whole data in one order\n       {table}",
                fix=f"{_CHOICES}; with dispatch_batches=True and shard=True rank 0's data is read for all",
            )


def compared(batches: Iterator[Any], name: str) -> Iterator[Any]:
    """The same batches of indices; before the first one, all ranks compare theirs.

    Args:
        batches: of the whole data, in the order that all ranks are to share.
        name: the loader in words.
    """
    first = next(batches, None)
    compare(name, {"its first batch of indices": "none" if first is None else _short(str(first))})
    if first is not None:
        yield first
        yield from batches
