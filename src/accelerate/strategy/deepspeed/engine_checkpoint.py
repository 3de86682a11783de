"""DeepSpeed's own checkpoint as a part of ours: a folder that it writes and reads, within the commit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accelerate.core.errors import CheckpointError, SettingError
from accelerate.strategy.base import tied_names
from accelerate.strategy.deepspeed import full_state
from accelerate.strategy.deepspeed.engine_handle import EngineHandle, replicate_buffers
from accelerate.strategy.deepspeed.zero_checkpoint import (
    MARK_FILE,
    ZeroCheckpoint,
    find_unsupported_file,
    is_universal,
    rank_of_file,
    read_mark,
)
from accelerate.strategy.protocol.replicated_buffers import settle_buffers
from accelerate.world.world import World

_SAVES = ("client_state", "exclude_frozen_parameters")
_LOADS = (
    *("load_module_strict", "load_optimizer_states", "load_lr_scheduler_states", "load_module_only"),
    "custom_load_fn",
)
_FOLDER_NAME = re.compile(r"pytorch_model(?:_([1-9]\d*))?")


def folder_name(index: int) -> str:
    """Return the folder name of the model of that number, as the public format has it."""
    return "pytorch_model" if index == 0 else f"pytorch_model_{index}"


class DeepSpeedEngineCheckpointer:
    """Saves and loads the checkpoint of one engine.

    Args:
        handle: the engine.
        index: the number of its model.
        world: the world.
        options: more arguments of DeepSpeed's ``save_checkpoint`` or ``load_checkpoint``; for a load also
            ``strict``, for which DeepSpeed says ``load_module_strict``.

    Attributes:
        objects: what DeepSpeed saves by itself: the prepared model, its optimizer, its own schedule.
    """

    def __init__(self, handle: EngineHandle, index: int, world: World, options: dict[str, Any]) -> None:
        self.handle, self.world, self.options = handle, world, options
        self.name = folder_name(index)
        self.objects = (handle.engine, handle.optimizer, handle.scheduler)

    def present(self, folder: Path) -> bool:
        """Return whether the checkpoint in ``folder`` was written by DeepSpeed."""
        return (folder / self.name).is_dir()

    def save(self, folder: Path, /) -> Iterable[str]:
        """Let DeepSpeed write the checkpoint, and return the files of this rank; collective."""
        _check_options(self.options, _SAVES, "save_state")
        settle_buffers(self.handle.module)
        self.handle.engine.save_checkpoint(str(folder), tag=self.name, **self.options)
        tag_folder = folder / self.name
        if self.world.rank == 0:
            ties = tied_names(self.handle.module)
            facts = {**self._layout, "optimizer": _describe_optimizer(self.handle), "tied": ties}
            facts["is_stepped_by_program"] = self.handle.omitted_steps.is_over
            (tag_folder / MARK_FILE).write_text(json.dumps(facts), encoding="utf-8")
        return self._own_file_names(folder)

    @property
    def _layout(self) -> dict[str, int]:
        return {"stage": self.handle.stage, "processes": self.world.size}

    def _own_file_names(self, folder: Path) -> list[str]:
        """Return this rank's files: its shards; on rank 0 also the files without a rank."""
        rank = self.world.rank
        written = sorted(path for path in (folder / self.name).rglob("*") if path.is_file())
        names = [str(path.relative_to(folder)) for path in written if rank_of_file(path.name) == rank]
        if rank == 0:
            names += [name for name in ("latest", "zero_to_fp32.py") if (folder / name).is_file()]
        return names

    def compare(self, folder: Path, /) -> str:
        """Return why the saved shapes do not fit the model; empty where only DeepSpeed can read them."""
        options = self._load_options
        if options.get("custom_load_fn") is not None or find_unsupported_file(folder / self.name):
            return ""
        strict = bool(options.get("load_module_strict", True))
        own = {name: value.shape for name, value in full_state.shape_template(self.handle.module).items()}
        checkpoint = self._open_checkpoint(folder / self.name)
        saved = {name: shape for name, (_, shape) in checkpoint.shapes.items()}
        wrong = [
            f"{name} was saved with the shape {tuple(saved[name])}, and has {tuple(own[name])}"
            for name in saved.keys() & own.keys()
            if saved[name] != own[name]
        ]
        wrong += [f"{name} was not saved" for name in own.keys() - saved.keys() if strict]
        wrong += [f"{name} is not in the model" for name in saved.keys() - own.keys() if strict]
        return "; ".join(sorted(wrong)[:6]) or self._compare_optimizer(read_mark(folder / self.name))

    @property
    def _load_options(self) -> dict[str, Any]:
        """The options of a load, under DeepSpeed's names."""
        options = dict(self.options)
        if not options.pop("strict", True):
            options.setdefault("load_module_strict", False)
        return options

    @property
    def _loads_weights_only(self) -> bool:
        options = self.options
        return bool(options.get("load_module_only")) or not options.get("load_optimizer_states", True)

    def _open_checkpoint(self, tag_folder: Path) -> ZeroCheckpoint:
        needs_optimizer = not (self._loads_weights_only or self._loads_universal(tag_folder))
        ties = tied_names(self.handle.module)
        return ZeroCheckpoint(tag_folder, tied_names=ties, needs_optimizer=needs_optimizer)

    def _loads_universal(self, tag_folder: Path) -> bool:
        """Return whether DeepSpeed is to read a universal checkpoint.

        Raises:
            CheckpointError: it cannot, in stage 0.
        """
        if not (is_universal(tag_folder) and self.handle.engine.load_universal_checkpoint()):
            return False
        if not self.handle.stage:
            raise CheckpointError(
                f"{tag_folder} is a universal checkpoint, and the ZeRO stage is 0",
                why="DeepSpeed loads one into the float32 vectors of a stage above 0, and here nothing",
                fix="use stage 1, 2 or 3",
            )
        return True

    def _compare_optimizer(self, facts: dict[str, Any]) -> str:
        """Return why the saved optimizer state does not fit; empty where that was not recorded."""
        saved, own = facts.get("optimizer"), _describe_optimizer(self.handle)
        if saved is None or own is None or self._loads_weights_only:
            return ""
        lacking = sorted(set(own["options"]) - set(saved["options"]))
        surplus = sorted(set(saved["options"]) - set(own["options"]))
        if lacking and surplus:
            return (
                f"it has the state of {saved['class']} ({', '.join(surplus[:5])}), and the optimizer is "
                f"{own['class']} ({', '.join(lacking[:5])})"
            )
        same_layout = self._layout.items() <= facts.items()
        if same_layout and saved["groups"] != own["groups"]:
            return f"it has groups of {saved['groups']} parameters, and the optimizer has {own['groups']}"
        return ""

    def load(self, folder: Path, /) -> None:
        """Load a DeepSpeed checkpoint; collective.

        With the same world size and stage DeepSpeed reads it, and so a universal one, if its configuration
        says ``load_universal``. Otherwise each rank reads its shards out of all files.

        Raises:
            CheckpointError: there is nothing, or only DeepSpeed can read it.
        """
        _check_options(self._load_options, _LOADS, "load_state")
        tag_folder = folder / self.name
        facts = read_mark(tag_folder)
        if self._loads_universal(tag_folder):
            self._load_universal(folder)
        elif self._is_of_this_layout(tag_folder, facts):
            self._load_by_deepspeed(folder)
        else:
            self._load_resharded(self._open_checkpoint(tag_folder))
        # In stage 3 each rank has saved its own.
        replicate_buffers(self.handle.module)
        self.handle.clear_gradients()
        self.handle.set_clipping(self.handle.clip_norm)  # DeepSpeed has taken that of the saved run
        self.handle.omitted_steps.is_over |= bool(facts.get("is_stepped_by_program"))

    def _is_of_this_layout(self, tag_folder: Path, facts: Mapping[str, Any]) -> bool:
        """Return whether DeepSpeed reads the files: they fit this stage and world size, or it alone can."""
        if find_unsupported_file(tag_folder):
            return not facts or self._layout.items() <= facts.items()
        if self.handle.engine.load_universal_checkpoint():  # it would look for the folder ``zero``
            return False
        if not facts:
            checkpoint = self._open_checkpoint(tag_folder)
            facts = {"stage": checkpoint.stage, "processes": checkpoint.processes}
        return self._layout.items() <= facts.items()

    def _load_universal(self, folder: Path) -> None:
        """Let DeepSpeed read a universal checkpoint, and load what it leaves as it is."""
        self._load_by_deepspeed(folder)
        if find_unsupported_file(folder / self.name):
            return
        checkpoint = self._open_checkpoint(folder / self.name)
        full_state.load_model(self.handle, checkpoint.untrained_weights, strict=False)
        if self.handle.stage == 3 and not self._loads_weights_only:
            # It gives all groups the options of the first.
            for group, options in zip(
                self.handle.optimizer.param_groups, checkpoint.universal_options, strict=False
            ):
                group.update(options)

    def _load_by_deepspeed(self, folder: Path) -> None:
        path, _ = self.handle.engine.load_checkpoint(str(folder), tag=self.name, **self._load_options)
        if path is None:
            raise CheckpointError(f"DeepSpeed found nothing to load in {folder / self.name}")

    def _load_resharded(self, checkpoint: ZeroCheckpoint) -> None:
        """Load this rank's shards out of the files of all ranks."""
        handle, options = self.handle, self._load_options
        only = bool(options.get("load_module_only"))
        if options.get("custom_load_fn") is not None:
            raise CheckpointError(
                f"load_state was given custom_load_fn, and {checkpoint.folder} was written by another "
                "number of processes, or in another stage",
                why="DeepSpeed calls it for files that were written as they are read",
            )
        # A form of the optimizer's state that cannot be read is refused before weights are changed.
        state: dict[str, Any] | None = None
        if checkpoint.has_optimizer_state and not self._loads_weights_only:
            names: dict[int, list[str]] = {}
            for name, parameter in handle.module.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), []).append(name)
            groups = [[names.get(id(p), []) for p in group] for group in handle.groups]
            state = checkpoint.optimizer_state(groups, [{} for _ in groups])
        # Each joined weight is a copy: a few at a time. ``compare`` has seen that names and shapes fit.
        weights, shapes = checkpoint.weights, checkpoint.shapes
        for chunk in full_state.split_by_numel(weights, lambda name: shapes[name][1].numel()):
            full_state.load_model(handle, {name: weights[name] for name in chunk}, strict=False)
        if state is not None:
            full_state.load_optimizer(handle, state)
            if (scaler := getattr(handle.engine_optimizer, "loss_scaler", None)) is not None:
                own = vars(scaler)
                own.update({name: value for name, value in checkpoint.scaler.items() if name in own})
        schedule = checkpoint.rank0_state.get("lr_scheduler")
        loads_schedule = options.get("load_lr_scheduler_states", True) and not only
        if handle.scheduler is not None and schedule is not None and loads_schedule:
            handle.scheduler.load_state_dict(schedule)
        for name in ("global_steps", "global_samples", "skipped_steps") if not only else ():
            setattr(handle.engine, name, checkpoint.rank0_state.get(name, getattr(handle.engine, name)))


