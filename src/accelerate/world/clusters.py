"""Detection of the launcher of this process: torchrun, a scheduler, or none. Pure functions.

``detect(env)`` looks for the variables of each launcher, the most specific first, and returns rank, world
size and machine of this process as one frozen value. Nothing here uses the network, a scheduler or torch, so
a dry run for any cluster can be computed and tested anywhere. Only what is no task itself is told from a rank
by more than variables: a shell that ``srun --pty`` has opened, and a process that a task has started.

Order of precedence: torchrun's protocol (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``), which our launcher
writes too; LSF's jsrun, Open MPI, MVAPICH and Hydra (MPICH, Intel MPI), whose daemons may have been
started by SLURM and then inherit the daemon's variables; SLURM; Kubeflow. Values missing from the protocol
are taken from a scheduler with the same rank and world size.

``WORLD_SIZE`` is binding: when it is set to two or more, the result has that size or there is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from accelerate.core.errors import WorldError
from accelerate.core.value_types import frozen_dataclass
from accelerate.world.network import DEFAULT_PORT, JOB_PORT_COUNT, is_loopback
from accelerate.world.slurm_lists import expand_counts, expand_nodes

Env = Mapping[str, str]
NODE = ("GROUP_RANK", "NODE_RANK", "CROSS_RANK")
NODES = ("GROUP_WORLD_SIZE", "NNODES", "CROSS_SIZE", "AZUREML_NODE_COUNT")
# Names the task of a scheduler, and its process, in the environment of what this process starts.
TASK_VARIABLE = "ACCELERATE_SCHEDULER_TASK"


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

    Attributes:
        rank, size: None when the launcher does not tell.
        local_rank, local_size, node, nodes, address: what ``read`` finds; None when the launcher does not
            tell, and ``resolve_place`` then derives it or says which variable is missing.
        port: that of rank 0, or one derived from the job's number; None without either.
    """

    name = ""
    hides_devices = True
    # Each process that it starts is a rank, also when there is only one per machine.
    starts_ranks = False
    rank_names: tuple[str, ...] = ()
    size_names: tuple[str, ...] = ()
    local_rank_names: tuple[str, ...] = ()
    local_size_names: tuple[str, ...] = ()
    # The numbers of processes on all machines, in SLURM's compact form.
    local_sizes_names: tuple[str, ...] = ()
    node_names: tuple[str, ...] = NODE
    nodes_names: tuple[str, ...] = NODES
    hosts_names: tuple[str, ...] = ()
    job_names: tuple[str, ...] = ()
    # Tell two jobs of the same size apart, where ``job_names`` do not.
    namespace_names: tuple[str, ...] = ()

    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None
    nodes: int | None = None
    address: str | None = None
    port: int | None = None

    def __init__(self, env: Env) -> None:
        self.env = env
        self.rank = read_number(env, *self.rank_names)
        self.size = read_number(env, *self.size_names)

    @classmethod
    def detect(cls, env: Env) -> bool:
        """Return True if this launcher started the process."""
        return read_number(env, *cls.rank_names) is not None and read_number(env, *cls.size_names) is not None

    def read(self) -> None:
        """Read what the launcher says beside rank and world size."""
        self.local_rank = read_number(self.env, *self.local_rank_names)
        self.local_size = read_number(self.env, *self.local_size_names)
        self.node = read_number(self.env, *self.node_names)
        self.nodes = read_number(self.env, *self.nodes_names)
        self.address = self.env.get("MASTER_ADDR") or None

    def cluster(self) -> ClusterRankInfo:
        """Return the complete and validated values.

        Raises:
            WorldError: a value is missing and cannot be derived, or two contradict each other.
        """
        rank, size, local_rank, local_size, node, nodes = self.resolve_place()
        address = self.address or ("127.0.0.1" if nodes == 1 else None)
        if address is None:
            raise WorldError(
                f"{size} processes on {nodes} machines were started by {self.name}, which does not say "
                "where rank 0 runs",
                why="MASTER_ADDR is not set",
                fix="export MASTER_ADDR=<host name of rank 0> on all machines",
            )
        port = DEFAULT_PORT if self.port is None else self.port
        cluster = ClusterRankInfo(
            self.name, rank, size, local_rank, local_size, node, nodes, address, port, self.hides_devices
        )
        for part, whole in (("rank", "size"), ("local_rank", "local_size"), ("node", "nodes")):
            if not 0 <= getattr(cluster, part) < getattr(cluster, whole):
                raise WorldError(
                    f"{self.name} says {part.replace('_', ' ')} {getattr(cluster, part)} of "
                    f"{getattr(cluster, whole)}",
                    why=f"{part} must be less than {whole}; all values: {vars(cluster)}",
                )
        if local_size > size or nodes > size:
            raise WorldError(
                f"{self.name} says {size} processes in all, but {local_size} on this machine "
                f"and {nodes} machines",
                fix="check WORLD_SIZE, LOCAL_WORLD_SIZE and the number of machines",
            )
        return cluster

    def resolve_place(self) -> tuple[int, int, int, int, int, int]:
        """Return (rank, size, local rank, local size, node, nodes), with missing values derived.

        Without their number, the machines are taken to be filled equally.

        Raises:
            WorldError: one of them is missing and cannot be derived.
        """
        self.read()
        rank, size, local_rank, local_size = self.rank, self.size, self.local_rank, self.local_size
        node, nodes = self.node, self.nodes
        if rank is not None and size is not None:
            is_unknown = local_size is None or local_rank is None
            if is_unknown and (size == 1 or nodes == 1 or is_loopback(self.address or "")):
                local_size = size if local_size is None else local_size
                local_rank = rank if local_rank is None else local_rank
            elif local_size is None:
                if nodes and size % nodes == 0:
                    local_size = size // nodes
                elif node and local_rank is not None and (rank - local_rank) % node == 0:
                    local_size = (rank - local_rank) // node
            if local_rank is not None and local_size is not None:
                nodes = -(-size // max(1, local_size)) if nodes is None else nodes
                node = derive_node(rank, local_rank, local_size, size, nodes) if node is None else node
        values = {
            "rank": (rank, self.rank_names),
            "size": (size, self.size_names),
            "local rank": (local_rank, self.local_rank_names),
            "local size": (local_size, (*self.local_sizes_names, *self.local_size_names)),
            "machine": (node, NODE),
        }
        for what, (value, names) in values.items():
            if value is None:
                raise WorldError(
                    f"{self.name} started this process, but its {what} cannot be told",
                    why=f"none of {', '.join(names)} is set",
                    fix=f"export {names[0]}, or start the processes with accelerate launch or torchrun",
                )
        self.port = read_number(self.env, "MASTER_PORT")
        if self.port is None and self.job_names:
            self.port = job_port(self.env, *self.job_names)
        return rank, size, local_rank, local_size, node, nodes  # type: ignore[return-value]

    @property
    def task(self) -> str:
        """The variables that tell this task from those of other jobs and steps, with their values."""
        names = (*self.rank_names, *self.size_names, *self.job_names, *self.namespace_names)
        return " ".join(f"{name}={self.env[name]}" for name in names if self.env.get(name))

    def mark_task(self) -> dict[str, str]:
        """Return the variable by which all that this process starts can tell that it is no task itself."""
        return {TASK_VARIABLE: f"{os.getpid()} {self.task}"}

    def is_inherited(self) -> bool:
        """Return whether a task has started this process, which has its variables and is no task itself.

        With torchrun's variables it is a rank all the same. A program takes these from a helper that is to
        work alone, and leaves the scheduler's. A step that a task starts has tasks of its own.
        """
        if TorchrunEnvironment.detect(self.env):
            return False
        process, _, task = self.env.get(TASK_VARIABLE, "").partition(" ")
        if task == self.task:
            return process != str(os.getpid())
        import multiprocessing

        return multiprocessing.parent_process() is not None

    def find_variable(self, names: tuple[str, ...]) -> str:
        """Return the first variable of ``names`` that is set, or the launcher's name if none is."""
        return next((name for name in names if self.env.get(name)), self.name)


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

    def read(self) -> None:
        """Read the host list too: ``LSB_MCPU_HOSTS`` is ``"host slots host slots ..."``."""
        super().read()
        listed = self.env.get("LSB_MCPU_HOSTS", "").split()[::2] or self.env.get("LSB_HOSTS", "").split()
        hosts = list(dict.fromkeys(listed))
        if hosts and self.address is None:
            # On machines with a launch node it stands first and no rank runs there.
            machines = -(-(self.size or 1) // (self.local_size or 1))
            self.address = hosts[1 if len(hosts) == machines + 1 else 0]


class OpenMPIEnvironment(ClusterEnvironment):
    """Open MPI's ``mpirun``. Source: Open MPI FAQ, "environment variables set at run time"."""

    name = "Open MPI"
    nodes_names = (*NODES, "OMPI_MCA_orte_num_nodes")
    rank_names = ("OMPI_COMM_WORLD_RANK",)
    size_names = ("OMPI_COMM_WORLD_SIZE",)
    local_rank_names = ("OMPI_COMM_WORLD_LOCAL_RANK",)
    local_size_names = ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    namespace_names = ("PMIX_NAMESPACE",)


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
    ENVIRONMENT=BATCH and without the step's variables (SLURM_STEP_*), which only srun sets. A script that is
    sent from a step of several tasks inherits them; its SLURM_GTIDS names one task on this machine. What
    is typed in a shell of ``srun --ntasks=4 --pty`` has all variables of task 0; the other shells have ended.

    Source: srun(1), sbatch(1) and salloc(1), "OUTPUT ENVIRONMENT VARIABLES".
    """

    name = "SLURM"
    rank_names = ("SLURM_PROCID",)
    size_names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    local_rank_names = ("SLURM_LOCALID",)
    local_sizes_names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    local_size_names = ("SLURM_NTASKS_PER_NODE",)
    node_names = ("SLURM_NODEID",)
    nodes_names = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    hosts_names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    job_names = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    step_variables = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_ID", "SLURM_STEPID")

    @classmethod
    def detect(cls, env: Env) -> bool:
        in_step = any(name in env for name in cls.step_variables)
        if in_step and env.get("SLURM_GTIDS") == "0" and (counts := env.get("SLURM_STEP_TASKS_PER_NODE")):
            node = read_number(env, *cls.node_names) or 0
            in_step = expand_counts(counts, where="SLURM_STEP_TASKS_PER_NODE")[node : node + 1] == [1]
        is_task = in_step or env.get("ENVIRONMENT") != "BATCH"
        return is_task and super().detect(env) and not cls._is_typed_in_shell(env)

    @staticmethod
    def _is_typed_in_shell(env: Env) -> bool:
        """Return whether the task is a shell on the terminal of ``srun --pty``, and this process its command.

        Of the tasks only the first has the terminal. A shell there runs each command in a process group of
        its own (job control), while a program that is the task itself is in the group of the task.
        SLURM_PTY_PORT alone says nothing: a step started from salloc's shell inherits it.
        """
        if "SLURM_PTY_PORT" not in env:
            return False
        task = env.get("SLURM_TASK_PID", "")
        try:
            on_terminal = os.readlink(f"/proc/{task}/fd/0").startswith("/dev/pts/")
            return on_terminal and os.getpgid(int(task)) != os.getpgid(0)
        except (OSError, ValueError):  # the task is not to be seen, as in another namespace of processes
            return False

    def read(self) -> None:
        """Read the lists of tasks and hosts too."""
        super().read()
        sizes, hosts = self.find_variable(self.local_sizes_names), self.find_variable(self.hosts_names)
        counts = [self.local_size] * self.nodes if self.local_size and self.nodes else []
        if sizes in self.local_sizes_names:
            counts = expand_counts(self.env[sizes], where=sizes)
        if counts and sum(counts) != self.size:
            listed = self.find_variable((*self.local_sizes_names, *self.local_size_names))
            total = self.find_variable(self.size_names)
            raise WorldError(
                f"SLURM started {self.size} tasks, but its machines hold {sum(counts)}",
                why=f"{total}={self.env[total]} contradicts {listed}={self.env[listed]}",
                fix="start the tasks with one srun, or set both in the job",
            )
        on_list = self.node is not None and self.node < len(counts)
        self.local_size = counts[self.node] if on_list and self.node is not None else None
        if self.address is None and self.nodes != 1 and hosts in self.hosts_names:
            self.address = expand_nodes(self.env[hosts], where=hosts)[0]


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

    def read(self) -> None:
        """Take the pod for the machine."""
        super().read()
        each = self.processes_per_pod()
        if each > 1:
            raise WorldError(
                f"the job has {each} processes per pod, and this one does not know which it is",
                why=f"PET_NPROC_PER_NODE={each} and LOCAL_RANK is not set",
                fix="start the script in the pod with accelerate launch or torchrun",
            )
        self.local_rank, self.local_size, self.node, self.nodes = 0, 1, self.rank, self.size

    def processes_per_pod(self) -> int:
        """Return how many processes run the script in each pod."""
        text = self.env.get("PET_NPROC_PER_NODE", "")
        return int(text) if text.isdigit() else 1


class TorchrunNodeRankEnvironment(KubeflowEnvironment):
    """A launcher per machine that gets the index of its machine in torchrun's variables, as in pods."""

    name = TorchrunEnvironment.name

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        if KubeflowEnvironment.detect(env):
            self.name = KubeflowEnvironment.name

    def processes_per_pod(self) -> int:
        """Return 1: the launcher, which starts the others itself."""
        return 1


SCHEDULERS: tuple[type[ClusterEnvironment], ...] = (
    LSFEnvironment,
    OpenMPIEnvironment,
    MVAPICHEnvironment,
    MPICHHydraEnvironment,
    SLURMEnvironment,
)


def detect(env: Env) -> ClusterRankInfo | None:
    """Detect rank and machine of this process; None when it was started alone.

    The only task of a scheduler's job counts as started alone, and so does what a task has started;
    torchrun's protocol with ``WORLD_SIZE=1`` gives a group of one.

    Raises:
        WorldError: the variables are incomplete or contradict each other.
    """
    scheduler, torchrun = find_scheduler(env), TorchrunEnvironment(env)
    rank, size = torchrun.rank, torchrun.size
    if rank is not None and size is not None:
        if scheduler is None and KubeflowEnvironment.detect(env):
            return KubeflowEnvironment(env).cluster()
        if scheduler is not None and is_same_place(scheduler, torchrun):
            # Its words complete torchrun's, and it may hide devices from this process.
            if not all(env.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")):
                cluster = scheduler.cluster()
                torchrun.env = {
                    "LOCAL_RANK": str(cluster.local_rank),
                    "LOCAL_WORLD_SIZE": str(cluster.local_size),
                    "GROUP_RANK": str(cluster.node),
                    "GROUP_WORLD_SIZE": str(cluster.nodes),
                    "MASTER_ADDR": cluster.address,
                    "MASTER_PORT": str(cluster.port),
                    **env,
                }
            torchrun.hides_devices = scheduler.hides_devices
        return torchrun.cluster()
    if scheduler is None or scheduler.is_inherited():
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
    for kind in SCHEDULERS:
        if any(env.get(name) for name in kind.rank_names) and kind.detect(env):
            return kind(env)
    return None


def is_same_place(one: ClusterEnvironment, other: ClusterEnvironment) -> bool:
    """Return True if two launchers say the same rank and world size."""
    return (one.rank, one.size) == (other.rank, other.size)


def is_left_from_local_job(env: Env) -> bool:
    """Return whether RANK and WORLD_SIZE, which count machines for a launcher, count none: all are this one.

    Pods and whoever numbers the machines say so in variables of their own.
    """
    signs = ("KUBERNETES_SERVICE_HOST", *NODE, *NODES)
    if find_scheduler(env) or any(env.get(name) for name in signs) or any(n.startswith("PET_") for n in env):
        return False
    return is_loopback(env.get("MASTER_ADDR", ""))


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


# --- parsers of variables


def read_number(env: Env, *names: str) -> int | None:
    """Return the first number of zero or more in the variables ``names``; -1 means unset, as in torch."""
    for name in names:
        text = env.get(name, "").strip()
        if not text:
            continue
        try:
            value = int(text)
        except ValueError:
            raise WorldError(
                f"{name}={text!r} is not a whole number", fix=f"unset {name}, or set it right"
            ) from None
        if value >= 0:
            return value
    return None


def derive_node(rank: int, local_rank: int, local_size: int, size: int, nodes: int) -> int | None:
    """Derive the machine of a rank: ranks fill the machines one by one (block), or in turn (cyclic).

    Block wins if both explain the numbers, since it is every launcher's default. None if
    the machines hold different numbers: then a rank alone cannot tell.
    """
    if rank == local_rank:
        return 0
    if nodes * local_size != size:
        return None
    if rank == (rank // local_size) * local_size + local_rank:
        return rank // local_size
    return rank % nodes if rank // nodes == local_rank else None


def job_port(env: Env, job: str, step: str = "") -> int:
    """Return a port that is the same on every rank of a job, and likely different for two jobs."""
    digits = re.sub(r"\D", "", env.get(job, ""))
    job_number = int(digits or 0) * 8 + (read_number(env, step) or 0 if step else 0)
    return DEFAULT_PORT + job_number % JOB_PORT_COUNT
