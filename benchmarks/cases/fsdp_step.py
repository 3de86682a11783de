"""A sharded training step on two processes, as a ratio to the model sharded by hand with ``fully_shard``.

Both loops live in the same two processes and are timed in turn: four blocks of a transformer (width 256, 8 x
32 tokens per process) in float32 with gloo, forward, backward, AdamW, zero_grad. By hand: each block and
then the whole through ``fully_shard``, over a DataLoader that reads this process's rows. Ours: model,
optimizer and loader through ``prepare``. Every loss of the two is compared, bit for bit. Rank 0's clock.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.case import Case, Sample, Subject, alternate, leave, report, worker

STEPS, BATCH, LENGTH, PROCESSES = 10, 8, 32, 2
WIDTH, LAYERS, WORDS = 256, 4, 512


def measure(subject: Subject, quick: bool) -> Sample:
    return worker(subject, __name__, "4" if quick else "16", processes=PROCESSES)


CASES = (Case("FSDP2 step, 2 processes, against `fully_shard` by hand", "us", "ratio", 1.02, measure, 5, 2),)


# --- in the environment of every subject ------------------------------------------------------------------


def block(width: int) -> Any:
    """A layer of a transformer, of torch's own class."""
    from torch import nn

    return nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)


def network(width: int = WIDTH, layers: int = LAYERS, words: int = WORDS) -> Any:
    """Embeddings, blocks and a head."""
    from torch import nn

    blocks = [block(width) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(words, width), *blocks, nn.Linear(width, words, bias=False))


def sharding(processes: int = PROCESSES) -> Any:
    """An accelerator that gathers each block by itself; checks that all processes met."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if accelerator.num_processes != processes:
        raise SystemExit(f"a world of {accelerator.num_processes} instead of {processes}")
    return accelerator


def by_hand(model: Any) -> Any:
    """The same layout with torch alone."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    for part in model:
        if isinstance(part, nn.TransformerEncoderLayer):
            fully_shard(part)
    return fully_shard(model)


def check_sharded(model: Any) -> None:
    """Refuses a subject that trains something else than it was asked.

    Raises:
        RuntimeError: the package took another strategy.
    """
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        raise RuntimeError(f"asked for FSDP2 on the CPU, it trains a {type(model).__name__}")


def main(blocks: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = sharding()
    torch.manual_seed(0)
    count = STEPS * BATCH * PROCESSES
    data = TensorDataset(torch.randint(0, WORDS, (count, LENGTH)), torch.randint(0, WORDS, (count, LENGTH)))

    def parts(shard: Any = lambda model: model) -> Any:
        torch.manual_seed(1)
        model = shard(network())
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, optimizer = parts(by_hand)
    first = accelerator.process_index * BATCH
    rows = [range(first + at, first + at + BATCH) for at in range(0, count, BATCH * PROCESSES)]
    loader = DataLoader(data, batch_sampler=rows)  # pyright: ignore[reportArgumentType]
    losses: tuple[list[Any], list[Any]] = ([], [])

    def raw() -> None:
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[0].append(loss.detach())

    whole = DataLoader(data, batch_size=BATCH)
    p_model, p_optimizer, p_loader = accelerator.prepare(*parts(), whole)
    check_sharded(p_model)

    def prepared() -> None:
        for x, y in p_loader:
            with accelerator.accumulate(p_model):
                loss = torch.nn.functional.cross_entropy(p_model(x).flatten(0, 1), y.flatten())
                accelerator.backward(loss)
                p_optimizer.step()
                p_optimizer.zero_grad()
            losses[1].append(loss.detach())

    sample = alternate(raw, prepared, "ratio", blocks=blocks, steps=STEPS, before=dist.barrier)
    if not torch.equal(torch.stack(losses[0]), torch.stack(losses[1])):
        raise SystemExit("the losses differ from those of the model that was sharded by hand")
    if accelerator.is_main_process:
        report(sample)
    accelerator.end_training()
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]))
