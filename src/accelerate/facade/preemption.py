"""``Preemption`` of an ``Accelerator``: stop at a step boundary, and find the checkpoint to resume from."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cached_property
from typing import Any, NoReturn
from weakref import ReferenceType, ref

from accelerate.checkpoint import discovery
from accelerate.checkpoint.discovery import Address, ProjectConfiguration, join_address, open_store
from accelerate.checkpoint.file_access import CheckpointNotFoundError
from accelerate.checkpoint.layout import AUTOMATIC_FOLDER
from accelerate.checkpoint.load import ids_on_all_machines
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.core.errors import SettingError
from accelerate.core.setting import SettingsWithOrigins
from accelerate.facade.checkpoint_manager import CheckpointManager
from accelerate.facade.launch_settings import AUTO, ResumeSettings
from accelerate.facade.preparer import PreparedObjects
from accelerate.facade.runtime import Runtime
from accelerate.world import collective, watchdog
from accelerate.world import preemption as stops
from accelerate.world.preemption import PreemptionKwargs

logger = logging.getLogger(__name__)

_NAMING = "ProjectConfiguration(project_dir='runs/a', automatic_checkpoint_naming=True)"


class Preemption:
    """Handles preemption signals, and ``--resume``.

    Signal handlers are installed now if a handler was given; else at the first ``should_stop``.

    Args:
        runtime: the world and the gradient accumulation of the run.
        prepared: the models and optimizers that are trained.
        checkpoints: where the checkpoint to resume from is looked for.
        resume: the checkpoint that was asked for.
        save_and_exit: saves a checkpoint and ends the process, for ``PreemptionKwargs(save_and_exit=True)``.

    Raises:
        SettingError: ``save_and_exit`` without automatic names for checkpoints.
    """

    def __init__(
        self,
        runtime: Runtime,
        prepared: PreparedObjects,
        checkpoints: CheckpointManager,
        resume: SettingsWithOrigins[ResumeSettings],
        save_and_exit: Callable[[], NoReturn],
    ) -> None:
        self.world, self.gradients, self.prepared = runtime.world, runtime.gradients, prepared
        self.checkpoints, self._save_and_exit = checkpoints, save_and_exit
        self._handler: PreemptionKwargs | None = runtime.handlers.get(PreemptionKwargs)
        saves = self._handler is not None and self._handler.save_and_exit
        self._creation_pid = runtime.pid
        self._resume_settings = resume
        # The loader of the outermost loop, and whether the resume warning is settled.
        self._outermost_loader: ReferenceType[Any] | None = None
        self._resume_checked = self._resume_settings.value.resume is None
        if saves and not checkpoints.project.automatic_checkpoint_naming:
            raise SettingError(
                "PreemptionKwargs(save_and_exit=True) needs automatic names for checkpoints",
                why="nobody is there to name the one that is saved",
                fix=f"Accelerator(project_config={_NAMING}, ...)",
            )
        if saves or not self._resume_checked:
            self.gradients.loaders.on_request = self._on_batch_request
        if self._handler is not None:
            stops.install_monitor(self._handler, self.world.size)

    @cached_property
    def options(self) -> PreemptionKwargs:
        """The options that were given, or their defaults."""
        return self._handler or PreemptionKwargs()

    # --- stopping

    def should_stop(self) -> bool:
        """Return whether all ranks stop at this step boundary; see ``Accelerator.should_stop``."""
        gradients = self.gradients
        if gradients.window is not None or not gradients.sync_gradients:
            self._preemption_monitor()
            return False
        return self._stops_at_boundary()

    def _preemption_monitor(self) -> stops.PreemptionMonitor | None:
        """Return the preemption monitor of this process; None in a forked one, such as a loader's worker."""
        monitor = stops.current()
        if monitor is None or monitor.watchdog is not (watchdog.current() if self.world.size > 1 else None):
            if os.getpid() != self._creation_pid:
                return None
            monitor = stops.install_monitor(self.options, self.world.size)
        return monitor

    def _stops_at_boundary(self) -> bool:
        monitor = self._preemption_monitor()
        if monitor is None or monitor.has_stopped:
            return monitor is not None
        if not monitor.check_boundary():
            return False
        if monitor.includes_all_ranks:
            # Ranks that do not ask equally often meet another collective here: an error on all.
            collective.compare_objects(None, "should_stop")
        if self.world.rank == 0:
            action = f"all {self.world.size} processes stop" if self.world.size > 1 else "stopping"
            logger.warning("%s: %s at this step", monitor.reason, action)
        return True

    def _on_batch_request(self, loader: Any) -> None:
        """React to a prepared loader that begins an epoch or is asked for its next batch."""
        if not self._resume_checked:
            self._warn_resume_unread()
        if not self.options.save_and_exit:
            return
        gradients = self.gradients
        other_loaders = [
            each for each in gradients.loaders.references if each is not None and each is not loader
        ]
        if not other_loaders:
            self._outermost_loader = ref(loader)
        if self._outermost_loader is None or self._outermost_loader() is not loader:
            return  # an inner loop: the step of the outer loop is not finished
        training = any(model.training for model in self.prepared.models)
        whole = gradients.window is None and gradients.sync_gradients
        pending = gradients.has_unweighted_grads and bool(self.prepared.optimizers)
        if training and whole and not pending and self._stops_at_boundary():
            self._save_and_exit()

    # --- resume

    def choose_resume_checkpoint(self) -> Address | None:
        """Return the checkpoint that ``--resume`` asks for; see ``Accelerator.resume_from``."""
        self._resume_checked = True
        return self._resume_choice

    @cached_property
    def _resume_choice(self) -> Address | None:
        resume_target = self._resume_settings.value.resume
        if resume_target is None:
            return None
        ranks, project = CheckpointRankGroup.current(), self.checkpoints.project
        action = f"resume from {resume_target}"
        among = ids_on_all_machines(project, ranks, action) if resume_target == AUTO else None
        checkpoint = ranks.run_on_rank0(action, lambda: _choose_checkpoint(resume_target, project, among))
        if self.world.rank == 0:
            logger.info("resuming from %s", checkpoint or "nothing: this is the first start")
        return checkpoint

    def _warn_resume_unread(self) -> None:
        self._resume_checked = True
        if self.world.rank == 0:
            logger.warning(
                "%s has no effect so far: the script begins to iterate and has not read "
                "accelerator.resume_from. Before the loop: `if accelerator.resume_from: "
                "accelerator.load_state(accelerator.resume_from)`",
                self._resume_settings.origin("resume").where,
            )


