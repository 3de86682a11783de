"""A tree of tensors on its way to all ranks: its description, its bytes in a letter, and what came back."""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from accelerate.core import tree
from accelerate.core.errors import CollectiveError, PrepareError
from accelerate.world import letters

_DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
)
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(_DTYPES)}
_LONE = letters.digest("t")


class Described(NamedTuple):
    """What a rank says of one tensor: dtype, whether it is in host memory, shape."""

    dtype: torch.dtype
    host: bool
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}{'' if self.host else ' on a device'}"


@dataclass
class Parcel:
    """The tensors of a tree, in its order.

    Attributes:
        operation: what is done with them.
        data: the tree.
        leaves: its tensors, detached.
        structure: digest of keys, lengths and places of tensors.
        problem: why the tree cannot be sent, told after the others know.
        sent: the letters of this exchange are there already.
    """

    office: letters.Office
    operation: str
    data: Any
    leaves: list[torch.Tensor]
    structure: int
    problem: PrepareError | None = None
    sent: bool = False

    @classmethod
    def of(cls, operation: str, data: Any) -> Parcel:
        """The tensors of ``data``."""
        leaves: list[torch.Tensor] = []
        others: list[Any] = []
        structure = _LONE
        if isinstance(data, torch.Tensor):
            leaves.append(data)
        else:
            structure = letters.digest(_structure(data, leaves, others))
        leaves = [leaf.detach() if leaf.requires_grad else leaf for leaf in leaves]
        problem = _refusal(operation, others[0]) if others else None
        return cls(letters.office(), operation, data, leaves, structure, problem)

    def repeat(self) -> letters.Form | None:
        """Sends the values by a form, if there is one and all ranks used it; it then holds all values.

        Otherwise ``send`` goes on.
        """
        key: Any = [self.operation, self.structure]
        for leaf in self.leaves:
            if leaf.device.type != "cpu" or leaf.layout is not torch.strided:
                return None
            key += (leaf.dtype, leaf.shape)
        form = self.office.form(tuple(key), self._form)
        if form is None or self.problem is not None:
            return None
        if self.office.repeat(form, self.leaves):
            return form
        self.sent = True
        return None

    def _form(self) -> letters.Form | None:
        description = _described(self.leaves)
        needed = letters.body_start(len(description)) + sum(
            letters.aligned(leaf.nbytes) for leaf in self.leaves
        )
        if not self.office.fits(needed):
            return None
        return letters.Form(self.office, self.operation, self.structure, description, self.leaves)

    def send(self, *, values: bool = True) -> letters.Mail:
        """The exchange: all ranks' descriptions, with the values if they fit.

        Raises:
            CollectiveError: the structures differ; or see ``Office.exchange``.
            PrepareError: a leaf is not a tensor.
        """
        leaves = self.leaves
        amount = 0
        for leaf in leaves if values else ():
            if leaf.device.type != "cpu":
                amount = letters.ELSEWHERE
                break
            amount += letters.aligned(leaf.nbytes)
        mail = self.office.exchange(
            self.operation, self.structure, _described(leaves), amount, self._fill, sent=self.sent
        )
        if not mail.same and set(mail.trees) != {self.structure}:
            raise self._other_structure()
        if self.problem is not None:
            raise self.problem
        return mail

    def _fill(self, letter: bytearray, start: int) -> None:
        for leaf in self.leaves:
            count = leaf.numel()
            if count:
                place = torch.frombuffer(letter, dtype=leaf.dtype, count=count, offset=start)
                place.copy_(leaf.reshape(-1))
            start += letters.aligned(leaf.nbytes)

    # --- what came back

    def described(self, mail: letters.Mail, rank: int) -> list[Described]:
        """What a rank said of its tensors."""
        return list(_read(mail.description(rank)))

    def shape(self, mail: letters.Mail, rank: int, index: int) -> tuple[int, ...]:
        """The shape of a rank's tensor."""
        return self.described(mail, rank)[index].shape

    def values(self, mail: letters.Mail, index: int) -> tuple[torch.Tensor, ...]:
        """All ranks' values of a tensor, in rank order; they share the letters' memory."""
        return tuple(self.unpacked(mail, rank, index) for rank in range(self.office.size))

    def unpacked(self, mail: letters.Mail, rank: int, index: int) -> torch.Tensor:
        """A rank's values of a tensor; it shares the letter's memory."""
        all_ = self.described(mail, rank)
        one = all_[index]
        start = rank * mail.room + letters.body_start(mail.lengths[rank])
        start += sum(letters.aligned(other.nbytes) for other in all_[:index])
        count = math.prod(one.shape)
        if count == 0:
            return torch.empty(one.shape, dtype=one.dtype, device="cpu")
        return torch.frombuffer(mail.inbox, dtype=one.dtype, count=count, offset=start).view(one.shape)

    def rebuilt(self, leaves: list[torch.Tensor]) -> Any:
        """The tree with other tensors."""
        if isinstance(self.data, torch.Tensor):
            return leaves[0]
        rest = iter(leaves)
        return tree.map_tree(lambda leaf: next(rest) if isinstance(leaf, torch.Tensor) else leaf, self.data)

    # --- disagreement

    def check(self, mail: letters.Mail, *, ragged: bool = False) -> None:
        """Whether all ranks described the same; with ``ragged``, dimension 0 may differ.

        Raises:
            CollectiveError: they did not.
        """
        if mail.same:
            return
        every = [self.described(mail, rank) for rank in range(self.office.size)]
        for index, ones in enumerate(zip(*every, strict=True)):
            if len({_key(one, ragged) for one in ones}) > 1:
                raise self._other_tensor(index, ones, ragged)

    def _other_tensor(self, index: int, ones: tuple[Described, ...], ragged: bool) -> CollectiveError:
        paths = [path for path, leaf in tree.leaves(self.data) if isinstance(leaf, torch.Tensor)]
        place = f", {paths[index]}" if paths[index] else ""
        fix = "make the shapes and dtypes equal on all ranks"
        if ragged:
            fix = (
                "make all dimensions but the first equal: accelerator.pad_across_processes(tensor, dim=1) "
                "before gather"
            )
        return CollectiveError(
            f"the ranks do not agree about a tensor to {self.operation}{place}",
            why=_table([str(one) for one in ones]),
            fix=fix,
        )

    def _other_structure(self) -> CollectiveError:
        """All ranks know that they differ; one more exchange tells where."""
        mine = [(path, "a tensor" if isinstance(leaf, torch.Tensor) else f"{type(leaf).__name__}")
                for path, leaf in tree.leaves(self.data)]  # fmt: skip
        text = repr(mine).encode()

        def fill(letter: bytearray, start: int) -> None:
            letter[start : start + len(text)] = text

        mail = self.office.exchange(
            f"{self.operation}, structure", 0, b"", len(text), fill, any_size=True, label=self.operation
        )
        every = [dict(_parsed(bytes(mail.body(rank)))) for rank in range(self.office.size)]
        paths = dict.fromkeys(path for one in every for path in one)
        order = [tuple(one) for one in every]
        path = next((p for p in paths if len({one.get(p) for one in every}) > 1), None)
        if path is None:
            rows = [", ".join(keys) for keys in order]
            what = f"the ranks have the tensors to {self.operation} in different orders"
        else:
            rows = [one.get(path, "nothing there") for one in every]
            what = f"the ranks do not agree about the structure to {self.operation}, at {path or 'its top'}"
        return CollectiveError(what, why=_table(rows), fix="pass the same keys and lengths on every rank")


