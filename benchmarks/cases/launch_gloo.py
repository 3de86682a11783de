"""Launching two processes on the CPU that open a gloo group, meet once and end; the base is ``torchrun``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.case import BenchError, Case, Sample, Subject, commands

SCRIPT = """
import os
if os.environ.get("WORLD_SIZE", "1") == "1":
    print("processes: 1")
else:
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    print(f"processes: {dist.get_world_size()}")
    dist.destroy_process_group()
"""


def check(text: str) -> None:
    if "processes: 2" not in text:
        raise BenchError("starts one process, not two")


def measure(subject: Subject, quick: bool) -> Sample:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "group.py")
        script.write_text(SCRIPT)
        return commands(
            subject,
            [subject.script("torchrun"), "--standalone", "--nproc_per_node", "2", str(script)],
            [subject.script("accelerate"), "launch", "--cpu", "--num_processes", "2", str(script)],
            "ratio",
            repeats=1 if quick else 2,
            check=check,
        )


CASES = (Case("launch of 2 processes that meet, against `torchrun`", "s", "ratio", 0.65, measure, rounds=3),)
