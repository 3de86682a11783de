"""Device maps: inferring, cleaning and checking which module of a model is on which device.

A device map is a dict from names of modules or tensors to devices: a number is an accelerator, others are
``"cpu"``, ``"disk"`` and torch's names. The longest name that a tensor's name begins with decides.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from accelerate import device as devices
from accelerate.core.errors import DeviceError, SettingError, UnknownNameError, nearest, warn_user
from accelerate.core.pickle_scan import paused_gc
from accelerate.offload.module_sizes import (
    Dtype,
    ModuleNode,
    Modules,
    build_module_tree,
    check_tied_parameters_in_config,
    compute_module_sizes,
    get_module_leaves,
    get_module_size_with_ties,
    list_children,
    tied_groups,
)
from accelerate.offload.placement import CPU, DISK, Device
from accelerate.offload.placement_planner import (
    PlacementRules,
    merge_names,
    plan_placement,
    read_budgets,
    read_device,
)

# How often the spare room of balanced budgets is doubled before the full budgets are taken.
_DOUBLINGS = 8
_SHOWN = 10  # names in a message
Memory: TypeAlias = Mapping[Device, "int | float | str"]


# --- budgets ------------------------------------------------------------------------------------------------


def get_max_memory(max_memory: Memory | None = None) -> dict[Device, int | float]:
    """Return device -> bytes that may be used on this machine: what is free now, or what the user gave.

    Accelerators are numbers, one without a number is its type; then ``"cpu"`` and ``"disk"``.

    Args:
        max_memory: budgets in bytes or as texts such as ``"10GB"``; None asks the machine. Devices that are
            not here are kept, with a warning: the budgets may be for another machine. Texts in a dict become
            bytes, as under 1.15: transformers compares what it has given with what is returned.

    Raises:
        UnknownNameError: there is no such device anywhere.
        SettingError: a budget is no size.
    """
    if max_memory is None:
        return _measure_free_memory()
    limits = _read_known_budgets(max_memory)
    if isinstance(max_memory, dict):
        max_memory.update({device: limits[read_device(device)] for device in max_memory})
    for device in limits:
        _warn_absent_device(device)
    return limits


def _measure_free_memory() -> dict[Device, int | float]:
    """Return the bytes that the drivers can give: transformers adds what torch's allocator keeps."""
    driver = devices.detect()
    driver.empty_cache()
    free: dict[Device, int | float] = {}
    for index in range(driver.count() if driver.type != CPU else 0):
        numbered = driver.torch_device(index).index is not None
        given = driver.get_memory_info(index)[0] - driver.cached_memory(index)
        free[index if numbered else driver.type] = max(0, given)
    # An accelerator without a number is a part of the processor: its memory must not be promised twice.
    if driver.type not in free or driver.type == CPU:
        free[CPU] = devices.get(CPU).get_memory_info()[0]
    return free


def _read_known_budgets(max_memory: Memory) -> dict[Device, int | float]:
    """Read budgets, maybe of another machine: indices need not exist here, names must be known."""
    limits = read_budgets(max_memory)
    for device in limits:
        _check_device_name(device)
    return limits


def _check_device_name(device: Any) -> None:
    """Raise UnknownNameError for a name that is no device."""
    if not isinstance(device, str) or device in (CPU, DISK):
        return
    kind, colon, number = device.partition(":")
    try:
        devices.get(kind)
        if colon and not number.isdecimal():
            raise DeviceError(f"{device!r} has no number after the colon")
    except DeviceError as error:
        device_names = ["cpu", "disk", *(driver.type for driver in devices.accelerators())]
        raise UnknownNameError(
            "device", device, device_names, why="an accelerator is a number, or named by its type"
        ) from error


def _warn_absent_device(device: Device) -> None:
    """Warn of an accelerator that this process does not have."""
    if device in (CPU, DISK):
        return
    if isinstance(device, str):
        kind, _, number = device.partition(":")
        driver, index = devices.get(kind), int(number or 0)
    else:
        driver, index = devices.detect(), device
    count = 0 if driver.type == CPU else driver.count()
    if not 0 <= index < count:
        seen = f"{count} {driver.type!r} device(s)" if count else "no accelerator"
        warn_user(f"max_memory has a budget for device {device!r}, and this process sees {seen}")


