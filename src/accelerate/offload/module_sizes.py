"""The sizes of a model: bytes of every module, its largest layer, its tied weights, and what is placed whole.

A model is read in one pass, on whatever device it is: the meta device is enough. What a device map places is
a *unit*: a block of a class that is not split, a module without submodules, or a tensor that a module with
submodules holds itself. Units whose weights are tied form a *group*, which has one home.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from accelerate.core.errors import PrepareError, SettingError, nearest

Dtype: TypeAlias = "torch.dtype | str | Any"
Modules: TypeAlias = "Sequence[tuple[str, nn.Module | torch.Tensor]]"


def dtype_byte_size(dtype: Dtype) -> int | float:
    """Return the bytes of one element; less than one for formats that share a byte. A bool is one bit.

    Args:
        dtype: torch's, its name, or a format that only has a number of ``bits``.

    Raises:
        PrepareError: there is no such dtype.
    """
    bits = getattr(dtype, "bits", None)
    if isinstance(bits, int):
        return bits // 8 if bits % 8 == 0 else bits / 8
    torch_dtype = as_torch_dtype(dtype)
    return 1 / 8 if torch_dtype == torch.bool else torch_dtype.itemsize


def _get_proper_dtype(dtype: Any) -> Any:
    """Return torch's dtype of this name; anything else as it is."""
    return as_torch_dtype(dtype) if isinstance(dtype, str) else dtype


