# Written by `python -m accelerate.core.stubs accelerate.names` from the table of names. Do not edit.
# ruff: noqa

from accelerate.strategy.fsdp2.functions import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
)
from accelerate.strategy.fsdp2.functions import (
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
)
from accelerate.strategy.fsdp2.functions import ensure_weights_retied as ensure_weights_retied
from accelerate.strategy.fsdp2.functions import fsdp2_apply_ac as fsdp2_apply_ac
from accelerate.strategy.fsdp2.functions import fsdp2_canonicalize_names as fsdp2_canonicalize_names
from accelerate.strategy.fsdp2.functions import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
from accelerate.strategy.fsdp2.functions import (
    fsdp2_prepare_auto_wrap_policy as fsdp2_prepare_auto_wrap_policy,
)
from accelerate.strategy.fsdp2.functions import fsdp2_prepare_model as fsdp2_prepare_model
from accelerate.strategy.fsdp2.functions import (
    fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters,
)
from accelerate.strategy.fsdp2.functions import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
from accelerate.strategy.fsdp2.functions import get_parameters_from_modules as get_parameters_from_modules
from typing import Any

logger: Any

def load_fsdp_model(*args: Any, **kwargs: Any) -> Any: ...
def load_fsdp_optimizer(*args: Any, **kwargs: Any) -> Any: ...
def merge_fsdp_weights(*args: Any, **kwargs: Any) -> Any: ...
def save_fsdp_model(*args: Any, **kwargs: Any) -> Any: ...
def save_fsdp_optimizer(*args: Any, **kwargs: Any) -> Any: ...
def __getattr__(name: str) -> Any: ...