def _choose_checkpoint(wanted: str, project: ProjectConfiguration, among: set[str] | None) -> Address | None:
    if wanted == AUTO:
        return _newest_checkpoint(project, among)
    folder = discovery.parse_address(wanted)
    store, name = discovery.locate(folder)
    if not store.is_folder(name) or discovery.inspect_folder(store, name) is not None:
        return discovery.named_checkpoint(store, name).path
    inside = store.is_folder(f"{name}/{AUTOMATIC_FOLDER}")
    latest, ignored = discovery.latest_checkpoint(
        join_address(folder, AUTOMATIC_FOLDER) if inside else folder
    )
    for each in ignored:
        logger.warning("not a complete checkpoint, ignored: %s", each)
    return latest.path


def _newest_checkpoint(project: ProjectConfiguration, among: set[str] | None) -> Address | None:
    if not project.automatic_checkpoint_naming:
        raise SettingError(
            "--resume auto needs automatic names for checkpoints",
            why="it takes the newest checkpoint of the project",
            fix=f"Accelerator(project_config={_NAMING}), or name the checkpoint: --resume PATH",
        )
    try:
        return discovery.choose_checkpoint(None, project, among)[0].path
    except CheckpointNotFoundError:
        unusable = [
            each
            for each in discovery.candidates(open_store(discovery.automatic_folder(project)))
            if each.problem
        ]
        if any(each.manifest is not None for each in unusable):
            # They were complete once. A fresh start would lose the run silently.
            raise
        for each in unusable:
            logger.warning("not a complete checkpoint, ignored: %s (%s)", each.name, each.problem)
        return None
