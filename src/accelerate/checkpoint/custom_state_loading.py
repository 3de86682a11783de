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

from accelerate.checkpoint.lazy_tensor import LazyTensor
from accelerate.core.errors import CheckpointError


@dataclass
class CustomStateDictModules:
    """Modules that load themselves, and the saved tensors for each.

    Attributes:
        modules: module, by its prefix (``"layer.0."``).
        state: what the files hold for each, by the same prefix.
        names: of all that in the files.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    state: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def covers(self, names: Iterable[str]) -> bool:
        """Return True if a tensor of the model is read by its module."""
        return any(name.rpartition(".")[0] + "." in self.modules for name in names)

    def load(self, source: Path, device: Callable[[str, torch.device], torch.device]) -> tuple[str, ...]:
        """Load all these modules; return the names that they did not use.

        Args:
            source: the files, for errors.
            device: where the weight of a name goes that is on a device now.

        Raises:
            CheckpointError: a module refuses what the files hold for it.
        """
        unused: list[str] = []
        for prefix, module in self.modules.items():
            before = dict(module.named_parameters(recurse=False))
            values = {name: saved.read() for name, saved in self.state[prefix].items()}
            missing: list[str] = []
            errors: list[str] = []
            module._load_from_state_dict(
                values, prefix, {"assign_to_params_buffers": True}, True, missing, unused, errors
            )
            if errors or missing:
                reason = "; ".join(errors) or f"missing: {', '.join(missing)}"
                raise CheckpointError(f"{source} does not fit the module {prefix[:-1]!r}", why=reason)
            for name, old in before.items():
                new = module._parameters[name]
                if new is not None and new is not old:
                    new.requires_grad_(old.requires_grad and new.dtype.is_floating_point)
            for name, old in before.items():
                module.to(device(prefix + name, old.device))
        return tuple(unused)


def find_self_loading(
    model: nn.Module, saved_tensors: Mapping[str, LazyTensor], model_names: set[str]
) -> CustomStateDictModules:
    """Find the modules for which files hold more than the model's tensors, and which can use it.

    Args:
        model: the model.
        saved_tensors: what the files hold.
        model_names: names of the model's tensors.
    """
    extra = [name for name in saved_tensors if name not in model_names]
    self_loading = CustomStateDictModules()
    if not extra:
        return self_loading
    capable = {f"{name}." if name else "": m for name, m in model.named_modules() if _is_self_loading(m)}
    for name in extra:
        prefixes = [prefix for prefix in capable if name.startswith(prefix)]
        if not prefixes:
            continue
        prefix = max(prefixes, key=len)
        self_loading.modules[prefix] = capable[prefix]
    for prefix in self_loading.modules:
        inner = [f"{prefix}{child}." for child, _ in self_loading.modules[prefix].named_children()]
        self_loading.state[prefix] = {
            name: saved
            for name, saved in saved_tensors.items()
            if name.startswith(prefix) and not name.startswith(tuple(inner))
        }
        self_loading.names.update(self_loading.state[prefix])
    return self_loading


def _is_self_loading(module: nn.Module) -> bool:
    kind = type(module)
    has_own_load = kind._load_from_state_dict is not nn.Module._load_from_state_dict
    hooks = bool(module._load_state_dict_pre_hooks)
    extra = kind.set_extra_state is not nn.Module.set_extra_state
    return (has_own_load and not kind.__module__.startswith("torch.nn.")) or hooks or extra
