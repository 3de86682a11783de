"""An engine's own checkpoint as a part of ours: a folder that it writes and reads, inside of the commit."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accelerate.core.errors import CheckpointError, SettingError
from accelerate.strategy.deepspeed import whole
from accelerate.strategy.deepspeed.engine import Made
from accelerate.strategy.deepspeed.read import ZeroFiles, strange
from accelerate.world.world import World

_SAVES = ("client_state", "exclude_frozen_parameters")
_LOADS = (
    *("load_module_strict", "load_optimizer_states", "load_lr_scheduler_states", "load_module_only"),
    "custom_load_fn",
)
_MARK = "accelerate_engine.json"


def folder_of(index: int) -> str:
    """The folder of the model of that number, as the public format calls it."""
    return "pytorch_model" if index == 0 else f"pytorch_model_{index}"


class EngineFiles:
    """Writes and reads the checkpoint of one engine.

    Args:
        made: the engine.
        index: the number of its model.
        world: the processes.
        options: more arguments of the engine's ``save_checkpoint`` or ``load_checkpoint``.

    Attributes:
        objects: what the engine saves by itself: the prepared model, its optimizer, its own schedule.
    """

    def __init__(self, made: Made, index: int, world: World, options: dict[str, Any]) -> None:
        self.made, self.world, self.options = made, world, options
        self.name = folder_of(index)
        self.objects = (made.engine, made.optimizer, made.scheduler)

    def present(self, folder: Path) -> bool:
        """Whether the checkpoint in ``folder`` has been written by an engine."""
        return (folder / self.name).is_dir()

    def save(self, folder: Path, /) -> Iterable[str]:
        """Lets the engine write; collective. Returns the files of this process."""
        _known(self.options, _SAVES, "save_state")
        self.made.engine.save_checkpoint(str(folder), tag=self.name, **self.options)
        own = folder / self.name
        if self.world.rank == 0:
            facts = {"stage": self.made.stage, "processes": self.world.size}
            (own / _MARK).write_text(json.dumps(facts), encoding="utf-8")
        return self._mine(folder)

    def _mine(self, folder: Path) -> list[str]:
        """Of the files that all have written: parts by their rank, the rest to process 0."""
        found: list[str] = []
        rank = self.world.rank
        for name in sorted(_files(folder / self.name)):
            owner = _rank_in(name)
            if owner == rank or (owner is None and rank == 0):
                found.append(f"{self.name}/{name}")
        if rank == 0:
            found += [name for name in ("latest", "zero_to_fp32.py") if (folder / name).is_file()]
        return found

    def load(self, folder: Path, /) -> None:
        """Reads what an engine has written; collective.

        The same number of processes in the same stage let the engine read. Others read the pieces that they
        need out of all files.

        Raises:
            CheckpointError: there is nothing, or in a form that only the engine knows.
        """
        _known(self.options, _LOADS, "load_state")
        own = folder / self.name
        mark = own / _MARK
        here = {"stage": self.made.stage, "processes": self.world.size}
        facts = json.loads(mark.read_text(encoding="utf-8")) if mark.is_file() else _facts(own, here)
        if facts == here:
            path, _ = self.made.engine.load_checkpoint(str(folder), tag=self.name, **self.options)
            if path is None:
                raise CheckpointError(f"the engine found nothing to load in {own}")
        else:
            self._read(ZeroFiles(own))
        self.made.drop()

    def _read(self, written: ZeroFiles) -> None:
        """Takes this process's pieces out of the files of all others."""
        made, options = self.made, self.options
        only = bool(options.get("load_module_only"))
        if options.get("custom_load_fn") is not None:
            raise CheckpointError(
                f"load_state was given custom_load_fn, and {written.folder} was written by another number of "
                "processes, or in another stage",
                why="the engine calls it for files that were written as they are read",
            )
        whole.load_model(made, written.weights, strict=bool(options.get("load_module_strict", True)))
        if written.trained and not only and options.get("load_optimizer_states", True):
            whole.load_optimizer(made, written.optimizer_state(*self._groups()))
            _scale(made.inner, written.scaler)
        schedule, wanted = written.whole.get("lr_scheduler"), options.get("load_lr_scheduler_states", True)
        if made.scheduler is not None and schedule is not None and wanted and not only:
            made.scheduler.load_state_dict(schedule)
        for name in ("global_steps", "global_samples", "skipped_steps") if not only else ():
            setattr(made.engine, name, written.whole.get(name, getattr(made.engine, name)))

    def _groups(self) -> tuple[list[list[list[str]]], list[dict[str, Any]]]:
        """The names of each parameter of each group of the optimizer, and the groups' options."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.made.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        groups = [[names.get(id(p), []) for p in group] for group in self.made.groups]
        return groups, [{} for _ in groups]


def _facts(folder: Path, here: dict[str, int]) -> dict[str, int]:
    """How a folder was written that does not say it; the engine may know what cannot be read here."""
    if strange(folder):
        return here
    found = ZeroFiles(folder)
    return {"stage": found.stage, "processes": found.processes}


def _scale(inner: Any, saved: dict[str, Any]) -> None:
    """The scale of losses goes on where it was."""
    scaler = getattr(inner, "loss_scaler", None)
    if scaler is not None:
        vars(scaler).update({name: value for name, value in saved.items() if name in vars(scaler)})


def written(folder: Path) -> list[ZeroFiles]:
    """What engines have written into a checkpoint, or into a folder of theirs."""
    if _by_engine(folder):
        return [ZeroFiles(folder)]
    found: list[ZeroFiles] = []
    while _by_engine(folder / folder_of(len(found))):
        found.append(ZeroFiles(folder / folder_of(len(found)), len(found)))
    return found


def _by_engine(folder: Path) -> bool:
    return folder.is_dir() and any(path.name.endswith("_model_states.pt") for path in folder.iterdir())


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _rank_in(name: str) -> int | None:
    """The process that wrote a part: ``zero_pp_rank_3_mp_rank_00_model_states.pt``."""
    _, found, rest = name.partition("zero_pp_rank_")
    digits = rest.partition("_")[0]
    return int(digits) if found and digits.isdigit() else None


def _known(options: dict[str, Any], names: Iterable[str], where: str) -> None:
    wrong = sorted(set(options) - set(names))
    if wrong:
        raise SettingError(
            f"{where} was given {', '.join(wrong)}, which the engine does not know",
            why=f"it knows {', '.join(names)}",
        )
