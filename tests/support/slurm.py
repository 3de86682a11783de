"""A small SLURM on this machine: a controller and two nodes, n1 and n2, all on the loopback address.

    with Slurm() as slurm:
        running = Running(["srun", "-N2", "-n2", ...], env=slurm.env)

It has its own folder, its own munge daemon and its own ports, so it disturbs no other. The names of the nodes
have to resolve, because a job is told its machines by name: they are added to /etc/hosts and taken out again.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from tests.support.environment import clean
from tests.support.free_ports import free_port

PROGRAMS = ("slurmctld", "slurmd", "srun", "sinfo", "munged", "setpriv")
NODES = ("n1", "n2")
HOSTS = Path("/etc/hosts")
MARK = "# of the tests of accelerate"

CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
RequeueExit=75
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=2
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool_%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
KillWait=2
UnkillableStepTimeout=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs=2 State=UNKNOWN
PartitionName=tests Nodes=n[1-2] Default=YES MaxTime=5 State=UP OverSubscribe=FORCE:8
"""


def missing() -> str:
    """Why no SLURM can be started here; empty when it can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install slurm-wlm slurm-wlm-basic-plugins munge"
    return "" if os.geteuid() == 0 else "SLURM's daemons need root here"


class Slurm:
    """A controller and two nodes, while the ``with`` block lasts.

    Attributes:
        env: what a command needs to find them.
    """

    def __init__(self) -> None:
        # Short and open to all: munge's socket lies in it, and its path may have 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.env = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path()}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            _reap(daemon)
        self._end_steps()
        _name_nodes(False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, *command: str) -> str:
        """What a command of SLURM prints."""
        done = subprocess.run(command, env=clean(self.env), capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def _end_steps(self) -> None:
        """Ends what manages a step and has nobody left to report to; it has a log of this folder open."""
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                files = process.open_files() if process.info["name"] == "slurmstepd" else []
                if any(file.path.startswith(f"{self.folder}/") for file in files):
                    process.kill()

    def _start(self) -> None:
        for name in ("state", "spool_n1", "spool_n2", "munge"):
            (self.folder / name).mkdir()
        ports = dict(zip(("port", *NODES), (free_port() for _ in range(3)), strict=True))
        host = socket.gethostname().split(".")[0]
        text = CONFIGURATION.format(folder=self.folder, host=host, **ports)
        (self.folder / "slurm.conf").write_text(text)
        _name_nodes(True)
        self._munge()
        self._run("slurmctld", "-D")
        for node in NODES:
            self._run("slurmd", "-D", "-N", node)
        self._wait_until_idle()

    def _munge(self) -> None:
        folder, user = self.folder / "munge", pwd.getpwnam("munge")
        (folder / "key").write_bytes(os.urandom(128))
        for path in (folder, folder / "key"):
            os.chown(path, user.pw_uid, user.pw_gid)
        folder.chmod(0o755)
        (folder / "key").chmod(0o600)
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder / name}" for option, name in files.items()]
        as_munge = (f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups")
        self._run(*as_munge, "munged", "--foreground", f"--key-file={folder / 'key'}", *options)
        self._wait("munge", (folder / "socket").exists)

    def _run(self, *command: str) -> None:
        with (self.folder / f"daemon_{len(self._daemons)}.out").open("wb") as out:
            # Whatever becomes of the tests, the daemons go with them.
            daemon = subprocess.Popen(
                ["setpriv", "--pdeathsig=TERM", *command],
                env=clean(self.env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        self._daemons.append(daemon)

    def _wait_until_idle(self) -> None:
        def idle() -> bool:
            told = subprocess.run(
                ["sinfo", "-h", "-N", "-o", "%N %t"],
                env=clean(self.env),
                capture_output=True,
                text=True,
                check=False,
                timeout=30,
            )
            return sorted(told.stdout.split("\n")) == ["", "n1 idle", "n2 idle"]

        self._wait("two idle nodes", idle)

    def _wait(self, what: str, arrived: object) -> None:
        assert callable(arrived)
        deadline = time.monotonic() + 30
        while not arrived():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"no {what}; ended: {ended}\n{self._logs()}")
            time.sleep(0.05)

    def _logs(self) -> str:
        files = sorted(
            [*self.folder.glob("*.log"), *self.folder.glob("*.out"), *self.folder.glob("munge/log")]
        )
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)


def _reap(daemon: subprocess.Popen[bytes]) -> None:
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _name_nodes(there: bool) -> None:
    """Adds the nodes' names to /etc/hosts, or takes them out again. The file is rewritten in place."""
    kept = [line for line in HOSTS.read_text().splitlines() if not line.endswith(MARK)]
    if there:
        kept.append(f"127.0.0.1 {' '.join(NODES)} {MARK}")
    HOSTS.write_text("\n".join(kept) + "\n")
