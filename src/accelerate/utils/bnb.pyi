# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.facade.quantized_loading import (
    get_quantized_model_device_map as get_quantized_model_device_map,
)
from accelerate.facade.quantized_loading import load_and_quantize_model as load_and_quantize_model
from accelerate.offload.quantization.base import get_keys_to_not_convert as get_keys_to_not_convert
from accelerate.offload.quantization.bitsandbytes import get_parameter_device as get_parameter_device
from accelerate.offload.quantization.bitsandbytes import has_4bit_bnb_layers as has_4bit_bnb_layers
from accelerate.offload.quantization.bitsandbytes import (
    quantize_and_offload_8bit as quantize_and_offload_8bit,
)
from accelerate.offload.quantization.bitsandbytes import replace_with_bnb_layers as replace_with_bnb_layers
from typing import Any

def __getattr__(name: str) -> Any: ...
