"""The enumerations of the public API: the words that files, flags and scripts use.

Members equal their text. Devices, precisions and trackers are named in their own files; one that another
package adds is a member as soon as that package is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from accelerate import device as devices
from accelerate.core.value_types import BaseEnum, StringEnum, ValueRule
from accelerate.precision import PRECISIONS
from accelerate.track import TRACKERS


class ComputeEnvironment(StringEnum):
    """The place where a job runs: this machine or SageMaker."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class DistributedType(StringEnum):
    """The kind of distributed training: one per device type, and FSDP, DeepSpeed, Megatron-LM."""

    _ignore_ = ["each"]  # noqa: RUF012 - the enumeration's own protocol
    NO = "NO"
    FSDP = "FSDP"
    DEEPSPEED = "DEEPSPEED"
    MEGATRON_LM = "MEGATRON_LM"
    if TYPE_CHECKING:  # type checkers do not run the loop
        MULTI_CPU = "MULTI_CPU"
        MULTI_GPU = "MULTI_GPU"
        MULTI_HPU = "MULTI_HPU"
        MULTI_MLU = "MULTI_MLU"
        MULTI_MUSA = "MULTI_MUSA"
        MULTI_NEURON = "MULTI_NEURON"
        MULTI_NPU = "MULTI_NPU"
        MULTI_SDAA = "MULTI_SDAA"
        MULTI_XPU = "MULTI_XPU"
        XLA = "XLA"
    for each in sorted({device.distributed_type for device in devices.DEVICES} - {NO}):
        vars()[each] = each


class RNGType(BaseEnum):
    """A random number generator that ranks can synchronize."""

    _ignore_ = ["each"]  # noqa: RUF012 - the enumeration's own protocol
    TORCH = "torch"
    GENERATOR = "generator"
    if TYPE_CHECKING:
        CUDA = "cuda"
        HPU = "hpu"
        MLU = "mlu"
        MUSA = "musa"
        NEURON = "neuron"
        NPU = "npu"
        SDAA = "sdaa"
        XLA = "xla"
        XPU = "xpu"
    for each in sorted({device.type for device in devices.accelerators()}):
        vars()[each.upper()] = each


RNGName = Annotated[
    str, ValueRule(f", {' or '.join(map(repr, RNGType.list()))}", lambda name: name in RNGType.list())
]


class PrecisionType(BaseEnum):
    """The mixed precision of a run."""

    _ignore_ = ["each"]  # noqa: RUF012
    if TYPE_CHECKING:
        NO = "no"
        FP8 = "fp8"
        FP16 = "fp16"
        BF16 = "bf16"
    for each in PRECISIONS.names():
        vars()[each.upper()] = each


class FP8BackendType(StringEnum):
    """The library that computes in 8-bit floats."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class LoggerType(BaseEnum):
    """An experiment tracker; ALL means every one that is installed."""

    _ignore_ = ["each"]  # noqa: RUF012 - the enumeration's own protocol
    ALL = "all"
    if TYPE_CHECKING:
        AIM = "aim"
        CLEARML = "clearml"
        COMETML = "comet_ml"
        DVCLIVE = "dvclive"
        JSONL = "jsonl"
        MLFLOW = "mlflow"
        SWANLAB = "swanlab"
        TENSORBOARD = "tensorboard"
        TRACKIO = "trackio"
        WANDB = "wandb"
    for each in TRACKERS.names():
        vars()[each.replace("_", "").upper()] = each


class SageMakerDistributedType(StringEnum):
    """How a SageMaker job is distributed."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"
