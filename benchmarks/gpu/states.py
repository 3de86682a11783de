"""Weights between the accelerator and the disk, against torch and safetensors by hand.

``save`` and ``save-async`` are `save_state`, against `torch.save` of the same weights. ``load`` is
`load_checkpoint_and_dispatch` to the device, against `safetensors` reading the same files there. A cold load
finds none of the pages in memory. Sizes are in MB of 1e6 bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.case import BenchError, Sample, compare, report
from benchmarks.cases.offload_gpu import accelerator

LAYERS = 16


def need_room(folder: Path, size: int) -> None:
    """Refuse to fill the disk.

    Raises:
        BenchError: less is free than ``size`` bytes and a tenth.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < 1.1 * size:
        raise BenchError(
            f"{size / 1e9:.1f} GB are needed on the disk of {folder}, {free / 1e9:.1f} GB are free"
        )


def width_of(size: int) -> int:
    """The width of a layer where all take ``size`` bytes in float32."""
    return int((size / LAYERS / 4) ** 0.5)


def model_of(size: int) -> Any:
    """Linear layers of ``size`` bytes, on the device that is the default one."""
    from torch import nn

    width = width_of(size)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(LAYERS)])


def timed(work: Callable[[], object]) -> float:
    """Seconds of a call, the device's work included."""
    _, module = accelerator()
    module.synchronize()
    start = time.perf_counter()
    work()
    module.synchronize()
    return time.perf_counter() - start


def save(folder: Path, size: int, background: bool, rounds: int) -> Sample:
    """Saves by hand and by `save_state` in turn; the first of each make memory that the others use again."""
    import torch

    from accelerate import Accelerator

    need_room(folder, size)
    where, _ = accelerator()
    package = Accelerator()
    with torch.device(where):
        model = package.prepare(model_of(size))
    target = folder / "state"
    options: dict[str, Any] = {"async_save": True} if background else {}

    def by_hand() -> float:
        target.mkdir()
        return timed(lambda: torch.save(model.state_dict(), target / "by-hand.pt"))

    def by_package() -> float:
        seconds = timed(lambda: package.save_state(str(target), **options))
        if background:
            package.wait_for_checkpoint()
        return seconds

    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            times[which].append((by_hand, by_package)[which]())
            written = sum(path.stat().st_size for path in target.rglob("*"))
            shutil.rmtree(target)
            if written < 0.95 * size:
                raise BenchError(f"{written} bytes were written instead of {size}")
    sample = compare(times[0][1:], times[1][1:], "ratio")
    facts = {"by hand": f"{size / sample.base / 1e9:.2f} GB/s"}
    if background:
        facts["the first one, without memory for the copy:"] = f"{times[1][0]:.3f} s"
    return replace(sample, facts=facts)


def write_files(folder: Path, size: int) -> list[Path]:
    """The shards of a model, made once per run: a layer each, all of the same values."""
    import torch
    from safetensors.torch import save_file

    index = folder / "model.safetensors.index.json"
    if not index.exists():
        need_room(folder, size)
        with torch.device("meta"):
            names = list(model_of(size).state_dict())
        value = torch.rand(width_of(size), width_of(size))
        table = {name: f"part-{number}.safetensors" for number, name in enumerate(names)}
        for name, file in table.items():
            save_file({name: value}, folder / file)
        index.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": table}))
    return sorted(folder.glob("*.safetensors"))


def forget_pages(files: list[Path]) -> None:
    """Take the files out of the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(folder: Path, size: int, cold: bool, rounds: int) -> Sample:
    """Loads by hand and by the package in turn; each begins with an empty device."""
    import torch
    from safetensors.torch import load_file

    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    where, module = accelerator()
    files = write_files(folder, size)

    def by_hand() -> Any:
        if where == "cuda":
            return [load_file(path, device="cuda:0") for path in files]
        return [{name: value.to(where) for name, value in load_file(path).items()} for path in files]

    def by_package() -> Any:
        with init_empty_weights():
            model = model_of(size)
        model = load_checkpoint_and_dispatch(model, str(folder), device_map={"": 0})
        weight = next(model.parameters())
        if weight.device.type != where or not bool(torch.isfinite(weight[-1]).all()):
            raise BenchError("the model was not loaded to the device")
        return model

    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for which, work in enumerate((by_hand, by_package)):
            if cold:
                forget_pages(files)
            seconds = timed(work)
            module.empty_cache()
            if turn:
                times[which].append(seconds)
    sample = compare(*times, "ratio")
    facts = {"the package:": f"{size / sample.value / 1e9:.2f} GB/s"}
    return replace(sample, facts=facts)


if __name__ == "__main__":
    what, place, megabytes, rounds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    if what.startswith("save"):
        report(save(place / what, megabytes * 10**6, what == "save-async", rounds))
    else:
        report(load(place / f"load-{megabytes}", megabytes * 10**6, what == "load-cold", rounds))