def get_balanced_memory(
    model: nn.Module,
    max_memory: Memory | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> dict[Device, int | float]:
    """Return budgets that spread a model evenly over the accelerators, for ``infer_auto_device_map``.

    Every accelerator but the last gets its share and 1.25 times the largest block or the mean layer, which
    ever is more, because blocks cannot be divided. Shares grow until they hold what the full budgets would.

    Args:
        model: on any device.
        max_memory: the most for each device; None is what is free, of a single accelerator 90 %.
        no_split_module_classes: names of classes whose modules stay whole.
        dtype: count floating point weights as if they were converted to it.
        special_dtypes: name of a weight -> its own dtype.
        low_zero: put as little as possible on the first accelerator, which has other work.
    """
    limits = get_max_memory() if max_memory is None else _read_known_budgets(max_memory)
    accelerators = [device for device in limits if device not in (CPU, DISK) and limits[device] > 0]
    if not accelerators:
        return limits
    first = accelerators[0]
    if len(accelerators) == 1:
        if max_memory is None:
            limits[first] = int(0.9 * limits[first])
        return limits
    part, rules = (
        build_module_tree(model, dtype, special_dtypes),
        PlacementRules(no_split=_as_class_names(no_split_module_classes)),
    )
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    share = sizes[""] // (len(accelerators) - 1 if low_zero else len(accelerators))
    blocks = [sizes.get(each.name, 0) for each in part.walk() if each.name and each.kind in rules.no_split]
    spare = int(1.25 * max(*blocks, _mean_layer(sizes), 0))
    full = _offloaded_bytes(part, limits, rules)
    for doubled in range(_DOUBLINGS):
        extra = spare * 2**doubled
        capped = {**limits, **{device: min(limits[device], share + extra) for device in accelerators[:-1]}}
        if low_zero:
            rest = sizes[""] - sum(capped[device] for device in accelerators[1:])
            capped[first] = min(limits[first], max(0, rest) + extra - spare)
        if full is None or (_offloaded_bytes(part, capped, rules) or 0) <= full:
            return capped
    return limits


def _mean_layer(sizes: Mapping[str, int]) -> int:
    """Return the mean bytes of the modules that hold tensors and no modules that do."""
    tensors = set(get_module_leaves(sizes))
    leaves = get_module_leaves({name: size for name, size in sizes.items() if name not in tensors})
    return sum(sizes[name] for name in leaves) // max(len(leaves), 1)


def _offloaded_bytes(part: ModuleNode, limits: Memory, rules: PlacementRules) -> int | None:
    """Return the bytes that a placement leaves on the CPU and the disk; None where there is none."""
    try:
        plan = plan_placement(part, limits, rules)
    except SettingError:
        return None  # the caller that plans the placement itself gets the error
    return sum(plan.sizes[name] for name in plan.offloaded)


def _as_class_names(names: Iterable[str] | str | None) -> frozenset[str]:
    return frozenset([names] if isinstance(names, str) else names or ())


# --- maps ---------------------------------------------------------------------------------------------------


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Memory | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Device]:
    """Infer a device map: accelerators are filled in order, then the CPU, then the disk.

    Args:
        model: on any device; the meta device is enough.
        max_memory: device -> bytes or a text such as ``"10GB"``; None is what is free on this machine.
            Numbers need not be here: the plan may be for another machine.
        no_split_module_classes: names of classes whose modules stay on one device.
        dtype: count floating point weights as if they were converted to it.
        special_dtypes: name of a weight -> its own dtype.
        verbose: print the plan.
        clean_result: name a module where all of it has one home, not its parts.
        offload_buffers: buffers of modules on the CPU or the disk are brought in with their weights, and
            take no room on the accelerator meanwhile.
        fallback_allocation: where a block does not fit what is left of an accelerator, go on with smaller
            ones behind it.

    Raises:
        SettingError: there is no such plan (see ``place``).
        DeviceError: a device is unknown.
    """
    limits = get_max_memory() if max_memory is None else _read_known_budgets(max_memory)
    closed = _as_class_names(no_split_module_classes)
    # A tree of many small values makes Python look through everything that torch has loaded, several times,
    # which takes longer than the plan. Nothing here is part of a cycle.
    with paused_gc():
        part = build_module_tree(model, dtype, special_dtypes)
        rules = PlacementRules(closed, offload_buffers, fallback_allocation, oversized_blocks=True)
        plan = plan_placement(part, limits, rules)
    if check_tied_parameters_in_config(model) and not tied_groups(part):
        _warn("the model says that weights are to be tied, and none are: call its tie_weights() first")
    if verbose:
        print(plan)
    unknown = [note for note in plan.notes if note.startswith("no module")]
    for note in plan.notes:
        # A list of classes serves all models of a library; only when none is known was it mistyped.
        if note not in unknown or len(unknown) == len(closed):
            _warn(note)
    if clean_result or not part.children or "" in plan.homes:
        return dict(plan.device_map)
    root_entries = [(weight.name, plan.homes[weight.name]) for weight in part.weights]
    return dict(root_entries + [pair for child in part.children for pair in merge_names(child, plan.homes)])


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def clean_device_map(device_map: MutableMapping[str, Device], module_name: str = "") -> Any:
    """Replace submodules by their module where they all have one device; changes the map in place.

    Args:
        device_map: it is changed, and returned.
        module_name: begin at this module.
    """
    root = _DeviceMapNameTree()
    for name, device in device_map.items():
        root.add(name, device)
    start, above = root, None
    for key in module_name.split(".") if module_name else ():
        above = start.home if start.home is not None else above
        if key not in start.children:
            return device_map
        start = start.children[key]
    start.merge_names(above)
    device_map.clear()
    device_map.update(root.flatten(""))
    return device_map


