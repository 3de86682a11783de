"""The wrapper of FSDP1: wraps a model unit by unit, with one unsharded unit in memory at a time.

Source: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel"
(arXiv:2304.11277), and ``torch.distributed.fsdp.FullyShardedDataParallel``, which does the work.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, FlatParameter, ShardingStrategy, _flat_param
from torch.distributed.tensor import DTensor

from accelerate.core.errors import PrepareError, warn_user
from accelerate.strategy.fsdp1.flat_parameter_layout import walk_modules
from accelerate.strategy.fsdp1.model_state_dict import FSDP1WrappedModel
from accelerate.strategy.sharding.activation_checkpointing import checkpoint_activations
from accelerate.strategy.sharding.fsdp2_options import NORM_UNITS
from accelerate.strategy.sharding.fsdp2_sharder import broadcast_over_mesh, has_hooks
from accelerate.strategy.sharding.initial_weights import (
    is_unwritten,
    materialize_modules,
    refuse_uninitialized,
)
from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin
from accelerate.strategy.sharding.sharding_layout import (
    ShardingLayout,
    exchange_digests,
    plan_layout,
)
from accelerate.world import collective

# The attribute of torch's root wrapper that holds the ``FSDP1WrappedModel``.
_RECORD = "_accelerate_record"
InitFunction = Callable[[nn.Module], None]


class FullyShardedDataParallel(fsdp.FullyShardedDataParallel):
    """The wrapper of torch, without a name of its own in the names of modules.

    peft 0.21 chooses adapters by comparing names of modules with those of state dicts, which torch gives
    without the wrappers: where they differ, it saves a file without any weight. Parameters and buffers of the
    root have torch's names: transformers' Trainer looks for those that it composes from ``named_children``,
    and gives weight decay to no other.
    """

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module]]:
        """Yield this wrapper, the module in it under the same name, and all modules in both.

        In a module around the root they have torch's names, of which those of its parameters are made.
        """
        hide = memo is None or _RECORD not in vars(self)
        return _walk(self, set() if memo is None else memo, prefix, remove_duplicate, hide)

    def _named_members(
        self, get_members_fn: Any, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Generator[tuple[str, Any]]:
        """Yield parameters or buffers by torch's names, which torch cleans in ``summon_full_params``."""
        seen: set[Any] = set()
        for path, module in _walk(self, set(), prefix, remove_duplicate, hide=False):
            for name, value in get_members_fn(module) if recurse or module is self else ():
                if value is not None and value not in seen:
                    seen.update([value] if remove_duplicate else ())
                    yield f"{path}.{name}" if path else name, value


def _walk(
    module: nn.Module, memo: set[nn.Module], prefix: str, remove_duplicate: bool, hide: bool
) -> Generator[tuple[str, nn.Module]]:
    """Yield modules as ``nn.Module.named_modules`` does; with ``hide``, wrapped ones have no own name."""
    if module in memo:
        return
    if remove_duplicate:
        memo.add(module)
    yield prefix, module
    for name, child in module._modules.items():
        # Assigned to the prepared model, a module is beside the wrapped one.
        path = prefix if hide and name == "_fsdp_wrapped_module" else f"{prefix}.{name}" if prefix else name
        if child is not None:
            yield from _walk(child, memo, path, remove_duplicate, hide)


