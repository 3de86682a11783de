"""Weights from files into a model, a tensor at a time: what meets, what does not, and what is said of it.

Names and shapes of all files are compared with the model before the first tensor is read. Where a tensor goes
is for a ``Home`` to say: memory, a device, or the file itself. There is never a second copy of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from accelerate.checkpoint import special
from accelerate.checkpoint.lazy import LazyTensor
from accelerate.checkpoint.mapped import Maps
from accelerate.checkpoint.tensors import as_dtype, canonical, is_distributed
from accelerate.core.errors import CheckpointError

logger = logging.getLogger(__name__)

_SHOWN = 12
_HOST = torch.device("cpu")


class WeightsError(CheckpointError, ValueError):
    """The weights of a file do not fit a model (a ValueError too, as in the public package)."""


class Keys(NamedTuple):
    """What did not meet.

    Attributes:
        missing: names of the model that no file holds; they are as they were.
        unexpected: names in files that the model does not have.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(eq=False)
class Target:
    """One tensor of the model.

    Attributes:
        names: by which it goes; several if it is tied.
        holders: module and attribute of each.
        tensor: the parameter or buffer as it is now.
        saved: whether a state dict of the model holds it; it does not hold buffers that are not persistent.
    """

    names: list[str]
    holders: list[tuple[nn.Module, str]]
    tensor: torch.Tensor
    saved: bool = True

    @property
    def weight(self) -> bool:
        """A parameter; otherwise a buffer, which has the value it was made with."""
        return isinstance(self.tensor, nn.Parameter)

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return self.tensor.shape


