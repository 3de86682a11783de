"""Launching on a TPU: a function of the script in one process for each device, on one machine or on a pod.

Not run on a TPU: written to torch_xla 2.9 and to Google's command line, tested with fakes of both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import accelerate.device as devices
from accelerate.core.errors import LaunchError, MissingExtraError, SettingError
from accelerate.core.packages import is_installed
from accelerate.core.setting import setting
from accelerate.core.value_types import frozen_dataclass
from accelerate.device import Device, DeviceProbeHost
from accelerate.launch.base import LaunchKind, LaunchPlan, PlannedCommand
from accelerate.launch.kinds.local import LocalLaunch, script_command
from accelerate.launch.launch_request import LaunchRequest, file_setting, typed_setting

RANK_MODULE = "accelerate.launch.tpu_rank"
# Where the machines of a pod meet, if nobody says another port: that of torch_xla's own rendezvous.
POD_PORT = 12355


@frozen_dataclass
class TpuSettings:
    """How to start a script on a TPU."""

    __topic__ = "TPU"

    @staticmethod
    def __when__(value: Callable[[str], Any]) -> bool:
        """Return whether the wizard asks about these settings."""
        return bool(value("distributed_type") == _tpu_device().distributed_type)

    tpu: bool = typed_setting(False, help="start a function of the script on a TPU")
    main_training_function: str = setting(
        "main",
        variable=None,
        help="the function of the script that is called in each process",
        question="Function of the script that trains?",
    )
    downcast_bf16: bool = setting(
        False,
        variable=None,
        help="with bf16, torch.double becomes float32; without this it becomes bfloat16 as torch.float does",
        question="Compute torch.double as float32?",
    )
    tpu_use_cluster: bool = setting(
        False,
        flags=("--tpu_cluster",),
        variable=None,
        help="run the command on all machines of a TPU pod",
        question="TPU pod of several machines?",
    )
    no_tpu_cluster: bool = typed_setting(False, help="run here, whatever the file says about a pod")
    tpu_use_sudo: bool = setting(
        False,
        variable=None,
        help="run as root on the machines of the pod",
        question="Run the commands on the TPU's machines with sudo?",
        when={"tpu_use_cluster": (True,)},
    )
    tpu_vm: tuple[str, ...] | None = setting(
        None, flag="--vm", variable=None, help="the machines of the pod to use, by number; by default all"
    )
    tpu_env: tuple[str, ...] | None = setting(
        None,
        flag="--env",
        variable=None,
        help="a variable for the machines of the pod, as NAME=value",
        question="Environment of the TPU's machines? NAME=value, with commas",
        when={"tpu_use_cluster": (True,)},
    )
    tpu_name: str | None = file_setting(
        None, help="what the pod is called", question="Name of the TPU?", when={"tpu_use_cluster": (True,)}
    )
    tpu_zone: str | None = file_setting(
        None,
        help="the zone in which the pod is",
        question="Zone of the TPU?",
        when={"tpu_use_cluster": (True,)},
    )
    commands: tuple[str, ...] | None = file_setting(
        None, help="what `accelerate tpu-config` runs on each machine of the pod"
    )
    command_file: str | None = file_setting(
        None, help="a file with a command a line, for `accelerate tpu-config`"
    )


class TpuLaunch(LaunchKind[LaunchPlan]):
    """Processes on a TPU, by torch_xla."""

    name: ClassVar[str] = "TPU"
    priority: ClassVar[int] = 20
    reads: ClassVar[tuple[str, ...]] = LocalLaunch.reads
    settings = (TpuSettings,)

    def accepts(self, request: LaunchRequest) -> bool:
        """Accept requests for a TPU, and requests without a device type on a machine that has one."""
        if request.get("use_cpu") or request.settings.multi_gpu:
            return False
        device, kind = _tpu_device(), request.distributed_type
        options = request.values_of(TpuSettings)
        if options.tpu or _uses_pod(request) or kind in (device.distributed_type, "TPU"):
            return True
        # torch_xla starts its processes itself; other launchers would give each of them all devices.
        quiet = not kind and not request.strategy_switches and request.settings.num_processes != 1
        return quiet and devices.probe_devices(DeviceProbeHost())[0] is device

    def check(self, request: LaunchRequest) -> None:
        """Refuse what a TPU cannot do; see ``LaunchKind.check``."""
        job, options = request.settings, request.values_of(TpuSettings)
        if job.no_python:
            raise SettingError(
                "--no_python does not go with a TPU", why="a function of the script is called in each process"
            )
        if str(job.num_machines) != "1":
            raise SettingError(
                f"{request.origin('num_machines').where} is {job.num_machines}, but this is a launch on a "
                "TPU",
                why="the machines of a pod know each other",
                fix="start the command on all of them: --tpu_use_cluster",
            )
        for pair in options.tpu_env or ():
            if not pair.partition("=")[1] or not pair.partition("=")[0].isidentifier():
                raise SettingError(
                    f"{request.origin('tpu_env').where}: {pair!r} is not NAME=value",
                    fix="a value with a comma stands in the configuration file: tpu_env: [...]",
                )

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Make the command; see ``LaunchKind.plan``."""
        self.check(request)
        pod = _uses_pod(request)
        count = request.settings.num_processes
        return LaunchPlan(
            kind=self.name,
            facts=(
                ("processes", str(count) if isinstance(count, int) else "one for each device of the TPU"),
            ),
            variables={} if pod else _process_variables(request),
            commands=(
                PlannedCommand(
                    "gcloud" if pod else "torch_xla", script_command(_command_request(request, pod=pod))
                ),
            ),
            unused_settings=tuple(_unused_settings(request, pod=pod)),
        )

    def run(self, request: LaunchRequest, plan: LaunchPlan, *, replace: bool) -> None:
        """Start the command; see ``LaunchKind.run``."""
        pod = _uses_pod(request)
        if pod:
            check_gcloud_installed()
        elif not is_installed("torch_xla"):
            raise MissingExtraError("torch_xla[tpu]", "a launch on a TPU")
        # torch_xla's starter does not end its processes when a signal ends it: they would keep the TPU.
        LocalLaunch().run(_command_request(request, pod=pod), plan, replace=replace and pod)


