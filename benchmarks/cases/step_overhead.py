"""Time per step that the prepared loop adds to the same loop in raw torch.

One process on the CPU and a model so small (a linear layer, 8 to 1) that torch itself takes little: what is
left is the library. A step is: next batch, ``accumulate``, forward, ``backward``, ``optimizer.step``,
``scheduler.step``, ``zero_grad``. An epoch of the loader is timed as a whole, its start included.
"""

from __future__ import annotations

import sys

from benchmarks.case import Case, Sample, Subject, alternate, report, worker

STEPS = 400
BATCH = 4


def measure(precision: str):
    def run(subject: Subject, quick: bool) -> Sample:
        return worker(subject, __name__, precision, "8" if quick else "40")

    return run


CASES = (
    Case("added to a training step, fp32", "us", "added", 20, measure("no"), peer_rounds=2),
    Case("added to a training step, bf16", "us", "added", 25, measure("bf16"), peer_rounds=2),
)


def main(precision: str, blocks: int) -> None:
    import torch

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    features, targets = torch.randn(STEPS * BATCH, 8), torch.randn(STEPS * BATCH, 1)

    def parts():
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        data = torch.utils.data.TensorDataset(features, targets)
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
        return model, optimizer, scheduler, loader

    model, optimizer, scheduler, loader = parts()
    lower = torch.bfloat16 if precision == "bf16" else None

    def raw() -> None:
        for x, y in loader:
            if lower is None:
                output = model(x)
            else:
                with torch.autocast("cpu", lower):
                    output = model(x)
                output = output.float()
            loss = torch.nn.functional.mse_loss(output, y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    p_model, p_optimizer, p_scheduler, p_loader = accelerator.prepare(*parts())

    def prepared() -> None:
        for x, y in p_loader:
            with accelerator.accumulate(p_model):
                loss = torch.nn.functional.mse_loss(p_model(x), y)
                accelerator.backward(loss)
                p_optimizer.step()
                p_scheduler.step()
                p_optimizer.zero_grad()

    report(alternate(raw, prepared, "added", blocks=blocks, steps=STEPS))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
