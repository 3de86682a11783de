"""Ports: which are free, which are taken."""

from __future__ import annotations

import socket

import pytest

from accelerate.world import ports
from accelerate.world.ports import DEFAULT_PORT


def test_a_free_port_can_be_bound_and_is_then_in_use() -> None:
    port = ports.get_free_port()
    assert 0 < port < 65536
    assert not ports.is_port_in_use(port)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind(("127.0.0.1", port))
        server.listen(1)
        assert ports.is_port_in_use(port)
        assert ports.is_listening(port, "localhost")
    assert not ports.is_port_in_use(port)


def test_free_ports_differ_while_they_are_held() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.bind(("", ports.free_port()))
        assert ports.free_port() != holder.getsockname()[1]


def test_the_default_is_torchs_own_port(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def listen(port: int, host: str = "") -> bool:
        asked.append(port)
        return True

    monkeypatch.setattr(ports, "is_listening", listen)
    assert ports.is_port_in_use()
    assert asked == [DEFAULT_PORT] == [29500]
