"""``accelerate to-fsdp2``: what becomes of each key, what is refused, and that the old file is never lost."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelerate.commands.to_fsdp2 import (
    ARGUMENT_KEY_MAPPING,
    ARGUMENT_VALUE_MAPPING,
    ConversionStatus,
    convert_config_to_fsdp2,
    load_config,
    to_fsdp2_command,
    to_fsdp2_command_parser,
)
from accelerate.core.errors import SettingError, UnknownNameError
from tests.support.command import run
from tests.support.launch_plans import request_of_file

OLD: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_forward_prefetch": False,
        "fsdp_offload_params": True,
        "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_sync_module_states": True,
        "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
        "fsdp_use_orig_params": True,
    },
    "mixed_precision": "bf16",
    "num_processes": 2,
}
NEW = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": True,
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
    "fsdp_version": 2,
}


def config(**options: Any) -> dict[str, Any]:
    """A configuration with these options of sharding only."""
    return {"distributed_type": "FSDP", "fsdp_config": options}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file of version 1."""
    path = tmp_path / "old.yaml"
    path.write_text(yaml.safe_dump(OLD))
    return path


def test_the_new_file_has_the_new_keys_and_launches(old: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.yaml"
    assert run(["to-fsdp2", "--config_file", str(old), "--output_file", str(new)]) == 0
    assert yaml.safe_load(new.read_text()) == {**OLD, "fsdp_config": NEW}
    assert yaml.safe_load(old.read_text()) == OLD
    request = request_of_file(new)
    assert request.get("fsdp_version") == 2
    assert request.get("fsdp_reshard_after_forward") is True


def test_a_pipe_is_written_to_and_not_replaced(old: Path, tmp_path: Path) -> None:
    """As root, the same goes for /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.append((tmp_path / "pipe").read_text()), daemon=True)
    reader.start()
    arguments = ["--config-file", str(old), "--output-file", str(tmp_path / "pipe"), "--overwrite"]
    assert run(["to-fsdp2", *arguments]) == 0
    reader.join(timeout=60)
    assert "fsdp_version: 2" in texts[0]
    assert (tmp_path / "pipe").is_fifo()


def test_what_is_left_out_is_said(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["to-fsdp2", "--config-file", str(old), "--overwrite"]) == 0
    told = capsys.readouterr().out
    dropped = [key for key, target in ARGUMENT_KEY_MAPPING.items() if isinstance(target, ConversionStatus)]
    assert len(dropped) == 4
    assert all(f"{key} is left out" in told for key in dropped)
    assert yaml.safe_load(old.read_text())["fsdp_config"] == NEW


@pytest.mark.parametrize("key", ["fsdp_sharding_strategy", "fsdp_reshard_after_forward", "sharding_strategy"])
@pytest.mark.parametrize(
    ("strategy", "reshard"),
    [
        ("FULL_SHARD", True),
        ("HYBRID_SHARD", True),
        ("SHARD_GRAD_OP", False),
        ("HYBRID_SHARD_ZERO2", False),
        ("NO_SHARD", False),
        ("full_shard", True),
        (1, True),
        (3, False),
        ("4", True),
        ("5", False),
        (True, True),
        ("false", False),
    ],
)
def test_every_strategy_says_whether_parameters_are_freed(key: str, strategy: Any, reshard: bool) -> None:
    new = convert_config_to_fsdp2(config(**{key: strategy}))
    assert new["fsdp_config"] == {"fsdp_reshard_after_forward": reshard, "fsdp_version": 2}


def test_hsdp_replicas_stay(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One for each machine; what only version 1 has is replaced, and said."""
    given = config(fsdp_sharding_strategy="HYBRID_SHARD", fsdp_state_dict_type="LOCAL_STATE_DICT")
    new = convert_config_to_fsdp2({**given, "num_machines": 4})["fsdp_config"]
    assert new["fsdp_replicate_size"] == 4
    assert new["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"
    assert "fsdp_replicate_size" not in convert_config_to_fsdp2({**given, "num_machines": 1})["fsdp_config"]
    numbered = {**config(fsdp_sharding_strategy="4"), "num_machines": 4}
    assert convert_config_to_fsdp2(numbered)["fsdp_config"]["fsdp_replicate_size"] == 4
    more = config(sharding_strategy=5, replicate_size=2)
    assert convert_config_to_fsdp2({**more, "num_machines": 4})["fsdp_config"]["fsdp_replicate_size"] == 2
    old.write_text(yaml.safe_dump({**given, "num_machines": 4}))
    assert run(["to-fsdp2", "--config_file", str(old), "--overwrite"]) == 0
    told = capsys.readouterr().out
    assert "fsdp_replicate_size is the number of replicas" in told
    assert "LOCAL_STATE_DICT becomes SHARDED_STATE_DICT" in told
    quoted = convert_config_to_fsdp2({**given, "num_machines": "4"})["fsdp_config"]
    assert quoted["fsdp_replicate_size"] == 4


@pytest.mark.parametrize("machines", [None, 1, "2:4"])
def test_hsdp_without_a_number_of_machines_is_not_promised(
    old: Path, capsys: pytest.CaptureFixture[str], machines: Any
) -> None:
    """There may be several at launch."""
    old.write_text(
        yaml.safe_dump({**config(fsdp_sharding_strategy="HYBRID_SHARD"), "num_machines": machines})
    )
    assert run(["to-fsdp2", "--config_file", str(old), "--overwrite"]) == 0
    told = capsys.readouterr().out
    assert "fsdp_replicate_size" not in yaml.safe_load(old.read_text())["fsdp_config"]
    assert "add fsdp_replicate_size: MACHINES to fsdp_config" in told
    assert "number of replicas" not in told


def test_the_values_are_those_of_1_x() -> None:
    assert ARGUMENT_VALUE_MAPPING["fsdp_sharding_strategy"]["HYBRID_SHARD_ZERO2"] is False
    assert ARGUMENT_KEY_MAPPING["fsdp_sharding_strategy"] == "fsdp_reshard_after_forward"
    assert ARGUMENT_KEY_MAPPING["fsdp_backward_prefetch"] is ConversionStatus.REMOVED


@pytest.mark.parametrize("key", ["fsdp_backward_prefetch_policy", "backward_prefetch_policy"])
def test_an_old_key_is_left_out_under_todays_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(yaml.safe_dump(config(**{key: "BACKWARD_PRE"})))
    assert run(["to-fsdp2", "--config_file", str(file), "--overwrite"]) == 0
    assert "fsdp_backward_prefetch is left out" in capsys.readouterr().out
    assert yaml.safe_load(file.read_text())["fsdp_config"] == {"fsdp_version": 2}


def test_the_configuration_given_stays_as_it_is() -> None:
    given = config(fsdp_sharding_strategy="NO_SHARD", own="kept")
    assert convert_config_to_fsdp2(given)["fsdp_config"]["own"] == "kept"
    assert given == config(fsdp_sharding_strategy="NO_SHARD", own="kept")
    of_version_2 = config(fsdp_version=2, fsdp_use_orig_params=True)
    assert convert_config_to_fsdp2(of_version_2) == of_version_2
    assert convert_config_to_fsdp2({"distributed_type": "NO"}) == {"distributed_type": "NO"}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("distributed_type: MULTI_GPU\nnum_processes: 2\n", "has no fsdp_config"),
        ("distributed_type: FSDP\nfsdp_config: {}\n", "has no fsdp_config"),
        (
            "distributed_type: MULTI_GPU\nfsdp_config: {fsdp_version: 1}\n",
            "its distributed_type is MULTI_GPU",
        ),
        ("distributed_type: FSDP\nfsdp_config: FULL_SHARD\n", "is a table of keys"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HALF}\n", "unknown value 'HALF'"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 1, version: 1}\n", "fsdp_version twice"),
        ("- 1\n", "is not a table of keys"),
    ],
)
def test_what_is_no_fsdp1_file_is_refused_and_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, what: str
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert run(["to-fsdp2", "--config_file", str(path), "--overwrite"]) == 2
    told = capsys.readouterr().err
    assert what in told
    assert "job.yaml" in told
    assert path.read_text() == text


