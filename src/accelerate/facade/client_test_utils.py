"""Helpers for the tests of other projects: commands, assertions, test cases, requirements."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from accelerate import device as devices
from accelerate.core import environ, packages
from accelerate.core.errors import LaunchError

FIRST_PORT = 29500
Decorator = Callable[[Any], Any]


@dataclass(frozen=True)
class RunOutput:
    """The exit status and output of a command.

    Attributes:
        returncode: its exit status.
        stdout, stderr: its lines, without line ends.
    """

    returncode: int
    stdout: list[str]
    stderr: list[str]


def execute_subprocess_async(
    cmd: Sequence[str],
    env: Mapping[str, str] | None = None,
    stdin: int | IO[bytes] | None = None,
    timeout: float | None = 180,
    quiet: bool = False,
    echo: bool = True,
) -> RunOutput:
    """Run a command, showing its output while it runs, and return the output.

    Args:
        cmd: program and arguments.
        env: its whole environment; None passes this process's on.
        stdin: as for ``subprocess``.
        timeout: seconds until it is killed; None waits for ever.
        quiet: do not show its output.
        echo: first show the command.

    Raises:
        LaunchError: it failed or ran out of time; the end of its output is in the message.
    """
    if echo:
        print("\nRunning:", " ".join(cmd), flush=True)
    return asyncio.run(_run(cmd, env, stdin, timeout, quiet))


async def _run(
    cmd: Sequence[str],
    env: Mapping[str, str] | None,
    stdin: int | IO[bytes] | None,
    timeout: float | None,
    quiet: bool,
) -> RunOutput:
    process = await asyncio.create_subprocess_exec(
        *cmd,
        stdin=stdin,
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=sys.maxsize,  # a line may have any length; all are kept
    )
    assert process.stdout is not None
    assert process.stderr is not None
    out: list[str] = []
    err: list[str] = []
    reading = asyncio.gather(
        _read(process.stdout, out, None if quiet else sys.stdout),
        _read(process.stderr, err, None if quiet else sys.stderr),
        process.wait(),
    )
    try:
        await asyncio.wait_for(reading, timeout)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
        raise LaunchError(
            f"{_quote_command(cmd)} ran for more than {timeout} s", why=_output_tail(out, err)
        ) from None
    if process.returncode:
        raise LaunchError(
            f"{_quote_command(cmd)} failed with exit status {process.returncode}", why=_output_tail(out, err)
        )
    return RunOutput(process.returncode or 0, out, err)


async def _read(stream: asyncio.StreamReader, lines: list[str], shown: IO[str] | None) -> None:
    async for raw in stream:
        line = raw.decode(errors="replace").rstrip("\r\n")
        lines.append(line)
        if shown is not None:
            print(line, file=shown, flush=True)


def _quote_command(cmd: Sequence[str]) -> str:
    return f"the command {' '.join(cmd)!r}"


def _output_tail(out: list[str], err: list[str]) -> str:
    return "\n".join((err or out)[-20:])


def get_torch_dist_unique_port() -> int:
    """Return a port for rank 0 of this pytest-xdist worker: 29500 plus the number of the worker."""
    worker = environ.get("PYTEST_XDIST_WORKER", "gw0") or "gw0"
    return FIRST_PORT + int(worker.removeprefix("gw"))


def path_in_accelerate_package(*components: str) -> Path:
    """Return a path inside the installed package."""
    return Path(__file__).resolve().parents[1].joinpath(*components)


# --- the machine


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return (device type, number of devices, function that returns the bytes allocated on the current one).

    Of the device that an ``Accelerator`` computes on: ``("cuda", 8, <function>)``. On a CPU alone it is
    ``("cpu", 1, <function>)``, and the function returns 0.
    """
    device = devices.detect()

    def allocated_bytes() -> int:
        """Return the bytes that are allocated on the current device."""
        return 0 if device.type == "cpu" else device.memory_allocated() or 0

    return device.type, max(1, device.count()), allocated_bytes


