"""Record what the public package does, for the tests of this folder, which never run it.

``make bench-peer``, then ``.venv/bin/python -m tests.clients.record`` writes the JSON files beside this one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psutil

from tests.clients.calls import TOGETHER
from tests.support.environment import ROOT, clean
from tests.support.ranks import free_port

HERE = Path(__file__).parent
PEER = ROOT / ".venv-peer" / "bin" / "python"
_VERSIONS = """
import json, torch
from importlib.metadata import version
names = ("accelerate", "transformers", "datasets", "torchdata", "torch", "numpy")
print(json.dumps({name: version(name) for name in names} | {"cpu": torch.backends.cpu.get_cpu_capability()}))
"""


def launch(
    python: Path | str,
    size: int,
    module: str,
    *jobs: str,
    env: dict[str, Any] | None = None,
    start: Any = None,
) -> dict[str, Any]:
    """What the jobs of a client module report, run by ``python`` on ``size`` processes.

    Args:
        start: the words that start the processes, instead of torchrun; they end before the script.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={size}", f"--master_port={free_port()}"]
        command = [
            str(python),
            *(start or (torchrun if size > 1 else [])),
            "-m",
            module,
            str(out),
            folder,
            *jobs,
        ]
        done = _run(command, clean({"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", **(env or {})}))
        if done.returncode:
            raise AssertionError(
                f"{module} on {size} processes failed\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
            )
        return json.loads(out.read_text())


def _run(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Like subprocess.run, but at the timeout nothing that was started lives on."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            out, error = process.communicate(timeout=100)
        except BaseException:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, error)


def versions(python: Path | str) -> dict[str, str]:
    """Of the packages that decide the numbers, and the kind of processor that torch computes for."""
    done = subprocess.run([str(python), "-c", _VERSIONS], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    """Record the client modules named on the command line, all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", default=["trainer", "calls"])
    for client in parser.parse_args().clients:
        module = f"tests.clients.{client}"
        # The public package makes a group of two CPU processes only when it is told to.
        told = {"ACCELERATE_USE_CPU": "1"}
        two = TOGETHER if client == "calls" else ()
        results = {"1": launch(PEER, 1, module, env=told), "2": launch(PEER, 2, module, *two, env=told)}
        record = {
            "recorded": datetime.date.today().isoformat(),
            "by": "python -m tests.clients.record " + client,
            "versions": versions(PEER) | {"python": platform.python_version()},
            "results": results,
        }
        (HERE / f"{client}.json").write_text(json.dumps(record, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
