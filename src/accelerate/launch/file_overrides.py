"""Keys of a configuration file that a flag of another name overrules.

A flag wins over the key of its own name where settings are loaded (``core/setting.py``). Some say more:
``--use_fsdp`` asks for another way of training than ``distributed_type: DEEPSPEED``, ``--multi_gpu`` for none
of them, and ``--num_machines 1`` for a job in which a machine has no number. A template that is shared leaves
``num_processes: "<FILL>"`` to the flag.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from accelerate.core.setting import declared_settings
from accelerate.core.value_types import convert_to
from accelerate.launch.config_files import ConfigFile

# Types of the group that name neither accelerators nor a strategy.
_NO_ACCELERATORS = ("NO", "MULTI_CPU")


def strategy_switches(classes: Iterable[type[Any]]) -> dict[str, str]:
    """Return the switches of the strategies, each with the ``distributed_type`` that asks for it in files."""
    kinds = ((cls, getattr(cls, "__distributed_type__", "")) for cls in classes)
    return {row.name: kind for cls, kind in kinds if kind for row in declared_settings(cls)}


def is_typed(flags: Mapping[str, Any], name: str) -> bool:
    """Return whether a switch was typed, and not as ``false``."""
    value = flags.get(name)
    return value is not None and convert_to(bool, value, "text") == (True, True)


def enabled_switches(
    file: ConfigFile, flags: Mapping[str, Any], env: Mapping[str, str], classes: Collection[type[Any]]
) -> set[str]:
    """Return the switches of strategies that a flag, a variable or the type of the group turns on."""
    kind = str(file.values.get("distributed_type")).upper()
    variables = {row.name: row.variable for cls in classes for row in declared_settings(cls)}
    return {
        switch
        for switch, own_kind in strategy_switches(classes).items()
        if own_kind == kind
        or is_typed(flags, switch)
        or convert_to(bool, env.get(variables[switch] or ""), "text") == (True, True)
    }


def without_overruled_keys(
    file: ConfigFile, flags: Mapping[str, Any], classes: Collection[type[Any]]
) -> ConfigFile:
    """Return the file without the keys that typed flags overrule.

    A type of the group that only names a device stays beside a strategy: it says where to train.
    """
    kind = str(file.values.get("distributed_type")).upper()
    strategies = strategy_switches(classes)
    overruled: set[str] = set()
    if any(is_typed(flags, switch) and kind != strategies[switch] for switch in strategies):
        overruled |= {"distributed_type"} if kind in ("NO", *strategies.values()) else set()
    if is_typed(flags, "multi_gpu"):
        overruled |= {"distributed_type"} if kind in (*_NO_ACCELERATORS, *strategies.values()) else set()
        overruled |= {"use_cpu"}
    if str(flags.get("num_machines")) == "1":
        overruled |= {"machine_rank"}
    for row in (row for cls in classes for row in declared_settings(cls)):
        value = file.values.get(row.name)
        is_placeholder = isinstance(value, str) and not convert_to(row.type, value, "file")[0]
        if is_placeholder and flags.get(row.name) is not None and not row.choices:
            overruled.add(row.name)
    if not overruled & file.values.keys():
        return file
    return replace(file, values={key: value for key, value in file.values.items() if key not in overruled})
