"""CPU time per step that watching adds: ``--record``, 10 scalars to the jsonl tracker, ``--check_numerics``.

One process on the CPU, and a model so small (a linear layer, 8 to 1) that the rest of a step takes little.
Both loops are prepared; only one of them is watched, by an ``Accelerator`` of its own. Nothing here waits, so
the time of the processor is measured: other work on the machine counts less in it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.case import BenchError, Case, Sample, Subject, alternate, report, worker

STEPS = 400
BATCH = 4
SCALARS = 10
SETTINGS = {"record": "ACCELERATE_RECORD", "numerics": "ACCELERATE_CHECK_NUMERICS"}


def measure(kind: str):
    def run(subject: Subject, quick: bool) -> Sample:
        if subject.name != "ours":
            raise BenchError("1.15.0 has none of these")
        return worker(subject, __name__, kind, "8" if quick else "40")

    return run


CASES = (
    Case("added to a step by `--record`", "us", "added", None, measure("record"), peer_rounds=0),
    Case("added to a step by 10 scalars to jsonl", "us", "added", 20, measure("log"), peer_rounds=0),
    Case("added to a step by `--check_numerics`", "us", "added", None, measure("numerics"), peer_rounds=0),
)


def main(kind: str, blocks: int, folder: Path) -> None:
    import torch

    from accelerate import Accelerator

    features, targets = torch.randn(STEPS * BATCH, 8), torch.randn(STEPS * BATCH, 1)

    def make_loop(accelerator, logs: bool):
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        data = torch.utils.data.TensorDataset(features, targets)
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        values = {f"number {n}": n / 7 for n in range(SCALARS)}

        def loop() -> None:
            for step, (x, y) in enumerate(loader):
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if logs:
                    accelerator.log(values, step=step)

        return loop

    plain = make_loop(Accelerator(cpu=True), logs=False)
    if kind in SETTINGS:
        os.environ[SETTINGS[kind]] = str(folder) if kind == "record" else "1"
    accelerator = Accelerator(cpu=True, log_with="jsonl" if kind == "log" else None, project_dir=folder)
    if kind == "log":
        accelerator.init_trackers("numbers")
    watched = make_loop(accelerator, logs=kind == "log")
    sample = alternate(plain, watched, "added", blocks=blocks, steps=STEPS, clock=time.process_time)
    accelerator.end_training()
    key = {"record": "optimizer_step", "log": "values"}.get(kind)
    lines = [line for file in folder.rglob("*.jsonl") for line in file.read_text().splitlines()]
    records = [record for record in map(json.loads, lines) if key in record]
    if key is not None and len(records) != (blocks + 2) * STEPS:
        raise BenchError(f"{len(records)} records of {(blocks + 2) * STEPS} steps")
    report(sample)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(sys.argv[1], int(sys.argv[2]), Path(name))
