"""The public options of prepared loaders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from accelerate.core.argument_checks import check_arguments
from accelerate.core.value_types import Seed


@check_arguments
@dataclass
class DataLoaderConfiguration:
    """Options of every loader that is prepared after they are set.

    Attributes:
        split_batches: the loader's batch size is that of all processes together, and each takes a part of
            every batch; otherwise each process takes whole batches in turn.
        dispatch_batches: rank 0 reads and sends each process its part. None does so for an iterable dataset,
            unless it is sharded already. With False each process reads for itself: its own files of a stream
            of ``datasets`` whose ``num_shards`` is a multiple of their number, else the whole stream, of
            which it keeps its part.
        even_batches: the last step is filled from the beginning of the data, so that all processes have the
            same number of batches, of equal size; ``loader.real`` tells how many rows of the batch in hand
            are no fillers. Otherwise each process gets what there is for it, which may be no batch at all.
        use_seedable_sampler: the order is a function of ``data_seed`` and the epoch.
        data_seed: seed of that order; None takes torch's initial seed.
        non_blocking: copies to the device do not wait (needs pinned memory to have an effect).
        shard: share the data out over the processes: True always, False never; "auto" keeps what each process
            has where it is sharded already (by a ``DistributedSampler``, ``split_dataset_by_node``, a sampler
            or stream that knows its rank), and says so.
        use_stateful_dataloader: after a checkpoint is loaded, a loader goes on by itself where it was in its
            epoch, instead of beginning that epoch again for ``skip_first_batches``. Where torchdata is
            installed, loaders are instances of its ``StatefulDataLoader``, and ``state_dict`` has its form.
        legacy_random_numbers: the random numbers of Accelerate 1.x. On several processes, a random sampler
            without a generator gets one, seeded by a draw in ``prepare``. On one process, workers and streams
            draw what they draw in plain torch; after a resume inside an epoch they then draw other numbers.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: Seed | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    shard: bool | Literal["auto"] = "auto"
    legacy_random_numbers: bool = False
