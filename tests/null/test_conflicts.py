"""Settings that do not go together: the error names both places, whichever sources they come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from accelerate.cli.options import SCRIPT_SETTINGS
from accelerate.core.errors import SettingError
from accelerate.core.setting import setting
from accelerate.device.machine import DeviceProbeHost
from accelerate.launch.device_selection import allocate_devices
from accelerate.launch.launch_request import all_settings, read_request
from accelerate.launch.request_checks import CONFLICTS, check_request


@dataclass(frozen=True)
class OtherSwitch:
    """A second way of training."""

    __distributed_type__: ClassVar[str] = "OTHER"

    use_other: bool = setting(False, in_file=False, help="train in another way")


@dataclass(frozen=True)
class OtherSettings:
    """Its options."""

    __switch__: ClassVar[str] = "use_other"
    __section__: ClassVar[str] = "other_config"

    other_speed: int = setting(1, help="how fast")


def asks(file: str, **flags: Any) -> Any:
    Path("my.yaml").write_text(file)
    Path("train.py").touch()
    handed = (*SCRIPT_SETTINGS, OtherSwitch, OtherSettings)
    return read_request({"config_file": "my.yaml", **flags}, ["train.py"], handed)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


NO = "do not go together"
CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("", {"use_cpu": True, "multi_gpu": True}, ["--cpu and --multi_gpu", NO]),
    ("use_cpu: true", {"multi_gpu": True}, ["my.yaml, line 1: use_cpu and --multi_gpu", NO]),
    ("", {"use_cpu": True, "gpu_ids": "0"}, ["--cpu and --gpu_ids", NO]),
    ("", {"module": True, "no_python": True}, ["--module and --no_python", NO]),
    ("", {"use_fsdp": True, "use_other": True}, ["--use_fsdp and --use_other", NO]),
    (
        "distributed_type: FSDP",
        {"use_other": True},
        ["my.yaml, line 1: distributed_type and --use_other", NO],
    ),
    ("", {"use_deepspeed": True, "use_fsdp": True}, [NO, "--use_deepspeed", "--use_fsdp"]),
    ("", {"use_megatron_lm": True, "use_deepspeed": True}, [NO, "--use_deepspeed", "--use_megatron_lm"]),
    ("", {"use_cpu": True, "tpu": True}, ["--cpu and --tpu", NO]),
    ("", {"multi_gpu": True, "tpu": True}, ["--multi_gpu and --tpu", NO]),
    ("", {"use_fsdp": True, "tpu": True}, ["--use_fsdp and --tpu", NO]),
    ("", {"dry_run_model": "folder"}, ["--dry_run_model is given", "--dry_run is not"]),
    (
        "fsdp_config: {fsdp_version: 1}",
        {"use_fsdp": True, "use_parallelism_config": True},
        ["--use_parallelism_config is True", "my.yaml, line 1: fsdp_config.fsdp_version is 1"],
    ),
    ("distributed_type: OTHER", {"use_fsdp": True}, ["--use_fsdp and my.yaml, line 1: distributed_type", NO]),
    (
        "distributed_type: 'NO'\nnum_processes: 2",
        {},
        ["line 2: num_processes is 2", "line 1: distributed_ty"],
    ),
    ("num_machines: 1", {"machine_rank": "1"}, ["--machine_rank is 1", "my.yaml, line 1: num_machines is 1"]),
    ("", {"machine_rank": "1"}, ["--machine_rank is 1", "num_machines is 1 (the default)"]),
    ("", {"fsdp_version": "2"}, ["--fsdp_version is given", "--use_fsdp is not"]),
    (
        "distributed_type: MULTI_GPU",
        {"fsdp_version": "2"},
        ["--fsdp_version is given", "my.yaml, line 1: distributed_type is MULTI_GPU"],
    ),
    (
        "distributed_type: FSDP\nother_config:\n  other_speed: 3",
        {},
        ["line 3: other_config.other_speed is given", "line 1: distributed_type is FSDP"],
    ),
]


@pytest.mark.parametrize(("file", "flags", "words"), CASES)
def test_what_does_not_go_together_names_both_places(
    file: str, flags: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(SettingError) as error:
        check_request(asks(file, **flags))
    assert [word for word in words if word not in error.value.what] == []
    assert error.value.why


def test_variables_are_places_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    with pytest.raises(SettingError, match="the environment variable ACCELERATE_USE_CPU and --multi_gpu"):
        check_request(asks("", multi_gpu=True))
    monkeypatch.setenv("ACCELERATE_USE_OTHER", "yes")
    with pytest.raises(SettingError, match="--use_fsdp and the environment variable ACCELERATE_USE_OTHER"):
        check_request(asks("", use_fsdp=True, use_cpu=True))


@pytest.mark.parametrize(
    ("file", "flags"),
    [
        ("", {"use_cpu": True, "use_fsdp": True, "num_processes": "2"}),
        ("", {"multi_gpu": True, "use_fsdp": True, "fsdp_version": "2"}),
        ("gpu_ids: 0,1", {"use_cpu": True}),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}", {"use_fsdp": True}),
        ("distributed_type: 'NO'", {"num_processes": "2"}),
        ("distributed_type: MULTI_GPU\nnum_processes: 8", {"use_cpu": True, "num_processes": "2"}),
    ],
)
def test_what_goes_together(file: str, flags: dict[str, Any]) -> None:
    check_request(asks(file, **flags))


def test_no_accelerator_names_what_hides_it(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    env = {"CUDA_VISIBLE_DEVICES": ""}
    machine = DeviceProbeHost(tmp_path, env, {"cuda": "12.8"}, has_package=lambda package: package == "torch")
    with pytest.raises(SettingError, match=r"--multi_gpu insists .* CUDA_VISIBLE_DEVICES= hides"):
        allocate_devices(asks("", multi_gpu=True), machine)
    with pytest.raises(SettingError, match=r"--multi_gpu insists .* none was found"):
        allocate_devices(asks("", multi_gpu=True), DeviceProbeHost(tmp_path / "empty", {}, {}))


def test_the_table_names_settings_that_exist() -> None:
    """A misspelt row would never fire."""
    known = {row.name for row in all_settings(SCRIPT_SETTINGS)}
    assert {name for clash in CONFLICTS for name in (clash.first, clash.second)} <= known