class Home(Protocol):
    """Says where tensors go."""

    def check(self, pairs: Sequence[Pair]) -> None:
        """Refuses, before anything is read, what cannot go where it should."""
        ...

    def bring(self, target: Target, saved: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor that the model is to hold; its own, if values have been copied into it."""
        ...

    def device(self, name: str, here: torch.device) -> torch.device:
        """Where a module is to lie that reads its weights itself.

        Args:
            name: of a weight.
            here: where it is now.
        """
        ...


@dataclass(frozen=True)
class Pair:
    """A tensor of the model and what files hold of it.

    Attributes:
        target: the one in the model.
        name: its name in the files.
        saved: the one in the files.
        others: by further names, if the model has one tensor where the files may have several.
        dtype: what it becomes.
    """

    target: Target
    name: str
    saved: LazyTensor
    others: dict[str, LazyTensor]
    dtype: torch.dtype


class Here:
    """Tensors stay where they are; those on the meta device are mapped from the file into host memory."""

    def __init__(self) -> None:
        self.maps = Maps()

    def check(self, pairs: Sequence[Pair]) -> None:
        """Nothing can go wrong."""

    def bring(self, target: Target, saved: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
        """Copies into memory that there is; otherwise a view of the file."""
        here = target.tensor
        if here.device.type != "meta" or is_distributed(here):
            return into(here, saved, dtype, self.maps)
        return on_host(saved, dtype, self.maps)

    def device(self, name: str, here: torch.device) -> torch.device:
        """Where it is."""
        return _HOST if here.type == "meta" else here


def on_host(saved: LazyTensor, dtype: torch.dtype, maps: Maps) -> torch.Tensor:
    """A tensor in host memory: a view of its file if that has the dtype, else a copy."""
    if saved.place is None:
        return saved.read().to(dtype)
    return maps.tensor(saved.place, saved.shape, saved.dtype).to(dtype)


@torch.no_grad()
def into(here: torch.Tensor, saved: LazyTensor, dtype: torch.dtype, maps: Maps) -> torch.Tensor:
    """The values where a tensor is now, in place if it has memory of that dtype; of a DTensor, its part."""
    value = on_host(saved, saved.dtype, maps)
    if is_distributed(here):
        return _part_into(here, value, dtype)
    if here.dtype == dtype and here.device.type != "meta":
        return here.copy_(value)
    return value.to(device=here.device, dtype=dtype)


def _part_into(here: Any, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    local = here.to_local()
    if local.device.type == "meta" or local.dtype != dtype:
        local = torch.empty_like(local, device=here.device_mesh.device_type, dtype=dtype)
    if value.shape == local.shape and value.shape != here.shape:  # the file holds this process's part
        local.copy_(value)
    else:
        for chunk in here.__create_chunk_list__() if local.numel() else ():
            part = value
            for dim, (offset, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                part = part.narrow(dim, offset, length)
            local.copy_(part)
    if local is here.to_local() or local.data_ptr() == here.to_local().data_ptr():
        return here
    return type(here).from_local(
        local, here.device_mesh, here.placements, run_check=False, shape=here.shape, stride=here.stride()
    )


def load(
    model: nn.Module,
    found: Mapping[str, LazyTensor],
    where: Path,
    home: Home,
    *,
    dtype: str | torch.dtype | None = None,
    keep_in_fp32: Iterable[str] = (),
    strict: bool = False,
    allow_missing: bool = False,
    parts: bool = False,
) -> Keys:
    """Loads weights into a model.

    Args:
        model: the model.
        found: what the files hold, by all names (``weights_of(path).every()``).
        where: the files, for errors.
        home: says where each tensor goes.
        dtype: what floating point weights become; None keeps the model's.
        keep_in_fp32: names of modules, at any depth, whose floating point weights become float32.
        strict: names that the model does not have are an error, not a warning; so are missing buffers.
        allow_missing: weights that no file holds stay as they are, with a warning that lists them. Otherwise
            they are an error: they would be random, or stay on the meta device.
        parts: files hold the part of this process, where a tensor is spread over processes.

    Raises:
        WeightsError: names are missing, or shapes or kinds differ; the model is unchanged.
    """
    targets = _targets(model)
    taken = special.find(model, found, {n for t in targets for n in t.names})
    own = [t for t in targets if t.saved and not taken.owns(t.names)]
    rest = {n: s for n, s in found.items() if n not in taken.names}
    pairs, missing, unexpected = _matched(own, rest, as_dtype(dtype), tuple(keep_in_fp32))
    if any(t.weight for t in missing) and _tie(model):
        return load(
            model, found, where, home, dtype=dtype, keep_in_fp32=keep_in_fp32, strict=strict,
            allow_missing=allow_missing, parts=parts,
        )  # fmt: skip
    _refuse_misfits(where, pairs, parts)
    _refuse_gaps(where, missing, unexpected, strict=strict, allow_missing=allow_missing)
    _refuse_hollow(targets, allow_missing=allow_missing)
    home.check(pairs)
    for pair in pairs:
        _put(pair.target, home.bring(pair.target, pair.saved, pair.dtype))
        _compare(pair)
    left = taken.load(where, home.device)
    names = tuple(t.names[0] for t in missing)
    unexpected = (*unexpected, *left)
    for what, said in (("missing, left as they are", names), ("unused", unexpected)):
        if said:
            logger.warning("%s: %s", where, _line(what, said))
    return Keys(names, unexpected)


def _targets(model: nn.Module) -> list[Target]:
    """The parameters and buffers of a model, tied ones once."""
    found: dict[int, Target] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        left_out = module._non_persistent_buffers_set
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is None:
                continue
            target = found.setdefault(id(tensor), Target([], [], tensor, saved=False))
            target.names.append(f"{prefix}.{name}" if prefix else name)
            target.holders.append((module, name))
            target.saved = target.saved or name not in left_out
    return list(found.values())


def _tie(model: nn.Module) -> bool:
    """Lets a model tie its weights, if it knows how and has not; whether that changed anything."""
    tie: Any = getattr(model, "tie_weights", None)
    if not callable(tie):
        return False
    before = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    tie()
    return before != [id(p) for _, p in model.named_parameters(remove_duplicate=False)]


def _matched(
    targets: list[Target],
    found: Mapping[str, LazyTensor],
    dtype: torch.dtype | None,
    kept: Sequence[str],
) -> tuple[list[Pair], list[Target], tuple[str, ...]]:
    """What meets; what the files do not hold; names in the files that the model does not have."""
    saved = dict(zip(_short(found), found, strict=True))
    pairs: list[Pair] = []
    missing: list[Target] = []
    used: set[str] = set()
    for target in targets:
        present = list(dict.fromkeys(saved[n] for n in _short(target.names) if n in saved))
        used.update(present)
        if present:
            first, *others = present
            further = {name: found[name] for name in others}
            pairs.append(Pair(target, first, found[first], further, _dtype(target, dtype, kept)))
        else:
            missing.append(target)
    return pairs, missing, tuple(name for name in found if name not in used)


def _short(names: Iterable[str]) -> list[str]:
    """Names without wrappers; as they are where two would become one."""
    every = list(names)
    short = [canonical(name) for name in every]
    return short if len(set(short)) == len(every) else every


def _refuse_gaps(
    where: Path, missing: list[Target], unexpected: tuple[str, ...], *, strict: bool, allow_missing: bool
) -> None:
    hollow = [t for t in missing if t.weight or t.tensor.device.type == "meta"]
    if not ((hollow and not allow_missing) or (strict and (missing or unexpected))):
        return
    lines = [_line("missing", (t.names[0] for t in (missing if strict else hollow)))]
    lines += [_line("not in the model", unexpected)] if unexpected else []
    raise WeightsError(
        f"{where} does not fit the model: " + "; ".join(line for line in lines if line),
        why="what is missing would stay random or on the meta device",
        fix="check that the file is this model's; to leave such weights as they are: allow_missing=True",
    )


def _refuse_hollow(targets: list[Target], *, allow_missing: bool) -> None:
    """Refuses what no file ever holds and nobody has made."""
    hollow = [t.names[0] for t in targets if not t.saved and t.tensor.device.type == "meta"]
    if not hollow:
        return
    line = _line("on the meta device, and files never hold them", hollow)
    if allow_missing:
        logger.warning("%s", line)
        return
    raise WeightsError(
        line,
        why="they are buffers with persistent=False: the model would compute with uninitialised memory",
        fix="make the model in 'with init_empty_weights():', which leaves buffers real, or give them values, "
        f"as in model.{hollow[0]} = ...",
    )


def _refuse_misfits(where: Path, pairs: list[Pair], parts: bool) -> None:
    wrong: list[str] = []
    for pair in pairs:
        here: Any = pair.target.tensor
        there = pair.saved
        local = here.to_local().shape if parts and is_distributed(here) else here.shape
        if local != there.shape:
            wrong.append(f"{pair.name} has the shape {tuple(there.shape)}, in the model {tuple(local)}")
        elif here.dtype.is_floating_point != there.dtype.is_floating_point:
            wrong.append(f"{pair.name} is of {there.dtype}, in the model of {here.dtype}")
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise WeightsError(f"{where} does not fit the model", why="; ".join(wrong[:_SHOWN]) + more)


def _line(what: str, names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return f"{what}: {', '.join(every[:_SHOWN])}{more}" if every else ""


def _dtype(target: Target, wanted: torch.dtype | None, kept: Iterable[str]) -> torch.dtype:
    """What the tensor becomes: numbers that are no floating point numbers stay what they are."""
    own = target.tensor.dtype
    if not own.is_floating_point:
        return own
    if any(f".{module}." in f".{name}." for name in target.names for module in kept):
        return torch.float32
    return wanted or own


@torch.no_grad()
def _put(target: Target, value: torch.Tensor) -> None:
    """Makes a tensor the model's: in the same parameter where that has memory, else in a new one."""
    here = target.tensor
    if value is here:
        return
    plain = type(value) in (torch.Tensor, nn.Parameter) and here.device.type != "meta"
    if target.weight and plain and torch._has_compatible_shallow_copy_type(here, value):  # pyright: ignore
        here.data = value
        vars(here).update(vars(value))
        return
    new: Any = value
    if isinstance(here, nn.Parameter) and not isinstance(value, nn.Parameter):
        new = nn.Parameter(value, requires_grad=here.requires_grad)
        new.__dict__.update(here.__dict__)
    for module, name in target.holders:
        table = module._parameters if isinstance(here, nn.Parameter) else module._buffers
        table[name] = new


def _compare(pair: Pair) -> None:
    """Says when a file has two different tensors for what is one in the model."""
    first = pair.saved
    for other, saved in pair.others.items():
        if saved is first or saved.places == first.places != ():
            continue
        if not torch.equal(first.read(), saved.read()):
            logger.warning(
                "%s and %s differ in the file and are tied in the model: %s counts",
                pair.name,
                other,
                pair.name,
            )
