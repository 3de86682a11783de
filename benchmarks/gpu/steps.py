"""A training step on the accelerator against the same step in raw torch, in turn in one process.

A perceptron, SGD. Small batches come from host memory; large ones, where kernels take the time, are on the
device. It is waited for at the end of each block, not within. ``loader`` steps through the batches only.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from benchmarks.case import Sample, alternate, report
from benchmarks.cases.offload_gpu import accelerator

BATCH = 32
LAYERS, LAYERS_OF_LARGE = 3, 6


class Loops:
    """The raw loop and the prepared loop of one kind.

    Args:
        kind: ``"no" "bf16" "fp16" "fp8"``, ``"compile"`` or ``"loader"``.
        width: of the layers.
        steps: of one block.
        backend: of torch.compile; ``"-"``: nothing is compiled.
        batch: rows of a batch.
    """

    def __init__(self, kind: str, width: int, steps: int, backend: str, batch: int = BATCH) -> None:
        import torch

        self.where, self.module = accelerator()
        self.kind, self.width, self.steps, self.backend = kind, width, steps, backend
        self.layers = LAYERS if batch == BATCH else LAYERS_OF_LARGE
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(steps * batch, width, generator=generator)
        self.data = torch.utils.data.TensorDataset(rows, rows.flip(1))
        self.batches: list[Any] = []
        if batch != BATCH:
            there = rows.to(self.where)
            self.batches = [*zip(there.split(batch), there.flip(1).split(batch), strict=True)]

    def parts(self, where: str = "cpu") -> tuple[Any, Any, Any, Any]:
        """Model, optimizer, scheduler and loader, the same each time."""
        import torch
        from torch import nn

        torch.manual_seed(1)
        linear = [nn.Linear(self.width, self.width) for _ in range(self.layers)]
        model = nn.Sequential(linear[0], nn.ReLU(), *linear[1:]).to(where)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        pinned = self.where == "cuda"
        loader: Any = self.batches or torch.utils.data.DataLoader(
            self.data, batch_size=BATCH, pin_memory=pinned
        )
        return model, optimizer, scheduler, loader

    def float8_config(self) -> Any:
        """The options of torchao; the simulated accelerator has no units for 8-bit floats."""
        from torchao.float8 import Float8LinearConfig

        return Float8LinearConfig(pad_inner_dim=True, emulate=self.where == "sim")

    def raw(self, by_torchao: bool = False) -> Callable[[], None]:
        """The loop as it is written without the package; for fp8 the one of bf16, or that of torchao."""
        import torch

        model, optimizer, scheduler, loader = self.parts(self.where)
        if by_torchao:
            from torchao.float8 import convert_to_float8_training

            config = self.float8_config()
            # The package leaves the first and the last layer as they are.
            inner = {str(number) for number in range(2, self.layers)}
            convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in inner)
        if self.backend != "-":
            model = torch.compile(model, backend=self.backend)
        lower = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}.get(self.kind)
        scaler = torch.amp.GradScaler(self.where, enabled=self.kind == "fp16")

        def loop() -> None:
            for batch in loader:
                x, y = (part.to(self.where, non_blocking=True) for part in batch)
                if self.kind == "loader":
                    continue
                with torch.autocast(self.where, lower) if lower else nullcontext():
                    output = model(x)
                loss = torch.nn.functional.mse_loss(output.float(), y)
                del output  # the prepared loop has no name for it either
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad()
            self.module.synchronize()

        return loop

    def prepared(self) -> Callable[[], None]:
        """The loop with the package."""
        import torch

        from accelerate import Accelerator

        precision = "no" if self.kind in ("compile", "loader") else self.kind
        options: dict[str, Any] = {"mixed_precision": precision}
        if self.kind == "fp8":
            from accelerate.utils import AORecipeKwargs

            options["kwargs_handlers"] = [AORecipeKwargs(config=self.float8_config())]
        if self.backend != "-":
            options["dynamo_backend"] = self.backend
        package = Accelerator(**options)
        if package.device.type != self.where:
            raise SystemExit(f"the package computes on {package.device}, the raw loop on {self.where}")
        *parts, loader = self.parts()
        model, optimizer, scheduler = package.prepare(*parts)
        if not self.batches:
            loader = package.prepare(loader)

        def loop() -> None:
            for x, y in loader:
                if x.device.type != self.where:
                    raise SystemExit(f"a batch is on {x.device}")
                if self.kind == "loader":
                    continue
                with package.accumulate(model):
                    loss = torch.nn.functional.mse_loss(model(x), y)
                    package.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            self.module.synchronize()

        return loop

    def peak(self, make: Callable[[], Callable[[], None]]) -> float:
        """The most memory of the device in MB that a loop takes."""
        gc.collect()
        self.module.empty_cache()
        self.module.reset_peak_memory_stats()
        before = self.module.memory_allocated()
        loop = make()
        loop()
        loop()
        return (self.module.max_memory_allocated() - before) / 1e6


def main(
    kind: str, figure: str, width: int, steps: int, blocks: int, backend: str, batch: int = BATCH
) -> Sample:
    """One row; ``figure``: ``added``, ``ratio`` (of times), ``torchao`` (the ratio to it) or ``memory``."""
    loops = Loops(kind, width, steps, backend, batch)
    raw = partial(loops.raw, figure == "torchao" or (figure, kind) == ("memory", "fp8"))
    if figure == "memory":
        # The first products take workspaces of the libraries, which stay: neither loop is to pay for them.
        loops.peak(raw)
        base, value = loops.peak(raw), loops.peak(loops.prepared)
        return Sample(base, value, value / base, 0.0)
    shape = "added" if figure == "added" else "ratio"
    return alternate(raw(), loops.prepared(), shape, blocks=blocks, steps=steps)


if __name__ == "__main__":
    width, steps, blocks = map(int, sys.argv[3:6])
    report(main(sys.argv[1], sys.argv[2], width, steps, blocks, sys.argv[6], *map(int, sys.argv[7:])))
