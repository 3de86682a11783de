# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.offload.pipeline.prepare_pippy import build_pipeline as build_pipeline
from accelerate.offload.pipeline.prepare_pippy import find_pippy_batch_size as find_pippy_batch_size
from accelerate.offload.pipeline.prepare_pippy import generate_device_map as generate_device_map
from accelerate.offload.pipeline.prepare_pippy import pippy_forward as pippy_forward
from accelerate.offload.pipeline.prepare_pippy import prepare_pippy as prepare_pippy
from typing import Any

def __getattr__(name: str) -> Any: ...
