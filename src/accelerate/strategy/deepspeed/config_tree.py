"""The DeepSpeed configuration as a tree of keys, and the stand-ins for the optimizer and schedule in it.

Source: DeepSpeed documentation, "DeepSpeed Configuration JSON".
"""

from __future__ import annotations

import base64
import copy
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from accelerate.core.errors import SettingError

AUTO = "auto"
CONFIG_NAME = "the DeepSpeed configuration"
_ABSENT: Any = object()


def read_config(source: Any, label: str = CONFIG_NAME) -> dict[str, Any]:
    """Return the configuration in a dict, a path, JSON, or an ``HfDeepSpeedConfig``.

    It is a copy, except of the last, whose ``config`` is the dict that others fill in.

    Args:
        source: one of these.
        label: the setting that gives it, for the error.

    Raises:
        SettingError: it is none of these, cannot be read, or is not valid JSON.
    """
    if isinstance(source, HfDeepSpeedConfig):
        return source.config
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    what = f"{label} is {source!r}"
    try:
        content = json.loads(_read_text(source))
    except (TypeError, FileNotFoundError) as error:
        raise SettingError(
            f"{what}, but there is no such file",
            why="it is no dict, and no JSON as text or in base 64, either",
            fix='give the path of a JSON file, or its content: {"zero_optimization": {"stage": 2}}',
        ) from error
    except json.JSONDecodeError as error:
        raise SettingError(f"{what}, which is not valid JSON: line {error.lineno}", why=error.msg) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{what}, which cannot be read", why=str(error)) from error
    if not isinstance(content, dict):
        raise SettingError(f"{what}, which is not a table of keys")
    return content


def contradiction(claim: str, key: str, configured: Any, file: str = "") -> SettingError:
    """Return the error of a setting that differs from the configuration.

    Args:
        claim: the setting with its value, as "--zero_stage is 3".
        key: its path in the configuration.
        configured: the value there.
        file: the file of the configuration and the setting that names it, if they are known.
    """
    return SettingError(
        f"{claim}, but {file or CONFIG_NAME} says {key}: {json.dumps(configured)}",
        why="each of the two would train in another way",
        fix=f'keep one of them, or write "auto" for {key} there',
    )


def missing_nvme_folder(device: str) -> SettingError:
    """Return the error of an offload to NVMe without a folder; ``device`` is the setting that asks for it."""
    return SettingError(
        f"{device} is nvme, but nothing says in which folder",
        fix=f"give {device.replace('_device', '_nvme_path')}, a folder on the drive",
    )


def _read_text(source: str | os.PathLike[str]) -> str:
    """Return JSON that is given as it is or in base 64 (from an encoded brace on); else the text of a file.

    Raises:
        FileNotFoundError: there is no such file, and it is not base 64.
        OSError, UnicodeDecodeError: the file cannot be read.
    """
    if str(source).lstrip().startswith("{"):
        return str(source)
    if str(source).startswith(("ey", "ew")) and not os.path.exists(source):
        try:
            return base64.b64decode(str(source), altchars=b"-_", validate=True).decode("utf-8")
        except ValueError as error:
            raise FileNotFoundError(str(source)) from error
    return Path(source).expanduser().read_text(encoding="utf-8")


