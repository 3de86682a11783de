"""An engine's own checkpoint as one process would have written it; the engine is not needed to read it.

Each process has written flat float32 vectors, weights and what the optimizer keeps beside them. In stages 1
and 2 the vectors of all processes, one after another, are the parameters of a group, one after another. In
stage 3 each process has an equal piece of each parameter. Files are mapped: what is not asked for is not
read. Classes of the engine, of its flags and scalers, become empty stand-ins, and run nothing.

Source: DeepSpeed 0.19, ``deepspeed/utils/zero_to_fp32.py``, which joins the weights of the same files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from accelerate.core.errors import CheckpointError

K = TypeVar("K")
V = TypeVar("V")
# The processes whose vectors hold a parameter, with where its piece begins and ends: (process, begin, end).
Spans = list[tuple[int, int, int]]


class Late(Mapping[K, V], Generic[K, V]):
    """Values that are read whenever they are asked for."""

    def __init__(self, readers: Mapping[K, Callable[[], V]]) -> None:
        self._readers = readers

    def __getitem__(self, key: K) -> V:
        return self._readers[key]()

    def __iter__(self) -> Iterator[K]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, key: object) -> bool:
        return key in self._readers


class StandIn:
    """What a file has of a class of the engine: what it was made with, and its attributes."""

    def __init__(self, *args: Any) -> None:
        self.args = args


class ZeroFiles:
    """What one engine has written of its model and optimizer.

    Args:
        folder: the engine's.
        index: the number of its model in the checkpoint.

    Raises:
        CheckpointError: files are missing, or in a form that is not known here.

    Attributes:
        index: the same.
        processes: how many have written.
        stage: what is partitioned.
        whole: what the first process has written beside the vectors.
        shared: names of parameters that are tied, by the name under which they are kept.
        shapes: type and shape of each weight, in the order of the model's state.
        weights: by the names of the user's module: trained ones in float32, as the optimizer has them.
        trained: whether there is an optimizer's state.
    """

    def __init__(self, folder: Path, index: int = 0) -> None:
        self.folder, self.index = folder, index
        models, self._parts = _models(folder), _optimizers(folder)
        self.whole: dict[str, Any] = _read(models[0])
        self.processes = len(self._parts) or int(self.whole.get("dp_world_size") or 1)
        self._models = models
        if self._parts and self.whole.get("param_shapes") is None:
            raise self._unknown("it does not say which parameters the vectors hold")
        self.shared: Mapping[str, str] = dict(self.whole.get("shared_params") or {})
        self.shapes: Mapping[str, tuple[torch.dtype, torch.Size]] = dict(self._shapes())
        readers = {name: partial(self._weight, self.shared.get(name, name)) for name in self.shapes}
        self.weights: Mapping[str, torch.Tensor] = Late(readers)
        self.trained = bool(self._parts) or isinstance(self.whole.get("optimizer"), Mapping)

    def _unknown(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder} cannot be read by other processes than those that wrote it",
            why=why,
            fix="load it with the same number of processes in the same stage, and save with "
            "accelerator.save_state(folder, sharded=False)",
        )

    @cached_property
    def _states(self) -> list[dict[str, Any]]:
        """What each process has written of the optimizer."""
        return [_read(path)["optimizer_state_dict"] for path in self._parts]

    @cached_property
    def stage(self) -> int:
        """0 to 3."""
        if not self._states:
            return 0
        said = self._states[0].get("zero_stage")
        return int(said.args[0] if isinstance(said, StandIn) else said or 0)

    @cached_property
    def scaler(self) -> dict[str, Any]:
        """What is known of the scale of losses."""
        return vars(self._states[0].get("loss_scaler", StandIn())) if self._states else {}

    # --- weights

    @cached_property
    def _groups(self) -> list[dict[str, torch.Size]]:
        return [
            {name: torch.Size(shape) for name, shape in group.items()}
            for group in self.whole["param_shapes"] or ()
        ]

    def _shapes(self) -> Iterator[tuple[str, tuple[torch.dtype, torch.Size]]]:
        trained = {name: shape for group in self._groups for name, shape in group.items()}
        frozen: dict[str, torch.Size] = {}
        if self._apart:
            frozen = dict(self.whole.get("frozen_param_shapes") or {})
        for name, value in self._module.items():
            held = self.shared.get(name, name)
            dtype = torch.float32 if held in trained else value.dtype
            yield name, (dtype, torch.Size(trained.get(held, frozen.get(held, value.shape))))

    @property
    def _apart(self) -> bool:
        """Whether parameters that are not trained are in pieces too."""
        return self.stage == 3

    @cached_property
    def _module(self) -> dict[str, torch.Tensor]:
        return {name: v for name, v in self.whole["module"].items() if isinstance(v, torch.Tensor)}

    def _weight(self, name: str) -> torch.Tensor:
        shape = self.shapes[name][1]
        if name in self._spans:
            return self._joined(name, self._masters, shape)
        if self._apart and name in (self.whole.get("frozen_param_shapes") or {}):
            parts = [_read(path)["frozen_param_fragments"][name] for path in self._models]
            return torch.cat([part.view(-1) for part in parts])[: shape.numel()].view(shape)
        return self._module[name]

    # --- what lies where

    @cached_property
    def _masters(self) -> list[list[torch.Tensor]]:
        """The float32 vectors of each process."""
        name = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        return [[flat.view(-1) for flat in state[name]] for state in self._states]

    @cached_property
    def _spans(self) -> dict[str, tuple[int | None, Spans]]:
        """Where the pieces of each trained parameter lie: the group, and from where to where in it.

        In stage 3 groups are cut anew, so there a place counts over all vectors of a process, and the group
        is None.
        """
        if not self._states:
            return {}
        return self._equal_pieces() if self.stage == 3 else self._one_after_another()

    def _equal_pieces(self) -> dict[str, tuple[int | None, Spans]]:
        found: dict[str, tuple[int | None, Spans]] = {}
        at = 0
        for group in self._groups:
            for name, shape in group.items():
                count = math.ceil(shape.numel() / self.processes)
                found[name] = None, [(process, at, at + count) for process in range(self.processes)]
                at += count
        for vectors in self._masters:
            self._check_size(sum(flat.numel() for flat in vectors), at, at)
        return found

    def _one_after_another(self) -> dict[str, tuple[int | None, Spans]]:
        found: dict[str, tuple[int | None, Spans]] = {}
        gaps = self._states[0].get("param_alignment_paddings") or [[0] * len(g) for g in self._groups]
        for number, group in enumerate(self._groups):
            lengths = [vectors[number].numel() for vectors in self._masters]
            at = 0
            for (name, shape), gap in zip(group.items(), gaps[number], strict=True):
                found[name] = number, list(_cut(lengths, at, at + shape.numel()))
                at += shape.numel() + gap
            self._check_size(sum(lengths), at, at + 2 * self.processes**2)
        return found

    def _check_size(self, held: int, least: int, most: int) -> None:
        if not least <= held <= most:
            raise self._unknown(f"its vectors hold {held} elements, and its parameters have {least}")

    def _joined(self, name: str, vectors: list[list[torch.Tensor]], shape: torch.Size) -> torch.Tensor:
        group, spans = self._spans[name]
        pieces: list[torch.Tensor] = []
        for process, begin, end in spans:
            flats = vectors[process] if group is None else [vectors[process][group]]
            lengths = [flat.numel() for flat in flats]
            pieces += [flats[i][start:stop] for i, start, stop in _cut(lengths, begin, end)]
        return torch.cat(pieces)[: shape.numel()].view(shape)

    # --- the optimizer

    @cached_property
    def _kept(self) -> list[dict[str, Any]]:
        """The state of each process's optimizer, as it goes by its vectors.

        Raises:
            CheckpointError: it is not by vectors.
        """
        name = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        found = [state.get(name) for state in self._states]
        if any(not isinstance(each, Mapping) or "state" not in each for each in found):
            raise self._unknown("the optimizer's state is not kept by vectors")
        return found  # type: ignore[return-value]

    def optimizer_state(
        self, names: Sequence[Sequence[Collection[str]]], options: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """The optimizer's state as it would be in one process. What is kept for a parameter is read late.

        Args:
            names: of an optimizer of the same model, the names of each parameter of each group.
            options: those of its groups, for groups that nothing was saved of.

        Raises:
            CheckpointError: the form is not known, or the parameters are others.
        """
        if not self._states:
            return self._whole_state()
        kept = self._kept
        number = 0
        groups: list[dict[str, Any]] = []
        readers: dict[int, Callable[[], dict[str, Any]]] = {}
        saved = [group for group in kept[0]["param_groups"] if group["params"]]
        for members, own in zip(names, options, strict=True):
            first = number
            chosen: Mapping[str, Any] = {}
            for aliases in members:
                name = next((each for each in aliases if each in self._spans), None)
                if name is not None and self._vector(name) is not None:
                    readers[number] = partial(self._kept_of, name)
                    chosen = chosen or self._group_of(name, saved)
                number += 1
            said = {key: value for key, value in chosen.items() if key != "params"}
            groups.append({**own, **said, "params": list(range(first, number))})
        self._check_known({name for group in names for aliases in group for name in aliases})
        return {"state": Late(readers), "param_groups": groups}

    def _check_known(self, names: Collection[str]) -> None:
        unknown = [name for name in self._spans if name not in names]
        if unknown:
            raise CheckpointError(
                f"the state of {len(unknown)} parameter(s) in {self.folder} does not fit the optimizer",
                why=f"it has no parameter {unknown[0]}",
                fix="prepare the optimizer of the same parameters as when it was saved",
            )

    def _whole_state(self) -> dict[str, Any]:
        """Stage 0: every process has the whole state."""
        state = self.whole["optimizer"]
        if not isinstance(state, Mapping) or "param_groups" not in state:
            raise self._unknown("in stage 0 and 16 bits the optimizer's state has a form of its own")
        return dict(state)

    def _vector(self, name: str) -> int | None:
        """The number of the vector that holds a parameter; None where nothing is kept for it."""
        group, spans = self._spans[name]
        if group is None:
            lengths = [flat.numel() for flat in self._masters[0]]
            group = next(index for index, _, _ in _cut(lengths, spans[0][1], spans[0][2]))
        return group if group in self._kept[0]["state"] else None

    def _group_of(self, name: str, saved: list[dict[str, Any]]) -> Mapping[str, Any]:
        vector = self._vector(name)
        return next((group for group in saved if vector in group["params"]), {})

    def _kept_of(self, name: str) -> dict[str, Any]:
        """What is kept for one parameter."""
        shape = self.shapes[name][1]
        first: Mapping[str, Any] = self._kept[0]["state"][self._vector(name)]
        found: dict[str, Any] = {}
        for key, value in first.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                vectors = [
                    [kept["state"][i][key].view(-1) if i in kept["state"] else flat
                     for i, flat in enumerate(flats)]
                    for kept, flats in zip(self._kept, self._masters, strict=True)
                ]  # fmt: skip
                found[key] = self._joined(name, vectors, shape)
            else:
                found[key] = value.clone() if isinstance(value, torch.Tensor) else value
        return found


def _cut(lengths: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The pieces of ``[begin, end)`` of vectors that lie one after another: (vector, begin, end) in it."""
    at = 0
    for index, length in enumerate(lengths):
        start, stop = max(begin, at), min(end, at + length)
        if start < stop:
            yield index, start - at, stop - at
        at += length


