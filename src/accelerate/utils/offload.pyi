# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.offload.offload_folder import OffloadedWeightsLoader as OffloadedWeightsLoader
from accelerate.offload.offload_folder import PrefixedDataset as PrefixedDataset
from accelerate.offload.offload_folder import extract_submodules_state_dict as extract_submodules_state_dict
from accelerate.offload.offload_folder import load_offloaded_weight as load_offloaded_weight
from accelerate.offload.offload_folder import offload_state_dict as offload_state_dict
from accelerate.offload.offload_folder import offload_weight as offload_weight
from accelerate.offload.offload_folder import save_offload_index as save_offload_index
from typing import Any

def __getattr__(name: str) -> Any: ...
