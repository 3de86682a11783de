"""The callable that other starters of processes take: torch's ``spawn``, PyTorch/XLA's ``spawn``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.core import environ
from accelerate.core.errors import LaunchError
from accelerate.device import accelerators


class PrepareForLaunch:
    """Calls a function as one rank; can be pickled if the function can.

    It says to this process which rank it is (``RANK``, ``LOCAL_RANK``); the size and the address of the group
    are told by whoever starts the processes, as ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``. On
    several machines, ``NODE_RANK`` and ``NPROC`` say which this is, and how many processes each has.

    Args:
        launcher: the function.
        distributed_type: the type of the group, a ``DistributedType`` or its name.
        debug: open a gloo group over the file ``ACCELERATE_DEBUG_RDV_FILE`` instead.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: Any = "NO", debug: bool = False
    ) -> None:
        self.launcher, self.distributed_type, self.debug = launcher, distributed_type, debug

    def __call__(self, index: int, *args: Any) -> Any:
        """``launcher(*args)`` as rank ``index`` of this machine.

        Raises:
            LaunchError: debugging was asked for without its file or size.
        """
        environ.set_variables({"FORK_LAUNCHED": "1"})
        if self.debug or not self._is_placed_by_runtime():
            node, each = int(environ.get("NODE_RANK", "0") or 0), int(environ.get("NPROC", "1") or 1)
            environ.set_variables({"LOCAL_RANK": index, "RANK": node * each + index})
        if self.debug:
            _open_group(index)
        return self.launcher(*args)

    def _is_placed_by_runtime(self) -> bool:
        kind = str(getattr(self.distributed_type, "value", self.distributed_type))
        return any(device.starts_ranks and device.distributed_type == kind for device in accelerators())


def _open_group(rank: int) -> None:
    from torch import distributed

    file, size = environ.get("ACCELERATE_DEBUG_RDV_FILE"), environ.get("WORLD_SIZE")
    if file is None or size is None:
        raise LaunchError(
            "debug=True needs the variables ACCELERATE_DEBUG_RDV_FILE and WORLD_SIZE",
            why="the ranks meet through that file",
            fix="call debug_launcher, which sets everything itself",
        )
    store = distributed.FileStore(file, int(size))  # pyright: ignore[reportPrivateImportUsage]
    distributed.init_process_group("gloo", rank=rank, world_size=int(size), store=store)
