"""A reader of DeepSpeed's ZeRO checkpoints as full state dicts; it does not need DeepSpeed.

Each rank has written flat float32 vectors: weights and optimizer state. In stages 1 and 2 the concatenated
vectors of all ranks are the concatenated parameters of a group. In stage 3 each rank has an equal piece of
each parameter. Files are memory-mapped: unused values are not read. Classes of DeepSpeed (flags, scalers)
become empty stand-ins, and run no code.

Source: DeepSpeed 0.19, ``deepspeed/utils/zero_to_fp32.py``, which joins the weights of the same files.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch

from accelerate.core.errors import CheckpointError
from accelerate.core.pickle_scan import DAMAGE_ERRORS, refuse_special_file, scan_torch_file
from accelerate.core.tree import LazyMapping

# Beside DeepSpeed's files: stage, world size, the optimizer's class and groups, and tied parameters.
MARK_FILE = "accelerate_engine.json"
# The processes whose vectors hold a parameter, with where its piece begins and ends: (process, begin, end).
Spans = list[tuple[int, int, int]]


class DeepSpeedUnpickleStub:
    """The stand-in for a pickled object of DeepSpeed: its arguments and attributes."""

    def __init__(self, *args: Any) -> None:
        self.args = args


class ZeroCheckpoint:
    """The ZeRO checkpoint of one engine's model and optimizer.

    Args:
        folder: DeepSpeed's folder.
        index: the number of its model in the checkpoint.
        tied_names: ties of the model that will load it, for folders that do not tell them.
        needs_optimizer: without the optimizer's files there is no float32 weight and no moment; False reads
            the weights as the model computes with them, which are in the model's file below stage 3.

    Raises:
        CheckpointError: files are missing, or have an unknown form.

    Attributes:
        index: the same.
        processes: the world size of the run that wrote it.
        stage: the ZeRO stage.
        rank0_state: what rank 0 has written besides the vectors.
        tied_names: names of parameters that are tied, by the name under which they are kept.
        weights: by the names of the user's module: trained ones in float32, as the optimizer has them.
        has_optimizer_state: whether there is an optimizer's state.
    """

    def __init__(
        self,
        folder: Path,
        index: int = 0,
        tied_names: Mapping[str, str] | None = None,
        *,
        needs_optimizer: bool = True,
    ) -> None:
        self.folder, self.index = folder, index
        self._model_files, self._optimizer_files = _model_files(folder), _find_optimizer_files(folder)
        self._load = cache(_load_file)
        self.rank0_state: dict[str, Any] = self._load(self._model_files[0])
        try:
            has_vectors = self.rank0_state.get("param_shapes") is not None
            self._lacks_vectors = needs_optimizer and has_vectors and not self._optimizer_files
            self._read_layout(tied_names or {})
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise self._unknown_form_error(f"{type(error).__name__}: {error}") from error

    def _read_layout(self, model_ties: Mapping[str, str]) -> None:
        self.processes = len(self._optimizer_files) or int(self.rank0_state.get("dp_world_size") or 1)
        if self._optimizer_files and self.rank0_state.get("param_shapes") is None:
            raise self._unknown_form_error("it does not say which parameters the vectors hold")
        self.tied_names: Mapping[str, str] = dict(self._read_ties(model_ties))
        self._shapes = dict(self._read_shapes())
        self.has_optimizer_state = bool(self._optimizer_files) or isinstance(
            self.rank0_state.get("optimizer"), Mapping
        )

    def _read_ties(self, model_ties: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Yield tied names, also those of a module that is registered twice, which DeepSpeed leaves out."""
        saved_names = {name for group in self._param_groups for name in group}
        saved_names |= (self.rank0_state.get("frozen_param_shapes") or {}).keys()
        ties = {**model_ties, **read_mark(self.folder).get("tied", {})}
        yield from (
            (name, first) for name, first in ties.items() if name not in saved_names and first in saved_names
        )
        yield from (self.rank0_state.get("shared_params") or {}).items()

    def _unknown_form_error(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder} cannot be read by other processes than those that wrote it",
            why=why,
            fix="load it with the same number of processes in the same stage, and save with "
            "accelerator.save_state(folder, sharded=False)",
        )

    def _load_optimizer_state(self, rank: int) -> dict[str, Any]:
        try:
            return self._load(self._optimizer_files[rank])["optimizer_state_dict"]
        except (LookupError, TypeError) as error:
            raise self._unknown_form_error(f"{type(error).__name__}: {error}") from error

    @cached_property
    def _optimizer_states(self) -> list[dict[str, Any]]:
        """The optimizer state of each rank."""
        return [self._load_optimizer_state(rank) for rank in range(len(self._optimizer_files))]

    @cached_property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        if not self._optimizer_files:  # only in stage 3 each rank has written of the model
            return 3 if rank_of_file(self._model_files[-1].name, default=-1) >= 0 else 0
        stage = self._load_optimizer_state(0).get("zero_stage")
        return int(stage.args[0] if isinstance(stage, DeepSpeedUnpickleStub) else stage or 0)

    @cached_property
    def scaler(self) -> dict[str, Any]:
        """The attributes of the loss scaler."""
        if not self._optimizer_files:
            return {}
        return vars(self._load_optimizer_state(0).get("loss_scaler", DeepSpeedUnpickleStub()))

    # --- weights

    @property
    def shapes(self) -> Mapping[str, tuple[torch.dtype, torch.Size]]:
        """The dtype and shape of each weight, in the order of the model's state dict.

        Raises:
            CheckpointError: files of the optimizer are missing.
        """
        if self._lacks_vectors:
            raise _no_optimizer_error(self.folder)
        return self._shapes

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The weights, each read when it is asked for.

        Not kept, since it refers to this object: the files stay mapped as long as anything does.
        """
        readers = {name: partial(self._read_weight, self.tied_names.get(name, name)) for name in self.shapes}
        return LazyMapping(readers)

    @property
    def untrained_weights(self) -> dict[str, torch.Tensor]:
        """The buffers and frozen parameters."""
        trained = {name for group in self._param_groups for name in group}
        names = [name for name in self.shapes if self.tied_names.get(name, name) not in trained]
        return {name: self._read_weight(self.tied_names.get(name, name)) for name in names}

    @property
    def universal_options(self) -> list[dict[str, Any]]:
        """The options of each group of the optimizer, in a universal checkpoint."""
        groups = self._load(self.folder / "zero" / "optimizer_state.pt")["param_groups"]
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    @cached_property
    def _param_groups(self) -> list[dict[str, torch.Size]]:
        return [
            {name: torch.Size(shape) for name, shape in group.items()}
            for group in self.rank0_state["param_shapes"] or ()
        ]

    def _read_shapes(self) -> Iterator[tuple[str, tuple[torch.dtype, torch.Size]]]:
        trained = {name: shape for group in self._param_groups for name, shape in group.items()}
        frozen: dict[str, torch.Size] = {}
        if self.stage == 3:  # frozen parameters are partitioned too
            frozen = dict(self.rank0_state.get("frozen_param_shapes") or {})
        for name, value in self._module_state.items():
            saved_name = self.tied_names.get(name, name)
            dtype = torch.float32 if saved_name in trained else value.dtype
            yield name, (dtype, torch.Size(trained.get(saved_name, frozen.get(saved_name, value.shape))))

    @cached_property
    def _module_state(self) -> dict[str, torch.Tensor]:
        return {name: v for name, v in self.rank0_state["module"].items() if isinstance(v, torch.Tensor)}

    def _read_weight(self, name: str) -> torch.Tensor:
        shape = self.shapes[name][1]
        if name in self._spans:
            return self._join_pieces(name, self._fp32_vectors, shape)
        if self.stage == 3 and name in (self.rank0_state.get("frozen_param_shapes") or {}):
            parts = [self._load(path)["frozen_param_fragments"][name] for path in self._model_files]
            return torch.cat([part.view(-1) for part in parts])[: shape.numel()].view(shape)
        value = self._module_state[name]
        if value.shape != shape:  # stage 3 leaves no elements there
            raise _no_optimizer_error(self.folder)
        return value

    # --- what lies where

    @cached_property
    def _fp32_vectors(self) -> list[list[torch.Tensor]]:
        """The float32 vectors of each rank."""
        name = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        return [[flat.view(-1) for flat in state[name]] for state in self._optimizer_states]

    @cached_property
    def _spans(self) -> dict[str, tuple[int | None, Spans]]:
        """The spans of the pieces of each trained parameter, with its group.

        In stage 3 groups are split again, so there an offset counts over all vectors of a rank, and the group
        is None.
        """
        if not self._optimizer_states:
            return {}
        return self._stage3_spans() if self.stage == 3 else self._flat_spans()

    def _stage3_spans(self) -> dict[str, tuple[int | None, Spans]]:
        spans: dict[str, tuple[int | None, Spans]] = {}
        at = 0
        for group in self._param_groups:
            for name, shape in group.items():
                count = math.ceil(shape.numel() / self.processes)
                spans[name] = None, [(process, at, at + count) for process in range(self.processes)]
                at += count
        for vectors in self._fp32_vectors:
            self._check_size(sum(flat.numel() for flat in vectors), at, at)
        return spans

    def _flat_spans(self) -> dict[str, tuple[int | None, Spans]]:
        spans: dict[str, tuple[int | None, Spans]] = {}
        gaps = self._optimizer_states[0].get("param_alignment_paddings") or [
            [0] * len(g) for g in self._param_groups
        ]
        for number, group in enumerate(self._param_groups):
            lengths = [vectors[number].numel() for vectors in self._fp32_vectors]
            at = 0
            for (name, shape), gap in zip(group.items(), gaps[number], strict=True):
                spans[name] = number, list(_split_span(lengths, at, at + shape.numel()))
                at += shape.numel() + gap
            self._check_size(sum(lengths), at, at + 2 * self.processes**2)
        return spans

    def _check_size(self, held: int, least: int, most: int) -> None:
        if not least <= held <= most:
            raise self._unknown_form_error(
                f"its vectors hold {held} elements, and its parameters have {least}"
            )

    def _join_pieces(self, name: str, vectors: list[list[torch.Tensor]], shape: torch.Size) -> torch.Tensor:
        group, spans = self._spans[name]
        pieces: list[torch.Tensor] = []
        for process, begin, end in spans:
            flats = vectors[process] if group is None else [vectors[process][group]]
            lengths = [flat.numel() for flat in flats]
            pieces += [flats[i][start:stop] for i, start, stop in _split_span(lengths, begin, end)]
        pieces = pieces or [vectors[0][0][:0]]  # a parameter without elements
        return torch.cat(pieces)[: shape.numel()].view(shape)

    # --- the optimizer

    @cached_property
    def _base_states(self) -> list[dict[str, Any]]:
        """The state dicts of each rank's base optimizer, over its vectors.

        Raises:
            CheckpointError: the state is not kept by vectors.
        """
        name = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        states = [state.get(name) for state in self._optimizer_states]
        if any(not isinstance(each, Mapping) or "state" not in each for each in states):
            raise self._unknown_form_error("the optimizer's state is not kept by vectors")
        return states  # type: ignore[return-value]

    def optimizer_state(
        self, names: Sequence[Sequence[Collection[str]]], options: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the optimizer's state dict as in one process; the state of a parameter is read lazily.

        Args:
            names: of an optimizer of the same model, the names of each parameter of each group.
            options: the options of its groups, for groups without saved state.

        Raises:
            CheckpointError: the form is unknown, or the parameters are others.
        """
        if not self._optimizer_states:
            # Every rank has all of it.
            state = self.rank0_state["optimizer"]
            if not isinstance(state, Mapping) or "param_groups" not in state:
                raise self._unknown_form_error(
                    "in stage 0 and 16 bits the optimizer's state has a form of its own"
                )
            return dict(state)
        base_states = self._base_states
        self._check_elementwise()
        number = 0
        groups: list[dict[str, Any]] = []
        readers: dict[int, Callable[[], dict[str, Any]]] = {}
        saved = [group for group in base_states[0]["param_groups"] if group["params"]]
        for members, group_options in zip(names, options, strict=True):
            first = number
            chosen: Mapping[str, Any] = {}
            for aliases in members:
                name = next((each for each in aliases if each in self._spans), None)
                if name is not None:
                    # Plain SGD has options, such as the learning rate of a schedule, and no state.
                    vector = self._vector_index(name)
                    if vector in base_states[0]["state"]:
                        readers[number] = partial(self._param_state, name)
                    chosen = chosen or next((group for group in saved if vector in group["params"]), {})
                number += 1
            saved_options = {key: value for key, value in chosen.items() if key != "params"}
            groups.append({**group_options, **saved_options, "params": list(range(first, number))})
        self._check_param_names({name for group in names for aliases in group for name in aliases})
        return {"state": LazyMapping(readers), "param_groups": groups}

    def _check_param_names(self, names: Collection[str]) -> None:
        unknown = [name for name in self._spans if name not in names]
        if unknown:
            raise CheckpointError(
                f"the state of {len(unknown)} parameter(s) in {self.folder} does not fit the optimizer",
                why=f"it has no parameter {unknown[0]}",
                fix="prepare the optimizer of the same parameters as when it was saved",
            )

    def _check_elementwise(self) -> None:
        for vector, states in self._base_states[0]["state"].items():
            for key, value in states.items():
                is_whole = isinstance(value, torch.Tensor) and value.numel() > 1
                if is_whole and not self._is_elementwise(value, vector):
                    raise CheckpointError(
                        f"{self.folder} cannot be read by other processes than those that wrote it",
                        why=f"the optimizer keeps {key} for each rank's elements as a whole, or by blocks "
                        "of them",
                        fix="load it with the same number of processes in the same stage",
                    )

    def _is_elementwise(self, value: Any, vector: int) -> bool:
        """Return whether a state has a value for each element of a vector, which is saved without padding."""
        numel = self._fp32_vectors[0][vector].numel()
        padded_numel = numel + 2 * self.processes**2
        return isinstance(value, torch.Tensor) and value.dim() > 0 and numel <= value.numel() <= padded_numel

    def _vector_index(self, name: str) -> int:
        """Return the number of the vector with a parameter."""
        group, spans = self._spans[name]
        if group is None:
            lengths = [flat.numel() for flat in self._fp32_vectors[0]]
            group = next(index for index, _, _ in _split_span(lengths, spans[0][1], spans[0][2]))
        return group

    def _param_state(self, name: str) -> dict[str, Any]:
        """Return the optimizer state of one parameter."""
        shape = self.shapes[name][1]
        vector = self._vector_index(name)
        first: Mapping[str, Any] = self._base_states[0]["state"][vector]
        param_state: dict[str, Any] = {}
        for key, value in first.items():
            if self._is_elementwise(value, vector):
                vectors = [
                    [base_state["state"].get(i, {}).get(key, flat).view(-1) for i, flat in enumerate(flats)]
                    for base_state, flats in zip(self._base_states, self._fp32_vectors, strict=True)
                ]  # fmt: skip
                param_state[key] = self._join_pieces(name, vectors, shape)
            else:
                param_state[key] = value.clone() if isinstance(value, torch.Tensor) else value
        return param_state


