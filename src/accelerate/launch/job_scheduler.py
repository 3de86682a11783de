"""The scheduler that started the launcher, read from the environment.

``srun``, ``mpirun``, ``jsrun``, torchrun and the operators of container clusters start a program several
times and tell each process its place. A launcher that is started so reads it (``world/clusters.py``) and is

- a **rank**, where more processes than machines were started, or where torchrun started it. The launcher
  becomes the script, as that rank, and starts nothing;
- a **machine**, where one process was started on each of several. It then starts the processes of its
  machine, or becomes the script if that is all there is to start (``kinds/scheduled_rank.py`` decides,
  since it depends on the devices).

A value of the scheduler wins over the configuration file, which is often one copy for all machines and says
``machine_rank: 0`` on each; flags and ``ACCELERATE_*`` variables win over the scheduler. A port that is only
derived from the number of the job is a default, and the file wins over it.

A launcher that the script of another launch has started is no part of any job (``launcher.py``), nor is one
that a task has started (``ClusterEnvironment.is_inherited``).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import field
from typing import Any

from accelerate.core.setting import SettingOrigin
from accelerate.core.value_types import frozen_dataclass
from accelerate.world import clusters
from accelerate.world.clusters import ClusterEnvironment
from accelerate.world.network import LOOPBACK

# Names the outer launch, in the environment of a launcher that its script has started.
OUTER_LAUNCH_VARIABLE = "ACCELERATE_OUTER_LAUNCH"


@frozen_dataclass
class JobSchedulerContext:
    """The job of the scheduler that started this launcher.

    Attributes:
        name: who started it.
        rank, size: this process among those that were started.
        local_rank, local_size: this process among those of its machine.
        node, nodes: this machine among all.
        is_rank: the process is one rank; otherwise it may start those of its machine.
        rank_variable: the variable that tells it its place.
        settings: the settings that follow, each with the variable that said so.
        default_names: those of them that nobody said; a configuration file wins over them.
    """

    name: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    is_rank: bool
    rank_variable: str
    settings: Mapping[str, SettingOrigin] = field(default_factory=dict)
    default_names: tuple[str, ...] = ()

    def settings_unless_in(self, file: Container[str]) -> dict[str, SettingOrigin]:
        """Return the scheduler's settings, without defaults that the configuration file sets."""
        return {n: value for n, value in self.settings.items() if not (n in self.default_names and n in file)}


def detect_scheduler(env: Mapping[str, str]) -> JobSchedulerContext | None:
    """Detect the scheduler that started this launcher; None without one.

    ``RANK`` and ``WORLD_SIZE`` without a local rank count machines for a launcher, whoever wrote them: a
    process that could be a rank would have a local rank. With one they are a rank's where torchrun or a
    scheduler says so too: job scripts export all three in front of a launcher that starts the ranks itself.

    Args:
        env: the environment.

    Raises:
        WorldError: its variables are incomplete or contradict each other.
    """
    # torchrun and DeepSpeed's launcher tell each rank how many its machine has.
    marks = ("TORCHELASTIC_RUN_ID", *clusters.TorchrunEnvironment.local_size_names)
    is_rank = env.get("LOCAL_RANK") and any(env.get(name) for name in marks)
    if env.get("PET_NNODES") and not is_rank:
        context = _read_torchrun_nodes(env)
        return context if context.size > 1 else None
    cluster, torchrun = clusters.find_scheduler(env), clusters.TorchrunEnvironment(env)
    is_complete = torchrun.rank is not None and torchrun.size is not None
    if is_complete and (
        cluster is None or "TORCHELASTIC_RUN_ID" in env or not clusters.is_same_place(cluster, torchrun)
    ):
        nodes = clusters.read_number(env, *clusters.NODES)
        if is_rank:
            cluster = torchrun
        elif (cluster is None or cluster.size == 1) and (not env.get("LOCAL_RANK") or nodes == torchrun.size):
            cluster = clusters.TorchrunNodeRankEnvironment(env)
    context = None if cluster is None else _read_cluster(cluster)
    return context if context is not None and context.size > 1 else None


def detect_surrounding_job(
    env: Mapping[str, str], flags: Mapping[str, Any], file: Mapping[str, Any]
) -> tuple[JobSchedulerContext | None, str]:
    """Detect the scheduler whose job this launch is a part of.

    A launcher that stands for its machine starts a job of its own where ``--num_machines 1`` is typed. So it
    does where ``RANK`` and ``WORLD_SIZE`` are left from another job: a loopback ``MASTER_ADDR`` is on no
    other machine. Whoever plays several machines on one says how many there are, or which is which.
    A launch inside another one is a job of its own, and so is one that a task of a scheduler has started.

    Args:
        env: the environment.
        flags: what was typed, by name.
        file: the keys of the configuration file.

    Returns:
        The scheduler, None without one, and a line about one that is passed over, "" without.

    Raises:
        WorldError: as for ``detect_scheduler``.
    """
    if OUTER_LAUNCH_VARIABLE in env:
        place = env[OUTER_LAUNCH_VARIABLE]
        return None, f"started inside {place} of another launch: a job of its own" if place else ""
    scheduler = clusters.find_scheduler(env)
    if scheduler is not None and scheduler.is_inherited():
        return None, "started by a task of a scheduler, and no task itself: a job of its own"
    context = detect_scheduler(env)
    torchrun = clusters.TorchrunEnvironment(env)
    unused = f"RANK={torchrun.rank} and WORLD_SIZE={torchrun.size} of the environment are not used"
    if context is None and env.get("LOCAL_RANK") and torchrun.rank is not None and (torchrun.size or 1) > 1:
        return None, f"{unused}: LOCAL_RANK stands without LOCAL_WORLD_SIZE, which torchrun sets for a rank"
    if context is None or context.is_rank:
        return context, ""
    machines = flags.get("num_machines")
    if str(machines) == "1":
        return None, f"--num_machines is 1: a job of its own, apart from the {context.size} of {context.name}"
    counts = (machines, env.get("ACCELERATE_NUM_MACHINES"), file.get("num_machines"))
    says_several = any(count is not None and str(count) != "1" for count in counts)
    if says_several or flags.get("main_process_ip") or not clusters.is_left_from_local_job(env):
        return context, ""
    return None, f"{unused}: MASTER_ADDR={env['MASTER_ADDR']} is this machine alone"


