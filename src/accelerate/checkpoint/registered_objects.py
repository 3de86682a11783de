"""Registered objects: which of them write into models while they are loaded, and which have shards of them.

Registered objects are loaded before models and optimizers, since they may refuse their state. One that writes
into these, as an average of weights may, has to write once more after them. All others are loaded once: an
object that extends a list with what was saved would have it twice.

An average of the local values of FSDP1's parameters has each rank's own shards of parameters as plain
tensors, and so has one that keeps ``to_local()`` of DTensors. Nothing in a plain tensor says what it is a
shard of. So the file has the shards of all ranks, by rank, and each rank gets its own back; other numbers of
ranks are refused. An average in a pipeline is of the parameters of one stage: all states are saved, by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accelerate.checkpoint.layout import CheckpointContents
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.core import tree
from accelerate.core.errors import CheckpointError
from accelerate.world import collective


class _WriteWatch(TorchDispatchMode):
    """Notices operations that write into the memory at given addresses."""

    def __init__(self, addresses: Iterable[int]) -> None:
        super().__init__()
        self.memory = {address for address in addresses if address}
        self.has_written = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.has_written:
            targets = [(kwargs or {}).get("out")]
            if func.name().partition(".")[0].endswith("_"):
                targets += args[0] if isinstance(args[0], list | tuple) else args[:1]
            self.has_written = any(_address(each) in self.memory for each in targets if each is not None)
        return func(*args, **(kwargs or {}))


def _address(tensor: Any) -> int:
    """Return where a tensor's memory, or that of this rank's shard, begins; 0 if it has none."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    try:
        return local.untyped_storage().data_ptr()
    except (AttributeError, RuntimeError, NotImplementedError):  # of a tensor without storage
        return 0


def load_copy(load: Callable[..., object], state: Any, **options: Any) -> object:
    """Load a state in containers of its own: an object may take them apart, and be loaded again."""
    return load(tree.map_tree(lambda leaf: leaf, state), **options)


def writes_into(contents: CheckpointContents, load: Callable[[], object]) -> bool:
    """Call ``load``; return whether it changed models, optimizer states or options of optimizers."""
    models = [getattr(each, "module", None) or each for each in contents.models]
    modules = [each for each in models if isinstance(each, nn.Module)]
    optimizers = [getattr(each, "optimizer", None) or each for each in contents.optimizers]
    states = [value for each in optimizers for value in getattr(each, "state", {}).values()]

    def iterate_tensors() -> Iterator[torch.Tensor]:
        for module in modules:
            yield from module.parameters()
            yield from module.buffers()
        for state in states:
            yield from (value.detach() for value in state.values() if isinstance(value, torch.Tensor))

    def read_options() -> list[str]:
        groups = [group for each in optimizers for group in getattr(each, "param_groups", ())]
        return [repr({name: value for name, value in group.items() if name != "params"}) for group in groups]

    def read_addresses() -> list[int]:
        return [_address(tensor) for tensor in iterate_tensors()]

    options, addresses = read_options(), read_addresses()
    with _WriteWatch(addresses) as watch:
        load()
    return watch.has_written or (read_options(), read_addresses()) != (options, addresses)


_SHARDS, _STATE = "accelerate_rank_shards", "state"


def gather_rank_shards(
    state: Any, shapes: Collection[torch.Size], name: str, *, each_node: bool = False
) -> Any:
    """Return the state with the shards of all ranks, where it is saved, if there are any; collective.

    Args:
        state: nested data without DTensors.
        shapes: those of this rank's shards of parameters: other tensors are no shards.
        name: of the object, for errors.
        each_node: one rank of each machine saves, otherwise rank 0.
    """
    tensors = {
        path: leaf
        for path, leaf in tree.iterate_leaves(state)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.shape in shapes
    }
    # A tensor that all ranks have alike may have the shape of a shard by chance.
    prints = {path: _fingerprint(leaf) for path, leaf in tensors.items()}
    differing = collective.combine_objects(prints, _find_differing, f"the state of {name}")
    if not differing:
        return state
    own = [tensors[path].detach().to("cpu", copy=True) for path in differing]
    shards = list[list[torch.Tensor]]()
    gather: Callable[[list[Any]], Any] = list if each_node else shards.extend
    shards = collective.combine_objects(own, gather, f"the shards of {name}") or shards
    return {_STATE: state, _SHARDS: dict(zip(differing, map(list, zip(*shards, strict=True)), strict=False))}


