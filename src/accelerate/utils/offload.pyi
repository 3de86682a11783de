# Written by `python -m accelerate.core.stubs accelerate.names` from the table of names. Do not edit.
# ruff: noqa

from accelerate.offload.folder import OffloadedWeightsLoader as OffloadedWeightsLoader
from accelerate.offload.folder import PrefixedDataset as PrefixedDataset
from accelerate.offload.folder import extract_submodules_state_dict as extract_submodules_state_dict
from accelerate.offload.folder import load_offloaded_weight as load_offloaded_weight
from accelerate.offload.folder import offload_state_dict as offload_state_dict
from accelerate.offload.folder import offload_weight as offload_weight
from accelerate.offload.folder import save_offload_index as save_offload_index
from typing import Any

def __getattr__(name: str) -> Any: ...
