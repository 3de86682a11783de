"""The settings of DeepSpeed: the launcher's flags, their environment variables and file keys.

A script reads the given values in these variables, also one that calls DeepSpeed itself. Defaults are not
passed on: they would look like the user's choice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from accelerate.core import environ
from accelerate.core.errors import SettingError
from accelerate.core.frozen_dataclass import frozen_dataclass
from accelerate.core.setting import SettingOrigin, declared_settings, setting

Origins = Callable[[str], tuple[SettingOrigin, ...]]
_SEVERAL_MACHINES = {"num_machines": range(2, 10_000)}
DEVICES = ("none", "cpu", "nvme")
LAUNCHERS = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "impi", "nossh", "slurm")
# setting -> (its path in DeepSpeed's own file, the meaning of a missing key there)
COUNTERPARTS: dict[str, tuple[tuple[str, ...], object]] = {
    "zero_stage": (("zero_optimization", "stage"), 0),
    "offload_optimizer_device": (("zero_optimization", "offload_optimizer", "device"), "none"),
    "offload_param_device": (("zero_optimization", "offload_param", "device"), "none"),
    "offload_optimizer_nvme_path": (("zero_optimization", "offload_optimizer", "nvme_path"), None),
    "offload_param_nvme_path": (("zero_optimization", "offload_param", "nvme_path"), None),
    "zero3_save_16bit_model": (
        ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
        False,
    ),
    "gradient_accumulation_steps": (("gradient_accumulation_steps",), None),
    "gradient_clipping": (("gradient_clipping",), None),
}


@frozen_dataclass
class UseDeepSpeedSetting:
    """The switch for DeepSpeed; in files it is ``distributed_type: DEEPSPEED``."""

    __topic__ = "DeepSpeed"
    __distributed_type__ = "DEEPSPEED"

    use_deepspeed: bool = setting(False, in_file=False, help="train by DeepSpeed")


@frozen_dataclass
class DeepSpeedSettings:
    """The options of DeepSpeed, and of its own launcher for several machines."""

    __topic__ = "DeepSpeed"
    __section__ = "deepspeed_config"
    __switch__ = "use_deepspeed"
    __elsewhere__ = ("gradient_accumulation_steps",)

    deepspeed_config_file: str | None = setting(
        None,
        variable="ACCELERATE_DEEPSPEED_CONFIG_FILE",
        help="DeepSpeed's own JSON file; flags that contradict it are an error",
        question="Its own JSON file? (empty: none)",
    )
    zero_stage: int | None = setting(
        None,
        variable="ACCELERATE_DEEPSPEED_ZERO_STAGE",
        choices=(0, 1, 2, 3),
        help="what is sharded: 1 optimizer state, 2 gradients too, 3 parameters too",
        question="What is sharded?",
        when={"deepspeed_config_file": (None,)},
    )
    offload_optimizer_device: str | None = setting(
        None,
        variable="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        choices=DEVICES,
        help="where optimizer state is offloaded to",
        question="Where is optimizer state kept?",
        when={"deepspeed_config_file": (None,)},
    )
    offload_param_device: str | None = setting(
        None,
        variable="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        choices=DEVICES,
        help="where parameters are offloaded to (stage 3)",
        question="Where are parameters kept?",
        when={"zero_stage": (3,)},
    )
    offload_optimizer_nvme_path: str | None = setting(
        None,
        variable="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
        help="the folder of optimizer state that is offloaded to NVMe",
        question="In which folder?",
        when={"offload_optimizer_device": ("nvme",)},
    )
    offload_param_nvme_path: str | None = setting(
        None,
        variable="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
        help="the folder of parameters that are offloaded to NVMe",
        question="In which folder?",
        when={"offload_param_device": ("nvme",)},
    )
    gradient_clipping: float | Literal["auto"] | None = setting(
        None,
        variable="ACCELERATE_GRADIENT_CLIPPING",
        help="the largest norm of all gradients together",
        question="The largest norm of gradients? (empty: any)",
        when={"deepspeed_config_file": (None,)},
    )
    zero3_init_flag: bool | None = setting(
        None,
        switch=False,
        variable="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        help="shard models of libraries while they are made (stage 3)",
        question="Shard models while they are made?",
        when={"zero_stage": (3,)},
    )
    zero3_save_16bit_model: bool | None = setting(
        None,
        switch=False,
        variable="ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
        help="gather 16-bit weights when a model is saved (stage 3)",
        question="Gather 16-bit weights when a model is saved?",
        when={"zero_stage": (3,)},
    )
    deepspeed_moe_layer_cls_names: str | tuple[str, ...] | None = setting(
        None,
        variable="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        help="class names of layers with experts, with commas",
        question="Class names of layers with experts? (empty: none)",
    )
    deepspeed_multinode_launcher: str | None = setting(
        None,
        variable=None,
        choices=LAUNCHERS,
        help="what starts the other machines: DeepSpeed's own launcher by pdsh (the default), MPI, "
        "a scheduler or without ssh; standard: this launcher, once on each",
        question="What starts the machines?",
        when=_SEVERAL_MACHINES,
    )
    deepspeed_hostfile: str | None = setting(
        None,
        variable=None,
        help="a file with a line per machine, like 'worker-1 slots=8'",
        question="Which machines? A hostfile",
        when=_SEVERAL_MACHINES,
    )
    deepspeed_inclusion_filter: str | None = setting(
        None,
        variable=None,
        help="machines and devices of the hostfile to use, like worker-1@worker-2:0,2",
        question="Which of them to use?",
        when=_SEVERAL_MACHINES,
    )
    deepspeed_exclusion_filter: str | None = setting(
        None,
        variable=None,
        help="machines and devices of the hostfile to leave out, like worker-2:0",
        question="Which of them to leave out?",
        when=_SEVERAL_MACHINES,
    )

    @staticmethod
    def check(origins: Origins) -> None:
        """Refuse a DeepSpeed file that is missing or contradicts other settings.

        Raises:
            SettingError: the file is missing, or contradicts a setting; names both places.
        """
        file_origin = origins("deepspeed_config_file")[0]
        if _is_empty(file_origin.value):
            _check_paths(origins)
            return
        content = _read_json(file_origin)
        for name in COUNTERPARTS:
            _check_counterpart(origins(name)[0], file_origin, content, name)
        _check_precision(origins("mixed_precision")[0], file_origin, content)

    @staticmethod
    def launch_variables(origins: Origins) -> Mapping[str, str]:
        """Return more variables: the fields that a configuration file gave, and ``PYTHONPATH``.

        DeepSpeed starts processes in ways that do not put the working folder on Python's path.
        """
        names = [row.name for row in declared_settings(DeepSpeedSettings)]
        names += ["gradient_accumulation_steps", "mixed_precision"]
        fields = (name for name in names if any(origin.source == "file" for origin in origins(name)))
        paths = [*filter(None, (environ.get("PYTHONPATH") or "").split(os.pathsep))]
        working_folder = str(Path.cwd())
        return {
            "ACCELERATE_CONFIG_DS_FIELDS": ",".join(fields),
            "PYTHONPATH": os.pathsep.join(paths if working_folder in paths else [*paths, working_folder]),
        }


def _is_empty(value: object) -> bool:
    return value is None or str(value).lower() == "none"


def _read_json(file_origin: SettingOrigin) -> Mapping[str, Any]:
    """Return the content of DeepSpeed's file, or of the same JSON in base 64."""
    import json

    text = str(file_origin.value)
    try:
        content = json.loads(_read_text(text))
    except FileNotFoundError as error:
        raise SettingError(f"{file_origin.where} is {text!r}, but there is no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            f"{file_origin.where} is {text!r}, which cannot be read", why=str(error)
        ) from error
    except json.JSONDecodeError as error:
        raise SettingError(
            f"{file_origin.where} is {text!r}, which is not valid JSON: line {error.lineno}", why=error.msg
        ) from error
    if not isinstance(content, dict):
        raise SettingError(f"{file_origin.where} is {text!r}, which is not a table of keys")
    return content


