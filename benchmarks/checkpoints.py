"""What the cases of checkpoints share: the state that is saved, room on the disk, rounds of many rows."""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.case import ROOT, BenchError, Sample, Subject
from benchmarks.journal import FOLDER

WIDTH, LAYERS, WORDS = 1024, 18, 40_000
PARAMETERS = WORDS * WIDTH + LAYERS * (12 * WIDTH**2 + 13 * WIDTH)
BYTES = 3 * 4 * PARAMETERS  # weights and both moments of AdamW
NEEDED = 12 * 10**9


def peer() -> Subject:
    """The public package, which these rows compare with.

    Raises:
        BenchError: its environment is not there.
    """
    python = ROOT / ".venv-peer" / "bin" / "python"
    if not python.exists():
        raise BenchError("1.15.0 is not there to compare with: `make bench-peer` makes its environment")
    return Subject("peer", python)


@contextmanager
def room() -> Generator[Path]:
    """An empty folder on the disk of the repository, removed afterwards.

    Raises:
        BenchError: the disk is too full.
    """
    FOLDER.mkdir(exist_ok=True)
    if shutil.disk_usage(FOLDER).free < NEEDED:
        raise BenchError(f"{NEEDED / 1e9:.0f} GB must be free on the disk of {FOLDER}")
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=FOLDER) as folder:
        yield Path(folder)


class Queue:
    """Rows that are measured together: a round of the first row to ask measures all.

    Args:
        take: one round of all rows; a text says why a row has no sample.
        rows: their names.
    """

    def __init__(self, take: Callable[[Subject, bool], dict[str, Sample | str]], rows: Sequence[str]) -> None:
        self.take, self.rows = take, rows
        self._waiting: dict[tuple[str, str], deque[Sample | str]] = {}

    def measure(self, row: str) -> Callable[[Subject, bool], Sample]:
        """The ``measure`` of a row's case."""

        def measure(subject: Subject, quick: bool) -> Sample:
            waiting = self._waiting.setdefault((subject.name, row), deque())
            if not waiting:
                for name, sample in self.take(subject, quick).items():
                    self._waiting.setdefault((subject.name, name), deque()).append(sample)
            sample = waiting.popleft()
            if isinstance(sample, str):
                raise BenchError(sample)
            return sample

        return measure


def training(full: bool, **options: Any) -> tuple[Any, Any, Any]:
    """(accelerator, model, optimizer): a transformer's parameters; ``full``: with the moments of AdamW."""
    import torch
    from torch import nn

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, **options)
    with torch.device("meta"):
        sizes = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
        layers = [
            nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), *(nn.Linear(*size) for size in sizes)])
            for _ in range(LAYERS)
        ]
        model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    for number, parameter in enumerate(model.parameters()):
        parameter.data.fill_(number if full else -1)
        if full:
            moments = torch.full_like(parameter, number + 0.25), torch.full_like(parameter, number + 0.5)
            step = torch.tensor(3.0)
            optimizer.state[parameter] = {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    return accelerator, *accelerator.prepare(model, optimizer)


def check(model: Any, optimizer: Any) -> None:
    """That the state is what ``training(full=True)`` makes."""
    state = getattr(optimizer, "optimizer", optimizer).state
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS
    for number, parameter in enumerate(model.parameters()):
        values = parameter, state[parameter]["exp_avg"], state[parameter]["exp_avg_sq"]
        for value, expected in zip(values, (number, number + 0.25, number + 0.5), strict=True):
            assert value.flatten()[0] == value.flatten()[-1] == expected, f"tensor {number} differs"
