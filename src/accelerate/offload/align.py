"""The hooks of offloading: weights where the module computes, inputs where the weights are, for one forward.

Between forwards the weights of an offloaded module are ``OffloadedTensor``s. Before a forward the hook brings
in those that are not here, and afterwards drops what it brought. Nothing is copied back, unless values were
changed in place.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from accelerate import device as devices
from accelerate.offload.assign import (
    Brought,
    DeviceLike,
    TiedMap,
    address_of,
    as_device,
    bring,
    check_device_same,
    drop_all,
    home_of,
    set_module_tensor_to_device,
    table_of,
)
from accelerate.offload.folder import put
from accelerate.offload.hooks import ModelHook, _compiler_disable, remove_hook_from_module
from accelerate.offload.source import MapSource, OffloadError, Source
from accelerate.offload.tensor import OffloadedTensor, offloaded, source_of
from accelerate.world.tensors import find_device, send_to_device

Keys = str | list[str] | None
_PLAIN = (str, int, float, bool, type(None))


def moved(values: Any, device: torch.device, skip_keys: Keys = None) -> Any:
    """A tuple or dict of arguments with all tensors on ``device``; the very same where all are there.

    A list that a module is to change is one of these: it gets a copy only if something in it has to move.
    """
    if not isinstance(values, dict):
        for value in values:
            if not _is_here(value, device):
                return send_to_device(values, device, skip_keys=skip_keys)
        return values
    kept = (skip_keys,) if isinstance(skip_keys, str) else skip_keys or ()
    for name, value in values.items():
        if name not in kept and not _is_here(value, device):
            return send_to_device(values, device, skip_keys=skip_keys)
    return values


def _is_here(value: Any, device: torch.device) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device == device or check_device_same(value.device, device)
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, list | tuple):
        return all(_is_here(item, device) for item in value)
    if isinstance(value, dict) and not hasattr(value, "to"):
        return all(_is_here(item, device) for item in value.values())
    return not (hasattr(value, "to") or isinstance(value, Mapping))


class AlignDevicesHook(ModelHook):
    """Brings the weights of a module, and its inputs, to one device around each forward.

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
        self._begin()

    def _begin(self) -> None:
        self._users = 0
        self._brought: list[tuple[str, Brought]] = []
        self._tied: list[tuple[dict[torch.device, torch.Tensor], torch.device, torch.Tensor]] = []
        self._map = self.weights_map
        self._module: weakref.ref[nn.Module] | None = None
        self._lock = threading.RLock()
        self._inputs = threading.local()  # the devices of inputs, innermost call last

    def __getstate__(self) -> dict[str, Any]:
        """What is going on now stays here: a copy begins between two forwards."""
        passing = ("_users", "_brought", "_tied", "_map", "_module", "_lock", "_inputs")
        return {name: value for name, value in vars(self).items() if name not in passing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    # --- on and off

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Moves the module's tensors to the device, or offloads them.

        Raises:
            OffloadError: a tensor has no values, neither here nor in the map.
        """
        moved_here = self._module is not None and self._module() is not module
        self._module = weakref.ref(module)
        if self.offload:
            self.original_devices = {key: _home(tensor) for key, _, _, tensor in self._tensors(module)}
            self._choose_map(module, own=moved_here)
            self._offload(module)
        if self.execution_device is not None:
            device = as_device(self.execution_device)
            for _, owner, name, tensor in list(self._tensors(module)):
                if isinstance(tensor, OffloadedTensor) and self.offload:
                    continue
                if tensor.device != device and not check_device_same(tensor.device, device):
                    set_module_tensor_to_device(owner, name, device, tied_params_map=self.tied_params_map)
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Puts offloaded tensors back where they were; those in files stay offloaded."""
        if self.offload:
            with self._lock:
                self._users = 0
                self._drop()
            homes = getattr(self, "original_devices", {})
            for key, owner, name, tensor in list(self._tensors(module)):
                device = homes.get(key)
                if device is not None and device.type != "meta" and tensor.device != device:
                    set_module_tensor_to_device(owner, name, device, clear_cache=False)
            self._module = None
        return module

    def _choose_map(self, module: nn.Module, *, own: bool) -> None:
        """Without a map the module's own values are it; so they are of a module that the hook moved to."""
        if self.weights_map is not None and not own:
            self._map = self.weights_map
            return
        before = self.weights_map or {}
        values: dict[str, torch.Tensor] = {}
        for key, _, _, tensor in self._offloadable(module):
            if not tensor.is_meta:
                values[key] = home_of(key, tensor).host()
            elif key in before:
                values[key] = before[key]
        self.weights_map = self._map = values

    def _offload(self, module: nn.Module) -> None:
        """Puts stand-ins in the places of the weights."""
        weights: Mapping[str, Any] = self.weights_map or {}
        ties = self.tied_params_map or {}
        device = as_device("cpu" if self.execution_device is None else self.execution_device)
        for key, owner, name, tensor in list(self._offloadable(module)):
            if address_of(tensor) in ties:
                self.tied_params_names.add(key)
            if key in weights:
                source: Source = MapSource(self._full(key), weights, key, tensor)
            elif not tensor.is_meta:
                source = source_of(tensor) or home_of(self._full(key), tensor)
            else:
                raise OffloadError(
                    f"{self._full(key)} cannot be offloaded: it has no values",
                    why="it is on the meta device, and the map of weights has no such entry",
                    fix="load the weights first",
                )
            table_of(owner, name)[name] = offloaded(tensor, source, device)

    def _full(self, key: str) -> str:
        return f"{getattr(self.weights_map, 'prefix', '')}{key}"

    def _tensors(self, module: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
        """(name, module that holds it, name there, tensor) of everything the hook sees to."""
        for path, owner in module.named_modules() if self.place_submodules else (("", module),):
            for table in (owner._parameters, owner._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        yield (f"{path}.{name}" if path else name), owner, name, tensor

    def _offloadable(self, module: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
        """Those of them that are offloaded: buffers only if asked, and never those of no state dict."""
        for row in self._tensors(module):
            _, owner, name, _ = row
            kept = name in owner._buffers and (
                not self.offload_buffers or name in owner._non_persistent_buffers_set
            )
            if not kept:
                yield row

    # --- around a forward

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Inputs to the device, weights here. Without inputs (called by hand) only the weights.

        Raises:
            OffloadError: a weight has no values.
        """
        called, came_from = bool(args or kwargs), None
        if self.io_same_device and called:
            first = args[0] if args else None
            found = first.device if isinstance(first, torch.Tensor) else find_device([args, kwargs])
            # An offloaded weight that is given as an input is nowhere that an output could go to.
            came_from = self.input_device = None if found is not None and found.type == "meta" else found
        if called and self.execution_device is not None:
            device = as_device(self.execution_device)
            args = moved(args, device)
            if kwargs:
                kwargs = moved(kwargs, device, self.skip_keys)
        if self.offload:
            self._enter(module, called)
        if self.io_same_device and called:
            self._waiting().append(came_from)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Drops the weights, and returns the output, with ``io_same_device`` where the inputs were.

        Raises:
            OffloadError: a weight was changed in place whose values are in a file.
        """
        if self.offload:
            self._leave()
        if self.io_same_device:
            waiting = self._waiting()
            device = waiting.pop() if waiting else None
            if device is not None and not (isinstance(output, torch.Tensor) and output.device == device):
                return send_to_device(output, device, skip_keys=self.skip_keys)
        return output

    def abort(self, module: nn.Module) -> None:
        """The forward raised: drops the weights."""
        if self.io_same_device and self._waiting():
            self._waiting().pop()
        if self.offload:
            self._leave()

    def _waiting(self) -> list[torch.device | None]:
        """The devices of the inputs of this thread's running calls."""
        inputs = vars(self._inputs)
        if "devices" not in inputs:
            inputs["devices"] = []
        return inputs["devices"]

    @_compiler_disable
    def _enter(self, module: nn.Module, called: bool) -> None:
        with self._lock:
            self._users += called
            try:
                self._fetch(module)
            except BaseException:
                self._users -= called
                if not self._users:
                    self._drop()
                raise

    @_compiler_disable
    def _leave(self) -> None:
        with self._lock:
            self._users = max(self._users - 1, 0)
            if not self._users:
                self._drop()

    def _fetch(self, module: nn.Module) -> None:
        """Brings in what is not here; a tensor that a client has put in elsewhere is offloaded first."""
        device = None if self.execution_device is None else as_device(self.execution_device)
        absent = [row for row in self._offloadable(module) if row[3].device != device]
        if not absent:
            return
        with torch.inference_mode(False), torch.no_grad():  # what ``unrecorded`` does, at less cost
            for key, owner, name, tensor in absent:
                if tensor.device.type != "meta":
                    if device is None or check_device_same(tensor.device, device):
                        continue
                    tensor = self._adopt(key, owner, name, device)
                place = device or getattr(tensor, "execution", torch.device("cpu"))
                source = self.source_for(key, tensor)
                self._brought.append((key, self._shared(key, owner, name, place, source)))

    def _adopt(self, key: str, owner: nn.Module, name: str, device: torch.device) -> OffloadedTensor:
        """Offloads a tensor that somebody has put in the place of an offloaded one: its values count now."""
        table = table_of(owner, name)
        home = home_of(self._full(key), table[name])
        if self.weights_map is not None:
            put(self.weights_map, key, home.tensor)
        table[name] = offloaded(table[name], home, device)
        return table[name]

    def source_for(self, key: str, tensor: torch.Tensor) -> Source:
        """Where the values of a tensor are: a map that a client gave the hook meanwhile comes first.

        Raises:
            OffloadError: nobody knows.
        """
        weights: Mapping[str, Any] = self.weights_map or {}
        if isinstance(tensor, OffloadedTensor) and self.weights_map is self._map:
            return tensor.source
        if key in weights:
            return MapSource(self._full(key), weights, key, tensor)
        if isinstance(tensor, OffloadedTensor):
            return tensor.source
        raise OffloadError(
            f"{self._full(key)} cannot be brought in: it has no values",
            why="it is on the meta device, and the map of weights has no such entry",
            fix="dispatch the model again",
        )

    def _maybe_get_fp16_statistics(self, name: str, value: Any) -> Any:
        """The scales beside 8-bit values in the map, under the names of bitsandbytes."""
        scales = name.replace("weight", "SCB")
        weights: Mapping[str, Any] = self.weights_map or {}
        return (
            weights[scales] if value.dtype == torch.int8 and "SCB" in scales and scales in weights else None
        )

    def _shared(self, key: str, owner: nn.Module, name: str, device: torch.device, source: Source) -> Brought:
        """Brings in one tensor, or takes the copy that another module has brought of it."""
        copies = None
        if self.tied_params_map:
            copies = self.tied_params_map.get(address_of(source.host()))
        if copies is None:
            scales = None
            if source.dtype == torch.int8:
                scales = self._maybe_get_fp16_statistics(key, source)
            return bring(owner, name, device, source, fp16_statistics=scales)
        if device in copies:
            return bring(owner, name, device, source, there=copies[device])
        brought = bring(owner, name, device, source)
        copies[device] = brought.tensor
        self._tied.append((copies, device, brought.tensor))
        return brought

    def _drop(self) -> None:
        """Drops what this hook brought. A client's new map says what the values are from now on."""
        weights = self.weights_map
        if weights is not None and weights is not self._map:
            for key, each in self._brought:
                if key in weights:
                    source = MapSource(self._full(key), weights, key, each.tensor)
                    each.drop(offloaded(each.tensor, source, each.stand_in.execution))
        self._map = weights
        for copies, device, tensor in self._tied:
            if copies.get(device) is tensor:
                del copies[device]
        self._tied.clear()
        brought, self._brought = self._brought, []
        drop_all([each for _, each in brought])


def _home(tensor: torch.Tensor) -> torch.device:
    """Where a tensor's values are, as clients are told: meta for those in files."""
    source = source_of(tensor)
    if source is None:
        return tensor.device
    return torch.device("cpu" if source.in_memory else "meta")


class CpuOffload(ModelHook):
    """A whole module waits on the CPU, and goes to the device for its forward. It stays there afterwards.

    Args:
        execution_device: where it computes; the best device of this machine by default.
        prev_module_hook: what ``cpu_offload_with_hook`` returned for the model that ran before: that one
            makes room first.
    """

    def __init__(
        self,
        execution_device: DeviceLike | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        hardware = devices.detect() if execution_device is None else None
        self.execution_device = execution_device if hardware is None else hardware.torch_device()

    def init_hook(self, module: nn.Module) -> nn.Module:
        """The module goes to the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The model before makes room; this one and its inputs go to the device."""
        assert self.execution_device is not None
        device = as_device(self.execution_device)
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
            if device.type != "cpu":
                devices.get(device.type).empty_cache()
        module.to(device)
        return moved(args, device), moved(kwargs, device)


class UserCpuOffloadHook:
    """What the user of ``cpu_offload_with_hook`` gets, to say when a model leaves the device.

    Args:
        model: the model.
        hook: its hook.
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model, self.hook = model, hook

    def offload(self) -> None:
        """The model goes to the CPU now."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Takes the hook off."""
        remove_hook_from_module(self.model)
