"""The components of ``Accelerator``, each built with fakes alone: no Accelerator, no process group."""

from __future__ import annotations

import dataclasses
import signal
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.core.errors import PrepareError, SettingError, UnknownNameError
from accelerate.core.option_report import OptionStatus, RequestedOption
from accelerate.core.setting import load_settings
from accelerate.facade import runtime as runtimes
from accelerate.facade.checkpoint_manager import CheckpointManager, register_hook
from accelerate.facade.launch_settings import ResumeSettings
from accelerate.facade.option_report import OptionReporter
from accelerate.facade.preemption import Preemption
from accelerate.facade.preparer import PreparedObjects, PrepareOptions, Preparer
from accelerate.facade.runtime import Runtime
from accelerate.facade.tracker_set import TrackerSet
from accelerate.facade.train_loop import AccumulationContext, TrainLoop
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.precision.base import Precision
from accelerate.state import GradientState
from accelerate.strategy.base import PrepareBundle, PrepareStep, Strategy, StrategyRequest
from accelerate.tracking import GeneralTracker
from accelerate.utils import (
    AutocastKwargs,
    GradientAccumulationPlugin,
    PreemptionKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate.world.world import World


class FakeStrategy(Strategy):
    """Records what the components ask for."""

    name: ClassVar[str] = "fake"

    def __init__(self, world: World) -> None:
        super().__init__(StrategyRequest(world))
        self.calls: list[tuple[Any, ...]] = []
        self.statuses: list[OptionStatus] = []

    @classmethod
    def claims(cls, request: StrategyRequest) -> bool:
        return False

    def prepare_steps(self, bundle: PrepareBundle) -> Iterator[PrepareStep]:
        record = lambda b: self.calls.append(("prepare", b.accumulation_steps, b.split_batches))  # noqa: E731
        yield PrepareStep("fake", "to be seen", record)

    def backward(self, loss: torch.Tensor, *, sync_gradients: bool = True, **kwargs: Any) -> None:
        self.calls.append(("backward", float(loss.detach()), sync_gradients))
        loss.backward(**kwargs)

    def accumulation_context(self, models: Iterable[nn.Module], *, sync: bool) -> AbstractContextManager[Any]:
        self.calls.append(("context", len(list(models)), sync))
        return nullcontext()

    def option_statuses(self, models: Sequence[nn.Module]) -> Iterable[OptionStatus]:
        return self.statuses


class FakePrecision(Precision):
    """Computes in float32, and records what is unscaled."""

    name: ClassVar[str] = "no"

    def __init__(self, world: World) -> None:
        super().__init__(world.hardware, {})
        self.unscaled: list[torch.optim.Optimizer] = []

    def forward_context(self, options: Any = None) -> AbstractContextManager[Any]:
        return nullcontext()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self.unscaled.append(optimizer)


def fake_runtime(size: int = 1, rank: int = 0, steps: int = 1, **handlers: Any) -> Runtime:
    world = World.fake(size=size, rank=rank, device="cpu")
    gradients = GradientState.create(GradientAccumulationPlugin(num_steps=steps))
    by_class = {type(handler): handler for handler in handlers.values()}
    return Runtime(
        world, FakePrecision(world), FakeStrategy(world), by_class, gradients, TorchDynamoPlugin(backend="no")
    )


def options(**changes: Any) -> PrepareOptions:
    return dataclasses.replace(PrepareOptions(True, True, None, DataLoaderConfiguration()), **changes)


def trained(runtime: Runtime) -> tuple[Any, AcceleratedOptimizer, PreparedObjects]:
    """A prepared linear model and its optimizer."""
    model, prepared = nn.Linear(3, 1), PreparedObjects()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preparer = Preparer(runtime, prepared, options())
    bundle = preparer.make_bundle((model, optimizer), None)
    preparer.prepare(bundle)
    return *bundle.objects, prepared


# --- PreparedObjects


def test_an_object_is_listed_once_and_a_snapshot_restores() -> None:
    prepared, model = PreparedObjects(), nn.Linear(1, 1)
    prepared.add("model", model)
    prepared.add("model", model)
    assert prepared.models == [model]
    restore = prepared.snapshot()
    prepared.add("model", nn.Linear(1, 1))
    handed_out = prepared.models
    prepared.clear()
    assert prepared.models == []
    assert len(handed_out) == 2, "a list that was handed out stays as it is"
    restore()
    restore()
    assert prepared.models == [model]


# --- Preparer


def test_the_preparer_wraps_by_its_world_and_strategy() -> None:
    class Check:
        def __init__(self) -> None:
            self.checked: list[Any] = []

        def note(self, optimizer: Any) -> None:
            self.checked.append(optimizer)

    runtime, prepared, check = fake_runtime(size=4, rank=1, steps=3), PreparedObjects(), Check()
    preparer = Preparer(runtime, prepared, options(), [check.note])
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(torch.arange(8.0)))
    bundle = preparer.make_bundle((loader, schedule, optimizer, model), None)
    assert "fake: to be seen" in str(preparer.make_plan(bundle))
    assert prepared.models == []
    preparer.prepare(bundle)
    loader, schedule, optimizer, model = bundle.objects
    assert [int(batch) for (batch,) in loader] == [1, 5], "rank 1 of 4"
    assert schedule.optimizers == [optimizer]
    assert prepared.schedulers == [schedule]
    assert prepared.models == [model]
    assert model._is_accelerate_prepared
    assert runtime.strategy.calls == [("prepare", 3, False)]
    optimizer.step(), optimizer.step()
    assert check.checked == [optimizer], "before the first step only"


