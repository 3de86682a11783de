# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.checkpoint.weight_files import merge_fsdp_weights as merge_fsdp_weights
from accelerate.facade.fsdp_checkpoint import get_model_state_dict as _source_of__get_model_state_dict
from accelerate.facade.fsdp_checkpoint import load_fsdp_model as load_fsdp_model
from accelerate.facade.fsdp_checkpoint import load_fsdp_optimizer as load_fsdp_optimizer
from accelerate.facade.fsdp_checkpoint import prepare_sd_options as _source_of__prepare_sd_options
from accelerate.facade.fsdp_checkpoint import save_fsdp_model as save_fsdp_model
from accelerate.facade.fsdp_checkpoint import save_fsdp_optimizer as save_fsdp_optimizer
from accelerate.facade.fsdp_checkpoint import set_model_state_dict as _source_of__set_model_state_dict
from accelerate.strategy.sharding.fsdp_utils import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
)
from accelerate.strategy.sharding.fsdp_utils import (
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
)
from accelerate.strategy.sharding.fsdp_utils import ensure_weights_retied as ensure_weights_retied
from accelerate.strategy.sharding.fsdp_utils import fsdp2_apply_ac as fsdp2_apply_ac
from accelerate.strategy.sharding.fsdp_utils import fsdp2_canonicalize_names as fsdp2_canonicalize_names
from accelerate.strategy.sharding.fsdp_utils import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
from accelerate.strategy.sharding.fsdp_utils import (
    fsdp2_prepare_auto_wrap_policy as fsdp2_prepare_auto_wrap_policy,
)
from accelerate.strategy.sharding.fsdp_utils import fsdp2_prepare_model as fsdp2_prepare_model
from accelerate.strategy.sharding.fsdp_utils import (
    fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters,
)
from accelerate.strategy.sharding.fsdp_utils import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
from accelerate.strategy.sharding.fsdp_utils import get_parameters_from_modules as get_parameters_from_modules
from typing import Any

_get_model_state_dict = _source_of__get_model_state_dict
_prepare_sd_options = _source_of__prepare_sd_options
_set_model_state_dict = _source_of__set_model_state_dict
logger: Any

def __getattr__(name: str) -> Any: ...