class FSDP1FlatParamHandle(_flat_param.FlatParamHandle):
    """The handle of torch, which loses no gradient where windows are resumed, offloaded or branch."""

    @property
    def sharded_grad(self) -> torch.Tensor | None:
        """The reduced gradient; torch takes the last one on the host for it, also after it was cleared."""
        gradient = self.flat_param.grad
        is_settled = self._offload_params and self._training_state.name in ("IDLE", "FORWARD")
        return gradient if is_settled and (gradient is None or gradient.is_cpu) else super().sharded_grad

    def prepare_gradient_for_backward(self) -> None:
        """Put reduced gradients aside; refuse a second backward through the last forward of a unit.

        torch reduces gradients, and frees the unsharded parameters, in the first one.
        """
        flat: Any = self.flat_param
        if flat.requires_grad and not hasattr(flat, "_post_backward_hook_state"):
            raise PrepareError(
                "a second backward through one forward of a model under FSDP1",
                why="torch reduces the gradients of a unit once for each forward; torch.autograd.grad "
                "counts too",
                fix="fsdp_version=2, or add the losses and run one backward",
            )
        if self._offload_params and flat.grad is not None and flat.grad.is_cpu:
            # torch would overwrite what earlier reductions have left on the host.
            gradient, flat.grad = flat.grad.to(self.device), None
            if self.uses_sharded_strategy:
                flat._saved_grad_shard = gradient
            else:
                flat.grad = torch.empty_like(flat)
                flat.grad.data = gradient  # of another dtype under mixed precision
        super().prepare_gradient_for_backward()
        # torch notes which gradients were cleared until the next reduction: NO_SHARD would drop one that a
        # window accumulates before, of a parameter that was frozen or cleared alone.
        for index, parameter in enumerate(flat._params or ()):
            if parameter.requires_grad:
                flat._is_grad_none_mask[index] = False

    def prepare_gradient_for_optim(self) -> None:
        """Give a unit that was reduced its gradients; one that the backward did not reach keeps its own."""
        flat: Any = self.flat_param
        if not flat._post_backward_called:
            # torch would drop them, or take those of an earlier step from the host.
            gradient = vars(flat).pop("_saved_grad_shard", None)
            if gradient is not None and flat.grad is None:
                flat.grad = gradient.to(flat.device)
            return
        if self.uses_sharded_strategy and flat.grad is not None:
            raise PrepareError(
                "the last micro-batch of a window did not reach a layer that an earlier one had reached",
                why="FSDP1 reduces the gradients of an FSDP unit in its own backward only",
                fix="fsdp_version=2, or GradientAccumulationPlugin(sync_each_batch=True)",
            )
        super().prepare_gradient_for_optim()


