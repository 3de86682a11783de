"""Looking before several machines start: each fault is a sentence. Real sockets on the loopback; F7, F16."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from accelerate.core.errors import LaunchError
from accelerate.launch.elastic import rendezvous
from accelerate.launch.elastic.rendezvous import is_this_machine
from accelerate.world import control_tree, network
from accelerate.world.network import (
    DEFAULT_PORT,
    find_interface,
    find_local_address,
    find_rank_interface,
    get_free_port,
    is_port_in_use,
)

SAME = {"accelerate": "1.0", "torch": "2.13.0", "Python": "3.11", "device": "cpu", "devices": "2 x cpu"}


def resolving(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> None:
    """Names resolve to these addresses, one answer after another, the last for ever."""
    left = list(answers)
    monkeypatch.setattr(
        rendezvous, "resolve_addresses", lambda host: left.pop(0) if len(left) > 1 else left[0]
    )


def test_machines_on_the_loopback_may_meet() -> None:
    said: list[str] = []
    rendezvous.check_meeting_point("localhost", 1, seconds=5, say=said.append)
    rendezvous.check_meeting_point("127.0.0.1", 0, seconds=5, say=said.append)
    assert said == []


def static(port: int, machine_rank: int) -> rendezvous.StaticRendezvous:
    """The rendezvous of one of two machines, which waits a second."""
    numbers = {"host": "127.0.0.1", "port": port, "machine_rank": machine_rank, "most": 2}
    return rendezvous.StaticRendezvous({**numbers, "join": 1.0, "machine_timeout": 1.0, "id": "none"})


def test_a_port_that_is_taken_on_machine_0() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} cannot be used on this machine") as caught:
            static(port, 0)
    assert "--main_process_port" in caught.value.fix


def test_a_machine_0_that_does_not_come() -> None:
    port = get_free_port()
    with pytest.raises(LaunchError, match=f"machine 0 does not answer at 127.0.0.1:{port}"):
        static(port, 1)


def test_a_name_that_does_not_resolve() -> None:
    said: list[str] = []
    with pytest.raises(
        LaunchError, match=r"the name nowhere\.invalid of machine 0 does not resolve"
    ) as caught:
        rendezvous.check_meeting_point("nowhere.invalid", 1, seconds=0, say=said.append)
    assert "/etc/hosts" in caught.value.fix


def test_a_name_that_comes_with_its_machine_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a container exists when it runs."""
    said: list[str] = []
    resolving(monkeypatch, [], [], ["127.0.0.1"])
    rendezvous.check_meeting_point("pod-0", 1, seconds=60, say=said.append)
    assert len(said) == 1
    assert "does not resolve yet" in said[0]


