"""Prepared loaders that are torchdata's ``StatefulDataLoader`` too, with its ``state_dict``.

The state is the one that torchdata's iterator gives for the batch in hand. What it cannot say, the epoch and
the order of the samples, is in the entry that torchdata has for the state of the sampler: a state that holds
this position is resumed exactly, and one of torchdata or of Accelerate 1.x by the number of its batches.

Imported where ``use_stateful_dataloader`` is set only: it needs torchdata.
"""

from __future__ import annotations

import copy
import logging
from functools import lru_cache
from typing import Any

from torch.utils.data import BatchSampler as TorchBatchSampler
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler
from torchdata.stateful_dataloader.worker import try_to_serialize

from accelerate.data.batch_source import read_loader_state
from accelerate.data.epoch_order import fetches_by_index, inner_sampler, torch_digest
from accelerate.data.sample_order import SeedableRandomSampler, is_known, is_random
from accelerate.world import collective

_logger = logging.getLogger(__name__)

# The entry of torchdata's state that holds the position; torchdata leaves it None for samplers without state.
_SLOT = "_index_sampler_state"
_POSITION = "accelerate_position"


class StatefulIndexLoader(StatefulDataLoader[Any]):
    """The base of a prepared loader: torchdata's iterator over indices that the prepared loader sets."""

    fetches_given_indices = True


def convert(loader: Any) -> None:
    """Make a prepared loader or an adapter, and its base, loaders of torchdata, in place."""
    loader.base_dataloader = as_stateful(loader.base_dataloader)
    prepared = hasattr(type(loader), "load_state_dict") and hasattr(type(loader), "total_batch_size")
    loader.__class__ = stateful_class(type(loader), TorchdataState if prepared else TorchdataAdapter)
    loader.records_loader_state = True


def as_stateful(loader: DataLoader[Any]) -> StatefulDataLoader[Any]:
    """Return a loader of torchdata over the same data, samplers and options; such a loader as it is."""
    if isinstance(loader, StatefulDataLoader):
        return loader
    kind = type(loader)
    twin = copy.copy(loader)
    # Torch forbids these assignments after construction; the copy has not been iterated yet.
    twin.__dict__["_iterator"] = None
    twin.__dict__.update(snapshot_every_n_steps=1, next_iter_state=None, _initial_iter_for_state_dict=False)
    if isinstance(loader.dataset, IterableDataset) and type(loader.batch_sampler) is TorchBatchSampler:
        batches = loader.batch_sampler
        twin.__dict__["batch_sampler"] = BatchSampler(batches.sampler, batches.batch_size, batches.drop_last)
    twin.__class__ = StatefulIndexLoader if kind is DataLoader else stateful_class(kind)
    return twin  # type: ignore[return-value]


@lru_cache
def stateful_class(kind: type[Any], methods: type[Any] | None = None) -> type[Any]:
    """Return a subclass of a loader's class that is a subclass of torchdata's, too.

    Args:
        kind: the loader's class.
        methods: a class whose functions become methods. It is no base: an object may change its class only
            to one that begins with the same base.
    """
    own = {} if methods is None else {name: f for name, f in vars(methods).items() if callable(f)}
    more = {"__module__": kind.__module__, "__reduce_ex__": _reduce, "made_of": (kind, methods)}
    return type(kind.__name__, (kind, StatefulDataLoader), {**own, **more})


def _reduce(loader: Any, protocol: Any) -> Any:
    """Pickle an object whose class is made when it is needed."""
    return _rebuild, (type(loader).made_of,), dict(loader.__dict__)


def _rebuild(made_of: tuple[type[Any], type[Any] | None]) -> Any:
    return object.__new__(stateful_class(*made_of))