def test_the_preparer_reads_its_options_at_each_prepare() -> None:
    runtime, changing = fake_runtime(), options(step_scheduler_with_optimizer=False)
    preparer = Preparer(runtime, PreparedObjects(), changing)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for with_optimizer in (False, True):
        changing.step_scheduler_with_optimizer = with_optimizer
        bundle = preparer.make_bundle((torch.optim.lr_scheduler.StepLR(optimizer, 1),), None)
        preparer.prepare(bundle)
        assert bundle.objects[0].step_with_optimizer is with_optimizer


def test_the_preparer_refuses_a_dispatched_model_on_several_processes() -> None:
    plain, dispatched = nn.Linear(1, 1), nn.Linear(1, 1)
    preparer = Preparer(fake_runtime(size=2), PreparedObjects(), options())
    with pytest.raises(PrepareError, match="dispatched over several devices cannot train on 2"):
        preparer.prepare(preparer.make_bundle((plain, dispatched), None), lambda model: model is dispatched)
    assert preparer.prepared.models == []


# --- TrainLoop


def test_the_loop_divides_by_the_window_and_tells_the_strategy_when_gradients_are_complete() -> None:
    runtime = fake_runtime(steps=2)
    model, _, prepared = trained(runtime)
    loop = TrainLoop(runtime, prepared)
    runtime.strategy.calls.clear()
    for _ in range(2):
        with AccumulationContext(loop, ()):
            loop.backward(model(torch.ones(1, 3)).sum() * 0 + 6, None, {})
    assert runtime.strategy.calls == [
        ("context", 1, False),
        ("backward", 3.0, False),
        ("context", 1, True),
        ("backward", 3.0, True),
    ]


