"""What a dispatched model costs where nothing has to be moved: 200 linear layers, 8 to 8, on the CPU.

The map names every layer, and hooks are asked for. The base is the same model that was never dispatched. A
forward is timed, without gradients.
"""

from __future__ import annotations

import sys

from benchmarks.case import BenchError, Case, Sample, Subject, alternate, report, worker

LAYERS = 200
STEPS = 20


def measure(subject: Subject, quick: bool) -> Sample:
    return worker(subject, __name__, "8" if quick else "40")


CASES = (Case("200 tiny layers dispatched, nothing to move", "us", "ratio", 1.3, measure, peer_rounds=2),)


def main(blocks: int) -> None:
    import torch

    from accelerate import dispatch_model

    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(LAYERS)])

    plain, x = model(), torch.randn(4, 8)
    # Without force_hooks both libraries attach nothing where a map has one device.
    places = {str(place): "cpu" for place in range(LAYERS)}
    dispatched = dispatch_model(model(), places, force_hooks=True)

    def run(net) -> None:
        with torch.no_grad():
            for _ in range(STEPS):
                net(x)

    with torch.no_grad():
        if not torch.equal(dispatched(x), plain(x)):
            raise BenchError("the dispatched model computes something else")
    report(alternate(lambda: run(plain), lambda: run(dispatched), "ratio", blocks=blocks, steps=STEPS))


if __name__ == "__main__":
    main(int(sys.argv[1]))
