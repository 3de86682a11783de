"""Settings of the ``Accelerator`` that the launcher reads and hands on. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from accelerate.core.setting import SettingOrigin, setting
from accelerate.core.value_types import BaseEnum, PositiveInt, frozen_dataclass
from accelerate.precision import PRECISIONS
from accelerate.precision.recipes import RECIPES

AUTO = "auto"


@frozen_dataclass
class PrecisionSettings:
    """The number format in which models compute."""

    __topic__ = "Precision"
    __common__ = ("mixed_precision",)

    mixed_precision: str | None = setting(
        None,
        help="number format of the forward pass; no: as the weights are",
        choices=PRECISIONS.names(),
        question="Mixed precision?",
        details={"meant": {"float16": "fp16", "half": "fp16", "float32": "no", "fp32": "no"}},
    )

    @staticmethod
    def check(origins: Callable[[str], tuple[SettingOrigin, ...]]) -> None:
        """Refuse 8-bit floats without a library for them.

        Raises:
            SettingError: none is installed, or not the one that ``fp8_backend`` names.
        """
        precision = origins("mixed_precision")[0]
        runs_here = origins("compute_environment")[0].value == "LOCAL_MACHINE"
        if runs_here and precision.value in RECIPES.names():
            RECIPES.get(precision.value).check_library(precision, origins)


@frozen_dataclass
class GradientAccumulationSettings:
    """The settings of gradient accumulation."""

    __topic__ = "Training"
    __common__ = ("gradient_accumulation_steps",)

    gradient_accumulation_steps: PositiveInt = setting(1, help="micro-batches per optimizer step")


@frozen_dataclass
class ResumeSettings:
    """The checkpoint that a training resumes from."""

    __topic__ = "Training"

    resume: str | None = setting(
        None,
        help="what the script finds in accelerator.resume_from: 'auto' is the newest complete checkpoint of "
        "its project, nothing on a first start; or a checkpoint, or a folder of them",
    )


@frozen_dataclass
class RunReportSettings:
    """The settings of what a run reports: on requested options, after ``prepare``, and on its steps."""

    __topic__ = "Output"

    strict: bool = setting(
        False, help="raise an error, instead of a warning, when a requested option cannot be applied"
    )
    effects: Literal["line", "table", "none"] | None = setting(
        None,
        help="how to report on stderr which requested options were applied; by default a strict run prints a "
        "line, any other nothing: an option that cannot be applied is a warning",
    )
    explain: bool = setting(
        False, help="print a table of the requested options: which were applied, and why others were not"
    )
    record: str | None = setting(
        None,
        help="folder in which each process records its steps: time, waiting for data, memory, learning rate, "
        "what the script logs; 'accelerate report FOLDER' draws them",
    )
    check_numerics: bool = setting(
        False,
        help="warn of losses and gradients that are NaN, infinite or a spike, with step, rank, samples and "
        "module, and of slow ranks; each step then waits for the device",
    )


class DynamoBackend(BaseEnum):
    """A compiler behind ``torch.compile``; NO does not compile."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


_BACKENDS = tuple(backend.value for backend in DynamoBackend)
_COMPILED = {"dynamo_backend": tuple(name for name in _BACKENDS if name != "NO")}


@frozen_dataclass
class CompileSettings:
    """The options of ``torch.compile`` for prepared models."""

    __topic__ = "Compilation"
    __section__ = "dynamo_config"
    __prefix__ = "dynamo_"

    dynamo_backend: str | None = setting(
        None,
        choices=_BACKENDS,
        help="compile models with this backend of torch.compile",
        question="torch.compile backend?",
    )
    dynamo_mode: (
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite"] | None
    ) = setting(None, help="what the compiler optimises for", question="torch.compile mode?", when=_COMPILED)
    dynamo_use_fullgraph: bool = setting(
        False,
        help="fail rather than split a model into several graphs",
        question="Full graph, or an error?",
        when=_COMPILED,
    )
    dynamo_use_dynamic: bool | None = setting(
        None, help="compile for shapes that vary", question="Dynamic shapes?", when=_COMPILED
    )
    dynamo_use_regional_compilation: bool = setting(
        False,
        help="compile a model's repeated blocks once instead of the whole model",
        question="Regional compilation of repeated blocks?",
        when=_COMPILED,
    )
    dynamo_cache_dir: str | None = setting(
        None, help="keep what inductor compiles in this folder, for later runs", when=_COMPILED
    )
