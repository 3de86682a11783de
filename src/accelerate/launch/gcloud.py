"""Commands on the machines of a TPU, by Google's command line."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from accelerate.core.errors import LaunchError, SettingError


def worker_command(
    command: str, *, name: str | None, zone: str | None, workers: Sequence[str] = (), alpha: bool = False
) -> tuple[str, ...]:
    """The program that runs a shell command on machines of a TPU.

    Args:
        command: what their shell runs.
        name: what the TPU is called.
        zone: where it is; None takes the zone that gcloud is configured with.
        workers: the numbers of the machines, from 0; all when empty.
        alpha: use gcloud's alpha commands.

    Raises:
        SettingError: the TPU has no name, or a machine no number.

    Source: Google Cloud CLI reference, "gcloud compute tpus tpu-vm ssh".
    """
    if not name:
        raise SettingError(
            "no TPU is named",
            why="its machines are reached by the name that it was created with",
            fix="write tpu_name: ... and tpu_zone: ... in the configuration file",
        )
    numbers = [number.strip() for worker in workers for number in worker.split(",")]
    wrong = [number for number in numbers if not number.isdecimal()]
    if wrong:
        raise SettingError(
            f"{wrong[0]!r} is no machine of the TPU",
            why="they are numbered from 0",
            fix="write 0,1 or leave it out",
        )
    return (
        *("gcloud", *(("alpha",) if alpha else ()), "compute", "tpus", "tpu-vm", "ssh", name),
        *(("--zone", zone) if zone else ()),
        *("--worker", ",".join(numbers) or "all", "--command", command),
    )


def check_installed() -> None:
    """Refuses to go on without gcloud.

    Raises:
        LaunchError: it is not on the PATH.
    """
    if shutil.which("gcloud") is None:
        raise LaunchError(
            "there is no program gcloud",
            why="it reaches the machines of a TPU",
            fix="install the Google Cloud CLI, https://cloud.google.com/sdk/docs/install",
        )
