"""Full state dicts of a DeepSpeed engine's model and optimizer, in float32: gathering and loading them.

DeepSpeed keeps flat float32 vectors; a parameter has a fragment in some of them. The offsets are read from
DeepSpeed, so this works for any stage, any world size, and with offload to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn

from accelerate.core import tree
from accelerate.core.errors import CheckpointError, PrepareError, list_first
from accelerate.strategy.base import number_groups
from accelerate.strategy.deepspeed.engine_handle import EngineHandle

T = TypeVar("T")
# Elements that are gathered or joined at once: 256 MB of float32.
GATHER_NUMEL = 64 * 2**20


@dataclass(frozen=True)
class ParamFragment:
    """This rank's fragment of one parameter.

    Attributes:
        parameter: the user's.
        flat: the float32 vector that holds it; the key of its optimizer state.
        offset: its first element in the vector.
        param_start: its first element in the parameter.
        numel: the number of elements.
    """

    parameter: torch.Tensor
    flat: torch.Tensor
    offset: int
    param_start: int
    numel: int

    def slice_vector(self, vector: torch.Tensor) -> torch.Tensor:
        """Return this fragment of a vector that is parallel to ``flat``."""
        return vector.detach().view(-1).narrow(0, self.offset, self.numel)


def trained_params(handle: EngineHandle) -> list[torch.Tensor]:
    """Return the parameters that the optimizer changes, in the order of its groups; none without elements."""
    return [p for group in handle.groups for p in group if p.requires_grad and _numel(p)]


def local_fragments(handle: EngineHandle) -> dict[int, ParamFragment]:
    """Return this rank's fragments by the ``id`` of their parameter; empty where nothing is partitioned.

    Raises:
        PrepareError: DeepSpeed keeps them in an unknown form.
    """
    fragments = (_local_fragment(handle, parameter) for parameter in trained_params(handle))
    return {id(piece.parameter): piece for piece in fragments if piece is not None}


def _fragments_in_memory(handle: EngineHandle) -> dict[int, ParamFragment]:
    """Return the local fragments of float32 vectors; refuse vectors that DeepSpeed keeps on a drive.

    Raises:
        PrepareError: it does, on all ranks.
    """
    if getattr(handle.engine_optimizer, "swap_optimizer", False):
        raise PrepareError(
            "a full state, or one of another world size or stage, of an optimizer that is offloaded to NVMe",
            why="DeepSpeed keeps the float32 weights and the optimizer state on the drive",
            fix="accelerator.save_state(folder) without sharded=False, and load_state with the same number "
            "of processes in the same stage",
        )
    return local_fragments(handle)


def _local_fragment(handle: EngineHandle, parameter: Any) -> ParamFragment | None:
    inner = handle.engine_optimizer
    if hasattr(parameter, "ds_id"):
        group, at, padded = inner.grad_position[inner.get_param_id(parameter)]
        # The last ranks hold nothing but padding of a parameter with few elements.
        start = min(padded * inner._get_param_partition_rank(parameter), parameter.ds_numel)
        count = min(padded, parameter.ds_numel - start)
        return ParamFragment(parameter, inner.fp32_partitioned_groups_flat[group], at, start, count)
    if hasattr(parameter, "_hp_mapping"):
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        high, low = mapping.hp_fragment_address, mapping.lp_fragment_address
        flats = getattr(inner, "single_partition_of_fp32_groups", None) or inner.fp32_groups_flat_partition
        return ParamFragment(parameter, flats[mapping.param_group_index], high.start, low.start, high.numel)
    return None


def _numel(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _shape(parameter: Any) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def split_by_numel(items: Iterable[T], numel: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield lists of successive items of at most ``GATHER_NUMEL`` elements, or of one item."""
    chunk: list[T] = []
    size = 0
    for item in items:
        if chunk and size + numel(item) > GATHER_NUMEL:
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += numel(item)
    if chunk:
        yield chunk


