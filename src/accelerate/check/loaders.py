"""Checks of data loaders: every sample comes once in an epoch, on one rank."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate.check.base import expect, expect_equal
from accelerate.data.configuration import DataLoaderConfiguration
from accelerate.facade.accelerator import Accelerator
from accelerate.world import collective

_BATCH, _STEPS, _EPOCHS = 4, 3, 2


def check_even_epochs(accelerator: Accelerator) -> str:
    """Check epochs in which every step is full: all ranks see equally many samples."""
    count = _full_step_samples(accelerator)
    _check_coverage(Accelerator(), count)
    return f"{count} samples, {count // accelerator.num_processes} on each rank, in {_EPOCHS} epochs"


def check_uneven_epochs(accelerator: Accelerator) -> str:
    """Check epochs whose last step is not full."""
    count = _full_step_samples(accelerator) + 1
    _check_coverage(Accelerator(), count)
    return f"{count} samples, the last step not full, each counted once"


def check_shuffled_epochs(accelerator: Accelerator) -> str:
    """Check that orders differ between epochs and are the same on all ranks."""
    count = _full_step_samples(accelerator) + 1
    orders = _check_coverage(Accelerator(), count, shuffle=True)
    expect(orders[0] != list(range(count)), "the order is not shuffled")
    expect(orders[0] != orders[1], "two epochs have the same order")
    return f"{count} samples, another order in each epoch"


def check_dispatched_epochs(accelerator: Accelerator) -> str:
    """Check epochs that rank 0 reads and dispatches to all ranks."""
    count = _full_step_samples(accelerator) + 1
    _check_coverage(Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True)), count)
    return f"{count} samples, read by rank 0"


def _full_step_samples(accelerator: Accelerator) -> int:
    return _BATCH * _STEPS * accelerator.num_processes


def _check_coverage(accelerator: Accelerator, count: int, *, shuffle: bool = False) -> list[list[int]]:
    """Return the samples of each epoch in the order of ``gather_for_metrics``; each must occur once."""
    data = DataLoader(TensorDataset(torch.arange(count)), batch_size=_BATCH, shuffle=shuffle)
    loader = accelerator.prepare(data)
    orders: list[list[int]] = []
    for epoch in range(_EPOCHS):
        seen: list[int] = []
        num_rows = 0
        for (batch,) in loader:
            expect_equal(batch.device.type, accelerator.device.type, "the device of a batch")
            num_rows += len(batch)
            seen += accelerator.gather_for_metrics(batch).tolist()
        missing, twice = set(range(count)) - {*seen}, len(seen) - len({*seen})
        expect(not missing, f"epoch {epoch} leaves out {len(missing)} of {count}: {sorted(missing)[:5]}")
        expect(not twice, f"epoch {epoch} counts {twice} of {count} samples twice")
        shares = collective.gather_object([num_rows])
        expect(len({*shares}) == 1, f"ranks have shares of different sizes: {shares}")
        if count % (_BATCH * accelerator.num_processes) == 0:
            expect_equal(sum(shares), count, "the number of rows on all ranks")
        orders.append(seen)
    return orders
