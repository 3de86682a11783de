"""``load_checkpoint_in_model``: weights from files into a model, a tensor at a time.

Names and shapes of all files are compared with the model before the first tensor is read. A tensor of the
right dtype goes from the file into memory once; there is never a second copy of the model.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from accelerate.checkpoint.handover import as_dtype
from accelerate.checkpoint.sharded import LazyTensor
from accelerate.checkpoint.tensors import canonical
from accelerate.checkpoint.weights import weights_of
from accelerate.core.errors import CheckpointError, NotBuiltError, SettingError

logger = logging.getLogger(__name__)

Device = int | str | torch.device
_SHOWN = 12


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
    """

    names: list[str]
    holders: list[tuple[nn.Module, str]]
    tensor: torch.Tensor

    @property
    def weight(self) -> bool:
        """A parameter; otherwise a buffer, which has the value it was made with."""
        return isinstance(self.tensor, nn.Parameter)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: dict[str, Device] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    allow_missing: bool = False,
) -> Keys:
    """Loads weights into a model; what has none yet (on the meta device) gets them on its device.

    Args:
        model: the model.
        checkpoint: a file of weights, the index of its shards, or a folder that holds them: safetensors,
            torch files, a checkpoint of ``save_state``, a sharded model.
        device_map: module name -> device, the longest name that fits counts; ``{"": 0}`` puts all on one.
            None leaves everything where it is, and puts what is on the meta device on the CPU.
        offload_folder: for modules on ``"disk"``, which is not built yet.
        dtype: what floating point weights become; None keeps the model's.
        offload_state_dict: has nothing to do: one tensor is in memory besides the model.
        offload_buffers: see ``offload_folder``.
        keep_in_fp32_modules: names of modules, at any depth, whose floating point weights become float32.
        offload_8bit_bnb: not built yet.
        strict: names that the model does not have are an error, not a warning; so are missing buffers.
        full_state_dict: files hold whole tensors; False is not built yet.
        broadcast_from_rank0: not built yet.
        allow_missing: weights that no file holds stay as they are, with a warning that lists them. Otherwise
            they are an error: they would be random, or stay on the meta device.

    Returns:
        Names that did not meet.

    Raises:
        WeightsError: names are missing, or shapes or kinds differ; the model is unchanged.
        CheckpointError: a file is missing, damaged, would run code, or leads out of its folder.
        NotBuiltError: an option that is not built yet.
    """
    _refuse_unbuilt(device_map, offload_8bit_bnb, full_state_dict, broadcast_from_rank0)
    path = Path(checkpoint).expanduser()
    targets = _targets(model)
    found = weights_of(path).every()
    pairs, keys = _matched(path, targets, found, strict=strict, allow_missing=allow_missing)
    devices = _devices(pairs, device_map)
    wanted = as_dtype(dtype)
    for target, name, others in pairs:
        own = target.tensor.dtype
        if own.is_floating_point:
            own = torch.float32 if _kept(target, keep_in_fp32_modules or ()) else wanted or own
        _fill(target, found[name], own, devices[id(target)])
        _compare(target, name, {other: found[other] for other in others}, found[name])
    _tell_unfilled(model)
    return keys


