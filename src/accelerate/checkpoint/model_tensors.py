"""The tensors of files, those of a model that take them, and the modules that load their state themselves.

By a ``_load_from_state_dict`` or hooks of their own some modules read scales of quantised weights, formats
and extra state, rename keys, or convert values of older versions. Such a module is loaded by torch's own
functions, which get all of its state at once, where weights stay on their devices, or where files hold more
for it than its parameters and buffers.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from accelerate.checkpoint.file_reads import FileRegion
from accelerate.checkpoint.state_dict_files import (
    SHOWN,
    canonical_name,
    canonical_names,
    comes_from,
    is_distributed,
)
from accelerate.core.errors import CheckpointError, list_first


class WeightsMismatchError(CheckpointError, ValueError):
    """The weights of a file do not fit a model (a ValueError too, as in the public package)."""


@dataclass(frozen=True)
class LazyTensor:
    """A saved tensor that is not read yet.

    Attributes:
        shape, dtype: its own.
        file_ranges: (file, offset, bytes) of its values; equal for tied tensors.
        read: gives it, on the CPU.
        region: where it can be mapped; None if it must be read.
        layout: of a sparse tensor its own, which can only be read.
    """

    shape: torch.Size
    dtype: torch.dtype
    file_ranges: tuple[tuple[str, int, int], ...]
    read: Callable[[], torch.Tensor]
    region: FileRegion | None = None
    layout: torch.layout = torch.strided

    @property
    def nbytes(self) -> int:
        """The bytes that the tensor takes."""
        return self.numel() * self.dtype.itemsize

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Return the bytes of one element."""
        return self.dtype.itemsize

    def detach(self) -> torch.Tensor:
        """Read the tensor: so a writer, which calls this once, can use it like a tensor."""
        return self.read()


