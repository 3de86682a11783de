"""Finding a device map for a model of 15,000 parameters, on the meta device.

7,500 linear layers in 100 blocks; a third of it fits the two accelerators that are asked for, which need not
be here. The raw work is what nobody can avoid: to look once at every parameter's name and size.
"""

from __future__ import annotations

import sys

from benchmarks.case import BenchError, Case, Sample, Subject, alternate, report, worker

BLOCKS, LAYERS = 100, 75


def measure(subject: Subject, quick: bool) -> Sample:
    return worker(subject, __name__, "2" if quick else "8")


CASES = (Case("`infer_auto_device_map`, 15,000 parameters", "us", "total", 100_000, measure, peer_rounds=2),)


def main(blocks: int) -> None:
    import torch

    from accelerate import infer_auto_device_map

    with torch.device("meta"):
        layers = [[torch.nn.Linear(8, 8) for _ in range(LAYERS)] for _ in range(BLOCKS)]
        model = torch.nn.Sequential(*(torch.nn.Sequential(*each) for each in layers))
    total = sum(parameter.nbytes for parameter in model.parameters())
    budgets = {0: total // 6, 1: total // 6, "cpu": total}

    def raw() -> None:
        if sum(parameter.nbytes for _, parameter in model.named_parameters()) != total:
            raise BenchError("parameters are missing")

    def infer() -> None:
        found = infer_auto_device_map(model, budgets)
        if set(found.values()) != {0, 1, "cpu"}:
            raise BenchError(f"the map names {set(found.values())}")

    report(alternate(raw, infer, "total", blocks=blocks, steps=1))


if __name__ == "__main__":
    main(int(sys.argv[1]))