def _describe_optimizer(handle: EngineHandle) -> dict[str, Any] | None:
    """Return the class of the optimizer, its options, and the numbers of parameters of its groups."""
    if handle.optimizer is None:
        return None
    options = sorted({name for group in handle.optimizer.param_groups for name in group} - {"params"})
    groups = [len(group) for group in handle.groups]
    return {"class": type(handle.optimizer).__name__, "options": options, "groups": groups}


def find_engine_checkpoints(folder: Path) -> list[ZeroCheckpoint]:
    """Return the DeepSpeed checkpoints in a checkpoint, or the one in DeepSpeed's own folder."""
    if _is_engine_folder(folder):
        return [ZeroCheckpoint(folder)]
    # A model that does not train has none: its number is left out.
    matches = (_FOLDER_NAME.fullmatch(path.name) for path in folder.iterdir())
    numbers = sorted(int(match[1] or 0) for match in matches if match is not None)
    paths = [(folder / folder_name(number), number) for number in numbers]
    return [ZeroCheckpoint(path, number) for path, number in paths if _is_engine_folder(path)]


def _is_engine_folder(folder: Path) -> bool:
    return folder.is_dir() and any(path.name.endswith("_model_states.pt") for path in folder.iterdir())


def _check_options(options: dict[str, Any], names: Iterable[str], where: str) -> None:
    wrong = sorted(set(options) - set(names))
    if wrong:
        raise SettingError(
            f"{where} was given {', '.join(wrong)}, which DeepSpeed does not know",
            why=f"it knows {', '.join(names)}",
        )
