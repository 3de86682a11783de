"""Models and optimizers that are saved in parts, and put back from parts.

Everything goes by the names of the parameters, which are the same whether a model is plain, replicated or
sharded. So parts that were saved under one strategy, by some number of processes, load under another by any
number: each takes the boxes that meet its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.module import _IncompatibleKeys

from accelerate.checkpoint import names, tensors
from accelerate.checkpoint.divide import Division, Parts, only_distributed
from accelerate.checkpoint.manifest import PartEntry
from accelerate.checkpoint.moves import Moves
from accelerate.checkpoint.parts import Reading
from accelerate.checkpoint.sharded import Shards
from accelerate.core.errors import CheckpointError

_CHECKPOINTED = "_checkpoint_wrapped_module."  # torch's wrapper that computes activations again
_SHOWN = 6


class SpreadModel:
    """A model whose state is saved in parts.

    Args:
        module: the user's own module, sharded or not.
        only: saves and loads these of its tensors, by the names that follow; None all, by their own.
        apart: the ranks train apart, so what is not distributed is rank 0's.
        elsewhere: names of the model's state that other ranks have, and this one has not.
        gives: buffers that this rank saves, for rank 0 does not have them.
    """

    def __init__(
        self,
        module: nn.Module,
        only: Mapping[str, str] | None = None,
        *,
        apart: bool = False,
        elsewhere: Collection[str] = (),
        gives: Collection[str] = (),
    ) -> None:
        self.module, self.only, self.apart = module, only, apart
        self.elsewhere, self.gives = frozenset(elsewhere), frozenset(gives)
        self._division: Division | None = None
        self._ties: dict[str, str] = {}

    def plan(self, rank: int, /) -> Any:
        """See ``Spread``. Buffers differ by rank until the next forward: those of rank 0 are saved."""
        state = tensors.saved_names(self._state())
        _refuse_empty(state)
        self._ties = {
            alias: name for alias, name in _ties(self.module).items() if {alias, name} <= set(state)
        }
        kept: Any = {name: value for name, value in state.items() if name not in self._ties}
        if rank > 0:
            called = self.only or {}
            equal = set() if self.apart else {called.get(name, name) for name, _ in _named(self.module)}
            equal |= self.gives
            kept = {n: v for n, v in kept.items() if n in equal or isinstance(v, DTensor)}
        self._division = Division.of({"model": kept}, alone=self.apart)
        return self._division.plan

    def _state(self) -> dict[str, Any]:
        state = self.module.state_dict()
        if self.only is None:
            return state
        return {self.only[name]: value for name, value in state.items() if name in self.only}

    def share(self, plans: list[Any], index: int, rank: int, /) -> Parts:
        """See ``Spread``."""
        assert self._division is not None
        entry = PartEntry(
            names.sharded_folder("models", index), type(self.module).__name__, aliases=self._ties
        )
        ties = {("model", alias): ("model", name) for alias, name in self._ties.items()}
        share = self._division.share(plans, rank, "models", entry, ties)
        self._division = None
        entry.tensors.update(share.table())
        return share

    def prepare(self, folder: Path, reading: Reading, /) -> Callable[[], Any]:
        """See ``Spread``. Tensors are read one by one into the model's own memory."""
        shards = Shards(folder, trusted=reading.trusted)
        state = self._state()
        found = _by_own_name(shards, state)
        self._compare(shards, found, state, reading)
        shards.check(name for group in found.values() for name in group)
        _tell_untied(shards, found, self.module, reading)
        return self._routed(shards, found, state, reading)

    def _compare(
        self, shards: Shards, found: Mapping[str, list[str]], state: Mapping[str, Any], reading: Reading
    ) -> None:
        ties = _ties(self.module)
        groups = {_clean(name): ties.get(_clean(name), _clean(name)) for name in state}
        there = {groups[_clean(name)] for name in found if name in state}
        missing = [name for name in state if name not in found and groups[_clean(name)] not in there]
        surplus = [name for name in found if name not in state and name not in self.elsewhere]
        if (missing or surplus) and reading.strict:
            raise CheckpointError(
                f"{shards.folder} does not fit the model {type(self.module).__name__}",
                why="; ".join(_differences(missing, surplus)),
                fix="build the model that was saved, or pass strict=False",
            )
        reading.missing += [f"{name} (in {shards.folder.name})" for name in missing]
        reading.notes += [f"{name} is in {shards.folder.name}, and not in this model" for name in surplus]
        for name, group in found.items():
            entry, own = shards.tensor(group[0]), state.get(name)
            if entry is None or not isinstance(own, torch.Tensor):
                continue
            if entry.size != own.shape:
                raise CheckpointError(
                    f"{name} has the shape {tuple(entry.size)} in {shards.folder}, and "
                    f"{tuple(own.shape)} in the model"
                )
            if own.device.type == "meta":
                raise CheckpointError(
                    f"{name} has no memory to be loaded into (it is on the meta device)",
                    fix="model.to_empty(device=...) gives it some",
                )

    def _routed(
        self, shards: Shards, found: Mapping[str, list[str]], state: dict[str, Any], reading: Reading
    ) -> Callable[[], Any]:
        ties, done, moves = _ties(self.module), set[str](), Moves()
        for name, group in found.items():
            own, owner = state.get(name), ties.get(_clean(name), _clean(name))
            if isinstance(own, torch.Tensor) and shards.tensor(group[0]) is not None:
                if owner not in done:
                    shards.route(group[0], own, moves)
                done.add(owner)
            elif name in state:
                state[name] = _nested(shards, group, 2)
        return partial(self._load, moves, state, reading)

    def _load(self, moves: Moves, state: dict[str, Any], reading: Reading) -> Any:
        moves.run()
        if self.only is not None:
            return _IncompatibleKeys([], [])
        # What is not the model's own memory (extra states, tensors that hooks have made) is put back here.
        return self.module.load_state_dict(state, **reading.model_kwargs)


