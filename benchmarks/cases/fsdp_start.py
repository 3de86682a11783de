"""From the start of two processes to the end of the first step of a sharded model of a billion parameters.

20 blocks of width 2048 in bf16, 2.0 GB of safetensors that are in the page cache; SGD, one sequence of 8
tokens per process. The wall time of the whole command, torchrun and imports with it. By hand: made on the
meta device, `fully_shard`, `to_empty`, and torch.distributed.checkpoint, whose reader of safetensors gives
each process its slices. Ours: `init_empty_weights`, `load_checkpoint_in_model`, `prepare`; on the CPU the
package asks torch for large pages of memory, and most of the time by hand is first writes to small ones. The
losses of the step are compared bit for bit. Memory: the peak of rank 0 that is no page of a file, until it is
sharded.
"""

from __future__ import annotations

import atexit
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.case import BenchError, Case, Sample, Subject, compare, leave
from benchmarks.cases.big_load import Peak, cached
from benchmarks.cases.fsdp_step import PROCESSES, by_hand, check_sharded, network, sharding
from benchmarks.checkpoints import Queue, room

WIDTH, BLOCKS, WORDS, TOKENS = 2048, 20, 4096, 8
_open = ExitStack()
_saved: list[Path] = []


def saved(subject: Subject) -> Path:
    """The weights; they are made once, and removed when this program ends."""
    if not _saved:
        atexit.register(_open.close)
        folder = _open.enter_context(room()) / "model"
        subject.run([str(subject.python), "-m", __name__, "save", str(folder)])
        _saved.append(folder)
    return _saved[0]


def once(subject: Subject, way: str, folder: Path) -> dict[str, float]:
    """What one program took."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(PROCESSES)]
    seconds, text = subject.run([str(subject.python), *torchrun, "-m", __name__, way, str(folder)])
    lines = [line for line in text.splitlines() if line.startswith('{"loss"')]
    if not lines:
        raise BenchError("the worker ended without a result")
    return {"seconds": seconds} | json.loads(lines[-1])


def take(subject: Subject, quick: bool) -> dict[str, Sample | str]:
    """One round of both rows."""
    folder = saved(subject)
    cached(folder)
    found: tuple[list[dict[str, float]], ...] = ([], [])
    for turn in range(1 if quick else 2):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            found[which].append(once(subject, ("hand", "prepared")[which], folder))
    if len({one["loss"] for side in found for one in side}) > 1:
        raise BenchError("the losses differ from those of the model that was sharded by hand")
    rows = {}
    for row in ("seconds", "memory"):
        sides = [[one[row] for one in side] for side in found]
        rows[row] = compare(sides[0], sides[1], "ratio" if row == "seconds" else "total")
    return rows


QUEUE = Queue(take, ("seconds", "memory"))
SHARE = 1.01  # GB: half of the model
CASES = (
    Case("start to first step of a sharded model of 1B", "s", "ratio", 1.0, QUEUE.measure("seconds"), 2, 1),
    Case(
        "peak memory of loading a sharded model of 1B, a share is 1.01 GB",
        "GB",
        "total",
        1.2 * SHARE,
        QUEUE.measure("memory"),
        2,
        1,
    ),
)


# --- in the environment of every subject ------------------------------------------------------------------


def model() -> Any:
    import torch

    torch.set_default_dtype(torch.bfloat16)
    return network(WIDTH, BLOCKS, WORDS)


def save(folder: Path) -> None:
    """Writes the files with safetensors alone."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in model().state_dict().items()}
    torch.manual_seed(0)
    table: dict[str, str] = {}
    names = list(shapes)
    for shard, start in enumerate(range(0, len(names), 64), 1):
        file = f"model-{shard:05d}-of-{-(-len(names) // 64):05d}.safetensors"
        values = {n: torch.randn(shapes[n]) * 0.02 for n in names[start : start + 64]}
        save_file(values, folder / file, metadata={"format": "pt"})
        table |= dict.fromkeys(values, file)
    index = {"metadata": {"total_size": 0}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def sharded_by_hand(folder: Path) -> tuple[Any, Any]:
    """(model, optimizer) with torch alone."""
    import torch
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with torch.device("meta"):
        made = model()
    made = by_hand(made).to_empty(device="cpu")
    state = made.state_dict()
    load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    return made, torch.optim.SGD(made.parameters(), lr=1e-3)


def main(way: str, folder: Path) -> None:
    if way == "save":
        save(folder)
        return
    import torch
    import torch.distributed as dist

    with Peak() as peak:
        if way == "hand":
            dist.init_process_group("gloo")
            rank, accelerator = dist.get_rank(), None
            made, optimizer = sharded_by_hand(folder)
        else:
            from accelerate import init_empty_weights, load_checkpoint_in_model

            accelerator = sharding()
            rank = accelerator.process_index
            with init_empty_weights():
                made = model()
            load_checkpoint_in_model(made, str(folder))
            made, optimizer = accelerator.prepare(made, torch.optim.SGD(made.parameters(), lr=1e-3))
    check_sharded(made)
    words = torch.arange(TOKENS + 1)[None] + rank
    loss = torch.nn.functional.cross_entropy(made(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
    (accelerator.backward if accelerator else torch.Tensor.backward)(loss)
    optimizer.step()
    if rank == 0:
        print(json.dumps({"loss": loss.item(), "memory": peak.grown}), flush=True)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
