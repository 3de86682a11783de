"""The parts of the launcher of 1.x that programs import: each is our launcher with one thing decided.

``args`` is a namespace as ``launch_command`` takes it. What they return describes the plan of a launch, that
which ``--dry_run`` shows; nothing has been started by then.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.cli import parser
from accelerate.cli.launch import PLUGIN
from accelerate.cli.options import HANDED
from accelerate.core import environ
from accelerate.launch import job
from accelerate.launch.base import choose, launch
from accelerate.launch.files import ConfigFile
from accelerate.launch.plan import Plan


def _launch(args: argparse.Namespace, **decided: Any) -> None:
    with parser.shown():
        launch(parser.request(PLUGIN, args, **decided))


def _plan(args: argparse.Namespace, **decided: Any) -> Plan:
    request = parser.request(PLUGIN, args, **decided)
    plan: Plan = choose(request).plan(request)
    return plan


def _alone(args: argparse.Namespace) -> dict[str, Any]:
    """One process; several where their own launcher starts them from one command."""
    return {} if getattr(args, "mpirun_hostfile", None) else {"num_processes": 1}


def simple_launcher(args: argparse.Namespace) -> None:
    """Runs the script in one process, or under mpirun if there is a file of hosts; see ``launch_command``."""
    _launch(args, **_alone(args))


def multi_gpu_launcher(args: argparse.Namespace) -> None:
    """Runs the script in one process per device, or as many as asked; see ``launch_command``."""
    _launch(args)


def deepspeed_launcher(args: argparse.Namespace) -> None:
    """Runs the script under this engine; see ``launch_command``."""
    _launch(args, use_deepspeed=True)


def tpu_launcher(args: argparse.Namespace) -> None:
    """Runs the script on the TPU of this machine; see ``launch_command``."""
    _launch(args, tpu=True)


def tpu_pod_launcher(args: argparse.Namespace) -> None:
    """Runs the script on all machines of a TPU pod; see ``launch_command``."""
    _launch(args, tpu=True, tpu_use_cluster=True)


def sagemaker_launcher(sagemaker_config: Any, args: argparse.Namespace) -> None:
    """Runs the script as a job of Amazon SageMaker; see ``launch_command``.

    Args:
        sagemaker_config: a ``SageMakerConfig``; its keys stand in for those of a configuration file.
        args: flags, script and its arguments.
    """
    values = {key: value for key, value in sagemaker_config.to_dict().items() if value is not None}
    asked = parser.request(PLUGIN, args)
    file = ConfigFile(Path(type(sagemaker_config).__name__), values)
    with parser.shown():
        launch(job.of(file, parser.flags(PLUGIN, args), asked.program, HANDED))


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command of ``simple_launcher`` and its whole environment."""
    return _command(_plan(args, **_alone(args)))


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """What each process of ``multi_gpu_launcher`` is told, rank and address left out: a whole environment.

    ``args.nproc_per_node`` becomes how many of them there are on this machine, as text.
    """
    plan = _plan(args)
    args.nproc_per_node = str(len(plan.starts))
    return environ.child(plan.variables)


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """One command that starts all processes of ``deepspeed_launcher``, and its whole environment."""
    return _command(_plan(args, use_deepspeed=True))


def _command(plan: Plan) -> tuple[list[str], dict[str, str]]:
    """The one command of a plan; torchrun, where it has one for each rank of this machine."""
    first, *others = plan.starts
    if not others:
        return list(first.program), environ.child({**plan.variables, **first.variables})
    python, *script = first.program
    own = [] if python == sys.executable else ["--no-python", python]
    starter = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(len(plan.starts))]
    return [*starter, *own, *script], environ.child(plan.variables)


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Adds to ``current_env`` what a process on a TPU is told.

    Args:
        args: flags, script and its arguments; returned as they are.
        current_env: an environment; changed and returned.
        pod: for all machines of a pod.
    """
    plan = _plan(args, tpu=True, **({"tpu_use_cluster": True} if pod else {}))
    return args, _told(current_env, plan.variables)


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Adds to ``current_env`` what the script is told about 8-bit floats, and returns it."""
    return _handed(args, current_env, "ACCELERATE_FP8_")


def prepare_extend_env_parallelism_config(
    args: argparse.Namespace, current_env: dict[str, str]
) -> dict[str, str]:
    """Adds to ``current_env`` what the script is told about its mesh of devices, and returns it."""
    return _handed(args, current_env, "ACCELERATE_USE_PARALLELISM_CONFIG", "PARALLELISM_CONFIG_")


def _handed(args: argparse.Namespace, current_env: dict[str, str], *heads: str) -> dict[str, str]:
    told = parser.request(PLUGIN, args).handed()
    return _told(current_env, {name: value for name, value in told.items() if name.startswith(heads)})


def _told(current_env: dict[str, str], variables: Mapping[str, object | None]) -> dict[str, str]:
    for name, value in variables.items():
        if value is None:
            current_env.pop(name, None)
        else:
            current_env[name] = str(value)
    return current_env


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """The value of a variable that holds paths, with one more at its end; the variable is left as it is."""
    before = environ.get(env_var_name)
    return path_to_add if before is None else f"{before}{os.pathsep}{path_to_add}"