def test_the_loop_unscales_and_clips_only_complete_gradients() -> None:
    runtime = fake_runtime()
    model, optimizer, prepared = trained(runtime)
    loop = TrainLoop(runtime, prepared)
    loop.backward(10 * model(torch.ones(1, 3)).sum(), None, {})
    runtime.gradients.sync_gradients = False
    before = model.weight.grad.clone()
    turned = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    turned.grad = torch.tensor([3 + 4j])
    wide = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    wide.grad = torch.tensor([12.0], dtype=torch.float64)
    assert float(loop.clip_grad_norm([turned, wide], 1.0, 2.0)) == 13.0
    loop.clip_grad_norm(model.parameters(), 1.0, 2.0)
    loop.clip_grad_value(model.parameters(), 0.5)
    loop.unscale_gradients()
    assert torch.equal(model.weight.grad, before)
    assert runtime.precision.unscaled == []
    runtime.gradients.sync_gradients = True
    assert float(loop.clip_grad_norm(model.parameters(), 1e9, 2.0)) == pytest.approx(20.0)
    assert runtime.precision.unscaled == [], "no optimizer is looked through where losses are not scaled"
    runtime.precision.scales_loss = True
    assert float(loop.clip_grad_norm(model.parameters(), 1.0, 2.0)) == pytest.approx(20.0)
    assert runtime.precision.unscaled == [optimizer.optimizer]
    assert float(model.weight.grad.norm()) < 1


@pytest.mark.parametrize(("rank", "warns"), [(0, 1), (1, 0)])
def test_the_loop_warns_of_a_first_step_without_gradients_on_rank_0(rank: int, warns: int) -> None:
    runtime = fake_runtime(size=2, rank=rank)
    _, optimizer, prepared = trained(runtime)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        TrainLoop(runtime, prepared).check_first_step(optimizer)
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name] * warns


# --- CheckpointManager


def test_the_manager_saves_and_loads_what_is_prepared_and_registered(tmp_path: Path) -> None:
    runtime = fake_runtime()
    model, _, prepared = trained(runtime)
    manager = CheckpointManager(runtime, prepared, ProjectConfiguration(str(tmp_path)))
    counter, hooked = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), []
    manager.register([counter])
    register_hook(manager.save_hooks, lambda models, weights, folder: hooked.append((models, folder)))
    folder = manager.save(tmp_path / "a", metadata={"epoch": 3})
    assert hooked[0][0] == [model]
    weight = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    counter.param_groups[0]["lr"] = 5.0
    assert manager.load(folder, None, {}).metadata == {"epoch": 3}
    assert torch.equal(model.weight, weight)
    assert counter.param_groups[0]["lr"] == 1.0


def test_the_manager_refuses_what_has_no_state_and_options_that_nobody_knows(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path))
    manager = CheckpointManager(fake_runtime(), PreparedObjects(), project, strict=True)
    with pytest.raises(PrepareError, match="cannot be checkpointed: object"):
        manager.register([object()])
    with pytest.raises(SettingError, match=r"tag.*strategy 'fake'"):
        manager.save(tmp_path / "a", engine_options={"tag": 1})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("each_node", [False, True])
def test_who_writes_exports(each_node: bool, tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), save_on_each_node=each_node)
    writers = []
    for rank in range(4):
        runtime = fake_runtime(size=4, rank=rank)
        two_machines = World.fake(size=4, rank=rank, device="cpu", nodes=2)
        runtime = dataclasses.replace(runtime, world=two_machines)
        if CheckpointManager(runtime, PreparedObjects(), project).writes_exports:
            writers.append(rank)
    assert writers == ([0, 2] if each_node else [0])


# --- TrackerSet


class FakeTracker(GeneralTracker):
    """Keeps what is logged."""

    name = "fake"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[dict[str, Any], int | None]] = []

    @property
    def tracker(self) -> Any:
        return self.logged

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.logged.append((values, None))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.logged.append((values, step))


def test_trackers_run_on_rank_0_only() -> None:
    tracker = FakeTracker()
    main, other = TrackerSet(tracker, None, True), TrackerSet(tracker, None, False)
    with pytest.warns(UserWarning, match="call init_trackers"):
        main.log({"a": 1}, 0, {})
    for trackers in (main, other):
        trackers.start("run", {"rate": 0.1}, {}, None)
        trackers.log({"a": 2}, 1, {})
    assert tracker.logged == [({"rate": 0.1}, None), ({"a": 2}, 1)]
    assert main.get("fake", unwrap=True) is tracker.logged
    assert other.trackers == []
    with pytest.raises(UnknownNameError):
        main.get("wandb", unwrap=False)
    main.finish()
    assert main.trackers == []


