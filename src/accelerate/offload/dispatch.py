"""The public calls that spread a model over devices, memory and disk.

dispatch_model          by a device map
cpu_offload             all weights in memory, computing on a device
disk_offload            all weights in files
cpu_offload_with_hook   the whole model on the CPU, and on the device when it runs
offload_stats           what moving weights has cost
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn

from accelerate import device as devices
from accelerate.core import lazy_names
from accelerate.core.errors import DeviceError, OffloadError, SettingError
from accelerate.offload import device_maps
from accelerate.offload.align_hook import attach_align_device_hook_on_blocks
from accelerate.offload.dispatch_hook import hook_of
from accelerate.offload.dispatch_steps import (
    CPU,
    DispatchOptions,
    Home,
    attach_hooks,
    list_tensor_slots,
    make_blocks,
    place_on_cpu,
    place_resident_tensors,
    read_folder_buffers,
    replace_with_stand_ins,
    show_resident_hooks,
)
from accelerate.offload.hooks import (
    ModelHook,
    MoveGuard,
    _accelerate_added_attributes,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelerate.offload.module_input_output import move_arguments
from accelerate.offload.module_tensors import DeviceLike, as_device, tensor_slots
from accelerate.offload.offload_folder import Folder, OffloadedWeightsLoader
from accelerate.offload.offloaded_tensor import OffloadedTensor, cast_source, make_stand_in
from accelerate.offload.pager import Pager, PagerStats
from accelerate.offload.weight_store import WeightStore

# ------------------------------------------------------------------------------------------------ devices

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def _with_index(device: torch.device) -> torch.device:
    """Return the device with the index that its tensors report.

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
    # Also of a device that is named without one: a tensor on "mps" reports mps:0.
    return device if device.index is not None else torch.device(device.type, driver.current())


def resolve_home(value: Any) -> Home:
    """Return the home for a value of a device map: an accelerator with its index, ``"cpu"`` or ``"disk"``.

    Raises:
        DeviceError: the device is unknown, or not here.
        SettingError: it is no device.
    """
    if isinstance(value, torch.device):
        torch_device: Any = value
    elif (read := device_maps.read_device(value)) == "disk":
        return "disk"
    elif isinstance(read, int):
        driver = devices.detect()
        if driver.type == "cpu":
            raise DeviceError(
                f"device {read} is not here",
                why="a number is an accelerator, and this process sees none",
                fix="name devices that are here: 'cpu' and 'disk'",
            )
        torch_device = driver.torch_device(read)
    else:
        devices.get(read.partition(":")[0])
        torch_device = torch.device(read)
    if torch_device.type == "meta":
        raise SettingError(
            "a device map cannot put anything on 'meta'", why="tensors there have no values", fix="use 'disk'"
        )
    return "cpu" if torch_device.type == "cpu" else _with_index(torch_device)


# ------------------------------------------------------------------------------------------------ dispatching