def as_torch_dtype(dtype: Any) -> torch.dtype:
    """Return torch's dtype of this name, or the dtype itself.

    Raises:
        PrepareError: it is none.
    """
    torch_dtype = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if isinstance(torch_dtype, torch.dtype):
        return torch_dtype
    names = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
    near = nearest(dtype, names) if isinstance(dtype, str) else None
    raise PrepareError(
        f"unknown dtype {dtype!r}" if isinstance(dtype, str) else f"{dtype!r} is no dtype",
        fix=f"did you mean {near!r}?" if near else "write it like 'float16' or torch.float16",
    )


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers that a state dict leaves out.

    Args:
        module: the module.
        recurse: those of its submodules too.
        fqns: give the whole path from ``module``, not the buffer's own name.
    """
    modules = module.named_modules() if recurse else [("", module)]
    return {
        f"{path}.{name}" if fqns and path else name
        for path, part in modules
        for name in part._non_persistent_buffers_set
    }


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return (name, tensor) of every parameter, then of every buffer.

    Args:
        module: the module.
        include_buffers: False gives parameters only.
        recurse: those of its submodules too.
        remove_non_persistent: leave out buffers that a state dict leaves out.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else ()
        yield from (pair for pair in module.named_buffers(recurse=recurse) if pair[0] not in left_out)


# --- the model as a tree of sizes ---------------------------------------------------------------------------


class WeightSize(NamedTuple):
    """The size of a parameter or buffer.

    Attributes:
        name: from the root of the model.
        size: in bytes.
        tie: equal for weights that are one tensor.
        buffer: whether it is a buffer.
    """

    name: str
    size: int
    tie: Hashable
    buffer: bool


class ModuleNode(NamedTuple):
    """A module: its path from the root (``""``), its class name, its own weights, its child modules."""

    name: str
    kind: str
    weights: tuple[WeightSize, ...]
    children: tuple[ModuleNode, ...]

    def all_weights(self) -> Iterator[WeightSize]:
        """Return the weights of the module and of all modules below it."""
        for part in self.walk():
            yield from part.weights

    def walk(self) -> Iterator[ModuleNode]:
        """Return the module and all modules below it, in order."""
        waiting: list[ModuleNode] = [self]
        while waiting:
            part = waiting.pop()
            yield part
            waiting.extend(reversed(part.children))


def build_module_tree(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    *,
    declared: bool = True,
) -> ModuleNode:
    """Build the tree of a model's modules with their sizes, in the order in which they are registered.

    Every path to a module is there, also a second one to the same module. Weights that are one ``Parameter``
    carry the same ``tie``. A buffer that several modules share is not tied: they are constants, and each
    device may have its own.

    Args:
        model: it is only looked at.
        dtype: count floating point weights as if they were converted to it; wider ones are never counted
            larger than they are.
        special_dtypes: name of a weight -> its own dtype.
        declared: also tie what the model says it will tie (``all_tied_weights_keys`` of transformers) and
            has not tied yet.
    """
    size = _make_size_function(dtype, special_dtypes or {})
    ties: dict[str, Any] = {}

    def read(module: nn.Module, name: str) -> ModuleNode:
        prefix = f"{name}." if name else ""
        weights: list[WeightSize] = []
        for table, is_buffer in ((module._parameters, False), (module._buffers, True)):
            for key, value in table.items():
                if value is not None:
                    full = prefix + key
                    tie = full if is_buffer else ties.get(full, id(value))
                    weights.append(WeightSize(full, size(full, value), tie, is_buffer))
        parts = [read(child, prefix + key) for key, child in module._modules.items() if child is not None]
        return ModuleNode(name, type(module).__name__, tuple(weights), tuple(parts))

    if declared:
        ties = _declared_ties(model)
    return read(model, "")


def _make_size_function(
    dtype: Dtype | None, special_dtypes: Mapping[str, Dtype]
) -> Callable[[str, torch.Tensor], int]:
    """Return a function (name, tensor) -> bytes."""
    max_width = None if dtype is None else dtype_byte_size(dtype)
    special = {name: dtype_byte_size(each) for name, each in special_dtypes.items()}
    widths: dict[torch.dtype, float] = {}

    def width(tensor_dtype: torch.dtype) -> float:
        if max_width is None or not (tensor_dtype.is_floating_point or tensor_dtype.is_complex):
            return tensor_dtype.itemsize
        return min(max_width, tensor_dtype.itemsize)

    def size(name: str, tensor: torch.Tensor) -> int:
        tensor_dtype = tensor.dtype
        wide = widths.get(tensor_dtype)
        if wide is None:
            wide = widths[tensor_dtype] = width(tensor_dtype)
        if name in special:
            wide = special[name]
        count = tensor.numel() * wide
        return count if type(count) is int else math.ceil(count)

    return size


def _declared_ties(model: nn.Module) -> dict[str, int]:
    """Return name of a weight -> identity of the parameter that it will be tied to."""
    declared = getattr(model, "all_tied_weights_keys", None)
    if not isinstance(declared, Mapping) or not declared:
        return {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parameter_ids: dict[str, int] = {}
    for target, source in declared.items():
        if isinstance(source, str) and source in parameters and target in parameters:
            parameter_ids[target] = parameter_ids.setdefault(source, id(parameters[source]))
    return parameter_ids


def tied_groups(part: ModuleNode) -> list[list[str]]:
    """Return the names of tied weights, group by group."""
    groups: dict[Any, list[str]] = {}
    for weight in part.all_weights():
        groups.setdefault(weight.tie, []).append(weight.name)
    return [sorted(names) for names in groups.values() if len(names) > 1]


# --- units that are placed ---------------------------------------------------------------------------------


class PlacementUnit(NamedTuple):
    """A module or tensor that is never split over devices. ``cache``: see ``PlacementRules``."""

    name: str
    weights: tuple[WeightSize, ...]
    cache: int

    @property
    def size(self) -> int:
        """The bytes of its distinct weights."""
        return _distinct_bytes(self.weights)


class TiedUnitGroup(NamedTuple):
    """Units that share weights, or one unit alone; all sizes in bytes.

    Attributes:
        units: in the order of the model.
        size: of the distinct weights, buffers among them.
        buffers: of the buffers.
        block: of the largest unit: what must fit at once where it is computed.
        cache: of all units.
    """

    units: tuple[PlacementUnit, ...]
    size: int
    buffers: int
    block: int
    cache: int


def _distinct_bytes(weights: Sequence[WeightSize]) -> int:
    if len(weights) == 1:
        return weights[0].size
    return sum({weight.tie: weight.size for weight in weights}.values())


def split_into_units(
    part: ModuleNode, no_split: Iterable[str] = (), cache: Mapping[str, int] | None = None
) -> list[PlacementUnit]:
    """Return the placement units of the module ``part``, in order.

    Args:
        part: the module.
        no_split: names of classes that are not divided; the model itself is.
        cache: name of a module -> bytes; what belongs to a divided module goes with its first unit.

    Raises:
        SettingError: ``cache`` names a module that is not there.
    """
    closed, cache_sizes = frozenset(no_split), cache or {}
    placement_units = _collect_units(part, closed, cache_sizes)
    if sum(unit.cache for unit in placement_units) != sum(cache_sizes.values()):
        names = cache_sizes.keys() - {each.name for each in part.walk()}
        raise SettingError(f"a cache is asked for modules that are not there: {', '.join(sorted(names))}")
    return placement_units


def _collect_units(part: ModuleNode, closed: frozenset[str], cache: Mapping[str, int]) -> list[PlacementUnit]:
    # The model itself is divided whatever the classes say, as in 1.x: programs name that of the model too.
    if not part.children or (part.name and part.kind in closed):
        below = sum(cache.get(each.name, 0) for each in part.walk()) if cache else 0
        return [PlacementUnit(part.name, tuple(part.all_weights()) if part.children else part.weights, below)]
    collected = [PlacementUnit(weight.name, (weight,), 0) for weight in part.weights if not weight.buffer]
    for child in part.children:
        collected += _collect_units(child, closed, cache)
    collected += [PlacementUnit(weight.name, (weight,), 0) for weight in part.weights if weight.buffer]
    if part.name in cache:
        collected[0] = collected[0]._replace(cache=collected[0].cache + cache[part.name])
    return collected


def group_tied_units(units: Sequence[PlacementUnit]) -> list[TiedUnitGroup]:
    """Group units that share weights, in the order of the first unit of each group."""
    lead = list(range(len(units)))  # unit -> an earlier unit of its group, or itself

    def first(index: int) -> int:
        while lead[index] != index:
            lead[index] = index = lead[lead[index]]
        return index

    holder: dict[Hashable, int] = {}
    for index, unit in enumerate(units):
        for weight in unit.weights:
            owner = holder.setdefault(weight.tie, index)
            if owner != index:
                root, other_root = first(index), first(owner)
                lead[max(root, other_root)] = min(root, other_root)
    members: dict[int, list[PlacementUnit]] = {}
    for index, unit in enumerate(units):
        members.setdefault(first(index), []).append(unit)
    return [_make_group(tuple(each)) for each in members.values()]


def _make_group(members: tuple[PlacementUnit, ...]) -> TiedUnitGroup:
    alone = len(members) == 1
    weights = members[0].weights if alone else [weight for unit in members for weight in unit.weights]
    size = _distinct_bytes(weights)
    return TiedUnitGroup(
        members,
        size,
        sum([weight.size for weight in weights if weight.buffer]),  # buffers are never tied
        size if alone else max(unit.size for unit in members),
        members[0].cache if alone else sum(unit.cache for unit in members),
    )


# --- the public functions -----------------------------------------------------------------------------------


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of every module and of every tensor by its name; ``""`` is the whole model.

    A module comes before what is in it, and parameters before buffers, as under 1.15. A weight that several
    modules share counts where it comes first. Names that hold nothing count 0.

    Args:
        model: the model, on any device.
        dtype: count floating point weights as if they were converted to it.
        special_dtypes: name of a weight -> its own dtype.
        buffers_only: leave parameters out.
    """
    sizes: defaultdict[str, int] = defaultdict(int)
    size = _make_size_function(dtype, special_dtypes or {})
    for name, tensor in model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True):
        count = size(name, tensor)
        sizes[""] += count
        for path in accumulate(name.split("."), "{}.{}".format):
            sizes[path] += count
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None
) -> int:
    """Return the bytes of all buffers of a model, including those that a state dict leaves out."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Return the names without a name below them: of ``compute_module_sizes`` these are the tensors.

    Args:
        module_sizes: what ``compute_module_sizes`` gave.
    """
    inner = {name.rpartition(".")[0] for name in module_sizes}
    return [name for name in module_sizes if name and name not in inner]