class SpreadOptimizer:
    """An optimizer whose state is saved in parts, by the names of the parameters.

    Args:
        optimizer: the user's own.
        models: the modules whose parameters it may have. Of several, names begin with the module's number.
        apart: the ranks train apart, so what is not distributed is rank 0's.
        groups: the names in each group where other ranks have parameters that this one has not.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        models: Sequence[nn.Module],
        *,
        apart: bool = False,
        groups: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self.optimizer, self.models, self.apart, self.groups = optimizer, models, apart, groups
        self._division: Division | None = None

    def plan(self, rank: int, /) -> Any:
        """See ``Spread``. A state that the optimizer has not made yet is not made here."""
        whole = by_name(self.optimizer, self.models, self.optimizer.state_dict())
        if self.groups is not None:
            pairs = zip(whole["param_groups"], self.groups, strict=True)
            whole["param_groups"] = [{**group, "params": list(names_)} for group, names_ in pairs]
        if rank > 0 and self.apart:
            whole = only_distributed(whole) or {}
        elif rank > 0:
            whole = {"state": _only_tensors(whole["state"])}
        self._division = Division.of({"optimizer": whole}, alone=self.apart)
        return self._division.plan

    def share(self, plans: list[Any], index: int, rank: int, /) -> Parts:
        """See ``Spread``."""
        assert self._division is not None
        entry = PartEntry(names.sharded_folder("optimizers", index), type(self.optimizer).__name__)
        share = self._division.share(plans, rank, "optimizers", entry, {})
        self._division = None
        return share

    def prepare(self, folder: Path, reading: Reading, /) -> Callable[[], Any]:
        """See ``Spread``."""
        shards = Shards(folder, trusted=reading.trusted)
        shards.check(shards.paths)
        moves = Moves()
        return partial(self._load, moves, self._read(shards, reading, moves))

    def _load(self, moves: Moves, state: dict[str, Any]) -> None:
        moves.run()
        self.optimizer.load_state_dict(state)

    def _read(self, shards: Shards, reading: Reading, moves: Moves) -> dict[str, Any]:
        """The state as the optimizer's own ``state_dict`` would be now, when ``moves`` have run."""
        entries: dict[Any, list[str]] = {}
        other: dict[Any, list[str]] = {}
        for name, path in shards.paths.items():
            if len(path) > 2 and path[1] == "state":
                entries.setdefault(path[2], []).append(name)
            elif len(path) > 1:
                other.setdefault(path[1], []).append(name)
        read = {key: _nested(shards, group, 2) for key, group in other.items() if key != "state"}
        saved = list(read.get("param_groups", []))
        called = self._names()
        known = {name for group in saved for name in group["params"]}
        others = {name for group in self.groups or () for name in group} - {
            n for names_ in called for n in names_
        }
        saved = [{**group, "params": [n for n in group["params"] if n not in others]} for group in saved]
        own = self.optimizer.state_dict()
        groups = _matched(shards, own["param_groups"], saved, called, reading)
        state: dict[Any, Any] = {}
        every = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(every):
            name = next((n for n in called[index] if n in known), None)
            if name is None:
                state.update({index: own["state"][index]} if index in own["state"] else {})
            elif name in entries:
                make = partial(_beside, parameter, self.optimizer.state.get(parameter, {}), moves)
                state[index] = _nested(shards, entries[name], 3, make)
        for key in entries.keys() - known:
            state[key] = _nested(shards, entries[key], 3)
        return {**read, "state": state, "param_groups": groups}

    def _names(self) -> list[list[str]]:
        return parameter_names(self.optimizer, self.models)


