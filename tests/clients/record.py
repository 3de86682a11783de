"""Record what the public package does, for the tests of this folder, which never run it.

``make bench-peer``, then ``.venv/bin/python -m tests.clients.record`` writes the JSON files beside this one;
``make record-clients`` writes those of the adopters.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.clients.calls import TOGETHER
from tests.support.environment import ROOT, clean
from tests.support.free_ports import free_port

HERE = Path(__file__).parent
PEER = ROOT / ".venv-peer" / "bin" / "python"
# Programs of other people have an environment of their own, and each of these a launch of its own.
ADOPTERS_PEER = ROOT / ".venv-clients-peer" / "bin" / "python"
ALONE = ("adopters",)
_VERSIONS = """
import json, sys, torch
from importlib.metadata import version
print(json.dumps({n: version(n) for n in sys.argv[1:]} | {"cpu": torch.backends.cpu.get_cpu_capability()}))
"""
_NAMES = ("accelerate", "transformers", "datasets", "torch", "numpy")


def launch(
    python: Path | str,
    size: int,
    module: str,
    *jobs: str,
    env: dict[str, Any] | None = None,
    start: Any = None,
    timeout: float = 100,
) -> dict[str, Any]:
    """What the jobs of a client module report, run by ``python`` on ``size`` processes.

    Args:
        start: the words that start the processes, instead of torchrun; they end before the script.
        timeout: seconds.
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
        done = _run(
            command, clean({"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", **(env or {})}), timeout
        )
        if done.returncode:
            raise AssertionError(
                f"{module} on {size} processes failed\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
            )
        return json.loads(out.read_text())


def _run(command: list[str], env: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Like subprocess.run, but at the timeout nothing that was started lives on."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            out, error = process.communicate(timeout=timeout)
        except BaseException:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, error)


def versions(python: Path | str, names: Sequence[str] = (*_NAMES, "torchdata")) -> dict[str, str]:
    """Of the packages that decide the numbers, and the kind of processor that torch computes for."""
    done = subprocess.run([str(python), "-c", _VERSIONS, *names], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def adopters() -> list[str]:
    """The names in adopters.txt."""
    lines = (HERE / "adopters.txt").read_text().splitlines()
    return [line.partition("==")[0] for line in lines if "==" in line]


def record(client: str) -> dict[str, Any]:
    """What the jobs of a client give under the public package, on one process and on two."""
    python, names = (
        (ADOPTERS_PEER, (*_NAMES, *adopters()))
        if client.startswith("adopters")
        else (PEER, (*_NAMES, "torchdata"))
    )
    module = f"tests.clients.{client}"
    # The public package makes a group of two CPU processes only when it is told to.
    told = {"ACCELERATE_USE_CPU": "1"}
    two = TOGETHER if client == "calls" else ()
    launches = [(job,) for job in importlib.import_module(module).JOBS] if client in ALONE else [two]
    results: dict[str, dict[str, Any]] = {"1": {}, "2": {}}
    for jobs in launches:
        for size in (1, 2):
            given = jobs if client in ALONE or size == 2 else ()
            results[str(size)] |= launch(python, size, module, *given, env=told, timeout=300)
    return {
        "recorded": datetime.date.today().isoformat(),
        "by": "make record-clients"
        if python == ADOPTERS_PEER
        else f"python -m tests.clients.record {client}",
        "versions": versions(python, names) | {"python": platform.python_version()},
        "results": results,
    }


def main() -> None:
    """Record the client modules named on the command line, all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", default=["trainer", "calls"])
    for client in parser.parse_args().clients:
        text = json.dumps(record(client), indent=0, sort_keys=True)
        (HERE / f"{client}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