def get_max_layer_size(
    modules: Modules, module_sizes: Mapping[str, int], no_split_module_classes: Iterable[str] | None
) -> tuple[int, list[str]]:
    """Return (bytes, names) of the largest layers: modules without submodules or of a class not split.

    Args:
        modules: (name, module or tensor) of the modules to look at.
        module_sizes: bytes of each by name, as ``compute_module_sizes`` gives them.
        no_split_module_classes: names of classes that are taken whole.
    """
    closed = set(no_split_module_classes or ())
    largest, names = 0, list[str]()
    waiting = list(reversed(modules))
    while waiting:
        name, module = waiting.pop()
        inner = list_children(name, module) if type(module).__name__ not in closed else []
        if inner:
            waiting.extend(reversed(inner))
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def list_children(name: str, module: nn.Module | torch.Tensor) -> list[tuple[str, nn.Module | torch.Tensor]]:
    """Return (name, module or tensor) of a module's children; an empty list where it has no submodules.

    Args:
        name: the module's own; its parts have names below it.
        module: a module, or a tensor, which has no parts.
    """
    return [] if isinstance(module, torch.Tensor) or not module._modules else _named_children(name, module)


def _named_children(name: str, module: nn.Module) -> list[tuple[str, nn.Module | torch.Tensor]]:
    prefix = f"{name}." if name else ""
    members: list[tuple[str, Any]] = list(module.named_parameters(recurse=False))
    members += [*module.named_children(), *module.named_buffers(recurse=False)]
    return [(prefix + key, value) for key, value in members]