class SavedTensors(dict[str, LazyTensor]):
    """The lazy tensors of files by all their names, and what torch files say beside them.

    Attributes:
        objects: name of a value that is no tensor -> the function that reads it.
        metadata: path of a module -> what its state dict notes of it, such as its version.
    """

    def __init__(
        self,
        tensors: Mapping[str, LazyTensor],
        objects: Mapping[str, Callable[[], Any]] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(tensors)
        self.objects, self.metadata = dict(objects or {}), dict(metadata or {})


@dataclass(eq=False)
class ModelTensor:
    """One tensor of the model.

    Attributes:
        names: by which it goes; several if it is tied.
        owners: module and attribute of each.
        tensor: the parameter or buffer as it is now.
        is_persistent: the model's state dict holds it, unlike buffers with ``persistent=False``.
    """

    names: list[str]
    owners: list[tuple[nn.Module, str]]
    tensor: torch.Tensor
    is_persistent: bool = True

    @property
    def is_parameter(self) -> bool:
        """True for a parameter; False for a buffer, which keeps its initial value if it is not saved."""
        return isinstance(self.tensor, nn.Parameter)

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return self.tensor.shape


def list_model_tensors(model: nn.Module) -> list[ModelTensor]:
    """Return the parameters and buffers of a model, tied ones once."""
    by_id: dict[int, ModelTensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        left_out = module._non_persistent_buffers_set
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is None:
                continue
            target = by_id.setdefault(id(tensor), ModelTensor([], [], tensor, is_persistent=False))
            target.names.append(f"{prefix}.{name}" if prefix else name)
            target.owners.append((module, name))
            target.is_persistent = target.is_persistent or name not in left_out
    return list(by_id.values())


@torch.no_grad()
def assign_tensor(target: ModelTensor, value: torch.Tensor) -> None:
    """Set a tensor of the model: in the same parameter where that has memory, else as a new one.

    One that was made in inference mode is replaced too: torch could not train it with any memory.
    """
    current = target.tensor
    if value is current:
        return
    plain = type(value) in (torch.Tensor, nn.Parameter) and current.device.type != "meta"
    requires_grad = current.requires_grad and (value.dtype.is_floating_point or value.dtype.is_complex)
    plain = plain and requires_grad == current.requires_grad and not current.is_inference()
    if target.is_parameter and plain and torch._has_compatible_shallow_copy_type(current, value):  # pyright: ignore
        current.data = value
        vars(current).update(vars(value))
        return
    new: Any = value
    if isinstance(current, nn.Parameter) and not isinstance(value, nn.Parameter):
        new = nn.Parameter(value, requires_grad=requires_grad)
        new.__dict__.update(current.__dict__)
    for module, name in target.owners:
        table = module._parameters if isinstance(current, nn.Parameter) else module._buffers
        table[name] = new


logger = logging.getLogger(__name__)


@dataclass
class CustomStateDictModules:
    """Modules that load themselves, and what files hold for them.

    Attributes:
        modules: module, by its prefix (``"layer.0."``), outer ones first.
        others: prefixes inside of each that it leaves to other modules; none if it loads all that is in it.
        tensors: what the files hold for them, by the model's names.
        objects: functions that read what is no tensor, likewise.
        metadata: path of a module -> what state dicts note of it.
        names: of all that in the files.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    others: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    objects: dict[str, Callable[[], Any]] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def prefix_of(self, name: str) -> str | None:
        """Return the prefix of the module that loads a name; None if there is none."""
        prefixes = (p for p in self.modules if name.startswith(p) and not name.startswith(self.others[p]))
        return next(prefixes, None)

    def covers(self, target: ModelTensor) -> bool:
        """Return True if a tensor of the model, by whatever name, is read by such a module."""
        return all(self.prefix_of(name) is not None for name in target.names)

    def saved(self, target: ModelTensor) -> LazyTensor | None:
        """Return what the files hold under a name of a tensor."""
        return next((self.tensors[name] for name in target.names if name in self.tensors), None)

    def load(self, source: Path) -> tuple[set[str], tuple[str, ...]]:
        """Load all these modules; return (names that they lack, names that they do not use).

        Args:
            source: the files, for errors.

        Raises:
            WeightsMismatchError: a module refuses what the files hold for it.
        """
        lacking: list[str] = []
        unused: list[str] = []
        readers = {**{name: saved.read for name, saved in self.tensors.items()}, **self.objects}
        by_prefix: dict[str | None, dict[str, Callable[[], Any]]] = {}
        for name, read in readers.items():
            by_prefix.setdefault(self.prefix_of(name), {})[name] = read
        for prefix, module in self.modules.items():
            state = {name: read() for name, read in by_prefix.get(prefix, {}).items()}
            errors: list[str] = []
            if self.others[prefix]:
                note = {**self.metadata.get(prefix[:-1], {})}
                if _has_meta_tensor(module, recurse=False):
                    note["assign_to_params_buffers"] = True
                module._load_from_state_dict(state, prefix, note, True, lacking, unused, errors)
            else:
                self._load_subtree(prefix, state, lacking, unused, errors)
            if errors:
                what = f"{source} does not fit the module {prefix[:-1] or type(module).__name__!r}"
                raise WeightsMismatchError(what, why="; ".join(errors))
        return set(lacking), tuple(unused)

    def _load_subtree(
        self, prefix: str, state: dict[str, Any], lacking: list[str], unused: list[str], errors: list[str]
    ) -> None:
        """Load a module and all modules in it by torch's ``load_state_dict``."""
        inner: Any = OrderedDict((name.removeprefix(prefix), value) for name, value in state.items())
        paths = [path for path in self.metadata if f"{path}.".startswith(prefix)]
        inner._metadata = {path[len(prefix) :]: self.metadata[path] for path in paths}
        module = self.modules[prefix]
        load: Any = nn.Module.load_state_dict if prefix else type(module).load_state_dict
        options = {"assign": True} if _has_meta_tensor(module) else {}
        try:
            keys = load(module, inner, strict=False, **options) or ([], [])
        except RuntimeError as error:
            errors += [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        else:
            lacking += [prefix + name for name in keys[0]]
            unused += [prefix + name for name in keys[1]]


def find_custom_modules(
    model: nn.Module,
    saved: SavedTensors,
    targets: Sequence[ModelTensor],
    *,
    by_hooks: bool,
) -> CustomStateDictModules:
    """Find the modules for which files hold more than the model's tensors, and which can use it.

    Such a module loads what is its own; all that is in it, if files lack weights in it: it may rename others.

    Args:
        model: the model.
        saved: what the files hold.
        targets: the model's tensors.
        by_hooks: also those that may convert what they load, whatever the files hold; not in a model with
            sharded tensors, which get their part of a value as it is in the file.
    """
    file_names, own_names = [*saved, *saved.objects], [name for target in targets for name in target.names]
    names = dict(zip(canonical_names(file_names, own_names), file_names, strict=True))
    canonical = dict(zip(own_names, canonical_names(own_names, file_names), strict=True))
    model_names = {short: name for name, short in canonical.items()}
    absent = [
        name
        for target in targets
        if target.is_parameter and names.keys().isdisjoint(canonical[name] for name in target.names)
        for name in target.names
    ]
    by_hooks = by_hooks and not any(is_distributed(target.tensor) for target in targets)
    custom = _choose_modules(model, [name for name in names if name not in model_names], absent, by_hooks)
    if custom.modules:
        _assign_entries(custom, model, saved, names, model_names)
    return custom


def _choose_modules(
    model: nn.Module, extra: Sequence[str], absent: Sequence[str], by_hooks: bool
) -> CustomStateDictModules:
    """Choose the modules that load themselves; none inside of one that loads all that is in it.

    Args:
        model: the model.
        extra: canonical names in the files that are no tensors of the model: for the innermost module that
            has loading code.
        absent: the names of the model's parameters that the files lack.
        by_hooks: see ``find_custom_modules``.
    """
    modules = {f"{path}." if path else "": module for path, module in model.named_modules()}
    with_code = {canonical_name(p): p for p, module in modules.items() if extra and _has_load_code(module)}
    around = [[prefix for prefix in with_code if name.startswith(prefix)] for name in extra]
    own = {with_code[max(prefixes, key=len)] for prefixes in around if prefixes}
    whole = {prefix for prefix, module in modules.items() if by_hooks and _converts_state(module, prefix)}
    whole |= {prefix for prefix in own if any(name.startswith(prefix) for name in absent)}
    custom = CustomStateDictModules()
    for prefix, module in modules.items():
        is_inside = any(prefix.startswith(outer) and not left for outer, left in custom.others.items())
        if (prefix in own or prefix in whole) and not is_inside:
            children = () if prefix in whole else (f"{prefix}{name}." for name, _ in module.named_children())
            custom.modules[prefix], custom.others[prefix] = module, tuple(children)
    return custom


def _assign_entries(
    custom: CustomStateDictModules,
    model: nn.Module,
    saved: SavedTensors,
    names: Mapping[str, str],
    model_names: Mapping[str, str],
) -> None:
    """Give the modules what the files hold for them, by the names that the model has.

    Args:
        custom: the modules.
        model: the model.
        saved: what the files hold.
        names: canonical name -> name in the files.
        model_names: canonical name -> name of a tensor of the model.
    """
    prefixes = {canonical_name(prefix): prefix for prefix in custom.modules}
    for name, file_name in names.items():
        outer = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default="")
        model_name = model_names.get(name, prefixes.get(outer, "") + name[len(outer) :])
        if custom.prefix_of(model_name) is not None:
            custom.names.add(file_name)
            if file_name in saved:
                custom.tensors[model_name] = saved[file_name]
            else:
                custom.objects[model_name] = saved.objects[file_name]
    paths = {canonical_name(f"{path}." if path else ""): path for path, _ in model.named_modules()}
    for path, note in saved.metadata.items():
        canonical = canonical_name(f"{path}." if path else "")
        custom.metadata[paths.get(canonical, canonical[:-1])] = note


def _has_meta_tensor(module: nn.Module, *, recurse: bool = True) -> bool:
    tensors = [*module.parameters(recurse), *module.buffers(recurse)]
    return any(tensor.device.type == "meta" for tensor in tensors)


def _has_load_code(module: nn.Module) -> bool:
    """Return True for a module that may use names which are none of its tensors."""
    kind = type(module)
    has_own_load = kind._load_from_state_dict is not nn.Module._load_from_state_dict
    hooks = bool(module._load_state_dict_pre_hooks)
    extra = kind.set_extra_state is not nn.Module.set_extra_state
    return (has_own_load and not kind.__module__.startswith("torch.nn.")) or hooks or extra


def _converts_state(module: nn.Module, prefix: str) -> bool:
    """Return True for a module that may load other values than its names have in the file, or act on them.

    What torch's own layers and wrappers have renames keys of older versions.
    """
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    sources = [type(module)._load_from_state_dict, *(getattr(hook, "hook", hook) for hook in hooks)]
    sources += [] if prefix else [type(module).load_state_dict]
    own = ("torch.nn.", "torch.distributed", "torch._dynamo", "accelerate.")
    return not all(comes_from(source, *own) for source in sources) or any(
        is_lazy(tensor) for tensor in [*module._parameters.values(), *module._buffers.values()]
    )


def warn_unconverted(model: nn.Module, custom: CustomStateDictModules) -> None:
    """Warn of modules that may convert what they load, and that do not load themselves."""
    modules = {f"{path}." if path else "": module for path, module in model.named_modules()}
    names = [
        prefix[:-1] or type(model).__name__
        for prefix, module in modules.items()
        if custom.prefix_of(f"{prefix}*") is None
        and _converts_state(module, prefix)
        # Others are quantised, and their weights are converted as they are placed.
        and all(type(p) is nn.Parameter and p.is_floating_point() for p in module.parameters(recurse=False))
    ]
    if names:
        logger.warning(
            "%s: modules with a _load_from_state_dict or hooks of their own, which are not called for a "
            "device map or sharded weights: if they convert values, call load_checkpoint_in_model without a "
            "map, then dispatch_model",
            list_first(names, SHOWN),
        )


def convert_memory(target: ModelTensor, dtype: torch.dtype, device: torch.device) -> None:
    """Give a tensor that has memory its dtype and device before a module copies values into it."""
    tensor = target.tensor
    if (
        tensor.device.type != "meta"
        and not is_lazy(tensor)
        and (tensor.device, tensor.dtype) != (device, dtype)
    ):
        assign_tensor(target, tensor.to(device, dtype))


def settle_assigned(target: ModelTensor, dtype: torch.dtype, device: torch.device) -> None:
    """Give the dtype and device to what a module has put in the place of a tensor, under all its names.

    Only floating point values change their dtype: others are quantised.
    """
    tables: list[dict[str, Any]] = [
        module._parameters if target.is_parameter else module._buffers for module, _ in target.owners
    ]
    places = [(table, name) for table, (_, name) in zip(tables, target.owners, strict=True)]
    new = next((table[name] for table, name in places if table[name] is not target.tensor), None)
    if new is None or is_lazy(target.tensor):
        return
    plain = type(new) in (torch.Tensor, nn.Parameter, nn.Buffer)
    for table, name in places:
        table[name] = target.tensor if plain else new
    if plain:
        is_float = new.is_floating_point() and target.tensor.is_floating_point()
        assign_tensor(target, new.detach().to(device, dtype if is_float else new.dtype))
    elif new.device != device:
        target.owners[0][0].to(device)
