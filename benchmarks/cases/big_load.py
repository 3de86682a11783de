"""Models larger than memory on the CPU: made without weights, loaded, run. raw is named in each row.

Making: a Llama of 70 billion parameters (transformers, from a configuration made here), the time of the
processor that the program takes, in turn with `with torch.device("meta")` in the same program.

Loading: 32 blocks of two matrices, fp32, 4.3 GB in safetensors of 1 GB, which are in the page cache. Each
load is one of a new program, into a model that `init_empty_weights` has made; the results of a forward are
compared. In the second row the map puts the 32 blocks on disk. raw is reading the files.

The forward is one of 16 rows, in turn with the same model in memory; the first two are dropped, a note gives
the very first, in which the pages of the files are found.

Memory: the peak without pages of files (RssAnon) beyond what the program had before, over load and forward.
Written: what the program has sent to the disk (wchar of /proc/self/io), and the files of the offload folder,
which 1.15.0 writes through a mapping.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.case import BenchError, Case, Sample, Subject, report, worker
from benchmarks.checkpoints import Queue, room

WIDTH, BLOCKS, ROWS = 2048, 32, 16
BYTES = 4 * BLOCKS * 8 * WIDTH**2
NAMES = ("load", "load disk", "written", "forward", "memory", "memory disk")
_open = ExitStack()
_saved: list[Path] = []


def saved(subject: Subject) -> Path:
    """The files; they are made once, and removed when this program ends."""
    if not _saved:
        atexit.register(_open.close)
        folder = _open.enter_context(room()) / "model"
        subject.run([str(subject.python), "-m", __name__, "save", str(folder)])
        _saved.append(folder)
    return _saved[0]


def cached(folder: Path) -> float:
    """Brings all files into the page cache; the seconds that this takes when they are there."""
    buffer, start = bytearray(2**20), 0.0
    for _ in range(2):
        start = time.perf_counter()
        for path in folder.iterdir():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
    return time.perf_counter() - start


def take(subject: Subject, quick: bool) -> dict[str, Sample | str]:
    """One round of all rows."""
    folder = saved(subject)
    raw = cached(folder)
    found: dict[str, dict[str, float]] = {}
    for place in ("cpu", "disk"):
        _, text = subject.run([str(subject.python), "-m", __name__, place, str(folder)], timeout=600)
        found[place] = json.loads(text.splitlines()[-1])
    cpu, disk = found["cpu"], found["disk"]
    first = {"very first forward": f"{disk['first']:.2f} s"}
    return {
        "load": Sample(raw, cpu["load"], cpu["load"], 0.0),
        "load disk": Sample(raw, disk["load"], disk["load"], 0.0),
        "written": Sample(0.0, disk["written"], disk["written"], 0.0),
        "forward": Sample(disk["memory_forward"], disk["forward"], disk["ratio"], disk["noise"], first),
        "memory": Sample(0.0, cpu["anonymous"], cpu["anonymous"], 0.0),
        "memory disk": Sample(0.0, disk["anonymous"], disk["anonymous"], 0.0),
    }


def make(subject: Subject, quick: bool) -> Sample:
    """One round of making a model without weights."""
    return worker(subject, __name__, "make", str(10 if quick else 40))


QUEUE = Queue(take, NAMES)
CASES = (
    Case("`init_empty_weights` of a 70B Llama, against `torch.device('meta')`", "ms", "ratio", 1.15, make),
    Case("load 4.3 GB of safetensors to the CPU", "s", "total", 0.15, QUEUE.measure("load"), 3, 2),
    Case("load 4.3 GB with 32 blocks on disk", "s", "total", 0.15, QUEUE.measure("load disk"), 3, 2),
    Case(
        "bytes written by loading with 32 blocks on disk",
        "MB",
        "total",
        0.001,
        QUEUE.measure("written"),
        3,
        2,
    ),
    Case("forward with 32 blocks on disk, cached", "s", "ratio", 1.15, QUEUE.measure("forward"), 3, 2),
    Case(
        "anonymous memory of load and forward on the CPU", "GB", "total", 0.3, QUEUE.measure("memory"), 3, 2
    ),
    Case(
        "anonymous memory of load and forward with 32 blocks on disk",
        "GB",
        "total",
        0.3,
        QUEUE.measure("memory disk"),
        3,
        2,
    ),
)


# --- in the environment of every subject ------------------------------------------------------------------


def model() -> Any:
    from torch import nn

    blocks = [
        nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        )
        for _ in range(BLOCKS)
    ]
    return nn.Sequential(*blocks, nn.LayerNorm(WIDTH))


def save(folder: Path) -> None:
    """Writes the files with safetensors alone, a shard at a time."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in model().state_dict().items()}
    names, shards = list(shapes), BLOCKS // 8
    table: dict[str, str] = {}
    torch.manual_seed(0)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[16 * shard : None if shard == shards - 1 else 16 * (shard + 1)]
        values = {name: torch.randn(shapes[name]) / shapes[name][-1] ** 0.5 for name in mine}
        save_file(values, folder / file, metadata={"format": "pt"})
        table |= dict.fromkeys(mine, file)
    index = {"metadata": {"total_size": BYTES}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def anonymous() -> float:
    """Memory of this process that is no page of a file, in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024 / 1e9


def written() -> int:
    """Bytes that this process has written."""
    (line,) = [row for row in Path("/proc/self/io").read_text().splitlines() if row.startswith("wchar:")]
    return int(line.split()[1])


class Peak:
    """The largest ``anonymous()`` while a block runs."""

    def __enter__(self) -> Peak:
        self.before = self.highest = anonymous()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self.highest = max(self.highest, anonymous())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()
        self.highest = max(self.highest, anonymous())

    @property
    def grown(self) -> float:
        return self.highest - self.before


def once(place: str, folder: Path) -> None:
    """Prints what one load, and forwards after it, took."""
    import torch
    from safetensors.torch import load_file

    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    torch.nn.Linear(2, 2)(torch.ones(1, 2))  # the first product starts torch's own pools
    with init_empty_weights():
        empty = model()
    places: dict[str, Any] = {str(number): place for number in range(BLOCKS)} | {str(BLOCKS): "cpu"}
    x = torch.randn(ROWS, WIDTH)
    with tempfile.TemporaryDirectory(dir=folder.parent) as folder_for_disk, torch.no_grad():
        before = written()
        with Peak() as peak:
            start = time.perf_counter()
            loaded = load_checkpoint_and_dispatch(empty, folder, places, offload_folder=folder_for_disk)
            seconds = time.perf_counter() - start
            out = written() - before + sum(p.stat().st_size for p in Path(folder_for_disk).rglob("*"))
            start = time.perf_counter()
            result = loaded(x)
            first = time.perf_counter() - start
        facts = {"load": seconds, "first": first, "anonymous": peak.grown, "written": out / 1e6}
        if place == "disk":
            real = model_of(load_file, folder)
            facts |= forwards(lambda: real(x), lambda: loaded(x))
            assert torch.equal(result, real(x)), "the results differ"
    print(json.dumps(facts))


def model_of(load_file: Any, folder: Path) -> Any:
    """The model in memory of its own."""
    import torch

    with torch.device("meta"):
        real = model()
    for path in folder.glob("*.safetensors"):
        values = {name: value.clone() for name, value in load_file(path).items()}
        real.load_state_dict(values, strict=False, assign=True)
    return real


def forwards(base: Any, value: Any) -> dict[str, float]:
    """Times of both in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(8):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            start = time.perf_counter()
            (base, value)[which]()
            times[which].append(time.perf_counter() - start)
    ours = [b / a for a, b in zip(times[0][2:], times[1][2:], strict=True)]
    noise = [abs(b / a - 1) for a, b in zip(times[0][2:], times[0][3:], strict=False)]
    return {
        "memory_forward": median(times[0][2:]), "forward": median(times[1][2:]), "ratio": median(ours),
        "noise": median(noise) / len(noise) ** 0.5,
    }  # fmt: skip


def makes(count: int) -> None:
    """Prints what making the model took, in both ways in turn."""
    import gc

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from accelerate import init_empty_weights

    config = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    contexts = (lambda: torch.device("meta"), init_empty_weights)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(count):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            gc.collect()
            start = time.process_time()
            with contexts[which]():
                made = LlamaForCausalLM(config)
            times[which].append((time.process_time() - start) * 1e3)
            assert all(p.is_meta for p in made.parameters())
    base, value = times[0][2:], times[1][2:]
    noise = [abs(b / a - 1) for a, b in pairwise(base)]
    figure = median(b / a for a, b in zip(base, value, strict=True))
    report(Sample(median(base), median(value), figure, median(noise) / len(noise) ** 0.5))


def main(what: str, argument: str) -> None:
    if not Path("/proc/self/io").exists():
        raise BenchError("memory and writes are looked at on Linux only")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if what == "make":
        makes(int(argument))
    elif what == "save":
        save(Path(argument))
    else:
        once(what, Path(argument))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
