"""Whole states out of an engine's parts, and back: weights and optimizer by their ordinary names, in float32.

The engine keeps flat float32 vectors; a parameter has a piece in some of them. Where pieces lie is read from
the engine, so any stage, any number of processes, and offload to the host are alike here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import CheckpointError, PrepareError
from accelerate.strategy.deepspeed.engine import Made, is_partitioned

# Elements that are gathered at once: 256 MB of float32.
AT_ONCE = 64 * 2**20


@dataclass(frozen=True)
class Piece:
    """This process's part of one parameter.

    Attributes:
        parameter: the user's.
        flat: the float32 vector in which it lies; the key of what the optimizer keeps for it.
        at: where it begins there.
        start: where it begins in the parameter, in elements.
        count: how many elements.
    """

    parameter: torch.Tensor
    flat: torch.Tensor
    at: int
    start: int
    count: int

    def of(self, vector: torch.Tensor) -> torch.Tensor:
        """The part of a vector that is beside ``flat``."""
        return vector.detach().view(-1).narrow(0, self.at, self.count)


def trained(made: Made) -> list[torch.Tensor]:
    """The parameters that the optimizer changes, in the order of its groups."""
    return [p for group in made.groups for p in group if p.requires_grad]


def pieces(made: Made) -> dict[int, Piece]:
    """This process's pieces, by the ``id`` of their parameter; empty where the optimizer has them whole.

    Raises:
        PrepareError: this engine keeps them in a way that is not known here.
    """
    found = (_piece(made, parameter) for parameter in trained(made))
    return {id(piece.parameter): piece for piece in found if piece is not None}


def _piece(made: Made, parameter: Any) -> Piece | None:
    inner = made.inner
    if hasattr(parameter, "ds_id"):
        group, at, padded = inner.grad_position[inner.get_param_id(parameter)]
        start = padded * inner._get_param_partition_rank(parameter)
        count = max(0, min(padded, parameter.ds_numel - start))
        return Piece(parameter, inner.fp32_partitioned_groups_flat[group], at, start, count)
    if hasattr(parameter, "_hp_mapping"):
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        high, low = mapping.hp_fragment_address, mapping.lp_fragment_address
        flats = getattr(inner, "single_partition_of_fp32_groups", None) or inner.fp32_groups_flat_partition
        return Piece(parameter, flats[mapping.param_group_index], high.start, low.start, high.numel)
    return None


def _numel(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _shape(parameter: Any) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def partitioned(made: Made) -> bool:
    """Whether the engine keeps float32 copies of its own."""
    return made.inner is not made.optimizer and made.optimizer is not None


def _chunks(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    chunk: list[torch.Tensor] = []
    size = 0
    for parameter in parameters:
        if chunk and size + _numel(parameter) > AT_ONCE:
            yield chunk
            chunk, size = [], 0
        chunk.append(parameter)
        size += _numel(parameter)
    if chunk:
        yield chunk


@torch.no_grad()
def gathered(
    made: Made,
    parameters: Sequence[torch.Tensor],
    found: Mapping[int, Piece],
    read: Callable[[Piece], torch.Tensor],
    keep: bool,
) -> dict[int, torch.Tensor]:
    """Whole float32 tensors of ``parameters``, on the host, by their ``id``; empty where not ``keep``.

    All processes must call it.
    """
    import torch.distributed as dist

    whole: dict[int, torch.Tensor] = {}
    for chunk in _chunks(parameters):
        flat = torch.zeros(sum(map(_numel, chunk)), device=made.engine.device)
        at = 0
        for parameter in chunk:
            piece = found.get(id(parameter))
            if piece is not None and piece.count:
                part = read(piece)
                flat.narrow(0, at + piece.start, piece.count).copy_(part)
            at += _numel(parameter)
        dist.all_reduce(flat, group=made.engine.seq_data_parallel_group)
        at = 0
        for parameter in chunk:
            if keep:
                one = flat.narrow(0, at, _numel(parameter)).view(_shape(parameter))
                whole[id(parameter)] = one.to("cpu", copy=True)
            at += _numel(parameter)
    return whole


# --- the model


@torch.no_grad()
def model_state(made: Made, keep: bool, *, exact: bool) -> dict[str, Any]:
    """The model's full state by the user's names, on the host; empty where not ``keep``.

    Args:
        made: the engine.
        keep: whether this process wants it; all must call.
        exact: weights in float32, as the optimizer has them, instead of as the model computes with them.
    """
    module = made.module
    masters: dict[int, torch.Tensor] = {}
    if exact and partitioned(made):
        found = pieces(made)
        parameters = _known(made)
        masters = gathered(made, parameters, found, lambda piece: piece.of(piece.flat), keep)
    state: dict[str, Any] = {}
    seen: dict[int, Any] = dict(masters)
    done = {id(p) for p in _known(made)} if exact and partitioned(made) else set()
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) not in seen and id(value) not in done:
            seen[id(value)] = _fetched(value, keep)
        if keep:
            state[name] = seen[id(value)] if isinstance(value, torch.Tensor) else value
    return state


def _known(made: Made) -> list[torch.Tensor]:
    """The trained parameters that the engine has float32 vectors for."""
    return [p for p in trained(made) if hasattr(p, "ds_id") or hasattr(p, "_hp_mapping")]


def _fetched(value: torch.Tensor, keep: bool) -> torch.Tensor | None:
    if not hasattr(value, "ds_id"):
        return value.detach().to("cpu", copy=True) if keep else None
    import deepspeed  # type: ignore[import-not-found]

    with deepspeed.zero.GatheredParameters([value]):
        return value.detach().to("cpu", copy=True) if keep else None


def shapes(module: nn.Module) -> dict[str, Any]:
    """Its state by names, without values: an empty tensor for each parameter, tied ones alike."""
    state = module.state_dict(keep_vars=True)
    apart = {id(value): value for value in state.values() if hasattr(value, "ds_id")}
    # One element of memory for each: ties are told by it.
    like = {key: torch.empty(1).expand(_numel(p)).view(_shape(p)) for key, p in apart.items()}
    return {name: like.get(id(value), value) for name, value in state.items()}


@torch.no_grad()
def load_model(made: Made, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Loads a full state, which every process gives: into the weights, and into the float32 copies.

    Returns:
        What torch's ``load_state_dict`` returns: missing and unexpected names.
    """
    module = made.module
    parameters = dict(module.named_parameters(remove_duplicate=False))
    apart = {name: p for name, p in parameters.items() if hasattr(p, "ds_id")}
    if not apart:
        result = module.load_state_dict(state, strict=strict)
    else:
        result = _load_partitioned(module, apart, state, strict)
    if made.optimizer is not None and partitioned(made):
        found = pieces(made)
        names = {id(p): name for name, p in parameters.items() if name in state}
        for key, piece in found.items():
            if key in names:
                value = state[names[key]].reshape(-1).narrow(0, piece.start, piece.count)
                piece.of(piece.flat).copy_(value)
        for pair in zip(
            getattr(made.inner, "fp32_groups", ()), getattr(made.inner, "fp16_groups", ()), strict=False
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
    known = module.state_dict(keep_vars=True)
    missing = [name for name in known if name not in state]
    unexpected = [name for name in state if name not in known]
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
    for name, value in known.items():
        if name in state and name not in apart and isinstance(value, torch.Tensor):
            value.data.copy_(state[name])
    return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)


