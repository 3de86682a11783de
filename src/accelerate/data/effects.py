"""What became of the options of loaders, seen on the prepared loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import SequentialSampler

from accelerate.core.effects import Effect, Option
from accelerate.data.dispatch import DataLoaderDispatcher
from accelerate.data.loader import get_sampler
from accelerate.data.reading import shard_of
from accelerate.data.shard import SeedableRandomSampler
from accelerate.data.stream import IterableDatasetShard


def effects(options: Iterable[Option], loaders: Sequence[Any], size: int) -> Iterator[Effect]:
    """What became of each option of ``DataLoaderConfiguration``, and of ``rng_types``.

    Args:
        options: those that were asked for.
        loaders: the prepared ones.
        size: number of processes.
    """
    for option in options:
        if option.name in _SHARING and size == 1:
            yield option.failed(_SHARING[option.name], matters=False)
        elif not loaders:
            yield option.pending("no loader is prepared")
        else:
            yield _worst(option, loaders)


# What says how processes share data, and why it says nothing to one process.
_SHARING = {
    "split_batches": "one process takes whole batches",
    "dispatch_batches": "one process reads for itself",
    "even_batches": "one process takes whatever there is",
    "shard": "one process takes everything",
    "rng_types": "one process has nobody to take random states from",
}


def _worst(option: Option, loaders: Sequence[Any]) -> Effect:
    """The option must hold for all loaders; among those that do not have it, a warning goes first."""
    look = _LOOK.get(option.name)
    if look is None:
        return option.applied()
    found = [look(option, loader) for loader in loaders]
    failed = sorted((effect for effect in found if effect.failed), key=lambda effect: not effect.matters)
    harmless = bool(failed) and not failed[0].matters and len(failed) < len(found)
    return failed[0] if failed and not harmless else option.applied()


def _sharing(loader: Any) -> Any:
    """What shares a loader's data out: it has the options as attributes. None where nothing does."""
    if isinstance(loader, DataLoaderDispatcher):
        return loader
    base = getattr(loader, "base_dataloader", loader)
    if isinstance(base.dataset, IterableDatasetShard):
        return base.dataset
    return shard_of(base)


def _shared(option: Option, loader: Any) -> Effect:
    holder = _sharing(loader)
    if holder is None:
        return option.failed("a loader is not shared out here: it is sharded already")
    here = getattr(holder, option.name)
    return option.seen("" if here == option.value else f"a loader was prepared with {here}")


def _dispatched(option: Option, loader: Any) -> Effect:
    one_reads = isinstance(loader, DataLoaderDispatcher)
    if one_reads == option.value:
        return option.applied()
    return option.failed(
        f"a loader is {'read by rank 0' if one_reads else 'read by every process for itself'}"
    )


def _seeded(option: Option, loader: Any) -> Effect:
    sampler = get_sampler(getattr(loader, "base_dataloader", loader))
    if isinstance(sampler, SeedableRandomSampler):
        return option.applied()
    kind = type(sampler).__name__
    why = f"a loader has a {kind}, which draws no order of ours"
    return option.failed(why, matters=kind not in _IN_ORDER)


_IN_ORDER = (SequentialSampler.__name__, type(None).__name__, "_InfiniteConstantSampler")


def _overlapped(option: Option, loader: Any) -> Effect:
    device = getattr(loader, "device", None)
    if device is None or device.type == "cpu":
        return option.failed("batches stay on the host", matters=False)
    if not getattr(loader, "pin_memory", False):
        return option.failed("copies wait unless memory is pinned: DataLoader(..., pin_memory=True)")
    return option.seen("" if loader._non_blocking else "a loader was prepared without it")


def _attribute(option: Option, loader: Any) -> Effect:
    same = getattr(loader, option.name, None) == option.value
    return option.seen("" if same else "a loader was prepared without it")


def _taken(option: Option, loader: Any) -> Effect:
    shared = _sharing(loader) is not None
    return option.seen("" if shared == option.value else f"a loader is {'' if shared else 'not '}shared out")


_LOOK: dict[str, Callable[[Option, Any], Effect]] = {
    "split_batches": _shared,
    "even_batches": _shared,
    "dispatch_batches": _dispatched,
    "shard": _taken,
    "use_seedable_sampler": _seeded,
    "data_seed": _seeded,
    "non_blocking": _overlapped,
    "use_stateful_dataloader": _attribute,
    "rng_types": _attribute,
}