def _refuse_unbuilt(
    device_map: Mapping[str, Device] | None, bnb: bool, full_state_dict: bool, broadcast_from_rank0: bool
) -> None:
    asked = {
        "modules on 'disk'": "disk" in (device_map or {}).values(),
        "offload_8bit_bnb": bnb,
        "full_state_dict=False": not full_state_dict,
        "broadcast_from_rank0": broadcast_from_rank0,
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise NotBuiltError(
                f"load_checkpoint_in_model with {what} is not built yet",
                why="models larger than memory: device maps, hooks, and weights moved under the forward pass",
            )


def _targets(model: nn.Module) -> list[Target]:
    """The parameters and persistent buffers of a model, tied ones once."""
    found: dict[int, Target] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        left_out = module._non_persistent_buffers_set
        held = {**module._parameters, **{n: b for n, b in module._buffers.items() if n not in left_out}}
        for name, tensor in held.items():
            if tensor is not None:
                target = found.setdefault(id(tensor), Target([], [], tensor))
                target.names.append(f"{prefix}.{name}" if prefix else name)
                if (module, name) not in target.holders:
                    target.holders.append((module, name))
    return list(found.values())


Pair = tuple[Target, str, list[str]]


def _matched(
    path: Path, targets: list[Target], found: Mapping[str, LazyTensor], *, strict: bool, allow_missing: bool
) -> tuple[list[Pair], Keys]:
    """(target, its name in the files, further names of it there) for all that meet; refuses what must."""
    saved = dict(zip(_short(found), found, strict=True))
    pairs: list[Pair] = []
    missing: list[Target] = []
    used: set[str] = set()
    for target in targets:
        present = list(dict.fromkeys(saved[n] for n in _short(target.names) if n in saved))
        used.update(present)
        if present:
            pairs.append((target, present[0], present[1:]))
        else:
            missing.append(target)
    unexpected = tuple(name for name in found if name not in used)
    _refuse_misfits(path, pairs, found)
    hollow = [t for t in missing if t.weight or t.tensor.device.type == "meta"]
    if (hollow and not allow_missing) or (strict and (missing or unexpected)):
        lines = [_line("missing", (t.names[0] for t in (missing if strict else hollow)))]
        lines += [_line("not in the model", unexpected)] if unexpected else []
        raise WeightsError(
            f"{path} does not fit the model: " + "; ".join(line for line in lines if line),
            why="what is missing would stay random or on the meta device",
            fix="check that the file is this model's; to leave such weights as they are: allow_missing=True",
        )
    for what, names in (("missing, left as they are", [t.names[0] for t in missing]), ("unused", unexpected)):
        if names:
            logger.warning("%s: %s", path, _line(what, names))
    return pairs, Keys(tuple(t.names[0] for t in missing), unexpected)


def _short(names: Iterable[str]) -> list[str]:
    """Names without wrappers; as they are where two would become one."""
    every = list(names)
    short = [canonical(name) for name in every]
    return short if len(set(short)) == len(every) else every


def _refuse_misfits(path: Path, pairs: list[Pair], found: Mapping[str, LazyTensor]) -> None:
    wrong: list[str] = []
    for target, name, _ in pairs:
        here, there = target.tensor, found[name]
        if here.shape != there.shape:
            wrong.append(f"{name} has the shape {tuple(there.shape)}, in the model {tuple(here.shape)}")
        elif here.dtype.is_floating_point != there.dtype.is_floating_point:
            wrong.append(f"{name} is of {there.dtype}, in the model of {here.dtype}")
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise WeightsError(f"{path} does not fit the model", why="; ".join(wrong[:_SHOWN]) + more)


def _line(what: str, names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return f"{what}: {', '.join(every[:_SHOWN])}{more}" if every else ""


def _devices(pairs: list[Pair], device_map: Mapping[str, Device] | None) -> dict[int, torch.device]:
    """The device of each target, by its id."""
    found: dict[int, torch.device] = {}
    for target, _, _ in pairs:
        here = target.tensor.device
        found[id(target)] = torch.device("cpu") if here.type == "meta" else here
        if device_map is None:
            continue
        name = target.names[0]
        fitting = [m for m in device_map if not m or name == m or name.startswith(f"{m}.")]
        if not fitting:
            raise SettingError(
                f"device_map does not say where {name} goes", fix="add the module, or '' for all others"
            )
        found[id(target)] = torch.device(device_map[max(fitting, key=len)])
    return found


def _kept(target: Target, modules: Iterable[str]) -> bool:
    """Whether a module of one of these names holds the tensor."""
    return any(f".{module}." in f".{name}." for name in target.names for module in modules)


@torch.no_grad()
def _fill(target: Target, saved: LazyTensor, dtype: torch.dtype, device: torch.device) -> None:
    """Reads the tensor into the model: in place where there is memory of that kind, else into new memory."""
    here = target.tensor
    value = saved.read()
    if here.device == device and here.dtype == dtype:
        here.copy_(value)
        return
    value = value.to(device=device, dtype=dtype)
    if here.device.type != "meta":
        here.data = value
        return
    new: Any = value
    if isinstance(here, nn.Parameter):
        new = nn.Parameter(value, requires_grad=here.requires_grad)
        new.__dict__.update(here.__dict__)
    for module, name in target.holders:
        table = module._parameters if isinstance(here, nn.Parameter) else module._buffers
        table[name] = new


def _compare(target: Target, name: str, others: Mapping[str, LazyTensor], first: LazyTensor) -> None:
    """Says when a file has two different tensors for what is one in the model."""
    for other, saved in others.items():
        if saved is first or saved.places == first.places != ():
            continue
        if not torch.equal(first.read(), saved.read()):
            logger.warning(
                "%s and %s differ in the file and are tied in the model: %s counts", name, other, name
            )


def _tell_unfilled(model: nn.Module) -> None:
    """Says which buffers no file ever holds and nobody has made."""
    hollow = [name for name, buffer in model.named_buffers() if buffer.device.type == "meta"]
    if hollow:
        logger.warning("%s", _line("still on the meta device, files do not hold them", hollow))
