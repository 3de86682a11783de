"""Preemption and resume of ``Accelerator``: stop at a step boundary, and find the checkpoint to resume."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ReferenceType, ref

from accelerate.checkpoint import checkpoint_location, discovery
from accelerate.checkpoint.errors import CheckpointNotFoundError
from accelerate.checkpoint.names import AUTOMATIC_FOLDER
from accelerate.checkpoint.project import ProjectConfiguration
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.checkpoint.storage_urls import Address, join_address, open_store
from accelerate.core.errors import SettingError
from accelerate.core.setting import load_settings
from accelerate.facade.processes import ProcessMixin
from accelerate.facade.resume_settings import AUTO, ResumeSettings
from accelerate.world import collective, watchdog
from accelerate.world import preemption as stops
from accelerate.world.preemption import PreemptionKwargs

if TYPE_CHECKING:
    from torch import nn

    from accelerate.facade.gradient_state import GradientState

logger = logging.getLogger(__name__)

_NAMING = "ProjectConfiguration(project_dir='runs/a', automatic_checkpoint_naming=True)"


class PreemptionMixin(ProcessMixin):
    """Handles preemption signals, and ``--resume``."""

    handlers: dict[type, Any]
    gradient_state: GradientState
    project_configuration: ProjectConfiguration
    _models: list[nn.Module]
    _optimizers: list[Any]

    if TYPE_CHECKING:

        def save_state(self) -> Address: ...
        def end_training(self) -> None: ...

    def _init_preemption(self) -> None:
        """Install signal handlers now if a handler was given; else at the first ``should_stop``."""
        handler = self.handlers.get(PreemptionKwargs)
        self._preemption: PreemptionKwargs = handler or PreemptionKwargs()
        self._creation_pid, self._had_peers = os.getpid(), self.num_processes > 1
        self._resume_settings = load_settings(ResumeSettings)
        self._resume_choice: list[Address | None] = []  # its one item, once it is chosen
        # The loader of the outermost loop, and whether the resume warning is settled.
        self._outermost_loader: ReferenceType[Any] | None = None
        self._resume_checked = self._resume_settings.value.resume is None
        if self._preemption.save_and_exit and not self.project_configuration.automatic_checkpoint_naming:
            raise SettingError(
                "PreemptionKwargs(save_and_exit=True) needs automatic names for checkpoints",
                why="nobody is there to name the one that is saved",
                fix=f"Accelerator(project_config={_NAMING}, ...)",
            )
        if self._preemption.save_and_exit or not self._resume_checked:
            self.gradient_state.loaders.on_request = self._on_batch_request
        if handler is not None:
            stops.install_monitor(handler, self.num_processes)

    # --- stopping

    @property
    def should_stop(self) -> bool:
        """Return whether the end of the job was announced, so that it is time to save and monitor.

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
            self._preemption_monitor()
            return False
        return self._stops_at_boundary()

    def exit_to_resume(self) -> NoReturn:
        """End trackers and the world, and exit with the code that asks for the job to be started again.

        All ranks call it. The code is ``PreemptionKwargs.exit_code``: 75, "try again later" in sysexits.h.

        Raises:
            SystemExit: always.
        """
        self.end_training()
        raise SystemExit(self._preemption.exit_code)

    def _preemption_monitor(self) -> stops.PreemptionMonitor | None:
        """Return the preemption monitor of this process; None in a forked one, such as a loader's worker."""
        monitor = stops.current()
        if monitor is None or monitor.watchdog is not (watchdog.current() if self._had_peers else None):
            if os.getpid() != self._creation_pid:
                return None
            monitor = stops.install_monitor(self._preemption, self.world.size)
        return monitor

    def _stops_at_boundary(self) -> bool:
        monitor = self._preemption_monitor()
        if monitor is None or monitor.has_stopped:
            return monitor is not None
        if not monitor.check_boundary():
            return False
        if monitor.includes_all_ranks:
            # Ranks that do not ask equally often meet another collective here: an error on all.
            collective.all_gather_object(None, "should_stop")
        if self.is_main_process:
            action = f"all {self.num_processes} processes stop" if self.num_processes > 1 else "stopping"
            logger.warning("%s: %s at this step", monitor.reason, action)
        return True

    def _on_batch_request(self, loader: Any) -> None:
        """React to a prepared loader that begins an epoch or is asked for its next batch."""
        if not self._resume_checked:
            self._warn_resume_unread()
        if not self._preemption.save_and_exit:
            return
        gradients = self.gradient_state
        other_loaders = [
            each for each in gradients.loaders.references if each is not None and each is not loader
        ]
        if not other_loaders:
            self._outermost_loader = ref(loader)
        if self._outermost_loader is None or self._outermost_loader() is not loader:
            return  # an inner loop: the step of the outer loop is not finished
        training = any(model.training for model in self._models)
        whole = gradients.window is None and gradients.sync_gradients
        pending = gradients.has_unweighted_grads and bool(self._optimizers)
        if training and whole and not pending and self._stops_at_boundary():
            path = self.save_state()
            if self.is_main_process:
                code = self._preemption.exit_code
                logger.warning("saved %s; exit code %d: start the job again to go on", path, code)
            self.exit_to_resume()

    # --- resume

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
        self._resume_checked = True
        resume_target = self._resume_settings.value.resume
        if not self._resume_choice:
            if resume_target is None:
                self._resume_choice.append(None)
            else:
                ranks, project, doing = (
                    CheckpointRankGroup.current(),
                    self.project_configuration,
                    f"resume from {resume_target}",
                )
                among = _common_checkpoints(resume_target, project, ranks, doing)
                checkpoint = ranks.run_on_rank0(
                    doing, lambda: _choose_checkpoint(resume_target, project, among)
                )
                self._resume_choice.append(checkpoint)
                if self.is_main_process:
                    logger.info("resuming from %s", checkpoint or "nothing: this is the first start")
        return self._resume_choice[0]

    def _warn_resume_unread(self) -> None:
        self._resume_checked = True
        if self.is_main_process:
            logger.warning(
                "%s has no effect so far: the script begins to iterate and has not read "
                "accelerator.resume_from. Before the loop: `if accelerator.resume_from: "
                "accelerator.load_state(accelerator.resume_from)`",
                self._resume_settings.origin("resume").where,
            )


