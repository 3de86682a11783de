"""``DeepSpeedPlugin``: the options of DeepSpeed from code, from its JSON file, or from the launcher."""

from __future__ import annotations

import copy
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from accelerate.core import environ
from accelerate.core.argument_checks import check_arguments
from accelerate.core.errors import MissingExtraError, SettingError
from accelerate.core.option_report import RequestedOption
from accelerate.core.packages import is_installed
from accelerate.core.setting import Setting, declared_settings, describe_fields, load_fields
from accelerate.core.value_types import PositiveInt
from accelerate.strategy.deepspeed import config_tree
from accelerate.strategy.deepspeed.config_tree import AUTO, HfDeepSpeedConfig, is_same
from accelerate.strategy.launch_settings.deepspeed import COUNTERPARTS, DeepSpeedOptions

_PRECISIONS = ("fp16", "bf16")
_GATHER, _ = COUNTERPARTS["zero3_save_16bit_model"]


@check_arguments
@describe_fields
@dataclass
class DeepSpeedPlugin(DeepSpeedOptions):
    """The options of DeepSpeed; a field that is None takes its environment variable, then its default.

    With a configuration of DeepSpeed, the fields are what it says, and one that is given too must agree.

    Attributes:
        hf_ds_config: also DeepSpeed's configuration itself: a dict, JSON as text or in base 64, or an
            ``HfDeepSpeedConfig``.
        gradient_accumulation_steps: micro-batches per step; ``"auto"`` takes the ``Accelerator``'s.
        is_train_batch_min: of several loaders, the smallest batch is that of the training.
        enable_msamp, msamp_opt_level: refused; see Raises.
        deepspeed_config: the DeepSpeed configuration, a plain dict that may be changed until ``prepare``.

    Raises:
        SettingError: a value is wrong, or is said in two places that differ.
    """

    enable_msamp: bool | None = None
    msamp_opt_level: Literal["O1", "O2"] | None = None

    def __post_init__(self) -> None:
        self._selected = False
        self.dschf: Any = None
        # Nobody gave gradient_accumulation_steps; 1 in the configuration is then no wish.
        self.assumes_steps: bool = False
        # By kind: what was written into the configuration here; any other False is the program's.
        self._written_precision: dict[str, Any] = {}
        # By kind: whether it was enabled before the last Accelerator, and since.
        self._adopted_precision: dict[str, tuple[Any, Any]] = {}
        # (the dict, its content since an engine was made, its content before)
        self._shown_config: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] | None = None
        self._settings = load_fields(self, objects={"hf_ds_config": Any})
        self._code_values = {
            name: origin.value
            for name in self._settings.origins
            if (origin := self._settings.origin(name)).source == "code"
        }
        if self.gradient_accumulation_steps is not None:
            self._code_values["gradient_accumulation_steps"] = self.gradient_accumulation_steps
        self._may_gather = self._settings.value.zero3_save_16bit_model
        if self.enable_msamp or environ.get("ACCELERATE_FP8_BACKEND") == "MSAMP":
            raise SettingError(
                "enable_msamp (or ACCELERATE_FP8_BACKEND=MSAMP) asks for MS-AMP, which cannot be had",
                why="it is on no package index, and does not know this version of DeepSpeed",
                fix="leave it out and train in bf16",
            )
        self.enable_msamp, self.msamp_opt_level = False, self.msamp_opt_level or "O1"
        names = self.transformer_moe_cls_names
        self.transformer_moe_cls_names: Any = names if isinstance(names, str | None) else ",".join(names)
        source = self.hf_ds_config
        if isinstance(source, str) and source.lower() == "none":
            source = None
        if source is None:
            self._build_from_fields()
        else:
            self._read_configuration(source)
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        if not isinstance(self.deepspeed_config.get("steps_per_print"), int):  # "auto" and "inf" as in 1.x
            self.deepspeed_config["steps_per_print"] = float("inf")
        if self.zero3_init_flag and self.zero_stage != 3:
            self.zero3_init_flag = False

    def given_options(self) -> Iterator[RequestedOption]:
        """Return the options that were given in code."""
        return (
            RequestedOption(name, value, type(self).__name__) for name, value in self._code_values.items()
        )

    # --- where the values come from

    def _build_from_fields(self) -> None:
        steps: Any = self.gradient_accumulation_steps
        steps = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", AUTO) if steps is None else steps
        accumulation = AUTO if str(steps).lower() == AUTO else int(steps)
        self.gradient_accumulation_steps: PositiveInt | Literal["auto"] | None = accumulation
        config: dict[str, Any] = {
            "train_batch_size": AUTO,
            "train_micro_batch_size_per_gpu": AUTO,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }
        for row in self._configured_rows():
            config_tree.set_key(config, row.details["key"], getattr(self, row.field))
        for part in ("optimizer", "param"):
            offload = config["zero_optimization"][f"offload_{part}"]
            if offload["device"] != "nvme":
                offload["nvme_path"] = None
            elif offload["nvme_path"] == "none":
                raise config_tree.missing_nvme_folder(f"offload_{part}_device")
        self._apply_zero3_init()
        self.hf_ds_config = HfDeepSpeedConfig(config)

    def _read_configuration(self, source: Any) -> None:
        if not isinstance(source, HfDeepSpeedConfig):
            source = HfDeepSpeedConfig(source)
        self.hf_ds_config: Any = source
        config = source.config
        if not isinstance(config.get("zero_optimization"), Mapping):
            raise SettingError(
                "the DeepSpeed configuration (hf_ds_config) has no table zero_optimization",
                why="its stage decides what is partitioned over the processes",
                fix='add "zero_optimization": {"stage": 2}, or stage 0 for none',
            )
        self._check_counterpart("gradient_accumulation_steps", "gradient_accumulation_steps")
        self.assumes_steps = "gradient_accumulation_steps" not in config
        self.gradient_accumulation_steps = config.setdefault("gradient_accumulation_steps", 1)
        for row in self._configured_rows():
            self._check_counterpart(row.name, row.details["key"])
            value = config_tree.get_key(config, row.details["key"], row.details["absent"])
            if value == AUTO and row.choices:
                value = row.fallback
                config_tree.set_key(config, row.details["key"], value)
            setattr(self, row.field, row.fallback if value is None else value)
        source.set_stage_and_offload()
        if config_tree.has_key(config, _GATHER) and config_tree.get_key(config, _GATHER) != AUTO:
            self._may_gather = bool(config_tree.get_key(config, _GATHER))
        self.zero3_save_16bit_model: bool | None = bool(self._may_gather)
        self._apply_zero3_init()

    def _configured_rows(self) -> Iterator[Setting]:
        """Return the options that have a key in DeepSpeed's configuration."""
        return (row for row in declared_settings(type(self)) if row.details["key"])

    def _check_counterpart(self, name: str, key: str) -> None:
        """Refuse a value in code or of the launcher that differs from the configuration."""
        configured = config_tree.get_key(self.hf_ds_config.config, key)
        if name in self._code_values:
            value, label = self._code_values[name], f"the argument {name}"
        elif name in self._settings.origins and self._settings.is_given(name):
            value, label = self._settings.origin(name).value, self._settings.origin(name).where
        else:
            return
        if configured is None or AUTO in (value, configured) or is_same(value, configured):
            if configured is None or configured == AUTO:
                config_tree.set_key(self.hf_ds_config.config, key, value)
            return
        raise config_tree.contradiction(f"{label} is {value}", key, configured)

    def _apply_zero3_init(self) -> None:
        flag = self._settings.value.zero3_init_flag
        self.zero3_init_flag = self.zero_stage == 3 if flag is None else flag

    # --- what clients ask of it

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether the value under the dotted path is ``"auto"``."""
        return config_tree.get_key(self.deepspeed_config, ds_key_long) == AUTO

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value under the dotted path."""
        return config_tree.get_key(self.deepspeed_config, ds_key_long, default)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Fill an ``"auto"`` value from ``kwargs``, by its dotted path; a missing key stays missing.

        Args:
            ds_key_long: the dotted path.
            mismatches: differences are added here.
            must_match: whether a value that differs counts as a mismatch.
            kwargs: values by dotted paths.

        Raises:
            SettingError: it is ``"auto"``, and ``kwargs`` says nothing.
        """
        configured = config_tree.get_key(self.deepspeed_config, ds_key_long)
        if configured is None:
            return
        if configured == AUTO:
            if ds_key_long not in kwargs:
                raise SettingError(
                    f'{ds_key_long} is "auto" in the DeepSpeed configuration, and nothing says what it is',
                    fix=f"write the value of {ds_key_long} into the configuration",
                )
            config_tree.set_key(self.deepspeed_config, ds_key_long, kwargs[ds_key_long])
        elif must_match and ds_key_long in kwargs and not is_same(configured, kwargs[ds_key_long]):
            if mismatches is not None:
                mismatches.append(
                    f"{ds_key_long} is {configured} in the file, and {kwargs[ds_key_long]} as an argument"
                )

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill every ``"auto"`` value of the configuration from ``kwargs``, by dotted paths.

        Args:
            prefix: the path above ``config``, with its dot.
            mismatches: differences are added here; None makes them an error.
            config: a part of the configuration; None takes all of it.
            must_match: whether values that differ count.
            kwargs: values by dotted paths.

        Raises:
            SettingError: a value differs, or is ``"auto"`` and ``kwargs`` says nothing.
        """
        collected: list[str] = [] if mismatches is None else mismatches
        for key, value in list((self.deepspeed_config if config is None else config).items()):
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{key}.", collected, value, must_match, **kwargs)
            else:
                self.fill_match(f"{prefix}{key}", collected, must_match, **kwargs)
        if mismatches is None and collected:
            raise SettingError(
                "the DeepSpeed configuration differs from what is asked:\n" + "\n".join(collected),
                fix='write "auto" for these values',
            )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Set the mixed precision in the configuration, where it is ``"auto"`` or missing.

        Raises:
            SettingError: the configuration enables another one, or disables this one.
        """
        for kind in _PRECISIONS:
            enabled = self._is_enabled(kind)
            other = enabled is True and mixed_precision in _PRECISIONS and mixed_precision != kind
            if other or (mixed_precision == kind and self._is_disabled(kind)):
                claim = f"mixed_precision is {mixed_precision}"
                raise config_tree.contradiction(claim, f"{kind}.enabled", enabled)
        self._fill_precision(mixed_precision)

    def _fill_precision(self, mixed_precision: str) -> None:
        is_free = mixed_precision in _PRECISIONS and not self._is_disabled(mixed_precision)
        chosen = self.precision or (mixed_precision if is_free else None)
        for kind in _PRECISIONS:
            enabled, is_chosen = self._is_enabled(kind), kind == chosen
            if enabled is not is_chosen and (chosen is not None or enabled == AUTO):
                self._set_enabled(kind, is_chosen)

    def adopt_mixed_precision(self, mixed_precision: str, must_match: bool = True) -> None:
        """Set the mixed precision of an ``Accelerator``, which takes the place of an earlier one's.

        Args:
            mixed_precision: its name.
            must_match: False keeps a precision that the configuration enables or disables by itself.

        Raises:
            SettingError: as ``set_mixed_precision``.
        """
        for kind, (before, since) in self._adopted_precision.items():
            if self._is_enabled(kind) == since != before:
                self._set_enabled(kind, before)
        before_any = {kind: self._is_enabled(kind) for kind in _PRECISIONS}
        self._adopted_precision = {}
        (self.set_mixed_precision if must_match else self._fill_precision)(mixed_precision)
        self._adopted_precision = {kind: (before_any[kind], self._is_enabled(kind)) for kind in _PRECISIONS}

    def _is_disabled(self, kind: str) -> bool:
        """Return whether the program has disabled it: a False that was not written here."""
        return self._is_enabled(kind) is False and self._written_precision.get(kind) is not False

    def _is_enabled(self, kind: str) -> Any:
        return config_tree.get_key(self.deepspeed_config, f"{kind}.enabled")

    def _set_enabled(self, kind: str, value: Any) -> None:
        """Set it in the configuration, and in its copies before and after the last ``prepare``."""
        self._written_precision[kind] = value
        for config in (self.deepspeed_config, *(self._shown_config or ())[1:]):
            config_tree.set_key(config, f"{kind}.enabled", value)
            if value is None:
                del config[kind]["enabled"]
                if not config[kind]:
                    del config[kind]

    def config_template(self) -> dict[str, Any]:
        """Return the configuration before an engine's values were filled in, with the changes made since."""
        shown = self._shown_config
        if shown is None or shown[0] is not self.deepspeed_config:
            self._shown_config = None
            return self.deepspeed_config
        current, published, template = shown
        if current != published:
            config_tree.apply_edits(template, published, current)
            self._shown_config = current, copy.deepcopy(current), template
        return template

    def publish_config(self, filled: Mapping[str, Any]) -> None:
        """Write the values of the newest engine that trains into ``deepspeed_config``, which clients read."""
        before = copy.deepcopy(self.config_template())
        config = self.deepspeed_config
        config.clear()
        config.update(copy.deepcopy(dict(filled)))
        self._shown_config = config, copy.deepcopy(config), before

    @property
    def precision(self) -> str | None:
        """The 16-bit format that the configuration enables by itself."""
        return next((kind for kind in _PRECISIONS if self._is_enabled(kind) is True), None)

    @property
    def may_gather(self) -> bool:
        """True unless ``zero3_save_16bit_model`` is False: weights may be gathered on one rank."""
        return self._may_gather is not False

    def is_zero3_init_enabled(self) -> bool:
        """Return whether models of transformers are partitioned while they are made."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Generator[None]:
        """A context in which models are partitioned while they are made, or not (``enable`` False)."""
        before = self.zero3_init_flag
        if before == enable:
            yield
            return
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    def set_deepspeed_weakref(self) -> None:
        """Give transformers the configuration: in stage 3 it partitions models while it makes them.

        ``"auto"`` values are removed. Without transformers it does nothing.
        """
        self.dschf = None
        # To learn that nothing is partitioned, transformers need not be imported.
        if not is_installed("transformers") or not (self.zero3_init_flag or "transformers" in sys.modules):
            return
        if not is_installed("deepspeed"):
            raise MissingExtraError("deepspeed", "training by DeepSpeed")
        from transformers.integrations import deepspeed as known  # type: ignore[import-not-found]

        if not self.zero3_init_flag:
            known.unset_hf_deepspeed_config()
            return
        if isinstance(self.hf_ds_config, known.HfDeepSpeedConfig):
            known.set_hf_deepspeed_config(self.hf_ds_config)
            return
        config = copy.deepcopy(self.deepspeed_config)
        for path in list(config_tree.auto_keys(config)):
            config_tree.delete_key(config, path)
        # The batch does not matter to a model; DeepSpeed's reader wants one.
        config_tree.delete_key(config, "train_batch_size")
        config.setdefault("train_micro_batch_size_per_gpu", 1)
        # Kept here: transformers only remembers it weakly.
        self.dschf = known.HfDeepSpeedConfig(config)

    def set_moe_leaf_modules(self, model: Any) -> None:
        """Make stage 3 gather modules of the named classes as a whole: their experts differ by batch.

        Raises:
            SettingError: the model has no module of a class that is named.
        """
        if self.zero_stage != 3 or not self.transformer_moe_cls_names:
            return
        classes = {type(part).__name__: type(part) for part in model.modules()}
        names = [name.strip() for name in self.transformer_moe_cls_names.split(",") if name.strip()]
        missing = [name for name in names if name not in classes]
        if missing:
            raise SettingError(
                f"transformer_moe_cls_names: {type(model).__name__} has no module of the class {missing[0]}",
                why=f"its classes are {', '.join(sorted(classes))}",
            )
        from deepspeed.utils import set_z3_leaf_modules  # type: ignore[import-not-found]

        set_z3_leaf_modules(model, [classes[name] for name in names])

    # --- several of them

    @property
    def selected(self) -> bool:
        """True if the next ``prepare`` uses it; ``AcceleratorState.select_deepspeed_plugin`` selects."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise NotImplementedError("one is selected by AcceleratorState().select_deepspeed_plugin(name)")

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Make it the plugin of the next ``prepare``; called by ``AcceleratorState``.

        Raises:
            SettingError: it was called by somebody else, who would leave two selected.
        """
        if not _from_accelerator_state:
            raise SettingError(
                "a plugin does not select itself", fix="AcceleratorState().select_deepspeed_plugin(name)"
            )
        self._selected = True
        self.set_deepspeed_weakref()

    def _unselect(self) -> None:
        self._selected = False


def plugin_table(*given: Any) -> dict[str, DeepSpeedPlugin]:
    """Return one plugin, or several by name, as a dict; the first is selected. Without any, one of defaults.

    Raises:
        SettingError: it is neither, or given twice.
    """
    if len(given) > 1:
        raise SettingError(
            "deepspeed_plugin and deepspeed_plugins are both given",
            fix="give one of them: both names mean the same argument",
        )
    source = given[0] if given else DeepSpeedPlugin()
    table = dict(source) if isinstance(source, Mapping) else {"default": source}
    wrong = [name for name, plugin in table.items() if not isinstance(plugin, DeepSpeedPlugin)]
    if wrong or not table:
        raise SettingError(
            f"deepspeed_plugins is {source!r}",
            fix='give a DeepSpeedPlugin, or {"name": DeepSpeedPlugin(...), ...}',
        )
    return table
