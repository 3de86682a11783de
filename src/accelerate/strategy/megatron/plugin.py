"""``MegatronLMPlugin``: the options of Megatron-LM, from code or from the launcher.

Those that a launch can give are declared in ``launch_settings/megatron.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerate.core import packages
from accelerate.core.argument_checks import check_arguments
from accelerate.core.errors import FeatureNotBuiltError, PrepareError, SettingError
from accelerate.core.setting import declared_settings, describe_fields, load_fields
from accelerate.core.value_types import Fraction, NonNegativeInt, NonNegativeNumber, PathText, PositiveInt
from accelerate.strategy.launch_settings.megatron import MegatronSettings
from accelerate.strategy.megatron.parsers import add_model_args


@check_arguments
@describe_fields
@dataclass
class MegatronLMPlugin(MegatronSettings):
    """The options of Megatron-LM; a field that is None takes its variable, then its default.

    The defaults are those of the public package. Where they would change a model that nobody wanted changed,
    they do not count unless somebody gives them: dropout is the model's own, nothing is computed again, and
    no sequence is shared, until the field or its variable says so.

    Attributes:
        pipeline_model_parallel_split_rank, num_layers_per_virtual_pipeline_stage: refused, with reasons.
        lr_decay_style, min_lr, lr_decay_iters, lr_warmup_iters, lr_warmup_fraction, train_iters: of the
            schedule that a ``MegatronLMDummyScheduler`` stands for.
        return_logits: forwards give logits next to the loss.
        custom_train_step_class, custom_train_step_kwargs: in place of ``GPTTrainStep``.
        custom_prepare_model_function: changes Megatron-LM's model before it is wrapped.
        custom_get_batch_function, custom_loss_function: in place of those of ``GPTTrainStep``.
        custom_model_provider_function, custom_megatron_datasets_provider_function: refused.
        megatron_dataset_flag: batches are those of Megatron-LM's own datasets: refused, unless
            ``custom_get_batch_function`` reads them.
        other_megatron_args: further arguments of Megatron-LM's ``TransformerConfig``.
    """

    pipeline_model_parallel_split_rank: NonNegativeInt | None = None
    num_layers_per_virtual_pipeline_stage: PositiveInt | None = None
    is_train_batch_min: bool = True
    train_iters: PositiveInt | None = None
    train_samples: PositiveInt | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: NonNegativeNumber | None = None
    end_weight_decay: NonNegativeNumber | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: PositiveInt | None = None
    lr_decay_samples: PositiveInt | None = None
    lr_warmup_iters: NonNegativeInt | None = None
    lr_warmup_samples: NonNegativeInt | None = None
    lr_warmup_fraction: Fraction | None = None
    min_lr: NonNegativeNumber = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: NonNegativeNumber = 1.0
    megatron_dataset_flag: bool = False
    seq_length: PositiveInt | None = None
    encoder_seq_length: PositiveInt | None = None
    decoder_seq_length: PositiveInt | None = None
    tensorboard_dir: PathText | None = None
    set_all_logging_options: bool = False
    eval_iters: NonNegativeInt = 100
    eval_interval: NonNegativeInt = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._settings = load_fields(self)
        for row in declared_settings(type(self)):
            if row.details["nominal"] is not None and getattr(self, row.field) is None:
                setattr(self, row.field, row.details["nominal"])
        self._set_default_args()

    def explicit_value(self, name: str) -> Any:
        """Return a field as the user gave it; None where it has its default."""
        return (
            getattr(self._settings.value, name) if name in vars(self._settings.value) else getattr(self, name)
        )

    @property
    def weighs_tokens(self) -> bool:
        """Return whether gradients are of the mean over tokens; the user's own functions give plain means."""
        uses_builtin_loss = self.custom_loss_function is None and self.custom_train_step_class is None
        return bool(self.calculate_per_token_loss) and uses_builtin_loss

    def _set_default_args(self) -> None:
        """Set the arguments under the names of Megatron-LM's training script."""
        self.DDP_impl = "local" if self.pp_degree > 1 or self.use_distributed_optimizer else "torch"
        arguments = {
            row.details["argument"] or row.field: getattr(self, row.field)
            for row in declared_settings(type(self))
            if row.details["argument"] is not None
        }
        more = {name: getattr(self, name) for name in ("DDP_impl", *_CODE_ARGS)}
        self.megatron_lm_default_args: dict[str, Any] = arguments | more
        if self.tensorboard_dir is not None:
            self.megatron_lm_default_args["tensorboard_dir"] = self.tensorboard_dir
            if self.set_all_logging_options:
                self.set_tensorboard_logging_options()
        self.megatron_lm_default_args |= self.other_megatron_args or {}

    # --- arguments of what is trained

    def set_network_size_args(self, model: Any, batch_data: Any = None) -> None:
        """Add the arguments of the model's configuration; see ``parsers.py``.

        Raises:
            UnknownNameError: there is no parser for such models (a ValueError).
        """
        add_model_args(self, model, batch_data)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Add the number format."""
        if mixed_precision in ("fp16", "bf16"):
            self.megatron_lm_default_args[mixed_precision] = True
        if mixed_precision == "bf16":
            self.DDP_impl = self.megatron_lm_default_args["DDP_impl"] = "local"

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Add the batch sizes.

        Args:
            micro_batch_size: samples of a micro-batch.
            dp_degree: copies of the model.
        """
        self.data_parallel_size: int = dp_degree
        self.micro_batch_size: int = micro_batch_size
        self.global_batch_size: int = dp_degree * micro_batch_size * self.num_micro_batches
        for name in ("data_parallel_size", "micro_batch_size", "global_batch_size"):
            self.megatron_lm_default_args[name] = getattr(self, name)

    def set_optimizer_type(self, optimizer: Any) -> None:
        """Add the optimizer's name and rates.

        Raises:
            SettingError: Megatron-LM has none of this kind (a ValueError).
        """
        defaults, kind = optimizer.defaults, type(optimizer).__name__.lower()
        if "adam" in kind:
            first, second = defaults["betas"]
            arguments = {
                "optimizer": "adam",
                "adam_beta1": first,
                "adam_beta2": second,
                "adam_eps": defaults["eps"],
            }
        elif "sgd" in kind:
            arguments = {"optimizer": "sgd", "sgd_momentum": defaults["momentum"]}
        else:
            raise SettingError(
                f"Megatron-LM's training script has no optimizer {type(optimizer).__name__}",
                fix="use Adam, AdamW or SGD",
            )
        arguments |= {"lr": defaults["lr"], "weight_decay": defaults["weight_decay"]}
        self.megatron_lm_default_args.update(arguments)

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Add the lengths of a ``MegatronLMDummyScheduler``, in optimizer steps of one copy of the model.

        Raises:
            PrepareError: the sizes of batches are not set.
        """
        if not hasattr(self, "data_parallel_size"):
            raise PrepareError(
                "set_scheduler_args before set_training_args", fix="call set_training_args first"
            )
        copies = self.data_parallel_size
        if self.train_iters is None:
            self.train_iters = scheduler.total_num_steps // copies
            self._discard_option("train_samples", "train_iters")
        if self.lr_warmup_iters is None:
            self.lr_warmup_iters = scheduler.warmup_num_steps // copies
            self._discard_option("lr_warmup_samples", "lr_warmup_iters", 0)
        for name in _SCHEDULE_ARGS:
            self.megatron_lm_default_args[name] = getattr(self, name)

    def _discard_option(self, name: str, instead: str, value: Any = None) -> None:
        if getattr(self, name) is not None:
            warnings.warn(f"{name} is ignored: the schedule says {instead}", stacklevel=4)
        setattr(self, name, value)

    def set_tensorboard_logging_options(self) -> None:
        """Refused: the options are those of Megatron-LM's training script.

        Raises:
            FeatureNotBuiltError: always.
        """
        raise FeatureNotBuiltError(
            "set_all_logging_options asks for the logs of Megatron-LM's training script",
            why="the package megatron-core is a library without that script",
            fix="Accelerator(log_with=...) and accelerator.log(...)",
        )


# Fields that only code gives and that are arguments by their own name.
_CODE_ARGS = (
    *("pipeline_model_parallel_split_rank", "num_layers_per_virtual_pipeline_stage", "consumed_samples"),
    *("no_wd_decay_cond", "scale_lr_cond", "lr_mult", "megatron_dataset_flag", "eval_iters", "eval_interval"),
)
_SCHEDULE_ARGS = (
    *("train_iters", "lr_warmup_iters", "train_samples", "lr_warmup_samples", "lr_decay_iters"),
    *("lr_decay_samples", "lr_warmup_fraction", "lr_decay_style", "weight_decay_incr_style"),
    *("start_weight_decay", "end_weight_decay", "min_lr"),
)


# --- options that Megatron-LM cannot do, each with its reason

_REPOSITORY = "it is part of Megatron-LM's repository, and not of the package megatron-core"
_KERNELS = "Megatron-LM needs TransformerEngine for it, which has no build for this machine's torch"
_UNTESTED = "nobody has run it here: it takes several devices of the vendor's"


def _above_one(value: Any) -> bool:
    return value is not None and value > 1


# Field -> (whether a value is not supported, why not, what to do).
_UNSUPPORTED: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "context_parallel_size": (
        _above_one,
        "Megatron-LM shares sequences only inside TransformerEngine's attention",
        "ParallelismConfig(cp_size=...) shares sequences",
    ),
    "expert_model_parallel_size": (_above_one, "models with experts are not taken over", "leave it out"),
    "expert_tensor_parallel_size": (_above_one, "models with experts are not taken over", "leave it out"),
    "use_custom_fsdp": (bool, _UNTESTED, "shard by torch: FullyShardedDataParallelPlugin()"),
    "optimizer_cpu_offload": (bool, _KERNELS, "leave it out"),
    "overlap_cpu_optimizer_d2h_h2d": (bool, _KERNELS, "leave it out"),
    "use_precision_aware_optimizer": (bool, _KERNELS, "leave it out"),
    "num_layers_per_virtual_pipeline_stage": (
        _above_one,
        _UNTESTED,
        "leave it out: stages then take turns once",
    ),
    "pipeline_model_parallel_split_rank": (
        lambda value: value is not None,
        "only models with an encoder and a decoder have such a place",
        "leave it out",
    ),
    "custom_model_provider_function": (
        lambda value: value is not None,
        "the weights of a model that was not made of the user's cannot be told by the user's names",
        "change Megatron-LM's model in custom_prepare_model_function",
    ),
    "custom_megatron_datasets_provider_function": (
        lambda value: value is not None,
        _REPOSITORY,
        "give a DataLoader to prepare",
    ),
}


def check_options(plugin: MegatronLMPlugin, precision: str) -> None:
    """Refuse options that are not supported.

    Raises:
        SettingError: one of them is set.
    """
    for name, (is_unsupported, reason, fix) in _UNSUPPORTED.items():
        value = plugin.explicit_value(name)
        if is_unsupported(value):
            shown = value if isinstance(value, str) else getattr(value, "__name__", repr(value))
            raise SettingError(f"Megatron-LM with {name}={shown} does not work", why=reason, fix=fix)
    if plugin.megatron_dataset_flag and plugin.custom_get_batch_function is None:
        raise SettingError(
            "megatron_dataset_flag=True without a custom_get_batch_function",
            why="Megatron-LM's own datasets lie in its repository, and not in the package megatron-core",
            fix="leave it out, and prepare a DataLoader whose batches have input_ids and labels",
        )
    if plugin.sequence_parallelism:
        _check_sequence_parallel(plugin)
    if precision not in ("no", "bf16"):
        raise SettingError(
            f"Megatron-LM with mixed_precision={precision!r} does not work",
            why="8 bits need the vendor's kernels, and float16 a loss scale of Megatron-LM's own: nobody "
            "has run them here",
            fix="use mixed_precision='bf16' or 'no'",
        )


def _check_sequence_parallel(plugin: MegatronLMPlugin) -> None:
    if plugin.tp_degree < 2:
        raise SettingError(
            "sequence_parallelism without tensor parallelism",
            why="it splits activations over the processes that share a layer",
            fix="use tp_degree=2 or more, or leave sequence_parallelism out",
        )
    if not packages.is_installed("apex"):
        raise SettingError(
            "Megatron-LM with sequence_parallelism does not work without the package apex",
            why="Megatron-LM refuses it with torch's norms: it needs Apex's or TransformerEngine's",
            fix="install apex from its repository, or leave sequence_parallelism out",
        )
