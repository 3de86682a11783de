"""Programs of other people give the numbers that they give on the public package, recorded by record.py."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients import adopters, adopters_trl
from tests.clients.record import ALONE, launch
from tests.clients.test_trainer import differences
from tests.support.long_run import LONG_RUN

HERE = Path(__file__).parent
# What has another name than the job that runs it.
PACKAGES = {"adopters_trl": "trl"}
# Our own launcher: no variable of ours, no file.
ACCELERATE = ("-m", "accelerate", "launch", "--cpu", "-n", "2")
CASES = [
    (client.__name__.rpartition(".")[2], job) for client in (adopters, adopters_trl) for job in client.JOBS
]
# Jobs whose shuffled epochs have another order on two processes than under the public package.
# That they run, and what they report, is compared.
SHUFFLED = {"pytorch_accelerated", "denoising_diffusion_pytorch"}

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not LONG_RUN, reason="runs in `make test-clients` and `make test-all`"),
]


@functools.cache
def recorded(client: str) -> dict[str, Any]:
    """What the jobs gave under the public package, by the number of processes."""
    return json.loads((HERE / f"{client}.json").read_text())["results"]


@functools.cache
def ours(client: str, size: int, *jobs: str) -> dict[str, Any]:
    """What jobs give here; those of one program share a launch."""
    start = ACCELERATE if size > 1 else None
    return launch(sys.executable, size, f"tests.clients.{client}", *jobs, start=start, timeout=300)


def tolerance(path: str) -> float:
    """How far a number may be from the recorded one, relative above one.

    Losses, norms and rates follow from a few steps in float32: a thousand eps, as for the Trainer. A weight
    whose gradient is zero but for rounding (a bias before a normalisation) moves by the learning rate in each
    step of Adam, in a direction that other kernels choose otherwise: sums of weights get as much, for eight
    such weights in five steps at a rate of 1e-3.
    """
    if any(part in path for part in ("weights", "average", "kept", "loaded", "pictures")):
        return 0.05
    return 1000 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("client", "job"), CASES)
def test_numbers_of_the_public_package(client: str, job: str, size: int) -> None:
    package = PACKAGES.get(client, job)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"not installed: {package}")
    mine = ours(client, size, *([job] if client in ALONE else []))[job]
    limit = math.inf if job in SHUFFLED and size == 2 else tolerance
    assert differences(mine, recorded(client)[str(size)][job], limit) == []
