"""The part of the ``Accelerator`` that stops in good order before the job ends, and goes on from there."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ReferenceType, ref

from accelerate.checkpoint import find, where
from accelerate.checkpoint.errors import CheckpointNotFoundError
from accelerate.checkpoint.names import AUTOMATIC_FOLDER
from accelerate.checkpoint.places import Address, join, open_store
from accelerate.checkpoint.project import ProjectConfiguration
from accelerate.checkpoint.ranks import Ranks
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

        def save_state(self) -> Address: ...
        def end_training(self) -> None: ...

    def _start_stopping(self) -> None:
        """Hears signals from now on if a handler was given; else from the first ``should_stop`` on."""
        given = self.handlers.get(PreemptionKwargs)
        self._preemption: PreemptionKwargs = given or PreemptionKwargs()
        self._made_in, self._in_company = os.getpid(), self.num_processes > 1
        self._resume = load(ResumeSettings)
        self._resume_from: list[Address | None] = []  # its one item, once it is known
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
        stop = stops.current()
        if stop is None or stop.watch is not (together.current() if self._in_company else None):
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
    def resume_from(self) -> Address | None:
        """The checkpoint that ``accelerate launch --resume`` asks to go on from, None for a fresh start.

        Rank 0 chooses for all, at the first read, so every rank must read it. With ``auto`` it is the newest
        complete checkpoint under automatic naming; with a folder (or URL) of checkpoints the newest complete
        one in it; else the checkpoint that was named. ::

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
                ranks, project, doing = Ranks.current(), self.project_configuration, f"resume from {wanted}"
                among = _everywhere(wanted, project, ranks, doing)
                found = ranks.lead(doing, lambda: _chosen(wanted, project, among))
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


def _chosen(wanted: str, project: ProjectConfiguration, among: set[str] | None) -> Address | None:
    if wanted == AUTO:
        return _newest(project, among)
    folder = where.given(wanted)
    store, name = where.place(folder)
    if not store.is_folder(name) or find.inspect(store, name) is not None:
        return find.explicit(store, name).path
    inside = store.is_folder(f"{name}/{AUTOMATIC_FOLDER}")
    found = find.latest(join(folder, AUTOMATIC_FOLDER) if inside else folder)
    for each in found.ignored:
        logger.warning("not a complete checkpoint, ignored: %s", each)
    return found.candidate.path


def _everywhere(wanted: str, project: ProjectConfiguration, ranks: Ranks, doing: str) -> set[str] | None:
    """Where each machine keeps whole checkpoints of its own, those that all have; otherwise None, for all."""
    if wanted != AUTO or not (project.save_on_each_node and project.automatic_checkpoint_naming):
        return None
    with ranks.together(doing) as told:
        told.value = where.committed(project) if ranks.writes(each_node=True) else None
    return set.intersection(*(ids for ids in told.values if ids is not None))


def _newest(project: ProjectConfiguration, among: set[str] | None) -> Address | None:
    if not project.automatic_checkpoint_naming:
        raise SettingError(
            "--resume auto needs automatic names for checkpoints",
            why="it takes the newest checkpoint of the project",
            fix=f"Accelerator(project_config={_NAMING}), or name the checkpoint: --resume PATH",
        )
    try:
        return where.chosen(None, project, among)[0].path
    except CheckpointNotFoundError:
        unusable = [
            each for each in find.candidates(open_store(where.automatic_folder(project))) if each.problem
        ]
        if any(each.manifest is not None for each in unusable):
            # They were complete once. To begin afresh would lose a run without a word.
            raise
        for each in unusable:
            logger.warning("not a complete checkpoint, ignored: %s (%s)", each.name, each.problem)
        return None
