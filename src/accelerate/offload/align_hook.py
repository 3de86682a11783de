"""The hooks of offloading: weights and inputs are on the module's device for one forward.

Between forwards the weights of an offloaded module are ``OffloadedTensor``s. Before a forward the hook
materializes those that are not on the device, and drops them afterwards. Nothing is copied back, unless
values were changed in place.

``dispatch_model`` copies blocks of weights by a pager, ahead of time (``pager.py``). A hook that a client
adds itself cannot: ``pre_forward`` and ``post_forward`` are called by hand, alone or twice, with another map
or device in between; the weights stay the client's own tensors, of any class, used in place on the CPU; and
they may be trained. A page is a range of bytes that the pager owns. So such a hook reads one weight after
the other. Stand-ins, sources, and putting values in and taking them out (``MaterializedTensor``) are the same
for both.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import OffloadError
from accelerate.offload.hooks import ModelHook, add_hook_to_module, walk_modules
from accelerate.offload.module_input_output import Keys, move_arguments, send_values
from accelerate.offload.module_tensors import (
    DeviceLike,
    MaterializedTensor,
    TiedMap,
    address_of,
    as_device,
    check_device_same,
    has_own_tensors,
    host_source,
    materialize,
    replace_tensor,
    restore_stand_ins,
    set_module_tensor_to_device,
)
from accelerate.offload.offload_folder import PrefixedDataset, set_weight
from accelerate.offload.offloaded_tensor import (
    MappingSource,
    OffloadedTensor,
    TensorSource,
    _compiler_disable,
    make_stand_in,
    source_of,
)
from accelerate.world.local_tensor_trees import find_device


class AlignDevicesHook(ModelHook):
    """Align a module's weights and inputs: all are on one device during each forward.

    Args:
        execution_device: where the module computes; None leaves inputs where they are.
        offload: keep the weights elsewhere between forwards.
        io_same_device: give outputs back on the device of the inputs.
        weights_map: where offloaded weights are, by name; without one they are kept in host memory.
        offload_buffers: offload buffers too (those of the state dict); otherwise they stay on the device.
        place_submodules: the hook sees to the weights of all modules inside too.
        skip_keys: names of arguments, at any depth, that are not moved.
        tied_params_map: address of a tied tensor -> device -> its copy there. It is brought in once.

    Attributes:
        original_devices: of an offloaded module: name -> the device it was on; meta for weights in files.
        tied_params_names: names of the module's tensors that are tied.
        input_device: of the inputs of the last forward, with ``io_same_device``.

    Several forwards may run at once, inside each other or in threads: the first brings in, the last drops.
    """

    execution_device: DeviceLike | None
    offload: bool
    io_same_device: bool
    weights_map: Mapping[str, Any] | None
    offload_buffers: bool
    place_submodules: bool
    skip_keys: Keys
    original_devices: dict[str, torch.device]

    def __init__(
        self,
        execution_device: DeviceLike | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Any] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: Keys = None,
        tied_params_map: TiedMap | None = None,
    ) -> None:
        self.execution_device, self.offload, self.io_same_device = execution_device, offload, io_same_device
        self.weights_map, self.offload_buffers = weights_map, offload_buffers
        self.place_submodules, self.skip_keys = place_submodules, skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.param_original_devices: dict[str, torch.device] = {}
        self.buffer_original_devices: dict[str, torch.device] = {}
        self.tied_params_names: set[str] = set()
        self._used_map: Mapping[str, Any] | None = None  # the stand-ins read it; set by ``init_hook``
        self._reset_forward_state()

    def _reset_forward_state(self) -> None:
        self._users = 0
        self._by_hand = False  # called without inputs, by a client that may write through .data
        self._materialized: dict[str, MaterializedTensor] = {}
        self._tied_copies: list[tuple[dict[torch.device, torch.Tensor], torch.device, torch.Tensor]] = []
        self._module: weakref.ref[nn.Module] | None = None
        self._lock = threading.RLock()
        self._inputs = threading.local()  # the devices of inputs, innermost call last

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without that of a running forward: a copy starts between two forwards."""
        passing = ("_users", "_by_hand", "_materialized", "_tied_copies", "_module", "_lock")
        return {name: value for name, value in vars(self).items() if name not in (*passing, "_inputs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset_forward_state()

    # --- on and off

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the module's tensors to the device, or offload them.

        Raises:
            OffloadError: a tensor has no values, neither here nor in the map.
        """
        moved_here = self._module is not None and self._module() is not module
        self._record_module(module)
        if self.offload:
            self._choose_weights_map(module, own=moved_here)
            self._put_stand_ins(module)
        if self.execution_device is not None:
            device = as_device(self.execution_device)
            for _, owner, name, tensor in list(self._tensors(module)):
                if isinstance(tensor, OffloadedTensor) and self.offload:
                    continue
                if tensor.device != device and not check_device_same(tensor.device, device):
                    set_module_tensor_to_device(owner, name, device, tied_params_map=self.tied_params_map)
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Put offloaded tensors back where they were; those in files stay offloaded."""
        if self.offload:
            with self._lock:
                self._users = 0
                self._restore_stand_ins()
            homes = getattr(self, "original_devices", {})
            for key, owner, name, tensor in list(self._tensors(module)):
                device = homes.get(key)
                if device is not None and device.type != "meta" and tensor.device != device:
                    set_module_tensor_to_device(owner, name, device, clear_cache=False)
            self._module = None
        return module

    def _record_module(self, module: nn.Module) -> None:
        """Record the module, and where clients see its weights: those in files on the meta device."""
        self._module = weakref.ref(module)
        if self.offload:
            self.original_devices = {
                key: tensor.device
                if (source := source_of(tensor)) is None
                else torch.device("cpu" if source.in_memory else "meta")
                for key, _, _, tensor in self._tensors(module)
            }

    def _choose_weights_map(self, module: nn.Module, *, own: bool) -> None:
        """Use the module's own values as the map where none was given, or when the hook moved to it."""
        if self.weights_map is not None and not own:
            self._used_map = self.weights_map
            return
        before = self.weights_map or {}
        values: dict[str, torch.Tensor] = {}
        for key, _, _, tensor in self._offloadable(module):
            if not tensor.is_meta:
                values[key] = host_source(key, tensor).host_tensor()
            elif key in before:
                values[key] = before[key]
        self.weights_map = self._used_map = values

    def _put_stand_ins(self, module: nn.Module) -> None:
        """Replace the weights with stand-ins."""
        weights: Mapping[str, Any] = self.weights_map or {}
        for key, owner, name, tensor in list(self._offloadable(module)):
            if address_of(tensor) in (self.tied_params_map or {}):
                self.tied_params_names.add(key)
            if key in weights:
                source: TensorSource = MappingSource(self._full_name(key), weights, key, tensor)
            elif not tensor.is_meta:
                source = source_of(tensor) or host_source(self._full_name(key), tensor)
            else:
                raise self._no_values_error(key, "offloaded", fix="load the weights first")
            replace_tensor(owner, name, self._make_stand_in(tensor, source))

    def _make_stand_in(self, tensor: torch.Tensor, source: TensorSource) -> OffloadedTensor:
        return make_stand_in(
            tensor, source, as_device("cpu" if self.execution_device is None else self.execution_device)
        )

    def _no_values_error(self, key: str, action: str, fix: str) -> OffloadError:
        return OffloadError(
            f"{self._full_name(key)} cannot be {action}: it has no values",
            why="it is on the meta device, and the map of weights has no such entry",
            fix=fix,
        )

    def _full_name(self, key: str) -> str:
        return f"{getattr(self.weights_map, 'prefix', '')}{key}"

    def _tensors(self, module: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
        """Return (name, owning module, name there, tensor) of all tensors that the hook handles."""
        for path, owner in module.named_modules() if self.place_submodules else (("", module),):
            for table in (owner._parameters, owner._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        yield (f"{path}.{name}" if path else name), owner, name, tensor

    def _offloadable(self, module: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
        """Return the rows to offload: buffers only if asked, never non-persistent ones."""
        for row in self._tensors(module):
            _, owner, name, _ = row
            is_resident = name in owner._buffers and (
                not self.offload_buffers or name in owner._non_persistent_buffers_set
            )
            if not is_resident:
                yield row

    # --- around a forward

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Move inputs to the device and materialize weights; without inputs only the weights.

        Raises:
            OffloadError: a weight has no values.
        """
        called, came_from = bool(args or kwargs), None
        if self.io_same_device and called:
            first = args[0] if args else None
            input_device = first.device if isinstance(first, torch.Tensor) else find_device([args, kwargs])
            # An offloaded weight that is given as an input is nowhere that an output could go to.
            came_from = self.input_device = (
                None if input_device is not None and input_device.type == "meta" else input_device
            )
        if called and self.execution_device is not None:
            device = as_device(self.execution_device)
            args = move_arguments(args, device)
            if kwargs:
                kwargs = move_arguments(kwargs, device, self.skip_keys)
        if self.offload:
            self._begin_forward(module, called)
        if self.io_same_device and called:
            self._running_input_devices().append(came_from)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Drop the weights, and return the output, with ``io_same_device`` on the device of the inputs.

        Raises:
            OffloadError: a weight was changed in place whose values are in a file.
        """
        is_own = type(self).pre_forward.__module__.startswith("accelerate.offload.")
        if self.offload:
            self._end_forward()
            if not (is_own or self._users) and any(not row[3].is_meta for row in self._offloadable(module)):
                self._put_stand_ins(module)  # a client's pre_forward has put values in by itself
        if self.io_same_device:
            waiting = self._running_input_devices()
            device = waiting.pop() if waiting else None if is_own else self.input_device
            if device is not None and not (isinstance(output, torch.Tensor) and output.device == device):
                return send_values(output, device, self.skip_keys)
        return output

    def abort(self, module: nn.Module) -> None:
        """Drop the weights after a forward that raised."""
        if self.io_same_device and self._running_input_devices():
            self._running_input_devices().pop()
        if self.offload:
            self._end_forward()

    def _running_input_devices(self) -> list[torch.device | None]:
        """Return the devices of the inputs of this thread's running calls."""
        return vars(self._inputs).setdefault("devices", [])

    @_compiler_disable
    def _begin_forward(self, module: nn.Module, called: bool) -> None:
        with self._lock:
            self._users += called
            self._by_hand |= not called
            try:
                self._materialize_absent(module)
            except BaseException:
                self._users -= called
                if not self._users:
                    self._restore_stand_ins()
                raise

    @_compiler_disable
    def _end_forward(self) -> None:
        with self._lock:
            self._users = max(self._users - 1, 0)
            if not self._users:
                self._restore_stand_ins()

    def _materialize_absent(self, module: nn.Module) -> None:
        """Materialize weights that are not on the device."""
        device = None if self.execution_device is None else as_device(self.execution_device)
        absent = [row for row in self._offloadable(module) if row[3].device != device]
        if not absent:
            return
        with torch.inference_mode(False), torch.no_grad():
            for key, owner, name, tensor in absent:
                if tensor.device.type == "meta":
                    stand_in = self.find_stand_in(key, tensor)
                elif device is None or check_device_same(tensor.device, device):
                    continue
                else:  # a client has put it there: its values count now
                    source = host_source(self._full_name(key), tensor)
                    if self.weights_map is not None:
                        set_weight(self.weights_map, key, source.tensor)
                    stand_in = self._make_stand_in(tensor, source)
                self._materialize(key, owner, name, stand_in, device or stand_in.execution_device)

    def find_stand_in(self, key: str, tensor: torch.Tensor) -> OffloadedTensor:
        """Return the stand-in of a weight; a new one where a client has set a map on the hook meanwhile, or
        has added the hook without ``init_hook``: then the stand-in is one of an earlier hook.

        Raises:
            OffloadError: there are no values.
        """
        weights: Mapping[str, Any] = self.weights_map or {}
        is_known = self.weights_map is self._used_map or key not in weights
        if isinstance(tensor, OffloadedTensor) and is_known:
            return tensor
        if key not in weights:
            raise self._no_values_error(key, "brought in", fix="dispatch the model again")
        return self._make_stand_in(tensor, MappingSource(self._full_name(key), weights, key, tensor))

    def _maybe_get_fp16_statistics(self, name: str, value: Any) -> Any:
        """Return the scales beside 8-bit values in the map, under the names of bitsandbytes."""
        scales = name.replace("weight", "SCB")
        weights: Mapping[str, Any] = self.weights_map or {}
        return (
            weights[scales] if value.dtype == torch.int8 and "SCB" in scales and scales in weights else None
        )

    def _materialize(
        self, key: str, owner: nn.Module, name: str, stand_in: OffloadedTensor, device: torch.device
    ) -> None:
        """Materialize one tensor, or use the copy that another module has materialized."""
        source, copies = stand_in.source, None
        if self.tied_params_map:
            copies = self.tied_params_map.get(address_of(source.host_tensor()))
        if copies is not None and device in copies:
            self._materialized[key] = materialize(owner, name, stand_in, copies[device])
            return
        scales = self._maybe_get_fp16_statistics(key, source) if source.dtype == torch.int8 else None
        each = self._materialized[key] = materialize(owner, name, stand_in, source.read(device), scales)
        if copies is not None:
            copies[device] = each.tensor
            self._tied_copies.append((copies, device, each.tensor))

    def _restore_stand_ins(self) -> None:
        """Drop what this hook materialized. A client's new map has the values from now on."""
        weights = self.weights_map
        if weights is not None and weights is not self._used_map:
            for key, each in self._materialized.items():
                if key in weights:
                    source = MappingSource(self._full_name(key), weights, key, each.tensor)
                    each.use_stand_in(make_stand_in(each.tensor, source, each.stand_in.execution_device))
        self._used_map = weights
        for copies, device, tensor in self._tied_copies:
            if copies.get(device) is tensor:
                del copies[device]
        self._tied_copies.clear()
        materialized, self._materialized = self._materialized, {}
        by_hand, self._by_hand = self._by_hand, False
        restore_stand_ins(list(materialized.values()), compare=by_hand)


# ------------------------------------------------------------------------------------------------ attaching

ClassNames = Sequence[str] | None


def _is_preloaded(module: nn.Module, preload_module_classes: ClassNames) -> bool:
    """Return True when the module's weights are materialized together with those of its children."""
    return type(module).__name__ in (preload_module_classes or ())


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: DeviceLike,
    skip_keys: Keys = None,
    preload_module_classes: ClassNames = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Attach hooks that run a module and its submodules on one device; modules that have a hook keep it.

    Args:
        module: the module; its weights move to the device.
        execution_device: the device.
        skip_keys: names of arguments that are not moved.
        preload_module_classes: names of classes whose inner modules get no hooks.
        tied_params_map: see ``AlignDevicesHook``.
    """
    for _, each in walk_modules(module, is_closed=lambda m, _: _is_preloaded(m, preload_module_classes)):
        if "_hf_hook" not in vars(each) and each.state_dict(keep_vars=True):
            hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
            add_hook_to_module(each, hook)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: DeviceLike | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Keys = None,
    preload_module_classes: ClassNames = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Attach an ``AlignDevicesHook`` to every module that holds tensors itself.

    Args:
        module: the module.
        execution_device: where they compute.
        offload: whether weights are kept elsewhere between forwards.
        weights_map: where offloaded weights are, by their full names.
        offload_buffers: offload buffers too.
        module_name: the module's own full name.
        skip_keys: names of arguments that are not moved.
        preload_module_classes: names of classes whose weights, and those of all modules inside, come in
            together.
        tied_params_map: see ``AlignDevicesHook``.
    """

    def loads_all(inner: nn.Module, _: str = "") -> bool:
        return offload and _is_preloaded(inner, preload_module_classes)

    for path, each in walk_modules(module, module_name, loads_all):
        place_submodules = loads_all(each)
        if not place_submodules and not has_own_tensors(each):
            continue
        weights = weights_map
        if weights is not None:
            weights = PrefixedDataset(weights, f"{path}." if path else "")
        hook = AlignDevicesHook(
            execution_device,
            offload,
            weights_map=weights,
            offload_buffers=offload_buffers,
            place_submodules=place_submodules,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(each, hook, append=True)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: DeviceLike | Mapping[str, Any] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Keys = None,
    preload_module_classes: ClassNames = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Attach hooks by block, each with its own device and its own setting of offloading.

    Args:
        module: the model, or a part of it.
        execution_device: name of a block -> its device; or one device for the whole module.
        offload: name of a block -> whether it is offloaded; or one word for all blocks.
        weights_map, offload_buffers, module_name, skip_keys, preload_module_classes, tied_params_map: as for
            ``attach_align_device_hook``.
    """
    common: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    named = [value for value in (execution_device, offload) if isinstance(value, Mapping)]
    blocks = named[0] if named else (module_name,)
    devices, offloaded = (
        value if isinstance(value, Mapping) else dict.fromkeys(blocks, value)
        for value in (execution_device, offload)
    )
    for path, each in walk_modules(module, module_name, lambda *_: not named):
        device: Any = devices.get(path)
        is_block, is_root = path in devices and path in offloaded, not named or path == ""
        if is_block and offloaded[path]:
            attach_align_device_hook(
                each,
                device,
                offload=True,
                weights_map=weights_map,
                offload_buffers=offload_buffers,
                module_name=path,
                preload_module_classes=preload_module_classes,
                **common,
            )
            if named and "_hf_hook" not in vars(each):
                add_hook_to_module(each, AlignDevicesHook(device, io_same_device=is_root, **common))
        elif is_block or is_root:
            hook = AlignDevicesHook(
                device,
                io_same_device=is_root,
                offload_buffers=is_block and offload_buffers,
                place_submodules=is_block,
                **common,
            )
            add_hook_to_module(each, hook)
        if named and is_block:
            inner = preload_module_classes if offloaded[path] else None
            attach_execution_device_hook(each, device, preload_module_classes=inner, **common)
