"""Two ranks against torch.distributed by hand, in turn in the same processes; rank 0's clock.

``ddp`` and ``fsdp2`` are training steps. ``gather`` and ``reduce`` are the time until the call returns, the
device not being waited for. Where there is one card for both ranks the process group is gloo's, which goes
through the host: NCCL refuses two ranks of one card.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from benchmarks.case import Sample, alternate, leave, report
from benchmarks.cases.offload_gpu import accelerator

BATCH, LAYERS = 8, 4


def open_accelerator(kind: str) -> Any:
    """The package's accelerator over both ranks."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, InitProcessGroupKwargs

    _, module = accelerator()
    options: dict[str, Any] = {}
    if module.device_count() < 2:
        options["kwargs_handlers"] = [InitProcessGroupKwargs(backend="gloo")]
    if kind == "fsdp2":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
        )
    package = Accelerator(**options)
    if package.num_processes != 2:
        raise SystemExit(f"a world of {package.num_processes} instead of 2")
    return package


def by_hand(kind: str, model: Any) -> Any:
    """The model as one spreads it with torch alone."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    for part in model:
        if isinstance(part, nn.TransformerEncoderLayer):
            fully_shard(part)
    return fully_shard(model)


def training(
    package: Any, kind: str, width: int, steps: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The two loops over batches that are on the device already."""
    import torch
    from torch import nn

    _, module = accelerator()
    batches = [torch.randn(BATCH, 16, width, device=package.device) for _ in range(steps)]

    def parts(spread: Callable[[Any], Any]) -> tuple[Any, Any]:
        torch.manual_seed(1)
        blocks = [
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        ]
        model = spread(nn.Sequential(*blocks))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, optimizer = parts(lambda model: by_hand(kind, model.to(package.device)))
    p_model, p_optimizer = package.prepare(*parts(lambda model: model))

    def raw() -> None:
        for batch in batches:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        module.synchronize()

    def prepared() -> None:
        for batch in batches:
            with package.accumulate(p_model):
                package.backward(p_model(batch).square().mean())
                p_optimizer.step()
                p_optimizer.zero_grad()
        module.synchronize()

    return raw, prepared


def exchanging(
    package: Any, kind: str, width: int, steps: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The two loops of collectives; checks that they give the same values."""
    import torch
    import torch.distributed as dist

    mine = torch.rand(width, width, device=package.device) + package.process_index

    def by_torch() -> torch.Tensor:
        if kind == "reduce":
            out = mine.clone()
            dist.all_reduce(out)
            return out
        parts = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(parts, mine)
        return torch.cat(parts)

    def by_package() -> torch.Tensor:
        return package.reduce(mine, "sum") if kind == "reduce" else package.gather(mine)

    if not torch.equal(by_torch(), by_package()):
        raise SystemExit("they give different values")

    def raw() -> None:
        for _ in range(steps):
            by_torch()

    def prepared() -> None:
        for _ in range(steps):
            by_package()

    return raw, prepared


def main(kind: str, width: int, steps: int, blocks: int) -> None:
    import torch.distributed as dist

    package = open_accelerator(kind)
    _, module = accelerator()
    loops = (training if kind in ("ddp", "fsdp2") else exchanging)(package, kind, width, steps)

    def ready() -> None:
        module.synchronize()
        dist.barrier()

    sample: Sample = alternate(*loops, "ratio", blocks=blocks, steps=steps, before=ready)
    if package.is_main_process:
        report(sample)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