@dataclass(frozen=True)
class FSDP1WrapLayout(ShardingLayout):
    """The layout in which one model will be wrapped.

    Attributes:
        units: the FSDP units, inner ones first, the root last; with the parameters of each.
        upcast_params: parameters in half precision that become float32: all of a unit that trains.
    """

    units: list[tuple[nn.Module, list[nn.Parameter]]]
    upcast_params: set[nn.Parameter]

    def storage_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype in which it is stored; frozen ones too: the parameters of a unit become one."""
        return torch.float32 if tensor in self.upcast_params else tensor.dtype

    def shard_numel(self, parameter: nn.Parameter, size: int) -> int:
        """Return the elements of a parameter on each rank; it may be split at any element."""
        return -(-parameter.numel() // size)


def make_layout(model: nn.Module, plugin: FullyShardedDataParallelPlugin, precision: str) -> FSDP1WrapLayout:
    """Return how ``model`` will be wrapped; changes nothing.

    Raises:
        SettingError, PrepareError: the model cannot be wrapped so.
    """
    base = plan_layout(model, plugin, precision)
    done: set[nn.Parameter] = set(base.ignored)
    units: list[tuple[nn.Module, list[nn.Parameter]]] = []
    upcast_params: set[nn.Parameter] = set()
    names = {p: name for name, p in model.named_parameters()}
    for part in (*base.norms, *base.blocks, model):
        unit_params = [p for p in part.parameters() if p not in done]
        done.update(unit_params)
        units.append((part, unit_params))
        if base.upcast and any(p.requires_grad for p in unit_params):
            upcast_params |= {p for p in unit_params if p.is_floating_point() and p.dtype.itemsize == 2}
        _check_unit(unit_params, upcast_params, names, bool(plugin.use_orig_params))
    return FSDP1WrapLayout(**vars(base), units=units, upcast_params=upcast_params)


def _check_unit(
    own: list[nn.Parameter], upcast_params: set[nn.Parameter], names: dict[nn.Parameter, str], originals: bool
) -> None:
    """Refuse a unit whose parameters differ in dtype, or in whether they train.

    Raises:
        PrepareError: names the parameters.
    """
    types: dict[torch.dtype, str] = {}
    for parameter in own:
        types.setdefault(torch.float32 if parameter in upcast_params else parameter.dtype, names[parameter])
    if len(types) > 1:
        listing = ", ".join(f"{name} in {dtype}" for dtype, name in types.items())
        raise PrepareError(
            f"parameters of several dtypes in one FSDP unit: {listing}",
            why="FSDP1 joins the parameters of a unit into one, frozen ones too",
            fix="cast them to one dtype, name the frozen modules in ignored_modules, or use fsdp_version=2",
        )
    trained = {p.requires_grad: names[p] for p in reversed(own)}
    if not originals and len(trained) > 1:
        raise PrepareError(
            f"{trained[True]} trains and {trained[False]} is frozen, in one FSDP unit",
            why="with use_orig_params=False the parameters of a unit are one parameter",
            fix="use_orig_params=True (FSDP_USE_ORIG_PARAMS=true)",
        )


def _initialize_outside_inference(root: nn.Module) -> None:
    """Let the first forward make what torch keeps outside of ``inference_mode``, for the training later."""

    def initialize(*_: Any) -> None:
        from torch.distributed.fsdp._runtime_utils import _lazy_init

        handle.remove()
        with torch.inference_mode(False), torch.no_grad():
            _lazy_init(root, root)

    uncompiled: Any = torch.compiler.disable(initialize)
    handle = root.register_forward_pre_hook(uncompiled)


@dataclass
class FSDP1Wrapper:
    """Wraps models over a device mesh.

    Attributes:
        mesh: the device mesh; of two dimensions under HSDP.
        plugin: the options.
        strategy: torch's sharding strategy.
        device: where this rank computes.
    """

    mesh: DeviceMesh
    plugin: FullyShardedDataParallelPlugin
    strategy: ShardingStrategy
    device: torch.device

    def wrap(self, model: nn.Module, layout: FSDP1WrapLayout) -> tuple[FSDP1WrappedModel, list[Any]]:
        """Wrap ``model``; afterwards it has the weights of rank 0 on all ranks.

        Returns:
            (the wrapped model, (old, (new, stand-in or None)) of the replaced parameters)
        """
        plugin = self.plugin
        initialize = _check_models_agree(model, plugin.param_init_fn)
        order, formats = list(model.state_dict()), {n: b.dtype for n, b in model.named_buffers()}
        names = {p: name for name, p in model.named_parameters()}
        warn_of_hooks(model)
        if plugin.activation_checkpointing and (layout.blocks or plugin.auto_wrap_policy is None):
            checkpoint_activations(model, layout.blocks)
        parents = _parent_modules(model)
        prefixes = {module: prefix for prefix, module in walk_modules(model)}
        flattened = {} if plugin.use_orig_params else _flattened_modules(layout.units)
        materialized: dict[torch.Tensor, torch.Tensor] = {}
        NORM_UNITS.update(layout.norms)
        done: set[nn.Module] = set()
        unwritten: set[str] = set()
        wrapped: nn.Module = model
        for part, parameters in layout.units:
            modules = [m for _, m in walk_modules(part) if m not in done]
            done.update(modules)
            left = self._materialize(modules, layout, materialized, initialize)
            unwritten.update(f"{prefixes[module]}{name}" for module, name in left)
            wrapped = self._wrap_unit(part, layout)
            if not plugin.use_orig_params:
                # Optimizers may still hold them: their memory is freed now, not when these are remapped.
                for parameter in parameters:
                    for each in (parameter, materialized.get(parameter, parameter)):
                        each.data = each.data.new_empty(0)
            for parent, name in parents.get(part, ()):
                parent._modules[name] = wrapped
        wrapped_model = FSDP1WrappedModel(wrapped, self.mesh, order, formats)
        wrapped.__dict__[_RECORD] = wrapped_model
        _guard_state_dict(wrapped)
        _initialize_outside_inference(wrapped)
        if unwritten:
            _guard_forward(wrapped_model, unwritten)
        for module, name in flattened.items():
            # It has no parameters any more that it could change.
            vars(module)["requires_grad_"] = partial(_refuse_requires_grad, name)
        flats = {
            n: (unit.flat, slot.stand_in)
            for unit in wrapped_model.flat_params
            for slot in unit.slots
            for n in slot.names
        }
        renewed: list[tuple[torch.Tensor, tuple[torch.Tensor, Any]]] = []
        for old, name in names.items():
            new, stand_in = materialized.get(old, old), None
            if not plugin.use_orig_params and name in flats:
                new, stand_in = flats[name]
            if new is not old:
                renewed.append((old, (new, stand_in)))
        return wrapped_model, renewed

    def _wrap_unit(self, part: nn.Module, layout: FSDP1WrapLayout) -> nn.Module:
        plugin = self.plugin
        with warnings.catch_warnings():
            # The user asked for it by name.
            warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy is deprecated")
            unit = FullyShardedDataParallel(
                part,
                device_mesh=self.mesh,
                sharding_strategy=self.strategy,
                # On the CPU there is nothing to offload.
                cpu_offload=CPUOffload(plugin.offloads_params and self.device.type != "cpu"),
                backward_prefetch=plugin.backward_prefetch,
                # Without shards there is nothing to gather ahead, and torch would not reduce the gradients
                # of a forward that torch.utils.checkpoint computes again.
                forward_prefetch=plugin.forward_prefetch and self.strategy is not ShardingStrategy.NO_SHARD,
                mixed_precision=None if part in layout.norms else layout.precision,
                ignored_states=layout.ignored or None,
                device_id=self.device,
                limit_all_gathers=plugin.limit_all_gathers,
                use_orig_params=bool(plugin.use_orig_params),
            )
        if (handle := unit._handle) is not None:
            handle.__class__ = FSDP1FlatParamHandle
        return unit

    @torch.no_grad()
    def _materialize(
        self,
        modules: list[nn.Module],
        layout: FSDP1WrapLayout,
        materialized: dict[torch.Tensor, torch.Tensor],
        initialize: InitFunction | None,
    ) -> list[tuple[nn.Module, str]]:
        """Materialize a unit on the device with the values of rank 0; a tied tensor stays one.

        Returns:
            the (module, name) pairs of the tensors that ``initialize`` left without values.
        """
        make = partial(layout.materialize, device=self.device)
        left = materialize_modules(modules, (materialized, materialized), make, initialize)
        tables: Any = [(m, table) for m in modules for table in (m._parameters, m._buffers)]
        tensors = {
            id(t): t
            for _, table in tables
            for t in table.values()
            if t is not None and not (t in layout.ignored and isinstance(t, DTensor))  # of the program's
        }
        if self.plugin.sync_module_states:
            for tensor in tensors.values():
                broadcast_over_mesh(tensor.data, self.mesh)
        # Rank 0 may have written what this rank has not.
        unwritten = {id(t) for t in left if id(t) in tensors and is_unwritten(t)}
        if not self.plugin.sync_module_states:
            _check_equal_weights(t for key, t in tensors.items() if key not in unwritten)
        return [(m, name) for m, table in tables for name, t in table.items() if id(t) in unwritten]


def warn_of_hooks(model: nn.Module) -> None:
    """Warn of a parameter with gradient hooks of the user; those of a flat parameter are called."""
    for prefix, module in walk_modules(model):
        for name, parameter in module.named_parameters(recurse=False):
            if has_hooks(parameter) and not isinstance(parameter, FlatParameter):
                warn_user(
                    f"the gradient hooks of {prefix}{name} are not called under FSDP1, which computes with "
                    "views of a flat parameter: take fsdp_version=2, or change the gradients after the "
                    "backward"
                )
                return


def _check_models_agree(model: nn.Module, initialize: InitFunction | None) -> InitFunction | None:
    """Refuse models that differ between ranks by more than their values, and those without values.

    Returns:
        ``initialize`` where it is needed: rank 0 has no values either.

    Raises:
        PrepareError: on all ranks.
    """
    empty = exchange_digests(model)[0]
    if empty and initialize is None:
        raise PrepareError(
            f"{empty} is on the meta device, on rank 0 too",
            why="all ranks get shards of the weights of rank 0",
            fix="load the weights on rank 0, or give the plugin a param_init_fn",
        )
    return initialize if empty else None


def _parent_modules(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Return the parents of each module, with its name in each."""
    parents: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, child in module._modules.items():
            if child is not None:
                parents.setdefault(child, []).append((module, name))
    return parents