def _choose_checkpoint(wanted: str, project: ProjectConfiguration, among: set[str] | None) -> Address | None:
    if wanted == AUTO:
        return _newest_checkpoint(project, among)
    folder = checkpoint_location.requested_address(wanted)
    store, name = checkpoint_location.locate(folder)
    if not store.is_folder(name) or discovery.inspect_folder(store, name) is not None:
        return discovery.named_checkpoint(store, name).path
    inside = store.is_folder(f"{name}/{AUTOMATIC_FOLDER}")
    latest = discovery.latest_checkpoint(join_address(folder, AUTOMATIC_FOLDER) if inside else folder)
    for each in latest.ignored:
        logger.warning("not a complete checkpoint, ignored: %s", each)
    return latest.candidate.path


def _common_checkpoints(
    wanted: str, project: ProjectConfiguration, ranks: CheckpointRankGroup, doing: str
) -> set[str] | None:
    """Return the checkpoints that all machines have, if each keeps its own; else None, for no limit."""
    if wanted != AUTO or not (project.save_on_each_node and project.automatic_checkpoint_naming):
        return None
    with ranks.collective_section(doing) as section:
        section.value = (
            checkpoint_location.committed_ids(project) if ranks.is_writer(each_node=True) else None
        )
    return set.intersection(*(ids for ids in section.values if ids is not None))


def _newest_checkpoint(project: ProjectConfiguration, among: set[str] | None) -> Address | None:
    if not project.automatic_checkpoint_naming:
        raise SettingError(
            "--resume auto needs automatic names for checkpoints",
            why="it takes the newest checkpoint of the project",
            fix=f"Accelerator(project_config={_NAMING}), or name the checkpoint: --resume PATH",
        )
    try:
        return checkpoint_location.choose_checkpoint(None, project, among)[0].path
    except CheckpointNotFoundError:
        unusable = [
            each
            for each in discovery.candidates(open_store(checkpoint_location.automatic_folder(project)))
            if each.problem
        ]
        if any(each.manifest is not None for each in unusable):
            # They were complete once. A fresh start would lose the run silently.
            raise
        for each in unusable:
            logger.warning("not a complete checkpoint, ignored: %s (%s)", each.name, each.problem)
        return None
