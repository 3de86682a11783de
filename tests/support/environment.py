"""The environment of processes that tests start: only what a program needs, nothing that describes a run."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STARTUP = str(ROOT / "tests" / "support" / "startup")  # its sitecustomize makes short processes cheaper

# A list of what may pass, not of what may not: a variable set by some cluster, user or earlier test must
# not decide how a test ends.
PASSED = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", "TERM", "VIRTUAL_ENV"),
    *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CC", "CXX"),
    # What stands for another processor (tests/README.md): every process of a run computes alike.
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"),
    "MKL_DYNAMIC",
    *("TESTS_ALL", "RES_OPTIONS"),
}
PASSED_PREFIXES = ("LC_", "PYTHON", "NVIDIA_", "COVERAGE_")
# Not these of Python's: one makes two ranks' lines run into each other, the other makes every start slow.
LEFT_OUT = {"PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}
# A machine of tests may have accelerators; a test sees one only when it asks for one.
HIDING = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}


@cache
def empty_home() -> str:
    """An empty folder that stands for the user's cache, so that no configuration lying there is read."""
    folder = tempfile.mkdtemp(prefix="accelerate-tests-home-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def clean(values: Mapping[str, object | None] | None = None, *, accelerators: bool = False) -> dict[str, str]:
    """A clean environment plus ``values`` (None removes one); accelerators are hidden unless asked for."""
    kept = {n: v for n, v in os.environ.items() if n in PASSED or n.startswith(PASSED_PREFIXES)}
    kept = {n: v for n, v in kept.items() if n not in LEFT_OUT}
    kept |= {n: os.environ[n] for n in HIDING if n in os.environ} if accelerators else HIDING
    kept |= {"HF_HOME": empty_home(), "HF_HUB_OFFLINE": "1"}
    kept.setdefault("OMP_NUM_THREADS", "1")
    for name, value in (values or {}).items():
        if value is None:
            kept.pop(name, None)
        else:
            kept[name] = str(value)
    if STARTUP not in (paths := [*filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]):
        kept["PYTHONPATH"] = os.pathsep.join([*paths, STARTUP])
    return kept


def protocol_variables() -> list[str]:
    """The variables with which a launcher and its script talk to each other."""
    from accelerate.core.environ import PROTOCOL_VARIABLES

    return list(PROTOCOL_VARIABLES)