class TorchdataState:
    """The state of a prepared loader in torchdata's form: methods for its class."""

    position: Any
    _full_base: Any
    _indexed: list[Any]
    _fetches_per_step: int
    reads_ahead: bool
    position_state: Any
    load_position: Any

    def state_dict(self) -> dict[str, Any]:
        """Return torchdata's state for the batch in hand, with the position of the loader.

        Nothing is started or drawn for it, also before the first batch.
        """
        if self.position.torchdata_state is not None:
            return dict(self.position.torchdata_state)
        base, epoch = self._full_base, self.position.current
        state = None if epoch is None else epoch.loader_state
        if state is None:
            # Of a stream, that of the batch in hand is in the epoch, or the data have none.
            if epoch is not None and self._indexed and not self.reads_ahead and fetches_by_index(base):
                state = read_loader_state(self._indexed[0][1])
            state = state or _initial_state(base, with_data=epoch is None)
            state = _with_count(state, 0 if epoch is None else epoch.batches)
        slot = {_POSITION: self.position_state(), "rank": collective.rank()}
        finished = epoch is not None and epoch.complete
        return {**_with_main(state, **{_SLOT: slot}), "_iterator_finished": finished}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the state was saved; of this class, of torchdata, or of Accelerate 1.x.

        The next iteration yields the rest of the epoch. A state without the position counts batches: the
        order is then the one that the sampler gives next.
        """
        if "_iterator_finished" not in state_dict:  # a position alone
            self.load_position(state_dict)
            return
        slot = _main_part(state_dict).get(_SLOT)
        if isinstance(slot, dict) and _POSITION in slot:
            if not self.load_position(slot[_POSITION]):
                return
            own = slot["rank"] == collective.rank()
        else:
            self.load_position({"epoch": self.position.iteration})
            own = collective.world_size() == 1
            self.position.counted_batches = 0 if state_dict["_iterator_finished"] else self._count(state_dict)
            if self.position.counted_batches:
                _warn_of_order(self._full_base)
        self.position.torchdata_state = dict(state_dict)
        base = self._full_base
        workers = _main_part(state_dict).get("_num_workers", 0)
        if own and workers == base.num_workers and not state_dict["_iterator_finished"]:
            self.position.restored_state = _state_to_restore(state_dict)

    def _count(self, state: dict[str, Any]) -> int:
        """Count the steps that a state of torchdata has given."""
        fetches = (
            state["_num_yielded"]
            if "_num_yielded" in state
            else (state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"])
        )
        return fetches // self._fetches_per_step


class TorchdataAdapter:
    """The state of a ``DataLoaderAdapter``, which is that of its base: methods for its class."""

    base_dataloader: Any

    def __iter__(self) -> Any:
        return iter(self.base_dataloader)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the base loader."""
        return self.base_dataloader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the base loader."""
        self.base_dataloader.load_state_dict(state_dict)


def _main_part(state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a state that is the main process's, and not the workers'."""
    return state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state


def _with_main(state: dict[str, Any], **entries: Any) -> dict[str, Any]:
    """Return a copy of a state with other entries in the main process's part."""
    if "_snapshot" not in state:
        return {**state, **entries}
    main = {**_main_part(state), **entries}
    return {**state, "_snapshot": {**state["_snapshot"], "_main_snapshot": main}}


def _with_count(state: dict[str, Any], batches: int) -> dict[str, Any]:
    """Return a copy of a state in which batches count that were left out before the first one."""
    if "_snapshot" not in state:
        return _with_main(state, _sampler_iter_yielded=batches, _num_yielded=batches)
    count = batches - state["_steps_since_snapshot"]
    state = _with_main(state, _sampler_iter_yielded=count)
    state["_snapshot"]["_snapshot_step"] = count
    return state


def _initial_state(base: Any, with_data: bool) -> dict[str, Any]:
    """Return the state of an iterator that gave nothing yet, without starting one.

    Args:
        base: the loader.
        with_data: with the state of data that have one.
    """
    data = base.dataset
    state = try_to_serialize(data) if with_data else None
    stream = isinstance(data, IterableDataset)
    fetcher = {"dataset_iter_state": None, "fetcher_ended": False} if stream else None
    common = {
        "_index_sampler_state": None,
        "_sampler_iter_state": {"samples_yielded": 0} if stream and base.batch_size is not None else None,
        "_sampler_iter_yielded": 0,
        "_IterableDataset_len_called": None,
        "_shared_seed": None,
    }
    if base.num_workers == 0:
        return {
            **common,
            "_num_yielded": 0,
            "fetcher_state": fetcher,
            "dataset_state": state,
            "_iterator_finished": False,
        }
    workers = {
        f"worker_{worker}": {"worker_id": worker, "dataset_state": state, "fetcher_state": fetcher}
        for worker in range(base.num_workers)
    }
    snapshot = {
        "_snapshot_step": 0,
        "_last_yielded_worker_id": base.num_workers - 1,
        "_main_snapshot": {**common, "_num_workers": base.num_workers, "_base_seed": torch_digest()},
        "_worker_snapshots": workers,
    }
    return {"_snapshot": snapshot, "_steps_since_snapshot": 0, "_iterator_finished": False}


def _state_to_restore(state: dict[str, Any]) -> dict[str, Any] | None:
    """Return the state for torchdata's iterator where data or samplers have a state of their own, or None."""
    snapshot = state.get("_snapshot", {})
    parts = list(snapshot.get("_worker_snapshots", {"": state}).values())
    fetchers = [part["fetcher_state"] or {} for part in parts]
    sampler = _main_part(state)["_sampler_iter_state"] or {}
    has_state = (
        any(part["dataset_state"] is not None for part in parts)
        or any(fetcher.get("dataset_iter_state") is not None for fetcher in fetchers)
        or "sampler_iter_state" in sampler
        or "sampler_state" in sampler
    )
    return state if has_state else None


def _warn_of_order(base: Any) -> None:
    sampler = inner_sampler(base)
    if is_known(sampler) and is_random(sampler) and type(sampler) is not SeedableRandomSampler:
        _logger.warning(
            "the loaded state counts batches and does not hold the order of a shuffled loader: the rest of "
            "this epoch is taken from a new order, so samples may be repeated or left out. A state that is "
            "saved from now on holds it; with use_seedable_sampler=True and set_epoch(epoch) the order is "
            "the same."
        )
