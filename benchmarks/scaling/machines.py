"""The same calls between ranks on several machines with a slow network: network namespaces on a switch."""

from __future__ import annotations

import json
import subprocess

from benchmarks.case import ROOT, BenchError, Sample, Subject, clean_environment, complaint, kill_processes
from benchmarks.scaling import ranks

MACHINES = 4


def measure(latency: float, name: str, size: int, subject: Subject, quick: bool) -> Sample:
    """One round of a call, with ``latency`` seconds for a frame from one machine to another.

    Raises:
        BenchError: machines cannot be made here, or a rank failed.
    """
    from tests.support import hosts as support

    if reason := support.unable_to_switch():
        raise BenchError(reason)
    own = size // MACHINES
    with support.Hosts(MACHINES, latency=latency) as hosts:
        place = hosts.addresses[hosts.names[0]]
        jobs = []
        for number, host in enumerate(hosts.names):
            program = [
                str(subject.python),
                "-m",
                ranks.__name__,
                name,
                str(size),
                ranks.QUICK if quick else ranks.BLOCKS,
            ]
            command = hosts.command(host, [*program, str(number * own), str(own), place])
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            jobs.append(subprocess.Popen(command, cwd=ROOT, env=clean_environment(), **pipes))
        try:
            ends = [job.communicate(timeout=240) for job in jobs]
        except BaseException as error:
            kill_processes(job.pid for job in jobs if job.poll() is None)
            if isinstance(error, subprocess.TimeoutExpired):
                raise BenchError("took longer than 240 s") from None
            raise
    for job, (_, errors) in zip(jobs, ends, strict=True):
        if job.returncode:
            raise BenchError(f"exit code {job.returncode}: {complaint(errors)}")
    lines = [line for line in ends[0][0].splitlines() if line.startswith('{"base"')]
    return Sample(**json.loads(lines[-1]))