def read_mark(folder: Path) -> dict[str, Any]:
    """Return what was recorded of a saved engine; empty for a folder of DeepSpeed alone."""
    mark = folder / MARK_FILE
    return json.loads(mark.read_text(encoding="utf-8")) if mark.is_file() else {}


def _split_span(lengths: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the pieces of ``[begin, end)`` of concatenated vectors: (vector, begin, end) in it."""
    at = 0
    for index, length in enumerate(lengths):
        start, stop = max(begin, at), min(end, at + length)
        if start < stop:
            yield index, start - at, stop - at
        at += length


def _load_file(path: Path) -> dict[str, Any]:
    """Load a file of DeepSpeed, memory-mapped.

    Raises:
        CheckpointError: it cannot be read, or could run code.
    """
    serial = torch.serialization
    refuse_special_file(path)
    try:
        scan_torch_file(path)
        names = serial.get_unsafe_globals_in_checkpoint(str(path))
        refused = [name for name in names if not name.startswith("deepspeed.")]
        if refused:
            raise pickle.UnpicklingError(f"it names {', '.join(refused)}, and reading it could run code")
        # One for each: the reader asks for a class that is its own.
        stand_ins = [(type("DeepSpeedUnpickleStub", (DeepSpeedUnpickleStub,), {}), name) for name in names]
        with serial.safe_globals(stand_ins):  # type: ignore[arg-type]
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, *DAMAGE_ERRORS) as error:
        raise CheckpointError(f"{path} cannot be read", why=str(error).partition("\n")[0]) from error


def find_unsupported_file(folder: Path) -> str:
    """Return a file of tensor parallel layers or experts, which only DeepSpeed reads; else empty."""
    file_names = sorted(path.name for path in folder.iterdir())
    return next((name for name in file_names if "expert" in name or re.search(r"mp_rank_(?!00_)", name)), "")


def _model_files(folder: Path) -> list[Path]:
    """Return the model files by rank; one, unless parameters are partitioned."""
    names = sorted((path.name for path in folder.iterdir()), key=rank_of_file)
    files = [folder / name for name in names if name.endswith("_model_states.pt")]
    other = find_unsupported_file(folder)
    if other or not files:
        raise CheckpointError(
            f"{folder} cannot be read by other processes than those that wrote it",
            why=f"it has {other}: of tensor parallel layers, or of experts" if other else "it has no model",
            fix="load it with the same number of processes in the same stage",
        )
    return files


def _find_optimizer_files(folder: Path) -> list[Path]:
    """Return the optimizer files by rank."""
    files = sorted((path for path in folder.iterdir() if path.name.endswith("_optim_states.pt")),
                   key=lambda path: rank_of_file(path.name))  # fmt: skip
    if [rank_of_file(path.name) for path in files] != list(range(len(files))):
        raise CheckpointError(
            f"files of the optimizer are missing in {folder}",
            why=f"it has {', '.join(path.name for path in files)}",
        )
    return files


def _no_optimizer_error(folder: Path) -> CheckpointError:
    if is_universal(folder):
        return CheckpointError(
            f"{folder} is a universal checkpoint of DeepSpeed",
            why="its float32 weights and optimizer state, in the folder zero, are read by DeepSpeed alone",
            fix='resume under DeepSpeed in a stage above 0, with "checkpoint": {"load_universal": true} in '
            "its configuration; or load the checkpoint that it was converted from",
        )
    return CheckpointError(
        f"files of the optimizer are missing in {folder}",
        why="it was written in a stage above 0, in which they have the float32 weights too",
        fix="copy the files *_optim_states.pt of all ranks, or, under DeepSpeed, load the weights alone: "
        "accelerator.load_state(folder, load_module_only=True)",
    )


def is_universal(folder: Path) -> bool:
    """Return whether DeepSpeed's ``ds_to_universal`` has written into a folder."""
    return (folder / "zero").is_dir()


def rank_of_file(name: str, default: int = 0) -> int:
    """Return the rank that wrote a file, such as 3 of ``zero_pp_rank_3_mp_rank_00_model_states.pt``."""
    match = re.search(r"zero_pp_rank_(\d+)_", name)
    return int(match[1]) if match else default
