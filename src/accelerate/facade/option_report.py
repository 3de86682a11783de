"""The option report of ``Accelerator``: which requested options were applied, and why others were not.

What is requested is known when the ``Accelerator`` is made. Each option is read back from the objects that
exist (``option_read_backs.py``, ``Strategy.option_statuses``) after each ``prepare``, and before the first
optimizer step, when compiled code has run. Only a strict run of several ranks gathers the statuses. Otherwise
a rank with a failed option writes it to the key-value store of the process group, and rank 0 reads the store
in its first step.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from itertools import count
from typing import Any
from urllib.parse import unquote

from accelerate.core import environ
from accelerate.core.errors import SettingError, name_ranks, warn_user
from accelerate.core.option_report import (
    OptionReport,
    OptionStatus,
    RequestedOption,
    non_default_options,
    report_overridden,
    requested_options,
)
from accelerate.core.setting import load_settings
from accelerate.data.loader import DataLoaderShard
from accelerate.facade import compilation
from accelerate.facade.launch_settings import (
    PrecisionSettings,
    RunReportSettings,
)
from accelerate.facade.option_read_backs import READ_BACKS, ReportedRun, added_field_status
from accelerate.facade.preparer import PreparedObjects, PrepareOptions
from accelerate.facade.runtime import Runtime
from accelerate.facade.tracker_set import TrackerSet
from accelerate.precision import PRECISIONS
from accelerate.strategy import STRATEGIES
from accelerate.strategy.base import Strategy, StrategyRequest
from accelerate.track.base import GeneralTracker
from accelerate.world import collective, watchdog
from accelerate.world.world import InitProcessGroupKwargs, ProcessDeviceSettings

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
        constructor_options: arguments of its constructor, by name; None stands for not given.

    Attributes:
        strict: an option that cannot be applied is an error.
        record_folder: where the steps of the run are recorded; None: nowhere.
        checks_numerics: losses and gradients are watched.
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
        self._run = ReportedRun(runtime, prepared, tracker_set)
        self._options, self._constructor_options = options, constructor_options
        settings = load_settings(RunReportSettings, code={"strict": strict}).value
        self.strict, self.record_folder = settings.strict, settings.record
        self.checks_numerics = settings.check_numerics
        self._style = settings.effects or (
            "table" if settings.explain else "line" if settings.strict else "none"
        )
        asked = environ.get("ACCELERATE_ASKED")
        self._launched: dict[str, RequestedOption] = {
            name: RequestedOption(name, value, str(origin))
            for name, (origin, value) in _parse_launched(asked).items()
        }
        given = constructor_options.get
        self._run_options = list(self._find_requests(given("mixed_precision"), bool(given("cpu"))))
        self._run_options += report_overridden(runtime.accumulation)
        split, decisive = given("split_batches"), options.dataloader.split_batches
        if split not in (None, decisive):
            option = RequestedOption("split_batches", split, "the argument split_batches")
            why = f"dataloader_config has split_batches={decisive}, and counts first"
            self._run_options.append(option.report_not_applied(why))
        self._loop_options = [
            *requested_options(runtime.accumulation),
            *non_default_options(given("gradient_accumulation_plugin")),
        ]
        # Whether the first step can show more of a requested option than ``prepare`` did.
        self._first_step_shows_more = False
        # The statuses reported so far: option, applied or not, and why.
        self._reported: set[tuple[str, bool | None, str]] = set()
        # On rank 0, the statuses of other ranks; on others, their own failed statuses.
        self._reported_of_ranks: set[tuple[int, OptionStatus]] = set()
        self._failed_statuses: list[OptionStatus] = []
        self._store_key = f"effects/{next(_report_ids)}"

    # --- what is requested

    def _find_requests(
        self, mixed_precision: str | None, cpu: bool
    ) -> Iterator[RequestedOption | OptionStatus]:
        """Yield the options of the world and its process group, of the launcher, and of the precision."""
        runtime, launched = self._run.runtime, self._launched
        for option in requested_options(load_settings(ProcessDeviceSettings, code={"use_cpu": cpu or None})):
            given = cpu and option.name == "use_cpu"
            yield RequestedOption("cpu", True, "the argument cpu") if given else option
        yield from non_default_options(runtime.handlers.get(InitProcessGroupKwargs))
        if "num_processes" in launched and isinstance(launched["num_processes"].value, int):
            yield launched["num_processes"]
        if "num_cpu_threads_per_process" in launched:
            yield launched["num_cpu_threads_per_process"]
        if (
            "gpu_ids" in launched
            and launched["gpu_ids"].value != "all"
            and runtime.world.device.type != "cpu"
        ):
            yield launched["gpu_ids"]
        loaded = load_settings(PrecisionSettings, code={"mixed_precision": mixed_precision})
        yield from report_overridden(loaded)
        yield from (option for option in requested_options(loaded) if option.value != "no")
        for kind, handler in runtime.handlers.items():
            if any(kind in each.handler_classes for each in PRECISIONS):
                used = kind in runtime.precision.handler_classes
                reason = f"mixed_precision is {runtime.precision.name!r}"
                for option in non_default_options(handler):
                    why = runtime.precision.explain_unused(option.name) if used else reason
                    yield option.report_not_applied(why, matters=False) if why else option.report_applied()

    # --- what the objects show

    def collect(self) -> OptionReport:
        """Return the status of every requested option on this rank, as far as known now."""
        return OptionReport(self._collect_statuses())

    def _collect_statuses(self, harmless: bool = True) -> Iterator[OptionStatus]:
        """Yield the statuses; those that can make no difference only where ``harmless`` ones are wanted."""
        run, runtime, strategy = self._run, self._run.runtime, self._run.runtime.strategy
        trackers = [
            each.name if isinstance(each, GeneralTracker) else str(each) for each in run.tracker_set.log_with
        ]
        # The options of loaders may change between two calls of ``prepare``.
        loader_options = list(non_default_options(self._options.dataloader))
        for index, option in enumerate(loader_options):
            if option.name == "split_batches" and self._constructor_options.get("split_batches"):
                loader_options[index] = dataclasses.replace(option, where="the argument split_batches")
        rng_types = self._options.rng_types
        if rng_types is not None:
            loader_options.append(RequestedOption("rng_types", rng_types, "the argument rng_types"))
        loop = [
            *loader_options,
            *self._loop_options,
            *(RequestedOption("log_with", name, "the argument log_with") for name in trackers),
        ]
        models = [strategy.unwrap(model) for model in run.prepared.models]
        look = READ_BACKS.get
        for status in (
            *(
                each if isinstance(each, OptionStatus) else look(each.name, added_field_status)(each, run)
                for each in self._run_options
            ),
            *(
                compilation.option_statuses(runtime.compiler, models, stepped=run.has_stepped)
                if runtime.compiler.has_options
                else ()
            ),
            *strategy.option_statuses(run.prepared.models),
            *(unused_options(strategy.request, strategy) if harmless or strategy.request.passed_over else ()),
            *(look(option.name, added_field_status)(option, run) for option in loop),
        ):
            # The flag or line of a file that gave the launcher the option, instead of the variable.
            origin = self._launched.get(status.option)
            by_launcher = origin is not None and status.where.startswith("the environment variable")
            yield dataclasses.replace(status, where=origin.where) if origin and by_launcher else status

    # --- reports of new statuses

    def report(self) -> None:
        """Report new statuses.

        Raises:
            SettingError: the run is strict, and an option was not applied; in ``prepare`` on all ranks.
        """
        runtime, fresh = self._run.runtime, list[OptionStatus]()
        num_steps = runtime.gradients.plugin_kwargs.get("num_steps") or 1
        self._first_step_shows_more = runtime.compiler.has_options or num_steps != 1
        for status in self._collect_statuses(harmless=self._style != "none"):
            key = (status.option, status.applied, "" if status.applied else status.why)
            if status.applied is None:
                self._first_step_shows_more = True
            elif key not in self._reported:
                self._reported.add(key)
                fresh.append(status)
        if self.strict:
            self._refuse_not_applied(fresh)
        failed = [status for status in fresh if not status.applied and status.matters]
        if runtime.world.rank == 0:
            if self._style != "none":
                self._print_report(fresh)
            for status in failed:
                warn_user(str(status))
        elif failed:
            self._publish_failures(failed)
        if self._run.tracker_set.recorder is not None:
            self._run.tracker_set.recorder.record_options(self._launched.values(), self.collect())

    def _publish_failures(self, failed: list[OptionStatus]) -> None:
        """Write failed statuses to the store for rank 0."""
        current_watchdog = watchdog.current()
        self._failed_statuses += failed
        if current_watchdog is not None:
            # All of them: rank 0 may not have read earlier ones.
            rows = [[e.option, e.value_text, e.where, e.why] for e in self._failed_statuses]
            current_watchdog.store.put(f"{self._store_key}/{self._run.runtime.world.rank}", json.dumps(rows))
            current_watchdog.store.put(self._store_key, "")

    def _refuse_not_applied(self, fresh: list[OptionStatus]) -> None:
        local_failures = [str(status) for status in fresh if status.is_failure]
        # Not in a step: a rank without batches takes none, and the others would wait for it.
        failures_of_ranks = (
            [local_failures]
            if self._run.has_stepped
            else collective.compare_objects(local_failures, "the effects of a strict run")
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
            f"{name_ranks(ranks)}: {line}" if several and len(ranks) < len(failures_of_ranks) else line
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
        text = report.summary if self._style == "line" else f"requested options\n{report}"
        if report and text not in _PRINTED:
            _PRINTED.add(text)
            print(f"accelerate: {text}", file=sys.stderr, flush=True)

    def warn_of_other_ranks(self) -> None:
        """Warn on rank 0 of failed options that only other ranks have reported."""
        current_watchdog = watchdog.current()
        if (
            current_watchdog is None
            or self._run.runtime.world.rank != 0
            or not current_watchdog.store.has(self._store_key)
        ):
            return
        store = current_watchdog.store
        store.delete(self._store_key)
        ranks_of: dict[OptionStatus, list[int]] = {}
        local_options = {option for option, applied, _ in self._reported if applied is False}
        for key, text in store.read(
            [f"{self._store_key}/{rank}" for rank in range(1, self._run.runtime.world.size)]
        ).items():
            rank = int(key.rpartition("/")[2])
            for option, value, where, why in json.loads(text):
                status = OptionStatus(option, value, where, False, why)
                if status.option not in local_options and (rank, status) not in self._reported_of_ranks:
                    self._reported_of_ranks.add((rank, status))
                    ranks_of.setdefault(status, []).append(rank)
        for status, ranks in ranks_of.items():
            warn_user(f"{name_ranks(ranks)}: {status}")

    def report_first_step(self, optimizer: Any) -> None:
        """Report before the first step of an optimizer, after the first backward, what only it can show."""
        run = self._run
        is_first, run.has_stepped = not run.has_stepped, True
        if self._first_step_shows_more:
            if is_first:
                run.stepped_early = self._is_first_step_early()
            self.report()
        self.warn_of_other_ranks()

    def _is_first_step_early(self) -> bool:
        """Return whether the loop is at the first of several batches, outside of any accumulation."""
        gradients = self._run.runtime.gradients
        loader = gradients.active_dataloader
        if not isinstance(loader, DataLoaderShard) or gradients.window is not None or gradients.step:
            return False
        begins = loader.micro_steps == loader.expected_micro_steps == 0 and not loader.end_of_dataloader
        current = loader.position.current
        return begins and current is not None and current.batches == 1


def unused_options(request: StrategyRequest, chosen: Strategy) -> Iterator[OptionStatus]:
    """Yield the options requested of strategies that were not chosen; none of them is applied.

    Strategies share some: FSDP1 and FSDP2 have the same switch and plugin.
    """
    names = {option.name for option in chosen.requested_options(request)}
    usual = f"the strategy is {chosen.name}" if request.world.size > 1 else "there is one process"
    for strategy in STRATEGIES:
        if strategy is type(chosen):
            continue
        reason = strategy.selection.unused_reason if strategy in request.passed_over else ""
        for option in strategy.requested_options(request):
            if option.name not in names:
                names.add(option.name)
                yield option.report_not_applied(reason or usual, matters=bool(reason))


def _parse_launched(asked: str | None) -> dict[str, Any]:
    """Return the options requested of the launcher; DeepSpeed's hands them on percent-encoded."""
    if not asked:
        return {}
    return json.loads(asked if asked.startswith("{") else unquote(asked))
