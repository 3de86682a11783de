"""Peak memory of sharded training, as a ratio to the same model sharded by hand with ``fully_shard``.

101 million parameters in float32, 8 blocks of width 1024, with AdamW on two gloo processes: three steps of
2 x 16 tokens per process. Each way is a program of its own. The figure is the highest memory of rank 0 while
it steps that is no page of a file (RssAnon), beyond what it had before it made the model; a note says the
same of making and sharding it. What is freed goes back to the system at once (MALLOC_MMAP_THRESHOLD_).
"""

from __future__ import annotations

import json
import sys

from benchmarks.case import BenchError, Case, Sample, Subject, compare, leave
from benchmarks.cases.big_load import Peak
from benchmarks.cases.fsdp_step import PROCESSES, by_hand, check_sharded, network, sharding

WIDTH, LAYERS, WORDS, STEPS = 1024, 8, 512, 3


def once(subject: Subject, way: str) -> dict[str, float]:
    """What one program took, in GB."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(PROCESSES)]
    settings = ["env", "MALLOC_MMAP_THRESHOLD_=65536", "MALLOC_TRIM_THRESHOLD_=65536"]
    _, text = subject.run([*settings, str(subject.python), *torchrun, "-m", __name__, way])
    lines = [line for line in text.splitlines() if line.startswith('{"steps"')]
    if not lines:
        raise BenchError("the worker ended without a result")
    return json.loads(lines[-1])


def measure(subject: Subject, quick: bool) -> Sample:
    """One round; the loss after the steps is compared bit for bit."""
    found: tuple[list[dict[str, float]], ...] = ([], [])
    for turn in range(1 if quick else 2):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            found[which].append(once(subject, ("hand", "prepared")[which]))
    if len({one["loss"] for side in found for one in side}) > 1:
        raise BenchError("the losses differ from those of the model that was sharded by hand")
    times = [[one["steps"] for one in side] for side in found]
    sample = compare(times[0], times[1], "ratio")
    made = f"{found[1][-1]['made']:.3g} GB, by hand {found[0][-1]['made']:.3g} GB"
    return Sample(sample.base, sample.value, sample.figure, sample.noise, {"making and sharding": made})


CASES = (
    Case("peak memory of FSDP2 steps, against `fully_shard` by hand", "GB", "ratio", 1.01, measure, 2, 1),
)


def main(way: str) -> None:
    import torch

    accelerator = sharding()
    torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()  # the first product starts torch's own pools
    torch.manual_seed(0)
    with Peak() as making:
        model = network(WIDTH, LAYERS, WORDS)
        if way == "hand":
            by_hand(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            model, optimizer = accelerator.prepare(model, optimizer)
    check_sharded(model)
    torch.manual_seed(accelerator.process_index)
    words = torch.randint(0, WORDS, (2, 17))
    loss = torch.zeros(())
    with Peak() as stepping:
        for _ in range(STEPS):
            loss = torch.nn.functional.cross_entropy(
                model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()
            )
            if way == "hand":
                loss.backward()
            else:
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    if accelerator.is_main_process:
        steps = stepping.highest - making.before
        print(json.dumps({"steps": steps, "made": making.grown, "loss": loss.item()}), flush=True)
    accelerator.end_training()
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