def get_key(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value under a dotted path."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value


def has_key(config: Mapping[str, Any], path: str) -> bool:
    """Return whether the path exists, also with the value ``"auto"``."""
    return get_key(config, path, _ABSENT) is not _ABSENT


def set_key(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the value under a dotted path; missing tables above it are made."""
    *above, last = path.split(".")
    for key in above:
        config = config.setdefault(key, {})
    config[last] = value


def delete_key(config: dict[str, Any], path: str) -> None:
    """Delete a key, if it is there."""
    *above, last = path.split(".")
    node = get_key(config, ".".join(above)) if above else config
    if isinstance(node, dict):
        node.pop(last, None)


def auto_keys(config: Mapping[str, Any], below: str = "") -> Iterator[str]:
    """Yield the dotted paths of all values that are ``"auto"``."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from auto_keys(value, f"{below}{key}.")
        elif value == AUTO:
            yield f"{below}{key}"


def apply_edits(config: dict[str, Any], before: Mapping[str, Any], edited: Mapping[str, Any]) -> None:
    """Make the changes between ``before`` and ``edited`` in ``config`` too."""
    for key in before.keys() - edited.keys():
        config.pop(key, None)
    for key, value in edited.items():
        old, own = before.get(key, _ABSENT), config.get(key)
        if isinstance(value, dict) and isinstance(old, Mapping) and isinstance(own, dict):
            apply_edits(own, old, value)
        elif value != old:
            config[key] = copy.deepcopy(value)


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


class HfDeepSpeedConfig:
    """The DeepSpeed configuration by dotted paths; transformers derives its own class from this one.

    Args:
        config_file_or_dict: a dict, the path of a JSON file, or its content, as it is or in base 64.

    Attributes:
        config: the tree of keys, as a plain dict.

    Raises:
        SettingError: it is none of these.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = read_config(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Read again the ZeRO stage, and whether anything is offloaded to the host or to NVMe."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = (self.get_value(f"zero_optimization.offload_{part}.device") for part in _OFFLOADED)
        self._offload = any(device in ("cpu", "nvme") for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return (the table with the last key of the path, None if it is missing; that key)."""
        above, _, last = ds_key_long.rpartition(".")
        node = get_key(self.config, above) if above else self.config
        return (node if isinstance(node, dict) else None), last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value under the path."""
        return get_key(self.config, ds_key_long, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete the subtree under the path.

        Raises:
            SettingError: it is not there, and ``must_exist``.
        """
        if must_exist and not has_key(self.config, ds_key_long):
            raise SettingError(f"{ds_key_long} is not in the DeepSpeed configuration")
        delete_key(self.config, ds_key_long)

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether the value is there and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether the value is there and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return whether the stage is 2: gradients and optimizer state are partitioned."""
        return self._stage == 2

    def is_zero3(self) -> bool:
        """Return whether the stage is 3: parameters are partitioned too."""
        return self._stage == 3

    def is_offload(self) -> bool:
        """Return whether anything is offloaded to the host or to NVMe."""
        return self._offload


_OFFLOADED = ("optimizer", "param")


class DummyOptim:
    """The stand-in for an optimizer that DeepSpeed makes from ``optimizer`` of its configuration.

    Args:
        params: parameters, or groups of them.
        lr, weight_decay: for ``"auto"`` values of the configuration.
        kwargs: more of them: ``betas``, ``eps``, ``momentum``, ...
    """

    prepared_as: ClassVar[str] = "optimizer"
    params: Any
    lr: float
    weight_decay: float
    kwargs: dict[str, Any]

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        entries = list(params) if isinstance(params, Iterator) else params
        has_groups = isinstance(entries, list | tuple) and any(isinstance(each, Mapping) for each in entries)
        self.params = list(map(_list_group_params, entries)) if has_groups else entries
        self.lr, self.weight_decay, self.kwargs = lr, weight_decay, kwargs


def _list_group_params(group: Any) -> Any:
    """Return a group with a list of its parameters, of which an iterator could be read once only."""
    if not isinstance(group, Mapping):
        return group
    params = group["params"]
    return {**group, "params": [params] if hasattr(params, "requires_grad") else list(params)}


class DummyScheduler:
    """The stand-in for a schedule that DeepSpeed makes from ``scheduler`` of its configuration.

    Args:
        optimizer: what it belongs to, a ``DummyOptim`` or an optimizer.
        total_num_steps: for an ``"auto"`` value of the configuration, counted as for a schedule of torch,
            which an optimizer step advances once for each process: DeepSpeed gets its share of them.
        warmup_num_steps: for an ``"auto"`` value; optimizer steps.
        lr_scheduler_callable: makes the schedule of DeepSpeed's optimizer, where the configuration has none.
        kwargs: kept.
    """

    prepared_as: ClassVar[str] = "scheduler"
    optimizer: Any
    total_num_steps: int | None
    warmup_num_steps: int
    lr_scheduler_callable: Callable[[Any], Any] | None
    kwargs: dict[str, Any]

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer, self.total_num_steps, self.warmup_num_steps = (
            optimizer,
            total_num_steps,
            warmup_num_steps,
        )
        self.lr_scheduler_callable, self.kwargs = lr_scheduler_callable, kwargs


def as_param_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return parameters, or groups of them, as groups."""
    listed = list(params)
    grouped = bool(listed) and isinstance(listed[0], Mapping)
    return [dict(group) for group in listed] if grouped else [{"params": listed}]


def map_pytorch_optim_to_deepspeed(optimizer: Any) -> Any:
    """Return DeepSpeed's CPU optimizer for one of torch, with the same options.

    Its kernels are compiled when the first one is made, which takes a compiler and most of a minute.

    Args:
        optimizer: ``Adam``, ``AdamW``, ``Adagrad`` of torch, or a ``Lion``; another one is returned as it is,
            and one with an option that DeepSpeed's does not have.
    """
    import torch

    names = {torch.optim.Adam: "Adam", torch.optim.AdamW: "Adam", torch.optim.Adagrad: "Adagrad"}
    name = names.get(type(optimizer), "Lion" if type(optimizer).__name__ == "Lion" else "")
    missing = ("maximize", "lr_decay", "initial_accumulator_value")
    if not name or any(group.get(option) for group in optimizer.param_groups for option in missing):
        return optimizer
    from importlib import import_module

    optimizer_class = getattr(import_module(f"deepspeed.ops.{name.lower()}"), f"DeepSpeedCPU{name}")
    option_names = ("lr", "betas", "eps", "weight_decay", *(["amsgrad"] if name == "Adam" else []))
    groups = [
        {key: value for key, value in group.items() if key == "params" or key in option_names}
        for group in optimizer.param_groups
    ]
    options = {key: value for key, value in optimizer.defaults.items() if key in option_names}
    if name == "Adam":
        is_adamw = isinstance(optimizer, torch.optim.AdamW)
        options["adamw_mode"] = optimizer.defaults.get("decoupled_weight_decay", is_adamw)
    return optimizer_class(groups, **options)