def _parsed(text: bytes) -> list[tuple[str, str]]:
    import ast

    return ast.literal_eval(text.decode())


def _key(one: Described, ragged: bool) -> tuple[Any, ...]:
    return one.dtype, one.host, len(one.shape), one.shape[1:] if ragged else one.shape


def _table(rows: list[str]) -> str:
    return "\n       ".join(f"rank {rank}: {row}" for rank, row in enumerate(rows))


def _refusal(operation: str, leaf: Any) -> PrepareError:
    return PrepareError(
        f"a {type(leaf).__name__} cannot go through {operation}",
        why="it works on tensors, and on lists, tuples, dicts and dataclasses of tensors",
        fix="for any other object use gather_object or broadcast_object_list",
    )


def _structure(value: Any, leaves: list[torch.Tensor], others: list[Any]) -> str:
    """Keys, lengths and places of tensors as text; collects the tensors and what is none."""
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return "t"
    if value is None:
        return "n"
    if tree.is_sequence(value):
        return f"[{','.join([_structure(item, leaves, others) for item in value])}]"
    if tree.is_mapping(value):
        return (
            f"{{{','.join([f'{key!r}:{_structure(item, leaves, others)}' for key, item in value.items()])}}}"
        )
    if tree.is_container(value):
        named = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return f"<{','.join([f'{name}:{_structure(item, leaves, others)}' for name, item in named])}>"
    others.append(value)
    return type(value).__name__


def _described(leaves: list[torch.Tensor]) -> bytes:
    numbers: list[int] = []
    for leaf in leaves:
        shape = () if leaf.is_nested else leaf.shape
        numbers += (_DTYPE_CODE[leaf.dtype] * 2 + (leaf.device.type == "cpu"), len(shape), *shape)
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _read(description: bytes) -> Iterator[Described]:
    numbers = struct.unpack(f"<{len(description) // 8}q", description)
    place = 0
    while place < len(numbers):
        code, dims = numbers[place : place + 2]
        place += 2 + dims
        yield Described(_DTYPES[code // 2], bool(code % 2), numbers[place - dims : place])