@torch.no_grad()
def gather_params(
    handle: EngineHandle,
    parameters: Sequence[torch.Tensor],
    fragments: Mapping[int, ParamFragment],
    read: Callable[[ParamFragment], torch.Tensor],
    keep: bool,
) -> dict[int, torch.Tensor]:
    """Gather ``parameters`` in float32 on the host, by ``id``; empty where not ``keep``; collective."""
    import torch.distributed as dist

    whole: dict[int, torch.Tensor] = {}
    for chunk in split_by_numel(parameters, _numel):
        flat = torch.zeros(sum(map(_numel, chunk)), device=handle.engine.device)
        at = 0
        for parameter in chunk:
            piece = fragments.get(id(parameter))
            if piece is not None and piece.numel:
                part = read(piece)
                flat.narrow(0, at + piece.param_start, piece.numel).copy_(part)
            at += _numel(parameter)
        dist.all_reduce(flat, group=handle.engine.seq_data_parallel_group)
        at = 0
        for parameter in chunk:
            if keep:
                value = flat.narrow(0, at, _numel(parameter)).view(_shape(parameter))
                whole[id(parameter)] = value.to("cpu", copy=True)
            at += _numel(parameter)
    return whole


# --- the model


@torch.no_grad()
def model_state(module: nn.Module, keep: bool, handle: EngineHandle | None = None) -> dict[str, Any]:
    """Return a copy of the full state dict on the host; empty where not ``keep``.

    Collective for partitioned weights, and for master weights.

    Args:
        module: the user's, or a part of it.
        keep: whether this rank keeps the result.
        handle: the engine whose float32 master weights count instead of the compute weights.
    """
    seen: dict[int, Any] = {}
    done: set[int] = set()
    if handle is not None:
        refuse_experts(handle)
    if handle is not None and handle.has_fp32_copies:
        parameters = _fragmented_params(handle)
        done = set(map(id, parameters))
        fragments = _fragments_in_memory(handle)
        seen |= gather_params(
            handle, parameters, fragments, lambda piece: piece.slice_vector(piece.flat), keep
        )
    state: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) not in seen and id(value) not in done:
            seen[id(value)] = _fetch_to_host(value, keep)
        if keep:
            state[name] = seen[id(value)] if isinstance(value, torch.Tensor) else value
    return state


def _fragmented_params(handle: EngineHandle) -> list[torch.Tensor]:
    """Return the trained parameters that DeepSpeed has float32 vectors for."""
    return [p for p in trained_params(handle) if hasattr(p, "ds_id") or hasattr(p, "_hp_mapping")]


def _fetch_to_host(value: torch.Tensor, keep: bool) -> torch.Tensor | None:
    if not hasattr(value, "ds_id"):
        return value.detach().to("cpu", copy=True) if keep else None
    import deepspeed  # type: ignore[import-not-found]

    with deepspeed.zero.GatheredParameters([value]):
        return value.detach().to("cpu", copy=True) if keep else None


def shape_template(module: nn.Module) -> dict[str, Any]:
    """Return the module's state dict without values: an expanded tensor for each parameter, ties kept."""
    state = module.state_dict(keep_vars=True)
    partitioned = {id(value): value for value in state.values() if hasattr(value, "ds_id")}
    # One element of memory for each: ties are detected by it.
    like = {
        key: torch.empty(1, device="cpu").expand(_numel(p)).view(_shape(p)) for key, p in partitioned.items()
    }
    return {name: like.get(id(value), value) for name, value in state.items()}


