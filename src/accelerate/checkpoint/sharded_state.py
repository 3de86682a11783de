"""Sharded states of models and optimizers: how they are saved, and loaded under any strategy.

Everything goes by the names of the parameters, which are the same whether a model is plain, replicated or
sharded. So shards that were saved under one strategy, at one world size, load under another at any world
size: each rank reads the chunks that overlap its own.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.module import _IncompatibleKeys

from accelerate.checkpoint import layout, state_dict_files, torch_files
from accelerate.checkpoint.dcp_files import (
    RankShardFile,
    ShardFolderReader,
    filter_tensors,
    optimizer_entries,
    read_nested,
)
from accelerate.checkpoint.file_reads import ReadPlan
from accelerate.checkpoint.layout import CheckpointLoadContext, ManifestEntry
from accelerate.checkpoint.shard_plans import CombinedPlans, KnownPlan, split_save_plan
from accelerate.checkpoint.state_dict_files import SHOWN, describe_other_class
from accelerate.core.errors import CheckpointError, list_first
from accelerate.world.shard_boxes import ShardBox

_CHECKPOINTED = "_checkpoint_wrapped_module."  # torch's wrapper for activation checkpointing


_known_plans: WeakKeyDictionary[Any, KnownPlan] = WeakKeyDictionary()


class _ShardedState:
    """The base of sharded states of models and optimizers: the plan of a save, and this rank's shard."""

    category: ClassVar[str]
    local_training: bool
    _saving: tuple[DefaultSavePlanner, SavePlan, Any, dict[str, str]] | None = None
    _digest = b""
    _index: Metadata | None = None
    _boxes: dict[MetadataIndex, ShardBox]

    def state_to_save(self, rank: int) -> tuple[Any, dict[str, Any], dict[str, str]]:
        """Return (object, its nested state for this rank to save, names that share the tensor of another).

        The state has one key, above those of the object.
        """
        raise NotImplementedError

    def local_plan(self, rank: int, size: int, /) -> tuple[SavePlan, str]:
        """Plan the save, see ``ShardedState``."""
        saved_object, state, ties = self.state_to_save(rank)
        # Replicas that were trained apart differ: those of the lowest rank are saved, not of the least busy.
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=self.local_training)
        planner.set_up_planner(state)
        plan, self._boxes = planner.create_local_plan(), {}
        tensors = (value for value in planner.state_dict.values() if isinstance(value, DTensor))
        if any(hasattr(placement, "split_factor") for value in tensors for placement in value.placements):
            plan, self._boxes = split_save_plan(plan, planner.state_dict)
        self._saving = planner, plan, saved_object, ties
        self._digest = hashlib.blake2b(pickle.dumps((plan, self.local_training)), digest_size=16).digest()
        known = _known_plans.get(saved_object)
        is_same = known is not None and known.digest == self._digest and known.combined.size == size
        return plan, known.combined.id if known is not None and is_same else ""

    def combine_plans(self, plans: list[SavePlan], /) -> CombinedPlans:
        """Combine the plans of all ranks, and keep the index for ``shard_writer`` here.

        Replicas plan the same items, and one of them writes each.
        """
        assert self._saving is not None
        planner, _, saved_object, _ = self._saving
        try:
            global_plans, self._index = planner.create_global_plan([*plans])  # torch 2.6 changes the list
        except (ValueError, AssertionError) as error:
            raise CheckpointError(
                f"the ranks' shards of {type(saved_object).__name__} do not make a whole", why=str(error)
            ) from error
        masks = dict[int, int]()
        for rank, (plan, global_plan) in enumerate(zip(plans, global_plans, strict=True)):
            if len(global_plan.items) < len(plan.items):
                written = {item.index for item in global_plan.items}
                masks[rank] = sum((item.index in written) << bit for bit, item in enumerate(plan.items))
        return CombinedPlans(uuid.uuid4().hex, len(plans), masks)

    def shard_writer(self, combined: CombinedPlans | None, index: int, rank: int, /) -> RankShardFile:
        """Return this rank's writer, see ``ShardedState``."""
        assert self._saving is not None
        (planner, plan, saved_object, ties), self._saving = self._saving, None
        kind = type(saved_object).__name__
        if combined is not None:
            combined = combined._replace(masks={r: m for r, m in combined.masks.items() if r == rank})
            _known_plans[saved_object] = KnownPlan(self._digest, combined, self._index)
        known = _known_plans[saved_object]
        entry = ManifestEntry(layout.file_name(f"sharded_{self.category}", index), kind, aliases=ties)
        mask = known.combined.masks.get(rank, -1)
        items = [item for bit, item in enumerate(plan.items) if mask >> bit & 1]
        tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
        values = [planner.lookup_object(item.index) for item in tensors]
        values = [(v.to_local() if isinstance(v, DTensor) else v).detach() for v in values]
        boxes = [self._boxes.get(item.index) for item in tensors]
        objects: list[tuple[MetadataIndex, bytes]] = []
        for item in items:
            if item.type == WriteItemType.BYTE_IO:
                stream = io.BytesIO()
                torch_files.write(planner.lookup_object(item.index), stream)
                objects.append((item.index, stream.getvalue()))
        metadata, self._index = known.index, None
        if self.category == "models" and metadata is not None:
            for name, saved in metadata.state_dict_metadata.items():
                if isinstance(saved, TensorStorageMetadata):
                    dtype = str(saved.properties.dtype).removeprefix("torch.")
                    own_name = ".".join(map(str, metadata.planner_data[name][1:]))
                    entry.tensors[own_name] = dtype, list(saved.size)
        return RankShardFile(
            category=self.category,
            entry=entry,
            file=f"{entry.file}/{layout.file_name('shards', rank=rank)}" if items else "",
            content=[v if box is None else v[box.local_slices] for v, box in zip(values, boxes, strict=True)],
            items=tensors,
            objects=objects,
            index=metadata,
            ties={("model", alias): ("model", name) for alias, name in ties.items()},
        )


