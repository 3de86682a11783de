"""Hosts on one machine: network namespaces joined by cables, each with its own name and table of hosts.

    with Hosts() as hosts:
        running = Running(hosts.command("hosta", [...]))
        hosts.cut("hostb")

Two are joined by a cable. ``Hosts(4, latency=0.01, loss=0.01)`` are on a switch (``wire.py``).

Needs root, Linux and iproute2; ``unable`` says what is missing. Whatever runs on a host is killed at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.wire import Switch

NAMES = ("hosta", "hostb")
# The wall clock has no namespace: a library in front of the C library's moves it.
CLOCK = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long skew(void) { const char *text = getenv("HOST_CLOCK_SKEW"); return text ? atol(text) : 0; }
int clock_gettime(clockid_t clock, struct timespec *now) {
  long result = syscall(SYS_clock_gettime, clock, now);
  if (!result && clock == CLOCK_REALTIME) now->tv_sec += skew();
  return result;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *where) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  return where ? (*where = exact.tv_sec) : exact.tv_sec;
}
"""


def unable() -> str:
    """Why hosts cannot be made here; empty when they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [program for program in ("ip", "unshare", "hostname") if shutil.which(program) is None]
    if missing:
        return f"there is no program {missing[0]}"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"namespaces cannot be made: {tried.stderr.strip()}"


def unable_to_switch() -> str:
    """Why hosts cannot be put on a switch here; empty when they can."""
    return unable() or ("" if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "there is no /dev/net/tun")


def build_clock(folder: Path) -> Path:
    """Build the library that moves the clock of a process by ``HOST_CLOCK_SKEW`` seconds."""
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


class Hosts:
    """The hosts ``hosta``, ``hostb``, ... with ``addresses``.

    Args:
        count: how many; with two of them and no latency, a cable joins them.
        latency: seconds that a frame is under way from one to another.
        loss: the share of frames that are lost.
        named: whether the hosts know each other's names, and their own; without, only ``localhost``.
        own_loopback: a host's own name is a loopback address, as Debian's installer has it.
    """

    def __init__(
        self,
        count: int = 2,
        *,
        latency: float = 0.0,
        loss: float = 0.0,
        named: bool = True,
        own_loopback: bool = False,
    ) -> None:
        tag = os.getpid() % 250
        self.names = tuple(f"host{letter}" for letter in "abcdefgh"[:count])
        self.spaces = {name: f"acc{os.getpid()}{name[-1]}" for name in self.names}
        self.addresses = {name: f"10.213.{tag}.{end}" for end, name in enumerate(self.names, 1)}
        self.named, self.own_loopback = named, own_loopback
        self.switch = Switch(latency, loss) if count > 2 or latency or loss else None

    def __enter__(self) -> Hosts:
        try:
            self._up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    def _up(self) -> None:
        for host, space in self.spaces.items():
            addresses = self.addresses | ({host: "127.0.1.1"} if self.own_loopback else {})
            known = [f"{address} {name}" for name, address in addresses.items()] if self.named else []
            _ip("netns", "add", space)
            table = Path("/etc/netns", space, "hosts")
            table.parent.mkdir(parents=True, exist_ok=True)
            table.write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
            # No server is asked for names: nobody would answer.
            table.with_name("resolv.conf").write_text("")
        self._connect()
        for name, space in self.spaces.items():
            _ip("-n", space, "addr", "add", f"{self.addresses[name]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", space, "link", "set", device, "up")
            _ip("-n", space, "route", "add", "default", "dev", "eth0")

    def _connect(self) -> None:
        """Gives each host its ``eth0``."""
        if self.switch is None:
            first, second = self.spaces.values()
            _ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
            return
        for space in self.spaces.values():
            move = ("link", "set", space, "netns", space, "name", "eth0")
            self.switch.add_port(space, lambda move=move: _ip(*move))
        self.switch.start()

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """A command that runs on a host, in place of itself."""
        own = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name]
        return ["ip", "netns", "exec", self.spaces[name], *own, *command]

    def cut(self, name: str) -> None:
        """Pulls the cable of a host."""
        _ip("-n", self.spaces[name], "link", "set", "eth0", "down")

    def processes(self) -> list[int]:
        """Whatever runs on the hosts."""
        found: list[int] = []
        for space in self.spaces.values():
            listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
            found += map(int, listed.stdout.split())
        return found

    def down(self) -> None:
        """Kills what is left and takes the hosts away."""
        deadline = time.monotonic() + 5
        while (left := self.processes()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.05)
        if self.switch is not None:
            self.switch.close()
        for space in self.spaces.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            shutil.rmtree(Path("/etc/netns", space), ignore_errors=True)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
