"""The part of the ``Accelerator`` that stops in good order before the job ends, and goes on from there."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ReferenceType, ref

from accelerate.checkpoint import find, where
from accelerate.checkpoint.errors import CheckpointNotFoundError
from accelerate.checkpoint.names import AUTOMATIC_FOLDER
from accelerate.checkpoint.project import ProjectConfiguration
from accelerate.checkpoint.ranks import Ranks
from accelerate.checkpoint.store import LocalStore
from accelerate.core.errors import SettingError
from accelerate.core.setting import load
from accelerate.facade.processes import Processes
from accelerate.facade.resume import AUTO, ResumeSettings
from accelerate.world import collective, together
from accelerate.world import stop as stops
from accelerate.world.stop import PreemptionKwargs

if TYPE_CHECKING:
    from torch import nn

    from accelerate.facade.gradient import GradientState

logger = logging.getLogger(__name__)

_NAMING = "ProjectConfiguration(project_dir='runs/a', automatic_checkpoint_naming=True)"


class Stopping(Processes):
    """Preemption, and ``--resume``."""

    handlers: dict[type, Any]
    gradient_state: GradientState
    project_configuration: ProjectConfiguration
    _models: list[nn.Module]
    _optimizers: list[Any]

    if TYPE_CHECKING:

        def save_state(self) -> Path | str: ...
        def end_training(self) -> None: ...

    def _start_stopping(self) -> None:
        """Hears signals from now on if a handler was given; else from the first ``should_stop`` on."""
        given = self.handlers.get(PreemptionKwargs)
        self._preemption: PreemptionKwargs = given or PreemptionKwargs()
        self._made_in = os.getpid()
        self._resume = load(ResumeSettings)
        self._resume_from: list[Path | str | None] = []  # its one item, once it is known
        # The loader of the outermost loop, and what is said once when training begins.
        self._outermost: ReferenceType[Any] | None = None
        self._told_resume = self._resume.value.resume is None
        if self._preemption.save_and_exit and not self.project_configuration.automatic_checkpoint_naming:
            raise SettingError(
                "PreemptionKwargs(save_and_exit=True) needs automatic names for checkpoints",
                why="nobody is there to name the one that is saved",
                fix=f"Accelerator(project_config={_NAMING}, ...)",
            )
        if self._preemption.save_and_exit or not self._told_resume:
            self.gradient_state.loaders.asked = self._asked
        if given is not None:
            stops.arm(given, self.num_processes)

    # --- stopping

    @property
    def should_stop(self) -> bool:
        """Whether the end of the job was announced, so that it is time to save and stop.

        Reading it is a step boundary: every rank must read it, equally often, at the same places. A signal
        to any rank makes it True on all ranks at the same boundary, within a second or so, and it stays True.
        Until then no rank communicates. It is False inside of an accumulation window, whose gradients would
        be lost. The first read makes this process catch the signals of ``PreemptionKwargs``. ::

            for batch in loader:
                train_step(batch)
                if accelerator.should_stop:
                    accelerator.save_state()
                    accelerator.exit_to_resume()

        Raises:
            CollectiveError: a rank failed while they agreed, or did not read it.
        """
        gradients = self.gradient_state
        if gradients.window is not None or not gradients.sync_gradients:
            self._hearing()
            return False
        return self._at_boundary()

    def exit_to_resume(self) -> NoReturn:
        """Ends trackers and the world, and exits with the code that asks for the job to be started again.

        All ranks call it. The code is ``PreemptionKwargs.exit_code``: 75, "try again later" in sysexits.h.

        Raises:
            SystemExit: always.
        """
        self.end_training()
        raise SystemExit(self._preemption.exit_code)

    def _hearing(self) -> stops.Stop | None:
        """What hears the signals of this process; None in one that was forked from it, a loader's worker."""
        watch = together.current() if self.world.size > 1 else None
        stop = stops.current()
        if stop is None or stop.watch is not watch:
            if os.getpid() != self._made_in:
                return None
            stop = stops.arm(self._preemption, self.world.size)
        return stop

    def _at_boundary(self) -> bool:
        stop = self._hearing()
        if stop is None or stop.stopped:
            return stop is not None
        if not stop.boundary():
            return False
        if stop.everybody:
            # Ranks that do not ask equally often meet something else here: an error on all.
            collective.all_objects(None, "should_stop")
        if self.is_main_process:
            those = f"all {self.num_processes} processes stop" if self.num_processes > 1 else "stopping"
            logger.warning("%s: %s at this step", stop.reason, those)
        return True

    def _asked(self, loader: Any) -> None:
        """A prepared loader begins an epoch, or is asked for the batch after the one in hand."""
        if not self._told_resume:
            self._tell_resume()
        if not self._preemption.save_and_exit:
            return
        gradients = self.gradient_state
        others = [each for each in gradients.loaders.references if each is not None and each is not loader]
        if not others:
            self._outermost = ref(loader)
        if self._outermost is None or self._outermost() is not loader:
            return  # in a loop inside of another: of that one's step something is still to be done
        training = any(model.training for model in self._models)
        whole = gradients.window is None and gradients.sync_gradients
        pending = gradients.uncounted and bool(self._optimizers)
        if training and whole and not pending and self._at_boundary():
            path = self.save_state()
            if self.is_main_process:
                code = self._preemption.exit_code
                logger.warning("saved %s; exit code %d: start the job again to go on", path, code)
            self.exit_to_resume()

    # --- going on

    @property
    def resume_from(self) -> Path | str | None:
        """The checkpoint that ``accelerate launch --resume`` asks to go on from, None for a fresh start.

        Rank 0 chooses for all, at the first read, so every rank must read it. With ``auto`` it is the newest
        complete checkpoint under automatic naming; with a folder of checkpoints the newest complete one in
        it; else the checkpoint that was named. ::

            if accelerator.resume_from:
                accelerator.load_state(accelerator.resume_from)

        Raises:
            CheckpointNotFoundError: what was named is not there, or is no checkpoint.
            CheckpointError: it is damaged, or with ``auto`` all that were complete once are.
            SettingError: ``auto`` without automatic naming.
        """
        self._told_resume = True
        wanted = self._resume.value.resume
        if not self._resume_from:
            if wanted is None:
                self._resume_from.append(None)
            else:
                lead = Ranks.current().lead
                found = lead(f"resume from {wanted}", lambda: _chosen(wanted, self.project_configuration))
                self._resume_from.append(found)
                if self.is_main_process:
                    logger.info("resuming from %s", found or "nothing: this is the first start")
        return self._resume_from[0]

    def _tell_resume(self) -> None:
        self._told_resume = True
        if self.is_main_process:
            logger.warning(
                "%s has no effect so far: the script begins to iterate and has not read "
                "accelerator.resume_from. Before the loop: `if accelerator.resume_from: "
                "accelerator.load_state(accelerator.resume_from)`",
                self._resume.origin("resume").where,
            )


