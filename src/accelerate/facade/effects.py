"""The part of the ``Accelerator`` that says what became of the options that somebody asked for.

Every part that owns options looks at the objects that are there (``core/effects.py``). Here their findings
are collected: after each ``prepare``, and once more before the first optimizer step, when what is compiled
has run. Only a strict run of several processes exchanges them. Otherwise a process that finds something
leaves a notice in the key-value store of the group, and process 0 looks there in its first step.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from torch import nn

from accelerate.core.effects import Effect, Ledger, Option, differing, given, overridden
from accelerate.core.errors import SettingError
from accelerate.core.setting import load
from accelerate.core.units import show_bytes
from accelerate.data.configuration import DataLoaderConfiguration
from accelerate.data.effects import effects as of_loaders
from accelerate.data.loader import DataLoaderShard
from accelerate.facade import asked, compile
from accelerate.facade.accumulation import GradientSettings
from accelerate.facade.gradient import GradientState
from accelerate.facade.processes import Processes
from accelerate.precision import PRECISIONS
from accelerate.precision.base import Precision
from accelerate.precision.settings import PrecisionSettings
from accelerate.strategy import idle
from accelerate.strategy.base import Strategy
from accelerate.track.base import GeneralTracker
from accelerate.world import collective, together
from accelerate.world.effects import effects as of_world
from accelerate.world.world import InitProcessGroupKwargs

_numbers = count()


# Lines of this process that were printed: a second Accelerator that was asked the same says nothing new.
_PRINTED: set[str] = set()


class Effects(Processes):
    """Collects and reports effects."""

    handlers: dict[type, Any]
    precision: Precision
    strategy: Strategy
    gradient_state: GradientState
    dataloader_config: DataLoaderConfiguration
    rng_types: list[Any] | None
    log_with: list[Any]
    trackers: list[GeneralTracker]
    state: Any
    _models: list[nn.Module]
    _dataloaders: list[Any]

    def _start_effects(self, strict: bool | None, **given_in_code: Any) -> None:
        """Remembers what was asked by whom.

        Args:
            strict: the script's own wish.
            given_in_code: arguments of the constructor, by name; what is None or False was not asked for.
        """
        self._settings = load(asked.EffectsSettings, code={"strict": strict}).value
        self._launched = asked.launched()
        self._in_code = given_in_code
        self._stepped = False
        # What has been said: an option, what became of it, and why.
        self._told: set[tuple[str, bool | None, str]] = set()
        # On process 0, what others have found, with their ranks; on others, what they have found.
        self._heard: set[tuple[int, Effect]] = set()
        self._wrong: list[Effect] = []
        self._key = f"effects/{next(_numbers)}"

    def effects(self) -> Ledger:
        """What became of every option that was asked for, as far as it can be seen now. Print it: a table.

        Asked for are options that differ from their default, from code, flags, variables and files. It looks
        at this process only.
        """
        return Ledger(self._named(effect) for effect in self._found())

    def _named(self, effect: Effect) -> Effect:
        """With the flag or the line of a file that gave the launcher the option, instead of the variable."""
        origin = self._launched.get(effect.option)
        if origin is None or not effect.where.startswith("the environment variable"):
            return effect
        return dataclasses.replace(effect, where=origin.where)

    # --- every part looks at what is there

    def _found(self) -> Iterator[Effect]:
        group = self.handlers.get(InitProcessGroupKwargs)
        yield from of_world(self.world, group, self._launched, cpu=bool(self._in_code.get("cpu")))
        yield from self._of_precision()
        models = [self.strategy.unwrap(model) for model in self._models]
        yield from compile.effects(self.state.dynamo_plugin, models, stepped=self._stepped)
        yield from self.strategy.effects(self._models)
        yield from idle(self.strategy.request, self.strategy)
        yield from of_loaders(self._of_data(), self._dataloaders, self.strategy.share.count)
        yield from self._of_accumulation()
        yield from self._of_trackers()

    def _of_precision(self) -> Iterator[Effect]:
        code = {"mixed_precision": self._in_code.get("mixed_precision")}
        found = load(PrecisionSettings, code=code)
        yield from overridden(found)
        for option in given(found):
            if option.value == "no":
                continue
            if self.strategy.owns_precision:
                yield option.applied(f"by the strategy {self.strategy.name}")
            else:
                yield self._on_models(self.precision, option)
        for kind in {kind: None for each in PRECISIONS for kind in each.handler_classes}:
            for option in differing(self.handlers.get(kind)):
                if kind in self.precision.handler_classes:
                    yield option.applied()
                else:
                    yield option.failed(f"mixed_precision is {self.precision.name!r}", matters=False)

    def _on_models(self, precision: Precision, option: Option) -> Effect:
        """Seen on the prepared models, or inside of a wrapper on the user's own."""
        if not self._models:
            return option.pending("no model is prepared")
        inside = [
            self.strategy.unwrap(model) if precision.missing(model) else model for model in self._models
        ]
        return precision.effect(option, inside)

    def _of_data(self) -> Iterator[Option]:
        for option in differing(self.dataloader_config):
            own = option.name == "split_batches" and self._in_code.get("split_batches")
            yield dataclasses.replace(option, where=f"the argument {option.name}") if own else option
        if self.rng_types is not None:
            yield Option("rng_types", self.rng_types, "the argument rng_types")

    def _of_accumulation(self) -> Iterator[Effect]:
        steps = self._in_code.get("gradient_accumulation_steps")
        options = given(
            load(GradientSettings, code={"gradient_accumulation_steps": steps if steps != 1 else None})
        )
        plugin = self._in_code.get("gradient_accumulation_plugin")
        for option in (*options, *differing(plugin)):
            if option.name in ("gradient_accumulation_steps", "num_steps"):
                if self.gradient_state.num_steps != option.value:
                    yield option.failed(f"it is {self.gradient_state.num_steps} now")
                elif self._unwindowed():
                    yield option.failed(
                        "the first optimizer.step() came after the first batch: the loop needs "
                        "'with accelerator.accumulate(model):' or accelerator.windows(loader)"
                    )
                else:
                    yield option.applied(self._cost_of_waiting())
            elif option.name == "adjust_scheduler":
                yield option.failed("a schedule advances with the optimizer, whatever it says", matters=False)
            else:
                here = self.gradient_state.plugin_kwargs.get(option.name)
                yield option.seen("" if here == option.value else f"it is {here} now")

    def _cost_of_waiting(self) -> str:
        """What accumulating takes besides time, where gradients are divided otherwise."""
        more = self.strategy.waiting(self._models)
        if not more or self.gradient_state.num_steps == 1:
            return ""
        if self.gradient_state.plugin_kwargs.get("sync_each_batch"):
            return "gradients are reduced in every micro-batch, and none wait as a whole"
        return (
            f"whole gradients wait for the end of a window: {show_bytes(more)} on each process; "
            "GradientAccumulationPlugin(sync_each_batch=True) takes none of it"
        )

    def _unwindowed(self) -> bool:
        """Whether the first step was taken after one batch that is not the last, without any accumulation.

        Windows of one batch are right in any loop.
        """
        return self._stepped and self._early and self.gradient_state.num_steps != 1

    def _of_trackers(self) -> Iterator[Effect]:
        running = {tracker.name for tracker in self.trackers}
        for each in self.log_with:
            name = each.name if isinstance(each, GeneralTracker) else str(each)
            option = Option("log_with", name, "the argument log_with")
            if name in running:
                yield option.applied()
            elif self._stepped and self.is_main_process:
                yield option.failed("the first step was taken and init_trackers() has not been called")
            else:
                yield option.pending("init_trackers() starts it, on process 0")

    # --- and what is new is said

    def _report_effects(self, depth: int = 5) -> None:
        """After ``prepare``, and in the first step; ``depth`` is that of the user's line, for warnings.

        Raises:
            SettingError: the run is strict, and something was not applied; in ``prepare`` on all processes.
        """
        known = (self._named(effect) for effect in self._found())
        fresh = [e for e in known if e.applied is not None and self._is_new(e)]
        if self._settings.strict:
            self._insist(fresh)
        failed = [effect for effect in fresh if effect.wrong]
        if not self.is_main_process:
            self._notify(failed)
            return
        self._print(fresh)
        for effect in failed:
            warnings.warn(str(effect), stacklevel=depth - 1)

    def _notify(self, failed: list[Effect]) -> None:
        """Leaves a notice for process 0."""
        watch = together.current()
        self._wrong += failed
        if failed and watch is not None:
            # All of it: process 0 may not have read the notice before.
            watch.board.put(f"{self._key}/{self.process_index}", _packed(self._wrong))
            watch.board.put(self._key, "")

    def _is_new(self, effect: Effect) -> bool:
        key = (effect.option, effect.applied, effect.why if effect.failed else "")
        fresh = key not in self._told
        self._told.add(key)
        return fresh

    def _insist(self, fresh: list[Effect]) -> None:
        own = [str(effect) for effect in fresh if effect.wrong]
        # Not in a step: a process without batches takes none, and would be waited for.
        every = [own] if self._stepped else collective.all_objects(own, "the effects of a strict run")
        lines = {
            line: [rank for rank, said in enumerate(every) if line in said] for said in every for line in said
        }
        if not lines:
            return
        some = len(every) > 1
        shown = [
            f"{_ranks(ranks)}: {line}" if some and len(ranks) < len(every) else line
            for line, ranks in lines.items()
        ]
        raise SettingError(
            shown[0],
            why="; ".join(["the run is strict: what is asked for is applied, or an error", *shown[1:]]),
            fix="make it possible, or leave it out, or run without --strict (ACCELERATE_STRICT)",
        )

    def _print(self, fresh: list[Effect]) -> None:
        ledger = Ledger(fresh)
        if ledger and self._settings.effects in ("line", "table"):
            text = ledger.line if self._settings.effects == "line" else f"\n{ledger}"
            if text not in _PRINTED:
                _PRINTED.add(text)
                print(f"accelerate: {text}", file=sys.stderr, flush=True)

    def _hear_ranks(self, depth: int = 3) -> None:
        """On process 0: warns of what other processes found, and this one did not."""
        watch = together.current()
        if watch is None or not self.is_main_process or not watch.board.has(self._key):
            return
        board = watch.board
        board.drop(self._key)
        found: dict[Effect, list[int]] = {}
        own = {option for option, applied, _ in self._told if applied is False}
        for key, text in board.read([f"{self._key}/{rank}" for rank in range(1, self.num_processes)]).items():
            rank = int(key.rpartition("/")[2])
            for effect in _unpacked(text):
                if effect.option not in own and (rank, effect) not in self._heard:
                    self._heard.add((rank, effect))
                    found.setdefault(effect, []).append(rank)
        for effect, ranks in found.items():
            warnings.warn(f"{_ranks(ranks)}: {effect}", stacklevel=depth - 1)

    def _effects_of_first_step(self) -> None:
        """Called before the first step of each optimizer, after the first backward; never again."""
        if not self._stepped:
            self._stepped, self._early = True, self._steps_early()
        self._report_effects(depth=6)
        self._hear_ranks(depth=6)

    def _steps_early(self) -> bool:
        gradients = self.gradient_state
        loader = gradients.active_dataloader
        if not isinstance(loader, DataLoaderShard) or gradients.window is not None or gradients.step:
            return False
        begins = loader.micro_steps == loader.micro_steps_before == 0 and not loader.end_of_dataloader
        current = loader.position.current
        return begins and current is not None and current.batches == 1


def _ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def _packed(effects: Iterable[Effect]) -> str:
    return json.dumps([[e.option, e.text, e.where, e.why] for e in effects])


def _unpacked(text: str) -> Iterator[Effect]:
    rows: list[list[str]] = json.loads(text)
    return (Effect(option, value, where, False, why) for option, value, where, why in rows)