def by_name(
    optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
) -> dict[str, Any]:
    """A state that goes by the numbers of parameters as one that goes by their names.

    Raises:
        CheckpointError: a parameter is of no model.
    """
    called = [group[0] for group in parameter_names(optimizer, models)]
    held = {called[key] if isinstance(key, int) else key: value for key, value in state["state"].items()}
    groups = [
        {**group, "params": [called[index] for index in group["params"]]} for group in state["param_groups"]
    ]
    return {**state, "state": held, "param_groups": groups}


def by_number(
    optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
) -> dict[str, Any]:
    """A state that goes by the names of parameters as one that goes by their numbers.

    Raises:
        CheckpointError: it has other parameters.
    """
    numbers = {name: n for n, group in enumerate(parameter_names(optimizer, models)) for name in group}
    groups = [dict(group) for group in state["param_groups"]]
    unknown = [name for group in groups for name in group["params"] if name not in numbers]
    if unknown:
        raise CheckpointError(
            "the state does not fit the optimizer", why="; ".join(_differences([], unknown))
        )
    for group in groups:
        # Saved numbers are told by their order, so it must be the optimizer's own.
        group["params"] = sorted(numbers[name] for name in group["params"])
    held = {numbers.get(name, name): value for name, value in state["state"].items()}
    return {**state, "state": held, "param_groups": groups}


