"""What the launcher makes of flags and files, inside the test: the request, its kind of launch, its plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from accelerate.cli import options
from accelerate.core.errors import RankError
from accelerate.device import DeviceProbeHost
from accelerate.launch import config_files, launcher
from accelerate.launch.base import LaunchKind
from accelerate.launch.config_files import ConfigFile
from accelerate.launch.device_selection import LaunchDeviceSelection, allocate_devices
from accelerate.launch.kinds import KINDS, elastic, mpi
from accelerate.launch.launch_request import LaunchRequest, all_settings, find_config, read_request
from accelerate.launch.launcher import CONFLICTS


def request(program: Sequence[str] = ("train.py",), **flags: Any) -> LaunchRequest:
    """What ``accelerate launch FLAGS PROGRAM`` reads from its flags, its file and the environment."""
    return read_request(flags, program, options.SCRIPT_SETTINGS)


def request_of_file(path: Path, **flags: Any) -> LaunchRequest:
    """What ``accelerate launch --config_file PATH x.py`` reads."""
    return request(("x.py",), config_file=str(path), **flags)


def config_file(named: str | None, *, use_default: bool = True) -> ConfigFile | None:
    """The configuration file of a launch for which ``named`` was typed."""
    return find_config(named, use_default=use_default)


def default_file() -> Path:
    """The configuration file of this user, which need not exist."""
    return config_files.default_file()


def launch_flags() -> set[str]:
    """Every flag of ``accelerate launch`` that is a word, in each of its spellings."""
    return {flag for row in options.launch_settings() for flag in row.flags if flag.startswith("--")}


def file_keys() -> list[str]:
    """Every key and every section of a configuration file, sorted."""
    rows = list(options.launch_settings())
    return sorted({row.name for row in rows} | {row.section for row in rows})


def kind_named(name: str) -> LaunchKind[Any]:
    """The kind of launch that is called so."""
    return KINDS.get(name)


def add_settings(monkeypatch: pytest.MonkeyPatch, *classes: type[Any]) -> None:
    """Let these classes of settings be among those that the launcher hands on to the script."""
    monkeypatch.setattr(options, "SCRIPT_SETTINGS", (*options.SCRIPT_SETTINGS, *classes))


def help_text(width: int) -> str:
    """The help of the flags that are there now, ``width`` characters wide."""
    command = options.GroupedOptionsCommand("launch", params=options.options())
    return CliRunner().invoke(command, ["--help-all"], terminal_width=width, max_content_width=width).output


def setting_names() -> set[str]:
    """The name of every setting of a launch."""
    return {row.name for row in all_settings(options.SCRIPT_SETTINGS)}


def conflicting_names() -> set[str]:
    """The names in the table of settings that do not go together."""
    return {name for *names, _ in CONFLICTS for name in names}


def check(asked: LaunchRequest) -> None:
    """Refuse a request in which something contradicts itself."""
    launcher.check_request(asked)


def kind_of(asked: LaunchRequest) -> LaunchKind[Any]:
    """The kind of launch that a request is for."""
    return launcher.choose_kind(asked)


def plan(asked: LaunchRequest, kind: str) -> Any:
    """The plan of a request, which is a job for the kind of launch called ``kind``."""
    chosen = launcher.choose_kind(asked)
    assert chosen is kind_named(kind)
    return chosen.plan(asked)


def allocate(asked: LaunchRequest, machine: DeviceProbeHost) -> LaunchDeviceSelection:
    """The devices that a request gets on a machine."""
    return allocate_devices(asked, machine)


def meeting_point(asked: LaunchRequest) -> elastic.RendezvousEndpoint:
    """Where the machines of a request meet."""
    return elastic.find_endpoint(asked)


def join_timeout(asked: LaunchRequest) -> float:
    """The seconds that a machine waits for the others."""
    return elastic.parse_join_timeout(asked, elastic.parse_rdzv_conf(asked))


def hosts_of(asked: LaunchRequest) -> list[tuple[str, int | None]]:
    """The machines of ``--mpirun_hostfile``, and how many processes each takes."""
    return list(mpi.read_hosts(asked).items())


def start(asked: LaunchRequest) -> None:
    """Run the job of a request and wait until it has ended."""
    launcher.launch(asked)


def a_rank_fails(match: str) -> Any:
    """The context of a launch whose job fails; the error holds the exit code."""
    return pytest.raises(RankError, match=match)