def _read_torchrun_nodes(env: Mapping[str, str]) -> JobSchedulerContext:
    """One launcher per machine, as torchrun's own variables say it (``PET_NNODES`` stands for --nnodes).

    Source: PyTorch documentation, "torchrun (Elastic Launch)"; Kubeflow Trainer sets them in each pod.
    """
    names = {
        "num_machines": "PET_NNODES",
        "machine_rank": "PET_NODE_RANK",
        "nproc_per_node": "PET_NPROC_PER_NODE",
        "main_process_ip": "PET_MASTER_ADDR",
        "main_process_port": "PET_MASTER_PORT",
    }
    settings = {
        name: SettingOrigin("scheduler", variable, env[variable])
        for name, variable in names.items()
        if env.get(variable, "") not in ("", "auto")  # PET_NPROC_PER_NODE=auto is Kubeflow's default
    }
    most = env["PET_NNODES"].rpartition(":")[2]
    size, rank = (int(text) if text.isdecimal() else 0 for text in (most, env.get("PET_NODE_RANK", "")))
    return JobSchedulerContext("torchrun", rank, size, 0, 1, rank, size, False, "PET_NNODES", settings)


def _read_cluster(cluster: ClusterEnvironment) -> JobSchedulerContext:
    """A process that a scheduler, an MPI or torchrun started."""
    rank, size, local_rank, local_size, node, nodes = cluster.resolve_place()
    is_rank = cluster.starts_ranks or size > nodes
    settings, derived = _cluster_settings(cluster, node, nodes)
    if is_rank:
        settings["num_processes"] = SettingOrigin(
            "scheduler", cluster.find_variable(cluster.size_names), size
        )
    mark = cluster.find_variable(cluster.rank_names)
    return JobSchedulerContext(
        cluster.name, rank, size, local_rank, local_size, node, nodes, is_rank, mark, settings, derived
    )


def _cluster_settings(
    cluster: ClusterEnvironment, node: int, nodes: int
) -> tuple[dict[str, SettingOrigin], tuple[str, ...]]:
    """The settings that follow from a scheduler's words, and the names of those that are derived."""
    machines = cluster.find_variable(
        (*cluster.nodes_names, *clusters.NODES, *cluster.hosts_names, *cluster.size_names)
    )
    machine = cluster.find_variable((*cluster.node_names, *clusters.NODE, *cluster.rank_names))
    settings = {
        "num_machines": SettingOrigin("scheduler", machines, nodes),
        "machine_rank": SettingOrigin("scheduler", machine, node),
    }
    address, port = cluster.address, cluster.port
    if address is not None:
        variable = cluster.find_variable(("MASTER_ADDR", *cluster.hosts_names))
        settings["main_process_ip"] = SettingOrigin("scheduler", variable, address)
    elif nodes == 1:
        settings["main_process_ip"] = SettingOrigin("scheduler", machines, LOOPBACK)
    if port is None:
        return settings, ()
    variable = cluster.find_variable(("MASTER_PORT", *cluster.job_names))
    settings["main_process_port"] = SettingOrigin("scheduler", variable, port)
    return settings, () if cluster.env.get("MASTER_PORT") else ("main_process_port",)


def overridden_lines(
    scheduler: JobSchedulerContext, origins: Mapping[str, tuple[SettingOrigin, ...]]
) -> tuple[str, ...]:
    """One line for each value of a configuration file that a scheduler knows better.

    Args:
        scheduler: what the scheduler says.
        origins: by setting, every source that gave a value, the winner first.
    """
    lines: list[str] = []
    for name in scheduler.settings:
        first, *others = origins[name]
        file = next((origin for origin in others if origin.source == "file"), None)
        if first.source != "scheduler" or file is None or file.value == first.value:
            continue
        setting_text = f"{name} is {first.value}"
        if name == "machine_rank":
            setting_text = f"machine {scheduler.node} of {scheduler.nodes}"
        lines.append(
            f"{setting_text}, from {first.where} ({file.where.rpartition(':')[0]} says {file.value})"
        )
    return tuple(lines) if not (scheduler.is_rank and scheduler.rank) else ()