@torch.inference_mode(False)  # weights that are made in it could not be trained later
@torch.no_grad()
def dispatch_model(
    model: ModuleT,
    device_map: Mapping[str, str | int | torch.device],
    main_device: DeviceLike | None = None,
    state_dict: dict[str, torch.Tensor] | None = None,
    offload_dir: Folder | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> ModuleT:
    """Dispatch a model: put each module on the device of the map, and let the whole run as before.

    What is on an accelerator stays there. What is on ``"cpu"`` or ``"disk"`` runs on the main device: if that
    is the CPU, it is used in place (files are mapped, not read); if it is an accelerator, its weights
    are copied in blocks, each prefetched while the one before computes, and dropped after. A model dispatched
    again loses its earlier hooks.

    Args:
        model: the model; its weights may be on the meta device if ``state_dict``, ``offload_index`` or
            ``offload_dir`` have them.
        device_map: name of a module or tensor -> device; ``""`` is the whole model, the longest name counts.
            Names that the model does not have are told in a warning.
        main_device: where parts on the CPU and disk run; the first accelerator of the map by default.
        state_dict: values of offloaded weights, before the model's own, and of those on the meta device.
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
        DeviceError: a device is unknown, or not here.
        PrepareError: something is to be on disk, and there is no folder for it.
        OffloadError: a weight has no values anywhere, or a file is gone.
    """
    check = lazy_names.get_override(
        "accelerate.big_modeling", "check_device_map", device_maps.check_device_map
    )
    check(model, device_map)
    homes: dict[str, Home] = {name: resolve_home(value) for name, value in device_map.items()}
    # It computes modules on the CPU and on disk, and gets the inputs.
    candidates = homes.values() if main_device is None else [resolve_home(main_device)]
    main = next((home for home in candidates if isinstance(home, torch.device)), CPU)
    values = WeightStore(state_dict, offload_dir, offload_index)
    values.check_complete(model)
    remove_dispatch(model)
    # Clients that name several devices give inputs on the CPU, also where only one gets weights. Devices are
    # counted as they are written, as under 1.x: 0 and "cuda:0" are two.
    hooks = force_hooks or len(set(device_map.values())) > 1
    options = DispatchOptions(
        main,
        offload_buffers,
        skip_keys,
        tuple(preload_module_classes or ()),
        # Where the CPU computes what is on disk, inputs may be on an accelerator.
        force_hooks
        or (hooks and main.type != "cpu")
        or ("disk" in homes.values() and devices.detect().type != "cpu"),
        {name: home if isinstance(home, torch.device) else main for name, home in homes.items()},
    )
    attach = lazy_names.get_override(
        "accelerate.big_modeling", "attach_align_device_hook_on_blocks", attach_align_device_hook_on_blocks
    )
    if attach is attach_align_device_hook_on_blocks or not hooks:
        _place_and_hook(model, lambda name: device_maps.device_of(name, homes), values, options)
    else:
        whole = model.state_dict() if state_dict is None else state_dict
        state = {name: value for name, value in whole.items() if not value.is_meta}
        folder = None if len(state) == len(whole) else offload_dir
        _attach_replaced(attach, model, homes, OffloadedWeightsLoader(state, folder, offload_index), options)
    model.hf_device_map = dict(device_map)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    return model


def _attach_replaced(
    attach: Callable[..., None],
    model: nn.Module,
    homes: Mapping[str, Home],
    weights: OffloadedWeightsLoader,
    options: DispatchOptions,
) -> None:
    """Call the ``attach_align_device_hook_on_blocks`` that a program has put in place, with 1.x's arguments.

    The one of ms-swift does nothing, so that the weights stay where they are.
    """
    attach(
        model,
        execution_device=options.named_devices,
        offload={
            name: home == "disk" or (home == "cpu" != options.main_device.type)
            for name, home in homes.items()
        },
        offload_buffers=options.offload_buffers,
        weights_map=weights,
        skip_keys=options.skip_keys,
        preload_module_classes=options.preload_classes or None,
        tied_params_map={},
    )


def _place_and_hook(
    model: nn.Module, home: Callable[[str], Home | None], values: WeightStore, options: DispatchOptions
) -> None:
    """Place every tensor, make blocks of the offloaded ones, and attach hooks."""
    slots = list_tensor_slots(model, home, options.main_device)
    read_folder_buffers(slots, values, options)
    for slot in slots:
        if slot.home in ("cpu", "disk") or slot.tensor.is_meta:
            values.check_shape(slot.name, slot.tensor)
    computing = {slot.device for slot in slots if slot.home is not None}
    place_on_cpu([p for p in slots if p.device == CPU], values, options)
    paged = place_resident_tensors([p for p in slots if p.device != CPU], values, options)
    replace_with_stand_ins(paged, values)
    if not paged and len(computing) < 2 and not options.force_hooks:
        if options.is_offload or any(slot.home == "disk" for slot in slots):
            show_resident_hooks(model, options)
        return
    pager, blocks = None, {}
    if paged:
        pager = Pager(options.main_device)
        blocks = make_blocks(model, pager, paged, options)
    attach_hooks(model, slots, blocks, pager, values, options)
    _guard_moves(model)


def remove_dispatch(model: nn.Module) -> None:
    """Remove what an earlier dispatch, or ``cpu_offload_with_hook``, has added; hooks of others stay."""
    if type(vars(model).get("_hf_hook")) is CpuOffload:  # it would move the whole model to its device
        remove_hook_from_module(model)
    if hook_of(model) is None:
        return
    foreign_hooks: list[tuple[nn.Module, list[Any]]] = []
    for module in model.modules():
        hook = vars(module).get("_hf_hook")
        others = [each for each in getattr(hook, "hooks", ()) if type(each) is not type(hook_of(model))]
        if hook_of(module) is not None and others:
            foreign_hooks.append((module, others))
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, OffloadedTensor):  # not back to a device that may be too small for all of them
            vars(tensor).pop("_original_device", None)
    remove_hook_from_submodules(model)
    for module, others in foreign_hooks:
        for each in others:
            add_hook_to_module(module, each, append=True)