def _chosen(wanted: str, project: ProjectConfiguration) -> Path | str | None:
    if wanted == AUTO:
        return _newest(project)
    if "://" in wanted:
        return wanted  # the store that it names knows what is there
    path = where.given(wanted).resolve()
    store = LocalStore(path.parent)
    if not path.is_dir() or find.inspect(store, path.name) is not None:
        return find.explicit(store, path.name).path
    inside = path / AUTOMATIC_FOLDER
    found = find.latest(inside if inside.is_dir() else path)
    for name in found.ignored:
        logger.warning("not a complete checkpoint, ignored: %s", name)
    return found.candidate.path


def _newest(project: ProjectConfiguration) -> Path | None:
    if not project.automatic_checkpoint_naming:
        raise SettingError(
            "--resume auto needs automatic names for checkpoints",
            why="it takes the newest checkpoint of the project",
            fix=f"Accelerator(project_config={_NAMING}), or name the checkpoint: --resume PATH",
        )
    try:
        return where.chosen(None, project)[0].path
    except CheckpointNotFoundError:
        folder = os.fspath(where.automatic_folder(project))
        unusable = [each for each in find.candidates(LocalStore(Path(folder))) if each.problem]
        if any(each.manifest is not None for each in unusable):
            # They were complete once. To begin afresh would lose a run without a word.
            raise
        for each in unusable:
            logger.warning("not a complete checkpoint, ignored: %s (%s)", each.name, each.problem)
        return None
