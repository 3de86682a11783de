"""Builds the C++ part of the simulated accelerator: once per environment, into a folder inside it."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from accelerate.core import environ

NAME = "accelerate_sim"
SOURCES = Path(__file__).parent / "csrc"
# The kernels are torch's own, so optimizing what lies around them costs more than it gains.
FLAGS = ["-O0", "-fvisibility=hidden"]


def compiler() -> str | None:
    """The C++ compiler that would be used, None where there is none."""
    return shutil.which(environ.get("CXX") or "c++")


@cache
def extension() -> Any:
    """The compiled module, built first where it is missing: about 25 s.

    Several processes may ask at once: one builds, under a lock, the others wait. The folder gets its name
    only when it is complete, so an interrupted build leaves nothing that looks like a finished one.
    """
    home = folder()
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        with _locked(home.with_suffix(".lock")):
            if not home.exists():  # else another process has built it while this one waited
                return _build(home)
    return _imported(home / f"{NAME}.so")


def folder() -> Path:
    """Where the build belongs: its name changes with the sources, torch, Python and the compiler."""
    import torch

    digest = hashlib.sha256(repr((torch.__version__, sys.version, compiler(), FLAGS)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return _root() / digest.hexdigest()[:16]


def _root() -> Path:
    inside = Path(sys.prefix, "share", "accelerate-sim")
    existing = next(p for p in (inside, *inside.parents) if p.exists())
    if os.access(existing, os.W_OK):
        return inside
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "accelerate-sim")


def _build(home: Path) -> Any:
    from torch.utils import cpp_extension

    if compiler() is None:
        raise RuntimeError("the simulated accelerator needs a C++ compiler (c++, or the one named by CXX)")
    print(f"building the simulated accelerator of the tests, once, into {home} (about 25 s)", file=sys.stderr)
    start = time.perf_counter()
    draft = Path(tempfile.mkdtemp(dir=home.parent, prefix=f"{home.name}-draft-"))
    # ninja comes with the test requirements, and lies beside a Python that need not be on PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH") or os.defpath])
    try:
        with environ.patch_environment({"PATH": path}):
            module = cpp_extension.load(
                NAME,
                [str(SOURCES / "sim.cpp")],
                extra_cflags=FLAGS,
                build_directory=str(draft),
            )
        (draft / "sim.o").unlink()
        draft.rename(home)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    print(f"built in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return module


def _imported(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _locked(place: Path) -> Generator[None]:
    with place.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # let go when the file is closed, or the process is killed
        yield
