"""Finding out whether a registered object writes into models or optimizers while it is loaded.

Registered objects are loaded before models and optimizers, since they may refuse their state. One that writes
into these, as an average of weights may, has to write once more after them. All others are loaded once: an
object that extends a list with what was saved would have it twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accelerate.checkpoint.layout import CheckpointContents
from accelerate.core import tree


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
