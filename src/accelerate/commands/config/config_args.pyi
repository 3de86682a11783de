# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.cli.config_classes import BaseConfig as BaseConfig
from accelerate.cli.config_classes import ClusterConfig as ClusterConfig
from accelerate.cli.config_classes import SageMakerConfig as SageMakerConfig
from accelerate.cli.config_classes import load_config_from_file as load_config_from_file
from typing import Any

cache_dir: str
default_config_file: str
default_json_config_file: str
default_yaml_config_file: str
hf_cache_home: str

def __getattr__(name: str) -> Any: ...