def _tpu_device() -> Device:
    """The device that torch_xla drives."""
    return next(device for device in devices.accelerators() if device.extension == "torch_xla")


def _uses_pod(request: LaunchRequest) -> bool:
    options = request.values_of(TpuSettings)
    return options.tpu_use_cluster and not options.no_tpu_cluster


def _unused_settings(request: LaunchRequest, *, pod: bool) -> Iterator[tuple[str, str]]:
    """Yield the settings without use here; see ``LaunchPlan.unused_settings``."""
    for name in ("gpu_ids", "machine_rank", "main_process_ip", "role", "nproc_per_node"):
        yield name, "torch_xla gives each process its device and its place"
    if request.get("mixed_precision") != "bf16":
        yield "downcast_bf16", "the precision is not bf16"
    if not pod:
        for name in ("tpu_vm", "tpu_env", "tpu_use_sudo", "tpu_name", "tpu_zone"):
            yield name, "the launch is on this machine, not on a pod (--tpu_use_cluster)"
    for name in ("commands", "command_file"):
        yield name, "`accelerate tpu-config` runs them"


def _process_variables(request: LaunchRequest) -> dict[str, object | None]:
    """Return the variables of the processes. Source of XLA's two: PyTorch/XLA, "Environment variables"."""
    variables: dict[str, object | None] = dict(request.script_variables())
    if request.get("mixed_precision") == "bf16":
        down = request.values_of(TpuSettings).downcast_bf16
        variables |= {"XLA_DOWNCAST_BF16": int(down), "XLA_USE_BF16": int(not down)}
    return variables