def _check_equal_weights(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse values that differ between ranks: nothing would make them equal.

    Raises:
        PrepareError: on all ranks.
    """
    sums = [tensor.double().sum().item() for tensor in tensors]
    sums_by_rank = collective.compare_objects(sums, "prepare(model) with sync_module_states=False")
    other = [rank for rank, total in enumerate(sums_by_rank) if total != sums_by_rank[0]]
    if other:
        raise PrepareError(
            f"sync_module_states=False, and the weights of rank {other[0]} are not those of rank 0",
            why="every rank keeps its own shard, so the model would be a mixture",
            fix="leave sync_module_states out: all begin with the weights of rank 0",
        )


def _guard_state_dict(root: nn.Module) -> None:
    """Make ``root.state_dict()``, a collective, an error and no deadlock where not all ranks call it."""

    def meet(*_: Any) -> None:
        collective.compare_objects(None, "model.state_dict()")

    handle = root.register_state_dict_pre_hook(meet)
    # Torch's own comes first otherwise, and that is where it gathers.
    hooks: Any = root._state_dict_pre_hooks
    hooks.move_to_end(handle.id, last=False)


def _guard_forward(wrapped_model: FSDP1WrappedModel, names: set[str]) -> None:
    """Refuse a forward, on every rank, before the parameters and buffers ``names`` have values."""

    def check(*_: Any) -> None:
        pieces = dict((*wrapped_model.parameters(), *wrapped_model.buffers()))
        for unit in wrapped_model.flat_params:
            local = unit.local_values()
            pieces.update((name, unit.local_piece(slot, local)) for slot in unit.slots for name in slot.names)
        empty = [name for name, piece in pieces.items() if name in names and is_unwritten(piece)]
        every = collective.compare_objects(empty, "the first forward of a model with a param_init_fn")
        refuse_uninitialized(name for left in every for name in left)
        handle.remove()

    hook: Any = torch.compiler.disable(check)
    handle = wrapped_model.root.register_forward_pre_hook(hook, prepend=True)


def _flattened_modules(units: list[tuple[nn.Module, list[nn.Parameter]]]) -> dict[nn.Module, str]:
    """Return the modules, with their names, of which a flat parameter around them takes parameters."""
    root = units[-1][0]
    flattened: dict[nn.Module, str] = {}
    for name, module in root.named_modules():
        inside = set(module.modules())
        own = {p for part, params in units if part in inside for p in params}
        if any(p not in own for p in module.parameters()):
            flattened[module] = name
    return flattened


def _refuse_requires_grad(name: str, requires_grad: bool = True) -> None:
    raise PrepareError(
        f"{name}.requires_grad_({requires_grad}) after prepare, with use_orig_params=False",
        why="the parameters of an FSDP unit are one flat parameter, which trains as a whole",
        fix="use_orig_params=True (FSDP_USE_ORIG_PARAMS=true), or freeze whole units before prepare",
    )


def wrapped_model_of(model: Any) -> FSDP1WrappedModel | None:
    """Return the ``FSDP1WrappedModel`` of a model, None for any other."""
    return getattr(model, "__dict__", {}).get(_RECORD)


def is_wrapped(model: nn.Module) -> bool:
    """Return whether ``model`` is an object of torch's class."""
    return isinstance(model, fsdp.FullyShardedDataParallel)