@dataclass(eq=False)
class ShardedModelState(_ShardedState):
    """A model whose state is saved sharded.

    Args:
        module: the user's own module, sharded or not.
        only: maps the names of the tensors to save and load to their saved names; None for all, by their own.
        local_training: each rank trains its own replica, so only DTensors and rank 0's tensors are saved.
        remote_names: names of the model's state that only other ranks have.
        saved_buffers: buffers that this rank saves, since rank 0 does not have them.
    """

    module: nn.Module
    only: Mapping[str, str] | None = None
    _: KW_ONLY
    local_training: bool = False
    remote_names: Collection[str] = ()
    saved_buffers: Collection[str] = ()
    category: ClassVar[str] = "models"

    def state_to_save(self, rank: int) -> tuple[Any, dict[str, Any], dict[str, str]]:
        """Return the state to save. Buffers differ by rank: those of rank 0 are saved."""
        state = state_dict_files.strip_compile_prefix(self._state())
        for name, value in state.items():
            state_dict_files.refuse_meta_tensor(name, value)
        ties = {alias: name for alias, name in _find_ties(self.module).items() if {alias, name} <= set(state)}
        to_save: Any = {n: v for n, v in state.items() if n not in ties and n not in self.remote_names}
        if rank > 0:
            new_names, params = self.only or {}, dict(self.module.named_parameters(remove_duplicate=False))
            saved_here = (
                set()
                if self.local_training
                else {new_names.get(name, name) for name in map(_clean_name, params)}
            )
            saved_here.update(self.saved_buffers)
            to_save = {n: v for n, v in to_save.items() if n in saved_here or isinstance(v, DTensor)}
        return self.module, {"model": to_save}, ties

    def _state(self) -> dict[str, Any]:
        state = self.module.state_dict()
        if self.only is None:
            return state
        return {self.only[name]: value for name, value in state.items() if name in self.only}

    def prepare_load(self, folder: Path, context: CheckpointLoadContext, /) -> Callable[[], Any]:
        """Prepare the load, see ``ShardedState``, into the memory that the model has, if possible."""
        shards = ShardFolderReader(folder, trusted=context.trusted)
        state, ties = self._state(), _find_ties(self.module)
        entries = entries_by_model_name(shards, state)
        for name, group in entries.items():
            saved, tensor = shards.tensors.get(group[0]), state.get(name)
            if name.endswith("_extra_state") and saved and isinstance(tensor, torch.Tensor):
                # Of any length, as TransformerEngine's, which is empty before the first forward.
                state[name] = tensor if tensor.shape == saved.size else tensor.new_empty(saved.size)
        owners = {name: ties.get(_clean_name(name), _clean_name(name)) for name in (*state, *entries)}
        self._compare_names(shards, entries, state, owners, context)
        shards.check_files(name for group in entries.values() for name in group)
        first, targets, read_plan = dict[Any, str](), dict[str, torch.Tensor](), ReadPlan()
        # Code of the model's own may give a parameter the values of another name: not those it overwrites.
        is_direct = not state_dict_files.converts_states(self.module)
        for name, group in entries.items():
            same = first.setdefault(shards.file_ranges(group[0]), name)
            if same != name and owners[same] != owners[name]:
                context.notes.append(
                    f"{folder.name} has {name} tied to {same}; in this model they are two tensors"
                )
            tensor = state.get(name)
            if isinstance(tensor, torch.Tensor) and group[0] in shards.tensors:
                if owners[name] not in targets:
                    targets[owners[name]] = tensor if is_direct else torch.empty_like(tensor)
                    shards.add_reads(group[0], targets[owners[name]], read_plan)
                state[name] = targets[owners[name]]
            elif name in state:
                state[name] = read_nested(shards, group, 2)
        if self.only is not None:
            return partial(_read_and_load, read_plan, self._load_only, state)
        # What is not the model's own memory (extra states, tensors that hooks have made) is loaded there.
        return partial(_read_and_load, read_plan, self.module.load_state_dict, state, **context.model_kwargs)

    def _load_only(self, state: Mapping[str, Any]) -> Any:
        """Load a part of the module: of FSDP1, copies of its shards were read."""
        self.module.load_state_dict({n: state[s] for n, s in (self.only or {}).items()}, strict=False)
        return _IncompatibleKeys([], [])

    def _compare_names(
        self,
        shards: ShardFolderReader,
        entries: Mapping[str, list[str]],
        state: Mapping[str, Any],
        owners: Mapping[str, str],
        context: CheckpointLoadContext,
    ) -> None:
        saved_owners = {owners[name] for name in entries if name in state}
        missing = [name for name in state if name not in entries and owners[name] not in saved_owners]
        surplus = [name for name in entries if name not in state and name not in self.remote_names]
        if (missing or surplus) and context.strict:
            raise CheckpointError(
                f"{shards.folder} does not fit the model {type(self.module).__name__}",
                why="; ".join(_describe_differences(missing, surplus)),
                fix="build the model that was saved, or pass strict=False",
            )
        context.missing += [f"{name} (in {shards.folder.name})" for name in missing]
        context.notes += [f"{name} is in {shards.folder.name}, and not in this model" for name in surplus]
        for name, group in entries.items():
            entry, tensor = shards.tensors.get(group[0]), state.get(name)
            if entry is None or not isinstance(tensor, torch.Tensor):
                continue
            if entry.size != tensor.shape:
                raise CheckpointError(
                    f"{name} has the shape {tuple(entry.size)} in {shards.folder}, and "
                    f"{tuple(tensor.shape)} in the model"
                )
            if tensor.device.type == "meta":
                raise CheckpointError(
                    f"{name} has no memory to be loaded into (it is on the meta device)",
                    fix="model.to_empty(device=...) gives it some",
                )


