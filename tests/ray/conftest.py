"""Tests on a local Ray of two raylets (`make test-ray`), skipped where Ray is not installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("ray"):
    # Before Ray is imported: it tells nobody outside, and its processes listen on the loopback only.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A cluster of two raylets with two CPUs and one; what is connected to it, is this process."""
    from ray.cluster_utils import Cluster

    import ray

    memory = {"object_store_memory": 80 * 2**20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **memory})
    made.add_node(num_cpus=1, **memory)
    ray.init(address=made.address, logging_level="warning")
    yield made
    ray.shutdown()
    made.shutdown()