# --- the optimizer


def optimizer_state(made: Made, keep: bool) -> dict[str, Any]:
    """The optimizer's full state, as its ``state_dict`` would be in one process; empty where not ``keep``.

    All processes must call it.
    """
    if not partitioned(made):
        return made.optimizer.state_dict() if keep else {}
    parameters, found = _pieced(made), pieces(made)
    numbers = {id(p): number for number, p in enumerate(p for group in made.groups for p in group)}
    kept = made.optimizer.state
    states: dict[int, dict[str, Any]] = {}
    for name in _vectors(kept):
        whole = gathered(
            made, parameters, found, lambda piece, name=name: piece.of(kept[piece.flat][name]), keep
        )
        for parameter in parameters if keep else ():
            states.setdefault(numbers[id(parameter)], {})[name] = whole[id(parameter)]
    if not keep:
        return {}
    if states:
        for name, value in _scalars(kept).items():
            for number in states:
                states[number][name] = value.clone() if isinstance(value, torch.Tensor) else value
    return {"state": dict(sorted(states.items())), "param_groups": _groups(made)}


def _pieced(made: Made) -> list[torch.Tensor]:
    known = _known(made)
    if len(known) != len(trained(made)):
        raise PrepareError(
            f"the state of {type(made.inner).__name__} cannot be had as one process would have it",
            why="this kind of engine, stage 0 in 16 bits, keeps it in a form of its own",
            fix="accelerator.save_state(folder) without sharded=False writes it in that form, or use a stage "
            "above 0",
        )
    return known


