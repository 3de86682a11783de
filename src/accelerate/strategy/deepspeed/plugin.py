"""``DeepSpeedPlugin``: what the engine is asked for, from code, a JSON file of its own, or the launcher."""

from __future__ import annotations

import copy
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from accelerate.core import environ
from accelerate.core.effects import Option
from accelerate.core.errors import MissingExtraError, SettingError
from accelerate.core.packages import installed
from accelerate.core.setting import Loaded, load
from accelerate.strategy.deepspeed import tree
from accelerate.strategy.deepspeed.tree import AUTO, HfDeepSpeedConfig
from accelerate.strategy.settings.deepspeed import COUNTERPARTS, DeepSpeedSettings, same

_FIELDS = (
    *("zero_stage", "offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path"),
    *("offload_param_nvme_path", "gradient_clipping", "zero3_init_flag", "zero3_save_16bit_model"),
)
_PRECISIONS = ("fp16", "bf16")
_GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


@dataclass
class DeepSpeedPlugin:
    """What the engine is asked for; a field that is None takes its variable, then its default.

    With a configuration of the engine, the fields are what it says, and one that is given too must agree.

    Attributes:
        hf_ds_config: the engine's own configuration: a dict, the path of a JSON file, its content in base 64,
            or an ``HfDeepSpeedConfig`` (``ACCELERATE_DEEPSPEED_CONFIG_FILE``).
        gradient_accumulation_steps: micro-batches per step; ``"auto"`` takes the ``Accelerator``'s.
        gradient_clipping: the largest norm of all gradients; ``"auto"`` takes what ``clip_grad_norm_`` says
            (``ACCELERATE_GRADIENT_CLIPPING``).
        zero_stage: what is partitioned: 1 optimizer state, 2 gradients too, 3 parameters too
            (``ACCELERATE_DEEPSPEED_ZERO_STAGE``, 2).
        is_train_batch_min: of several loaders, the smallest batch is that of the training.
        offload_optimizer_device, offload_param_device: ``"none"``, ``"cpu"`` or ``"nvme"``.
        offload_optimizer_nvme_path, offload_param_nvme_path: a folder on the drive.
        zero3_init_flag: partition models of transformers while they are made
            (``ACCELERATE_DEEPSPEED_ZERO3_INIT``, True in stage 3).
        zero3_save_16bit_model: gather the weights when a model is saved; an explicit False makes
            ``get_state_dict`` refuse (``ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL``).
        transformer_moe_cls_names: class names of layers with experts, with commas.
        enable_msamp, msamp_opt_level: refused; see Raises.
        deepspeed_config: the engine's configuration, a plain dict that may be changed until ``prepare``.

    Raises:
        SettingError: a value is wrong, or is said in two places that differ.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None  # type: ignore[assignment]
    gradient_clipping: float | str | None = None  # type: ignore[assignment]
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: Literal["O1", "O2"] | None = None

    def __post_init__(self) -> None:
        self._selected = False
        self.dschf: Any = None
        # (the dict, what is in it since an engine was made, what was in it before)
        self._filled: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] | None = None
        asked = {name: getattr(self, name) for name in (*_FIELDS, "gradient_accumulation_steps")}
        self._in_code = {name: value for name, value in asked.items() if value is not None}
        self._found = load(DeepSpeedSettings, code={name: asked[name] for name in _FIELDS})
        self._gathers = _explicit(self._found, "zero3_save_16bit_model")
        self._settle_msamp()
        given = self.hf_ds_config
        # A client of the public package may hand over anything else: it means nothing there.
        if given is None:
            place = self._found.value.deepspeed_config_file
            given = None if place is None or place.lower() == "none" else place
        if given is None:
            self._from_fields()
        else:
            self._from_configuration(given)
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        self.deepspeed_config.setdefault("steps_per_print", float("inf"))
        if self.zero3_init_flag and self.zero_stage != 3:
            self.zero3_init_flag = False
        self._settle_experts()

    def asked(self) -> Iterator[Option]:
        """What was given in code, by its name."""
        return (Option(name, value, type(self).__name__) for name, value in self._in_code.items())

    # --- where the values come from

    def _from_fields(self) -> None:
        found = self._found.value
        self.zero_stage = 2 if found.zero_stage is None else found.zero_stage
        for what in ("optimizer", "param"):
            device = getattr(found, f"offload_{what}_device") or "none"
            path = getattr(found, f"offload_{what}_nvme_path")
            setattr(self, f"offload_{what}_device", device)
            setattr(self, f"offload_{what}_nvme_path", path or "none")
            if device == "nvme" and path is None:
                raise SettingError(
                    f"offload_{what}_device is nvme, but nothing says in which folder",
                    fix=f"give offload_{what}_nvme_path, a folder on the drive",
                )
        self.gradient_clipping = AUTO if found.gradient_clipping is None else found.gradient_clipping
        self.gradient_accumulation_steps = _steps(self.gradient_accumulation_steps)
        self.zero3_save_16bit_model = bool(found.zero3_save_16bit_model)
        self._settle_init(found)
        self.hf_ds_config = HfDeepSpeedConfig(
            {
                "train_batch_size": AUTO,
                "train_micro_batch_size_per_gpu": AUTO,
                "gradient_accumulation_steps": self.gradient_accumulation_steps,
                "zero_optimization": {
                    "stage": self.zero_stage,
                    "offload_optimizer": self._offload("optimizer"),
                    "offload_param": self._offload("param"),
                    "stage3_gather_16bit_weights_on_model_save": self.zero3_save_16bit_model,
                },
                "gradient_clipping": self.gradient_clipping,
            }
        )

    def _offload(self, what: str) -> dict[str, Any]:
        device = getattr(self, f"offload_{what}_device")
        return {
            "device": device,
            "nvme_path": getattr(self, f"offload_{what}_nvme_path") if device == "nvme" else None,
        }

    def _from_configuration(self, given: Any) -> None:
        if not isinstance(given, HfDeepSpeedConfig):
            given = HfDeepSpeedConfig(given)
        self.hf_ds_config = given
        config = given.config
        if "zero_optimization" not in config:
            raise SettingError(
                "the engine's configuration says nothing about zero_optimization",
                why="its stage decides what is partitioned over the processes",
                fix='add "zero_optimization": {"stage": 2}, or stage 0 for none',
            )
        config.setdefault("gradient_accumulation_steps", 1)
        for name in COUNTERPARTS:
            self._check_same(name)
        self.zero_stage = tree.get(config, "zero_optimization.stage", 0)
        self.gradient_accumulation_steps = config["gradient_accumulation_steps"]
        self.gradient_clipping = config.get("gradient_clipping", AUTO)
        for what in ("optimizer", "param"):
            offload = tree.get(config, f"zero_optimization.offload_{what}") or {}
            setattr(self, f"offload_{what}_device", offload.get("device", "none"))
            setattr(self, f"offload_{what}_nvme_path", offload.get("nvme_path") or "none")
        if tree.has(config, _GATHER) and tree.get(config, _GATHER) != AUTO:
            self._gathers = bool(tree.get(config, _GATHER))
        self.zero3_save_16bit_model = bool(self._gathers)
        self._settle_init(self._found.value)

    def _check_same(self, name: str) -> None:
        """What is said in code or by the launcher, and differs in the configuration."""
        keys, _ = COUNTERPARTS[name]
        there = tree.get(self.hf_ds_config.config, ".".join(keys))
        if name in self._in_code:
            here, where = self._in_code[name], f"the argument {name}"
        elif name in _FIELDS and self._found.origin(name).source != "default":
            here, where = getattr(self._found.value, name), self._found.origin(name).where
        else:
            return
        if there is None or AUTO in (here, there) or same(here, there):
            if there is None or there == AUTO:
                tree.put(self.hf_ds_config.config, ".".join(keys), here)
            return
        raise SettingError(
            f"{where} is {here}, but the engine's configuration says {'.'.join(keys)}: {there}",
            why="each of the two would train in another way",
            fix=f'keep one of them, or write "auto" for {".".join(keys)}',
        )

    def _settle_init(self, found: DeepSpeedSettings) -> None:
        asked = found.zero3_init_flag
        self.zero3_init_flag = self.zero_stage == 3 if asked is None else asked

    def _settle_msamp(self) -> None:
        if self.enable_msamp or environ.get("ACCELERATE_FP8_BACKEND") == "MSAMP":
            raise SettingError(
                "MS-AMP is asked for, and cannot be had",
                why="it is on no package index, and does not know this version of the engine",
                fix="leave it out and train in bf16",
            )
        self.enable_msamp, self.msamp_opt_level = False, self.msamp_opt_level or "O1"

    def _settle_experts(self) -> None:
        if self.transformer_moe_cls_names is None:
            names = self._found.value.deepspeed_moe_layer_cls_names
            self.transformer_moe_cls_names = names if isinstance(names, str | None) else ",".join(names)

    # --- what clients ask of it

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value under the dotted path is ``"auto"``."""
        return tree.get(self.deepspeed_config, ds_key_long) == AUTO

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value under the dotted path."""
        return tree.get(self.deepspeed_config, ds_key_long, default)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Fills an ``"auto"`` value from ``kwargs``, by its dotted path; one that is not there stays away.

        Args:
            ds_key_long: the dotted path.
            mismatches: what differs is added here.
            must_match: whether a value that differs counts as a mismatch.
            kwargs: values by dotted paths.

        Raises:
            SettingError: it is ``"auto"``, and ``kwargs`` says nothing.
        """
        there = tree.get(self.deepspeed_config, ds_key_long)
        if there is None:
            return
        if there == AUTO:
            if ds_key_long not in kwargs:
                raise SettingError(
                    f'{ds_key_long} is "auto" in the engine\'s configuration, and nothing says what it is',
                    fix=f"write the value of {ds_key_long} into the configuration",
                )
            tree.put(self.deepspeed_config, ds_key_long, kwargs[ds_key_long])
        elif must_match and ds_key_long in kwargs and not same(there, kwargs[ds_key_long]):
            if mismatches is not None:
                mismatches.append(f"- ds {ds_key_long}={there} vs arg {ds_key_long}={kwargs[ds_key_long]}")

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fills every ``"auto"`` value of the configuration from ``kwargs``, by dotted paths.

        Args:
            prefix: the path above ``config``, with its dot.
            mismatches: what differs is added here; None makes it an error.
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
                "the engine's configuration differs from what is asked:\n" + "\n".join(collected),
                fix='write "auto" for these values',
            )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Makes the engine compute in a number format; ``"auto"`` or nothing becomes what is said.

        Raises:
            SettingError: the configuration enables another one.
        """
        config = self.deepspeed_config
        for kind in _PRECISIONS:
            enabled = tree.get(config, f"{kind}.enabled")
            if enabled is True and mixed_precision in _PRECISIONS and mixed_precision != kind:
                raise SettingError(
                    f"mixed_precision is {mixed_precision}, but the engine's configuration says "
                    f"{kind}.enabled: true",
                    why="one model computes in one format",
                    fix=f'keep one of them, or write "auto" for {kind}.enabled',
                )
        chosen = self.precision or (mixed_precision if mixed_precision in _PRECISIONS else None)
        for kind in _PRECISIONS:
            if chosen is not None or tree.get(config, f"{kind}.enabled") == AUTO:
                tree.put(config, f"{kind}.enabled", kind == chosen)

    def template(self) -> dict[str, Any]:
        """The configuration as it was before an engine's values were filled in; changed since, as it is."""
        config = self.deepspeed_config
        if self._filled is None or self._filled[0] is not config or self._filled[1] != config:
            self._filled = None
            return config
        return self._filled[2]

    def show(self, filled: Mapping[str, Any]) -> None:
        """Writes the values of the newest engine into ``deepspeed_config``, where clients look for them."""
        before = copy.deepcopy(self.template())
        config = self.deepspeed_config
        config.clear()
        config.update(copy.deepcopy(dict(filled)))
        self._filled = config, copy.deepcopy(config), before

    @property
    def precision(self) -> str | None:
        """The 16-bit format that the configuration enables by itself."""
        return next((k for k in _PRECISIONS if tree.get(self.deepspeed_config, f"{k}.enabled") is True), None)

    @property
    def gathers(self) -> bool:
        """Whether whole weights may be gathered on one process: unless somebody said no."""
        return self._gathers is not False

    def is_zero3_init_enabled(self) -> bool:
        """Whether models of transformers are partitioned while they are made."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Generator[None]:
        """Inside the block, models are partitioned while they are made, or (``enable`` False) made whole."""
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
        """Tells transformers of the configuration: in stage 3 it partitions models while it makes them.

        ``"auto"`` values get such as a model can be made with. Without transformers it does nothing.
        """
        self.dschf = None
        # One that is loaded is told; to be told that nothing is partitioned, it need not be loaded.
        if not installed("transformers") or not (self.zero3_init_flag or "transformers" in sys.modules):
            return
        if not installed("deepspeed"):
            raise MissingExtraError("deepspeed", "training by its engine")
        from transformers.integrations import deepspeed as known  # type: ignore[import-not-found]

        if not self.zero3_init_flag:
            known.unset_hf_deepspeed_config()
            return
        if isinstance(self.hf_ds_config, known.HfDeepSpeedConfig):
            known.set_hf_deepspeed_config(self.hf_ds_config)
            return
        config = copy.deepcopy(self.deepspeed_config)
        for path in list(tree.autos(config)):
            tree.drop(config, path)
        # The batch does not matter to a model; the engine's reader wants one.
        tree.drop(config, "train_batch_size")
        config.setdefault("train_micro_batch_size_per_gpu", 1)
        # Kept here: transformers only remembers it weakly.
        self.dschf = known.HfDeepSpeedConfig(config)

    def set_moe_leaf_modules(self, model: Any) -> None:
        """Makes stage 3 gather layers of the named classes as a whole: their experts differ by batch.

        Raises:
            SettingError: the model has no module of a class that is named.
        """
        if self.zero_stage != 3 or not self.transformer_moe_cls_names:
            return
        known = {type(part).__name__: type(part) for part in model.modules()}
        names = [name.strip() for name in self.transformer_moe_cls_names.split(",") if name.strip()]
        missing = [name for name in names if name not in known]
        if missing:
            raise SettingError(
                f"transformer_moe_cls_names: {type(model).__name__} has no module of the class {missing[0]}",
                why=f"its classes are {', '.join(sorted(known))}",
            )
        from deepspeed.utils import set_z3_leaf_modules  # type: ignore[import-not-found]

        set_z3_leaf_modules(model, [known[name] for name in names])

    # --- several of them

    @property
    def selected(self) -> bool:
        """Whether the next ``prepare`` goes by it; ``AcceleratorState.select_deepspeed_plugin`` selects."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise NotImplementedError("one is selected by AcceleratorState().select_deepspeed_plugin(name)")

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Makes it the one that the next ``prepare`` goes by; called by the state.

        Raises:
            SettingError: it was called by somebody else, who would leave two selected.
        """
        if not _from_accelerator_state:
            raise SettingError(
                "a plugin does not select itself", fix="AcceleratorState().select_deepspeed_plugin(name)"
            )
        self._set_selected(True)

    def _unselect(self) -> None:
        self._set_selected(False)

    def _set_selected(self, value: bool) -> None:
        self._selected = value
        if value:
            self.set_deepspeed_weakref()


def _explicit(found: Loaded[DeepSpeedSettings], name: str) -> bool | None:
    return None if found.origin(name).source == "default" else getattr(found.value, name)


def _steps(given: int | str | None) -> int | str:
    """As given, by the launcher's variable, or as the ``Accelerator`` says."""
    text = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS") if given is None else given
    if text is None or str(text).lower() == AUTO:
        return AUTO
    return int(text)


def plugins_of(given: Any) -> dict[str, DeepSpeedPlugin]:
    """One plugin, or several by name, as a table; the first is selected.

    Raises:
        SettingError: it is neither.
    """
    table = dict(given) if isinstance(given, Mapping) else {"default": given}
    wrong = [name for name, plugin in table.items() if not isinstance(plugin, DeepSpeedPlugin)]
    if wrong or not table:
        raise SettingError(
            f"deepspeed_plugins is {given!r}",
            fix='give a DeepSpeedPlugin, or {"name": DeepSpeedPlugin(...), ...}',
        )
    return table
