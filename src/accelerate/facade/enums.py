"""The words of the contract: what files, flags and scripts write, as enumerations.

Members equal their text. What a device is called is said in its own file; a device that another package
adds is a member as soon as that package is installed.
"""

from __future__ import annotations

from enum import Enum

from accelerate import device as devices
from accelerate.core.enums import BaseEnum


class ComputeEnvironment(BaseEnum):
    """Where a job runs."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class DistributedType(BaseEnum):
    """How the processes of a job share the work: one per device type, and one per engine."""

    _ignore_ = ["each"]  # noqa: RUF012 - the enumeration's own protocol
    NO = "NO"
    FSDP = "FSDP"
    DEEPSPEED = "DEEPSPEED"
    MEGATRON_LM = "MEGATRON_LM"
    for each in sorted({device.distributed_type for device in devices.DEVICES} - {NO}):
        vars()[each] = each


class RNGType(BaseEnum):
    """A stream of random numbers that ranks can be asked to agree on."""

    _ignore_ = ["each"]  # noqa: RUF012 - the enumeration's own protocol
    TORCH = "torch"
    GENERATOR = "generator"
    for each in sorted({device.type for device in devices.accelerators()}):
        vars()[each.upper()] = each


class PrecisionType(BaseEnum):
    """In which number format a model computes."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class FP8BackendType(BaseEnum):
    """Which library computes in 8-bit floats."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class CustomDtype(Enum):
    """Number formats that torch has no dtype for; they matter only for sizes."""

    # Not text: callers tell a custom format from the name of a torch dtype by its type.
    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"

    @property
    def bits(self) -> int:
        """Size of one element."""
        return int(self.value.lstrip("abcdefghijklmnopqrstuvwxyz"))


class LoggerType(BaseEnum):
    """An experiment tracker; ALL means every one that is installed."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class SageMakerDistributedType(BaseEnum):
    """How a SageMaker job is distributed."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"
