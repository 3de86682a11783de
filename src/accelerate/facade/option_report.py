"""The option report of ``Accelerator``: which requested options were applied, and why others were not.

Every package that owns options checks them on the prepared objects (``core/option_report.py``). Here the
statuses are collected: after each ``prepare``, and before the first optimizer step, when compiled code
has run. Only a strict run of several ranks gathers them. Otherwise a rank with a failed option writes it
to the key-value store of the process group, and rank 0 reads the store in its first step.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from accelerate.core.errors import SettingError
from accelerate.core.option_report import (
    OptionReport,
    OptionStatus,
    RequestedOption,
    non_default_options,
    report_overridden,
    requested_options,
)
from accelerate.core.setting import load_settings
from accelerate.core.units import show_bytes
from accelerate.core.user_warning import warn_user
from accelerate.data.loader import DataLoaderShard
from accelerate.data.option_report import loader_option_statuses
from accelerate.facade import compilation
from accelerate.facade.launch_settings import (
    GradientAccumulationSettings,
    OptionReportSettings,
    launcher_options,
)
from accelerate.facade.prepared_objects import PreparedObjects
from accelerate.facade.preparer import PrepareOptions
from accelerate.facade.runtime import Runtime
from accelerate.facade.tracker_set import TrackerSet
from accelerate.precision import PRECISIONS
from accelerate.precision.base import Precision
from accelerate.precision.settings import PrecisionSettings
from accelerate.strategy import unused_options
from accelerate.track.base import GeneralTracker
from accelerate.world import collective, watchdog
from accelerate.world.option_report import world_option_statuses
from accelerate.world.world import InitProcessGroupKwargs

_report_ids = count()


# Lines that this process has printed: a second Accelerator with the same options prints nothing new.
_PRINTED: set[str] = set()


class OptionReporter:
    """Collects and reports the statuses of options.

    Args:
        runtime: the world, precision and strategy of the run.
        prepared: the objects on which statuses are read.
        options: those of ``prepare``.
        tracker_set: the trackers of the run.
        strict: the argument of the ``Accelerator``.
        constructor_options: arguments of its constructor, by name; None or False stand for not given.
    """

    def __init__(
        self,
        runtime: Runtime,
        prepared: PreparedObjects,
        options: PrepareOptions,
        tracker_set: TrackerSet,
        strict: bool | None = None,
        **constructor_options: Any,
    ) -> None:
        self.runtime, self.prepared, self.options = runtime, prepared, options
        self.tracker_set, self._constructor_options = tracker_set, constructor_options
        self._settings = load_settings(OptionReportSettings, code={"strict": strict}).value
        self._launcher_options = launcher_options()
        self._has_stepped = self._first_step_early = False
        # Whether the first step can show more of a requested option than ``prepare`` did.
        self._first_step_shows_more = False
        # The statuses reported so far: option, applied or not, and why.
        self._reported: set[tuple[str, bool | None, str]] = set()
        # On rank 0, the statuses of other ranks; on others, their own failed statuses.
        self._reported_of_ranks: set[tuple[int, OptionStatus]] = set()
        self._failed_statuses: list[OptionStatus] = []
        self._store_key = f"effects/{next(_report_ids)}"

    @property
    def strict(self) -> bool:
        """True when an option that cannot be applied is an error."""
        return self._settings.strict

    def collect(self) -> OptionReport:
        """Return the status of every requested option on this rank, as far as known now."""
        return OptionReport(self._with_origin(status) for status in self._collect_statuses())

    def _with_origin(self, status: OptionStatus) -> OptionStatus:
        """Name the flag or config line that gave the launcher the option, instead of the variable."""
        origin = self._launcher_options.get(status.option)
        if origin is None or not status.where.startswith("the environment variable"):
            return status
        return dataclasses.replace(status, where=origin.where)

    # --- statuses of options, by package

    def _collect_statuses(self) -> Iterator[OptionStatus]:
        runtime, strategy, prepared = self.runtime, self.runtime.strategy, self.prepared
        group = runtime.handlers.get(InitProcessGroupKwargs)
        yield from world_option_statuses(
            runtime.world, group, self._launcher_options, cpu=bool(self._constructor_options.get("cpu"))
        )
        yield from self._precision_statuses()
        models = [strategy.unwrap(model) for model in prepared.models]
        yield from compilation.option_statuses(runtime.compiler, models, stepped=self._has_stepped)
        yield from strategy.option_statuses(prepared.models)
        yield from unused_options(strategy.request, strategy)
        yield from loader_option_statuses(self._data_options(), prepared.loaders, strategy.data_shard.count)
        yield from self._accumulation_statuses()
        yield from self._tracker_statuses()

    def _precision_statuses(self) -> Iterator[OptionStatus]:
        code = {"mixed_precision": self._constructor_options.get("mixed_precision")}
        loaded = load_settings(PrecisionSettings, code=code)
        yield from report_overridden(loaded)
        for option in requested_options(loaded):
            if option.value == "no":
                continue
            if self.runtime.strategy.owns_step:
                yield option.report_applied(f"by the strategy {self.runtime.strategy.name}")
            else:
                yield self._model_precision_status(self.runtime.precision, option)
        for kind in {kind: None for each in PRECISIONS for kind in each.handler_classes}:
            for option in non_default_options(self.runtime.handlers.get(kind)):
                if kind in self.runtime.precision.handler_classes:
                    yield option.report_applied()
                else:
                    yield option.report_not_applied(
                        f"mixed_precision is {self.runtime.precision.name!r}", matters=False
                    )

    def _model_precision_status(self, precision: Precision, option: RequestedOption) -> OptionStatus:
        """Check the precision on the prepared models, or on the user's models inside of wrappers."""
        if not self.prepared.models:
            return option.report_pending("no model is prepared")
        inside = [
            self.runtime.strategy.unwrap(model) if precision.explain_missing(model) else model
            for model in self.prepared.models
        ]
        return precision.report_option(option, inside)

    def _data_options(self) -> Iterator[RequestedOption]:
        for option in non_default_options(self.options.dataloader):
            argument = option.name == "split_batches" and self._constructor_options.get("split_batches")
            yield dataclasses.replace(option, where=f"the argument {option.name}") if argument else option
        if self.options.rng_types is not None:
            yield RequestedOption("rng_types", self.options.rng_types, "the argument rng_types")

    def _accumulation_statuses(self) -> Iterator[OptionStatus]:
        steps = self._constructor_options.get("gradient_accumulation_steps")
        options = requested_options(
            load_settings(
                GradientAccumulationSettings,
                code={"gradient_accumulation_steps": steps if steps != 1 else None},
            )
        )
        plugin = self._constructor_options.get("gradient_accumulation_plugin")
        for option in (*options, *non_default_options(plugin)):
            if option.name in ("gradient_accumulation_steps", "num_steps"):
                if self.runtime.gradients.num_steps != option.value:
                    yield option.report_not_applied(f"it is {self.runtime.gradients.num_steps} now")
                elif self._stepped_without_accumulation():
                    yield option.report_not_applied(
                        "the first optimizer.step() came after the first batch: the loop needs "
                        "'with accelerator.accumulate(model):' or accelerator.windows(loader)"
                    )
                else:
                    yield option.report_applied(self._describe_accumulation_cost())
            elif option.name == "adjust_scheduler":
                yield option.report_not_applied(
                    "a schedule advances with the optimizer, whatever it says", matters=False
                )
            else:
                value = self.runtime.gradients.plugin_kwargs.get(option.name)
                yield option.report_unless("" if value == option.value else f"it is {value} now")

    def _describe_accumulation_cost(self) -> str:
        """Describe the memory that accumulation takes where gradients are sharded otherwise."""
        more = self.runtime.strategy.accumulation_bytes(self.prepared.models)
        if not more or self.runtime.gradients.num_steps == 1:
            return ""
        if self.runtime.gradients.plugin_kwargs.get("sync_each_batch"):
            return "gradients are reduced in every micro-batch, so no unsharded gradients are kept"
        return (
            f"unsharded gradients are kept until the end of a window: {show_bytes(more)} on each process; "
            "GradientAccumulationPlugin(sync_each_batch=True) takes none of it"
        )

    def _stepped_without_accumulation(self) -> bool:
        """Return whether the first step came after one batch that is not the last, without accumulation.

        One micro-batch per step needs no accumulation.
        """
        return self._has_stepped and self._first_step_early and self.runtime.gradients.num_steps != 1

    def _tracker_statuses(self) -> Iterator[OptionStatus]:
        running = {tracker.name for tracker in self.tracker_set.trackers}
        for each in self.tracker_set.log_with:
            name = each.name if isinstance(each, GeneralTracker) else str(each)
            option = RequestedOption("log_with", name, "the argument log_with")
            if name in running:
                yield option.report_applied()
            elif self._has_stepped and self.runtime.world.rank == 0:
                yield option.report_not_applied(
                    "the first step was taken and init_trackers() has not been called"
                )
            else:
                yield option.report_pending("init_trackers() starts it, on process 0")

    # --- reports of new statuses

    def report(self) -> None:
        """Report new statuses.

        Raises:
            SettingError: the run is strict, and an option was not applied; in ``prepare`` on all ranks.
        """
        statuses = [self._with_origin(status) for status in self._collect_statuses()]
        self._first_step_shows_more = self._can_first_step_change(statuses)
        fresh = [e for e in statuses if e.applied is not None and self._is_new(e)]
        if self._settings.strict:
            self._refuse_not_applied(fresh)
        failed = [status for status in fresh if status.is_failure]
        if self.runtime.world.rank != 0:
            self._publish_failures(failed)
            return
        self._print_report(fresh)
        for status in failed:
            warn_user(str(status))

    def _can_first_step_change(self, statuses: Iterable[OptionStatus]) -> bool:
        """Return whether the first step shows more: what is compiled has run, windows are counted."""
        return (
            self.runtime.compiler.is_enabled
            or self.runtime.gradients.num_steps != 1
            or any(status.applied is None for status in statuses)
        )

    def _publish_failures(self, failed: list[OptionStatus]) -> None:
        """Write failed statuses to the store for rank 0."""
        current_watchdog = watchdog.current()
        self._failed_statuses += failed
        if failed and current_watchdog is not None:
            # All of them: rank 0 may not have read earlier ones.
            current_watchdog.store.put(
                f"{self._store_key}/{self.runtime.world.rank}", _to_json(self._failed_statuses)
            )
            current_watchdog.store.put(self._store_key, "")

    def _is_new(self, status: OptionStatus) -> bool:
        key = (status.option, status.applied, status.why if status.not_applied else "")
        fresh = key not in self._reported
        self._reported.add(key)
        return fresh

    def _refuse_not_applied(self, fresh: list[OptionStatus]) -> None:
        local_failures = [str(status) for status in fresh if status.is_failure]
        # Not in a step: a rank without batches takes none, and the others would wait for it.
        failures_of_ranks = (
            [local_failures]
            if self._has_stepped
            else collective.all_gather_object(local_failures, "the effects of a strict run")
        )
        lines = {
            line: [rank for rank, failures in enumerate(failures_of_ranks) if line in failures]
            for failures in failures_of_ranks
            for line in failures
        }
        if not lines:
            return
        several = len(failures_of_ranks) > 1
        shown = [
            f"{_format_ranks(ranks)}: {line}" if several and len(ranks) < len(failures_of_ranks) else line
            for line, ranks in lines.items()
        ]
        raise SettingError(
            shown[0],
            why="; ".join(
                ["the run is strict: a requested option that is not applied is an error", *shown[1:]]
            ),
            fix="make it possible, or leave it out, or run without --strict (ACCELERATE_STRICT)",
        )

    def _print_report(self, fresh: list[OptionStatus]) -> None:
        report = OptionReport(fresh)
        settings = self._settings
        style = settings.effects or ("table" if settings.explain else "line" if settings.strict else "none")
        if report and style != "none":
            text = report.summary if style == "line" else f"\n{report}"
            if text not in _PRINTED:
                _PRINTED.add(text)
                print(f"accelerate: {text}", file=sys.stderr, flush=True)

    def warn_of_other_ranks(self) -> None:
        """Warn on rank 0 of failed options that only other ranks have reported."""
        current_watchdog = watchdog.current()
        if (
            current_watchdog is None
            or self.runtime.world.rank != 0
            or not current_watchdog.store.has(self._store_key)
        ):
            return
        store = current_watchdog.store
        store.delete(self._store_key)
        ranks_of: dict[OptionStatus, list[int]] = {}
        local_options = {option for option, applied, _ in self._reported if applied is False}
        for key, text in store.read(
            [f"{self._store_key}/{rank}" for rank in range(1, self.runtime.world.size)]
        ).items():
            rank = int(key.rpartition("/")[2])
            for status in _from_json(text):
                if status.option not in local_options and (rank, status) not in self._reported_of_ranks:
                    self._reported_of_ranks.add((rank, status))
                    ranks_of.setdefault(status, []).append(rank)
        for status, ranks in ranks_of.items():
            warn_user(f"{_format_ranks(ranks)}: {status}")

    def report_first_step(self, optimizer: Any) -> None:
        """Report before the first step of an optimizer, after the first backward, what only it can show."""
        is_first, self._has_stepped = not self._has_stepped, True
        if self._first_step_shows_more:
            self._first_step_early = self._is_first_step_early() if is_first else self._first_step_early
            self.report()
        self.warn_of_other_ranks()

    def _is_first_step_early(self) -> bool:
        gradients = self.runtime.gradients
        loader = gradients.active_dataloader
        if not isinstance(loader, DataLoaderShard) or gradients.window is not None or gradients.step:
            return False
        begins = loader.micro_steps == loader.micro_steps_before == 0 and not loader.end_of_dataloader
        current = loader.position.current
        return begins and current is not None and current.batches == 1


def _format_ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def _to_json(effects: Iterable[OptionStatus]) -> str:
    return json.dumps([[e.option, e.value_text, e.where, e.why] for e in effects])


def _from_json(text: str) -> Iterator[OptionStatus]:
    rows: list[list[str]] = json.loads(text)
    return (OptionStatus(option, value, origin, False, reason) for option, value, origin, reason in rows)
