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

from accelerate.cli import launch_argparse_parser
from accelerate.cli.launch import PLUGIN
from accelerate.cli.options import SCRIPT_SETTINGS
from accelerate.core import environ
from accelerate.launch import launch_request
from accelerate.launch.base import LaunchPlan
from accelerate.launch.config_files import ConfigFile
from accelerate.launch.launcher import choose_kind, launch


def _launch_with(args: argparse.Namespace, **decided: Any) -> None:
    with launch_argparse_parser.print_rank_errors():
        launch(launch_argparse_parser.build_request(PLUGIN, args, **decided))


def _plan_with(args: argparse.Namespace, **decided: Any) -> LaunchPlan:
    request = launch_argparse_parser.build_request(PLUGIN, args, **decided)
    plan: LaunchPlan = choose_kind(request).plan(request)
    return plan


def _single_process(args: argparse.Namespace) -> dict[str, Any]:
    """One process; several where their own launcher starts them from one command."""
    return {} if getattr(args, "mpirun_hostfile", None) else {"num_processes": 1}


def simple_launcher(args: argparse.Namespace) -> None:
    """Runs the script in one process, or under mpirun if there is a file of hosts; see ``launch_command``."""
    _launch_with(args, **_single_process(args))


def multi_gpu_launcher(args: argparse.Namespace) -> None:
    """Runs the script in one process per device, or as many as asked; see ``launch_command``."""
    _launch_with(args)


def deepspeed_launcher(args: argparse.Namespace) -> None:
    """Runs the script under DeepSpeed; see ``launch_command``."""
    _launch_with(args, use_deepspeed=True)


def tpu_launcher(args: argparse.Namespace) -> None:
    """Runs the script on the TPU of this machine; see ``launch_command``."""
    _launch_with(args, tpu=True)


def tpu_pod_launcher(args: argparse.Namespace) -> None:
    """Runs the script on all machines of a TPU pod; see ``launch_command``."""
    _launch_with(args, tpu=True, tpu_use_cluster=True)


def sagemaker_launcher(sagemaker_config: Any, args: argparse.Namespace) -> None:
    """Runs the script as a job of Amazon SageMaker; see ``launch_command``.

    Args:
        sagemaker_config: a ``SageMakerConfig``; its keys stand in for those of a configuration file.
        args: flags, script and its arguments.
    """
    values = {key: value for key, value in sagemaker_config.to_dict().items() if value is not None}
    request = launch_argparse_parser.build_request(PLUGIN, args)
    file = ConfigFile(Path(type(sagemaker_config).__name__), values)
    with launch_argparse_parser.print_rank_errors():
        launch(
            launch_request.build_request(
                file, launch_argparse_parser.typed_flags(PLUGIN, args), request.program, SCRIPT_SETTINGS
            )
        )


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command of ``simple_launcher`` and its whole environment."""
    return _single_command(_plan_with(args, **_single_process(args)))


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Return the whole environment of a process of ``multi_gpu_launcher``, without rank and address.

    ``args.nproc_per_node`` becomes how many of them there are on this machine, as text.
    """
    plan = _plan_with(args)
    args.nproc_per_node = str(len(plan.commands))
    return environ.make_child_environment(plan.variables)


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """One command that starts all processes of ``deepspeed_launcher``, and its whole environment."""
    return _single_command(_plan_with(args, use_deepspeed=True))


def _single_command(plan: LaunchPlan) -> tuple[list[str], dict[str, str]]:
    """The one command of a plan; torchrun, where it has one for each rank of this machine."""
    first, *others = plan.commands
    if not others:
        return list(first.program), environ.make_child_environment({**plan.variables, **first.variables})
    python, *script = first.program
    interpreter = [] if python == sys.executable else ["--no-python", python]
    starter = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(len(plan.commands))]
    return [*starter, *interpreter, *script], environ.make_child_environment(plan.variables)


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Adds to ``current_env`` what a process on a TPU is told.

    Args:
        args: flags, script and its arguments; returned as they are.
        current_env: an environment; changed and returned.
        pod: for all machines of a pod.
    """
    plan = _plan_with(args, tpu=True, **({"tpu_use_cluster": True} if pod else {}))
    return args, _add_variables(current_env, plan.variables)


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Adds to ``current_env`` what the script is told about 8-bit floats, and returns it."""
    return _add_script_variables(args, current_env, "ACCELERATE_FP8_")


def prepare_extend_env_parallelism_config(
    args: argparse.Namespace, current_env: dict[str, str]
) -> dict[str, str]:
    """Adds to ``current_env`` what the script is told about its mesh of devices, and returns it."""
    return _add_script_variables(
        args, current_env, "ACCELERATE_USE_PARALLELISM_CONFIG", "PARALLELISM_CONFIG_"
    )


def _add_script_variables(
    args: argparse.Namespace, current_env: dict[str, str], *heads: str
) -> dict[str, str]:
    variables = launch_argparse_parser.build_request(PLUGIN, args).script_variables()
    return _add_variables(
        current_env, {name: value for name, value in variables.items() if name.startswith(heads)}
    )


def _add_variables(current_env: dict[str, str], variables: Mapping[str, object | None]) -> dict[str, str]:
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
