"""What a scheduler around the launcher says of the job. Pure functions of the environment.

``srun``, ``mpirun``, ``jsrun``, torchrun and the operators of container clusters start a program several
times and tell each process its place. A launcher that is started so reads it (``world/clusters.py``) and is

- a **rank**, where more processes than machines were started, or where torchrun started it. The launcher
  becomes the script, as that rank, and starts nothing;
- a **machine**, where one process was started on each of several. It then starts the processes of its
  machine, or becomes the script if that is all there is to start (``kinds/inside.py`` decides, since it
  depends on the devices).

A value of the scheduler wins over the configuration file, which is often one copy for all machines and says
``machine_rank: 0`` on each; flags and ``ACCELERATE_*`` variables win over the scheduler. A port that is only
derived from the number of the job is a default, and the file wins over it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import field

from accelerate.core.frozen import frozen
from accelerate.core.setting import Origin, Told
from accelerate.world import clusters
from accelerate.world.clusters import Scheduler

HERE = "127.0.0.1"


@frozen
class Around:
    """What is known of the job around a launcher.

    Attributes:
        name: who started it.
        rank, size: this process among those that were started.
        local_rank, local_size: this process among those of its machine.
        node, nodes: this machine among all.
        is_rank: the process is one rank; otherwise it may start those of its machine.
        mark: the variable that tells it its place.
        told: the settings that follow, each with the variable that said so.
        derived: those of them that nobody said; a configuration file wins over them.
    """

    name: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    is_rank: bool
    mark: str
    told: Mapping[str, Told] = field(default_factory=dict)
    derived: tuple[str, ...] = ()

    def tells(self, file: Container[str]) -> dict[str, Told]:
        """What it says, without what was derived and stands in the configuration file."""
        return {n: told for n, told in self.told.items() if not (n in self.derived and n in file)}


def around(env: Mapping[str, str]) -> Around | None:
    """What a scheduler says of the job; None where the launcher was started alone.

    Args:
        env: the environment.

    Raises:
        WorldError: its variables are incomplete or contradict each other.
    """
    found = _machines(env) or _started(env)
    if found is None or found.size <= 1:
        return None
    return found


def _machines(env: Mapping[str, str]) -> Around | None:
    """One launcher per machine, as torchrun's own variables say it (``PET_NNODES`` stands for --nnodes).

    Source: PyTorch documentation, "torchrun (Elastic Launch)"; Kubeflow Trainer sets them in each pod.
    """
    nodes, node = env.get("PET_NNODES", ""), env.get("PET_NODE_RANK", "")
    if not nodes or env.get("LOCAL_RANK"):
        return None
    names = {
        "num_machines": "PET_NNODES",
        "machine_rank": "PET_NODE_RANK",
        "nproc_per_node": "PET_NPROC_PER_NODE",
        "main_process_ip": "PET_MASTER_ADDR",
        "main_process_port": "PET_MASTER_PORT",
    }
    told = {name: Told(env[variable], variable) for name, variable in names.items() if env.get(variable)}
    most = nodes.rpartition(":")[2]
    size, rank = (int(text) if text.isdecimal() else 0 for text in (most, node))
    return Around("torchrun", rank, size, 0, 1, rank, size, False, "PET_NNODES", told)


def _started(env: Mapping[str, str]) -> Around | None:
    """A process that a scheduler, an MPI or torchrun started."""
    found = clusters.around(env)
    if found is None:
        return None
    rank, size, local_rank, local_size, node, nodes = found.place()
    is_rank = found.counts_ranks or size > nodes
    told, derived = _told(found, node, nodes)
    if is_rank:
        told["num_processes"] = Told(size, found.source(found.size_names))
    mark = found.source(found.rank_names)
    return Around(found.name, rank, size, local_rank, local_size, node, nodes, is_rank, mark, told, derived)


def _told(found: Scheduler, node: int, nodes: int) -> tuple[dict[str, Told], tuple[str, ...]]:
    """The settings that follow from a scheduler's words, and the names of those that are derived."""
    machines = found.source((*found.nodes_names, *clusters.NODES, *found.hosts_names, *found.size_names))
    machine = found.source((*found.node_names, *clusters.NODE, *found.rank_names))
    told = {"num_machines": Told(nodes, machines), "machine_rank": Told(node, machine)}
    address, port = found.address(), found.port()
    if address is not None:
        told["main_process_ip"] = Told(address, found.source(("MASTER_ADDR", *found.hosts_names)))
    elif nodes == 1:
        told["main_process_ip"] = Told(HERE, machines)
    if port is None:
        return told, ()
    told["main_process_port"] = Told(port, found.source(("MASTER_PORT", *found.job_names)))
    return told, () if found.env.get("MASTER_PORT") else ("main_process_port",)


def overruled(around: Around, origins: Mapping[str, tuple[Origin, ...]]) -> tuple[str, ...]:
    """One line for each value of a configuration file that a scheduler knows better.

    Args:
        around: what the scheduler says.
        origins: by setting, every source that gave a value, the winner first.
    """
    lines: list[str] = []
    for name in around.told:
        first, *others = origins[name]
        file = next((origin for origin in others if origin.source == "file"), None)
        if first.source != "scheduler" or file is None or file.value == first.value:
            continue
        what = f"{name} is {first.value}"
        if name == "machine_rank":
            what = f"machine {around.node} of {around.nodes}"
        lines.append(f"{what}, from {first.where} ({file.where.rpartition(':')[0]} says {file.value})")
    return tuple(lines) if not (around.is_rank and around.rank) else ()