# --- Preemption


def never() -> NoReturn:
    raise AssertionError("nothing asked to stop")


def preemption(runtime: Runtime, manager: CheckpointManager) -> Preemption:
    return Preemption(runtime, manager.prepared, manager, load_settings(ResumeSettings), never)


def test_saving_on_preemption_needs_automatic_names(tmp_path: Path) -> None:
    runtime = fake_runtime(handler=PreemptionKwargs(save_and_exit=True))
    for naming in (False, True):
        project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=naming)
        manager = CheckpointManager(runtime, PreparedObjects(), project)
        if naming:
            preemption(runtime, manager)
            assert runtime.gradients.loaders.on_request is not None
        else:
            with pytest.raises(SettingError, match="needs automatic names"):
                preemption(runtime, manager)


def test_no_stop_inside_of_a_window_and_no_resume_unless_asked(tmp_path: Path) -> None:
    runtime = fake_runtime(steps=2)
    manager = CheckpointManager(runtime, PreparedObjects(), ProjectConfiguration(str(tmp_path)))
    stop = preemption(runtime, manager)
    runtime.gradients.sync_gradients = False
    assert stop.should_stop() is False
    assert stop.choose_resume_checkpoint() is None


def test_a_forked_process_that_reads_it_first_installs_no_monitor(tmp_path: Path) -> None:
    """A worker of a loader, whose signals are its own."""
    runtime = dataclasses.replace(fake_runtime(), pid=-1)
    manager = CheckpointManager(runtime, PreparedObjects(), ProjectConfiguration(str(tmp_path)))
    before = signal.getsignal(signal.SIGUSR1)
    assert preemption(runtime, manager).should_stop() is False
    assert signal.getsignal(signal.SIGUSR1) is before


def test_resume_finds_the_newest_checkpoint_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_RESUME", "auto")
    runtime = fake_runtime()
    _, _, prepared = trained(runtime)
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    manager = CheckpointManager(runtime, prepared, project)
    assert preemption(runtime, manager).choose_resume_checkpoint() is None
    newest = [manager.save() for _ in range(2)][-1]
    assert preemption(runtime, manager).choose_resume_checkpoint() == newest


# --- OptionReporter


def reporter(runtime: Runtime, **constructor_options: Any) -> OptionReporter:
    return OptionReporter(
        runtime, PreparedObjects(), options(), TrackerSet(None, None, True), **constructor_options
    )


def test_an_option_that_is_not_applied_is_said_once_and_refused_when_strict() -> None:
    runtime = fake_runtime()
    runtime.strategy.statuses = [
        RequestedOption("flavour", "sweet", "the argument flavour").report_not_applied("none is left")
    ]
    usual = reporter(runtime)
    with pytest.warns(UserWarning, match="flavour=sweet .*none is left") as said:
        usual.report()
    assert Path(said[0].filename).name == Path(__file__).name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        usual.report()
    assert [status.option for status in usual.collect()] == ["flavour"]
    with pytest.raises(SettingError, match="flavour=sweet"):
        reporter(runtime, strict=True).report()


# --- the whole


def test_handlers_are_known_by_the_class_that_declares_them() -> None:
    class Mine(AutocastKwargs):
        """A subclass of a user."""

    assert set(runtimes.handlers_by_class([Mine()])) == {AutocastKwargs}
    with pytest.raises(SettingError, match="two AutocastKwargs"):
        runtimes.handlers_by_class([Mine(), AutocastKwargs()])


def test_an_accelerator_is_one_class_over_its_components() -> None:
    assert len(Accelerator.__mro__) == 3, "Accelerator, the base that states share, object"
    accelerator = Accelerator()
    accelerator._models = kept = [nn.Linear(1, 1)]
    assert accelerator._models is kept is accelerator._prepared.models
    accelerator.even_batches = False
    assert accelerator.dataloader_config.even_batches is False
    assert not hasattr(accelerator.strategy, "accelerator")
