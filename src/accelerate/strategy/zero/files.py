"""An engine's own checkpoint as a part of ours: a folder that it writes and reads, inside of the commit."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accelerate.core.errors import CheckpointError, SettingError
from accelerate.strategy.zero.engine import Made
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
        """Lets the engine read; collective.

        Raises:
            CheckpointError: another number of processes or another stage has written it.
        """
        _known(self.options, _LOADS, "load_state")
        mark = folder / self.name / _MARK
        if mark.is_file():
            self._check(json.loads(mark.read_text(encoding="utf-8")), folder)
        path, _ = self.made.engine.load_checkpoint(str(folder), tag=self.name, **self.options)
        if path is None:
            raise CheckpointError(f"the engine found nothing to load in {folder / self.name}")
        self.made.drop()

    def _check(self, facts: dict[str, int], folder: Path) -> None:
        here = {"stage": self.made.stage, "processes": self.world.size}
        for what, number in here.items():
            if facts.get(what) != number:
                raise CheckpointError(
                    f"{folder / self.name} was written with {what}={facts.get(what)}, here it is {number}",
                    why="the engine's own checkpoints are read as they were written",
                    fix="save with accelerator.save_state(folder, sharded=False): whole weights and "
                    "optimizer, which any stage, number of processes and strategy reads",
                )


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