def parameter_names(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> list[list[str]]:
    """The names of each parameter, in the order of the optimizer's groups.

    Raises:
        CheckpointError: a parameter is of no model.
    """
    own = [p for group in optimizer.param_groups for p in group["params"]]
    wanted = set(own)
    used = [m for m in models if any(p in wanted for p in m.parameters())]
    found: dict[torch.Tensor, list[str]] = {}
    for number, module in enumerate(used):
        for name, parameter in _named(module):
            found.setdefault(parameter, []).append(f"{number}.{name}" if len(used) > 1 else name)
    for index, parameter in enumerate(own):
        if parameter not in found:
            raise CheckpointError(
                f"parameter {index} of the optimizer {type(optimizer).__name__}, of shape "
                f"{tuple(parameter.shape)}, belongs to no prepared model",
                why="states that are saved in parts go by the names of the models' parameters",
                fix="prepare the module that holds it, or save_state(sharded=False)",
            )
    return [found[parameter] for parameter in own]


def _clean(name: str) -> str:
    return name.replace("_orig_mod.", "").replace(_CHECKPOINTED, "")


def _named(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every name of every parameter, as states call it."""
    return [(_clean(name), p) for name, p in module.named_parameters(remove_duplicate=False)]


def _ties(module: nn.Module) -> dict[str, str]:
    """Names of parameters and buffers that are the same object as that of an earlier name.

    Not by memory, as for whole files: a rank with few rows may have no memory of either.
    """
    buffers = [(_clean(name), b) for name, b in module.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, value in (*_named(module), *buffers):
        owner = first.setdefault(id(value), name)
        if owner != name:
            found[name] = owner
    return found


def _refuse_empty(state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            raise CheckpointError(
                f"{name} has no data to save (it is on the meta device)",
                fix="give the model its weights before saving it",
            )


def _only_tensors(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _only_tensors(value) for key, value in state.items()}
    if isinstance(state, list) and all(isinstance(item, torch.Tensor) for item in state):
        return state
    return state if isinstance(state, torch.Tensor) else {}


def _by_own_name(shards: Shards, state: Mapping[str, Any]) -> dict[str, list[str]]:
    """Entries of the index by the name that the model has for them; an object may have several."""
    tops = {path[0] for path in shards.paths.values()}
    below = len(tops) == 1 and all(len(path) > 1 for path in shards.paths.values())
    found: dict[str, list[str]] = {}
    for name, path in shards.paths.items():
        found.setdefault(str(path[1 if below else 0]), []).append(name)
    own = {tensors.canonical(_clean(name)): name for name in state}
    theirs = {tensors.canonical(name) for name in found}
    if len(theirs) < len(found) or len(own) < len(state):
        return found
    return {own.get(tensors.canonical(name), name): group for name, group in found.items()}


def _tell_untied(shards: Shards, found: Mapping[str, list[str]], module: nn.Module, reading: Reading) -> None:
    ties, first = _ties(module), dict[Any, str]()
    for name, group in found.items():
        owner = first.setdefault(shards.places(group[0]), name)
        one, other = _clean(name), _clean(owner)
        if owner != name and ties.get(one, one) != ties.get(other, other):
            reading.notes.append(
                f"{shards.folder.name} has {name} tied to {owner}; in this model they are two tensors"
            )


def _differences(missing: Sequence[str], surplus: Sequence[str]) -> Iterable[str]:
    pairs = (("it lacks", missing), ("the model does not have", surplus))
    for text, found in pairs:
        if found:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            yield f"{text} {', '.join(found[:_SHOWN])}{more}"


def _nested(
    shards: Shards,
    group: Iterable[str],
    depth: int,
    make: Callable[[Shards, str, Sequence[Any]], Any] | None = None,
) -> Any:
    """The value below the first ``depth`` keys, put together from its entries."""
    flat = {shards.paths[name][depth:]: name for name in group}
    if () in flat:
        return _value(shards, flat[()], (), make)
    root: dict[Any, Any] = {}
    for path, name in flat.items():
        holder = root
        for key in path[:-1]:
            holder = holder.setdefault(key, {})
        holder[path[-1]] = _value(shards, name, path, make)
    return _listed(root)


def _value(shards: Shards, name: str, path: Sequence[Any], make: Any) -> Any:
    if make is None or shards.tensor(name) is None:
        return shards.read(name)
    return make(shards, name, path)


def _listed(value: Any) -> Any:
    """Dicts with the keys 0, 1, 2 ... were lists."""
    if not isinstance(value, dict):
        return value
    inner = {key: _listed(item) for key, item in value.items()}
    if inner and set(inner) == set(range(len(inner))):
        return [inner[index] for index in range(len(inner))]
    return inner


@torch.no_grad()
def _beside(
    parameter: torch.Tensor,
    held: Mapping[str, Any],
    moves: Moves,
    shards: Shards,
    name: str,
    path: Sequence[Any],
) -> torch.Tensor:
    """A tensor of a parameter's state, spread as the parameter is; ``moves`` fill it."""
    entry = shards.tensor(name)
    assert entry is not None
    dtype = entry.properties.dtype
    if not isinstance(parameter, DTensor) or not entry.size:
        return shards.read(name)
    present = held.get(path[0]) if len(path) == 1 else None
    like = parameter if entry.size == parameter.shape else present
    if not isinstance(like, DTensor) or like.shape != entry.size:
        whole = shards.read(name).to(parameter.to_local().device)
        mesh = parameter.device_mesh
        return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    target = present if _same_kind(present, like, dtype) else torch.empty_like(like, dtype=dtype)
    shards.route(name, target, moves)
    return target


def _same_kind(present: Any, like: DTensor, dtype: torch.dtype) -> TypeGuard[DTensor]:
    """Whether what an optimizer has now can take new values, as a new tensor would."""
    return (
        isinstance(present, DTensor)
        and (present.dtype, present.shape, present._spec) == (dtype, like.shape, like._spec)
        and present.device == like.device
    )


def _matched(
    shards: Shards,
    groups: Sequence[Mapping[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    called: list[list[str]],
    reading: Reading,
) -> list[dict[str, Any]]:
    """The saved groups in the order, and with the parameters, of the optimizer's own.

    Raises:
        CheckpointError: they hold other parameters, and loading is strict.
    """
    left = [(group, set(group["params"])) for group in saved]
    result: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        own = [called[index] for index in group["params"]]
        every = {name for names_ in own for name in names_}
        best, held = max(left, key=lambda pair: len(pair[1] & every), default=(None, set[str]()))
        missing = [names_[0] for names_ in own if not held.intersection(names_)]
        surplus = sorted(held - every)
        if reading.strict and (best is None or missing or surplus):
            raise CheckpointError(
                f"{shards.folder} does not fit group {number} of the optimizer",
                why="; ".join(_differences(missing, surplus)) or "it has fewer groups",
                fix="give the optimizer the groups that were saved, or pass strict=False",
            )
        reading.missing += [f"the state of {name} (in {shards.folder.name})" for name in missing]
        if best is None or (own and len(missing) == len(own)):
            result.append(dict(group))
            continue
        left.remove((best, held))
        result.append({**group, **best, "params": list(group["params"])})
    if left and reading.strict:
        raise CheckpointError(
            f"{shards.folder} holds {len(saved)} groups of parameters, and the optimizer {len(groups)}",
            fix="give the optimizer the groups that were saved, or pass strict=False",
        )
    return result
