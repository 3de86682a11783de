"""A function on several machines: each starts ``accelerate launch``, whose script calls the function."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate.core import environ
from accelerate.core.frozen_dataclass import frozen_dataclass
from accelerate.device import Device
from accelerate.launch import failure_report
from accelerate.launch.errors import RankError
from accelerate.launch.logs import RankLogSettings
from accelerate.launch.notebook import function_launcher, payload
from accelerate.launch.plan import Variables
from accelerate.launch.supervisor import ProcessSpec, WorkerSupervisor


@frozen_dataclass
class NotebookRendezvousConfig:
    """How the machines of a job find each other.

    Attributes:
        machines: how many they are.
        machine_rank: which one this is.
        main_address: of rank 0.
        port: of rank 0.
        backend: the name of torch's rendezvous.
        endpoint: where it is; "" for the address and port.
        conf: its options.
        id: the name of the job.
        max_restarts: how often the processes of all machines are started again.
        monitor_interval: seconds between two looks at them.
    """

    machines: int
    machine_rank: int
    main_address: str
    port: int
    backend: str
    endpoint: str
    conf: Mapping[str, Any]
    id: str
    max_restarts: int
    monitor_interval: float

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        processes: int,
        device: Device,
        variables: Variables,
    ) -> list[Any]:
        """Call ``function(*args)`` and return the results of this machine's processes.

        Args:
            function: what to call.
            args: with what.
            processes: on how many processes of each machine.
            device: on which type of device.
            variables: what each process is told by its environment.

        Raises:
            LaunchError: the function cannot be sent.
            FunctionError: it failed, or the machines did not meet; what the launcher said is printed.
            KeyboardInterrupt: the cell was interrupted.
        """
        with tempfile.TemporaryDirectory(prefix="accelerate-") as name:
            folder = Path(name)
            payload.write_payload(folder / "parcel", function, args)
            # No file of the user's says more than this call does.
            (folder / "settings.yaml").write_text("{}\n", encoding="utf-8")
            script = (function_launcher.STARTER, str(folder / "parcel"), name)
            program = (sys.executable, "-m", "accelerate", "launch")
            flags = tuple(self._flags(folder / "settings.yaml", processes, device))
            logs = RankLogSettings("3", None, prefix=lambda rank: "")
            launcher = ProcessSpec(
                (*program, *flags, *script), environ.make_child_environment(variables), *logs.pipes(0)
            )
            # It ends its ranks itself, and needs longer for that than they do.
            outcome = WorkerSupervisor(
                [launcher], stop_timeout=4 * function_launcher.STOP_TIMEOUT, on_start=logs.read
            ).run()
            logs.finish()
            error = function_launcher.error_to_raise(
                outcome,
                folder,
                self._local_error(folder, processes, failure_report.build_job_error(outcome, folder)),
            )
            if error is not None:
                raise error
            return list(function_launcher.read_results(folder, processes))

    def _flags(self, settings: Path, processes: int, device: Device) -> Iterator[str]:
        yield from ("--config_file", str(settings), "--tee", "3")
        yield from ("--num_processes", str(processes * self.machines), "--num_machines", str(self.machines))
        yield from ("--rdzv_backend", self.backend)
        if self.backend == "static":  # the others number the machines as they meet
            yield from ("--machine_rank", str(self.machine_rank))
        yield from ("--main_process_ip", self.main_address, "--main_process_port", str(self.port))
        yield from (
            "--max_restarts",
            str(self.max_restarts),
            "--monitor_interval",
            str(self.monitor_interval),
        )
        if self.endpoint:
            yield from ("--rdzv_endpoint", self.endpoint)
        if self.id != "none":
            yield from ("--rdzv_id", self.id)
        if self.conf:
            yield from ("--rdzv_conf", ",".join(f"{key}={value}" for key, value in self.conf.items()))
        if device.type == "cpu":
            yield "--cpu"

    def _local_error(self, folder: Path, processes: int, error: RankError | None) -> RankError | None:
        """The launcher's own end, with the traceback of the rank of this machine that failed first."""
        files = [failure_report.error_file(folder, rank) for rank in range(processes)]
        left = {file: file.read_text(encoding="utf-8") for file in files if file.is_file()}
        if error is None:
            return None
        if not left:
            error.what, error.why = (
                f"the job failed (exit code {error.code})",
                "what its launcher printed says it",
            )
            return error
        first = min(left.values(), key=lambda text: int(text.split(" ", 1)[0]))
        head, _, error.traceback = first.partition("\n")
        error.what = f"the function failed on this machine: {head.split(' ', 2)[2]}"
        error.why = ""
        return error