def _command_request(request: LaunchRequest, *, pod: bool) -> LaunchRequest:
    """The request for the command that starts the processes, here or on the machines of a pod."""
    if pod:
        return _replace_program(request, _pod_command(request), no_python=True)
    options, job = request.values_of(TpuSettings), request.settings
    count = job.num_processes if isinstance(job.num_processes, int) else 0
    port, kind = job.main_process_port or 0, "module" if job.module else "script"
    program = (RANK_MODULE, options.main_training_function, str(count), str(port), kind, *request.program)
    return _replace_program(request, program, module=True)


def _pod_command(request: LaunchRequest) -> tuple[str, ...]:
    """The command that runs the launcher on the machines of a pod."""
    import shlex

    options, job = request.values_of(TpuSettings), request.settings
    pairs = [pair.split("=", 1) for pair in options.tpu_env or ()]
    variables = {**_process_variables(request), "ACCELERATE_IN_TPU_POD": 1, **dict(pairs)}
    flags = ["--tpu", "--no_tpu_cluster", "--main_training_function", options.main_training_function]
    flags += ["--num_processes", str(job.num_processes)] if isinstance(job.num_processes, int) else []
    flags += ["--main_process_port", str(job.main_process_port or POD_PORT)]
    flags += ["--downcast_bf16"] if options.downcast_bf16 else []
    flags += ["--module"] if job.module else []
    # `env`, for sudo takes variables away.
    command = [
        *(["sudo"] if options.tpu_use_sudo else []),
        "env",
        *(f"{k}={v}" for k, v in variables.items()),
    ]
    command += ["python3", "-m", "accelerate", "launch", *flags, *request.program]
    target = {"name": options.tpu_name, "zone": options.tpu_zone, "workers": options.tpu_vm or ()}
    return worker_command(shlex.join(command), **target)


def _replace_program(
    request: LaunchRequest, program: tuple[str, ...], *, module: bool = False, no_python: bool = False
) -> LaunchRequest:
    settings = dataclasses.replace(request.settings, module=module, no_python=no_python)
    return dataclasses.replace(request, settings=settings, program=program)


def worker_command(
    command: str, *, name: str | None, zone: str | None, workers: Sequence[str] = (), alpha: bool = False
) -> tuple[str, ...]:
    """The program that runs a shell command on machines of a TPU.

    Args:
        command: what their shell runs.
        name: what the TPU is called.
        zone: where it is; None takes the zone that gcloud is configured with.
        workers: the numbers of the machines, from 0; all when empty.
        alpha: use gcloud's alpha commands.

    Raises:
        SettingError: the TPU has no name, or a machine no number.

    Source: Google Cloud CLI reference, "gcloud compute tpus tpu-vm ssh".
    """
    if not name:
        raise SettingError(
            "no TPU is named",
            why="its machines are reached by the name that it was created with",
            fix="write tpu_name: ... and tpu_zone: ... in the configuration file",
        )
    numbers = [number.strip() for worker in workers for number in worker.split(",")]
    wrong = [number for number in numbers if not number.isdecimal()]
    if wrong:
        raise SettingError(
            f"{wrong[0]!r} is no machine of the TPU",
            why="they are numbered from 0",
            fix="write 0,1 or leave it out",
        )
    return (
        *("gcloud", *(("alpha",) if alpha else ()), "compute", "tpus", "tpu-vm", "ssh", name),
        *(("--zone", zone) if zone else ()),
        *("--worker", ",".join(numbers) or "all", "--command", command),
    )


def check_gcloud_installed() -> None:
    """Refuse to go on without gcloud.

    Raises:
        LaunchError: it is not on the PATH.
    """
    import shutil

    if shutil.which("gcloud") is None:
        raise LaunchError(
            "there is no program gcloud",
            why="it reaches the machines of a TPU",
            fix="install the Google Cloud CLI, https://cloud.google.com/sdk/docs/install",
        )


PLUGIN = TpuLaunch()