@torch.no_grad()
def load_model(handle: EngineHandle, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Load a full state dict that every rank passes into the weights, and into the float32 copies.

    Returns:
        What torch's ``load_state_dict`` returns: missing and unexpected names.
    """
    module = handle.module
    fragments = _fragments_in_memory(handle) if handle.has_fp32_copies else {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    partitioned = {name: p for name, p in parameters.items() if hasattr(p, "ds_id")}
    if not partitioned:
        result = module.load_state_dict(state, strict=strict)
    else:
        result = _load_partitioned(module, partitioned, state, strict)
    names = {id(p): name for name, p in parameters.items() if name in state}
    for key, piece in fragments.items():
        if key in names:
            value = state[names[key]].reshape(-1).narrow(0, piece.param_start, piece.numel)
            piece.slice_vector(piece.flat).copy_(value)
    for pair in zip(
        getattr(handle.engine_optimizer, "fp32_groups", ()),
        getattr(handle.engine_optimizer, "fp16_groups", ()),
        strict=False,
    ):
        for high, low in zip(*pair, strict=False):
            if id(low) in names and isinstance(high, torch.Tensor):
                high.data.copy_(state[names[id(low)]])
    return result


def _load_partitioned(
    module: nn.Module, apart: Mapping[str, Any], state: Mapping[str, Any], strict: bool
) -> Any:
    import deepspeed  # type: ignore[import-not-found]

    for name, parameter in apart.items():
        value = state.get(name)
        if value is not None and value.shape != _shape(parameter):
            raise RuntimeError(
                f"size mismatch for {name}: the state has shape {tuple(value.shape)}, the model "
                f"{tuple(_shape(parameter))}"
            )
    module_state = module.state_dict(keep_vars=True)
    missing = [name for name in module_state if name not in state]
    unexpected = [name for name in state if name not in module_state]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}: missing {missing}, "
            f"unexpected {unexpected}"
        )
    done: set[int] = set()
    for name, parameter in apart.items():
        if name in state and id(parameter) not in done:
            done.add(id(parameter))
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(state[name])
    for name, value in module_state.items():
        if name in state and name not in apart and isinstance(value, torch.Tensor):
            value.data.copy_(state[name])
    return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)


# --- the optimizer


def optimizer_state(handle: EngineHandle, keep: bool) -> dict[str, Any]:
    """Return the optimizer's full state dict, as in one process; empty where not ``keep``; collective."""
    if not handle.has_fp32_copies:
        return handle.optimizer.state_dict() if keep else {}
    refuse_experts(handle)
    parameters, fragments = _require_fragments(handle), _fragments_in_memory(handle)
    numbers = {id(p): number for number, p in enumerate(p for group in handle.groups for p in group)}
    vectors, vector_states = _group_vectors(handle), handle.optimizer.state
    param_states = {id(p): vector_states.get(vectors[id(p)], {}) for p in parameters}
    _refuse_block_states(handle, vectors.values())
    states: dict[int, dict[str, Any]] = {}
    # In the same order on all ranks. Groups may keep different states: SGD without momentum has none.
    for name in sorted({name for param_state in param_states.values() for name in param_state}):
        members = [p for p in parameters if _is_elementwise(param_states[id(p)].get(name), vectors[id(p)])]
        whole = gather_params(
            handle,
            members,
            fragments,
            lambda piece, name=name: piece.slice_vector(vector_states[piece.flat][name]),
            keep,
        )
        for parameter in members if keep else ():
            states.setdefault(numbers[id(parameter)], {})[name] = whole[id(parameter)]
    if not keep:
        return {}
    # Other states, such as a step count, are kept once for a vector.
    for parameter in parameters:
        for name, value in param_states[id(parameter)].items():
            if not _is_elementwise(value, vectors[id(parameter)]):
                value = value.clone() if isinstance(value, torch.Tensor) else value
                states.setdefault(numbers[id(parameter)], {})[name] = value
    return {"state": dict(sorted(states.items())), "param_groups": _param_groups(handle)}


def _require_fragments(handle: EngineHandle) -> list[torch.Tensor]:
    parameters = _fragmented_params(handle)
    if len(parameters) != len(trained_params(handle)):
        raise PrepareError(
            f"the state of {type(handle.engine_optimizer).__name__} cannot be had as in one process",
            why="this kind of engine, stage 0 in 16 bits, keeps it in a form of its own",
            fix="accelerator.save_state(folder) without sharded=False writes it in that form, or use a stage "
            "above 0",
        )
    return parameters


def _group_vectors(handle: EngineHandle) -> dict[int, torch.Tensor]:
    """Return this rank's float32 vector for each trained parameter, by ``id``.

    It is that of the parameter's group, also where it holds nothing of this parameter.
    """
    inner = handle.engine_optimizer
    if hasattr(inner, "fp32_partitioned_groups_flat"):
        flats, places = inner.fp32_partitioned_groups_flat, inner.grad_position
        return {id(p): flats[places[inner.get_param_id(p)][0]] for p in _fragmented_params(handle)}
    flats = getattr(inner, "single_partition_of_fp32_groups", None) or inner.fp32_groups_flat_partition
    groups = getattr(inner, "bit16_groups", None) or inner.bf16_groups
    return {id(p): flat for group, flat in zip(groups, flats, strict=True) for p in group}


def _refuse_block_states(handle: EngineHandle, vectors: Iterable[torch.Tensor]) -> None:
    """Refuse states that are of a whole vector, such as the scales of blocks of 8-bit optimizers.

    Raises:
        PrepareError: there is one, on all ranks.
    """
    for flat in {id(flat): flat for flat in vectors}.values():
        for name, value in handle.optimizer.state.get(flat, {}).items():
            if not _is_elementwise(value, flat) and tree.find_leaf(_has_elements, value) is not None:
                raise PrepareError(
                    f"the full state of {type(handle.optimizer).__name__}, or one of another world size",
                    why=f"it keeps {name} for each rank's elements as a whole, or by blocks of them",
                    fix="accelerator.save_state(folder) without sharded=False, and load_state with the same "
                    "number of processes in the same stage",
                )


def _has_elements(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.numel() > 1


def refuse_experts(handle: EngineHandle) -> None:
    """Refuse full states of experts that differ by rank.

    Raises:
        PrepareError: DeepSpeed has partitioned experts over ranks.
    """
    parameters = handle.module.named_parameters()
    experts: dict[str, Any] = {name: p for name, p in parameters if not getattr(p, "allreduce", True)}
    if not experts:
        return
    from deepspeed.utils import groups  # type: ignore[import-not-found]

    names = {p.group_name for p in experts.values()}
    sizes = set(map(groups._get_expert_parallel_world_size, names))
    if sizes != {1}:
        raise PrepareError(
            f"a full state of the experts {list_first(experts)}, of which each rank has others",
            why=f"DeepSpeed has partitioned them over {max(sizes)} ranks, under the same names on each",
            fix="accelerator.save_state(folder) without sharded=False lets DeepSpeed write all of them",
        )


def _is_elementwise(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == flat.numel()


def optimizer_view(handle: EngineHandle) -> Any:
    """Return an object whose ``param_groups`` are those that the user's optimizer had, with its options."""
    groups = zip(_param_groups(handle), handle.groups, strict=True)
    return SimpleNamespace(param_groups=[{**options, "params": members} for options, members in groups])


def _param_groups(handle: EngineHandle) -> list[dict[str, Any]]:
    """Return the groups with the user's parameter numbers, and the empty groups that DeepSpeed leaves out."""
    options = iter(handle.optimizer.param_groups)
    groups = [next(options, {}) if members else {} for members in handle.groups]
    return number_groups(groups, map(len, handle.groups))


@torch.no_grad()
def load_optimizer(handle: EngineHandle, state: Mapping[str, Any]) -> None:
    """Load a full state dict that every rank passes; each keeps its fragments.

    Raises:
        CheckpointError: it is of another number of parameters, or of an optimizer that computes with whole
            parameters or blocks of them.
    """
    if not handle.has_fp32_copies:
        # torch copies mappings by their class, and those of a checkpoint are read lazily.
        states = {number: dict(values) for number, values in state["state"].items()}
        handle.optimizer.load_state_dict({**state, "state": states})
        return
    _require_fragments(handle)
    vector_states, fragments = handle.optimizer.state, _fragments_in_memory(handle)
    saved = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [p for group in handle.groups for p in group]
    if len(saved) != len(parameters):
        raise CheckpointError(
            f"the state is of an optimizer of {len(saved)} parameters, and this one has {len(parameters)}"
        )
    numbers = {id(p): number for number, p in zip(saved, parameters, strict=True)}
    for piece in fragments.values():
        values = state["state"].get(numbers[id(piece.parameter)], {})
        for name, value in values.items():
            _load_fragment(vector_states[piece.flat], piece, name, value)
    members = [options for options in state["param_groups"] if options["params"]]
    for group, options in zip(handle.optimizer.param_groups, members, strict=False):
        group.update({name: value for name, value in options.items() if name != "params"})
    if hasattr(handle.engine_optimizer, "_hp_optimizer_states_linked"):
        handle.engine_optimizer._hp_optimizer_states_linked = False


def _load_fragment(vector_states: dict[str, Any], piece: ParamFragment, name: str, value: Any) -> None:
    whole = isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == _numel(piece.parameter)
    if not whole and tree.find_leaf(_has_elements, value) is not None:
        raise CheckpointError(
            f"the optimizer's state {name} has not one value for each element of its parameter",
            why="DeepSpeed steps flat vectors of several parameters, and this one is of a whole parameter",
            fix="load it where it was saved, without DeepSpeed or in stage 0",
        )
    if not whole:
        vector_states[name] = value.clone() if isinstance(value, torch.Tensor) else value
        return
    if name not in vector_states:
        vector_states[name] = torch.zeros_like(piece.flat, dtype=value.dtype)
    piece.slice_vector(vector_states[name]).copy_(value.reshape(-1).narrow(0, piece.param_start, piece.numel))