def memory_allocated_func() -> int:
    """Return the bytes that are allocated on the current device; 0 on a CPU."""
    return get_backend()[2]()


def find_torch_device() -> str:
    """Return the type of the device: the constant ``torch_device``."""
    return get_backend()[0]


def count_devices() -> int:
    """Return the number of devices: the constant ``device_count``."""
    return get_backend()[1]


def pytest_xdist_worker_id() -> int:
    """Return the number of this worker of pytest-xdist, 0 without it."""
    return get_torch_dist_unique_port() - FIRST_PORT


# --- commands


class SubprocessCallException(Exception):  # noqa: N818 - as promised
    """A command of ``run_command`` failed; its output is in the message."""


def run_command(
    command: Sequence[str], return_stdout: bool = False, env: Mapping[str, Any] | None = None
) -> str | None:
    """Run a command to its end.

    Args:
        command: program and arguments.
        return_stdout: return what it printed, on stdout and stderr.
        env: its whole environment; None passes this process's on.

    Raises:
        SubprocessCallException: it failed.
    """
    command = [str(part) for part in command]
    environment = None if env is None else {name: str(value) for name, value in env.items()}
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    printed = run.stdout.decode(errors="replace")
    if run.returncode:
        raise SubprocessCallException(
            f"{_quote_command(command)} failed with exit status {run.returncode}:\n\n{printed}"
        )
    return printed if return_stdout else None


def get_launch_command(**kwargs: Any) -> list[str]:
    """Return ``accelerate launch`` with flags: ``num_processes=2`` is ``--num_processes=2``.

    True gives the flag alone, and None leaves it out.
    """
    flags = ((f"--{name}", value) for name, value in kwargs.items() if value is not None)
    return ["accelerate", "launch", *(flag if value is True else f"{flag}={value}" for flag, value in flags)]


def default_launch_command() -> list[str]:
    """Return ``accelerate launch`` on all devices: the constant ``DEFAULT_LAUNCH_COMMAND``."""
    return get_launch_command(num_processes=count_devices(), monitor_interval=0.1)


# --- assertions


def are_the_same_tensors(tensor: Any) -> bool:
    """Return whether every process has an equal tensor; collective."""
    from accelerate.facade.state import PartialState
    from accelerate.world.collective import gather

    of_ranks = gather(tensor[None].clone().to(PartialState().device)).cpu()
    return all(bool((row == of_ranks[0]).all()) for row in of_ranks)


@contextlib.contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """Expect the block to raise.

    Args:
        exception_class: what it raises.
        msg: a part of the message.

    Raises:
        AssertionError: it raises nothing, or says something else.
    """
    error: BaseException | None = None
    try:
        yield
    except exception_class as raised:
        error = raised
    if error is None:
        raise AssertionError(f"expected a {exception_class.__name__}, and nothing was raised")
    if msg is not None and msg not in str(error):
        raise AssertionError(f"expected {msg!r} in the message, got {str(error)!r}") from error


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Call a function, and return what it printed on stdout."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        func(*args, **kwargs)
    return printed.getvalue()


class AccelerateTestCase(unittest.TestCase):
    """A test case that forgets the state of the package after each test."""

    def tearDown(self) -> None:
        """Forget the world, the precision and the strategy."""
        from accelerate.facade.state import AcceleratorState

        super().tearDown()
        AcceleratorState._reset_state(True)