def _read(path: Path) -> dict[str, Any]:
    """A file of the engine, mapped.

    Raises:
        CheckpointError: it cannot be read, or names what could run code.
    """
    serial = torch.serialization
    try:
        classes = serial.get_unsafe_globals_in_checkpoint(str(path))
        # One for each: the reader asks for a class that is its own.
        made = [(type("StandIn", (StandIn,), {}), name) for name in classes if name.startswith("deepspeed.")]
        with serial.safe_globals(made):  # type: ignore[arg-type]
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read", why=str(error).partition("\n")[0]) from error


def strange(folder: Path) -> str:
    """A file that the engine alone reads: of layers that it has cut, or of its experts; or nothing."""
    held = sorted(path.name for path in folder.iterdir())
    return next((name for name in held if "expert" in name or re.search(r"mp_rank_(?!00_)", name)), "")


def _models(folder: Path) -> list[Path]:
    """The files with the model, by process; one, unless parameters are partitioned."""
    names = sorted((path.name for path in folder.iterdir()), key=_number)
    found = [folder / name for name in names if name.endswith("_model_states.pt")]
    other = strange(folder)
    if other or not found:
        raise CheckpointError(
            f"{folder} cannot be read by other processes than those that wrote it",
            why=f"it has {other}: of layers that are cut, or of experts" if other else "it has no model",
            fix="load it with the same number of processes in the same stage",
        )
    return found


def _optimizers(folder: Path) -> list[Path]:
    """The files with the vectors, by process."""
    found = sorted((path for path in folder.iterdir() if path.name.endswith("_optim_states.pt")),
                   key=lambda path: _number(path.name))  # fmt: skip
    if [_number(path.name) for path in found] != list(range(len(found))):
        raise CheckpointError(
            f"files of the optimizer are missing in {folder}",
            why=f"it has {', '.join(path.name for path in found)}",
        )
    return found


def _number(name: str) -> int:
    """The process that has written a file."""
    found = re.search(r"zero_pp_rank_(\d+)_", name)
    return int(found[1]) if found else 0
