# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.data.active_loaders import DataLoaderStateMixin as DataLoaderStateMixin
from accelerate.data.batch_sampler_shard import BatchSamplerShard as BatchSamplerShard
from accelerate.data.dispatch import DataLoaderDispatcher as DataLoaderDispatcher
from accelerate.data.epoch_order import get_sampler as get_sampler
from accelerate.data.iterable_dataset import IterableDatasetShard as IterableDatasetShard
from accelerate.data.loader import DataLoaderAdapter as DataLoaderAdapter
from accelerate.data.loader import DataLoaderShard as DataLoaderShard
from accelerate.data.prepare import BatchSampler as BatchSampler
from accelerate.data.prepare import DataLoader as DataLoader
from accelerate.data.prepare import IterableDataset as IterableDataset
from accelerate.data.prepare import RandomSampler as RandomSampler
from accelerate.data.prepare import prepare_data_loader as prepare_data_loader
from accelerate.data.sample_order import SeedableRandomSampler as SeedableRandomSampler
from accelerate.data.skip_first_batches import SkipBatchSampler as SkipBatchSampler
from accelerate.data.skip_first_batches import SkipDataLoader as SkipDataLoader
from accelerate.data.skip_first_batches import skip_first_batches as skip_first_batches
from typing import Any

_PYTORCH_DATALOADER_KWARGS: Any
logger: Any

def __getattr__(name: str) -> Any: ...
