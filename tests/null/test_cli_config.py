"""Configuration files as the objects of 1.x."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig, load_config_from_file
from accelerate.commands.config.default import write_basic_config
from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.utils import DistributedType
from tests.support.devices import pretend_devices

MINIMAL = "distributed_type: MULTI_GPU\nnum_processes: 4\ngpu_ids: all\ntpu_env: []\n"


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_file_becomes_an_object_and_a_dict(tmp_path: Path) -> None:
    config = load_config_from_file(write(tmp_path / "c.yaml", MINIMAL))
    assert isinstance(config, ClusterConfig)
    place = write(tmp_path / "local.yaml", f"compute_environment: local_machine\n{MINIMAL}")
    assert load_config_from_file(place).to_dict() == config.to_dict()
    assert config.distributed_type == DistributedType.MULTI_GPU
    told = config.to_dict()
    assert told["distributed_type"] == "MULTI_GPU"
    assert type(told["distributed_type"]) is str
    assert told["compute_environment"] == "LOCAL_MACHINE"
    assert not {"main_process_ip", "fsdp_config", "dynamo_config"} & told.keys()


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("distributed_type: NO", "num_processes", 1),
        ("distributed_type: 'NO'\nfp16: true", "mixed_precision", "fp16"),
        ("distributed_type: MULTI_GPU", "num_processes", -1),
        ("distributed_type: NO\nnum_processes: 2\nipex_config: {ipex: true}", "num_processes", 2),
        ("distributed_type: NO\ndynamo_backend: INDUCTOR", "dynamo_config", {"dynamo_backend": "INDUCTOR"}),
    ],
)
def test_old_formats(tmp_path: Path, text: str, name: str, value: object) -> None:
    assert getattr(load_config_from_file(write(tmp_path / "c.yaml", text)), name) == value


def test_the_class_follows_the_environment(tmp_path: Path) -> None:
    text = "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA_PARALLEL\n" \
           "ec2_instance_type: x\niam_role_name: y\n"  # fmt: skip
    assert isinstance(load_config_from_file(write(tmp_path / "c.yaml", text)), SageMakerConfig)


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown key 'num_proceses' in .*c\.yaml, line 2"):
        load_config_from_file(write(tmp_path / "c.yaml", "distributed_type: NO\nnum_proceses: 2"))
    with pytest.raises(SettingError, match="has no key distributed_type"):
        load_config_from_file(write(tmp_path / "c.yaml", "num_processes: 2"))
    with pytest.raises(UnknownNameError, match="MULTI_GPUS"):
        load_config_from_file(write(tmp_path / "c.yaml", "distributed_type: MULTI_GPUS"))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        load_config_from_file(None)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    config = load_config_from_file(write(tmp_path / "c.yaml", MINIMAL))
    config.to_yaml_file(tmp_path / "d.yaml")
    config.to_json_file(tmp_path / "d.json")
    assert ClusterConfig.from_yaml_file(str(tmp_path / "d.yaml")) == config
    assert ClusterConfig.from_json_file(str(tmp_path / "d.json")) == config
    assert yaml.safe_load((tmp_path / "d.yaml").read_text()) == json.loads((tmp_path / "d.json").read_text())


def test_a_basic_file_is_for_all_devices_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "default.yaml"
    for count, expected in ((3, ("MULTI_GPU", 3, False)), (1, ("NO", 1, False)), (0, ("NO", 1, True))):
        path.unlink(missing_ok=True)
        pretend_devices(monkeypatch, "cuda", count)
        assert write_basic_config("bf16", path) == path
        told = json.loads(path.read_text())
        assert (told["distributed_type"], told["num_processes"], told["use_cpu"]) == expected
        assert told["mixed_precision"] == "bf16"
    with monkeypatch.context() as windows:  # a launch there starts one process
        windows.setattr(sys, "platform", "win32")
        pretend_devices(windows, "cuda", 2)
        path.unlink()
        write_basic_config("bf16", path)
    told = json.loads(path.read_text())
    assert (told["distributed_type"], told["num_processes"], told["use_cpu"]) == ("NO", 1, False)
    (tmp_path / "aurora-1.dist-info").mkdir()
    (tmp_path / "aurora-1.dist-info/entry_points.txt").write_text("[torch.backends]\naurora = aurora:load\n")
    monkeypatch.syspath_prepend(tmp_path)
    path.unlink()
    write_basic_config("bf16", path)
    assert json.loads(path.read_text())["use_cpu"] is False, "torch may find a device that nobody counts"
    assert write_basic_config("no", path) is False
    assert "exists already" in capsys.readouterr().out
    with pytest.raises(UnknownNameError, match="bf61"):
        write_basic_config("bf61", tmp_path / "other.yaml")
