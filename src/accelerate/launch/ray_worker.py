"""The actor of one process of a job on Ray, and the launcher that the first one on a machine runs there."""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import IO, Any

import accelerate.device as devices
from accelerate.core import environ
from accelerate.launch.base import Variables
from accelerate.launch.job_scheduler import OUTER_LAUNCH_VARIABLE
from accelerate.launch.logs import read_lines
from accelerate.launch.rank_reports import RANK_SCRIPT, report_folder
from accelerate.launch.supervisor import GuardProcess
from accelerate.world.network import ReservedPort

STOP_TIMEOUT = 12.0  # seconds that a launcher has, whose ranks have 3, before the guard kills it
# What a scheduler or launcher around Ray's own processes says to them: not about the ranks of this job.
_SURROUNDING = re.compile(
    r"(SLURM|OMPI|PMI|PMIX|HYDRA|MPI|LSB|LSF|MV2|PET|TORCHELASTIC|ROLE|GROUP|LOCAL|MASTER)_\w+|RANK|WORLD_SIZE"
)

Message = dict[str, Any]


class RayWorker:
    """The actor of one bundle. The first one on a machine runs the launcher there.

    Args:
        folder: the working folder of the driver, used where this machine has it and the job no other.
    """

    def __init__(self, folder: str) -> None:
        import ray

        self._context = ray.get_runtime_context()
        if "working_dir" not in self._context.runtime_env and os.path.isdir(folder):
            os.chdir(folder)
        self._port: ReservedPort | None = None
        self._launcher: subprocess.Popen[bytes] | None = None

    def describe(self) -> Message:
        """Return the machine of this worker, and the variables by which Ray shows it devices."""
        import ray.util

        names = (device.visible_variable for device in devices.accelerators())
        visible = {name: value for name in names if name and (value := environ.get(name))}
        address = ray.util.get_node_ip_address()
        return {"node": self._context.get_node_id(), "address": address, "visible": visible}

    def reserve_port(self) -> int:
        """Return a port of this machine that is free until its launcher listens there."""
        self._port = ReservedPort()
        return self._port.number

    def run(
        self, flags: Sequence[str], program: Sequence[str], variables: Variables, parcel: bytes | None
    ) -> Iterator[Message]:
        """Run the launcher; yield its output, and at the end its exit code, its error and its ranks' files.

        Args:
            flags: of ``accelerate launch``.
            program: the script; not used with a parcel.
            variables: of its environment.
            parcel: a function to call, as ``payload.write_payload`` has it.
        """
        with report_folder() as folder, GuardProcess(STOP_TIMEOUT) as guard:
            # No file of this machine says more than the flags do.
            (folder / "settings.yaml").write_text("{}\n", encoding="utf-8")
            own_flags = ("--config_file", f"{folder}/settings.yaml", "--stop_timeout", "3")
            if parcel is not None:
                (folder / "parcel").write_bytes(parcel)
                program = (RANK_SCRIPT, "function", str(folder / "parcel"), str(folder))
            surrounding = dict.fromkeys(key for key in environ.snapshot() if _SURROUNDING.fullmatch(key))
            own: Variables = {
                "ACCELERATE_ERROR_FILE": folder / "error",
                "PYTHONUNBUFFERED": "1",
                OUTER_LAUNCH_VARIABLE: None,
            }
            launcher = self._launcher = subprocess.Popen(
                (sys.executable, "-m", "accelerate", "launch", *own_flags, *flags, *program),
                env=environ.make_child_environment({**surrounding, **variables, **own}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            guard.write_line(f"+{launcher.pid}")
            yield from _stream_output(launcher)
            code = launcher.wait()
            error = (folder / "error").read_text(encoding="utf-8") if (folder / "error").is_file() else "{}"
            files = {file.name: file.read_bytes() for file in folder.glob("rank_*")}
            yield {"code": code, "error": json.loads(error), "files": files}

    def stop(self, number: int) -> None:
        """Pass a signal on to the launcher."""
        if self._launcher is not None and self._launcher.poll() is None:
            os.kill(self._launcher.pid, number)


def _stream_output(process: subprocess.Popen[bytes]) -> Iterator[Message]:
    """Yield what a process prints, all since the last message: ``{"output": [(1 or 2, lines)]}``."""
    lines: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()

    def read(stream: int, pipe: IO[bytes]) -> None:
        for piece in read_lines(pipe):
            lines.put((stream, b"".join(piece)))
        lines.put(None)

    assert process.stdout is not None
    assert process.stderr is not None
    for stream, pipe in ((1, process.stdout), (2, process.stderr)):
        threading.Thread(target=read, args=(stream, pipe), daemon=True).start()
    are_open = 2
    while are_open:
        pieces = [lines.get()]
        while not lines.empty():
            pieces.append(lines.get())
        are_open -= pieces.count(None)
        if output := [piece for piece in pieces if piece is not None]:
            yield {"output": output}
