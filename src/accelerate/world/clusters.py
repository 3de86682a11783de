"""Detection of the launcher of this process: torchrun, a scheduler, or none. Pure functions.

``detect(env)`` looks for the variables of each launcher, the most specific first, and returns rank, world
size and machine of this process as one frozen value. Nothing here uses the network, a scheduler or torch, so
a dry run for any cluster can be computed and tested anywhere.

Order of precedence: torchrun's protocol (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``), which our launcher
writes too; LSF's jsrun, Open MPI, MVAPICH and Hydra (MPICH, Intel MPI), whose daemons may have been
started by SLURM and then inherit the daemon's variables; SLURM; Kubeflow. Values missing from the protocol
are taken from a scheduler with the same rank and world size.

``WORLD_SIZE`` is binding: when it is set to two or more, the result has that size or there is an error.
"""

from __future__ import annotations

from dataclasses import fields

from accelerate.core.errors import WorldError
from accelerate.core.frozen_dataclass import frozen_dataclass
from accelerate.world.cluster_variables import (
    DEFAULT_PORT,
    Env,
    derive_node,
    is_loopback,
    job_port,
    read_number,
)
from accelerate.world.slurm_lists import expand_counts, expand_nodes


@frozen_dataclass
class ClusterRankInfo:
    """The rank and machine of one process in a launched group, and the rendezvous address.

    Attributes:
        name: the launcher.
        rank, size: rank of this process and world size.
        local_rank, local_size: rank on this machine, and number of processes on it.
        node, nodes: index of this machine, and number of machines.
        address, port: address that rank 0 listens on.
        hides_devices: the scheduler may show each process only its own devices, so that the local rank is
            no device index.
    """

    name: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    address: str
    port: int
    hides_devices: bool = False


