"""Settings that do not go together: the error names both places, whichever sources they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accelerate.core.errors import SettingError
from tests.support import launch_plans
from tests.support.devices import machine
from tests.support.other_settings import OtherSettings, OtherSwitch


def asks(file: str, **flags: Any) -> Any:
    Path("my.yaml").write_text(file)
    Path("train.py").touch()
    return launch_plans.request(config_file="my.yaml", **flags)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launch_plans.add_settings(monkeypatch, OtherSwitch, OtherSettings)


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
    ("num_machines: 1", {"machine_rank": "1"}, ["--machine_rank is 1", "my.yaml, line 1: num_machines is 1"]),
    ("", {"machine_rank": "1"}, ["--machine_rank is 1", "num_machines is 1 (the default)"]),
    ("", {"fsdp_version": "2"}, ["--fsdp_version is given", "--use_fsdp is not"]),
    (
        "distributed_type: MULTI_GPU",
        {"fsdp_version": "2"},
        ["--fsdp_version is given", "my.yaml, line 1: distributed_type is MULTI_GPU"],
    ),
]


@pytest.mark.parametrize(("file", "flags", "words"), CASES)
def test_what_does_not_go_together_names_both_places(
    file: str, flags: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(SettingError) as error:
        launch_plans.check(asks(file, **flags))
    assert [word for word in words if word not in error.value.what] == []
    assert error.value.why


def test_variables_are_places_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    with pytest.raises(SettingError, match="the environment variable ACCELERATE_USE_CPU and --multi_gpu"):
        launch_plans.check(asks("", multi_gpu=True))
    monkeypatch.setenv("ACCELERATE_USE_OTHER", "yes")
    with pytest.raises(SettingError, match="--use_fsdp and the environment variable ACCELERATE_USE_OTHER"):
        launch_plans.check(asks("", use_fsdp=True, use_cpu=True))


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
    launch_plans.check(asks(file, **flags))


def test_no_accelerator_names_what_hides_it(tmp_path: Path) -> None:
    hidden = machine(
        tmp_path / "here",
        ["dev/nvidia0"],
        env={"CUDA_VISIBLE_DEVICES": ""},
        build={"cuda": "12.8"},
        packages=("torch",),
    )
    with pytest.raises(SettingError, match=r"--multi_gpu insists .* CUDA_VISIBLE_DEVICES= hides"):
        launch_plans.allocate(asks("", multi_gpu=True), hidden)
    with pytest.raises(SettingError, match=r"--multi_gpu insists .* none was found"):
        launch_plans.allocate(asks("", multi_gpu=True), machine(tmp_path / "empty", build={}, packages=()))


def test_the_table_names_settings_that_exist() -> None:
    """A misspelt row would never fire."""
    assert launch_plans.conflicting_names() <= launch_plans.setting_names()
