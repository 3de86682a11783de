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
    ("", {"module": True, "no_python": True}, ["--module and --no_python", NO]),
    ("", {"use_fsdp": True, "use_other": True}, ["--use_fsdp and --use_other", NO]),
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


DEEPSPEED = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\nnum_processes: 2\n"


@pytest.mark.parametrize(
    ("file", "flags", "strategies"),
    [
        (DEEPSPEED, {"use_fsdp": True}, ["use_fsdp"]),
        (DEEPSPEED, {"multi_gpu": True}, []),
        (DEEPSPEED, {"use_deepspeed": True}, ["use_deepspeed"]),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}", {"multi_gpu": True}, []),
        ("distributed_type: FSDP", {"use_other": True}, ["use_other"]),
        ("distributed_type: OTHER", {"use_fsdp": True}, ["use_fsdp"]),
        ("distributed_type: 'NO'\nnum_processes: 2", {"use_fsdp": True}, ["use_fsdp"]),
        ("distributed_type: 'NO'\nnum_processes: 2", {"multi_gpu": True}, []),
        ("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2", {"multi_gpu": True}, []),
    ],
)
def test_a_typed_way_of_training_wins_over_the_file(
    file: str, flags: dict[str, Any], strategies: list[str]
) -> None:
    request = asks(file, **flags)
    launch_plans.check(request)
    assert list(request.strategy_switches) == strategies
    assert request.get("num_processes") in (2, None)
    assert not request.get("use_cpu")
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE" not in request.script_variables() or "use_deepspeed" in flags


def test_the_section_of_the_other_way_is_a_leftover() -> None:
    (problem,) = asks(DEEPSPEED, use_fsdp=True).file.problems
    assert "my.yaml, line 2: deepspeed_config has no effect: --use_fsdp is given" in problem


@pytest.mark.parametrize("kind", ["MULTI_CPU", "MULTI_GPU"])
def test_a_type_that_names_a_device_stays_beside_a_strategy(kind: str) -> None:
    request = asks(f"distributed_type: {kind}", use_fsdp=True)
    assert (request.get("distributed_type"), list(request.strategy_switches)) == (kind, ["use_fsdp"])


def test_one_machine_that_is_typed_has_no_number() -> None:
    file = "num_machines: 4\nmachine_rank: 2\nmain_process_ip: head\n"
    request = asks(file, num_machines="1")
    launch_plans.check(request)
    assert (request.machines, request.settings.machine_rank) == ((1, 1), 0)
    with pytest.raises(SettingError, match="--machine_rank is 2, but --num_machines is 1"):
        launch_plans.check(asks(file, num_machines="1", machine_rank="2"))


@pytest.mark.parametrize(
    ("name", "value"), [("num_processes", "2"), ("main_process_port", "29511"), ("num_machines", "1")]
)
def test_a_placeholder_of_a_template_is_left_to_the_flag(name: str, value: str) -> None:
    file = f"{name}: <FILL>"
    assert str(getattr(asks(file, **{name: value}).settings, name)) == value
    with pytest.raises(SettingError, match="<FILL>"):
        launch_plans.check(asks(file))


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