class _DeviceMapNameTree:
    """The names of a device map as a tree; ``home`` is the device of the name, or None."""

    def __init__(self) -> None:
        self.home: Device | None = None
        self.children: dict[str, _DeviceMapNameTree] = {}

    def add(self, name: str, device: Device) -> None:
        node = self
        for key in name.split(".") if name else ():
            node = node.children.setdefault(key, _DeviceMapNameTree())
        node.home = device

    def merge_names(self, above: Device | None) -> None:
        """Merge children with one device; ``above`` is the device of the nearest name above, or None."""
        covers = self.home if self.home is not None else above
        for child in self.children.values():
            child.merge_names(covers)
        if covers is not None:
            # Names that are not listed have that device: only entries that say the same can be dropped.
            remaining = {
                key: child for key, child in self.children.items() if child.children or child.home != covers
            }
            self.children = remaining
            return
        homes = [home for key, child in self.children.items() for _, home in child.flatten(key)]
        if len(homes) > 1 and len(set(homes)) == 1:
            self.home, self.children = homes[0], {}

    def flatten(self, name: str) -> Iterator[tuple[str, Device]]:
        if self.home is not None:
            yield name, self.home
        for key, child in self.children.items():
            yield from child.flatten(f"{name}.{key}" if name else key)


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Check that a device map gives every weight a device; warn of names that the model does not have.

    Raises:
        SettingError: a weight has no device.
        UnknownNameError: a device is unknown.
    """
    unmatched = describe_unmatched_names(model, device_map)
    homeless = [name for name, saved in _tensors(model) if saved and device_of(name, device_map) is None]
    if homeless:
        raise SettingError(
            f"the device map gives no device to {join_names(homeless)}",
            why=unmatched,
            fix='name them, or a module around them; "" names the whole model',
        )
    if unmatched:
        warn_user(unmatched)
    for device in device_map.values():
        _check_device_name(str(device) if isinstance(device, torch.device) else read_device(device))


def describe_unmatched_names(model: nn.Module, device_map: Mapping[str, Any]) -> str:
    """Return a sentence about the names in a device map that the model does not have; empty without them.

    Raises:
        SettingError: it is no map of names.
    """
    if not isinstance(device_map, Mapping) or not all(isinstance(name, str) for name in device_map):
        raise SettingError(
            f"device_map is {device_map!r}, and no dict of names of modules",
            why="it says where each module goes; 'auto' and the like are for load_checkpoint_and_dispatch",
            fix="device_map=infer_auto_device_map(model), or {'': 0} for all of it on one device",
        )
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    names |= {name for name, _ in _tensors(model)}
    unmatched = [name for name in device_map if name not in names]
    if not unmatched:
        return ""
    suggestions = [nearest(name, names) for name in unmatched[:_SHOWN]]
    near = ", ".join(repr(name) for name in dict.fromkeys(suggestions) if name)
    listed = join_names([repr(name) for name in unmatched])
    hint = f" (did you mean {near}?)" if near else ""
    return f"the model has no {listed}{hint}, which the device map names"


def join_names(names: Sequence[str]) -> str:
    """Return the first of these names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _tensors(model: nn.Module) -> Iterator[tuple[str, bool]]:
    """Return (name, True when a state dict has it) of every parameter and buffer, on every path to it."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        yield from ((prefix + key, True) for key, value in module._parameters.items() if value is not None)
        left_out = module._non_persistent_buffers_set
        for key, value in module._buffers.items():
            if value is not None:
                yield prefix + key, key not in left_out


def device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device of the longest name in the map that ``name`` begins with, or None."""
    while name not in device_map:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return device_map[name]


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]
) -> None:
    """Warn of tied weights that a device map puts on different devices, which unties them.

    Args:
        tied_params: groups of names, from ``find_tied_parameters``.
        device_map: the map.
    """
    for names in tied_params:
        homes = {name: device_of(name, device_map) for name in names}
        if len(set(homes.values())) > 1:
            listed = ", ".join(f"{name} on {home!r}" for name, home in homes.items())
            _warn(f"tied weights are on different devices, and will not be one weight any more: {listed}")


