"""Calling a function on several processes: ``notebook_launcher`` and ``debug_launcher``.

``PrepareForLaunch`` makes of a function what other starters of processes call: torch's and PyTorch/XLA's own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, Literal

import accelerate.device as devices
from accelerate.core import environ
from accelerate.core.errors import LaunchError, SettingError, UnknownNameError
from accelerate.core.setting import load_settings
from accelerate.core.value_types import Count, Index, LocalCount, PositiveNumber, convert_to, wrong_value
from accelerate.device import Device, DeviceProbeHost, count_cores
from accelerate.launch.notebook.function_launcher import FunctionError, FunctionLauncher, call_on_machines
from accelerate.launch.notebook.payload import find_shell
from accelerate.precision import PRECISIONS
from accelerate.world.network import ReservedPort


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on several processes, and show here what they print and raise.

    The function is sent to fresh processes, with everything of the notebook that it uses, so it does not
    matter what this process has done before. If it cannot be sent, the processes are copies of this one. One
    process alone is this one.

    Args:
        function: the training; it creates its own ``Accelerator``.
        args: its arguments.
        num_processes: on this machine; None: one per device, one on a CPU; 0, as programs count the GPUs of a
            machine without one: one. In Colab with fewer than two accelerators it is one.
        mixed_precision: for every ``Accelerator`` that says none itself; ``"no"`` leaves that as it is.
        use_port: where rank 0 listens; on one machine another one is taken if it is in use.
        master_addr: the machine of rank 0.
        node_rank: which machine this is, from 0.
        num_nodes: how many machines call this.
        rdzv_backend: how several machines meet: ``"static"``, ``"c10d"`` or another one of torch.
        rdzv_endpoint: where; by default ``master_addr:use_port``.
        rdzv_conf: more of that, as torchrun takes it.
        rdzv_id: the name of the job.
        max_restarts: how often all processes are started again after a failure.
        monitor_interval: seconds between two looks at the processes of several machines; those of one machine
            tell by themselves.
        log_line_prefix_template: what stands before each printed line, as ``"[rank ${rank}] "``; also
            ``${local_rank}`` and ``${role_name}``. By default nothing does. On several machines any text
            stands for ``"[rank ${rank}] "``.

    Returns:
        What the function returned on each process of this machine, in the order of their ranks; tensors on
        the CPU. None, with a warning, stands for what cannot be sent back.

    Raises:
        SettingError: an argument cannot be as it is.
        LaunchError: this process is a rank itself, or the function cannot be sent.
        FunctionError: it failed on a rank; the text ends with that rank's traceback.
        KeyboardInterrupt: the cell was interrupted; no process is left.
    """
    call = check_call(function, args)
    num_processes, num_nodes, node_rank, max_restarts, monitor_interval = check_numbers(
        num_processes=(num_processes, LocalCount | Literal[0] | None),
        num_nodes=(num_nodes, Count),
        node_rank=(node_rank, Index),
        max_restarts=(max_restarts, Index),
        monitor_interval=(monitor_interval, PositiveNumber),
    )
    _check_place(mixed_precision, node_rank, num_nodes)
    port = _parse_port(use_port)
    refuse_nested("notebook_launcher")
    device, count = _detect_devices()
    processes = _count_processes(num_processes, device, count)
    variables = {**environ.filter_unset(device.environment), **precision_variables(mixed_precision)}
    _print_launch(processes, device)
    if device.starts_ranks and processes > 1:
        with (
            closing(ReservedPort(port)) as meeting,
            environ.patch_environment({**variables, "MASTER_PORT": meeting.number}),
        ):
            device.start_ranks(PrepareForLaunch(function, device.distributed_type), call)
        return [None] * processes
    if num_nodes > 1 or rdzv_backend != "static":
        conf = ",".join(f"{key}={value}" for key, value in (rdzv_conf or {}).items())
        flags = {
            "--num_processes": processes * num_nodes,
            "--num_machines": num_nodes,
            **({} if rdzv_endpoint else {"--main_process_ip": master_addr}),
            "--main_process_port": port,  # also of an endpoint that names a host alone
            "--rdzv_backend": rdzv_backend,
            "--max_restarts": max_restarts,
            "--monitor_interval": monitor_interval,
            # Other rendezvous number the machines as they meet.
            **({"--machine_rank": node_rank} if rdzv_backend == "static" else {}),
            **({"--rdzv_endpoint": rdzv_endpoint} if rdzv_endpoint else {}),
            **({"--rdzv_id": rdzv_id} if rdzv_id != "none" else {}),
            **({"--rdzv_conf": conf} if conf else {}),
            **({"--tee": 3} if log_line_prefix_template else {}),
        }
        words = [word for pair in flags.items() for word in pair] + ["--cpu"] * (device.type == "cpu")
        return call_on_machines(function, call, words, processes=processes, variables=variables)
    if processes == 1 and not max_restarts:
        with environ.patch_environment(variables):
            return [function(*call)]
    crew = FunctionLauncher(
        processes,
        variables={**variables, **_thread_variables(processes)},
        port=port,
        max_restarts=max_restarts,
        prefix=log_line_prefix_template or "",
        why_no_fork=f"but it has used its {device.type} device already" if device.is_initialized() else "",
    )
    return crew.call(function, call)


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> list[Any]:
    """Call ``function(*args)`` on processes of the CPU: for tests, also on machines with accelerators.

    Args:
        function: a function of any place, also one defined in a test.
        args: its arguments.
        num_processes: on how many processes.

    Returns:
        What it returned on each rank.

    Raises:
        SettingError: an argument cannot be as it is.
        LaunchError: this process is a rank itself, or the function cannot be started.
        Exception: the one that the first failing rank raised, caused by a ``FunctionError`` that names the
            rank and ends with its traceback; that error itself, if the exception cannot be pickled.
    """
    call = check_call(function, args)
    (num_processes,) = check_numbers(num_processes=(num_processes, LocalCount))
    refuse_nested("debug_launcher")
    variables = {"ACCELERATE_USE_CPU": "true", **_thread_variables(num_processes)}
    if sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # the name of a test machine need not resolve
    try:
        return FunctionLauncher(num_processes, variables=variables).call(function, call)
    except FunctionError as error:
        cause = error.__cause__
        if cause is None:
            raise
        error.__cause__ = None
        raise cause from error