_RANKS, _STATES = "accelerate_state_of_rank", "states"


def gather_rank_states(state: Any, name: str, *, each_node: bool = False) -> Any:
    """Return the different states of all ranks, where they are saved, if tensors differ; collective.

    Args:
        state: nested data without DTensors.
        name, each_node: see ``gather_rank_shards``.
    """
    prints = {
        path: _fingerprint(leaf)
        for path, leaf in tree.iterate_leaves(state)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    }
    # By rank, the first rank with an equal state: replicas of a stage have one.
    first: list[int] = collective.combine_objects(
        prints, lambda by_rank: [by_rank.index(each) for each in by_rank], f"the state of {name}"
    )
    if not any(first):
        return state
    rank = collective.rank()
    own = tree.map_tree(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, state)
    states = list[Any]()
    gather: Callable[[list[Any]], Any] = list if each_node else states.extend
    sent = own if first[rank] == rank else None
    states = collective.combine_objects(sent, gather, f"the states of {name}") or states
    return {_RANKS: first, _STATES: {rank: states[rank] for rank in set(first)} if states else {}}


def _select_rank_state(state: Any, ranks: CheckpointRankGroup, label: str, item: Any) -> Any:
    first, states = state[_RANKS], state[_STATES]
    own: Any = {}
    with suppress(AttributeError, LookupError):  # it may have no state before it is loaded
        own = (getattr(item, "module", None) or item).state_dict()
    if len(first) != ranks.size:
        raise CheckpointError(
            f"{label} has the states of {len(first)} processes, and {ranks.size} others load it",
            why="each stage of a pipeline has registered states of its own parameters",
            fix="load it with the same pp_size and as many processes",
        )
    selected = states[first[ranks.rank]]
    saved = {path for path, _ in tree.iterate_leaves(selected)}
    # Other values, and more tensors, may come in training: a state begins empty.
    tensors = (path for path, leaf in tree.iterate_leaves(own) if isinstance(leaf, torch.Tensor))
    if missing := next((path for path in tensors if path not in saved), None):
        raise CheckpointError(
            f"{label} holds {missing} here, and did not on the rank {first[ranks.rank]} that saved it",
            why="the stages of the pipeline have other parameters than when it was saved",
            fix="load it with the same pp_size and the same split of the model",
        )
    return selected


def _find_differing(by_rank: list[dict[str, Any]]) -> list[str]:
    """Return the paths that all ranks have, with different values."""
    common = [path for path in by_rank[0] if all(path in each for each in by_rank)]
    return [path for path in common if any(each[path] != by_rank[0][path] for each in by_rank)]


def _fingerprint(tensor: torch.Tensor) -> tuple[Any, ...]:
    values = tensor.detach()
    sums = values.sum(dtype=torch.float64), torch.linalg.vector_norm(values, dtype=torch.float64)
    return tuple(values.shape), *(str(each.item()) for each in sums)


def select_rank_shards(state: Any, ranks: CheckpointRankGroup, label: str, item: Any = None) -> Any:
    """Return this rank's state, or the state with its shards, where those of all ranks were gathered into it.

    Raises:
        CheckpointError: another number of ranks saved it, or ``item`` has the parameters of another stage.
    """
    if tree.is_mapping(state) and state.keys() == {_RANKS, _STATES}:
        return _select_rank_state(state, ranks, label, item)
    if not (tree.is_mapping(state) and state.keys() == {_STATE, _SHARDS}):
        return state
    shards = state[_SHARDS]
    count = len(next(iter(shards.values())))
    if count != ranks.size:
        raise CheckpointError(
            f"{label} has shards of {count} processes, and {ranks.size} load it",
            why="its state_dict() returned plain tensors with the shards of each process, which cannot be "
            "cut anew",
            fix="load it with as many processes; or keep full tensors or DTensors (fsdp_version=2) in it",
        )
    leaves = (
        shards[path][ranks.rank] if path in shards else leaf
        for path, leaf in tree.iterate_leaves(state[_STATE])
    )
    return tree.replace_leaves(state[_STATE], leaves)
