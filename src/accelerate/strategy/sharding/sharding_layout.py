"""The layout of a model: its FSDP units, unsharded parameters and dtypes, for FSDP1 and FSDP2.

Nothing is changed here; what cannot be sharded is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from accelerate.core.errors import PrepareError, SettingError, list_first
from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin
from accelerate.world import collective

# They have no forward of their own before which their parameters could be all-gathered.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class ShardingLayout:
    """The layout in which one model will be sharded.

    Attributes:
        blocks: the modules that are FSDP units, inner ones first, without the root.
        norms: batch norms, where weights are computed in half precision: units of their own, whose weights
            stay as they are stored, like their running statistics. On a CPU torch refuses to mix them.
        ignored: parameters that are not sharded.
        precision: torch's mixed precision policy; None to compute in the dtype of the weights.
        upcast: whether trained weights in half precision become float32: by the ``Accelerator``'s precision.
    """

    blocks: list[nn.Module]
    norms: list[nn.Module]
    ignored: set[nn.Parameter]
    precision: Any
    upcast: bool

    def describe(self) -> str:
        """Describe the layout, as a clause."""
        kinds = sorted({type(block).__name__.removeprefix("FSDP") for block in self.blocks})
        parts = f"{len(self.blocks)} x {'/'.join(kinds)} and the rest" if self.blocks else "the whole model"
        compute = self.precision.param_dtype if self.precision else None
        reduce = self.precision.reduce_dtype if self.precision else None
        formats = f", computed in {compute}, gradients reduced in {reduce or compute}" if compute else ""
        return f"all-gathered as {parts}{formats}"

    def storage_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a parameter or buffer is stored: float32 for trained half precision."""
        upcasts = self.upcast and tensor.requires_grad and tensor.dtype.itemsize == 2
        return torch.float32 if upcasts else tensor.dtype

    @torch.no_grad()
    def materialize(self, old: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a parameter or buffer on ``device`` in its stored dtype: the same object, where possible.

        A meta tensor gets memory. Some devices cannot swap a tensor's data: a new tensor replaces it there.
        A parameter that is sharded becomes contiguous: FSDP2 of torch refuses others, and FSDP1 would store
        them in the order of their memory, not of their elements.
        """
        dtype = self.storage_dtype(old)
        contiguous = old.is_contiguous() or not isinstance(old, nn.Parameter) or old in self.ignored
        if old.is_meta:
            data = torch.empty_like(old.data, dtype=dtype, device=device)
        elif contiguous and (old.device, old.dtype) == (device, dtype):
            return old
        else:
            data = old.data.to(device, dtype)
        if not contiguous:
            data = data.contiguous()
        if data.device == old.device and not isinstance(old, DTensor):
            old.data = data
            return old
        if not isinstance(old, nn.Parameter):
            return data
        new = nn.Parameter(data, old.requires_grad)
        if old in self.ignored:
            self.ignored.add(new)
        return new

    def bytes_per_process(self, model: nn.Module, size: int, *, offloaded: bool) -> int:
        """Return the bytes of ``model`` on each rank's device once it is sharded, between two steps.

        Args:
            model: the model.
            size: ranks that shard its parameters.
            offloaded: whether shards rest on the host.
        """
        total = sum(b.numel() * b.element_size() for b in model.buffers())
        for parameter in model.parameters():
            if parameter in self.ignored:
                total += parameter.numel() * parameter.element_size()
            elif not offloaded:
                total += self.shard_numel(parameter, size) * self.storage_dtype(parameter).itemsize
        return total

    def shard_numel(self, parameter: nn.Parameter, size: int) -> int:
        """Return the elements of a parameter that each of ``size`` ranks holds: whole rows."""
        rows = parameter.shape[0]
        return -(-rows // size) * (parameter.numel() // max(1, rows))


def plan_layout(model: nn.Module, plugin: FullyShardedDataParallelPlugin, precision: str) -> ShardingLayout:
    """Return how ``model`` will be sharded; does not change it.

    Args:
        model: the model.
        plugin: the options.
        precision: of the ``Accelerator``, for a plugin to which no policy was given. As in 1.x, it alone
            makes trained weights float32: under ``"no"`` those of a policy keep their dtype.

    Raises:
        SettingError, PrepareError: the model cannot be sharded so.
    """
    ignored = set() if plugin.ignored_modules is None else _find_ignored(model, plugin.ignored_modules)
    blocks: list[nn.Module] = []
    if plugin.auto_wrap_policy is not None:
        blocks = find_units(model, plugin.policy_for(model), ignored)
    if precision != plugin._implied[0]:  # another Accelerator has the plugin too
        plugin.imply_mixed_precision(precision)
    # Programs assign both after the plugin is made, also the objects of the other FSDP version.
    if plugin.mixed_precision_policy is not None:
        plugin.validate_mixed_precision_policy()
    if type(plugin.cpu_offload) is not OffloadPolicy:
        plugin.set_cpu_offload()
    policy = plugin.mixed_precision_policy
    compute = policy.param_dtype if policy else None
    is_half = compute is not None and compute.itemsize == 2
    norms: list[nn.Module] = []
    for part in model.modules() if is_half else ():
        mean, weights = getattr(part, "running_mean", None), part._parameters.values()
        is_inside = part is not model and part not in ignored
        has_float32 = isinstance(mean, torch.Tensor) and mean.dtype == torch.float32
        if is_inside and has_float32 and any(each is not None for each in weights):
            norms.append(part)
    norms = _drop_sharing_units(model, norms) if norms else norms
    whole = {parameter for module in ignored for parameter in module.parameters(recurse=False)}
    blocks = [part for part in blocks if part not in norms]
    layout = ShardingLayout(blocks, norms, whole, policy, upcast=is_half and precision != "no")
    _check_params(model, layout)
    return layout


def find_units(model: nn.Module, policy: Any, ignored: set[nn.Module]) -> list[nn.Module]:
    """Return the modules below ``model`` that are FSDP units, inner ones before those around them.

    A module that shares a parameter with something outside of it is no unit: torch all-gathers a parameter
    in one unit.

    Args:
        model: the model.
        policy: a policy of ``torch.distributed.fsdp.wrap``, or None.
        ignored: modules that are not sharded.
    """
    if policy is None:
        return []
    selected_modules = _apply_policy(model, policy, ignored)
    # Its forward computes with their weights, and does not call them: nothing would all-gather these.
    uncalled = {
        part for m in model.modules() if isinstance(m, nn.MultiheadAttention) for part in [*m.modules()][1:]
    }
    selected_modules -= uncalled
    # Outputs of those outside of a pipeline's blocks may not be in the graph, where hooks all-gather weights.
    selected_modules -= {part for part in selected_modules if vars(part).get("_outside_pipeline_blocks")}
    ordered = [part for part in _modules_bottom_up(model) if part in selected_modules and part is not model]
    return _drop_sharing_units(
        model,
        [
            part
            for part in ordered
            if not isinstance(part, _CONTAINERS) and next(part.parameters(), None) is not None
        ],
    )


def _modules_bottom_up(model: nn.Module) -> list[nn.Module]:
    """Return every module once, children before their parents."""
    seen: dict[nn.Module, None] = {}

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if child not in seen:
                walk(child)
        seen[module] = None

    walk(model)
    return list(seen)


def _apply_policy(model: nn.Module, policy: Any, ignored: set[nn.Module]) -> set[nn.Module]:
    if isinstance(policy, CustomPolicy | ModuleWrapPolicy) or not callable(policy):
        if not hasattr(policy, "_run_policy"):
            raise SettingError(
                f"auto_wrap_policy is a {type(policy).__name__}, which is no policy",
                fix="use a name, or a policy of torch.distributed.fsdp.wrap",
            )
        return set(policy._run_policy(model, ignored, {}))
    chosen: set[nn.Module] = set()
    _apply_callable_policy(model, cast("Callable[..., bool]", policy), ignored, chosen)
    return chosen


def _apply_callable_policy(
    module: nn.Module, policy: Callable[..., bool], ignored: set[nn.Module], chosen: set
) -> int:
    """Ask ``policy`` as torch does, children first; return how many parameters are in units."""
    if module in ignored or module in chosen:
        return 0
    numel = sum(p.numel() for p in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    units_numel = sum(_apply_callable_policy(child, policy, ignored, chosen) for child in module.children())
    if policy(module=module, recurse=False, nonwrapped_numel=numel - units_numel):
        chosen.add(module)
        return numel
    return units_numel


def _drop_sharing_units(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with another unit."""
    while True:
        owners: dict[nn.Parameter, set[nn.Module]] = {}
        _collect_owners(model, model, set(blocks), owners)
        shared = set().union(*(units for units in owners.values() if len(units) > 1), set())
        unshared_blocks = [block for block in blocks if block not in shared]
        if len(unshared_blocks) == len(blocks):
            return unshared_blocks
        blocks = unshared_blocks


def _collect_owners(
    module: nn.Module, owner: nn.Module, blocks: set[nn.Module], owners: dict[nn.Parameter, set[nn.Module]]
) -> None:
    for parameter in module._parameters.values():
        if parameter is not None:
            owners.setdefault(parameter, set()).add(owner)
    for child in module.children():
        _collect_owners(child, child if child in blocks else owner, blocks, owners)


def _find_ignored(model: nn.Module, ignored_modules: Iterable[nn.Module] | str) -> set[nn.Module]:
    """Return the modules that are not sharded, with everything inside them.

    Args:
        model: the model.
        ignored_modules: the modules, or a regular expression that matches their full names.

    Raises:
        SettingError: the expression is invalid, or matches no module.
        PrepareError: they hold trained parameters that are no DTensors, whose gradients nobody would reduce,
            or DTensors without values.
    """
    if isinstance(ignored_modules, str):
        try:
            pattern = re.compile(ignored_modules)
        except re.error as error:
            raise SettingError(
                f"ignored_modules {ignored_modules!r} is no regular expression", why=str(error)
            ) from error
        tops = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
        if not tops:
            raise SettingError(
                f"ignored_modules {ignored_modules!r} matches no module of the {type(model).__name__}",
                why="the whole name is compared, such as 'model.layers.0.mlp'",
                fix=f"for example '.*{ignored_modules}.*'",
            )
    else:
        tops = list(ignored_modules)
    ignored = {part for top in tops for part in top.modules()}
    inside = [
        (name, p)
        for path, part in model.named_modules()
        if part in ignored
        for name, p in part.named_parameters(prefix=path, recurse=False)
    ]
    # A DTensor over all ranks is the program's: it has sharded it, and reduces its gradient. One over some of
    # them, as under tensor parallelism, has replicas, of which nobody might reduce the gradients.
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trained = [
        name
        for name, p in inside
        if p.requires_grad and not (isinstance(p, DTensor) and p.device_mesh.size() == size)
    ]
    if trained:
        raise PrepareError(
            f"ignored modules hold trained parameters: {list_first(trained)}",
            why="gradients of unsharded parameters are not reduced: every rank would train its own",
            fix="freeze them (requires_grad_(False)), take them out of ignored_modules, or make DTensors of "
            "them on a device mesh of all processes",
        )
    if empty := [name for name, p in inside if p.is_meta and isinstance(p, DTensor)]:
        raise PrepareError(
            f"ignored modules hold DTensors on the meta device: {list_first(empty)}",
            why="each rank has another shard of them, so that the values of rank 0 are of no use",
            fix="load their values before prepare",
        )
    return ignored


def _check_params(model: nn.Module, layout: ShardingLayout) -> None:
    """Refuse parameters that cannot be sharded, before anything is changed.

    Raises:
        PrepareError: a parameter is a scalar or gets sparse gradients, one unit holds trained parameters of
            several dtypes, or a quantized weight is stored in a floating point dtype that is not the compute
            dtype: numbers survive the cast before the all-gather, packed bits do not.
    """
    names = {p: name for name, p in model.named_parameters()}
    sparse = {
        p for m in model.modules() if getattr(m, "sparse", None) is True for p in m._parameters.values()
    }
    compute = layout.precision.param_dtype if layout.precision else None
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    _collect_owners(model, model, {*layout.norms, *layout.blocks}, owners)
    groups: dict[nn.Module, dict[torch.dtype, str]] = {}
    for parameter, units in owners.items():
        if parameter in layout.ignored:
            continue
        if parameter.dim() == 0:
            raise PrepareError(
                f"the parameter {names[parameter]} is a scalar, which cannot be sharded",
                fix="make it one-dimensional: torch.nn.Parameter(torch.ones(1))",
            )
        if parameter in sparse and parameter.requires_grad:
            raise PrepareError(
                f"the gradients of {names[parameter]} are sparse",
                why="gradients of a unit are reduce-scattered as one dense tensor",
                fix="make its module with sparse=False, or train without FSDP",
            )
        if hasattr(parameter, "CB"):  # Int8Params of bitsandbytes
            raise PrepareError(
                f"FSDP2 cannot shard {names[parameter]}, a weight in 8 bits by bitsandbytes",
                why="its layer reads scales that are attributes of the whole weight, and a shard has none",
                fix="load the model in 4 bits, or train it by DDP",
            )
        packed = getattr(parameter, "quant_state", None) is not None and parameter.dtype.is_floating_point
        if packed and compute not in (None, parameter.dtype):
            dtype_name = str(compute).removeprefix("torch.")
            raise PrepareError(
                f"the quantized weight {names[parameter]} is stored as {parameter.dtype}, and computed in "
                f"{compute}",
                why="weights are cast before the all-gather, and its packed bits would not survive that",
                fix=f"quantize with bnb_4bit_quant_storage='uint8', or '{dtype_name}', as it is computed",
            )
        if parameter.requires_grad:
            dtype = layout.storage_dtype(parameter)
            groups.setdefault(next(iter(units)), {}).setdefault(dtype, names[parameter])
    for types in groups.values():
        if len(types) > 1:
            listing = ", ".join(f"{name} in {dtype}" for dtype, name in types.items())
            raise PrepareError(
                f"trained parameters of several dtypes in one FSDP unit: {listing}",
                why="they are all-gathered, and their gradients reduce-scattered, as one",
                fix="cast them to one dtype, for example model.float(), or freeze some of them",
            )


def model_digest(model: nn.Module) -> str:
    """Return a digest of the names, shapes, dtypes and ``requires_grad`` that must be equal on all ranks."""
    rows = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    rows += [(name, tuple(b.shape), str(b.dtype), False) for name, b in model.named_buffers()]
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def exchange_digests(model: nn.Module) -> list[str]:
    """Refuse models that differ between ranks by more than their values.

    Returns:
        of each rank the name of a tensor without values, empty where there is none; one where all have the
        same.

    Raises:
        PrepareError: on all ranks.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    empty = next((name for name, tensor in tensors if tensor.is_meta), "")
    infos = collective.compare_objects((model_digest(model), empty), "prepare(model)")
    other = [rank for rank, (digest, _) in enumerate(infos) if digest != infos[0][0]]
    if other:
        raise unequal_models_error(model, other[0], 0)
    return [empty for _, empty in infos]


def unequal_models_error(model: nn.Module, rank: int, first: int) -> PrepareError:
    """Return the error for a model on ``rank`` that differs from that of rank ``first``."""
    return PrepareError(
        f"the {type(model).__name__} of rank {rank} has other parameters than that of rank {first}",
        why="names, shapes, dtypes and which of them train must be equal: every rank holds a shard",
        fix="build the model in the same way on all processes",
    )
