"""Does every sample come once in an epoch, on one rank?"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate.check.base import equal, expect
from accelerate.data.configuration import DataLoaderConfiguration
from accelerate.facade.accelerator import Accelerator
from accelerate.world import collective

_BATCH, _STEPS, _EPOCHS = 4, 3, 2


def even(accelerator: Accelerator) -> str:
    """As many samples as fill every step: no rank sees more than its share."""
    count = _whole(accelerator)
    _covered(Accelerator(), count)
    return f"{count} samples, {count // accelerator.num_processes} on each rank, in {_EPOCHS} epochs"


def uneven(accelerator: Accelerator) -> str:
    """A last step that is not full."""
    count = _whole(accelerator) + 1
    _covered(Accelerator(), count)
    return f"{count} samples, the last step not full, each counted once"


def shuffled(accelerator: Accelerator) -> str:
    """Orders differ between epochs, and are one order on all ranks."""
    count = _whole(accelerator) + 1
    orders = _covered(Accelerator(), count, shuffle=True)
    expect(orders[0] != list(range(count)), "the order is not shuffled")
    expect(orders[0] != orders[1], "two epochs have the same order")
    return f"{count} samples, another order in each epoch"


def dispatched(accelerator: Accelerator) -> str:
    """Rank 0 reads, and sends each rank its part."""
    count = _whole(accelerator) + 1
    _covered(Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True)), count)
    return f"{count} samples, read by rank 0"


def _whole(accelerator: Accelerator) -> int:
    return _BATCH * _STEPS * accelerator.num_processes


def _covered(accelerator: Accelerator, count: int, *, shuffle: bool = False) -> list[list[int]]:
    """The samples of each epoch in the order in which metrics count them; every one must be there once."""
    data = DataLoader(TensorDataset(torch.arange(count)), batch_size=_BATCH, shuffle=shuffle)
    loader = accelerator.prepare(data)
    orders: list[list[int]] = []
    for epoch in range(_EPOCHS):
        seen: list[int] = []
        own = 0
        for (batch,) in loader:
            equal(batch.device.type, accelerator.device.type, "the device of a batch")
            own += len(batch)
            seen += accelerator.gather_for_metrics(batch).tolist()
        missing, twice = set(range(count)) - {*seen}, len(seen) - len({*seen})
        expect(not missing, f"epoch {epoch} leaves out {len(missing)} of {count}: {sorted(missing)[:5]}")
        expect(not twice, f"epoch {epoch} counts {twice} of {count} samples twice")
        shares = collective.gather_object([own])
        expect(len({*shares}) == 1, f"ranks have shares of different sizes: {shares}")
        if count % (_BATCH * accelerator.num_processes) == 0:
            equal(sum(shares), count, "the number of rows on all ranks")
        orders.append(seen)
    return orders