def _guard_moves(model: nn.Module) -> None:
    """Replace ``to`` and its like: moving a dispatched model by hand warns, or is refused."""
    for name in ("_apply", *_accelerate_added_attributes):  # half(), float() and their like call _apply
        if hasattr(nn.Module, name):  # otherwise one of the model's own
            moving = MoveGuard(_refuse_or_move, model, name)
            setattr(model, name, functools.update_wrapper(moving, getattr(type(model), name)))


def _refuse_or_move(model: nn.Module, how: str, /, *args: Any, **kwargs: Any) -> Any:
    """Warn and move, or refuse to move, a dispatched model; one that is only cast is cast.

    Raises:
        OffloadError: weights of it are offloaded.
    """
    is_moved = _is_moved(model, how, args, kwargs)
    if is_moved and any(isinstance(p, OffloadedTensor) for p in model.parameters()):
        raise OffloadError(
            "the model cannot be moved: some of its weights are offloaded",
            why="its weights are brought to the device in turn, because they do not fit there together",
            fix="dispatch it by another device map, or first take off its hooks: "
            "remove_hook_from_submodules(model)",
        )
    if is_moved and how != "_apply":
        warnings.warn(
            "this model was dispatched: its device map says where each module is, and moving it undoes that",
            stacklevel=2,
        )
    if how == "_apply" and not is_moved:
        return _cast(model, *args, **kwargs)
    return getattr(type(model), how)(model, *args, **kwargs)


