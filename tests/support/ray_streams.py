"""A fake of Ray's actors and streams: what the launchers of several machines send, in order."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from accelerate.launch.ray_job import RayAttempt, RayMachine


class FakeStream(list[Any]):
    """What one launcher sends, in order."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __next__(self) -> Any:
        if not self:
            raise StopIteration
        return self.pop(0)


class FakeWorker:
    """An actor that sends what it is given, and keeps what it is called with."""

    def __init__(self, *messages: Any) -> None:
        self.calls: list[Any] = []
        method = SimpleNamespace(options=lambda **more: method, remote=self._run)
        self.run, self._messages = method, messages
        self.stop = SimpleNamespace(remote=lambda number: self.calls.append(number))
        self.reserve_port = SimpleNamespace(remote=lambda: 4711)

    def _run(self, *arguments: Any) -> FakeStream:
        self.calls.append(arguments)
        return FakeStream(self._messages)


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    class RayError(Exception):
        """An actor is gone."""

    def get(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    ray, exceptions = ModuleType("ray"), ModuleType("ray.exceptions")
    ray.__dict__.update(get=get, wait=lambda streams, timeout: (streams[:1], streams[1:]))
    exceptions.__dict__.update(RayError=RayError)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    return RayError


def attempt(machines: list[RayMachine], *signals: int) -> RayAttempt:
    pending = [bytes(signals)]
    listener: Any = SimpleNamespace(wait=lambda seconds: pending.pop() if pending else b"")
    made = RayAttempt(machines, listener)
    made.start(("--cpu",), ("train.py",), {}, None)
    made.run()
    return made


def ended(status: int, **error: Any) -> dict[str, Any]:
    return {"code": status, "error": error, "files": {}}
