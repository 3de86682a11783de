"""Functions of 1.x that nothing here calls: variables, GPU driver, mixed precision by hand, any object."""

from __future__ import annotations

import functools
import inspect
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from packaging.version import InvalidVersion, Version, parse

from accelerate import device as devices
from accelerate.core import environ
from accelerate.core.errors import DeviceError, FeatureNotBuiltError, SettingError
from accelerate.watch.console import get_logger
from accelerate.world import clusters

if TYPE_CHECKING:
    from accelerate.precision.autocast import AutocastKwargs

T = TypeVar("T", bound=Callable[..., Any])
PREFIX = "ACCELERATE_"
logger = get_logger(__name__)

# Consumer cards of this series: older drivers report peer-to-peer support and then hang in it
# (https://github.com/NVIDIA/nccl-tests/issues/117); drivers from this version on report it right.
NO_P2P_CARDS = "RTX 40"
MIN_P2P_DRIVER = Version("550.40.07")
# Under older kernels processes of a group may hang (the warning of Accelerate 1.x).
MIN_LINUX = Version("5.5.0")


# --- environment variables; everything goes through ``core/environ.py``, the only reader and writer


@dataclass
class CPUInformation:
    """The rank of this process among those that a launcher started.

    Attributes:
        rank, world_size: among all.
        local_rank, local_world_size: among those of this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return rank and world size from the variables of torchrun, MPI or a scheduler; rank 0 of 1 without.

    They need not say where rank 0 runs.
    """
    env = environ.snapshot()
    cluster = clusters.detect({**env, "MASTER_ADDR": env.get("MASTER_ADDR") or "unknown"})
    if cluster is None:
        return CPUInformation()
    return CPUInformation(cluster.rank, cluster.size, cluster.local_rank, cluster.local_size)


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 for ``y yes t true on 1`` and 0 for ``n no f false off 0``, in any case.

    Args:
        value: the word.
        to_bool: give True or False instead of 1 or 0.

    Raises:
        SettingError: it is none of these words.
    """
    truth = environ.parse_bool(value, where="the value")
    return truth if to_bool else int(truth)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return a variable as a bool; ``default`` when it is unset or empty.

    Raises:
        SettingError: its value is neither.
    """
    return environ.get_flag(key, default)


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the text of a variable, also an empty one; ``default`` when it is unset."""
    return environ.snapshot().get(key, str(default))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first of these variables that holds a non-negative number; else ``default``.

    Raises:
        SettingError: one before it holds no whole number; an empty one counts as unset.
    """
    for key in env_keys:
        text = (environ.get(key, "") or "").strip()
        try:
            number = int(text or -1)
        except ValueError as error:
            raise SettingError(f"{key} is {text!r}, but it is a whole number") from error
        if number >= 0:
            return number
    return default


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return which of the given packages this process has imported."""
    return [name for name in library_names if name in sys.modules]


def get_current_device_type() -> tuple[str, str]:
    """Return (device type, ``DistributedType`` of several of them) of the best device of this machine."""
    device = devices.detect()
    return device.type, device.distributed_type


def convert_dict_to_env_variables(current_env: Mapping[str, Any]) -> list[str]:
    """Return ``NAME=value`` lines, as a launcher writes them to a file for other machines.

    A name or value that is empty, or holds blanks, newlines, ``;`` ``<`` or ``>``, could run commands
    there: it is left out with a warning.
    """
    lines: list[str] = []
    for key, value in current_env.items():
        if key and value and not set(f"{key}{value}") & set(" \n;<>"):
            lines.append(f"{key}={value}\n")
        else:
            warnings.warn(f"{key}={value!r} is not passed on: a shell could misread it", stacklevel=2)
    return lines


def clear_environment() -> AbstractContextManager[None]:
    """Return a ``with`` block with an empty environment; afterwards it is as before."""
    return environ.patch_environment({}, clear=True)


@contextmanager
def patch_environment(**kwargs: Any) -> Generator[None]:
    """Set variables in a ``with`` block, named in capitals, their values as text; removed afterwards."""
    with environ.patch_environment({key.upper(): str(value) for key, value in kwargs.items()}):
        yield


def purge_accelerate_environment(func_or_cls: T) -> T:
    """A decorator: the ``ACCELERATE_`` variables are afterwards as they were before the call.

    On a class it decorates the methods whose name begins with ``test``, static and class methods too, and
    those of its subclasses.
    """
    if not inspect.isclass(func_or_cls):
        return _restore_variables_after(func_or_cls)
    _decorate_test_methods(func_or_cls)
    inherited = func_or_cls.__init_subclass__

    def __init_subclass__(cls: type[Any], **kwargs: Any) -> None:  # noqa: N807
        inherited(**kwargs)
        _decorate_test_methods(cls)

    func_or_cls.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]
    return func_or_cls  # type: ignore[return-value]


def _decorate_test_methods(cls: type[Any]) -> None:
    for name, member in list(vars(cls).items()):
        if not name.startswith("test"):
            continue
        if isinstance(member, staticmethod | classmethod):
            setattr(cls, name, type(member)(_restore_variables_after(member.__func__)))
        elif inspect.isfunction(member):
            setattr(cls, name, _restore_variables_after(member))


def _restore_variables_after(function: T) -> T:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _preserve_variables():
            return function(*args, **kwargs)

    @functools.wraps(function)
    async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
        with _preserve_variables():
            return await function(*args, **kwargs)

    return async_wrapper if inspect.iscoroutinefunction(function) else wrapper  # type: ignore[return-value]


@contextmanager
def _preserve_variables() -> Generator[None]:
    before = {key: value for key, value in environ.snapshot().items() if key.startswith(PREFIX)}
    try:
        yield
    finally:
        added = {key: None for key in environ.snapshot() if key.startswith(PREFIX) and key not in before}
        environ.set_variables({**added, **before})


# --- faults of GPUs, driver and kernel that would hang a process group


def _query_gpus(field: str) -> list[str]:
    """Return one property of every GPU from nvidia-smi, without initialising CUDA here.

    Raises:
        DeviceError: the tool is missing or fails.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise DeviceError("nvidia-smi is not installed", why="it lists the GPUs and the driver")
    command = [tool, f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise DeviceError("nvidia-smi does not answer", why=str(error)) from error
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def get_gpu_info() -> tuple[list[str], int]:
    """Return (product names, number) of the GPUs that the driver lists, hidden ones too.

    Raises:
        DeviceError: the driver's tool is missing or fails.
    """
    names = _query_gpus("name")
    return names, len(names)


def get_driver_version() -> str:
    """The version of the GPU driver.

    Raises:
        DeviceError: the driver's tool is missing, fails, or lists no GPU.
    """
    versions = _query_gpus("driver_version")
    if not versions:
        raise DeviceError("the driver lists no GPU")
    return versions[0]


def has_p2p_infiniband() -> bool:
    """Return whether peer-to-peer copies and InfiniBand work; True unless a known fault is found."""
    try:
        names, count = get_gpu_info()
        affected = count > 1 and any(NO_P2P_CARDS in name for name in names)
        return not affected or parse(get_driver_version()) >= MIN_P2P_DRIVER
    except (DeviceError, InvalidVersion) as error:
        logger.debug("no answer about copies between GPUs: %s", error)
        return True


def check_os_kernel() -> None:
    """Warn on the main process when the Linux kernel is one under which groups of processes may hang."""
    if platform.system() != "Linux":
        return
    release = platform.release()
    try:
        version = parse(release.partition("-")[0])
    except InvalidVersion:
        return
    if version < MIN_LINUX:
        logger.warning(
            f"Linux {release} is older than {MIN_LINUX}: processes of a group may hang; update the kernel"
        )


# --- mixed precision by hand


def install_xla(upgrade: bool = False) -> None:
    """Raise FeatureNotBuiltError: packages are pip's to install."""
    raise FeatureNotBuiltError(
        "accelerate.utils.torch_xla.install_xla has no counterpart here",
        why="packages are pip's to install",
        fix="pip install torch_xla",
    )


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return the context of a forward pass in the newest ``Accelerator``'s precision.

    Args:
        native_amp: False gives a context that does nothing.
        autocast_kwargs: options of ``torch.autocast``.

    Raises:
        ValueError: there is no ``Accelerator`` or ``AcceleratorState`` yet.
    """
    from accelerate.facade.state import AcceleratorState
    from accelerate.precision import PRECISIONS
    from accelerate.precision.autocast import autocast

    state = AcceleratorState()
    if not native_amp:
        return nullcontext()
    hardware = devices.get(state.device.type)
    if state.mixed_precision == "no" and autocast_kwargs is not None:
        return autocast(hardware, None, autocast_kwargs)
    return PRECISIONS.get(state.mixed_precision)(hardware).forward_context(autocast_kwargs)


# --- any Python object


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return the attribute at a dotted path: ``recursive_getattr(model, "encoder.layer.0")``.

    Raises:
        AttributeError: a part of the path does not exist.
    """
    return functools.reduce(getattr, attr.split("."), obj)


def get_pretty_name(obj: Any) -> str:
    """Return the qualified name of a class or function; that of its class for any other object."""
    for named in (obj, type(obj)):
        name = getattr(named, "__qualname__", None) or getattr(named, "__name__", None)
        if name is not None:
            return str(name)
    return str(obj)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Put the items of ``source`` into ``destination``, dict by dict, and return it.

    Where both have a key, two dicts are merged and anything else is replaced.
    """
    for key, value in source.items():
        old_value = destination.get(key)
        if isinstance(value, dict) and isinstance(old_value, dict):
            merge_dicts(value, old_value)
        else:
            destination[key] = value
    return destination
