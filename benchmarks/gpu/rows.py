"""The rows of a run on an accelerator, in the order in which they tell most."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.case import ROOT, BenchError, Case, Kind, Sample, Subject, worker
from benchmarks.cases import offload_gpu
from benchmarks.gpu.fork_server import ForkedSubject
from benchmarks.report import SKIPPED

TESTS = ROOT / "tests" / "gpu"
# In this order before all others, which follow by name.
FIRST_TESTS = ("device", "training", "groups", "host_waits")
FORMATS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class DeviceCase(Case):
    """A row of a run on an accelerator.

    Attributes:
        name: by which the row is asked for.
        limit: seconds after which its processes are killed.
        peer: whether the public package is asked too.
    """

    name: str = ""
    limit: float = 120.0
    peer: bool = True


# ---------------------------------------------------------------------------------------------- tests


def run_tests(path: Path) -> Any:
    """The ``measure`` of a file of tests: how many passed, and which failed.

    Raises:
        BenchError: tests failed, or none was run.
    """

    def measure(subject: Subject, quick: bool) -> Sample:
        assert isinstance(subject, ForkedSubject)
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.xml")
            options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junit-xml={report}")
            codes, out, err = subject.run_codes("pytest", *options, str(path))
            if not report.exists():
                last = (out[0] + err[0]).strip().splitlines()
                raise BenchError(f"pytest ended with exit code {codes[0]}: {last[-1] if last else ''}")
            return read_report(report)

    return measure


def read_report(report: Path) -> Sample:
    """Seconds and counts of a JUnit report.

    Raises:
        BenchError: a test of it failed, and the text names all that did; or all were skipped.
    """
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    bad = [
        f"{case.get('name')} ({(element.get('message') or '').splitlines()[0][:100]})"
        for case in suite.iter("testcase")
        for element in (*case.findall("failure"), *case.findall("error"))
    ]
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    if bad:
        raise BenchError(f"{len(bad)} of {total} tests failed: {'; '.join(bad)}")
    if total == skipped:
        raise BenchError(SKIPPED if total else "no test was run")
    seconds = float(suite.get("time", 0))
    facts = {"passed": str(total - skipped), "skipped": str(skipped)}
    return Sample(0.0, seconds, seconds, 0.0, facts)


def test_rows() -> Iterator[DeviceCase]:
    """One row per file of tests/gpu."""
    files = {path.stem.removeprefix("test_gpu_"): path for path in sorted(TESTS.glob("test_gpu_*.py"))}
    for name in sorted(files, key=lambda name: (*FIRST_TESTS, name).index(name)):
        path = files[name]
        title = f"`{path.relative_to(ROOT)}`"
        measure = run_tests(path)
        yield DeviceCase(title, "s", "total", None, measure, 1, 0, name=f"test-{name}", limit=150, peer=False)


# ----------------------------------------------------------------------------------------- benchmarks


def row(
    name: str,
    title: str,
    kind: Kind,
    program: str,
    full: str,
    short: str,
    *,
    unit: str = "us",
    target: float | None = None,
    limit: float = 90.0,
    processes: int = 1,
    peer: bool = True,
) -> DeviceCase:
    """A program of this folder, with its arguments for a run and for a rehearsal.

    ``{files}`` in them is the folder for large files, ``{trace}`` the file of a trace.
    """

    def measure(subject: Subject, quick: bool) -> Sample:
        assert isinstance(subject, ForkedSubject)
        places = {"files": subject.output / "files", "trace": subject.output / f"{name}-{subject.name}.json"}
        arguments = (short if quick else full).format(**places).split()
        return worker(subject, program, *arguments, processes=processes)

    return DeviceCase(title, unit, kind, target, measure, 1, 1, name=name, limit=limit, peer=peer)


def state_rows() -> Iterator[DeviceCase]:
    """Saving and loading, the large ones first."""
    program = "benchmarks.gpu.states"
    for size in (10, 40):
        yield row(
            f"async-save-{size}",
            f"`save_state(async_save=True)` of {size} GB blocks, against `torch.save`",
            "ratio",
            program,
            f"save-async {{files}} {size}000 2",
            f"save-async {{files}} {size // 10} 1",
            unit="s",
            target=0.15,
            limit=60 + 8 * size,
            peer=False,
        )
    for size, heat in ((20, "hot"), (20, "cold"), (4.3, "hot"), (70, "hot")):
        yield row(
            f"load-{size}-{heat}",
            f"load {size} GB of safetensors to the device, {heat}, against `safetensors` by hand",
            "ratio",
            program,
            f"load-{heat} {{files}} {size * 1000:.0f} 2",
            f"load-{heat} {{files}} {max(1, size // 10):.0f} 1",
            unit="s",
            target=1.1,
            limit=60 + 6 * size,
        )


def offload_rows() -> Iterator[DeviceCase]:
    """Forwards of a model in host memory as a share of the bandwidth of the copies."""
    program, sizes = "benchmarks.cases.offload_gpu", f"{offload_gpu.WIDTH} {offload_gpu.BLOCKS}"
    whats = {"4x": ("4", "of 4x the allowed memory"), "2x": ("2", "of 2x"), "1x": ("1", "of 1x")}
    whats["full"] = ("0", "beside a device that is 95 % full")
    for name, (times, text) in whats.items():
        trace = " {trace}" if name == "4x" else ""
        yield row(
            f"offload-{name}",
            f"offloaded forward {text}, against copying its bytes",
            "ratio",
            program,
            f"large 7 {times} {sizes}{trace}",
            f"large 1 {times} 256 8{trace}",
            unit="s",
            target=1.11,
            limit=120,
        )


def last_rows() -> Iterator[DeviceCase]:
    """The rows of steps, groups, memory, saves and generation."""
    steps, groups = "benchmarks.gpu.steps", "benchmarks.gpu.groups"
    yield row(
        "compile", "compiled step, against `torch.compile` by hand", "ratio", steps,
        "compile ratio 1024 50 16 inductor", "compile ratio 32 2 2 eager", target=1.03, limit=150,
    )  # fmt: skip
    for name, precision in FORMATS.items():
        yield row(
            f"step-{name}", f"added to a training step, {name}", "added", steps,
            f"{precision} added 256 200 16 -", f"{precision} added 32 2 2 -", target=30,
        )  # fmt: skip
    # Products large enough for 8 bits to win; torchao wants its casts compiled.
    yield row(
        "step-fp8", "compiled step of 4096 x 8192 in fp8, against bf16 by hand", "ratio", steps,
        "fp8 ratio 8192 4 10 inductor 4096", "fp8 ratio 32 2 2 - 16", target=1.0, limit=150,
    )  # fmt: skip
    for name, figure in (("bf16", "ratio"), ("fp16", "ratio"), ("fp8", "torchao")):
        yield row(
            f"step-{name}-by-hand", f"step of 4096 x 8192 in {name}, against by hand", "ratio", steps,
            f"{name} {figure} 8192 4 10 - 4096", f"{name} {figure} 32 2 2 - 16", target=1.02,
        )  # fmt: skip
        yield row(
            f"memory-{name}", f"peak memory of steps in {name}, against by hand", "ratio", steps,
            f"{name} memory 8192 4 1 -", f"{name} memory 32 2 1 -", unit="MB", target=1.01,
        )  # fmt: skip
    yield row(
        "loader", "loader to the device, against `.to(non_blocking=True)`", "ratio", steps,
        "loader ratio 4096 200 10 -", "loader ratio 32 4 2 -", target=1.03,
    )  # fmt: skip
    for name, title, full in (
        ("ddp", "DDP step, 2 ranks, against `DistributedDataParallel`", "1024 10 10"),
        ("fsdp2", "FSDP2 step, 2 ranks, against `fully_shard` by hand", "1024 2 6"),
        ("gather", "host time of `gather` of 4 MB, 2 ranks, against `all_gather`", "1024 20 16"),
        ("reduce", "host time of `reduce` of 4 MB, 2 ranks, against `all_reduce`", "1024 20 16"),
    ):
        yield row(
            name, title, "ratio", groups, f"{name} {full}", f"{name} 32 2 1", target=1.05, processes=2
        )  # fmt: skip
    yield row(
        "unet", "peak of a UNet of 1e9 parameters, offloaded", "total", "benchmarks.cases.offload_gpu",
        "unet - - - - 320", "unet - - - - 64", unit="MB", target=800, limit=150,
    )  # fmt: skip
    yield row(
        "save", "`save_state` of 3 GB, against `torch.save`", "ratio", "benchmarks.gpu.states",
        "save {files} 3000 2", "save {files} 1 1", unit="s", target=1.0,
    )  # fmt: skip
    yield row(
        "generation", "a token, weights on device, host and disk, against all on the device", "ratio",
        "benchmarks.gpu.generation", "2048 24 16 4 fp16", "32 4 2 1 fp32",
    )  # fmt: skip


def all_rows(rehearsal: bool = False) -> tuple[DeviceCase, ...]:
    """All rows in their order; in a rehearsal they have no targets."""
    rows = (*test_rows(), *state_rows(), *offload_rows(), *last_rows())
    return tuple(replace(row, target=None) for row in rows) if rehearsal else rows