def _read_text(file_origin: str) -> str:
    # JSON in base 64 begins with an encoded brace.
    if file_origin.startswith(("ey", "ew")) and not os.path.exists(file_origin):
        import base64

        try:
            return base64.b64decode(file_origin, altchars=b"-_", validate=True).decode("utf-8")
        except ValueError as error:
            raise FileNotFoundError(file_origin) from error
    return Path(file_origin).expanduser().read_text(encoding="utf-8")


def _nested_value(content: Mapping[str, Any], keys: tuple[str, ...], absent: object) -> object:
    """Return the value under nested keys."""
    value: Any = content
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            return absent
        value = value[key]
    return value


def _check_counterpart(
    given: SettingOrigin, file_origin: SettingOrigin, content: Mapping[str, Any], name: str
) -> None:
    keys, absent = COUNTERPARTS[name]
    in_file = _nested_value(content, keys, absent)
    # "auto" leaves it to us, and so does what is not there.
    silent = given.source == "default" or "auto" in (given.value, in_file) or in_file is None
    if not silent and not is_same(given.value, in_file):
        raise SettingError(
            f"{given.where} is {given.value}, but {file_origin.where} ({file_origin.value}) says "
            f"{'.'.join(keys)}: {_as_json(in_file)}",
            why="each of the two would train in another way",
            fix=f'keep one of them, or write "auto" for {".".join(keys)} in {file_origin.value}',
        )


def is_same(one: object, other: object) -> bool:
    """Return whether two values are the same: numbers by value, also where a file has them as text."""
    if isinstance(one, bool) or isinstance(other, bool):
        return str(one).lower() == str(other).lower()
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return [*one] == [*other]
    try:
        return float(str(one)) == float(str(other))
    except ValueError:
        return str(one).lower() == str(other).lower()


def _as_json(value: object) -> str:
    import json

    return json.dumps(value)


def _check_precision(given: SettingOrigin, file_origin: SettingOrigin, content: Mapping[str, Any]) -> None:
    """Refuse a file that enables another 16-bit format than the mixed precision, or none."""
    if given.source == "default" or given.value is None:
        return
    for kind in ("fp16", "bf16"):
        enabled = _nested_value(content, (kind, "enabled"), "auto")
        if isinstance(enabled, bool) and enabled != (given.value == kind):
            raise SettingError(
                f"{given.where} is {given.value}, but {file_origin.where} ({file_origin.value}) says "
                f"{kind}.enabled: {_as_json(enabled)}",
                why="each of the two would train in another way",
                fix=f'keep one of them, or write "auto" for {kind}.enabled in {file_origin.value}',
            )


def _check_paths(origins: Origins) -> None:
    for device, path in _offload_origins(origins):
        if device.value == "nvme" and _is_empty(path.value):
            name = device.where.replace("_device", "_nvme_path")
            raise SettingError(
                f"{device.where} is nvme, but nothing says in which folder",
                fix=f"give {name}, a folder on the drive",
            )


def _offload_origins(origins: Origins) -> Iterator[tuple[SettingOrigin, SettingOrigin]]:
    for target in ("optimizer", "param"):
        yield origins(f"offload_{target}_device")[0], origins(f"offload_{target}_nvme_path")[0]


PLUGIN = (UseDeepSpeedSetting, DeepSpeedSettings)
