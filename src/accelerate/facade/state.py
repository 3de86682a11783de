"""``PartialState`` and ``AcceleratorState``: the open world, and the choices of an ``Accelerator``."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from accelerate import device as devices
from accelerate.core import environ
from accelerate.core.argument_checks import refuse_assignments
from accelerate.core.errors import SettingError, UnknownNameError, WorldError, warn_user
from accelerate.core.setting import load_settings
from accelerate.facade.enums import DistributedType
from accelerate.facade.gradient_state import GradientState as GradientState
from accelerate.facade.launch_settings import PrecisionSettings
from accelerate.facade.processes import ProcessMixin
from accelerate.strategy import STRATEGIES
from accelerate.strategy.base import EarlyPartitioning, Strategy
from accelerate.strategy.launch_settings import SETTINGS
from accelerate.world import affinity
from accelerate.world import world as worlds
from accelerate.world.world import ProcessDeviceSettings, World

if TYPE_CHECKING:
    import torch

_PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"


def is_initialized() -> bool:
    """Return whether an ``Accelerator`` or ``AcceleratorState`` exists."""
    return AcceleratorState._current_if_open() is not None


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Take any arguments and do nothing."""


class ThreadLocalSharedDict(threading.local):
    """The descriptor of a class attribute that is a dict per thread."""

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: dict[str, Any] = {}

    def __get__(self, instance: object, owner: type | None = None) -> dict[str, Any]:
        return self._storage

    def __set__(self, instance: object, value: dict[str, Any]) -> None:
        self._storage = value


def _report_assignments(owner: type, name: str, field: str) -> None:
    """Let a property say what was assigned to it until it is deleted: tests replace ranks by ``mock.patch``.

    Args:
        owner: the class of a state.
        name: of the property.
        field: of the world, which keeps the true value.
    """

    def assign(state: Any, value: int) -> None:
        delete(state)
        true_value = getattr(state.world, field)
        if value == true_value:
            return
        state.world.reported[name] = value
        is_alone = name == "num_processes" and value == 1
        effect = "a loader that is prepared now is not sharded, but for a device mesh. Collectives"
        warn_user(
            f"{owner.__name__}().{name} was set to {value}: "
            f"{effect if is_alone else 'it only reads so. Loaders and collectives'} go on with {true_value}, "
            "that of the process group: start processes by accelerate launch"
        )

    def delete(state: Any) -> None:
        state.world.reported.pop(name, None)

    setattr(owner, name, getattr(owner, name).setter(assign).deleter(delete))


_ASSIGNABLE_NAMES = (
    "device",
    "distributed_type",
    "num_processes",
    "process_index",
    "local_process_index",
    "debug",
)
_STATE_NAMES = (*_ASSIGNABLE_NAMES, "backend", "fork_launched")


class _PartialStateDict(dict[str, Any]):
    """The facts of the open world; a program that changes them changes what ``PartialState`` says.

    Tests clear the dict between each other. Programs put back what they have copied, after code that has made
    states of its own.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        if self.get(name) != value and name in _ASSIGNABLE_NAMES:
            setattr(PartialState(), name, value)
        super().__setitem__(name, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        if not self and "device" in values:
            super().update(PartialState(cpu=values["device"].type == "cpu")._shared_state)
        for name, value in values.items():
            self[name] = value

    def clear(self) -> None:
        super().clear()
        worlds.forget()


class _PartialStateDictDescriptor:
    """The descriptor ``PartialState._shared_state``: a dict, empty exactly when no world is open."""

    def __get__(self, instance: object, owner: type | None = None) -> dict[str, Any]:
        names = () if worlds.current() is None else _STATE_NAMES
        state = object.__new__(PartialState)  # one of the open world; its constructor would open another
        return _PartialStateDict((name, getattr(state, name)) for name in names)


class _AcceleratorStateDict(dict[str, Any]):
    """``AcceleratorState._shared_state`` without a state; what a program puts back in it is the newest."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        AcceleratorState._current = state = object.__new__(AcceleratorState)
        vars(state).update(self)
        AcceleratorState._instances.add(state)


class _AcceleratorStateDictDescriptor:
    """The descriptor ``AcceleratorState._shared_state``: the newest state as a dict, empty without one."""

    def __get__(self, instance: object, owner: type | None = None) -> dict[str, Any]:
        state = AcceleratorState._current
        return _AcceleratorStateDict() if state is None else vars(state)


