"""The methods of ``Accelerator`` that unwrap models, and save and load checkpoints."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from accelerate.checkpoint import async_save, snapshot
from accelerate.checkpoint import state as checkpoints
from accelerate.checkpoint.project import ProjectConfiguration
from accelerate.checkpoint.state import CheckpointContents, CheckpointLoadResult
from accelerate.checkpoint.storage_urls import parse_address
from accelerate.checkpoint.weight_file_io import save as save_object
from accelerate.checkpoint.weight_file_io import save_weights
from accelerate.core.errors import PrepareError, SettingError
from accelerate.facade.checkpoint_adapters import model_adapter, optimizer_adapter, resolve_offloaded
from accelerate.facade.engine_checkpoint_import import engine_state_loaders
from accelerate.facade.module_queries import extract_model_from_parallel
from accelerate.facade.processes import ProcessMixin
from accelerate.world import rng

if TYPE_CHECKING:
    from accelerate.facade.gradient_state import GradientState
    from accelerate.precision.base import Precision
    from accelerate.strategy.base import Strategy


class CheckpointMixin(ProcessMixin):
    """Unwraps models, and saves and loads everything that training needs to resume."""

    strategy: Strategy
    precision: Precision
    gradient_state: GradientState
    project_configuration: ProjectConfiguration
    _models: list[nn.Module]
    _optimizers: list[Any]
    _schedulers: list[Any]
    _dataloaders: list[Any]

    def _init_checkpointing(self) -> None:
        self._custom_objects: list[Any] = []
        # OrderedDicts: torch's handles hold them weakly, which a plain dict does not allow.
        self._save_model_state_pre_hook: dict[int, Any] = OrderedDict()
        self._load_model_state_pre_hook: dict[int, Any] = OrderedDict()
        if self.project_configuration.async_save:
            _allocate_staging_after_step(self)

    def _allocate_staging(self) -> None:
        """Allocate pinned memory for a copy of the state; its size is known after the first step."""
        if self.should_save_model or self.strategy.shards_params:
            weights = (tensor for model in self._models for tensor in model.state_dict().values())
            states = (state for optimizer in self._optimizers for state in optimizer.state.values())
            moments = (value for state in states for value in state.values())
            tensors = [each for each in chain(weights, moments) if isinstance(each, torch.Tensor)]
            snapshot.staging.prepare(snapshot.snapshot_sizes(tensors))

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's own module.

        Args:
            model: a model, prepared or wrapped by hand.
            keep_fp32_wrapper: kept for compatibility; a prepared model can be copied and pickled as it is.
            keep_torch_compile: False also takes the model out of what ``torch.compile(model)`` made.
        """
        return self.strategy.unwrap(extract_model_from_parallel(model, keep_torch_compile=keep_torch_compile))

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's full state dict, keyed by the names of the user's module.

        Where the strategy shards, all processes must call it, and it is complete on process 0 only.
        Offloaded weights are those in memory, or views of the files that they are in.
        """
        if self.strategy.shards_params:
            return self.strategy.model_state(self.unwrap_model(model))
        return resolve_offloaded(
            self.unwrap_model(model).state_dict() if unwrap else self.strategy.model_state(model)
        )

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and loads more objects with the state.

        Raises:
            PrepareError: one lacks ``state_dict`` or ``load_state_dict``.
        """
        wrong = [o for o in objects if not (hasattr(o, "state_dict") and hasattr(o, "load_state_dict"))]
        if wrong:
            names = ", ".join(type(item).__name__ for item in wrong)
            raise PrepareError(
                f"these objects cannot be checkpointed: {names}",
                why="each needs a state_dict() and a load_state_dict(state)",
            )
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` before ``save_state`` writes."""
        return _register_hook(self._save_model_state_pre_hook, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` before ``load_state`` reads."""
        return _register_hook(self._load_model_state_pre_hook, hook)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        sharded: bool | None = None,
        async_save: bool | None = None,
        metadata: Mapping[str, Any] | None = None,
        **save_model_func_kwargs: Any,
    ) -> Path | str:
        """Save models, optimizers, schedulers, scaler, loaders, random states and registered objects.

        The checkpoint is complete or absent: it becomes visible in one step. All processes must call it.
        A save before it that is still written in the background is waited for.

        Args:
            output_dir: the checkpoint's folder, or a URL; not used under automatic naming.
            safe_serialization: models as safetensors, otherwise as torch files.
            sharded: models and optimizers as shards, each process writes its own; False writes full files, on
                one process. None takes what the strategy does. ``load_state`` reads both, everywhere.
            async_save: copy everything and return, while a thread writes and commits the copies; None takes
                what ``ProjectConfiguration`` says. ``wait_for_checkpoint`` tells when it is committed.
            metadata: plain values to read again in ``load_state(...).metadata`` and in the table of
                ``accelerate checkpoint ls``: ``{"epoch": 3}``. Process 0's are kept.
            save_model_func_kwargs: options of the checkpoint that DeepSpeed or Megatron-LM writes.

        Returns:
            The folder, or the URL as text; the same on every process.

        Raises:
            CheckpointError: on every process; what was there before is untouched. Also when the save before
                failed in the background: this one has not begun then.
        """
        train_state = self._train_state()
        engine_files = (
            self.strategy.engine_files(self._models, save_model_func_kwargs) if sharded is not False else []
        )
        if engine_files:
            self._exclude_engine_objects(engine_files, train_state)
        else:
            self._refuse_options("save_state", save_model_func_kwargs)
        train_state.sharded = self._resolve_sharded(sharded)
        train_state.metadata = dict(metadata or {})

        def run_save_hooks(weights: Any, folder: Path) -> None:
            for hook in list(self._save_model_state_pre_hook.values()):
                hook(self._models, weights, str(folder))

        hooks = run_save_hooks if self._save_model_state_pre_hook else None
        return checkpoints.save(
            train_state,
            _resolve_address(output_dir),
            project=self.project_configuration,
            safe_serialization=safe_serialization,
            before=hooks,
            in_background=self.project_configuration.async_save if async_save is None else async_save,
        )

    def wait_for_checkpoint(self, release: bool = False) -> Path | str | None:
        """Wait until the checkpoint that is written in the background is committed; each process for itself.

        Args:
            release: also gives back the memory that is kept for the next copy.

        Returns:
            Its folder, None if none was written since the last call that waited.

        Raises:
            CheckpointError: it failed, on every process; what was there before is untouched.
        """
        try:
            return async_save.wait()
        finally:
            if release:
                snapshot.staging.release()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> CheckpointLoadResult:
        """Load what ``save_state`` saved, after verifying it. All processes must call it.

        Args:
            input_dir: the checkpoint's folder or URL; None is the newest complete one (automatic naming).
            load_kwargs: more arguments of ``torch.load``.
            load_model_func_kwargs: ``map_location``, ``strict``, and arguments of ``load_state_dict``.

        Returns:
            Path, step and metadata of the checkpoint, and what was ignored or missing.

        Raises:
            CheckpointError: on every process, naming the file and what was expected.
        """
        options = dict(load_model_func_kwargs)
        strict, location = options.pop("strict", True), options.pop("map_location", None)
        async_save.wait_on_all_ranks("load a checkpoint")
        train_state = self._train_state()
        engine_files = self.strategy.engine_files(self._models, options)

        def run_load_hooks(folder: Path) -> None:
            remaining = list(self._models)
            for hook in list(self._load_model_state_pre_hook.values()):
                hook(remaining, str(folder))
            train_state.models = [model_adapter(self.strategy, model) for model in remaining]
            present = [each for each in engine_files if each.present(folder)]
            engine_object_ids = {id(each) for files in present for each in files.objects}
            present += engine_state_loaders(
                self.strategy, folder, remaining, self._optimizers, engine_object_ids, strict
            )
            if present:
                self._exclude_engine_objects(present, train_state, remaining)

        loaded = checkpoints.load(
            train_state,
            _resolve_address(input_dir),
            project=self.project_configuration,
            strict=strict,
            map_location=location,
            load_kwargs=load_kwargs,
            model_kwargs=options,
            before=run_load_hooks,
        )
        self.gradient_state.step = loaded.step
        return loaded

    def _train_state(self) -> CheckpointContents:
        models, strategy = self._models, self.strategy
        return CheckpointContents(
            models=[model_adapter(strategy, model) for model in models],
            optimizers=[optimizer_adapter(strategy, each, models) for each in self._optimizers],
            schedulers=list(self._schedulers),
            scaler=self.precision.scaler,
            custom=list(self._custom_objects),
            loaders=list(self._dataloaders),
            rng=rng,
            step=self.gradient_state.step,
            strategy=strategy.name,
        )

    def _exclude_engine_objects(
        self,
        engine_files: list[Any],
        train_state: CheckpointContents,
        models: list[nn.Module] | None = None,
    ) -> None:
        """Leave out of ``train_state`` what DeepSpeed or Megatron-LM saves and loads by itself."""
        engine_object_ids = {id(each) for files in engine_files for each in files.objects}
        remaining = [
            m for m in (self._models if models is None else models) if id(m) not in engine_object_ids
        ]
        train_state.models = [model_adapter(self.strategy, model) for model in remaining]
        optimizers = [each for each in self._optimizers if id(each.optimizer) not in engine_object_ids]
        train_state.optimizers = [optimizer_adapter(self.strategy, each, self._models) for each in optimizers]
        train_state.schedulers = [
            each for each in self._schedulers if id(each.scheduler) not in engine_object_ids
        ]
        train_state.own_files = engine_files

    def _resolve_sharded(self, sharded: bool | None) -> bool:
        """Return whether to write a sharded checkpoint.

        Raises:
            SettingError: ``save_on_each_node`` with several machines: each would have only its own shards.
        """
        if sharded is None:
            sharded = self.strategy.saves_sharded
        if sharded and self.project_configuration.save_on_each_node and self.strategy.world.nodes > 1:
            raise SettingError(
                "save_on_each_node does not go with a sharded checkpoint",
                why="each machine would have the shards of its own processes only, and none a full model",
                fix="save to a folder that all machines share, or save_state(sharded=False)",
            )
        return sharded

    def _refuse_options(self, name: str, options: dict[str, Any]) -> None:
        if options:
            raise SettingError(
                f"{name} was given {', '.join(sorted(options))}, "
                f"which the strategy {self.strategy.name!r} does not know"
            )

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Export the weights of ``model`` for other tools: one file, or shards with an index.

        Args:
            model: the model.
            save_directory: the folder; made if needed, stale shards in it are removed.
            max_shard_size: limit of one file, ``"10GB"`` or bytes.
            safe_serialization: safetensors, otherwise torch files.
        """
        state = self.get_state_dict(model)
        if self.should_save_model:
            save_weights(
                state,
                Path(save_directory),
                max_shard_size=max_shard_size,
                safe_serialization=safe_serialization,
            )
        self.wait_for_everyone()

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write one object on the main process, or on each machine's with ``save_on_each_node``."""
        save_object(
            obj,
            f,
            save_on_each_node=self.project_configuration.save_on_each_node,
            safe_serialization=safe_serialization,
        )

    @property
    def should_save_model(self) -> bool:
        """Return whether this process writes exported weights."""
        each = self.project_configuration.save_on_each_node
        return self.is_local_main_process if each else self.is_main_process

    @property
    def project_dir(self) -> str | None:
        """The folder of the project."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder of the logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self.project_configuration.iteration


def _resolve_address(folder: str | os.PathLike[str] | None) -> Path | str | None:
    return None if folder is None else parse_address(folder)


def _allocate_staging_after_step(accelerator: CheckpointMixin) -> None:
    """Allocate the staging memory after the first optimizer step, before the first save needs it."""
    accelerator_ref: Any = ref(accelerator)

    def allocate_once(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal accelerator_ref
        saving = accelerator_ref() if accelerator_ref is not None else None
        if saving is not None and any(each.optimizer is optimizer for each in saving._optimizers):
            accelerator_ref = None
            saving._allocate_staging()

    register_optimizer_step_post_hook(allocate_once)


def _register_hook(table: dict[int, Any], hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(table)
    table[handle.id] = hook
    return handle