@dataclass(eq=False)
class ShardedOptimizerState(_ShardedState):
    """An optimizer whose state is saved sharded, by the names of the parameters.

    Args:
        optimizer: the user's own.
        models: the modules whose parameters it may have. Of several, names begin with the module's number.
        local_training: each rank trains its own replica, so only DTensors and rank 0's tensors are saved.
        group_names: the names in each group, if other ranks have parameters that this one lacks.
    """

    optimizer: torch.optim.Optimizer
    models: Sequence[nn.Module]
    _: KW_ONLY
    local_training: bool = False
    group_names: Sequence[Sequence[str]] | None = None
    category: ClassVar[str] = "optimizers"

    def state_to_save(self, rank: int) -> tuple[Any, dict[str, Any], dict[str, str]]:
        """Return the state to save. State that does not exist yet is not created."""
        whole = optimizer_state_by_name(self.optimizer, self.models, self.optimizer.state_dict())
        if self.group_names is not None:
            pairs = zip(whole["param_groups"], self.group_names, strict=True)
            whole["param_groups"] = [{**group, "params": list(members)} for group, members in pairs]
        if rank > 0 and self.local_training:
            whole = filter_tensors(whole, DTensor) or {}
        elif rank > 0:
            whole = {"state": filter_tensors(whole["state"], torch.Tensor) or {}}
        return self.optimizer, {"optimizer": whole}, {}

    def prepare_load(self, folder: Path, context: CheckpointLoadContext, /) -> Callable[[], Any]:
        """Prepare the load, see ``ShardedState``."""
        shards, read_plan = ShardFolderReader(folder, trusted=context.trusted), ReadPlan()
        shards.check_files(shards.paths)
        entries, other = optimizer_entries(shards)
        read = {key: read_nested(shards, group, 2) for key, group in other.items()}
        saved = list(read.get("param_groups", []))
        param_names = parameter_names(self.optimizer, self.models)
        saved_names = {name for group in saved for name in group["params"]}
        own_names = {name for members in param_names for name in members}
        others = {name for group in self.group_names or () for name in group} - own_names
        saved = [{**group, "params": [n for n in group["params"] if n not in others]} for group in saved]
        if context.strict and isinstance(self.optimizer, torch.optim.Optimizer):
            why = describe_other_class(self.optimizer, saved)
            if why:
                raise CheckpointError(f"{shards.folder} does not fit the optimizer", why=why)
        own_state = self.optimizer.state_dict()
        groups = _match_groups(shards, own_state["param_groups"], saved, param_names, context)
        state: dict[Any, Any] = {}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            name = next((n for n in param_names[index] if n in saved_names), None)
            if name is None:
                state.update({index: own_state["state"][index]} if index in own_state["state"] else {})
            elif name in entries:
                own = self.optimizer.state.get(parameter, {})
                make = partial(_tensor_like_param, parameter, own, read_plan)
                state[index] = read_nested(shards, entries[name], 3, make)
        for key in entries.keys() - saved_names:
            state[key] = read_nested(shards, entries[key], 3)
        state = {**read, "state": state, "param_groups": groups}
        return partial(_read_and_load, read_plan, self.optimizer.load_state_dict, state)


