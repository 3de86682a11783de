"""Setting tensors of modules one by one, and materializing offloaded ones for a while."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate import device as devices
from accelerate.core.errors import OffloadError, PrepareError, nearest, warn_user
from accelerate.offload.module_sizes import as_torch_dtype
from accelerate.offload.offload_folder import load_offloaded_weight
from accelerate.offload.offloaded_tensor import (
    FILE_MAPPING,
    HostMemoryWeightSource,
    OffloadedTensor,
    TensorSource,
    cast_source,
    has_same_bytes,
    make_stand_in,
    set_file_source,
    source_of,
    version_of,
)

TiedMap = dict[int, dict[torch.device, torch.Tensor]]
DeviceLike = int | str | torch.device
_DEVICES: dict[DeviceLike, torch.device] = {}  # asked at each forward
# Attributes that are those of one stand-in or tensor: others in its place do not get them.
_NOT_COPIED = ("source", "execution_device", "_kind", "_is_param", FILE_MAPPING)
# Attributes of quantized weights that move with them.
_QUANTIZATION_STATE = ("quant_state", "SCB")


# ------------------------------------------------------------------------------------------------ devices


def as_device(device: DeviceLike) -> torch.device:
    """Return a ``torch.device``: a number is one of the accelerators, ``cpu:0`` is ``cpu``."""
    torch_device = _DEVICES.get(device)
    if torch_device is None:
        if isinstance(device, int):
            current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            torch_device = torch.device(current.type, device) if current else torch.device(device)
        else:
            torch_device = torch.device(device)
            torch_device = (
                torch.device(torch_device.type) if torch_device.type in ("cpu", "meta") else torch_device
            )
        _DEVICES[device] = torch_device
    return torch_device


def check_device_same(first_device: DeviceLike, second_device: DeviceLike) -> bool:
    """Return True when two devices are the same: a type without an index is its current device.

    Where there is no device of that type, index 0 is taken for the current one.
    """
    first, second = as_device(first_device), as_device(second_device)
    if first == second or first.type != second.type:
        return first == second
    if None in (first.index, second.index):
        driver = devices.get(first.type)
        current = driver.current() if driver.count() else 0
        return current in (first.index, second.index)
    return False


# ------------------------------------------------------------------------------------------------ one tensor


def owner_of(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """Return (the module that holds a tensor directly, the tensor's own name there).

    Raises:
        PrepareError: there is no such tensor; the nearest name is suggested.
    """
    path, _, name = tensor_name.rpartition(".")
    owner: Any = module
    for part in path.split(".") if path else ():
        owner = getattr(owner, part, None)
    if isinstance(owner, nn.Module) and (name in owner._parameters or name in owner._buffers):
        return owner, name
    names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    near = nearest(tensor_name, names)
    raise PrepareError(
        f"{type(module).__name__} has no parameter or buffer {tensor_name!r}",
        fix=f"did you mean {near!r}?" if near else "",
    )


def has_own_tensors(module: nn.Module) -> bool:
    """Return True when the module itself, not a submodule, holds a parameter or buffer."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None for tensor in tensors)


def table_of(owner: nn.Module, name: str) -> dict[str, Any]:
    """The dictionary of a module in which a tensor stands: its parameters or its buffers."""
    return owner._parameters if name in owner._parameters else owner._buffers


def replace_tensor(owner: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor in the place of one that the module is to hold no longer."""
    if isinstance(owner, nn.RNNBase):  # it has a list of its weights too, which follows assignments
        setattr(owner, name, tensor)
    else:
        table_of(owner, name)[name] = tensor


def tensor_slots(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str, Any]]:
    """Return (table, name, tensor) of the parameters and buffers that modules hold themselves."""
    return [
        (table, name, tensor)
        for module in modules
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]


def as_parameter(value: torch.Tensor, old: torch.Tensor, fp16_statistics: Any = None) -> torch.Tensor:
    """``value`` as a parameter of the class of ``old``, with what others have set on that one.

    Args:
        value: on the device where it is wanted.
        old: the parameter whose place it takes; of a quantised one the class and its state are kept.
        fp16_statistics: the scales that go with ``value``, for classes that have ``SCB``.
    """
    attributes = vars(old)
    kind = attributes.get("_kind", nn.Parameter) if isinstance(old, OffloadedTensor) else type(old)
    requires_grad = old.requires_grad
    if isinstance(value, nn.Parameter) and type(value) is kind and value.requires_grad == requires_grad:
        return value
    of_its_own = type(value) not in (torch.Tensor, nn.Parameter, kind) or not issubclass(kind, nn.Parameter)
    with torch.inference_mode(value.is_inference()):  # elsewhere torch refuses that it requires gradients
        if of_its_own or kind is nn.Parameter:
            parameter: torch.Tensor = nn.Parameter(value.detach(), requires_grad=requires_grad)
        else:
            parameter = torch.Tensor._make_subclass(kind, value.detach(), requires_grad)
    # Of a class that wraps tensors, those are attributes too, which the value has where it is wanted.
    kept = vars(value).keys() if of_its_own else ()
    for name, attribute in attributes.items():
        if name in _NOT_COPIED or name in kept:
            continue
        if name == "CB":  # the values themselves, under the name that 8-bit layers read
            attribute = parameter.data if value.dtype == torch.int8 else None
        elif name in _QUANTIZATION_STATE:
            attribute = _move_quant_state(attribute, value.device)
        setattr(parameter, name, attribute)
    if fp16_statistics is not None and hasattr(parameter, "SCB"):
        parameter.SCB = fp16_statistics.to(value.device)  # pyright: ignore[reportAttributeAccessIssue]
    return parameter


def with_values(old: torch.Tensor, value: torch.Tensor, source: TensorSource | None = None) -> torch.Tensor:
    """Return a parameter or buffer like ``old`` with other values.

    Args:
        old: the tensor that it replaces.
        value: its values, which it shares.
        source: the file that they are mapped from.
    """
    tensor: Any = as_parameter(value, old) if isinstance(old, nn.Parameter) else value.detach()
    if source is not None and not source.in_memory:
        set_file_source(tensor, source)
    return tensor


def _move_quant_state(state: Any, device: torch.device) -> Any:
    """Return the state of a quantized tensor on another device; it moves in place, so a copy moves."""
    if isinstance(state, torch.Tensor):
        return state.to(device)
    if not hasattr(state, "to"):
        return state
    twin = copy.copy(state)
    return twin.to(device) or twin


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: DeviceLike,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: Any = None,
    tied_params_map: TiedMap | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put a parameter or buffer of a module on a device, with its own values or others.

    Args:
        module: the module, or one around it.
        tensor_name: ``"weight"``, or a path to it.
        device: where to; ``"meta"`` drops the values.
        value: other values.
        dtype: of the new tensor, if it is floating point; otherwise other values get that of the old one.
            A weight that keeps its values, or that is trained, is not converted to integers, and a warning
            says so.
        fp16_statistics: the scales that go with 8-bit values.
        tied_params_map: address of a tensor -> device -> its copy there. A tied tensor is copied once.
        non_blocking: do not wait for the copy.
        clear_cache: give memory of an accelerator that this frees back to it.

    Raises:
        PrepareError: there is no such tensor, it is on the meta device and has no values, or the values have
            another shape.
    """
    owner, name = owner_of(module, tensor_name)
    table = table_of(owner, name)
    old: torch.Tensor = table[name]
    target = as_device(device)
    has_value = value is not None
    source = source_of(old)
    new: torch.Tensor = old
    if has_value:
        given = value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")
        new = _check_values(tensor_name, old, given, dtype)
    if not has_value and source is not None and target.type != "meta":
        new = source.read(target)
    if not has_value and old.is_meta and target.type != "meta":
        raise PrepareError(
            f"{tensor_name} is on the meta device, and has no values to put on {target}",
            fix="pass them as value",
        )
    if not has_value and dtype is not None and old.is_floating_point():
        new = _cast_own_values(tensor_name, new, target, as_torch_dtype(dtype))
    address = address_of(new if has_value else old)
    shared = (tied_params_map or {}).get(address) if target.type != "meta" else None
    with torch.no_grad():
        if shared is not None and target in shared:
            replace_tensor(owner, name, shared[target])
            return
        moved = new if check_device_same(new.device, target) else new.to(target, non_blocking=non_blocking)
        if moved is not old:
            is_parameter = name in owner._parameters
            new = as_parameter(moved, old, fp16_statistics) if is_parameter else moved.detach()
            replace_tensor(owner, name, new)
    if shared is not None:
        shared[target] = table[name]
    if clear_cache and old.device.type not in ("cpu", "meta") and old.device != target:
        devices.get(old.device.type).empty_cache()


def _check_values(
    name: str, old: torch.Tensor, value: torch.Tensor, dtype: str | torch.dtype | None
) -> torch.Tensor:
    """Return values in the dtype that they get.

    Raises:
        PrepareError: they have another shape than the tensor they are for.
    """
    if old.shape != value.shape and not hasattr(old, "quant_state"):
        raise PrepareError(
            f"{name} has the shape {list(old.shape)}, and the values for it have {list(value.shape)}",
            why="they belong to another model, or to another size of it",
        )
    if dtype is None:
        return value.to(old.dtype)
    return value.to(as_torch_dtype(dtype)) if value.is_floating_point() else value


def _cast_own_values(
    name: str, value: torch.Tensor, target: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return floating point values of a tensor in another dtype; leave them where it would truncate them."""
    is_kept = value.requires_grad or target.type != "meta"
    if is_kept and not (dtype.is_floating_point or dtype.is_complex):
        warn_user(f"{name} stays {value.dtype}: its values were not truncated to {dtype}; pass a value")
        return value
    return value.to(dtype)


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the data; 0 for tensors that have none of their own."""
    if tensor.device.type == "meta":
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a wrapper around other tensors: sharded, quantized
        return 0


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the address, shape and strides of the data; empty for tensors that have none of their own."""
    address = address_of(tensor)
    return (address, tensor.shape, tensor.stride()) if address else ()


# ------------------------------------------------------------------------------------------ materialized


class MaterializedTensor:
    """An offloaded tensor whose values are in modules for a while.

    Hooks, blocks of a pager and ``align_module_device`` all put values in and take them out by this.

    Attributes:
        stand_in: what was in the modules, and is put back.
        slots: (module, name) of the tables that it was in.
        tensor: the values, which are there now.
    """

    __slots__ = ("memory", "slots", "stand_in", "tensor", "version")

    def __init__(
        self, stand_in: OffloadedTensor, slots: Sequence[tuple[nn.Module, str]], tensor: torch.Tensor
    ) -> None:
        self.slots, self.tensor = slots, tensor
        self.use_stand_in(stand_in)
        for owner, name in slots:
            replace_tensor(owner, name, tensor)

    def use_stand_in(self, stand_in: OffloadedTensor) -> None:
        """Put this stand-in back later; its source has the values as they are now."""
        self.stand_in = stand_in
        self.version, self.memory = version_of(self.tensor), _memory_of(self.tensor)

    def restore_stand_in(self, compare: bool = False) -> int:
        """Put the stand-in back; a tensor that somebody has set meanwhile stays.

        Args:
            compare: look for writes through ``.data`` too, which torch does not count. The stand-in gets the
                dtype that the weight was cast to in this way.

        Returns:
            The bytes that were written back, because they were changed in place.

        Raises:
            OffloadError: they were changed, and they are stored in a file.
        """
        before, dtype, is_replaced = self.stand_in, self.tensor.dtype, True
        if compare and dtype != before.dtype and dtype.is_floating_point and before.is_floating_point():
            self.stand_in = make_stand_in(before, cast_source(before.source, dtype), before.execution_device)
        for owner, name in self.slots:
            table = table_of(owner, name)
            if name in table and table[name] is self.tensor:  # TorchScript's tables have no get()
                replace_tensor(owner, name, self.stand_in)
                is_replaced = False
        source, values = self.stand_in.source, self.tensor.detach()
        if is_replaced or not (self._is_changed(source) or (compare and type(values) is torch.Tensor)):
            return 0
        with torch.inference_mode(False), torch.no_grad():
            if values.device.type == "cpu" and _memory_of(source.host_tensor()) == _memory_of(values):
                return 0  # used in place
            if self.tensor.shape != source.shape:
                raise OffloadError(
                    f"{source.name} was given the shape {list(values.shape)} while its values were here",
                    why=f"it is offloaded, and has its place in memory as {list(source.shape)}",
                    fix="take the hooks off, remove_hook_from_submodules(model), change it, and dispatch "
                    "again",
                )
            values = values.to(source.dtype)
            # An operation in place may leave the values as they were.
            if (compare or not source.in_memory) and has_same_bytes(values.cpu(), source.host_tensor()):
                return 0
            # On the CPU it may be the source's memory, with other strides.
            source.write(values.clone() if values.device.type == "cpu" else values)
            source.count_change()
        return source.nbytes

    def _is_changed(self, source: TensorSource) -> bool:
        """Return True when torch has counted a change, or the tensor has other memory in the same dtype.

        In another dtype it is the tensor of before, which a hook has cast for the forward.
        """
        # Torch changes running statistics in place without counting a version.
        is_statistic = any(
            name in ("running_mean", "running_var")
            and owner.training
            and bool(getattr(owner, "track_running_stats", False))
            for owner, name in self.slots
        )
        if is_statistic or version_of(self.tensor) != self.version:
            return True
        if self.tensor.dtype != source.dtype or _memory_of(self.tensor) == self.memory:
            return False
        # cuDNN moves all weights of a recurrent layer into one storage, and changes none.
        in_one_storage = self.tensor.untyped_storage().nbytes() > self.tensor.nbytes
        return not (in_one_storage and any(isinstance(owner, nn.RNNBase) for owner, _ in self.slots))


def restore_stand_ins(materialized: list[MaterializedTensor], compare: bool = False) -> int:
    """Put all stand-ins back, and empty the list; the first error is raised after the last one.

    Args:
        materialized: the list.
        compare: look for writes through ``.data`` too: reads the values once more.

    Returns:
        The bytes that were written back.

    Raises:
        OffloadError: values were changed in place that are stored in a file.
    """
    refused: list[OffloadError] = []
    written = 0
    while materialized:
        each = materialized.pop()
        try:
            written += each.restore_stand_in(compare)
        except OffloadError as error:
            refused.append(error)
    if refused:
        raise refused[0]
    return written


def materialize(
    owner: nn.Module, name: str, stand_in: OffloadedTensor, value: torch.Tensor, fp16_statistics: Any = None
) -> MaterializedTensor:
    """Put ``value`` into the slot of one module, as a parameter if it is one of its parameters."""
    if name in owner._parameters:
        value = as_parameter(value, stand_in, fp16_statistics)
    return MaterializedTensor(stand_in, [(owner, name)], value)


def _offloading_hook(module: nn.Module) -> Any:
    """Return the hook that materializes the module's weights, or None."""
    hook = vars(module).get("_hf_hook")
    hooks = getattr(hook, "hooks", (hook,))
    return next((each for each in hooks if getattr(each, "offload", False) is True), None)


def has_offloaded_params(module: nn.Module) -> bool:
    """Return True when the module's own weights are offloaded between forwards."""
    if _offloading_hook(module) is not None:
        return True
    return any(isinstance(tensor, OffloadedTensor) for tensor in module._parameters.values())


@contextmanager
def align_module_device(
    module: nn.Module, execution_device: DeviceLike | None = None
) -> Generator[None, None, None]:
    """Align the module's own parameters and offloaded buffers on one device in a ``with`` block.

    Offloaded ones are materialized, and dropped afterwards; values changed in place are written back.

    Args:
        module: the module; those in it are left alone.
        execution_device: the device; None brings offloaded parameters to the one they compute on, and leaves
            others where they are.

    Raises:
        OffloadError: a parameter was changed in the block whose values are in a file.
    """
    materialized: list[MaterializedTensor] = []
    moved: dict[str, torch.device] = {}
    target = None if execution_device is None else as_device(execution_device)
    find_stand_in = getattr(_offloading_hook(module), "find_stand_in", None)
    try:
        buffers = {name: t for name, t in module._buffers.items() if isinstance(t, OffloadedTensor)}
        for name, tensor in [*module._parameters.items(), *buffers.items()]:
            if isinstance(tensor, OffloadedTensor) or (
                tensor is not None and tensor.is_meta and find_stand_in
            ):
                stand_in: Any = tensor if find_stand_in is None else find_stand_in(name, tensor)
                with torch.inference_mode(False), torch.no_grad():
                    value = stand_in.source.read(target or stand_in.execution_device)
                    materialized.append(materialize(module, name, stand_in, value))
            elif tensor is not None and target is not None and not check_device_same(tensor.device, target):
                moved[name] = tensor.device
                set_module_tensor_to_device(module, name, target)
        yield
    finally:
        for name, device in moved.items():
            set_module_tensor_to_device(module, name, device)
        restore_stand_ins(materialized, compare=True)


# ------------------------------------------------------------------------------------------- whole models


def retie_parameters(model: nn.Module, tied_params: Iterable[Iterable[str]]) -> None:
    """Tie the names of each group to one parameter again: the first of them that has values.

    Args:
        model: the model.
        tied_params: groups of names.
    """
    for group in tied_params:
        places = [(*owner_of(model, name), name) for name in group]
        tensors = [table_of(owner, name)[name] for owner, name, _ in places]
        loaded = [tensor for tensor in tensors if tensor.device.type != "meta"]
        offloaded = [tensor for tensor in tensors if isinstance(tensor, OffloadedTensor)]
        chosen = next(iter((*loaded, *offloaded, *tensors)), None)
        for owner, name, _ in places:
            table_of(owner, name)[name] = chosen


def get_state_dict_from_offload(
    module: nn.Module, module_name: str, state_dict: dict[str, Any], device_to_put_offload: DeviceLike = "cpu"
) -> dict[str, Any]:
    """Fill the entries of one module in a state dict with real values, also of offloaded weights.

    Args:
        module: the module.
        module_name: the full name of one of its tensors, or its own with a dot.
        state_dict: gets the values, for the names that it has.
        device_to_put_offload: where the values go.
    """
    target, prefix = as_device(device_to_put_offload), module_name[: module_name.rfind(".") + 1]
    with align_module_device(module, target):
        own = module.state_dict(prefix=prefix)
        state_dict.update(
            {name: _read_values(name, own[name], target) for name in own.keys() & state_dict.keys()}
        )
    return state_dict


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict with all values on the CPU. Values in files are views of the mapped files.

    Raises:
        OffloadError: a tensor has no values anywhere.
    """
    cpu = torch.device("cpu")
    return {
        name: _read_values(name, value, cpu) if isinstance(value, torch.Tensor) else value
        for name, value in model.state_dict().items()
    }


def _read_values(name: str, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    if value.is_meta:
        raise OffloadError(
            f"{name} cannot be saved: it has no values",
            why="it is on the meta device, and no hook knows where its values are",
            fix="load the weights first",
        )
    source = source_of(value)
    return value.to(device) if source is None else source.read(device).detach()


def load_offloaded_weights(model: nn.Module, index: Mapping[str, Any] | None, offload_folder: Any) -> None:
    """Load the weights of an offload folder into a model, on the CPU, as views of the mapped files.

    Args:
        model: the model.
        index: the entries, as ``offload_weight`` filled them.
        offload_folder: the folder; it may be removed afterwards.

    Raises:
        OffloadError: a file is missing or damaged.
    """
    for name, entry in (index or {}).items():
        if "SCB" in name:
            continue
        scales = name.replace("weight", "SCB")
        statistics = None
        if index and scales in index and scales != name:
            statistics = load_offloaded_weight(Path(offload_folder, f"{scales}.dat"), index[scales])
        weight = load_offloaded_weight(Path(offload_folder, f"{name}.dat"), entry)
        set_module_tensor_to_device(model, name, "cpu", value=weight, fp16_statistics=statistics)


def host_source(name: str, tensor: torch.Tensor) -> HostMemoryWeightSource:
    """Return a host-memory source for a tensor that has values: the tensor itself if it is on the CPU."""
    source = source_of(tensor)
    value = tensor.to("cpu") if source is None else source.host_tensor()
    return HostMemoryWeightSource(name, value)