def _cast(model: nn.Module, cast: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Cast a model. Offloaded weights stay where they are, and are cast when they are read."""
    slots = tensor_slots(model.modules())
    offloaded = [slot for slot in slots if isinstance(slot[2], OffloadedTensor)]
    # A buffer becomes another tensor.
    resident = [
        (t, name, vars(w)["_original_device"]) for t, name, w in slots if "_original_device" in vars(w)
    ]
    try:
        for table, name, _ in offloaded:
            table[name] = None
        return type(model)._apply(model, cast, recurse)
    finally:
        casts: dict[int, Any] = {}
        for table, name, weight in offloaded:
            if id(weight) not in casts:
                dtype = cast(torch.empty(0, dtype=weight.dtype)).dtype
                same = dtype == weight.dtype
                source = cast_source(weight.source, dtype)
                casts[id(weight)] = weight if same else make_stand_in(weight, source, weight.execution_device)
            table[name] = casts[id(weight)]
        for table, name, device in resident:
            vars(table[name])["_original_device"] = device


def _is_moved(model: nn.Module, how: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True for a call that changes devices, and not only dtypes or the order in memory."""
    if how == "to":
        given = [*args, kwargs.get("device")]
        return any(type(each) is int or isinstance(each, str | torch.device | torch.Tensor) for each in given)
    hook = hook_of(model)
    if how != "_apply" or hook is None:
        return True
    main = as_device(hook.execution_device or 0)
    places = {main} if hook._mover is None else hook._mover.devices
    return any(args[0](torch.empty(0, device=device)).device != device for device in places)


# ------------------------------------------------------------------------------------------------ offloading


@torch.inference_mode(False)  # weights that are made in it could not be trained later
@torch.no_grad()
def _offload_all(
    model: ModuleT,
    home: Home,
    execution_device: DeviceLike | None,
    offload_buffers: bool,
    preload_module_classes: list[str] | None,
    state_dict: dict[str, torch.Tensor] | None = None,
    folder: Folder | None = None,
) -> ModuleT:
    """Offload all weights of a model to the CPU or to disk."""
    # A program that reads the device of a weight gets "meta" of one that is offloaded already.
    before = [p.execution_device for p in model.parameters() if isinstance(p, OffloadedTensor)]
    if execution_device is None:
        device = next(chain((p.device for p in model.parameters() if p.device.type != "meta"), before), CPU)
    else:
        device = _with_index(as_device(execution_device))
        device = before[0] if before and device.type == "meta" else device
    values = WeightStore(state_dict, folder, None)
    values.check_complete(model)
    remove_dispatch(model)
    options = DispatchOptions(
        device,
        offload_buffers,
        preload_classes=tuple(preload_module_classes or ()),
        force_hooks=devices.detect().type != "cpu",  # inputs may be on an accelerator
        is_offload=True,
    )
    _place_and_hook(model, lambda _: home, values, options)
    return model


def cpu_offload(
    model: ModuleT,
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    state_dict: dict[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> ModuleT:
    """Keep all weights of a model in (pinned) host memory, and copy them to a device while they are needed.

    Args:
        model: the model.
        execution_device: where it computes; where its first parameter is by default. On the CPU all stays.
        offload_buffers: offload buffers too.
        state_dict: values of offloaded weights, before the model's own, and of those on the meta device.
        preload_module_classes: classes of modules whose weights are brought as one.

    Raises:
        DeviceError: the device is unknown, or not here.
        OffloadError: a weight has no values.
    """
    return _offload_all(
        model, "cpu", execution_device, offload_buffers, preload_module_classes, state_dict=state_dict
    )


def disk_offload(
    model: ModuleT,
    offload_dir: Folder,
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> ModuleT:
    """Keep all weights of a model in files, and copy them to a device while they are needed.

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
    return _offload_all(
        model, "disk", execution_device, offload_buffers, preload_module_classes, folder=offload_dir
    )


class CpuOffload(ModelHook):
    """Keep a whole module on the CPU until its forward, which moves it to the device. It stays there.

    Args:
        execution_device: where it computes; the best device of this machine by default.
        prev_module_hook: what ``cpu_offload_with_hook`` returned for the model that ran before: that one
            makes room first.
    """

    def __init__(
        self, execution_device: DeviceLike | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = (
            devices.detect().torch_device() if execution_device is None else execution_device
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the module to the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Offload the model before, and move this one and its inputs to the device."""
        device, before = as_device(self.execution_device), self.prev_module_hook
        # ``Module.to`` takes microseconds for each parameter that is there already, and emptying the cache
        # waits for the device: not in every step of a diffusion.
        if before is not None and device.type == "cpu":
            before.offload()
        elif before is not None and any(t.device.type != "cpu" for t in _tensors_of(before.model)):
            before.offload()
            devices.get(device.type).empty_cache()
        if any(t.device != device for t in _tensors_of(module)):
            module.to(device)
        return move_arguments(args, device), move_arguments(kwargs, device)


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    return chain(model.parameters(), model.buffers())


class UserCpuOffloadHook:
    """The handle that ``cpu_offload_with_hook`` returns: it moves a model off the device.

    Args:
        model: the model.
        hook: its hook.
    """

    model: nn.Module
    hook: ModelHook

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model, self.hook = model, hook

    def offload(self) -> None:
        """Move the model to the CPU now."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: int | str | torch.device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model on the CPU until it runs; then it stays on the device until ``offload()`` is called.

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


def offload_stats(model: nn.Module) -> PagerStats | None:
    """Return the statistics of a dispatched model's weight copies; None if nothing is offloaded.

    ``print(offload_stats(model))`` after a forward shows the bytes that crossed, and how long the device
    waited for them. If it waits most of the time, the bus sets the pace: only fewer bytes help.
    """
    hook = hook_of(model)
    return None if hook is None or hook._pager is None else hook._pager.stats