def _read_and_load(read_plan: ReadPlan, load: Callable[..., Any], state: Any, **options: Any) -> Any:
    read_plan.run()
    return load(state, **options)


def optimizer_state_by_name(
    optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert an optimizer's state from parameter indices to parameter names.

    Raises:
        CheckpointError: a parameter is of no model.
    """
    param_names = [group[0] for group in parameter_names(optimizer, models)]
    state_by_name = {
        param_names[key] if isinstance(key, int) else key: value for key, value in state["state"].items()
    }
    groups = [
        {**group, "params": [param_names[index] for index in group["params"]]}
        for group in state["param_groups"]
    ]
    return {**state, "state": state_by_name, "param_groups": groups}


def optimizer_state_by_index(
    optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert an optimizer's state from parameter names to parameter indices.

    Raises:
        CheckpointError: it has other parameters.
    """
    numbers = {name: n for n, group in enumerate(parameter_names(optimizer, models)) for name in group}
    groups = [dict(group) for group in state["param_groups"]]
    unknown = [name for group in groups for name in group["params"] if name not in numbers]
    if unknown:
        raise CheckpointError(
            "the state does not fit the optimizer", why="; ".join(_describe_differences([], unknown))
        )
    for group in groups:
        # Saved indices follow the order of the parameters, so it must be the optimizer's own.
        group["params"] = sorted(numbers[name] for name in group["params"])
    state_by_index = {numbers.get(name, name): value for name, value in state["state"].items()}
    return {**state, "state": state_by_index, "param_groups": groups}


def parameter_names(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> list[list[str]]:
    """Return the names of each parameter, in the order of the optimizer's groups.

    Raises:
        CheckpointError: a parameter is of no model.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    own_parameters = set(parameters)
    used = [m for m in models if any(p in own_parameters for p in m.parameters())]
    names_of: dict[torch.Tensor, list[str]] = {}
    for number, module in enumerate(used):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            name = _clean_name(name)
            names_of.setdefault(parameter, []).append(f"{number}.{name}" if len(used) > 1 else name)
    for index, parameter in enumerate(parameters):
        if parameter not in names_of:
            raise CheckpointError(
                f"parameter {index} of the optimizer {type(optimizer).__name__}, of shape "
                f"{tuple(parameter.shape)}, belongs to no prepared model",
                why="sharded states go by the names of the models' parameters",
                fix="prepare the module that holds it, or save_state(sharded=False)",
            )
    return [names_of[parameter] for parameter in parameters]


def _clean_name(name: str) -> str:
    return name.replace("_orig_mod.", "").replace(_CHECKPOINTED, "")


def _find_ties(module: nn.Module) -> dict[str, str]:
    """Map names of parameters and buffers to the earlier name of the same object.

    Not by memory, as for whole files: a rank with few rows may have no memory of either.
    """
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    tables = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    for name, value in chain(*tables):
        owner = first.setdefault(id(value), clean := _clean_name(name))
        if owner != clean:
            ties[clean] = owner
    return ties


def entries_by_model_name(shards: ShardFolderReader, state: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the index's entries by the model's names; an object may have several entries."""
    tops = {path[0] for path in shards.paths.values()}
    below = len(tops) == 1 and all(len(path) > 1 for path in shards.paths.values())
    entries: dict[str, list[str]] = {}
    for name, path in shards.paths.items():
        entries.setdefault(str(path[1 if below else 0]), []).append(name)
    own_names = {_clean_name(name): name for name in state}
    equal = entries.keys() <= own_names.keys()
    names = {} if equal else state_dict_files.match_names(entries, own_names)
    return {own_names.get(names.get(name, name), name): group for name, group in entries.items()}


def _describe_differences(missing: Sequence[str], surplus: Sequence[str]) -> Iterable[str]:
    for text, tensor_names in (("it lacks", missing), ("the model does not have", surplus)):
        if tensor_names:
            yield f"{text} {list_first(tensor_names, SHOWN)}"


@torch.no_grad()
def _tensor_like_param(
    parameter: torch.Tensor,
    param_state: Mapping[str, Any],
    read_plan: ReadPlan,
    shards: ShardFolderReader,
    name: str,
    path: Sequence[Any],
) -> torch.Tensor:
    """Return a tensor of a parameter's state, sharded as the parameter is; ``read_plan`` fills it."""
    entry = shards.tensors[name]
    dtype = entry.properties.dtype
    if not isinstance(parameter, DTensor) or not entry.size:
        return shards.read(name)
    present = param_state.get(path[0]) if len(path) == 1 else None
    like = parameter if entry.size == parameter.shape else present
    if not isinstance(like, DTensor) or like.shape != entry.size:
        whole = shards.read(name).to(parameter.to_local().device)
        mesh = parameter.device_mesh
        return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    is_reusable = (
        isinstance(present, DTensor)
        and (present.dtype, present.shape, present._spec) == (dtype, like.shape, like._spec)
        and present.device == like.device
    )
    target: Any = present if is_reusable else torch.empty_like(like, dtype=dtype)
    shards.add_reads(name, target, read_plan)
    return target


def _match_groups(
    shards: ShardFolderReader,
    groups: Sequence[Mapping[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    param_names: list[list[str]],
    context: CheckpointLoadContext,
) -> list[dict[str, Any]]:
    """Return the saved groups in the order, and with the parameters, of the optimizer's own.

    Raises:
        CheckpointError: they hold other parameters, and loading is strict.
    """
    unmatched = [(group, set(group["params"])) for group in saved]
    result: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        group_names = [param_names[index] for index in group["params"]]
        all_names = {name for members in group_names for name in members}
        best, best_names = max(
            unmatched, key=lambda pair: len(pair[1] & all_names), default=(None, set[str]())
        )
        missing = [members[0] for members in group_names if not best_names.intersection(members)]
        surplus = sorted(best_names - all_names)
        if context.strict and (best is None or missing or surplus):
            raise CheckpointError(
                f"{shards.folder} does not fit group {number} of the optimizer",
                why="; ".join(_describe_differences(missing, surplus)) or "it has fewer groups",
                fix="give the optimizer the groups that were saved, or pass strict=False",
            )
        context.missing += [f"the state of {name} (in {shards.folder.name})" for name in missing]
        if best is None or (group_names and len(missing) == len(group_names)):
            result.append(dict(group))
            continue
        unmatched.remove((best, best_names))
        # Torch leaves tensors of groups where they are.
        tensors = {n: v for n, v in best.items() if isinstance(v, torch.Tensor)}
        placed = {n: v.to(group[n].device) for n, v in tensors.items() if hasattr(group.get(n), "device")}
        result.append({**group, **best, **placed, "params": list(group["params"])})
    if unmatched and context.strict:
        raise CheckpointError(
            f"{shards.folder} holds {len(saved)} groups of parameters, and the optimizer {len(groups)}",
            fix="give the optimizer the groups that were saved, or pass strict=False",
        )
    return result