class ClusterEnvironment:
    """A launcher: how to detect it, and the variables that it sets.

    A getter returns None when the launcher does not tell; ``cluster`` then derives the value or says
    which variable is missing.
    """

    name = ""
    hides_devices = True
    # Each process that it starts is a rank, also when there is only one per machine.
    starts_ranks = False
    rank_names: tuple[str, ...] = ()
    size_names: tuple[str, ...] = ()
    local_rank_names: tuple[str, ...] = ()
    local_size_names: tuple[str, ...] = ()
    node_names: tuple[str, ...] = ()
    nodes_names: tuple[str, ...] = ()
    hosts_names: tuple[str, ...] = ()
    job_names: tuple[str, ...] = ()

    def __init__(self, env: Env) -> None:
        self.env = env

    @classmethod
    def detect(cls, env: Env) -> bool:
        """Return True if this launcher started the process."""
        return read_number(env, *cls.rank_names) is not None and read_number(env, *cls.size_names) is not None

    def rank(self) -> int | None:
        return read_number(self.env, *self.rank_names)

    def size(self) -> int | None:
        return read_number(self.env, *self.size_names)

    def local_rank(self) -> int | None:
        return read_number(self.env, *self.local_rank_names)

    def local_size(self) -> int | None:
        return read_number(self.env, *self.local_size_names)

    def node(self) -> int | None:
        return read_number(self.env, *self.node_names, *NODE)

    def nodes(self) -> int | None:
        return read_number(self.env, *self.nodes_names, *NODES)

    def address(self) -> str | None:
        return self.env.get("MASTER_ADDR") or None

    def port(self) -> int | None:
        return read_number(self.env, "MASTER_PORT")

    def cluster(self) -> ClusterRankInfo:
        """Return the complete and validated values.

        Raises:
            WorldError: a value is missing and cannot be derived, or two contradict each other.
        """
        rank, size, local_rank, local_size, node, nodes = self.resolve_place()
        address = self.address() or ("127.0.0.1" if nodes == 1 else None)
        if address is None:
            raise WorldError(
                f"{size} processes on {nodes} machines were started by {self.name}, which does not say "
                "where rank 0 runs",
                why="MASTER_ADDR is not set",
                fix="export MASTER_ADDR=<host name of rank 0> on all machines",
            )
        port = self.port()
        port = DEFAULT_PORT if port is None else port
        return _validate(
            ClusterRankInfo(
                self.name, rank, size, local_rank, local_size, node, nodes, address, port, self.hides_devices
            )
        )

    def resolve_place(self) -> tuple[int, int, int, int, int, int]:
        """Return (rank, size, local rank, local size, node, nodes), with missing values derived.

        Raises:
            WorldError: one of them is missing and cannot be derived.
        """
        rank = self._require("rank", self.rank(), self.rank_names)
        size = self._require("size", self.size(), self.size_names)
        local_rank, local_size = self._resolve_local(rank, size)
        return rank, size, local_rank, local_size, *self._resolve_node(rank, size, local_rank, local_size)

    def find_variable(self, names: tuple[str, ...]) -> str:
        """Return the first variable of ``names`` that is set, or the launcher's name if none is."""
        return next((name for name in names if self.env.get(name)), self.name)

    def _resolve_local(self, rank: int, size: int) -> tuple[int, int]:
        local_rank, local_size = self.local_rank(), self.local_size()
        alone = size == 1 or self.nodes() == 1 or is_loopback(self.address())
        if local_size is None:
            nodes = self.nodes()
            node = self.node()
            if alone:
                local_size = size
            elif nodes and size % nodes == 0:
                local_size = size // nodes
            elif node and local_rank is not None and (rank - local_rank) % node == 0:
                local_size = (rank - local_rank) // node
        if local_rank is None and alone:
            local_rank = rank
        return (
            self._require("local rank", local_rank, self.local_rank_names),
            self._require("local size", local_size, self.local_size_names),
        )

    def _resolve_node(self, rank: int, size: int, local_rank: int, local_size: int) -> tuple[int, int]:
        """Return (node, nodes); derived from equally filled machines if the launcher does not set them."""
        nodes, node = self.nodes(), self.node()
        if nodes is None:
            nodes = -(-size // max(1, local_size))
        if node is None:
            node = derive_node(rank, local_rank, local_size, size, nodes)
        return self._require("machine", node, NODE), nodes

    def _require(self, what: str, value: int | None, names: tuple[str, ...]) -> int:
        if value is not None:
            return value
        raise WorldError(
            f"{self.name} started this process, but its {what} cannot be told",
            why=f"none of {', '.join(names)} is set",
            fix=f"export {names[0]}, or start the processes with accelerate launch or torchrun",
        )


NODE = ("GROUP_RANK", "NODE_RANK", "CROSS_RANK")
NODES = ("GROUP_WORLD_SIZE", "NNODES", "CROSS_SIZE", "AZUREML_NODE_COUNT")


class TorchrunEnvironment(ClusterEnvironment):
    """The variables of torchrun, also written by our launcher, DeepSpeed's and users' scripts.

    Source: PyTorch documentation, "torchrun (Elastic Launch)", Environment Variables.
    """

    name = "torchrun"
    hides_devices = False
    starts_ranks = True
    rank_names = ("RANK",)
    size_names = ("WORLD_SIZE",)
    local_rank_names = ("LOCAL_RANK",)
    local_size_names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")


class LSFEnvironment(ClusterEnvironment):
    """IBM LSF with the job step manager (``jsrun``).

    Source: IBM Spectrum LSF, "Environment variable reference" (LSB_JOBID, LSB_MCPU_HOSTS); IBM Job Step
    Manager, "Environment variables" (JSM_NAMESPACE_*).
    """

    name = "LSF"
    rank_names = ("JSM_NAMESPACE_RANK",)
    size_names = ("JSM_NAMESPACE_SIZE",)
    local_rank_names = ("JSM_NAMESPACE_LOCAL_RANK",)
    local_size_names = ("JSM_NAMESPACE_LOCAL_SIZE",)
    hosts_names = ("LSB_MCPU_HOSTS", "LSB_HOSTS")
    job_names = ("LSB_JOBID",)

    @classmethod
    def detect(cls, env: Env) -> bool:
        return "LSB_JOBID" in env and super().detect(env)

    def hosts(self) -> list[str]:
        """Return the hosts of the job, in order: ``LSB_MCPU_HOSTS`` is ``"host slots host slots ..."``."""
        names = self.env.get("LSB_MCPU_HOSTS", "").split()[::2] or self.env.get("LSB_HOSTS", "").split()
        return list(dict.fromkeys(names))

    def address(self) -> str | None:
        hosts, size, local = self.hosts(), self.size() or 1, self.local_size() or 1
        # On machines with a launch node it stands first and no rank runs there.
        first = 1 if len(hosts) == -(-size // local) + 1 else 0
        return super().address() or (hosts[first] if hosts else None)

    def port(self) -> int | None:
        port = super().port()
        return job_port(self.env, "LSB_JOBID") if port is None else port


class OpenMPIEnvironment(ClusterEnvironment):
    """Open MPI's ``mpirun``. Source: Open MPI FAQ, "environment variables set at run time"."""

    name = "Open MPI"
    nodes_names = ("OMPI_MCA_orte_num_nodes",)
    rank_names = ("OMPI_COMM_WORLD_RANK",)
    size_names = ("OMPI_COMM_WORLD_SIZE",)
    local_rank_names = ("OMPI_COMM_WORLD_LOCAL_RANK",)
    local_size_names = ("OMPI_COMM_WORLD_LOCAL_SIZE",)

    def nodes(self) -> int | None:
        return read_number(self.env, *NODES, *self.nodes_names)


class MVAPICHEnvironment(ClusterEnvironment):
    """MVAPICH2's ``mpirun_rsh``. Source: MVAPICH2 User Guide, "Runtime parameters"."""

    name = "MVAPICH"
    rank_names = ("MV2_COMM_WORLD_RANK",)
    size_names = ("MV2_COMM_WORLD_SIZE",)
    local_rank_names = ("MV2_COMM_WORLD_LOCAL_RANK",)
    local_size_names = ("MV2_COMM_WORLD_LOCAL_SIZE",)


class MPICHHydraEnvironment(ClusterEnvironment):
    """MPICH's and Intel MPI's ``mpiexec``, and Cray's PALS.

    Source: MPICH wiki, "Using the Hydra Process Manager"; Intel MPI Developer Reference; PALS mpiexec(1).
    """

    name = "MPI (Hydra)"
    rank_names = ("PMI_RANK",)
    size_names = ("PMI_SIZE",)
    local_rank_names = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK")
    local_size_names = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")

    @classmethod
    def detect(cls, env: Env) -> bool:
        # srun --mpi=pmi2 sets the first two alone; SLURM then tells more.
        is_hydra = read_number(env, *cls.local_rank_names) is not None or "SLURM_PROCID" not in env
        return is_hydra and super().detect(env)


class SLURMEnvironment(ClusterEnvironment):
    """SLURM: a task of a job step, that is, a process started by ``srun``.

    A shell of ``salloc`` and the script of ``sbatch`` have the job's variables too, SLURM_NTASKS among
    them, but are one process, not one of that many. salloc's has no SLURM_PROCID; sbatch's has it, with
    ENVIRONMENT=BATCH and without the step's variables (SLURM_STEP_*), which only srun sets.

    Source: srun(1), sbatch(1) and salloc(1), "OUTPUT ENVIRONMENT VARIABLES".
    """

    name = "SLURM"
    rank_names = ("SLURM_PROCID",)
    size_names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    local_rank_names = ("SLURM_LOCALID",)
    local_size_names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    node_names = ("SLURM_NODEID",)
    nodes_names = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    hosts_names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    job_names = ("SLURM_JOB_ID",)
    step_variables = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_ID", "SLURM_STEPID")

    @classmethod
    def detect(cls, env: Env) -> bool:
        in_step = any(name in env for name in cls.step_variables) or env.get("ENVIRONMENT") != "BATCH"
        return in_step and super().detect(env)

    def task_counts(self) -> list[int]:
        """Return the number of tasks on each machine of the step, in order; empty if SLURM does not tell."""
        for name in self.local_size_names[:2]:
            if self.env.get(name):
                return expand_counts(self.env[name], where=name)
        each, nodes = read_number(self.env, "SLURM_NTASKS_PER_NODE"), self.nodes()
        return [each] * nodes if each and nodes else []

    def hosts(self) -> list[str]:
        """Return the hosts of the step, in order."""
        for name in self.hosts_names:
            if self.env.get(name):
                return expand_nodes(self.env[name], where=name)
        return []

    def local_size(self) -> int | None:
        task_counts, node = self.task_counts(), self.node()
        if not task_counts:
            return None
        if sum(task_counts) != self.size():
            raise WorldError(
                f"SLURM started {self.size()} tasks, but its machines hold {sum(task_counts)}",
                why=f"{self._source_text(self.size_names)} contradicts "
                f"{self._source_text(self.local_size_names)}",
                fix="start the tasks with one srun, or set both in the job",
            )
        return task_counts[node] if node is not None and node < len(task_counts) else None

    def node(self) -> int | None:
        return read_number(self.env, *self.node_names)

    def nodes(self) -> int | None:
        return read_number(self.env, *self.nodes_names)

    def address(self) -> str | None:
        hosts = self.hosts() if self.nodes() != 1 else []
        return super().address() or (hosts[0] if hosts else None)

    def port(self) -> int | None:
        port = super().port()
        return job_port(self.env, "SLURM_JOB_ID", "SLURM_STEP_ID") if port is None else port

    def _source_text(self, names: tuple[str, ...]) -> str:
        return next((f"{name}={self.env[name]}" for name in names if self.env.get(name)), names[0])


class KubeflowEnvironment(ClusterEnvironment):
    """A pod of a Kubeflow PyTorchJob that runs the script itself, one process per pod.

    The operator writes RANK (the pod's number), WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and no local
    rank. Source: Kubeflow Training Operator documentation, "PyTorch Training (PyTorchJob)".
    """

    name = "Kubeflow"
    hides_devices = False
    rank_names = ("RANK",)
    size_names = ("WORLD_SIZE",)

    @classmethod
    def detect(cls, env: Env) -> bool:
        return "KUBERNETES_SERVICE_HOST" in env and "LOCAL_RANK" not in env and super().detect(env)

    def local_rank(self) -> int | None:
        per_pod = (
            read_number(self.env, "PET_NPROC_PER_NODE")
            if self.env.get("PET_NPROC_PER_NODE", "").isdigit()
            else 1
        )
        if per_pod and per_pod > 1:
            raise WorldError(
                f"the job has {per_pod} processes per pod, and this one does not know which it is",
                why=f"PET_NPROC_PER_NODE={per_pod} and LOCAL_RANK is not set",
                fix="start the script in the pod with accelerate launch or torchrun",
            )
        return 0

    def local_size(self) -> int | None:
        return 1

    def node(self) -> int | None:
        return self.rank()

    def nodes(self) -> int | None:
        return self.size()


class TorchrunNodeRankEnvironment(KubeflowEnvironment):
    """A launcher per machine that gets the index of its machine in torchrun's variables, as in pods."""

    name = TorchrunEnvironment.name

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        if KubeflowEnvironment.detect(env):
            self.name = KubeflowEnvironment.name

    def local_rank(self) -> int:
        return 0


SCHEDULERS: tuple[type[ClusterEnvironment], ...] = (
    LSFEnvironment,
    OpenMPIEnvironment,
    MVAPICHEnvironment,
    MPICHHydraEnvironment,
    SLURMEnvironment,
)


def detect(env: Env) -> ClusterRankInfo | None:
    """Detect rank and machine of this process; None when it was started alone.

    The only task of a scheduler's job counts as started alone; torchrun's protocol with ``WORLD_SIZE=1``
    gives a group of one.

    Raises:
        WorldError: the variables are incomplete or contradict each other.
    """
    scheduler = find_scheduler(env)
    rank, size = read_number(env, "RANK"), read_number(env, "WORLD_SIZE")
    if rank is not None and size is not None:
        if KubeflowEnvironment.detect(env) and scheduler is None:
            return KubeflowEnvironment(env).cluster()
        return torchrun_protocol(env).cluster()
    if scheduler is None:
        _refuse_partial(env, rank, size)
        return None
    cluster = scheduler.cluster()
    if size not in (None, cluster.size):
        raise WorldError(
            f"WORLD_SIZE={size}, but {cluster.name} started {cluster.size} processes",
            fix=f"unset WORLD_SIZE, or start {size} processes",
        )
    return cluster if cluster.size > 1 else None


def find_scheduler(env: Env) -> ClusterEnvironment | None:
    """Return the scheduler or MPI that started this process, or None. torchrun is no scheduler."""
    return next((scheduler(env) for scheduler in SCHEDULERS if scheduler.detect(env)), None)


def detect_outer_scheduler(env: Env) -> ClusterEnvironment | None:
    """Detect the scheduler that started a launcher; None when it was started alone.

    torchrun's protocol without a local rank counts machines for a launcher, whoever wrote it: a process that
    could be a rank would have a local rank.
    """
    scheduler, torchrun = find_scheduler(env), TorchrunEnvironment(env)
    rank, size = torchrun.rank(), torchrun.size()
    if rank is None or size is None:
        return scheduler
    exported = "TORCHELASTIC_RUN_ID" not in env
    if scheduler is not None and exported and (scheduler.rank(), scheduler.size()) == (rank, size):
        return scheduler
    return torchrun if env.get("LOCAL_RANK") else TorchrunNodeRankEnvironment(env)


def torchrun_protocol(env: Env) -> ClusterEnvironment:
    """Return torchrun's protocol; missing values come from a scheduler with the same rank and world size.

    Such a scheduler may also hide devices from this process.
    """
    scheduler = find_scheduler(env)
    torchrun = TorchrunEnvironment(env)
    if scheduler is None or (scheduler.rank(), scheduler.size()) != (torchrun.rank(), torchrun.size()):
        return torchrun
    if not all(env.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")):
        torchrun = TorchrunEnvironment({**_torchrun_variables(scheduler.cluster()), **env})
    torchrun.hides_devices = scheduler.hides_devices
    return torchrun


def _torchrun_variables(cluster: ClusterRankInfo) -> dict[str, str]:
    return {
        "LOCAL_RANK": str(cluster.local_rank),
        "LOCAL_WORLD_SIZE": str(cluster.local_size),
        "GROUP_RANK": str(cluster.node),
        "GROUP_WORLD_SIZE": str(cluster.nodes),
        "MASTER_ADDR": cluster.address,
        "MASTER_PORT": str(cluster.port),
    }


def _refuse_partial(env: Env, rank: int | None, size: int | None) -> None:
    """Refuse incomplete torchrun variables without a launcher, unless they mean a single process."""
    local_rank = read_number(env, "LOCAL_RANK")
    if rank is None and (size or 1) == 1 and not local_rank:
        return
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank}
    present = ", ".join(f"{name}={value}" for name, value in variables.items() if value is not None)
    missing = [name for name in ("RANK", "WORLD_SIZE") if variables[name] is None]
    raise WorldError(
        f"{present} is set, but {' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not",
        why="a process of a group needs RANK, WORLD_SIZE and LOCAL_RANK",
        fix=f"start the script with accelerate launch or torchrun, or unset {present.split('=')[0]}",
    )


def _validate(cluster: ClusterRankInfo) -> ClusterRankInfo:
    values = {item.name: getattr(cluster, item.name) for item in fields(cluster)}
    for part, whole in (("rank", "size"), ("local_rank", "local_size"), ("node", "nodes")):
        if not 0 <= values[part] < values[whole]:
            raise WorldError(
                f"{cluster.name} says {part.replace('_', ' ')} {values[part]} of {values[whole]}",
                why=f"{part} must be less than {whole}; all values: {values}",
            )
    if cluster.local_size > cluster.size or cluster.nodes > cluster.size:
        raise WorldError(
            f"{cluster.name} says {cluster.size} processes in all, but {cluster.local_size} on this machine "
            f"and {cluster.nodes} machines",
            fix="check WORLD_SIZE, LOCAL_WORLD_SIZE and the number of machines",
        )
    return cluster
