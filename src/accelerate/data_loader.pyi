# Written by `python -m accelerate.core.stubs accelerate.names` from the table of names. Do not edit.
# ruff: noqa

from accelerate.data.dispatch import DataLoaderDispatcher as DataLoaderDispatcher
from accelerate.data.loader import DataLoaderAdapter as DataLoaderAdapter
from accelerate.data.loader import DataLoaderShard as DataLoaderShard
from accelerate.data.loader import DataLoaderStateMixin as DataLoaderStateMixin
from accelerate.data.loader import SkipDataLoader as SkipDataLoader
from accelerate.data.loader import get_sampler as get_sampler
from accelerate.data.loader import skip_first_batches as skip_first_batches
from accelerate.data.prepare import prepare_data_loader as prepare_data_loader
from accelerate.data.shard import BatchSamplerShard as BatchSamplerShard
from accelerate.data.shard import SeedableRandomSampler as SeedableRandomSampler
from accelerate.data.shard import SkipBatchSampler as SkipBatchSampler
from accelerate.data.stream import IterableDatasetShard as IterableDatasetShard
from typing import Any

logger: Any

def __getattr__(name: str) -> Any: ...