def no_split_classes(model: nn.Module) -> set[str]:
    """Return the classes of modules that a model, or a part of it, says must stay whole."""
    names = {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    return names & {type(part).__name__ for part in model.modules()}


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return (bytes of the model, (bytes, names) of its largest layers), by its ``_no_split_modules``."""
    sizes = compute_module_sizes(model)
    closed = getattr(model, "_no_split_modules", None) or []
    return sizes[""], get_max_layer_size(_named_children("", model), sizes, closed)


def get_module_size_with_ties(
    tied_params: Sequence[str], module_size: int, module_sizes: Mapping[str, int], modules_to_treat: Modules
) -> tuple[int, list[str], list[nn.Module | torch.Tensor]]:
    """Return (bytes, names, modules) of a module with all modules that are tied to it.

    Args:
        tied_params: names of weights elsewhere that are also the module's.
        module_size: bytes of the module itself.
        module_sizes: bytes by name.
        modules_to_treat: (name, module) among which the others are found.

    Raises:
        PrepareError: a tied weight is in none of them.
    """
    holders_by_name: dict[str, nn.Module | torch.Tensor] = {}
    total = module_size
    for tied in tied_params:
        holders = [(n, m) for n, m in modules_to_treat if f"{tied}.".startswith(f"{n}.")]
        if not holders:
            raise PrepareError(f"the tied weight {tied!r} is in none of the modules given")
        name, module = holders[0]
        total += (0 if name in holders_by_name else module_sizes.get(name, 0)) - module_sizes.get(tied, 0)
        holders_by_name[name] = module
    return total, list(holders_by_name), list(holders_by_name.values())


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Find groups of names that are one parameter, each sorted; works on the meta device.

    Args:
        model: the model.
        kwargs: nothing; 1.x used them for itself.

    Raises:
        PrepareError: an argument that has no meaning.
    """
    if kwargs:
        raise PrepareError(f"find_tied_parameters takes a model, and no {', '.join(kwargs)}")
    return tied_groups(build_module_tree(model, declared=False))


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return True when a transformers model says that some of its weights are to be tied."""
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return False
    if getattr(model, "all_tied_weights_keys", None):
        return True
    config: Any = getattr(model, "config", None)
    embeds: Any = getattr(model, "get_output_embeddings", None)
    ties_embeddings = (
        bool(getattr(config, "tie_word_embeddings", False)) and embeds is not None and embeds() is not None
    )
    halves = bool(
        getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    )
    return ties_embeddings or halves or any(hasattr(part, "_tie_weights") for part in model.modules())
