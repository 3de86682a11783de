"""Option statuses of the data loaders, read from the prepared loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import RandomSampler, SequentialSampler

from accelerate.core.option_report import OptionStatus, RequestedOption
from accelerate.data.batch_sampler_shard import SeedableRandomSampler
from accelerate.data.batch_source import find_shard
from accelerate.data.dispatch import DataLoaderDispatcher
from accelerate.data.iterable_dataset import IterableDatasetShard
from accelerate.data.loader import get_sampler


def loader_option_statuses(
    options: Iterable[RequestedOption], loaders: Sequence[Any], size: int
) -> Iterator[OptionStatus]:
    """Yield the status of each option of ``DataLoaderConfiguration``, and of ``rng_types``.

    Args:
        options: the requested ones.
        loaders: the prepared loaders.
        size: number of processes.
    """
    for option in options:
        if option.name in _SHARING_OPTIONS and size == 1:
            yield option.report_not_applied(_SHARING_OPTIONS[option.name], matters=False)
        elif not loaders:
            yield option.report_pending("no loader is prepared")
        else:
            yield _worst_status(option, loaders)


# Options of the sharding over processes, and why each has no effect with one process.
_SHARING_OPTIONS = {
    "split_batches": "one process takes whole batches",
    "dispatch_batches": "one process reads for itself",
    "even_batches": "one process takes whatever there is",
    "shard": "one process takes everything",
    "rng_types": "one process has no other rank to take random states from",
}


def _worst_status(option: RequestedOption, loaders: Sequence[Any]) -> OptionStatus:
    """Return the worst status of an option over all loaders; a warning is worse than a note."""
    look = _STATUS_FUNCTIONS.get(option.name)
    if look is None:
        return option.report_applied()
    statuses = [look(option, loader) for loader in loaders]
    failed = sorted(
        (status for status in statuses if status.not_applied), key=lambda status: not status.matters
    )
    harmless = bool(failed) and not failed[0].matters and len(failed) < len(statuses)
    return failed[0] if failed and not harmless else option.report_applied()


def _find_sharing_object(loader: Any) -> Any:
    """Return the object that shards a loader's data and has the options as attributes, or None."""
    if isinstance(loader, DataLoaderDispatcher):
        return loader
    base = getattr(loader, "base_dataloader", loader)
    if isinstance(base.dataset, IterableDatasetShard):
        return base.dataset
    return find_shard(base)


def _sharing_status(option: RequestedOption, loader: Any) -> OptionStatus:
    holder = _find_sharing_object(loader)
    if holder is None:
        return option.report_not_applied("a loader is not sharded here: it is sharded already")
    loader_value = getattr(holder, option.name)
    return option.report_unless(
        "" if loader_value == option.value else f"a loader was prepared with {loader_value}"
    )


def _dispatch_status(option: RequestedOption, loader: Any) -> OptionStatus:
    one_reads = isinstance(loader, DataLoaderDispatcher)
    if one_reads == option.value:
        return option.report_applied()
    return option.report_not_applied(
        f"a loader is {'read by rank 0' if one_reads else 'read by every process for itself'}"
    )


def _sampler_status(option: RequestedOption, loader: Any) -> OptionStatus:
    sampler = get_sampler(getattr(loader, "base_dataloader", loader))
    if isinstance(sampler, SeedableRandomSampler):
        return option.report_applied()
    kind = type(sampler).__name__
    reason = f"a loader has a {kind}, which draws no order of ours"
    return option.report_not_applied(reason, matters=kind not in _IN_ORDER)


_IN_ORDER = (SequentialSampler.__name__, type(None).__name__, "_InfiniteConstantSampler")


def _non_blocking_status(option: RequestedOption, loader: Any) -> OptionStatus:
    device = getattr(loader, "device", None)
    if device is None or device.type == "cpu":
        return option.report_not_applied("batches stay on the host", matters=False)
    if not getattr(loader, "pin_memory", False):
        return option.report_not_applied(
            "copies wait unless memory is pinned: DataLoader(..., pin_memory=True)"
        )
    return option.report_unless("" if loader._non_blocking else "a loader was prepared without it")


def _attribute_status(option: RequestedOption, loader: Any) -> OptionStatus:
    same = getattr(loader, option.name, None) == option.value
    return option.report_unless("" if same else "a loader was prepared without it")


def _shard_status(option: RequestedOption, loader: Any) -> OptionStatus:
    shared = _find_sharing_object(loader) is not None
    return option.report_unless(
        "" if shared == option.value else f"a loader is {'' if shared else 'not '}sharded"
    )


def _legacy_status(option: RequestedOption, loader: Any) -> OptionStatus:
    sampler = get_sampler(getattr(loader, "base_dataloader", loader))
    given = loader.keeps_torch_numbers or getattr(sampler, "generator", None) is not None
    harmless = type(sampler) is not RandomSampler
    return option.report_unless("" if given or harmless else "a loader was prepared without it")


_STATUS_FUNCTIONS: dict[str, Callable[[RequestedOption, Any], OptionStatus]] = {
    "split_batches": _sharing_status,
    "even_batches": _sharing_status,
    "dispatch_batches": _dispatch_status,
    "shard": _shard_status,
    "use_seedable_sampler": _sampler_status,
    "data_seed": _sampler_status,
    "non_blocking": _non_blocking_status,
    "use_stateful_dataloader": _attribute_status,
    "legacy_random_numbers": _legacy_status,
    "rng_types": _attribute_status,
}
