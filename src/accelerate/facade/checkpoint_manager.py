"""The ``CheckpointManager`` of an ``Accelerator``: it unwraps models, and saves and loads checkpoints."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakSet
from zlib import crc32

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from accelerate.checkpoint import async_save, load, save
from accelerate.checkpoint.discovery import (
    ProjectConfiguration,
    automatic_folder,
    first_iteration,
    save_address,
)
from accelerate.checkpoint.layout import CheckpointContents, Manifest, RankStateful, StatefulAdapter
from accelerate.checkpoint.load import CheckpointLoadResult
from accelerate.checkpoint.rank_group import CheckpointPeerError, CheckpointRankGroup, saves_alone
from accelerate.checkpoint.state_dict_files import strip_compile_prefix
from accelerate.checkpoint.weight_files import save_weights
from accelerate.core.errors import CollectiveError, PrepareError, SettingError, warn_user
from accelerate.facade.checkpoint_adapters import (
    OpenWindow,
    model_adapter,
    optimizer_adapter,
    position_adapter,
    rank_position_adapter,
    registered_adapter,
    resolve_offloaded,
    state_tensors,
)
from accelerate.facade.engine_checkpoint_import import engine_state_loaders
from accelerate.facade.module_queries import extract_model_from_parallel
from accelerate.facade.preparer import PreparedObjects
from accelerate.facade.runtime import Runtime
from accelerate.strategy.base import EngineStrategy, WrapperNames
from accelerate.world import collective, control_channel, watchdog
from accelerate.world import world as worlds

# What is said of ``total_limit`` where the program names its checkpoints, and what to do.
_NAMED_CHECKPOINTS = (
    "total_limit removes no checkpoint that is given a name",
    "set automatic_checkpoint_naming=True in ProjectConfiguration, or leave total_limit out",
)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CheckpointManager:
    """Saves and loads everything that training needs to resume; exports weights.

    The methods are those of ``Accelerator``, whose docstrings describe them.

    Args:
        runtime: the strategy, precision and gradient accumulation of the run.
        prepared: what is saved and loaded.
        project: where checkpoints go.
        strict: options of a save that nothing takes, and rewritten weights, are an error, not a warning.

    Attributes:
        custom_objects: saved and loaded with the state.
        save_hooks, load_hooks: called before ``save_state`` writes and ``load_state`` reads.
    """

    def __init__(
        self,
        runtime: Runtime,
        prepared: PreparedObjects,
        project: ProjectConfiguration,
        strict: bool = False,
    ) -> None:
        self.world, self.strategy, self.precision = runtime.world, runtime.strategy, runtime.precision
        self.gradients, self.prepared, self.project = runtime.gradients, prepared, project
        self.window = OpenWindow(runtime.gradients, runtime.strategy, runtime.precision, prepared)
        self.custom_objects: list[Any] = []
        self._saves, self._strict, self._ignored_options = 0, strict, set[str]()
        # OrderedDicts: torch's handles hold them weakly, which a plain dict does not allow.
        self.save_hooks: dict[int, Any] = OrderedDict()
        self.load_hooks: dict[int, Any] = OrderedDict()
        if project.async_save:  # after the first optimizer step, before the first save needs it
            _without_staging.add(self)
            _register_staging_hook()

    def allocate_staging(self) -> None:
        """Allocate pinned memory for a copy of the state; its size is known after the first step."""
        if self.strategy.owns_step:  # DeepSpeed and Megatron-LM write their own files, before a save returns
            return
        if self.writes_exports or self.strategy.shards_params:
            tensors = state_tensors(self.strategy, self.prepared.models, self.prepared.optimizers)
            async_save.staging.prepare(async_save.snapshot_sizes(tensors))

    @property
    def writes_exports(self) -> bool:
        """Return whether this process writes exported weights."""
        return self.world.is_local_main if self.project.save_on_each_node else self.world.is_main

    def unwrap(self, model: nn.Module, keep_torch_compile: bool = True) -> nn.Module:
        """Return the user's own module."""
        return self.strategy.unwrap(extract_model_from_parallel(model, keep_torch_compile=keep_torch_compile))

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict of a model by the names of the user's module, also where compiled."""
        prepared = self.prepared.find_model(model)
        if self.strategy.shards_params:
            for optimizer in self.prepared.optimizers:
                optimizer.warn_of_omitted_step("the weights are those before it")
            state = self.strategy.model_state(self.unwrap(prepared))
        else:
            if unwrap:
                own = self.unwrap(model).state_dict()
            elif isinstance(self.strategy, WrapperNames) and self.unwrap(prepared) is not prepared:
                own = self.strategy.wrapped_state(prepared)
            else:
                own = self.strategy.model_state(model)
            state = resolve_offloaded(own)
        is_compiled = unwrap and any("_orig_mod." in name for name in state)
        return strip_compile_prefix(state) if is_compiled else state

    def register(self, objects: Iterable[Any]) -> None:
        """Save and load more objects with the state."""
        wrong = [o for o in objects if not (hasattr(o, "state_dict") and hasattr(o, "load_state_dict"))]
        if wrong:
            names = ", ".join(type(item).__name__ for item in wrong)
            raise PrepareError(
                f"these objects cannot be checkpointed: {names}",
                why="each needs a state_dict() and a load_state_dict(state)",
            )
        self.custom_objects.extend(objects)

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the present hooks and registered objects."""
        objects, save_hooks, load_hooks = [*self.custom_objects], {**self.save_hooks}, {**self.load_hooks}

        def restore() -> None:
            self.custom_objects[:] = objects
            # In place: their handles hold these dicts.
            for hooks, kept in ((self.save_hooks, save_hooks), (self.load_hooks, load_hooks)):
                hooks.clear()
                hooks.update(kept)

        return restore

    def save(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        safe_serialization: bool = True,
        sharded: bool | None = None,
        async_save: bool | None = None,
        metadata: Mapping[str, Any] | None = None,
        engine_options: Mapping[str, Any] | None = None,
        replaced_state: Callable[..., dict[str, Any]] | None = None,
    ) -> Path | str:
        """Save models, optimizers, schedulers, scaler, loaders, random states and registered objects.

        ``replaced_state`` is the program's own ``get_state_dict``; it gives the states of replicated models.
        """
        strategy, prepared, options = self.strategy, self.prepared, dict(engine_options or {})
        if self.project.total_limit is not None and not self.project.automatic_checkpoint_naming:
            self._warn_ignored({"ProjectConfiguration.total_limit"}, *_NAMED_CHECKPOINTS)
        is_sharded = strategy.saves_sharded if sharded is None else sharded
        may_be_solo = not is_sharded and strategy.replicates_model and self._may_be_solo
        in_turn = collective.FirstProcessBlock.open_count > 0
        number = saves_alone("save_state", self._choose_number, in_turn) if may_be_solo else None
        if number is not None and not self.writes_exports:
            self.project.iteration = number
            address, self.project.iteration = save_address(output_dir, self.project), number + 1
            return address
        if number is not None:
            warn_user(
                "save_state on the main process alone: the random states of the other processes are not in "
                "the checkpoint. A run that is resumed from it derives them from those of the main process"
            )
        else:
            address = f" {output_dir}" if output_dir else ""
            self._check_ranks(f"save_state (save the checkpoint{address})")
        for optimizer in prepared.optimizers:
            if optimizer.fuses_backward:
                optimizer.warn_of_unsaved_state()
            if strategy.owns_step:
                optimizer.take_omitted_step("save_state()")
        train_state = self._train_state()
        train_state.gradients = self.window if self.window.is_saved(number is not None) else None
        if replaced_state is not None and not (strategy.shards_params or strategy.owns_step):
            for adapter in train_state.models:
                adapter.state_dict = partial(replaced_state, adapter.module, unwrap=False)
                adapter.sharded_state = None
        engine_files: list[Any] = []
        if isinstance(strategy, EngineStrategy) and sharded is not False:
            engine_files = strategy.engine_files(prepared.models, options)
        needs_all = is_sharded or (strategy.shards_params and not engine_files)
        if needs_all and self.project.save_on_each_node and strategy.world.nodes > 1:
            raise SettingError(
                f"save_on_each_node does not go with shards, and the strategy is {strategy.name!r}",
                why="each machine would have the shards of its own processes only; of a whole model, the "
                "first machine all, and the others nothing",
                fix="save to a folder or an address ('s3://bucket/run') that all machines share",
            )
        if engine_files:
            self._exclude_engine_objects(engine_files, train_state)
        elif options:
            self._ignore_options(options)
        train_state.sharded, train_state.metadata = is_sharded, dict(metadata or {})

        def run_save_hooks(weights: Any, folder: Path) -> None:
            for hook in list(self.save_hooks.values()):  # as in 1.x, of shards they get no weights
                hook(prepared.models, [] if strategy.shards_params else weights, str(folder))

        return save.save(
            train_state,
            output_dir,
            project=self.project,
            safe_serialization=safe_serialization,
            before=run_save_hooks if self.save_hooks else None,
            ranks=None if number is None else CheckpointRankGroup(),
            in_background=self.project.async_save if async_save is None else async_save,
        )

    def _ignore_options(self, options: Iterable[str]) -> None:
        """Warn once of options that only DeepSpeed's or Megatron-LM's files take; 1.x ignores them elsewhere.

        Raises:
            SettingError: the run is strict, or DeepSpeed or Megatron-LM would have taken them but for
                ``sharded=False``.
        """
        names, strategy = ", ".join(sorted(options)), self.strategy
        said = f"save_state was given {names}, which the strategy {strategy.name!r} does not know"
        if isinstance(strategy, EngineStrategy):
            raise SettingError(said)
        self._warn_ignored(options, said, "this is ignored, as in Accelerate 1.x")

    def _warn_ignored(self, options: Iterable[str], said: str, advice: str) -> None:
        """Warn once on the main process of options that do nothing.

        Raises:
            SettingError: the run is strict.
        """
        if self._strict:
            raise SettingError(said, fix=advice)
        if self.world.is_main and not self._ignored_options.issuperset(options):
            self._ignored_options.update(options)
            warn_user(f"{said}: {advice}")

    def _check_ranks(self, action: str) -> None:
        """Warn on rank 0 about the first parameter of a replica, or the first learning rate, that differs.

        Collective, at each so many saves. Each parameter is read once, and one message is exchanged; a
        checksum is the sum of its bits.

        Args:
            action: the save, for the error if another rank does not save.

        Raises:
            CheckpointPeerError: the ranks cannot save together any more.
        """
        world = worlds.current()
        if world is not None and world.is_closed and world.size > 1:
            raise CheckpointPeerError(
                f"save_state after the process group was closed, with the strategy {self.strategy.name!r}",
                why="each process would save its shard of the state, and they can no longer communicate",
                fix="call save_state before end_training()",
            )
        interval = self.project.replica_check_interval
        if not interval or self.world.size == 1 or self.strategy.local_training:
            return
        self._saves += 1
        if (self._saves - 1) % interval:
            return
        named = [
            (f"{name} of model {number}" if number else name, parameter.detach())
            for number, model in enumerate(self.prepared.models if self.strategy.replicates_model else ())
            for name, parameter in model.named_parameters()
        ]
        real = [torch.view_as_real(p) if p.is_complex() else p for _, p in named]
        sums = [p.view(_INTEGERS[p.itemsize]).sum(dtype=torch.int64) for p in real]
        # One copy to the host for each device.
        devices = {total.device for total in sums}
        by_device = {d: iter(torch.stack([s for s in sums if s.device == d]).tolist()) for d in devices}
        local = {name: next(by_device[total.device]) for (name, _), total in zip(named, sums, strict=True)}
        # The ranks step with equal learning rates, sharded or not.
        for optimizer in self.prepared.optimizers:
            for number, group in enumerate(optimizer.optimizer.param_groups):
                name = f"the learning rate of group {number} of the {type(optimizer.optimizer).__name__}"
                rate = group.get("lr")  # as a tensor it names its device in its text
                local[name] = repr(rate.item() if isinstance(rate, torch.Tensor) else rate)
        try:
            digest, channel = b"%d" % crc32(repr(local).encode()), control_channel.channel()
            with channel.lock:
                messages = channel.exchange("save_state", description=digest, label=action)
            if not messages.same:
                by_rank = collective.all_gather_object(local, "save_state", label=action)
                if self.world.is_main:
                    warn_user(_describe_drift(by_rank))
        except CollectiveError as lost:  # a save may only meet a save
            raise CheckpointPeerError.from_collective(lost) from lost.__cause__

    def _choose_number(self) -> int:
        """Choose the number of the checkpoint that the main process saves alone."""
        project, watch = self.project, watchdog.current()
        if project.automatic_checkpoint_naming and project.iteration == 0:
            # Where the ranks take turns, the others look into a folder in which rank 0 has saved already.
            store, key = watch and watch.store, f"first_checkpoint/{automatic_folder(project)}"
            chosen = store.get(key) if store is not None and not self.world.is_main else None
            project.iteration = first_iteration(project) if chosen is None else int(chosen)
            if store is not None and self.world.is_main:
                store.put(key, str(project.iteration))
        return project.iteration

    @property
    def _may_be_solo(self) -> bool:
        """Return whether the main process may write files alone: it is the only one that writes them."""
        each_node = self.project.save_on_each_node and worlds.is_open()
        return self.world.size > 1 and not each_node

    def wait(self, release: bool = False) -> Path | str | None:
        """Wait until the checkpoint that is written in the background is committed; return its folder."""
        try:
            return async_save.wait()
        finally:
            if release:
                async_save.staging.release()

    def load(
        self,
        input_dir: str | os.PathLike[str] | None,
        load_kwargs: dict[str, Any] | None,
        model_options: Mapping[str, Any],
    ) -> CheckpointLoadResult:
        """Load what ``save`` saved, after verifying it."""
        options = dict(model_options)
        strict, location = options.pop("strict", True), options.pop("map_location", None)
        train_state = self._train_state()
        train_state.gradients = self.window
        engine_files: list[Any] = []
        if isinstance(self.strategy, EngineStrategy):
            engine_files = self.strategy.engine_files(self.prepared.models, {**options, "strict": strict})
        elif options:
            raise SettingError(
                f"load_state was given {', '.join(sorted(options))}, "
                f"which the strategy {self.strategy.name!r} does not know",
                fix="it takes strict and map_location; options of torch.load go into load_kwargs",
            )

        def run_load_hooks(folder: Path, manifest: Manifest | None) -> None:
            present = [each for each in engine_files if each.present(folder)]
            engine_object_ids = {id(each) for files in present for each in files.objects}
            # As in 1.x, hooks get no model that is sharded: it is loaded here, whatever they do.
            models, shards_params = self.prepared.models, self.strategy.shards_params
            offered = [] if shards_params else [*models]
            for hook in list(self.load_hooks.values()):
                hook(offered, str(folder))
            offered_ids = set(map(id, offered))
            remaining = [model for model in models if shards_params or id(model) in offered_ids]
            train_state.models = [model_adapter(self.strategy, model) for model in remaining]
            if manifest is None or "own_files" in manifest.parts:  # DeepSpeed or Megatron-LM may have written
                present += engine_state_loaders(
                    self.strategy, folder, remaining, self.prepared.optimizers, engine_object_ids, strict
                )
            if present:
                self._exclude_engine_objects(present, train_state, remaining)

        # A strategy that shards loads in collectives, in which all ranks must be.
        is_alone = collective.FirstProcessBlock.open_count > 0 and self.strategy.replicates_model
        loaded = load.load(
            train_state,
            input_dir,
            project=self.project,
            strict=strict,
            map_location=location,
            load_kwargs=load_kwargs,
            model_kwargs=options,
            before=run_load_hooks,
            ranks=CheckpointRankGroup.current(is_alone),
            refuses_rewritten=self._strict,
        )
        self.gradients.step = loaded.step
        for loader, seed in zip(self.prepared.loaders, loaded.worker_seeds, strict=False):
            record = loader.position.record
            if seed and record and record.order_state and record.number == seed[0]:
                record.order_state.worker_seed = seed[1]  # it had that of rank 0
        return loaded

    def _train_state(self) -> CheckpointContents:
        models, loaders, strategy = self.prepared.models, self.prepared.loaders, self.strategy
        epochs = [each.position.record or each.position.current for each in loaders]
        return CheckpointContents(
            models=[model_adapter(strategy, model) for model in models],
            optimizers=[optimizer_adapter(strategy, each, models) for each in self.prepared.optimizers],
            schedulers=list(self.prepared.schedulers),
            scaler=self.precision.scaler,
            custom=[
                registered_adapter(
                    strategy, each, self.writes_exports, models, each_node=self.project.save_on_each_node
                )
                for each in self.custom_objects
            ],
            rank_states=[
                StatefulAdapter(type(each).__name__, each.rank_state_dict, each.load_rank_states)
                for each in self.custom_objects
                if isinstance(each, RankStateful)
            ],
            loaders=[position_adapter(each) if each.use_stateful_dataloader else each for each in loaders],
            stateful_loaders=[each for each in loaders if each.use_stateful_dataloader],
            rank_positions=[
                rank_position_adapter(each)
                for each in loaders
                if each.position.is_per_rank and not each.use_stateful_dataloader
            ],
            rng=True,
            worker_seeds=[e and e.order_state and (e.number, e.order_state.worker_seed) for e in epochs],
            step=self.gradients.step,
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
        models = self.prepared.models if models is None else models
        remaining = [each for each in models if id(each) not in engine_object_ids]
        train_state.models = [model_adapter(self.strategy, model) for model in remaining]
        optimizers = [o for o in self.prepared.optimizers if id(o.optimizer) not in engine_object_ids]
        train_state.optimizers = [
            optimizer_adapter(self.strategy, each, self.prepared.models) for each in optimizers
        ]
        schedulers = self.prepared.schedulers
        train_state.schedulers = [s for s in schedulers if id(s.scheduler) not in engine_object_ids]
        train_state.own_files = engine_files

    def save_model(
        self,
        state: dict[str, Any],
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str,
        safe_serialization: bool,
    ) -> None:
        """Export the full state dict of a model for other tools: one file, or shards with an index."""
        for optimizer in self.prepared.optimizers:
            if optimizer.is_in_train_mode:
                warn_user(
                    f"save_model() exports the weights that {type(optimizer.optimizer).__name__} trains at, "
                    "not those to evaluate: call optimizer.eval() before, and optimizer.train() after"
                )
        folder = Path(save_directory)
        # Before anything is written: the main process may be the only one that calls. To get the state of a
        # sharded model, all have called.
        in_turn = collective.FirstProcessBlock.open_count > 0
        is_solo = self._may_be_solo and saves_alone("save_model", in_turn=in_turn) is not None
        ranks = CheckpointRankGroup() if is_solo else CheckpointRankGroup.current()
        with ranks.collective_section(f"export the weights to {folder}"):
            if self.writes_exports:
                files = save_weights(
                    state, folder, max_shard_size=max_shard_size, safe_serialization=safe_serialization
                )
                ranks.log("accelerator", "exported weights to %s: %s", folder, ", ".join(files))


@cache
def _register_staging_hook() -> None:
    """Register the hook once: torch has one for all optimizers, which cannot be removed while it runs."""
    register_optimizer_step_post_hook(_allocate_staging)


def _allocate_staging(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not _without_staging:
        return
    for manager in tuple(_without_staging):
        if any(each.optimizer is optimizer for each in manager.prepared.optimizers):
            _without_staging.discard(manager)
            manager.allocate_staging()


# The managers that save in the background and whose optimizers have not stepped.
_without_staging: WeakSet[CheckpointManager] = WeakSet()


def _describe_drift(by_rank: list[dict[str, Any]]) -> str:
    names = dict.fromkeys(name for facts in by_rank for name in facts)
    other = [name for name in names if len({facts.get(name) for facts in by_rank}) > 1]
    ranks = [rank for rank, facts in enumerate(by_rank) if facts.get(other[0]) != by_rank[0].get(other[0])]
    more = f" and {len(other) - 1} more" if len(other) > 1 else ""
    return (
        f"the ranks have drifted apart: {other[0]}{more} of rank {ranks[0]} is not that of rank 0, whose "
        "values are saved. A gradient was not averaged, or the ranks step differently"
    )


def register_hook(table: dict[int, Any], hook: Callable[..., None]) -> RemovableHandle:
    """Add ``hook`` to a table of hooks; return the handle that removes it."""
    handle = RemovableHandle(table)
    table[handle.id] = hook
    return handle