def test_launch() -> None:
    """Open the world of this process; raise what stands in the way."""
    from accelerate.world import world

    world.open()


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
        return any(each.starts_ranks and each.distributed_type == kind for each in devices.accelerators())


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
    # A rank whose function is short must not end while another one is still connecting to it.
    store.set(f"opened/{rank}", "")
    store.wait([f"opened/{each}" for each in range(int(size))])


# --- what is meant


def check_call(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, ...]:
    if not callable(function):
        raise SettingError(
            f"{function!r} cannot be called",
            fix="pass the function itself: notebook_launcher(train, args=(...))",
        )
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise SettingError(
            f"{function.__name__} is a generator or a coroutine, which does not run when it is called",
            fix=f"pass a function that runs it: lambda: list({function.__name__}()), or asyncio.run",
        )
    if not isinstance(args, list | tuple):
        raise SettingError(
            f"args is {args!r}, but it holds all arguments of the function", fix=f"args=({args!r},)"
        )
    return tuple(args)


def check_numbers(**arguments: tuple[Any, Any]) -> list[Any]:
    """Return arguments, each given with its type, as their types.

    Raises:
        SettingError: one does not fit.
    """
    numbers: list[Any] = []
    for name, (value, kind) in arguments.items():
        fits, number = convert_to(kind, value, "code")
        if not fits:
            raise wrong_value(f"the argument {name}", name, kind, value)
        numbers.append(number)
    return numbers


def _check_place(precision: str, node_rank: int, nodes: int) -> None:
    if not 0 <= node_rank < nodes:
        raise SettingError(
            f"node_rank is {node_rank}, but num_nodes is {nodes}", why="machines are counted from 0"
        )
    if _precision_name(precision) not in PRECISIONS.names():
        raise UnknownNameError("mixed_precision", _precision_name(precision), PRECISIONS.names())


def _precision_name(precision: Any) -> str:
    return str(getattr(precision, "value", precision)).lower()


def precision_variables(precision: str) -> dict[str, object | None]:
    name = _precision_name(precision)
    return {} if name == "no" else {"ACCELERATE_MIXED_PRECISION": name}


def _parse_port(port: str | int) -> int:
    if str(port).isdecimal() and int(port) <= 65535:
        return int(port)
    raise SettingError(
        f"use_port is {port!r}, which is no port", why="ports are numbers from 0 to 65535; 0 takes a free one"
    )


def refuse_nested(name: str) -> None:
    from accelerate.world import clusters, world

    cluster, open_now = clusters.detect(environ.snapshot()), world.current()
    if cluster is not None and cluster.size > 1:
        rank, size, who = cluster.rank, cluster.size, f"started by {cluster.name}"
    elif open_now is not None and open_now.size > 1:
        rank, size, who = open_now.rank, open_now.size, "which has opened its group already"
    else:
        return
    raise LaunchError(
        f"{name} starts processes, but this one is rank {rank} of {size} itself ({who})",
        why="a rank cannot start the ranks of another job",
        fix="call the function directly; or start this program once, without a launcher",
    )


def _detect_devices() -> tuple[Device, int]:
    """The device of the ranks, and how many there are; (CPU, 0) without."""
    from accelerate.device import ProcessDeviceSettings

    cpu = devices.get("cpu")
    fixed = (environ.get("ACCELERATE_TORCH_DEVICE") or "").partition(":")[0]
    if load_settings(ProcessDeviceSettings).value.use_cpu or fixed == "cpu":
        return cpu, 0
    device, count = devices.probe_devices()
    if not count:  # what no file of ours knows, torch may
        device = devices.detect()
        count = 0 if device.type == "cpu" else device.count()
    return (device, count) if count else (cpu, 0)


def _count_processes(wanted: int | None, device: Device, count: int) -> int:
    if wanted is None:
        return max(1, count)
    # Notebooks ask for the GPUs of their author, and 1.x trains in this process where Colab has one or none.
    is_colab = type(find_shell()).__module__.startswith("google.colab")
    if is_colab and wanted > 1 and count < 2 and not device.starts_ranks:
        print(f"Colab has fewer than two accelerators: num_processes={wanted} is not used.", flush=True)
        return 1
    if count and wanted > count:
        raise SettingError(
            f"num_processes is {wanted}, but there are {count} {device.type} devices",
            why="each process needs a device of its own",
            fix=f"num_processes={count}; or set ACCELERATE_USE_CPU=true to train on the CPU",
        )
    return wanted or 1


def _print_launch(processes: int, device: Device) -> None:
    name = device.distributed_type.removeprefix("MULTI_") if device.type != "cpu" else "CPU"
    label = f"{processes} {name}s" if processes > 1 else "CPU" if name == "CPU" else f"one {name}"
    print(f"Launching training on {label}.", flush=True)


def _thread_variables(processes: int) -> dict[str, object | None]:
    """The cores are shared out, unless somebody said otherwise."""
    if processes == 1 or environ.get("OMP_NUM_THREADS") is not None:
        return {}
    return {"OMP_NUM_THREADS": max(1, count_cores(DeviceProbeHost()) // processes)}
