"""Facts about this machine's accelerators that are found without importing torch.

The launcher decides how many processes to start before any of them has loaded torch. It looks at device
nodes, at driver files, at the variables that hide devices, and at the build of torch; nothing here
initializes a driver, so the process may still fork.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import field
from importlib.util import find_spec
from pathlib import Path

from accelerate.core import environ
from accelerate.core.frozen_dataclass import frozen_dataclass


def is_package_installed(package: str) -> bool:
    """Return True when a top-level package could be imported; it is not imported."""
    return package in sys.modules or find_spec(package) is not None


@functools.cache
def torch_build() -> dict[str, str | None]:
    """Return the constants of torch's ``version.py``, read as text: ``{"cuda": "12.8", "hip": None, ...}``.

    Empty when torch is not installed.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    path = Path(spec.origin).with_name("version.py")
    constants: dict[str, str | None] = {}
    for line in ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else ():
        target = line.target if isinstance(line, ast.AnnAssign) else None
        if isinstance(line, ast.Assign) and len(line.targets) == 1:
            target = line.targets[0]
        value = getattr(line, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            constants[target.id] = None if value.value is None else str(value.value)
    return constants


@frozen_dataclass
class DeviceProbeHost:
    """The machine as ``Device.probe_count`` sees it; tests pass a folder that looks like one.

    Attributes:
        root: the folder that holds ``dev``, ``proc`` and ``sys``.
        env: the environment variables; an empty value counts as set.
        build: returns the build of torch (see ``torch_build``); few launches need to know.
        has_package: whether a top-level package is installed.
    """

    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=environ.snapshot)
    build: Callable[[], Mapping[str, str | None]] = torch_build
    has_package: Callable[[str], bool] = is_package_installed

    def find_device_nodes(self, *patterns: str) -> list[Path]:
        """Return paths below the root that match a glob pattern and end in a number, sorted."""
        paths = {path for pattern in patterns for path in self.root.glob(pattern)}
        return sorted(path for path in paths if path.name[-1].isdigit())

    def exists(self, path: str) -> bool:
        """Return True when a path below the root exists."""
        return (self.root / path).exists()

    def read(self, path: str | Path) -> str:
        """Return the text of a file below the root, "" when it is absent or not readable."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""


def count_visible(present: int, variable: str | None) -> int:
    """Return how many of ``present`` devices a visible-devices variable leaves.

    The rules are CUDA's, which every vendor follows: unset shows all; the list ends at the first entry
    that names no device ("", -1, "NoDevFiles", an index too large); an entry that stands twice hides
    everything; identifiers (``GPU-...``, ``MIG-...``) cannot be checked without the driver and count one.
    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    if variable is None:
        return present
    shown: list[str] = []
    for entry in (part.strip() for part in variable.split(",")):
        number = re.match(r"[+-]?\d+", entry)
        if number is None and not entry.startswith(("GPU-", "MIG-")):
            break
        if number is not None and not 0 <= int(number[0]) < present:
            break
        name = entry if number is None else str(int(number[0]))
        if name in shown:
            return 0
        shown.append(name)
    return len(shown) if present else 0


# Files of a control group below sys/fs/cgroup, version 2 and 1: limit, usage, statistics, file cache.
CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def container_limit(machine: DeviceProbeHost | None = None) -> tuple[int, int] | None:
    """Return (free, total) bytes of this process's control group, or None when it has no limit.

    File cache that the kernel would drop counts as free. Source: Linux Documentation/admin-guide,
    cgroup-v2.rst (memory.max, memory.current, memory.stat) and cgroup-v1/memory.rst.
    """
    machine = machine or DeviceProbeHost()
    for limit, usage, stat, cache in CGROUPS:
        total, used = machine.read(f"sys/fs/cgroup/{limit}"), machine.read(f"sys/fs/cgroup/{usage}")
        if not (total.isdigit() and used.isdigit()):
            continue
        lines = (line.split() for line in machine.read(f"sys/fs/cgroup/{stat}").splitlines())
        reclaimable = sum(int(line[1]) for line in lines if line and line[0] == cache)
        return max(0, int(total) - max(0, int(used) - reclaimable)), int(total)
    return None
