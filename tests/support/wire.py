"""A switch with slow, lossy cables: Ethernet between network namespaces, through this process.

The kernel's own way is ``tc netem``, a module that not every machine has. Here each host's ``eth0`` is a TAP
device; a thread reads its frames, keeps each for the latency, drops some, and hands the rest to all others.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time
from collections.abc import Callable

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # Linux: if_tun.h


class Switch:
    """Connects hosts.

    Args:
        latency: seconds that a frame is under way.
        loss: the share of frames that are lost.
        seed: of the loss.
    """

    def __init__(self, latency: float, loss: float, seed: int = 0) -> None:
        self.latency, self.loss, self.random = latency, loss, random.Random(seed)
        self.ports: list[int] = []
        self.passed = self.lost = 0
        self._wakeup, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def add_port(self, device: str, move: Callable[[], None]) -> None:
        """Make a TAP device and have ``move`` give it to a host; before ``start``."""
        port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(port, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
        self.ports.append(port)
        move()

    def start(self) -> None:
        """Begin to pass frames on."""
        self._thread.start()

    def close(self) -> None:
        """Unplug all."""
        if self._thread.is_alive():
            os.write(self._waker, b"x")
            self._thread.join()
        for descriptor in (*self.ports, self._wakeup, self._waker):
            os.close(descriptor)

    def _run(self) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []  # due, number, port that it came from, frame
        while True:
            seconds = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            ready, _, _ = select.select([self._wakeup, *self.ports], [], [], seconds)
            if self._wakeup in ready:
                return
            for port in ready:
                frame = self._read(port)
                if frame and self.random.random() < self.loss:
                    self.lost += 1
                elif frame:
                    self.passed += 1
                    heapq.heappush(under_way, (time.monotonic() + self.latency, self.passed, port, frame))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, source, frame = heapq.heappop(under_way)
                for port in self.ports:
                    if port != source:
                        self._write(port, frame)

    @staticmethod
    def _read(port: int) -> bytes:
        try:
            return os.read(port, 65536)
        except OSError:  # its cable is pulled
            return b""

    @staticmethod
    def _write(port: int, frame: bytes) -> None:
        try:
            os.write(port, frame)
        except OSError:  # likewise, or its queue is full: lost
            return
