"""Modules that read some of their state themselves: scales of quantised weights, formats, extra state.

A module of that kind has a ``_load_from_state_dict`` of its own, and files hold more for it than its
parameters and buffers. It gets all of that at once, as ``load_state_dict`` would give it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from accelerate.checkpoint.lazy import LazyTensor
from accelerate.core.errors import CheckpointError


@dataclass
class Special:
    """What such modules get.

    Attributes:
        modules: module, by its prefix (``"layer.0."``).
        state: what the files hold for each, by the same prefix.
        names: of all that in the files.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    state: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def owns(self, names: Iterable[str]) -> bool:
        """Whether a tensor of the model is read by its module."""
        return any(name.rpartition(".")[0] + "." in self.modules for name in names)

    def load(self, where: Path, device: Callable[[str, torch.device], torch.device]) -> tuple[str, ...]:
        """Reads it all; the names that their modules did not want.

        Args:
            where: the files, for errors.
            device: where the weight of a name goes that is on a device now.

        Raises:
            CheckpointError: a module refuses what the files hold for it.
        """
        left: list[str] = []
        for prefix, module in self.modules.items():
            before = dict(module.named_parameters(recurse=False))
            values = {name: saved.read() for name, saved in self.state[prefix].items()}
            missing: list[str] = []
            errors: list[str] = []
            module._load_from_state_dict(
                values, prefix, {"assign_to_params_buffers": True}, True, missing, left, errors
            )
            if errors or missing:
                why = "; ".join(errors) or f"missing: {', '.join(missing)}"
                raise CheckpointError(f"{where} does not fit the module {prefix[:-1]!r}", why=why)
            for name, old in before.items():
                new = module._parameters[name]
                if new is not None and new is not old:
                    new.requires_grad_(old.requires_grad and new.dtype.is_floating_point)
            for name, old in before.items():
                module.to(device(prefix + name, old.device))
        return tuple(left)


def find(model: nn.Module, found: Mapping[str, LazyTensor], known: set[str]) -> Special:
    """The modules for which files hold more than the model's tensors, and which can use it.

    Args:
        model: the model.
        found: what the files hold.
        known: names of the model's tensors.
    """
    extra = [name for name in found if name not in known]
    special = Special()
    if not extra:
        return special
    able = {f"{name}." if name else "": m for name, m in model.named_modules() if _reads_itself(m)}
    for name in extra:
        fitting = [prefix for prefix in able if name.startswith(prefix)]
        if not fitting:
            continue
        prefix = max(fitting, key=len)
        special.modules[prefix] = able[prefix]
    for prefix in special.modules:
        inner = [f"{prefix}{child}." for child, _ in special.modules[prefix].named_children()]
        special.state[prefix] = {
            name: saved
            for name, saved in found.items()
            if name.startswith(prefix) and not name.startswith(tuple(inner))
        }
        special.names.update(special.state[prefix])
    return special


def _reads_itself(module: nn.Module) -> bool:
    kind = type(module)
    own = kind._load_from_state_dict is not nn.Module._load_from_state_dict
    hooks = bool(module._load_state_dict_pre_hooks)
    extra = kind.set_extra_state is not nn.Module.set_extra_state
    return (own and not kind.__module__.startswith("torch.nn.")) or hooks or extra
