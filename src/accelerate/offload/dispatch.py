"""The public calls that spread a model over devices, memory and disk.

dispatch_model          by a device map
cpu_offload             all weights in memory, computing on a device
disk_offload            all weights in files
cpu_offload_with_hook   the whole model on the CPU, and on the device when it runs
offload_stats           what moving weights has cost
"""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from accelerate import device as devices
from accelerate.core import lazy
from accelerate.core.errors import DeviceError, SettingError
from accelerate.offload import maps
from accelerate.offload.align import CpuOffload, UserCpuOffloadHook
from accelerate.offload.assign import DeviceLike, as_device
from accelerate.offload.dispatched import hook_of
from accelerate.offload.folder import Folder
from accelerate.offload.hooks import (
    _accelerate_added_attributes,
    add_hook_to_module,
    remove_hook_from_submodules,
)
from accelerate.offload.pager import Pager, Stats
from accelerate.offload.source import OffloadError
from accelerate.offload.spread import (
    CPU,
    Home,
    Options,
    attach_all,
    make_blocks,
    place_residents,
    places_of,
    put_stand_ins,
    settle,
)
from accelerate.offload.tensor import OffloadedTensor
from accelerate.offload.values import Values

# ------------------------------------------------------------------------------------------------ devices


def _numbered(device: torch.device) -> torch.device:
    """The device with the number that its tensors show.

    Raises:
        DeviceError: it is unknown, or not here.
    """
    if device.type == "cpu":
        return CPU
    driver = devices.get(device.type)
    count = driver.count()
    if not 0 <= (device.index or 0) < count:
        raise DeviceError(
            f"device {str(device)!r} is not here",
            why=f"this process sees {count} {device.type!r} device(s)",
            fix="name devices that are here, 'cpu' and 'disk'",
        )
    if device.index is None:
        device = driver.torch_device(driver.current())
    return device


def home_of(value: Any) -> Home:
    """A value of a device map: an accelerator of this process with its number, ``"cpu"`` or ``"disk"``.

    Raises:
        DeviceError: the device is unknown, or not here.
        SettingError: it is no device.
    """
    if isinstance(value, torch.device):
        found: Any = value
    else:
        read = maps.read_device(value)
        if read == "disk":
            return "disk"
        if isinstance(read, int):
            found = _accelerator(read)
        else:
            devices.get(read.partition(":")[0])
            found = torch.device(read)
    if found.type == "meta":
        raise SettingError(
            "a device map cannot put anything on 'meta'", why="tensors there have no values", fix="use 'disk'"
        )
    return "cpu" if found.type == "cpu" else _numbered(found)


def _accelerator(index: int) -> torch.device:
    """The accelerator of a number."""
    driver = devices.detect()
    if driver.type == "cpu":
        raise DeviceError(
            f"device {index} is not here",
            why="a number is an accelerator, and this process sees none",
            fix="name devices that are here: 'cpu' and 'disk'",
        )
    return driver.torch_device(index)


def _main(homes: Mapping[str, Home], asked: DeviceLike | None) -> torch.device:
    """Where the parts on the CPU and on disk compute, and where inputs go."""
    if asked is not None:
        home = home_of(asked)
        return home if isinstance(home, torch.device) else CPU
    return next((home for home in homes.values() if isinstance(home, torch.device)), CPU)


# ------------------------------------------------------------------------------------------------ dispatching


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, str | int | torch.device],
    main_device: DeviceLike | None = None,
    state_dict: dict[str, torch.Tensor] | None = None,
    offload_dir: Folder | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Puts each part of a model where the map says, and makes the whole run as before.

    What is on an accelerator stays there. What is on ``"cpu"`` or ``"disk"`` runs on the main device: if that
    is the CPU, it is used where it lies (files are mapped, not read); if it is an accelerator, its weights
    are brought in blocks, each while the one before computes, and dropped after. A model that is dispatched
    again forgets how it was before.

    Args:
        model: the model; its weights may be on the meta device if ``state_dict``, ``offload_index`` or
            ``offload_dir`` have them.
        device_map: name of a module or tensor -> device; ``""`` is the whole model, the longest name counts.
        main_device: where parts on the CPU and disk run; the first accelerator of the map by default.
        state_dict: values of weights that are on the meta device.
        offload_dir: the folder for what is on disk and in no file yet, or where it was written before.
        offload_index: name -> where it lies in a safetensors file.
        offload_buffers: offload buffers too; otherwise they stay on the main device.
        skip_keys: names of arguments that are never moved between devices.
        preload_module_classes: classes of modules whose weights are brought as one.
        force_hooks: also hook a model that lies on one device, so that inputs are brought there.

    Returns:
        The model, with ``hf_device_map``.

    Raises:
        SettingError: the map leaves a weight without a device.
        UnknownNameError: the map names something that the model does not have.
        DeviceError: a device is unknown, or not here.
        PrepareError: something is to be on disk, and there is no folder for it.
        OffloadError: a weight has no values anywhere, or a file is gone.
    """
    check = lazy.patched("accelerate.big_modeling", "check_device_map", maps.check_device_map)
    check(model, device_map)
    homes: dict[str, Home] = {name: home_of(value) for name, value in device_map.items()}
    main = _main(homes, main_device)
    _check_values(model, values := Values(state_dict, offload_dir, offload_index))
    remove_dispatch(model)
    options = Options(
        main,
        offload_buffers,
        skip_keys,
        tuple(preload_module_classes or ()),
        force_hooks,
        {name: home if isinstance(home, torch.device) else main for name, home in homes.items()},
    )
    _spread(model, lambda name: maps.device_of(name, homes), values, options)
    model.hf_device_map = dict(device_map)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    return model


def _check_values(model: nn.Module, values: Values) -> None:
    """Raises OffloadError for weights that have no values anywhere."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    missing = values.missing(tensors)
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise OffloadError(
            f"there are no values for {shown}",
            why="they are on the meta device, and neither state_dict, offload_index nor offload_dir has them",
            fix="load the weights: load_checkpoint_and_dispatch(model, checkpoint, device_map=...)",
        )