def test_a_name_that_means_the_machine_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stock Debian gives its own name to 127.0.1.1; a copied /etc/hosts gives it that of machine 0."""
    resolving(monkeypatch, ["127.0.1.1"])
    with pytest.raises(LaunchError, match=r"head is 127.0.1.1 on this machine, number 2"):
        rendezvous.check_meeting_point("head", 2, seconds=1, say=lambda line: None)
    rendezvous.check_meeting_point("head", 0, seconds=1, say=lambda line: None)


def test_an_address_of_another_machine_is_said_on_machine_0() -> None:
    said: list[str] = []
    rendezvous.check_meeting_point("192.0.2.1", 0, seconds=1, say=said.append)
    assert said == [
        "machine 0 is this one, but 192.0.2.1 is 192.0.2.1, which is none of its addresses; the others must "
        "reach it there"
    ]


@pytest.mark.parametrize(
    ("what", "value", "text", "fix"),
    [
        ("torch", "2.9.0", "machine 1 (b) has torch 2.9.0, but machine 0 (a) has torch 2.13.0", "same torch"),
        ("Python", "3.10", "machine 1 (b) has Python 3.10, but machine 0 (a) has Python 3.11", "same Python"),
        (
            "devices",
            "1 x cpu",
            "machine 1 (b) has 1 x cpu to use, but machine 0 (a) has 2",
            "--nproc_per_node",
        ),
    ],
)
def test_what_differs_is_named_with_both_machines(what: str, value: str, text: str, fix: str) -> None:
    error = rendezvous.compare_machines([SAME, {**SAME, what: value}, SAME], ["a", "b", "c"])
    assert error is not None
    assert text in error.what
    assert fix in error.fix


def test_equal_machines_and_the_facts_of_this_one() -> None:
    mine = rendezvous.machine_facts("cpu", 2)
    assert mine.keys() == SAME.keys()
    assert "+" not in mine["torch"], "builds for the CPU and for a device understand each other"
    assert rendezvous.compare_machines([mine, mine], ["a", "b"]) is None
    asked = rendezvous.machine_facts("cpu", None)
    assert rendezvous.compare_machines([mine, asked], ["a", "b"]) is None, (
        "who says a number may say different ones"
    )


# --- ports


def test_a_free_port_can_be_bound_and_is_then_in_use() -> None:
    port = get_free_port()
    assert 0 < port < 65536
    assert not is_port_in_use(port)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind(("127.0.0.1", port))
        server.listen(1)
        assert is_port_in_use(port)
    assert not is_port_in_use(port)


def test_free_ports_differ_while_they_are_held() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.bind(("", get_free_port()))
        assert get_free_port() != holder.getsockname()[1]


def test_the_default_is_torchs_own_port(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def connect(self: socket.socket, address: tuple[str, int]) -> int:
        asked.append(address)
        return 0

    monkeypatch.setattr(socket.socket, "connect_ex", connect)
    assert is_port_in_use()
    assert asked == [("127.0.0.1", DEFAULT_PORT)] == [("127.0.0.1", 29500)]


OPENS_WORLD = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 900))
from accelerate import PartialState
PartialState(cpu=True)
print(resource.getrlimit(resource.RLIMIT_NOFILE))

# macOS: no hard limit is named, and the kernel refuses more than it allows a process.
limits = [(256, 2**63 - 1)]
def set_limit(kind, limit):
    if limit[0] > 61_440:
        raise ValueError("current limit exceeds maximum limit")
    limits.append(limit)
resource.getrlimit, resource.setrlimit = lambda kind: limits[-1], set_limit
PartialState().destroy_process_group()
PartialState._reset_state()
PartialState(cpu=True)
print(limits[1:])
"""


def test_a_world_may_open_as_many_files_as_the_system_allows() -> None:
    """A gloo group of 512 ranks has more sockets than the 1,024 files of a usual soft limit."""
    numbers = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    done = subprocess.run(
        [sys.executable, "-c", OPENS_WORLD],
        env={**os.environ, **numbers, **place},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == ["(900, 900)", f"[({1 << 15}, {2**63 - 1})]"], done.stderr


def test_own_addresses() -> None:
    assert find_local_address("127.0.0.1", 9) == "127.0.0.1"
    assert is_this_machine("localhost")
    assert not is_this_machine("192.0.2.1")  # kept for documentation by RFC 5737: nobody has it
    assert find_local_address("no-such-host.invalid", 9) is None
    assert find_interface("192.0.2.1") is None


@pytest.mark.parametrize("host", [".head", "head..cluster", "x" * 64])
def test_what_is_no_name_has_no_address(host: str) -> None:
    assert find_local_address(host, 9) is None
    assert not is_this_machine(host)


def test_a_kernel_without_ipv6_takes_the_other_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ipv6.disable=1``: files of hosts have ``::1 localhost`` all the same."""
    create = socket.socket

    def create_ipv4(family: int, *args: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return create(family, *args)

    kind = (socket.SOCK_DGRAM, socket.IPPROTO_UDP, "")
    infos = [(socket.AF_INET6, *kind, ("::1", 9, 0, 0)), (socket.AF_INET, *kind, ("127.0.0.1", 9))]

    def resolve(host: str, port: int, family: int = 0, type: int = 0) -> list[Any]:
        return [info for info in infos if family in (0, info[0])]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "socket", create_ipv4)
    assert list(network.find_routes("localhost", 9)) == [("127.0.0.1", "127.0.0.1")]
    store = SimpleNamespace(underlying_store=SimpleNamespace(host="localhost"))
    assert control_tree._find_route(store, socket.AF_INET) == ("localhost", "127.0.0.1")


def test_ranks_use_the_interface_of_the_route_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {"10.1.0.1": "10.1.0.7", "debian": "127.0.1.1", "192.0.2.1": "10.2.0.7"}
    monkeypatch.setattr(network, "find_local_address", lambda host, port: routes.get(host))
    monkeypatch.setattr(network, "find_interface", {"10.1.0.7": "ib0", "10.2.0.7": "eth0"}.get)
    assert find_rank_interface("10.1.0.1") == "ib0"
    assert find_rank_interface("debian") == "eth0"
    assert find_rank_interface("no-such-host.invalid") is None
    del routes["192.0.2.1"]
    assert find_rank_interface("debian") is None  # no network
