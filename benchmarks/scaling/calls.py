"""The calls that are measured on many ranks, each beside the same work by hand.

Imported by every rank in the environment of every subject: torch, ``accelerate`` and the standard library
only, and the former two inside functions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Loop = Callable[[], object]


@dataclass(frozen=True)
class Call:
    """One call of the library.

    Attributes:
        make: world size -> one step by hand, and one step of the library. Runs on every rank.
        steps: of a block on one rank; ``size`` ranks take as many in all, since they share the cores.
        target: an upper bound of the ratio from 8 ranks on; None: the row informs.
        unit: what the times are shown in, "us" or "ms".
    """

    make: Callable[[int], tuple[Loop, Loop]]
    steps: int
    target: float | None = None
    unit: str = "us"


def accelerator_of(size: int, **settings: Any) -> Any:
    """An accelerator of ``size`` ranks on the CPU.

    Raises:
        SystemExit: the ranks did not meet.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, **settings)
    if accelerator.num_processes != size:
        raise SystemExit(f"a world of {accelerator.num_processes} instead of {size}")
    return accelerator


def reduce_scalar(size: int) -> tuple[Loop, Loop]:
    import torch
    import torch.distributed as dist

    accelerator, scalar = accelerator_of(size), torch.tensor(1.0)
    return lambda: dist.all_reduce(scalar.clone()), lambda: accelerator.reduce(scalar, "sum")


def barrier(size: int) -> tuple[Loop, Loop]:
    import torch.distributed as dist

    accelerator = accelerator_of(size)
    return dist.barrier, accelerator.wait_for_everyone


def broadcast_tensor(size: int) -> tuple[Loop, Loop]:
    import torch
    import torch.distributed as dist

    from accelerate.utils import broadcast

    accelerator_of(size)
    values = torch.ones(256)
    return lambda: dist.broadcast(values, 0), lambda: broadcast(values, 0)


def gather_bytes(count: int) -> Callable[[int], tuple[Loop, Loop]]:
    """A gather of ``count`` bytes of each rank."""

    def make(size: int) -> tuple[Loop, Loop]:
        import torch
        import torch.distributed as dist

        accelerator, values = accelerator_of(size), torch.ones(count // 4)
        # Renamed in torch 2.13, where the old name warns.
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        by_hand = getattr(dist, name)
        return (
            lambda: by_hand(torch.empty(size * len(values)), values),
            lambda: accelerator.gather(values),
        )

    return make


def gather_objects(size: int) -> tuple[Loop, Loop]:
    """The 16 answers of a batch on each rank: an id, a text of 40 characters and a score each."""
    import torch.distributed as dist

    from accelerate.utils import gather_object

    rank = accelerator_of(size).process_index
    mine = [{"id": 16 * rank + i, "text": f"{i:04d} words" * 4, "score": i / 16} for i in range(16)]

    def by_hand() -> list[object]:
        every: list[Any] = [None] * size
        dist.all_gather_object(every, mine)
        return [item for part in every for item in part]

    if by_hand() != gather_object(mine):
        raise SystemExit("they gather different objects")
    return by_hand, lambda: gather_object(mine)


def dispatch(size: int) -> tuple[Loop, Loop]:
    """A batch of 8 rows of 64 numbers for each rank, read by rank 0; by hand, all rows are broadcast."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    from accelerate.utils import DataLoaderConfiguration

    batch, count = 8, 8 * size * 20
    settings = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = accelerator_of(size, dataloader_config=settings)
    rank = accelerator.process_index
    data = TensorDataset(torch.randn(count, 64), torch.arange(count))
    loader = DataLoader(data, batch_size=batch * size)
    prepared = accelerator.prepare(DataLoader(data, batch_size=batch))

    def by_hand() -> None:
        source = iter(loader) if rank == 0 else None
        for _ in range(20):
            x, y = (
                next(source) if source else (torch.empty(batch * size, 64), torch.empty(batch * size).long())
            )
            dist.broadcast(x, 0)
            dist.broadcast(y, 0)
            x[rank * batch : (rank + 1) * batch].clone(), y[rank * batch : (rank + 1) * batch].clone()

    def ours() -> None:
        if sum(len(x) for x, _ in prepared) != 20 * batch:
            raise SystemExit("a rank got other rows than its own")

    return by_hand, ours


def train_step(size: int) -> tuple[Loop, Loop]:
    """A step of a perceptron (256-512-512-10, 4 samples on each rank) under DDP."""
    import torch
    from torch.nn import functional as F

    accelerator = accelerator_of(size)
    x, y = torch.randn(4, 256), torch.randint(0, 10, (4,))

    def parts() -> tuple[Any, Any]:
        layers = [torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(512, 10))
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    plain, optimizer = parts()
    replica = torch.nn.parallel.DistributedDataParallel(plain)
    model, p_optimizer = accelerator.prepare(*parts())

    def by_hand() -> None:
        F.cross_entropy(replica(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def ours() -> None:
        accelerator.backward(F.cross_entropy(model(x), y))
        p_optimizer.step()
        p_optimizer.zero_grad()

    return by_hand, ours


def save_sharded(size: int) -> tuple[Loop, Loop]:
    """A transformer of a million parameters and AdamW's moments under FSDP2, saved into one folder again."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    from benchmarks.cases.fsdp_checkpoint import trained
    from benchmarks.cases.fsdp_step import by_hand, check_sharded, network, sharding

    accelerator = sharding(size)
    rooms: list[Any] = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(rooms, 0)
    raw, ours = (str(Path(rooms[0], name)) for name in ("raw", "ours"))
    model = by_hand(network(128, 4, 512))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained(model, optimizer)
    p_model = network(128, 4, 512)
    p_model, p_optimizer = accelerator.prepare(p_model, torch.optim.AdamW(p_model.parameters(), lr=1e-3))
    check_sharded(p_model)
    trained(p_model, p_optimizer)

    def save_by_hand() -> None:
        weights, moments = get_state_dict(model, optimizer)
        save({"model": weights, "optimizer": moments}, checkpoint_id=raw)

    return save_by_hand, lambda: accelerator.save_state(ours)


CALLS = {
    "reduce of a scalar": Call(reduce_scalar, 400, 1.3),
    "barrier": Call(barrier, 400, 1.3),
    "broadcast of 1 KB": Call(broadcast_tensor, 400, 1.3),
    "gather of 4 B": Call(gather_bytes(4), 400, 1.1),
    "gather of 1 KB": Call(gather_bytes(1024), 400, 1.1),
    "gather of 1 MB": Call(gather_bytes(2**20), 40, 1.1, "ms"),
    "gather of objects": Call(gather_objects, 200),
    "20 dispatched batches": Call(dispatch, 4, None, "ms"),
    "DDP step": Call(train_step, 80, None, "ms"),
    "sharded `save_state`": Call(save_sharded, 1, None, "ms"),
}
