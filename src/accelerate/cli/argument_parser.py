"""argparse with the customs of our command line: two spellings of each flag, and a note of what was typed."""

from __future__ import annotations

import argparse
import sys
from typing import Any

# The switch of a way of training -> the title of the group of its options, in the public parser's words.
options_to_group = {
    "multi_gpu": "Distributed GPUs",
    "tpu": "TPU",
    "use_deepspeed": "DeepSpeed Arguments",
    "use_fsdp": "FSDP Arguments",
    "use_megatron_lm": "Megatron-LM Arguments",
    "fp8_backend": "FP8 Arguments",
}


def clean_option(option: str) -> str | None:
    """The setting that a flag names, ``--num-processes`` -> ``num_processes``; None for anything else."""
    return option[2:].replace("-", "_") if option.startswith("--") else None


def _all_spellings(names: tuple[str, ...]) -> dict[str, None]:
    """``--a_b`` and ``--a-b``, whichever was given; the given one first."""
    long = [name for name in names if name.startswith("--")]
    stems = [name[2:] for name in long]
    return dict.fromkeys(
        [*names, *(f"--{stem.replace('_', '-')}" for stem in stems), *(f"--{clean_option(n)}" for n in long)]
    )


def _record_when_typed(action: argparse.Action) -> argparse.Action:
    """Lets an action add its setting to ``nondefault`` of the namespace when it is typed."""
    kind: type[argparse.Action] = type(action)
    if action.dest == argparse.SUPPRESS:
        return action

    def note(self: Any, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        kind.__call__(self, parser, namespace, values, option_string)
        namespace.nondefault = {*getattr(namespace, "nondefault", ()), self.dest}

    action.__class__ = type(kind.__name__, (kind,), {"__call__": note})
    return action


class CustomArgumentGroup(argparse._ArgumentGroup):
    """A group of a ``CustomArgumentParser``."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Adds a flag in both spellings."""
        return super().add_argument(*_all_spellings(args), **kwargs)

    def _add_action(self, action: argparse.Action) -> argparse.Action:
        return _record_when_typed(super()._add_action(action))


class CustomArgumentParser(argparse.ArgumentParser):
    """Takes ``--a_b`` also as ``--a-b``; the namespace holds in ``nondefault`` what was typed."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Adds a flag in both spellings."""
        return super().add_argument(*_all_spellings(args), **kwargs)

    def add_argument_group(self, *args: Any, **kwargs: Any) -> CustomArgumentGroup:
        """A group whose flags have both spellings too."""
        group = CustomArgumentGroup(self, *args, **kwargs)
        self._action_groups.append(group)
        return group

    def _add_action(self, action: argparse.Action) -> argparse.Action:
        return _record_when_typed(super()._add_action(action))


class CustomHelpFormatter(argparse.HelpFormatter):
    """Leaves out the groups of those ways of training that the command line does not ask for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        typed = {clean_option(arg.partition("=")[0]) for arg in sys.argv}
        self.titles = [title for switch, title in options_to_group.items() if switch not in typed]

    def add_argument(self, action: argparse.Action) -> None:
        """Adds a flag, unless its group is left out; a group without flags is not shown."""
        if getattr(self._current_section, "heading", None) not in self.titles:
            super().add_argument(action)
