# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.facade.device_availability import check_cuda_fp8_capability as check_cuda_fp8_capability
from accelerate.facade.v1_utilities import CPUInformation as CPUInformation
from accelerate.facade.v1_utilities import are_libraries_initialized as are_libraries_initialized
from accelerate.facade.v1_utilities import clear_environment as clear_environment
from accelerate.facade.v1_utilities import convert_dict_to_env_variables as convert_dict_to_env_variables
from accelerate.facade.v1_utilities import get_cpu_distributed_information as get_cpu_distributed_information
from accelerate.facade.v1_utilities import get_current_device_type as get_current_device_type
from accelerate.facade.v1_utilities import get_driver_version as get_driver_version
from accelerate.facade.v1_utilities import get_gpu_info as get_gpu_info
from accelerate.facade.v1_utilities import get_int_from_env as get_int_from_env
from accelerate.facade.v1_utilities import has_p2p_infiniband as _source_of_check_cuda_p2p_ib_support
from accelerate.facade.v1_utilities import parse_choice_from_env as parse_choice_from_env
from accelerate.facade.v1_utilities import parse_flag_from_env as parse_flag_from_env
from accelerate.facade.v1_utilities import patch_environment as patch_environment
from accelerate.facade.v1_utilities import purge_accelerate_environment as purge_accelerate_environment
from accelerate.facade.v1_utilities import str_to_bool as str_to_bool
from accelerate.world.affinity import override_numa_affinity as override_numa_affinity
from accelerate.world.affinity import set_numa_affinity as set_numa_affinity
from typing import Any

check_cuda_p2p_ib_support = _source_of_check_cuda_p2p_ib_support

def __getattr__(name: str) -> Any: ...
