"""A configuration file as an object, as programs of 1.x read and write it.

The launcher itself reads files by their declared settings (``launch/config_files.py``,
``launch/launch_request.py``); these classes are for programs that show, copy or write a configuration.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from accelerate import device as devices
from accelerate.cli.options import launch_settings
from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.core.value_types import refuse_nul
from accelerate.facade.enums import ComputeEnvironment, DistributedType, SageMakerDistributedType
from accelerate.launch import config_files, config_writer
from accelerate.launch.launch_request import JobSettings
from accelerate.precision import PRECISIONS

C = TypeVar("C", bound="BaseConfig")
DEFAULT = str(config_files.default_file())


@dataclass
class BaseConfig:
    """The fields of every configuration.

    Attributes:
        compute_environment: where the job runs.
        distributed_type: how its processes work together.
        mixed_precision: number format of the forward pass.
        use_cpu: use the CPU even if there is an accelerator.
        debug: check the shapes of every collective.
    """

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType | SageMakerDistributedType
    mixed_precision: str | None
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        kinds: type[Enum] = DistributedType if self._is_local() else SageMakerDistributedType
        self.compute_environment = _enum_member(
            ComputeEnvironment, "compute_environment", self.compute_environment
        )
        self.distributed_type = _enum_member(kinds, "distributed_type", self.distributed_type)

    def _is_local(self) -> bool:
        return self.compute_environment.upper() != ComputeEnvironment.AMAZON_SAGEMAKER

    def to_dict(self) -> dict[str, Any]:
        """Every field that says something: enumerations as text, None and empty tables left out."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        plain = {name: value.value if isinstance(value, Enum) else value for name, value in fields.items()}
        return {name: value for name, value in plain.items() if value is not None and value != {}}

    @staticmethod
    def process_config(config_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a file with old formats made new and what every configuration says filled in."""
        usual = {
            "compute_environment": "LOCAL_MACHINE",
            "mixed_precision": None,
            "use_cpu": False,
            "debug": False,
        }
        return usual | config_files.upgrade_keys(config_dict)

    @classmethod
    def from_json_file(cls: type[C], json_file: str | None = None) -> C:
        """Read a JSON file; the default file when None."""
        return cls._of(config_files.read_config(Path(json_file or config_files.default_file())))

    @classmethod
    def from_yaml_file(cls: type[C], yaml_file: str | None = None) -> C:
        """Read a YAML file; the default file when None."""
        return cls._of(config_files.read_config(Path(yaml_file or config_files.default_file())))

    @classmethod
    def _of(cls: type[C], file: config_files.ConfigFile) -> C:
        """A configuration from a file's values.

        Raises:
            SettingError: ``distributed_type`` or another key without a default is missing.
            UnknownNameError: a key is unknown.
        """
        fields = {item.name: item for item in dataclasses.fields(cls)}
        # A launch knows more settings than programs of 1.x; those are left out here.
        valid_keys = {*fields, *(row.section or row.name for row in launch_settings() if row.in_file)}
        valid_keys |= JobSettings.__without_effect__.keys()
        for key in file.values:
            if key not in valid_keys:
                raise UnknownNameError("key", key, fields, where=f"in {file.locate(key)}")
        for name, item in fields.items():
            if name not in cls.process_config(file.values) and item.default is dataclasses.MISSING:
                raise SettingError(f"{file.path} has no key {name}", fix=f"add a line like '{name}: NO'")
        return cls.of_values(file.values)

    @classmethod
    def of_values(cls: type[C], values: Mapping[str, Any]) -> C:
        """A configuration with these values, those of them that programs of 1.x know."""
        names = {item.name for item in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in cls.process_config(values).items() if key in names})

    def to_json_file(self, json_file: str | Path) -> None:
        """Write a JSON file."""
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True)
        config_writer.write_file(Path(json_file), f"{text}\n")

    def to_yaml_file(self, yaml_file: str | Path) -> None:
        """Write a YAML file."""
        import yaml

        config_writer.write_file(Path(yaml_file), yaml.safe_dump(self.to_dict()))


def _enum_member(kind: type[Enum], name: str, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    try:
        return kind(value.upper() if isinstance(value, str) else value)
    except ValueError as error:
        raise UnknownNameError(f"value of {name}", str(value), [m.value for m in kind]) from error


@dataclass
class ClusterConfig(BaseConfig):
    """The configuration of a job on machines of one's own; ``launch --help-all`` explains the keys."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_processes == -1 and self.distributed_type == DistributedType.NO:
            self.num_processes = 1
        for item in dataclasses.fields(self):
            if item.name.endswith("_config") and getattr(self, item.name) is None:
                setattr(self, item.name, {})


@dataclass
class SageMakerConfig(BaseConfig):
    """The configuration of a job on Amazon SageMaker; `launch/kinds/sagemaker.py` explains the keys."""

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = "accelerate-sagemaker-1"
    pytorch_version: str = "1.10.2"
    transformers_version: str = "4.17.0"
    py_version: str = "py38"
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    enable_cpu_affinity: bool = False


def load_config_from_file(config_file: str | None) -> ClusterConfig | SageMakerConfig:
    """The configuration that a file holds, of the class that its ``compute_environment`` asks for.

    Args:
        config_file: a YAML or JSON file; the default file when None.

    Raises:
        FileNotFoundError: there is no such file.
        SettingError: it cannot be read, lacks a key, or has a wrong value.
        UnknownNameError: a key is unknown.
    """
    file = config_files.read_config(config_files.expand_home(config_file or config_files.default_file()))
    place = str(file.values.get("compute_environment", "LOCAL_MACHINE")).upper()
    return (ClusterConfig if place == ComputeEnvironment.LOCAL_MACHINE else SageMakerConfig)._of(file)


def write_basic_config(mixed_precision: str = "no", save_location: str | Path = DEFAULT) -> Path | bool:
    """Write a configuration for all devices of this machine.

    Args:
        mixed_precision: number format of the forward pass.
        save_location: the file; one that exists is left as it is.

    Returns:
        The file, or False when it existed.

    Raises:
        UnknownNameError: there is no such precision.
        SettingError: the location has a NUL character.
    """
    from importlib.metadata import entry_points  # more to load than a help text may take

    refuse_nul("save_location", save_location)
    path = Path(save_location)
    if os.path.exists(path):
        print(f"{path} exists already and stays as it is; delete it to write a new one, or name another file")
        return False
    if mixed_precision.lower() not in PRECISIONS:
        raise UnknownNameError("precision", mixed_precision, PRECISIONS.names())
    device, count = devices.probe_devices()
    # A device that torch alone knows cannot be counted here; each process looks for it.
    unknown_devices = entry_points(group="torch.backends")
    processes = 1 if sys.platform == "win32" else max(1, count)  # what a launch there can start
    config = ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=DistributedType(device.distributed_type if processes > 1 else "NO"),
        mixed_precision=mixed_precision.lower(),
        use_cpu=count == 0 and not unknown_devices,
        debug=False,
        num_processes=processes,
    )
    config.to_json_file(path)
    return path
