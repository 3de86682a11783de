"""Calls whose outcome is written down as plain values, to be compared between two packages of one name.

``python -m tests.clients.probe SCRIPT ...`` runs a script that may import torchvision.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import importlib
import io
import json
import logging
import random
import runpy
import sys
import tempfile
import warnings
from collections import UserDict
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

if TYPE_CHECKING:
    from tests.support.ranks import RankServer

Jobs = Mapping[str, Callable[[Path], Any]]
PLAIN = (str, int, float, bool, type(None))


def plain(value: Any, depth: int = 0) -> Any:
    """``value`` as JSON: values as they are, containers with their class, everything else by its class."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}={value.value}"
    if type(value) in PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return f"tensor {value.dtype} {value.device.type} {value.detach().float().tolist()}"
    if isinstance(value, torch.dtype | torch.device | torch.Size | timedelta | Path | bytes):
        return f"{type(value).__name__} {value}"
    if depth > 6:
        return "..."
    if isinstance(value, Mapping | UserDict):
        return {f"{_class(value)} {key}": plain(item, depth + 1) for key, item in value.items()} or _class(
            value
        )
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [_class(value), *(plain(item, depth + 1) for item in items)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f"{_class(value)} {f.name}": plain(getattr(value, f.name), depth + 1)
            for f in dataclasses.fields(value)
        }
    if isinstance(value, type):
        return f"class {value.__name__}"
    return _class(value)


def _class(value: Any) -> str:
    # A prepared model may be of a subclass made for it; its users see the class they wrote.
    return type(value).__name__


class Probe:
    """Writes down calls by name.

    Attributes:
        notes: what each gave.
    """

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}

    def __call__(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """One call: what it returns or raises. An error stands for what its caller can catch."""
        assert name not in self.notes, f"two calls are named {name}"
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                self.notes[name] = plain(function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - the error is the result
            kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            self.notes[name] = {"raises": kinds[: kinds.index("Exception")] or ["Exception"]}

    def values(self, prefix: str, owner: Any, names: str) -> None:
        """The attributes of an object, one note each."""
        for name in names.split():
            self(f"{prefix}.{name}", getattr, owner, name)


def run_jobs(module: str, folder: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Run the named jobs of a client module on this rank, all without names; the result went through JSON."""
    jobs: Jobs = importlib.import_module(module).JOBS
    logging.disable(logging.WARNING)
    return json.loads(json.dumps({name: jobs[name](Path(folder) / name) for name in names or jobs}))


def run_jobs_on_ranks(
    ranks: RankServer, size: int, module: str, *names: str, env: Mapping[str, object | None] | None = None
) -> dict[str, Any]:
    """Run jobs of a client module on forked ranks, ``env`` beside their variables; the result of rank 0."""
    from tests.support.ranks import NO_LAUNCHER

    env = {**(NO_LAUNCHER if size == 1 else {}), **(env or {})}
    with tempfile.TemporaryDirectory() as folder:
        return ranks(size, run_jobs, module, folder, names, timeout=200, env=env)[0]


def declare_torchvision_operators() -> None:
    """Let torchvision be imported beside a torch for the CPU.

    The registry's torchvision is built for CUDA: its operators do not load, and its import describes two of
    them. They are declared, without a kernel; what reads and transforms pictures needs none.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _DECLARED.append(library := torch.library.Library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")


_DECLARED: list[torch.library.Library] = []  # A library that is collected takes its operators away.


def main(jobs: Jobs) -> None:
    """Run jobs (all, or those named) and write what rank 0 saw to a file."""
    declare_torchvision_operators()
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("jobs", nargs="*", default=list(jobs))
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    results = {name: jobs[name](given.folder / name) for name in given.jobs}
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        given.out.write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    declare_torchvision_operators()
    sys.argv = sys.argv[1:]
    # A script may have no seed of its own.
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))  # where a script's own modules lie
    runpy.run_path(sys.argv[0], run_name="__main__")
