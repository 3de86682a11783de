"""The settings of strategies, which a launch passes on to the script. No torch here: the launcher reads them.

A file of this folder belongs to the strategy of the same name. Its ``PLUGIN`` is a tuple of two classes of
settings: the switch by which one asks for the strategy, and its options, whose fields its plugin inherits.

The switch says in ``__distributed_type__`` which type of the group asks for it in files, and the options say
in ``__switch__`` which setting that is: a launch refuses options of a strategy that nobody asked for. Options
may have two functions of the given settings, ``origins(name)``: ``check`` refuses contradictions, and
``launch_variables`` returns variables that follow from several settings. What a class may declare about its
section is said in ``launch/config_files.py``.

Only given values are passed on. The launcher of Accelerate 1.x also passes on its own defaults; of those
libraries read one, ``FSDP_CPU_RAM_EFFICIENT_LOADING``, which is passed on here too.
"""

from __future__ import annotations

from typing import Any

from accelerate.core.registry import Registry

SETTINGS: Registry[tuple[type[Any], ...]] = Registry(
    "settings of a strategy", "accelerate.strategy.launch_settings", "accelerate.strategy_settings"
)
