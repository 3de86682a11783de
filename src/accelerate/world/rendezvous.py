"""Meeting the other ranks without a launcher that watches them.

Torch opens a key-value store by the address in the environment, and waits in it for the others until the
timeout, whatever has become of them. Here the store is the same, but whoever comes publishes its process, and
the processes of this machine are looked at until the group is complete. Under a launcher that ends all ranks
with the first one that fails, torch's own way stays.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from accelerate.core import environ
from accelerate.core.errors import CollectiveError, WorldError
from accelerate.world.clusters import ClusterRankInfo
from accelerate.world.peers import PeerProcesses
from accelerate.world.process_group import StoreClient, close_store_connections
from accelerate.world.rank_failure_report import gone_process_report, lost_store_report

SLICE = 0.5  # seconds between two looks at the processes
MAX_SLICE = 5.0  # ... in large worlds
CONNECT_TIMEOUT = 30.0  # seconds to connect once more to a store that has answered
GRACE = 2.0  # seconds that torch has to notice by itself that a rank is gone


class Rendezvous:
    """The store in which the ranks meet, and the processes of those on this machine.

    Args:
        cluster: rank, size, address and port.
        timeout: longest wait for the others; None takes torch's default.

    Raises:
        WorldError: rank 0, which hosts the store, has not come within the timeout.
    """

    def __init__(self, cluster: ClusterRankInfo, timeout: timedelta | None) -> None:
        import torch.distributed as dist

        self.cluster, self.timeout = cluster, timeout or dist.distributed_c10d.default_pg_timeout
        try:
            self.tcp_store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage] - documented
                cluster.address,
                cluster.port,
                cluster.size,
                cluster.rank == 0,
                self.timeout,
                wait_for_workers=False,
                multi_tenant=True,
                use_libuv=environ.get("USE_LIBUV") != "0",
            )
        except dist.DistError as error:
            if cluster.rank == 0:  # it hosts the store: the address or the port is wrong, as torch says
                raise
            raise self._timeout_error(
                "found no store of the process group",
                f"rank 0 does not host it: {str(error).splitlines()[0]}",
            ) from error
        # Until ``wait`` has its other connection: torch goes on connecting to a host that is gone.
        self.tcp_store.set_timeout(timedelta(seconds=CONNECT_TIMEOUT))
        client = StoreClient(self.tcp_store, cluster.size)
        self._client, self.processes = client, PeerProcesses(client, cluster.rank, threading.get_ident())
        first = cluster.rank - cluster.local_rank
        self._local_ranks = [
            rank for rank in range(first, first + cluster.local_size) if rank != cluster.rank
        ]
        self._gone: tuple[int, int] | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by which the process group meets in the store."""
        from torch.distributed.distributed_c10d import PrefixStore

        store = PrefixStore("default_pg", self.tcp_store)
        return {"store": store, "rank": self.cluster.rank, "world_size": self.cluster.size}

    def wait(self) -> None:
        """Wait until every rank has come.

        Raises:
            PeerError: one that had come is gone.
            WorldError: some have not come within the timeout.
        """
        self.processes.publish()
        until = time.monotonic() + self.timeout.total_seconds()
        interval = min(SLICE * self._client.pace, MAX_SLICE)
        if self._client.add("came") == self.cluster.size:
            self._client.put("complete", "")
        while not self._client.wait(["complete"], min(interval, max(0.0, until - time.monotonic()))):
            self._look()
            if self._gone or self._client.is_lost:
                raise self._peer_error()
            if time.monotonic() >= until:
                raise self._missing_ranks_error()
        # Torch waits in it from now on; before 2.10 it is the only connection.
        self._look()
        self.tcp_store.set_timeout(self.timeout)

    @contextmanager
    def watch(self) -> Generator[None]:
        """End the waits of torch for a rank of this machine that is gone, within a few seconds.

        Raises:
            PeerError: in place of what torch says then.
        """
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(done,), name="accelerate-rendezvous", daemon=True)
        thread.start()
        try:
            yield
        except RuntimeError as error:
            if self._gone is None:
                raise
            raise self._peer_error() from error
        finally:
            done.set()
            thread.join()

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(SLICE):
            self._look()
            if self._gone:
                if not done.wait(GRACE):
                    close_store_connections(self.tcp_store)
                return

    def _look(self) -> None:
        self._gone = self._gone or self.processes.find_gone(self._local_ranks)

    def _peer_error(self) -> CollectiveError:
        """Return the error for the rank that is gone."""
        rank, place = self.cluster.rank, "the opening of the process group"
        if self._gone is None:
            return lost_store_report(rank, place).error(rank)
        return gone_process_report(rank, place, *self._gone).error(rank)

    def _missing_ranks_error(self) -> WorldError:
        """Return the error for the ranks that have not come."""
        size = self.cluster.size
        came = self._client.read([f"process/{rank}" for rank in range(size)])
        missing = [str(rank) for rank in range(size) if f"process/{rank}" not in came]
        return self._timeout_error(
            f"{len(came)} of {size} ranks came to the process group",
            f"missing: rank {', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''}",
        )

    def _timeout_error(self, what: str, why: str) -> WorldError:
        size = self.cluster.size
        return WorldError(
            f"{what} within {self.timeout.total_seconds():g} s",
            why=why,
            fix=f"start {size} processes with the same MASTER_ADDR ({self.cluster.address}) and MASTER_PORT "
            f"({self.cluster.port}) and RANK from 0 to {size - 1}, or lower WORLD_SIZE; "
            "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 is a process of its own",
        )