class TempDirTestCase(unittest.TestCase):
    """A test case with a folder, ``self.tmpdir``, until its class is done.

    Attributes:
        clear_on_setup: whether the folder is emptied before each test.
    """

    clear_on_setup = True
    tmpdir: Path

    @classmethod
    def setUpClass(cls) -> None:
        """Make the folder."""
        super().setUpClass()
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Remove the folder."""
        super().tearDownClass()
        shutil.rmtree(cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        """Empty the folder."""
        super().setUp()
        for path in self.tmpdir.iterdir() if self.clear_on_setup else ():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


class MockingTestCase(unittest.TestCase):
    """A test case that stops the mocks it was given."""

    def add_mocks(self, mocks: Any) -> None:
        """Start one or several mocks, and stop them after the test."""
        for mock in mocks if isinstance(mocks, tuple | list) else [mocks]:
            mock.start()
            self.addCleanup(mock.stop)


# --- decorators that skip a test where it cannot run
#
# Each takes a test function or a ``unittest.TestCase`` class, asks when it is applied, and marks it by
# ``unittest.skipUnless``. ``names.py`` says for which packages and devices there are some.


def _make_decorator(condition: Callable[[], Any], need: str) -> Decorator:
    """Return a decorator that skips a test unless ``condition()``; ``need`` completes "test requires ..."."""

    def require(test_case: Any) -> Any:
        return unittest.skipUnless(condition(), f"test requires {need}")(test_case)

    require.__doc__ = f"Skip a test unless there is {need}."
    return require


def package_decorator(check: str, package: str) -> Decorator:
    """Return a decorator that skips a test unless the function ``check``, ``"module:name"``, returns True."""
    module, _, name = check.partition(":")
    return _make_decorator(
        lambda: getattr(importlib.import_module(module), name)(), package.replace("_", "-")
    )


def device_decorator(types: str, how_many: str) -> Decorator:
    """Return a decorator that skips a test unless there are devices.

    Args:
        types: their types, ``"cuda"``, ``"cuda_or_xpu"``.
        how_many: ``"single_"``, ``"multi_"``, ``"non_"``; empty for one or more.
    """
    need, is_enough = {
        "": ("", lambda count: count > 0),
        "single_": ("exactly one ", lambda count: count == 1),
        "multi_": ("several ", lambda count: count > 1),
        "non_": ("no ", lambda count: count == 0),
    }[how_many]
    each = types.split("_or_")
    return _make_decorator(lambda: is_enough(max(map(_count, each))), f"{need}{' or '.join(each)}")


def _count(type: str) -> int:
    device = devices.get(type)
    return device.count() if device.is_available() else 0


def _count_accelerators() -> int:
    return 0 if devices.detect().type == "cpu" else get_backend()[1]


require_cpu = _make_decorator(lambda: _count_accelerators() == 0, "a CPU alone")
require_non_cpu = _make_decorator(lambda: _count_accelerators() > 0, "an accelerator")
require_single_device = _make_decorator(lambda: _count_accelerators() == 1, "exactly one accelerator")
require_multi_device = _make_decorator(lambda: _count_accelerators() > 1, "several accelerators")
require_huggingface_suite = _make_decorator(
    lambda: all(map(packages.is_installed, ("transformers", "datasets"))), "transformers and datasets"
)
_TRACKERS = ("wandb", "tensorboard", "trackio", "swanlab", "matplotlib")
require_trackers = _make_decorator(
    lambda: any(map(packages.is_installed, _TRACKERS)), f"one of {', '.join(_TRACKERS)}"
)


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Skip a test unless torch is at least of ``version``; ``@require_torch_min_version(version="2.8")``."""
    if test_case is None:
        return partial(require_torch_min_version, version=version)
    new_enough = version is None or packages.is_torch_version(">=", version)
    return unittest.skipUnless(new_enough, f"test requires torch {version} or newer")(test_case)


require_fsdp2 = partial(require_torch_min_version, version="2.6")
require_tp = partial(require_torch_min_version, version="2.3")

slow = _make_decorator(lambda: environ.get_flag("RUN_SLOW"), "RUN_SLOW=1: it is slow")


def skip(test_case: Any) -> Any:
    """Skip a test always."""
    return unittest.skip("test is skipped")(test_case)


def run_first(test_case: Any) -> Any:
    """Let a test run before all others, where the plugin pytest-order is installed."""
    import pytest

    return pytest.mark.order(1)(test_case)