def test_a_file_of_fsdp2_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in 1.15: scripts convert every file that they have."""
    path, other = tmp_path / "job.yaml", tmp_path / "other.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_use_orig_params: true}\n")
    assert run(["to-fsdp2", "--config_file", str(path), "--output_file", str(other)]) == 0
    assert "is a configuration of FSDP2 already" in capsys.readouterr().out
    assert load_config(str(other)) == load_config(str(path))


def test_nothing_is_replaced_without_being_asked_to(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there.yaml"
    there.write_text("mine\n")
    assert run(["to-fsdp2", "--config_file", str(old), "--output_file", str(there)]) == 2
    assert run(["to-fsdp2", "--config_file", str(old)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert there.read_text() == "mine\n"
    assert run(["to-fsdp2", "--config_file", str(tmp_path / "odl.yaml"), "--overwrite"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_the_functions_of_1_x(old: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.json"
    arguments = ["--config_file", str(old), "--output_file", str(new)]
    to_fsdp2_command(to_fsdp2_command_parser().parse_args(arguments))
    assert load_config(str(new))["fsdp_config"] == NEW
    with pytest.raises(FileExistsError):
        to_fsdp2_command(to_fsdp2_command_parser().parse_args(arguments))
    with pytest.raises(FileNotFoundError):
        load_config(str(tmp_path / "nothing.yaml"))
    nothing = ["--config_file", str(tmp_path / "nothing.yaml")]
    with pytest.raises(FileNotFoundError):  # before it is asked where the new one goes
        to_fsdp2_command(to_fsdp2_command_parser().parse_args(nothing))
    with pytest.raises(UnknownNameError):
        convert_config_to_fsdp2(config(fsdp_sharding_strategy="HALF"))
    with pytest.raises(SettingError):
        convert_config_to_fsdp2({"fsdp_config": "all"})