class PartialState(ProcessMixin):
    """The rank, world size and device of this process. The first instance opens the world.

    Without arguments it shows the world that ``end_training`` has closed, as in 1.x: a rank may ask alone.

    Args:
        cpu: compute on the CPU.
        kwargs: ``backend``, ``timeout`` and more arguments of ``torch.distributed.init_process_group``; they
            count when this opens a group of processes.

    Raises:
        WorldError: the environment contradicts itself.
    """

    _shared_state = _PartialStateDictDescriptor()
    _unpickled_world: World | None = None  # that of the process which pickled this instance
    _joined_world: ClassVar[World | None] = None  # the one that strategies were told of

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        before, must_open = worlds.current(), kwargs.pop("_must_open", False)
        if before is not None and before.is_closed and not (must_open or cpu or kwargs):
            return
        kwargs.pop("_use_sagemaker_dp", None)
        if getattr(self._prepare_backend, "__func__", None) is not _PREPARE_BACKEND:  # a program's
            kwargs["backend"], _ = self._prepare_backend(cpu, False, kwargs.get("backend"))
        world = worlds.open(cpu=cpu or None, **kwargs)
        if world is not PartialState._joined_world:
            PartialState._joined_world = world
            # Libraries load a model next: a strategy that partitions it meanwhile must know the ranks by now.
            for name in SETTINGS.names():
                switch = SETTINGS.get(name)[0]
                is_requested = any(vars(load_settings(switch).value).values())
                if is_requested and issubclass(strategy := STRATEGIES.get(name), EarlyPartitioning):
                    object.__setattr__(world, "strategy_type", switch.__distributed_type__)
                    if world.size > 1:
                        strategy.join_world(world)
        if load_settings(ProcessDeviceSettings).value.enable_cpu_affinity:
            affinity.set_numa_affinity(world.local_rank)

    def _prepare_backend(
        self, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, DistributedType]:
        """Return the communication backend, None for the device's own, and the kind of distributed training.

        Programs replace it, to choose the backend of every world that is opened.
        """
        size, hardware = worlds.get_rank_info()[2], devices.get("cpu") if cpu else devices.detect()
        return backend, DistributedType("NO" if size == 1 else hardware.distributed_type)

    def __getstate__(self) -> World | None:
        return worlds.current() or self._unpickled_world

    def __setstate__(self, world: World) -> None:
        self._unpickled_world = world

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\nProcess index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\nDevice: {self.device}\n"
        )

    @property
    def __dict__(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The names and values that scripts log; an instance has no attributes of its own."""
        return dict(self._shared_state)

    @staticmethod
    def _reset_state() -> None:
        """Reset the world; its process group stays for the next one."""
        worlds.forget()

    @property
    def world(self) -> World:
        """The open world; in a process without one, such as a worker of a loader, that of the pickled state.

        Raises:
            WorldError: there is none yet, or ``_reset_state`` was called.
        """
        world = worlds.current() or self._unpickled_world
        if world is None:
            raise _ClosedWorldAttributeError(
                "there is no open world any more", fix="create a PartialState or Accelerator anew"
            )
        return world

    @property
    def initialized(self) -> bool:
        """Return whether a world is open."""
        return worlds.current() is not None

    @property
    def device(self) -> torch.device:
        """The device of this process; what is prepared after an assignment goes to the assigned one.

        Assign another type of device before an ``Accelerator`` is made: it chooses its precision for it.
        """
        return self.world.device

    @device.setter
    def device(self, device: torch.device | str | int) -> None:
        _set_device(self.world, device)

    @property
    def backend(self) -> str | None:
        """The communication backend, None without a group."""
        return self.world.backend

    @property
    def debug(self) -> bool:
        """Return whether collectives check shapes first."""
        return self.world.debug

    @debug.setter
    def debug(self, debug: bool) -> None:
        object.__setattr__(self.world, "debug", bool(debug))

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of distributed training."""
        world = self.world
        if (kind := world.reported.get("distributed_type", world.strategy_type)) is not None:
            return DistributedType(kind)
        # As in 1.x for a process that torchrun has started alone: transformers refuses FSDP under "NO".
        alone = world.size == 1 and not world.owns_group
        return DistributedType("NO" if alone else world.hardware.distributed_type)

    @distributed_type.setter
    def distributed_type(self, value: str) -> None:
        self.world.reported["distributed_type"] = DistributedType(value)

    @distributed_type.deleter
    def distributed_type(self) -> None:
        self.world.reported.pop("distributed_type", None)

    @property
    def fork_launched(self) -> bool:
        """Return whether a parent owns the process group."""
        return environ.get_flag("FORK_LAUNCHED")

    @property
    def default_device(self) -> torch.device:
        """The best device of this machine, without an index."""
        hardware = devices.detect()
        return hardware.torch_device(0) if hardware.type == "cpu" else _torch_device(hardware.type)

    def set_device(self) -> None:
        """Make this process's device the current one."""
        self.world.hardware.bind(self.device.index or 0)

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy one group, or (None) the world's."""
        if group is not None:
            import torch.distributed as dist

            dist.destroy_process_group(group)
        elif not self.fork_launched:
            worlds.close()


_PREPARE_BACKEND = PartialState._prepare_backend


def _torch_device(kind: str | int | torch.device) -> torch.device:
    import torch

    return torch.device(kind)


def _set_device(world: World, device: torch.device | str | int) -> None:
    """Set the device of a world; it is frozen, so that nobody else does."""
    object.__setattr__(world, "device", _torch_device(device))


class AcceleratorState(ProcessMixin):
    """The choices of one ``Accelerator``; ``AcceleratorState()`` is that of the newest.

    Args:
        mixed_precision: number format of the forward pass.
        cpu: compute on the CPU.
        kwargs: passed on to the world.

    Raises:
        WorldError: nothing is given and there is no ``Accelerator`` yet.
        SettingError: a plugin is given, which only an ``Accelerator`` uses.
    """

    _current: ClassVar[AcceleratorState | None] = None
    _precision_variable: ClassVar[str | None] = None  # as it was when the newest one was made
    _instances: ClassVar[weakref.WeakSet[AcceleratorState]] = weakref.WeakSet()
    newest_accelerator: ClassVar[weakref.ref[Any] | None] = None
    _shared_state = _AcceleratorStateDictDescriptor()

    _partial: PartialState
    _world: World
    _mixed_precision: str
    distributed_type: DistributedType
    dynamo_plugin: Any
    parallelism_config: Any
    device_mesh: Any
    deepspeed_plugins: Any
    torch_tp_plugin: Any
    strategy_plugins: tuple[Any, ...] = ()  # that were given

    def __new__(
        cls,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> AcceleratorState:
        """Return the newest one, or (when arguments are given) a new one."""
        chosen = [deepspeed_plugin, fsdp_plugin, torch_tp_plugin, megatron_lm_plugin]
        if not _from_accelerator:
            chosen += [dynamo_plugin, parallelism_config]
        if (plugin := next((each for each in chosen if each is not None), None)) is not None:
            raise SettingError(
                f"AcceleratorState is given a {type(plugin).__name__}, which would change no training",
                why="an Accelerator chooses its strategy and its compiler by its own arguments",
                fix="give it to Accelerator(...)",
            )
        if mixed_precision is None and not cpu and not _from_accelerator:
            alive = cls._current_if_open()
            if alive is not None:
                return alive
            raise _NoAcceleratorError(
                "there is no Accelerator yet",
                why="AcceleratorState() shows the choices of an Accelerator",
                fix="create Accelerator() first, or use PartialState() for ranks and devices",
            )
        state = super().__new__(cls)
        state._partial, opened = PartialState(cpu=cpu, _must_open=True, **kwargs), worlds.current()
        assert opened is not None
        state._world = opened
        # Scripts log ``accelerator.state.__dict__``. The properties of these names do not read it.
        vars(state).update(
            backend=opened.backend, debug=opened.debug, device=opened.device, num_processes=opened.size,
            process_index=opened.rank, local_process_index=opened.local_rank,
        )  # fmt: skip
        loaded = load_settings(PrecisionSettings, code={"mixed_precision": mixed_precision})
        state._mixed_precision = loaded.value.mixed_precision or "no"
        state.dynamo_plugin, state.parallelism_config = dynamo_plugin, parallelism_config
        state.device_mesh = None
        state.deepspeed_plugins = state.torch_tp_plugin = None
        cls._current, cls._precision_variable = state, environ.get(_PRECISION_VARIABLE)
        cls._instances.add(state)
        return state

    def __reduce__(self) -> Any:
        return object.__new__, (AcceleratorState,), vars(self)  # loading leaves the newest one as it is

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of ``PartialState``; after ``_reset_state``, one of the next state."""
        if not vars(self):
            # Reset; as in 1.x it has the attributes of the next one, once there is one.
            if (newest := AcceleratorState._current) is not None and vars(newest):
                return getattr(newest, name)
            raise _ClosedWorldAttributeError(
                f"there is no open world any more for {name} of this Accelerator",
                why="AcceleratorState._reset_state() was called after it was made",
                fix="create an Accelerator anew, and prepare the objects with it",
            )
        if name.startswith("_") or not hasattr(PartialState, name):
            raise AttributeError(f"'AcceleratorState' object has no attribute {name!r}", name=name)
        return getattr(self._partial, name)

    def __repr__(self) -> str:
        text = f"{self._partial!r}\nMixed precision type: {self.mixed_precision}\n"
        if (plugin := self.deepspeed_plugin) is None:
            return text
        text = text.replace(str(self._partial.distributed_type), str(self.distributed_type), 1)
        return f"{text}ds_config: {plugin.deepspeed_config}\n"

    @property
    def world(self) -> World:
        """The world that was open when it was made; ``end_training`` leaves it readable.

        Raises:
            WorldError: ``_reset_state`` was called; also an ``AttributeError``, as in 1.x.
        """
        return self._world

    @property
    def device(self) -> torch.device:
        """The device of this process; assigning it does the same as for ``PartialState``."""
        return self.world.device

    @device.setter
    def device(self, device: torch.device | str | int) -> None:
        _set_device(self.world, device)
        vars(self)["device"] = self.world.device

    @property
    def initialized(self) -> bool:
        """Return whether an instance exists."""
        return AcceleratorState._current_if_open() is not None

    @property
    def fork_launched(self) -> bool:
        """Return whether a parent owns the process group."""
        return self._partial.fork_launched

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy one group, or (None) the world's."""
        self._partial.destroy_process_group(group)

    def show_strategy(self, strategy: Strategy) -> None:
        """Show the chosen strategy: its ``distributed_type``, its mesh, and the plugins that configure it."""
        self.distributed_type = kind = DistributedType(strategy.distributed_type(self._world))
        sets_up = isinstance(strategy, EarlyPartitioning)
        object.__setattr__(self._world, "strategy_type", kind if sets_up else None)
        vars(self).update(strategy.plugins, device_mesh=strategy.mesh)

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return the DeepSpeed plugin of that name."""
        if name not in (self.deepspeed_plugins or {}):
            raise UnknownNameError("DeepSpeed plugin", name, self.deepspeed_plugins or {})
        return self.deepspeed_plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Select the DeepSpeed plugin of that name: the next ``prepare`` uses it."""
        chosen = self.get_deepspeed_plugin(str(name))
        for plugin in self.deepspeed_plugins.values():
            if plugin is not chosen:
                plugin._unselect()
        chosen.select(_from_accelerator_state=True)

    @property
    def mixed_precision(self) -> str:
        """The number format of the forward pass."""
        return self._mixed_precision

    @property
    def deepspeed_plugin(self) -> Any:
        """The selected DeepSpeed plugin; None without DeepSpeed."""
        plugins = (self.deepspeed_plugins or {}).values()
        return next((plugin for plugin in plugins if plugin.selected), None)

    @property
    def is_fsdp2(self) -> bool:
        """Return whether parameters are sharded by ``fully_shard``."""
        return getattr(vars(self).get("fsdp_plugin"), "fsdp_version", 1) == 2

    @classmethod
    def _current_if_open(cls) -> AcceleratorState | None:
        """Return the newest one, until it, its ``_shared_state`` or its world is reset."""
        return cls._current if worlds.current() and cls._current and vars(cls._current) else None

    @classmethod
    def reusable(cls, mixed_precision: str | None) -> AcceleratorState | None:
        """Return the newest one for an ``Accelerator`` that states no choices, or the same precision alone.

        None where the ``Accelerator`` of the newest one is gone or was refused: its choices are over.
        """
        accelerator, newest = cls.newest_accelerator and cls.newest_accelerator(), cls._current
        world = worlds.current()
        if accelerator is None or newest is not accelerator.state or world is None or world.is_closed:
            return None
        # Cleared; or notebook_launcher(mixed_precision=...) has called the function around this one.
        if not vars(newest) or cls._precision_variable != environ.get(_PRECISION_VARIABLE):
            return None
        return newest if mixed_precision in (None, accelerator.state.mixed_precision) else None

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        AcceleratorState._current = None
        for state in list(AcceleratorState._instances):
            vars(state).clear()
        if reset_partial_state:
            PartialState._reset_state()


class _ClosedWorldAttributeError(WorldError, AttributeError):
    """The error of attributes after the world was closed: ``hasattr`` is False then."""


class _NoAcceleratorError(WorldError, ValueError):
    """The error without an ``Accelerator``: clients catch a ValueError."""


_OF_THE_GROUP = (
    "it is that of the process group, which goes on as it was started",
    "start the processes by accelerate launch with the options that you want",
)
refuse_assignments(PartialState, dict.fromkeys(("backend", "fork_launched"), _OF_THE_GROUP))
refuse_assignments(AcceleratorState, {"fork_launched": _OF_THE_GROUP})
for _state in (PartialState, AcceleratorState):
    _report_assignments(_state, "num_processes", "size")
    _report_assignments(_state, "process_index", "rank")
    _report_assignments(_state, "local_process_index", "local_rank")