def _vectors(kept: Mapping[Any, Any]) -> list[str]:
    """The names of what is kept for each element, in an order that is the same on all processes."""
    names = {n for flat, state in kept.items() for n, v in state.items() if _beside(v, flat)}
    return sorted(names)


def _beside(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == flat.numel()


def _scalars(kept: Mapping[Any, Any]) -> dict[str, Any]:
    """What is kept once for a vector, such as a step counter; it is the same for all of them."""
    for flat, state in kept.items():
        return {name: value for name, value in state.items() if not _beside(value, flat)}
    return {}


def _groups(made: Made) -> list[dict[str, Any]]:
    """The groups by the user's numbers of parameters. The engine has left out the empty ones."""
    options = iter(made.optimizer.param_groups)
    groups: list[dict[str, Any]] = []
    number = 0
    for members in made.groups:
        chosen = next(options, {}) if members else {}
        numbers = list(range(number, number + len(members)))
        number += len(members)
        groups.append({**{k: v for k, v in chosen.items() if k != "params"}, "params": numbers})
    return groups


@torch.no_grad()
def load_optimizer(made: Made, state: Mapping[str, Any]) -> None:
    """Loads a full state, which every process gives; each takes its pieces.

    Raises:
        CheckpointError: it is of another number of parameters.
    """
    if not partitioned(made):
        made.optimizer.load_state_dict(dict(state))
        return
    _pieced(made)
    saved = [number for group in state["param_groups"] for number in group["params"]]
    own = [p for group in made.groups for p in group]
    if len(saved) != len(own):
        raise CheckpointError(
            f"the state is of an optimizer of {len(saved)} parameters, and this one has {len(own)}"
        )
    numbers = {id(p): number for number, p in zip(saved, own, strict=True)}
    kept, found = made.optimizer.state, pieces(made)
    for piece in found.values():
        values = state["state"].get(numbers[id(piece.parameter)], {})
        for name, value in values.items():
            _take(kept[piece.flat], piece, name, value)
    members = [options for options in state["param_groups"] if options["params"]]
    for group, options in zip(made.optimizer.param_groups, members, strict=False):
        group.update({name: value for name, value in options.items() if name != "params"})
    if hasattr(made.inner, "_hp_optimizer_states_linked"):
        made.inner._hp_optimizer_states_linked = False


def _take(kept: dict[str, Any], piece: Piece, name: str, value: Any) -> None:
    whole = isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == _numel(piece.parameter)
    if not whole:
        kept[name] = value.clone() if isinstance(value, torch.Tensor) else value
        return
    if name not in kept:
        kept[name] = torch.zeros_like(piece.flat, dtype=value.dtype)
    piece.of(kept[name]).copy_(value.reshape(-1).narrow(0, piece.start, piece.count))


__all__ = ["gathered", "is_partitioned", "load_model", "load_optimizer", "model_state", "optimizer_state"]
