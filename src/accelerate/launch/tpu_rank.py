"""Starts a function of a script in one process for each device that PyTorch/XLA drives on this machine.

Run as ``python -m accelerate.launch.tpu_rank FUNCTION COUNT PORT script|module TARGET ARGUMENTS...``. COUNT
is how many processes there have to be on all machines, 0 for any number; PORT is that of rank 0, 0 for a free
one.

Not run on a TPU: written to the interface of torch_xla 2.9, tested with a fake one. Source: PyTorch/XLA
documentation, "PJRT Runtime" and "torch_xla.launch".
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from contextlib import closing
from types import ModuleType
from typing import Any

import accelerate.device as devices
from accelerate.core import environ
from accelerate.core.errors import LaunchError, nearest
from accelerate.world.network import LOOPBACK, ReservedPort


def main(function: str, count: str, port: str, kind: str, target: str, *arguments: str) -> None:
    """Start the processes and wait for them."""
    if kind == "script":
        sys.path[0] = os.path.dirname(os.path.realpath(target))
    # The processes are started afresh with this path and these arguments.
    sys.argv = [target, *arguments]
    import torch_xla

    with closing(ReservedPort(int(port))) as reserved_port:
        args = (function, int(count), reserved_port.number, kind)
        torch_xla.launch(run_rank, args=args, debug_single_process=count == "1")


def run_rank(index: int, function: str, count: int, port: int, kind: str) -> None:
    """Become one of the processes: tell it who it is, and call the function of the script."""
    runtime = importlib.import_module("torch_xla.runtime")
    size = runtime.world_size()
    if count > 1 and count != size:
        raise LaunchError(
            f"{count} processes are asked for, but the devices of this TPU make {size}",
            why="there is one process for each device",
            fix=f"--num_processes {size}, or leave it out",
        )
    told = devices.get("xla").runtime_rank()
    if size > 1 and not told:
        raise LaunchError(
            "this torch_xla does not say that it has started the process",
            why="PJRT_LOCAL_PROCESS_RANK is not set, and each process would train alone",
            fix="install the torch_xla of torch's version: pip install torch==2.9.0 torch_xla==2.9.0",
        )
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": 0}
    told = told or {**alone, "MASTER_ADDR": LOOPBACK}
    environ.set_variables({**told, "MASTER_PORT": port, "FORK_LAUNCHED": 1})
    target_function = _find_function(_import_script(kind, sys.argv[0]), function)
    # A function for torch_xla's own spawn takes its index.
    target_function(*([index] if _needs_argument(target_function) else []))


def _import_script(kind: str, target: str) -> ModuleType:
    """The script as a module, so that what it does under ``__main__`` is left out."""
    if kind == "module":
        return importlib.import_module(target)
    stem = os.path.splitext(os.path.basename(target))[0]
    name = stem if stem not in sys.modules else f"{stem}_script"
    spec = importlib.util.spec_from_file_location(name, target)
    if spec is None or spec.loader is None:
        raise LaunchError(f"{target} is no Python file", why="on a TPU a function of the script is called")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _find_function(module: ModuleType, function: str) -> Any:
    if not hasattr(module, function):
        near = nearest(function, (name for name, value in vars(module).items() if callable(value)))
        raise LaunchError(
            f"{module.__file__} has no function {function}",
            why="on a TPU a function of the script is called in each process, not the script run",
            fix=f"--main_training_function {near or '...'}",
        )
    return getattr(module, function)


def _needs_argument(function: Any) -> bool:
    """Return whether a function requires an argument."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return any(each.kind in kinds and each.default is each.empty for each in parameters)


if __name__ == "__main__":
    main(*sys.argv[1:])