def fallback_allocate(
    modules: Modules,
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: Iterable[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, Any, list[tuple[str, Any]]]:
    """Return the first module that fits a limit with all it is tied to, outer modules before inner ones.

    Args:
        modules: (name, module) to choose from.
        module_sizes: bytes by name.
        size_limit: bytes, or a text such as ``"1GB"``.
        no_split_module_classes: names of classes that are not taken apart.
        tied_parameters: groups of names that are one weight.

    Returns:
        Its name, the module, and the modules that are left, a divided one replaced by its other parts; None
        twice and all modules when nothing fits.
    """
    limit, closed = read_budgets({CPU: size_limit})[CPU], _as_class_names(no_split_module_classes)
    # Each with the way to it: what has to be divided before it can be taken.
    waiting: list[tuple[str, Any, list[tuple[str, Any]]]] = [(name, module, []) for name, module in modules]
    for name, module, above in waiting:
        others: list[str] = []  # names outside of the module for weights that it has
        for group in tied_parameters or ():
            inside = {tied for tied in group if f"{tied}.".startswith(f"{name}.")}
            others += [tied for tied in group if inside and tied not in inside]
        size = module_sizes.get(name, 0)
        if others:
            size, _, _ = get_module_size_with_ties(others, size, module_sizes, modules)
        if size <= limit:
            return name, module, _without_module(list(modules), name, above)
        if type(module).__name__ not in closed:
            waiting += [(*each, [*above, (name, module)]) for each in list_children(name, module)]
    return None, None, list(modules)


def _without_module(
    modules: list[tuple[str, Any]], taken: str, above: Sequence[tuple[str, Any]]
) -> list[tuple[str, Any]]:
    for name, module in above:
        at = [each for each, _ in modules].index(name)
        modules[at : at + 1] = list_children(name, module)
    return [pair for pair in modules if pair[0] != taken]
