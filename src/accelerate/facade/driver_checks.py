"""Checks of GPUs, driver and kernel for faults that would hang a process group."""

from __future__ import annotations

import platform
import shutil
import subprocess

from packaging.version import InvalidVersion, Version, parse

from accelerate.core.errors import DeviceError
from accelerate.watch.console import get_logger

logger = get_logger(__name__)

# Consumer cards of this series: older drivers report peer-to-peer support and then hang in it
# (https://github.com/NVIDIA/nccl-tests/issues/117); drivers from this version on report it right.
NO_P2P_CARDS = "RTX 40"
MIN_P2P_DRIVER = Version("550.40.07")
# Under older kernels processes of a group may hang (the warning of Accelerate 1.x).
MIN_LINUX = Version("5.5.0")


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
