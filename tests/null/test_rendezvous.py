"""What is asked of several machines: how many processes on each, where they meet, what contradicts itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accelerate.core.errors import SettingError
from tests.support import launch_plans

MEET = {"main_process_ip": "127.0.0.1", "use_cpu": True}


@pytest.fixture
def asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``asks(file=..., **flags)`` is a request for a script that exists."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def request(file: str = "", **flags: Any) -> Any:
        if file:
            (tmp_path / "job.yaml").write_text(file)
            flags["config_file"] = "job.yaml"
        return launch_plans.request(**flags)

    return request


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, None),
        ({"num_processes": "4"}, 4),
        ({"nproc_per_node": "4"}, 4),
        ({"nproc_per_node": "gpu"}, "gpu"),
        ({"num_processes": "4", "num_machines": "2"}, 2),
        ({"nproc_per_node": "4", "num_machines": "2"}, 4),
        ({"nproc_per_node": "4", "num_processes": "8", "num_machines": "2"}, 4),
        ({"nproc_per_node": "4", "num_machines": "1:3"}, 4),
        # What is typed wins over a file, whichever of the two names it has.
        ({"nproc_per_node": "2", "file": "num_processes: 8\nnum_machines: 2"}, 2),
        ({"num_processes": "2", "file": "num_processes: 8\nnum_machines: 2"}, 1),
        ({"num_processes": "auto", "num_machines": "2"}, "auto"),
    ],
)
def test_processes_of_all_machines_and_of_each(asks: Any, flags: dict[str, Any], expected: object) -> None:
    assert asks(**flags).local_processes.value == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"num_processes": "4", "nproc_per_node": "4", "num_machines": "2"},
            ["--num_processes is 4", "--nproc_per_node is 4"],
        ),
        (
            {"num_processes": "3", "num_machines": "2"},
            ["--num_processes is 3", "2 machines", "--num_machines"],
        ),
        ({"num_processes": "4", "num_machines": "1:4"}, ["--num_processes is 4", "1:4 machines"]),
        ({"num_machines": "two"}, ["--num_machines is the text 'two'"]),
        ({"num_machines": "1:2:3"}, ["--num_machines is the text '1:2:3'"]),
        ({"num_machines": "4:2"}, ["--num_machines is the text '4:2'", "the fewest first"]),
        ({"num_machines": "0:2"}, ["--num_machines is the text '0:2'"]),
        ({"num_machines": "0"}, ["--num_machines is 0", "1 to 1000000"]),
        ({"machine_rank": "2", "num_machines": "2"}, ["--machine_rank is 2", "--num_machines is 2"]),
        ({"max_restarts": "-1", "num_machines": "2", **MEET}, ["--max_restarts is -1", "0 to 1000000"]),
        ({"nproc_per_node": "0"}, ["--nproc_per_node is 0", "1 to 10000)"]),
    ],
)
def test_a_contradiction_names_both_places(asks: Any, flags: dict[str, Any], words: list[str]) -> None:
    def judged() -> object:
        request = asks(**flags)
        launch_plans.check(request)
        return request.local_processes

    with pytest.raises(SettingError) as error:
        judged()
    assert [word for word in words if word not in error.value.what] == []


def test_a_range_in_a_file_needs_quotes(asks: Any) -> None:
    """YAML reads 1:4 as 64 seconds."""
    with pytest.raises(SettingError, match=r"line 1: num_machines: 1:4") as error:
        asks("num_machines: 1:4")
    assert error.value.fix == "write num_machines: '1:4'"
    assert asks("num_machines: '1:4'").machines == (1, 4)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"num_machines": "2"}, ["2 machines (--num_machines) need a place to meet"]),
        ({"standalone": True, "num_machines": "2", **MEET}, ["--standalone", "--num_machines 2"]),
        ({"num_machines": "1:2", **MEET}, ["--num_machines is 1:2", "static"]),
        ({"num_machines": "2", "rdzv_conf": "timeout", **MEET}, ["--rdzv_conf", "'timeout'"]),
        ({"num_machines": "2", "rdzv_conf": "join_timeout=soon", **MEET}, ["--rdzv_conf", "'soon'"]),
        (
            {"num_machines": "2", "rdzv_conf": "last_call_timeout=3", "strict": True, **MEET},
            ["last_call_timeout", "static"],
        ),
        (
            {"num_machines": "2", "rdzv_endpoint": "a:b", "use_cpu": True},
            ["--rdzv_endpoint is a:b", "no port"],
        ),
        (
            {"num_machines": "2", "rdzv_endpoint": "other:29500", **MEET},
            ["--rdzv_endpoint is other:29500", "--main_process_ip is 127.0.0.1"],
        ),
        (
            {"num_machines": "2", "rdzv_endpoint": "127.0.0.1:7", "main_process_port": "8", **MEET},
            ["--rdzv_endpoint is 127.0.0.1:7", "--main_process_port is 8"],
        ),
        (
            {"num_machines": "2", "main_process_ip": "192.0.2.1", "use_cpu": True},
            ["--main_process_ip is 192.0.2.1", "not this machine", "machine_rank is 0 (the default)"],
        ),
    ],
)
def test_a_rendezvous_that_cannot_be(asks: Any, flags: dict[str, Any], words: list[str]) -> None:
    request = asks(**flags)
    launch_plans.check(request)
    with pytest.raises(SettingError) as error:
        launch_plans.plan(request, "elastic")
    assert [word for word in words if word not in error.value.what] == []
    assert error.value.why or error.value.fix or "at least" in error.value.what


@pytest.mark.parametrize("between", [",", " ", ", "])
def test_what_a_static_rendezvous_does_not_read_is_said(asks: Any, between: str) -> None:
    """Job scripts of other people for SLURM pass the place to meet in both ways."""
    conf = between.join(["rdzv_backend=c10d", "rdzv_endpoint=127.0.0.1:29500", "join_timeout=9"])
    request = asks(num_machines="2", rdzv_conf=conf, **MEET)
    launch_plans.check(request)
    plan = launch_plans.plan(request, "elastic")
    assert any("--rdzv_conf sets rdzv_backend, rdzv_endpoint, which" in note for note in plan.notes)
    assert launch_plans.join_timeout(request) == 9


@pytest.mark.parametrize(("backend", "seconds"), [("static", 60), ("c10d", 600)])
def test_timeout_is_a_key_of_the_static_rendezvous(asks: Any, backend: str, seconds: int) -> None:
    """As in torch, whose c10d rendezvous reads ``join_timeout``."""
    request = asks(num_machines="2", rdzv_backend=backend, rdzv_conf="timeout=60", **MEET)
    assert launch_plans.join_timeout(request) == seconds
    line = "--rdzv_conf sets timeout, which a c10d rendezvous does not read: it reads join_timeout"
    assert launch_plans.plan(request, "elastic").notes == ((line,) if backend == "c10d" else ())


def test_where_machines_meet(asks: Any) -> None:
    def meets(**flags: Any) -> tuple[str, int]:
        found = launch_plans.meeting_point(asks(num_machines="2", **flags))
        return found.host, found.port

    assert meets(main_process_ip="a") == ("a", 29500)
    assert meets(main_process_ip="a", main_process_port="7") == ("a", 7)
    assert meets(main_process_ip="a", rdzv_backend="c10d") == ("a", 29400)
    assert meets(rdzv_endpoint="a:7", rdzv_backend="c10d") == ("a", 7)
    assert meets(rdzv_endpoint="a", rdzv_backend="c10d") == ("a", 29400)
    assert meets(rdzv_endpoint="a:7", main_process_ip="a") == ("a", 7)
    assert meets(rdzv_endpoint="a", main_process_ip="a", main_process_port="7") == ("a", 7)
    assert meets(rdzv_endpoint="[::1]:7", rdzv_backend="c10d") == ("::1", 7)
    assert str(launch_plans.meeting_point(asks(num_machines="2", rdzv_endpoint="[::1]:7"))) == "[::1]:7"
    assert launch_plans.join_timeout(asks(rdzv_conf="join_timeout=5")) == 5
    assert launch_plans.join_timeout(asks()) == 600


def test_the_plan_tells_machines_ranks_and_place(asks: Any) -> None:
    """Machine 1 of two, with two processes each, is ranks 2 and 3 of 4; nothing is reserved or started."""
    request = asks(num_machines="2", num_processes="4", machine_rank="1", **MEET)
    plan = launch_plans.plan(request, "elastic")
    facts = dict(plan.facts)
    assert facts["machines"] == "2"
    assert facts["this machine"] == "1"
    assert facts["rendezvous"] == "static at 127.0.0.1:29500 (--main_process_ip)"
    assert facts["processes"] == "4, 2 on this machine"
    assert [start.name for start in plan.commands] == ["rank 2", "rank 3"]
    assert plan.commands[1].variables["RANK"] == 3
    assert plan.commands[1].variables["LOCAL_RANK"] == 1
    assert plan.commands[1].variables["MASTER_PORT"] == 29500
    request = asks(num_machines="1:2", nproc_per_node="2", rdzv_backend="c10d", **MEET)
    plan = launch_plans.plan(request, "elastic")
    assert dict(plan.facts)["processes"] == "2 to 4, 2 on this machine"
    assert [start.name for start in plan.commands] == ["local rank 0", "local rank 1"]
    json.dumps([dict(start.variables) for start in plan.commands])