def _spread(model: nn.Module, home: Callable[[str], Home | None], values: Values, options: Options) -> None:
    """Does it."""
    places = places_of(model, home, options.main)
    computing = {place.device for place in places if place.home is not None}
    settle([p for p in places if p.device == CPU], values, options)
    place_residents([p for p in places if p.device != CPU], values, options)
    paged = put_stand_ins([p for p in places if p.device != CPU], values)
    if not paged and len(computing) < 2 and not options.force:
        return
    pager, blocks = None, {}
    if paged:
        pager = Pager(options.main)
        blocks = make_blocks(model, pager, paged, options)
    attach_all(model, places, blocks, pager, values, options)
    _guard(model)


def remove_dispatch(model: nn.Module) -> None:
    """Takes off what an earlier dispatch has put on a model; hooks of others stay."""
    if hook_of(model) is None:
        return
    kept: list[tuple[nn.Module, list[Any]]] = []
    for module in model.modules():
        hook = vars(module).get("_hf_hook")
        others = [each for each in getattr(hook, "hooks", ()) if type(each) is not type(hook_of(model))]
        if hook_of(module) is not None and others:
            kept.append((module, others))
    remove_hook_from_submodules(model)
    for module, others in kept:
        for each in others:
            add_hook_to_module(module, each, append=True)


def _guard(model: nn.Module) -> None:
    """Moving a dispatched model by hand warns, or is refused."""
    for name in _accelerate_added_attributes:
        original = getattr(type(model), name, None)
        if original is not None:
            moving = functools.partial(_moving, model, name)
            setattr(model, name, functools.update_wrapper(moving, original))
    converting = functools.partial(_moving, model, "_apply")
    model._apply = converting  # half(), float() and their like come here


def _moving(model: nn.Module, how: str, /, *args: Any, **kwargs: Any) -> Any:
    """A model's ``to`` and its like, after it was dispatched.

    Raises:
        OffloadError: weights of it are offloaded.
    """
    if any(isinstance(p, OffloadedTensor) for p in model.parameters()):
        raise OffloadError(
            "You can't move a model that has some modules offloaded to cpu or disk.",
            why="its weights are brought to the device in turn, because they do not fit there together",
            fix="dispatch it by another device map, or first take off its hooks: "
            "remove_hook_from_submodules(model)",
        )
    if how != "_apply":
        warnings.warn("You shouldn't move a model that is dispatched using accelerate hooks.", stacklevel=2)
    return getattr(type(model), how)(model, *args, **kwargs)


# ------------------------------------------------------------------------------------------------ offloading


def _device_of_model(model: nn.Module, asked: DeviceLike | None) -> torch.device:
    if asked is None:
        first = next((p for p in model.parameters() if p.device.type != "meta"), None)
        return CPU if first is None else first.device
    return _numbered(as_device(asked))


def cpu_offload(
    model: nn.Module,
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    state_dict: dict[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keeps all weights of a model in (pinned) memory, and brings them to a device while they are needed.

    Args:
        model: the model.
        execution_device: where it computes; where its first parameter is by default. On the CPU all stays.
        offload_buffers: offload buffers too.
        state_dict: values of weights that are on the meta device.
        preload_module_classes: classes of modules whose weights are brought as one.

    Raises:
        DeviceError: the device is unknown, or not here.
        OffloadError: a weight has no values.
    """
    device = _device_of_model(model, execution_device)
    _check_values(model, values := Values(state_dict, None, None))
    remove_dispatch(model)
    options = Options(device, offload_buffers, whole=tuple(preload_module_classes or ()))
    _spread(model, lambda _: "cpu", values, options)
    return model


def disk_offload(
    model: nn.Module,
    offload_dir: Folder,
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keeps all weights of a model in files, and brings them to a device while they are needed.

    Args:
        model: the model.
        offload_dir: the folder of the files; weights are written to it once.
        execution_device: where it computes; where its first parameter is by default. On the CPU the files
            are mapped: weights are read when they are used.
        offload_buffers: offload buffers too.
        preload_module_classes: classes of modules whose weights are brought as one.

    Raises:
        DeviceError: the device is unknown, or not here.
        OffloadError: the folder cannot be written, or a weight has no values.
    """
    device = _device_of_model(model, execution_device)
    _check_values(model, values := Values(None, offload_dir, None))
    remove_dispatch(model)
    options = Options(device, offload_buffers, whole=tuple(preload_module_classes or ()))
    _spread(model, lambda _: "disk", values, options)
    return model


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: int | str | torch.device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keeps a model on the CPU until it runs; then it stays on the device until it is told to leave.

    For models that run in turn, each of which fits: faster than ``cpu_offload``, with more memory.

    Args:
        model: the model.
        execution_device: where it computes; the best device of this machine by default.
        prev_module_hook: the hook of the model that runs before this one: it leaves when this one comes.

    Returns:
        The model, and a hook with ``offload()`` and ``remove()``.
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def offload_stats(model: nn.Module) -> Stats | None:
    """What bringing the weights of a dispatched model has cost so far; None if nothing is brought.

    ``print(offload_stats(model))`` after a forward shows the bytes that crossed, and how long the device
    waited for them. If it waits most of the time, the bus sets the pace: only fewer bytes help.
    """
    hook = hook_of(model)
    return None if hook is None or hook._pager is None else hook._pager.stats
