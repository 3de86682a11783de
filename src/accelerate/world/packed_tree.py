"""A tree of tensors packed for a collective: its description, its inline bytes, and the received values."""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import inspect
import math
import pickle
import struct
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from accelerate.core import tree
from accelerate.core.errors import CollectiveError, PrepareError, warn_user
from accelerate.world import control_channel
from accelerate.world import world as worlds
from accelerate.world.call_site import find_call_site
from accelerate.world.control_channel import NOT_ON_HOST, GatheredControlMessages, align
from accelerate.world.deferred_agreement import DeferredAgreement, is_deferrable
from accelerate.world.local_tensor_trees import unsupported_leaf_error
from accelerate.world.rank_failure_report import find_difference, rank_table

_DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
)
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(_DTYPES)}


@functools.lru_cache(maxsize=1024)
def _digest(text: str) -> int:
    """Return a checksum of a text, the same in every process."""
    return zlib.crc32(text.encode())


_SINGLE_TENSOR = _digest("t")


class TensorDescription(NamedTuple):
    """The dtype, location and shape of one tensor of a rank."""

    dtype: torch.dtype
    on_host: bool
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}{'' if self.on_host else ' on a device'}"


@dataclass
class PackedTree:
    """The tensors of a tree, flattened for a collective.

    Attributes:
        channel: the control channel of the world.
        operation: name of the collective.
        data: the tree.
        leaves: its tensors, detached.
        sources: its tensors, with their graphs.
        structure: digest of keys, lengths and positions of tensors.
        problem: why the tree cannot be sent; raised after the other ranks have the message.
    """

    channel: control_channel.ControlChannel
    operation: str
    data: Any
    leaves: list[torch.Tensor]
    sources: list[torch.Tensor]
    structure: int
    problem: PrepareError | None = None

    @classmethod
    def pack(cls, operation: str, data: Any) -> PackedTree:
        """Flatten the tensors of ``data``."""
        leaves: list[torch.Tensor] = []
        others: list[Any] = []
        structure = _SINGLE_TENSOR
        if isinstance(data, torch.Tensor) and data.layout == torch.strided:
            leaves.append(data)
        else:
            structure = _digest(_structure(data, leaves, others))
        others += [leaf for leaf in leaves if leaf.layout != torch.strided]
        dense = [leaf for leaf in leaves if leaf.layout == torch.strided]
        leaves = [leaf.detach() if leaf.requires_grad else leaf for leaf in dense]
        problem = unsupported_leaf_error(operation, others[0]) if others else None
        return cls(control_channel.channel(), operation, data, leaves, dense, structure, problem)

    def exchange(
        self,
        *,
        values: bool = True,
        source: int | None = None,
        merge: control_channel.MessageMerger | None = None,
    ) -> GatheredControlMessages:
        """Exchange the descriptions of all ranks, with the values inline if they fit.

        Args:
            values: send values.
            source: the only rank that sends its values.
            merge: see ``ControlChannel.exchange``.

        Raises:
            CollectiveError: the structures differ; or see ``ControlChannel.exchange``.
            PrepareError: a leaf is not a tensor.
        """
        leaves = self.leaves
        value_size = 0
        for leaf in leaves if values else ():
            if leaf.device.type != "cpu":
                value_size = NOT_ON_HOST
                break
            value_size += align(leaf.nbytes)
        messages = self.channel.exchange(
            self.operation,
            self.structure,
            _encode_descriptions(leaves),
            value_size,
            self._fill,
            source=source,
            merge=merge,
        )
        if not messages.same and set(messages.structures) != {self.structure}:
            raise self._structure_mismatch()
        if self.problem is not None:
            raise self.problem
        return messages

    def agree_on_device(self, arguments: str = "") -> bool:
        """Send a digest of the call ahead of its transfer; return False where the host must wait.

        Args:
            arguments: of the collective; they must be equal on all ranks.

        Raises:
            CollectiveError: the ranks disagree about an earlier call, or are known to about this one.
        """
        channel, world = self.channel, worlds.current()
        if self.problem is not None or world is None or not is_deferrable(world, self.leaves):
            return False
        if channel.watchdog.report is not None:
            raise channel.watchdog.report.error(channel.rank)
        if channel.deferred is None:
            channel.deferred = DeferredAgreement(channel.watchdog, world)
        operation = self.operation + arguments
        label = f"{operation} at {find_call_site(inspect.currentframe())}"
        content = struct.pack("<I", self.structure) + _encode_descriptions(self.leaves)
        channel.deferred.post(operation, label, content, self._describe)
        return True

    def _describe(self) -> list[tuple[str, str]]:
        """Return path and description of each leaf."""
        described = ((path, leaf) for path, leaf in tree.iterate_leaves(self.data) if leaf is not None)
        return [
            (path, str(TensorDescription(leaf.dtype, leaf.device.type == "cpu", tuple(leaf.shape))))
            for path, leaf in described
        ]

    def _fill(self, message: bytearray) -> None:
        start = 0
        for leaf in self.leaves:
            count = leaf.numel()
            if count:
                place = torch.frombuffer(message, dtype=leaf.dtype, count=count, offset=start)
                place.copy_(leaf.reshape(-1))
            start += align(leaf.nbytes)

    # --- received values

    def descriptions(self, messages: GatheredControlMessages, rank: int) -> list[TensorDescription]:
        """Return the descriptions of a rank's tensors."""
        description = messages.descriptions[rank]
        numbers = struct.unpack(f"<{len(description) // 8}q", description)
        described, place = list[TensorDescription](), 0
        while place < len(numbers):
            code, dims = numbers[place : place + 2]
            place += 2 + dims
            described.append(
                TensorDescription(_DTYPES[code // 2], bool(code % 2), numbers[place - dims : place])
            )
        return described

    def descriptions_by_leaf(self, messages: GatheredControlMessages) -> list[tuple[TensorDescription, ...]]:
        """Return the descriptions of each tensor on all ranks."""
        return list(
            zip(*[self.descriptions(messages, rank) for rank in range(self.channel.size)], strict=True)
        )

    def stacked_values(self, messages: GatheredControlMessages) -> list[torch.Tensor]:
        """Return each tensor of all ranks, which agree, stacked in rank order: views of the buffer."""
        size, start = self.channel.size, messages.offsets[0]
        stride = messages.offsets[1] - start
        stacked: list[torch.Tensor] = []
        for leaf in self.leaves:
            if leaf.numel():
                every = torch.frombuffer(messages.buffer, dtype=torch.uint8)
                rows = every.as_strided((size, leaf.nbytes), (stride, 1), start)
                stacked.append(rows.view(leaf.dtype).view(size, *leaf.shape))
            else:
                stacked.append(torch.empty((size, *leaf.shape), dtype=leaf.dtype, device="cpu"))
            start += align(leaf.nbytes)
        return stacked

    def rank_values(self, messages: GatheredControlMessages, rank: int) -> list[torch.Tensor]:
        """Return a rank's values of each tensor as views of the buffer."""
        start, values = messages.offsets[rank], list[torch.Tensor]()
        for like in self.leaves if messages.same else self.descriptions(messages, rank):
            count = math.prod(like.shape)
            if count:
                flat = torch.frombuffer(messages.buffer, dtype=like.dtype, count=count, offset=start)
                values.append(flat.view(like.shape))
            else:
                values.append(torch.empty(like.shape, dtype=like.dtype, device="cpu"))
            start += align(like.nbytes)
        return values

    def rebuild(self, leaves: list[torch.Tensor]) -> Any:
        """Return the tree with ``leaves`` as its tensors."""
        if isinstance(self.data, torch.Tensor):
            return leaves[0]
        rest = iter(leaves)
        return tree.map_tree(lambda leaf: next(rest) if isinstance(leaf, torch.Tensor) else leaf, self.data)

    # --- mismatches

    def check_agreement(self, messages: GatheredControlMessages, *, ragged: bool = False) -> None:
        """Check that the descriptions of all ranks match; with ``ragged``, dimension 0 may differ.

        Raises:
            CollectiveError: they do not match.
        """
        if messages.same:
            return
        first, fix = 0, "make the shapes and dtypes equal on all ranks"
        if ragged:
            first = 1
            fix = (
                "make all dimensions but the first equal: accelerator.pad_across_processes(tensor, dim=1) "
                "before gather"
            )
        for index, descriptions in enumerate(self.descriptions_by_leaf(messages)):
            facts = {(each.dtype, each.on_host, len(each.shape), each.shape[first:]) for each in descriptions}
            if len(facts) > 1:
                raise self.tensor_mismatch(index, descriptions, fix)

    def promote_scalars(self, messages: GatheredControlMessages) -> bool:
        """Convert host scalars that differ between ranks in dtype alone to a dtype that all promote to.

        Returns:
            False, with nothing converted, where the ranks differ in another tensor, or no dtype is for all.
        """
        by_leaf = self.descriptions_by_leaf(messages)
        for descriptions in by_leaf:
            if len(set(descriptions)) > 1 and any(each.shape or not each.on_host for each in descriptions):
                return False
        try:
            dtypes = [functools.reduce(torch.promote_types, [d.dtype for d in each]) for each in by_leaf]
        except RuntimeError:  # torch promotes no 8-bit floats
            return False
        self.leaves = [leaf.to(dtype) for leaf, dtype in zip(self.leaves, dtypes, strict=True)]
        self.sources = [leaf.to(dtype) for leaf, dtype in zip(self.sources, dtypes, strict=True)]
        index, rows = next((i, each) for i, each in enumerate(by_leaf) if len(set(each)) > 1)
        if self.channel.rank == 0:
            table = ", ".join(f"{each.dtype} on rank {rank}" for rank, each in enumerate(rows))
            warn_user(
                f"the ranks give other dtypes to {self.operation}, which returns {dtypes[index]}: {table}"
            )
        return True

    def tensor_mismatch(
        self, index: int, descriptions: tuple[TensorDescription, ...], fix: str
    ) -> CollectiveError:
        """Return the error for a tensor about which the ranks disagree."""
        paths = [path for path, leaf in tree.iterate_leaves(self.data) if isinstance(leaf, torch.Tensor)]
        place = f", {paths[index]}" if paths[index] else ""
        return CollectiveError(
            f"the ranks do not agree about a tensor to {self.operation}{place}",
            why=rank_table(descriptions),
            fix=fix,
        )

    def _structure_mismatch(self) -> CollectiveError:
        """Return the error for different structures; one more exchange finds where they differ."""
        leaf_kinds = [(path, _leaf_kind(leaf)) for path, leaf in tree.iterate_leaves(self.data)]
        messages = self.channel.exchange(
            f"{self.operation}, structure", data=pickle.dumps(leaf_kinds), label=self.operation
        )
        path, rows = find_difference([dict(pickle.loads(messages.body(r))) for r in range(self.channel.size)])
        title = f"the ranks do not agree about the structure to {self.operation}, at {path or 'its top'}"
        if path is None:
            title = f"the ranks have the tensors to {self.operation} in different orders"
        return CollectiveError(
            title, why=rank_table(rows), fix="pass the same keys and lengths on every rank"
        )


def _structure(value: Any, leaves: list[torch.Tensor], others: list[Any]) -> str:
    """Return keys, lengths and positions of tensors as text; collect the tensors and all other leaves."""
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return "t" if value.layout == torch.strided else str(value.layout)
    if value is None:
        return "n"
    if tree.is_sequence(value):
        return f"[{','.join([_structure(item, leaves, others) for item in value])}]"
    if tree.is_mapping(value):
        return (
            f"{{{','.join([f'{key!r}:{_structure(item, leaves, others)}' for key, item in value.items()])}}}"
        )
    if tree.is_container(value):
        named = tree.dataclass_items(value)
        return f"<{','.join([f'{name}:{_structure(item, leaves, others)}' for name, item in named.items()])}>"
    others.append(value)
    return type(value).__name__


def _leaf_kind(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf).__name__
    return "a tensor" if leaf.layout == torch.strided else f"a {leaf.layout} tensor"


def _encode_descriptions(leaves: list[torch.Tensor]) -> bytes:
    numbers: list[int] = []
    for leaf in leaves:
        shape = () if leaf.is_nested else leaf.shape
        numbers += (_DTYPE_CODE[leaf.dtype] * 2 + (leaf.device.type == "cpu"), len(shape), *shape)
    return struct.pack(f"<{len(numbers)}q", *numbers)
