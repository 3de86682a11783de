"""What became of options that were asked for: applied, not applied and why (F15)."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.cli.options import SCRIPT_SETTINGS
from accelerate.core.errors import SettingError
from accelerate.core.option_report import OptionReport, OptionStatus, RequestedOption
from accelerate.facade.option_read_backs import READ_BACKS
from accelerate.facade.option_report import OptionReporter
from accelerate.launch.base import origin_variables
from accelerate.launch.launch_request import read_request
from accelerate.precision import autocast
from accelerate.precision.fp8 import FP8MixedPrecision
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
)
from tests.support.torch_versions import is_torch


class Net(nn.Module):
    """Two blocks; of the user's own class, since torch compiles none of its own by themselves."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width), Block(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    """One layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x).tanh()


def quietly(accelerator: Accelerator, *objects: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return accelerator.prepare(*objects)


def found(accelerator: Accelerator) -> dict[str, OptionStatus]:
    return {effect.option: effect for effect in accelerator.effects()}


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(torch.randn(8, 16), batch_size=2, **options)  # type: ignore[arg-type]


# ---------------------------------------------------------------- how it is said


def test_an_effect_reads_as_it_was_asked() -> None:
    flag = RequestedOption("dynamo_backend", "inductor", "--dynamo_backend")
    assert str(flag.report_not_applied("it is off")) == "--dynamo_backend inductor was not applied: it is off"
    assert str(RequestedOption("debug", True, "--debug").report_applied()) == "--debug was applied"
    code = RequestedOption("mixed_precision", "bf16", "the argument mixed_precision").report_pending(
        "no model"
    )
    assert str(code) == "mixed_precision=bf16 (the argument mixed_precision) is not applied yet: no model"


@pytest.mark.parametrize(
    ("done", "applied", "why"), [(0, False, "none of 4 x: odd"), (3, True, "3 of 4 x: odd")]
)
def test_what_is_counted(done: int, applied: bool, why: str) -> None:
    effect = RequestedOption("a", 1, "b").report_count(done, 4, "x", "odd")
    assert (effect.applied, effect.why) == (applied, why)


def test_a_ledger_is_a_list_and_a_table_and_a_line() -> None:
    one, two = (
        RequestedOption("a", 1, "--a").report_applied(),
        RequestedOption("b", "x", "c.yaml, line 2: b").report_not_applied("no"),
    )
    ledger = OptionReport([one, two, RequestedOption("c", 3, "--c").report_pending("later")])
    assert ledger.summary == "applied: a=1; not applied: b=x"
    rows = str(ledger).splitlines()
    assert rows[0].split() == ["option", "effect", "asked", "by", "why"]
    assert rows[2].split() == ["b=x", "not", "applied", "c.yaml,", "line", "2:", "b", "no"]
    assert (str(OptionReport()), OptionReport().summary) == ("nothing was asked for", "")


def test_nothing_asked_nothing_said(capfd: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator()
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer, data = accelerator.prepare(model, sgd(model), loader())
        for batch in data:
            step(accelerator, model, optimizer, batch)
    assert not accelerator.effects()
    assert capfd.readouterr() == ("", "")


def test_what_is_applied_is_not_said_either(capfd: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.prepare(Net())
    assert capfd.readouterr() == ("", "")
    assert {e.option: e.applied for e in accelerator.effects()} == {"cpu": True, "mixed_precision": True}


def test_each_is_said_once_at_the_line_of_prepare() -> None:
    accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(mode="max-autotune"))
    with pytest.warns(UserWarning, match="dynamo_mode=max-autotune .*no dynamo_backend") as said:
        accelerator.prepare(Net())
    assert [os.path.basename(warning.filename) for warning in said] == [os.path.basename(__file__)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.prepare(Net())


# ---------------------------------------------------------------- strict


def test_strict_is_an_error_that_names_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocast, "attach_autocast", lambda *_, **__: None)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True, strict=True)
    with pytest.raises(SettingError) as caught:
        accelerator.prepare(Net())
    assert "mixed_precision=bf16 (the argument mixed_precision) was not applied" in str(caught.value)
    assert "no autocast is attached to the Net" in str(caught.value)


def test_strict_by_variable_and_not_by_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_STRICT", "1")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "max-autotune")
    with pytest.raises(SettingError, match="ACCELERATE_DYNAMO_MODE"):
        Accelerator().prepare(Net())
    with pytest.warns(UserWarning, match="no dynamo_backend"):
        Accelerator(strict=False).prepare(Net())


def test_strict_lets_pass_what_makes_no_difference() -> None:
    """One process exchanges no gradients: how they would travel changes nothing."""
    handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(kwargs_handlers=[handler], strict=True)
    accelerator.prepare(Net())
    effect = found(accelerator)["find_unused_parameters"]
    assert (effect.not_applied, effect.is_failure, effect.why) == (True, False, "there is one process")


@dataclass
class NamedGroup(InitProcessGroupKwargs):
    """Options of a program's own beside those of this package."""

    group_name: str = ""


@dataclass
class NamedLoaders(DataLoaderConfiguration):
    """Others."""

    label: str = ""


@dataclass
class NamedSteps(GradientAccumulationPlugin):
    """Others."""

    reason: str = ""


def test_fields_that_a_program_adds_to_a_class_of_options_are_its_own() -> None:
    accelerator = Accelerator(
        kwargs_handlers=[NamedGroup(group_name="a")],
        dataloader_config=NamedLoaders(label="b"),
        gradient_accumulation_plugin=NamedSteps(reason="c"),
        strict=True,
    )
    accelerator.prepare(Net())
    found_names = {name for name, status in found(accelerator).items() if "own class" in status.why}
    assert found_names == {"group_name", "label", "reason"}
    for kind in (InitProcessGroupKwargs, DataLoaderConfiguration, GradientAccumulationPlugin):
        assert {field.name for field in fields(kind)} <= READ_BACKS.keys()


# ---------------------------------------------------------------- number formats


def test_precision_is_seen_on_the_model() -> None:
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    assert found(accelerator)["mixed_precision"].why == "no model is prepared"
    model = accelerator.prepare(Net())
    assert found(accelerator)["mixed_precision"].applied
    autocast.detach_autocast(model)
    assert "no autocast is attached" in found(accelerator)["mixed_precision"].why


def test_options_of_a_precision_that_is_not_used() -> None:
    accelerator = Accelerator(
        mixed_precision="bf16", cpu=True, kwargs_handlers=[GradScalerKwargs(init_scale=4.0)]
    )
    quietly(accelerator, Net())
    assert found(accelerator)["init_scale"].why == "mixed_precision is 'bf16'"
    accelerator = Accelerator(
        mixed_precision="bf16", cpu=True, kwargs_handlers=[AutocastKwargs(enabled=False)]
    )
    quietly(accelerator, Net())
    assert "AutocastKwargs(enabled=False)" in found(accelerator)["mixed_precision"].why


def test_a_flag_that_the_script_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    monkeypatch.setenv("ACCELERATE_ASKED", json.dumps({"mixed_precision": ["--mixed_precision", "fp16"]}))
    with pytest.warns(UserWarning, match="--mixed_precision fp16 was not applied: .* says 'bf16'"):
        Accelerator(mixed_precision="bf16", cpu=True).prepare(Net())
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Accelerator(mixed_precision="bf16", cpu=True).prepare(Net())


def test_a_number_of_micro_batches_that_the_launch_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in 1.15, where no plugin is given."""
    asked = {"gradient_accumulation_steps": ["--gradient_accumulation_steps", 4]}
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_ASKED", json.dumps(asked))
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    with pytest.warns(UserWarning, match="=2 .the argument gradient_.* was not applied: .* says 4, "):
        accelerator.prepare(Net())
    assert accelerator.gradient_accumulation_steps == 4
    for same in (1, 4):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            accelerator = Accelerator(gradient_accumulation_steps=same, cpu=True)
            accelerator.prepare(Net())
        assert accelerator.gradient_accumulation_steps == 4


def test_an_option_that_lost_is_not_in_the_line_as_applied_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=True)
    with pytest.warns(UserWarning, match="was not applied"):
        accelerator.prepare(Net())
    applied, _, refused = accelerator.effects().summary.partition("; not applied: ")
    assert applied.startswith("applied: cpu=True")
    assert refused == "mixed_precision=fp16, gradient_accumulation_steps=2"


def test_layers_that_are_not_converted_fail_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """F15: the report counts layers on the prepared model, not in the plan."""
    monkeypatch.setattr(FP8MixedPrecision, "attach", lambda self, model: None)
    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    quietly(accelerator, nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))))
    said = found(accelerator)["mixed_precision"]
    assert said.is_failure
    assert said.why.startswith("none of 3 linear layers convert: ")


# ---------------------------------------------------------------- compilation


@pytest.mark.parametrize("regional", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_compilation_is_seen(regional: bool, precision: str) -> None:
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    accelerator = Accelerator(mixed_precision=precision, cpu=True, dynamo_plugin=plugin)
    model = Net()
    assert found(accelerator)["dynamo_backend"].applied is None
    model, optimizer = accelerator.prepare(model, sgd(model))
    step(accelerator, model, optimizer, torch.randn(2, 16))
    assert found(accelerator)["dynamo_backend"].applied
    if regional:
        assert found(accelerator)["dynamo_use_regional_compilation"].why == "2 modules are compiled"


@contextmanager
def impossible(how: str) -> Iterator[None]:
    """Makes compilation do nothing, in one of the ways in which it does."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if how == "variable":
            patch.setenv("TORCHDYNAMO_DISABLE", "1")
        elif how == "config":
            # These modules take attributes back in a way of their own.
            stack.enter_context(dynamo().config.patch(disable=True))
        elif how == "method":
            patch.setattr(nn.Module, "compile", lambda *_, **__: None)
        elif how == "compiler":
            patch.setattr(torch, "compile", lambda function, **_: function)
        yield


def dynamo() -> Any:
    return import_module("torch._dynamo")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("variable", "TORCHDYNAMO_DISABLE=1"),
        ("config", "torch._dynamo.config.disable"),
        ("method", "no part of the Net is compiled"),
        ("compiler", "no part of the Net is compiled"),
    ],
)
def test_compilation_that_is_impossible(how: str, why: str) -> None:
    """F15"""
    with impossible(how):
        with pytest.warns(UserWarning, match="dynamo_backend=EAGER .* was not applied") as said:
            Accelerator(dynamo_backend="eager").prepare(Net())
        assert why in str(said[0].message)
        with pytest.raises(SettingError, match="dynamo_backend=EAGER"):
            Accelerator(dynamo_backend="eager", strict=True).prepare(Net())


@pytest.fixture
def counters() -> Any:
    """Torch's own counts, from nothing."""
    from torch._dynamo.utils import clear_compilation_metrics, counters

    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    return counters


class Printing(nn.Module):
    """Its forward has a graph break, and another graph for each number of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("a graph ends here")
        return self.inner(x)


def test_graph_breaks_and_recompilations_are_counted_with_their_reasons(counters: Any) -> None:
    accelerator = Accelerator(dynamo_backend="eager")
    model = Printing()
    model, optimizer = accelerator.prepare(model, sgd(model))
    assert found(accelerator)["dynamo_backend"].why == ""
    for x in (torch.randn(2, 16), torch.randn(2, 3, 16)):
        step(accelerator, model, optimizer, x)
    why = found(accelerator)["dynamo_backend"].why
    assert "2 graphs, 1 graph break (" in why
    assert "print" in why
    assert "1 recompilation (" in why
    assert "rank mismatch. expected 2, actual 3" in why


def test_the_folder_of_compiled_code_is_set_unless_torch_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setenv(variable, "")
    monkeypatch.delenv(variable)
    cache_dir = import_module("torch._inductor.runtime.cache_dir_utils").cache_dir
    kept = TorchDynamoPlugin(backend="inductor", cache_dir=str(tmp_path / "kept"))
    accelerator = Accelerator(dynamo_plugin=kept)
    accelerator.prepare(Net())
    assert cache_dir() == str(tmp_path / "kept")
    assert found(accelerator)["dynamo_cache_dir"].applied
    monkeypatch.setenv(variable, str(tmp_path / "torch"))
    with pytest.warns(
        UserWarning, match="dynamo_cache_dir=.*TORCHINDUCTOR_CACHE_DIR is .*, and counts first"
    ):
        Accelerator(dynamo_plugin=kept).prepare(Net())
    assert cache_dir() == str(tmp_path / "torch")
    monkeypatch.delenv(variable)
    with pytest.warns(UserWarning, match="only inductor keeps compiled code"):
        Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="eager", cache_dir="x")).prepare(Net())


@pytest.mark.skipif(is_torch(">=2.15"), reason="this torch compiles its own modules")
def test_a_compiled_call_that_torch_skips_shows_in_the_first_step(counters: Any) -> None:
    """F15: torch compiles no code of its own modules, and says nothing."""
    accelerator = Accelerator(dynamo_backend="eager")
    model = nn.Sequential(nn.Linear(16, 1))
    model, optimizer = accelerator.prepare(model, sgd(model))
    assert found(accelerator)["dynamo_backend"].applied
    with pytest.warns(UserWarning, match="torch compiles no code of modules that are its own") as said:
        step(accelerator, model, optimizer, torch.randn(2, 16))
    assert os.path.basename(said[0].filename) == os.path.basename(__file__)


def test_errors_of_the_compiler_that_torch_hides(counters: Any) -> None:
    """F15"""

    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such compiler")

    accelerator = Accelerator(dynamo_backend="eager", strict=True)
    accelerator.state.dynamo_plugin.to_kwargs = lambda: {"backend": broken}
    model = Net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    hidden = dynamo().config.patch(suppress_errors=True)
    with hidden, pytest.raises(SettingError, match="suppress_errors hid an error"):
        step(accelerator, model, optimizer, torch.randn(2, 16))


def test_blocks_that_are_asked_for_and_are_not_there() -> None:
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    with pytest.warns(UserWarning, match="no model has repeated blocks"):
        Accelerator(dynamo_plugin=plugin).prepare(Block(16))


# ---------------------------------------------------------------- the world


def test_a_group_that_one_process_does_not_have() -> None:
    handler = InitProcessGroupKwargs(timeout=timedelta(seconds=9), backend="gloo")
    accelerator = Accelerator(kwargs_handlers=[handler])
    effects = found(accelerator)
    assert [effects[name].why for name in ("timeout", "backend")] == ["one process has no group"] * 2


def test_settings_of_a_world_that_was_open_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """F11, F15"""
    Accelerator()
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "true")
    effect = found(Accelerator())["debug"]
    assert (effect.not_applied, effect.why) == (True, "the world was open already, without it")


def test_what_the_launcher_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """PAINS 25: two processes that each believe to be alone."""
    threads = torch.get_num_threads()
    asked = {
        "num_processes": ["--num_processes", 2],
        "num_cpu_threads_per_process": ["c.yaml, line 3: num_cpu_threads_per_process", threads],
    }
    monkeypatch.setenv("ACCELERATE_ASKED", json.dumps(asked))
    effects = found(Accelerator(cpu=True))
    assert str(effects["num_processes"]) == "--num_processes 2 was not applied: this is one of 1 processes"
    assert effects["num_cpu_threads_per_process"].applied


def test_what_a_launch_tells_the_script(tmp_path: Any) -> None:
    """Where each option came from; nothing if nothing was asked, and no line if the launch is to be quiet."""
    file = tmp_path / "c.yaml"
    file.write_text("mixed_precision: bf16\n")
    flags = {"config_file": str(file), "num_processes": "2", "gradient_accumulation_steps": "4"}
    variables = origin_variables(read_request(flags, ["x.py"], SCRIPT_SETTINGS))
    assert json.loads(variables["ACCELERATE_ASKED"]) == {
        "mixed_precision": [f"{file}, line 1: mixed_precision", "bf16"],
        "gradient_accumulation_steps": ["--gradient_accumulation_steps", 4],
        "num_processes": ["--num_processes", 2],
    }
    assert "ACCELERATE_EFFECTS" not in variables
    quiet = read_request({**flags, "quiet": True}, ["x.py"], SCRIPT_SETTINGS)
    assert origin_variables(quiet)["ACCELERATE_EFFECTS"] == "none"
    file.write_text("# nothing\n")
    assert origin_variables(read_request({"config_file": str(file)}, ["x.py"], SCRIPT_SETTINGS)) == {}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not bind processes")
def test_cores_that_a_process_is_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("there is one core")
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", "true")
    near = "accelerate.facade.option_read_backs.near_cores"
    monkeypatch.setattr(near, lambda *_: [])
    effect = found(Accelerator(cpu=True))["enable_cpu_affinity"]
    assert (effect.not_applied, effect.is_failure) == (True, False)
    monkeypatch.setattr(near, lambda *_: allowed)
    assert found(Accelerator(cpu=True))["enable_cpu_affinity"].applied
    monkeypatch.setattr(near, lambda *_: allowed[:1])
    assert "cores that are not near" in found(Accelerator(cpu=True))["enable_cpu_affinity"].why


# ---------------------------------------------------------------- strategies in one process


def test_sharding_by_one_process_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """F3, F15"""
    with pytest.warns(UserWarning, match="fsdp_plugin.* was not applied: one process has nothing to shard"):
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()).prepare(Net())
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("ACCELERATE_ASKED", json.dumps({"use_fsdp": ["--use_fsdp", True]}))
    with pytest.raises(SettingError, match="--use_fsdp was not applied: one process has nothing to shard"):
        Accelerator(strict=True).prepare(Net())


# ---------------------------------------------------------------- loops, loaders, trackers


def accumulates(how: str, **options: Any) -> OptionStatus:
    accelerator = Accelerator(**options)
    model = Net()
    model, optimizer, data = quietly(accelerator, model, sgd(model), loader())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "windows":
            for window in accelerator.windows(data):
                for batch in window:
                    accelerator.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
        for batch in data:
            if how == "accumulate":
                with accelerator.accumulate(model):
                    step(accelerator, model, optimizer, batch)
            elif how == "by hand":
                accelerator.gradient_state._set_sync_gradients(data.end_of_dataloader)
                step(accelerator, model, optimizer, batch)
            elif how == "not at all":
                step(accelerator, model, optimizer, batch)
    effects = found(accelerator)
    return effects.get("gradient_accumulation_steps") or effects["num_steps"]


@pytest.mark.parametrize("how", ["accumulate", "windows", "by hand"])
@pytest.mark.parametrize("steps", [2, 4])
def test_accumulation_is_seen(how: str, steps: int) -> None:
    assert accumulates(how, gradient_accumulation_steps=steps).applied


def test_accumulation_that_no_loop_does() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2)
    for options in ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_plugin": plugin}):
        effect = accumulates("not at all", **options)
        assert effect.is_failure
        assert "accelerator.accumulate(model)" in effect.why


def test_windows_of_one_batch_are_right_in_any_loop() -> None:
    """A plugin that says 1, as clients pass it, is no mistake of the loop."""
    for how in ("not at all", "accumulate"):
        assert accumulates(how, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1)).applied


def test_options_of_loaders_are_seen_on_them() -> None:
    options = DataLoaderConfiguration(
        use_seedable_sampler=True,
        data_seed=3,
        use_stateful_dataloader=True,
        non_blocking=True,
        even_batches=False,
    )
    accelerator = Accelerator(cpu=True, dataloader_config=options, rng_types=["torch"])
    assert found(accelerator)["data_seed"].applied is None
    data = accelerator.prepare(loader(shuffle=True))
    effects = found(accelerator)
    applied = [name for name, effect in effects.items() if effect.applied]
    assert applied == ["cpu", "use_seedable_sampler", "data_seed", "use_stateful_dataloader"]
    assert effects["non_blocking"].why == "batches stay on the host"
    assert not any(effects[name].is_failure for name in ("non_blocking", "even_batches", "rng_types"))
    data.use_stateful_dataloader = False
    assert found(accelerator)["use_stateful_dataloader"].is_failure


def test_an_order_of_a_sampler_that_is_not_ours() -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    accelerator.prepare(loader())
    effect = found(accelerator)["use_seedable_sampler"]
    assert (effect.not_applied, effect.is_failure) == (True, False)
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 8, 8)
    with pytest.warns(UserWarning, match="a loader has a WeightedRandomSampler"):
        accelerator.prepare(loader(sampler=weighted))


class LengthSampler(torch.utils.data.Sampler[int]):
    """Has an order of its own, as transformers' samplers by length."""

    generator = None

    def __iter__(self) -> Any:
        return iter(torch.randperm(8).tolist())

    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize("kind", ["seeded", "own class", "range"])
def test_an_order_that_a_program_has_chosen(kind: str) -> None:
    """The report says so, and nothing warns: transformers always asks for seedable samplers."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    generator = torch.Generator().manual_seed(3)
    samplers: dict[str, Any] = {
        "seeded": torch.utils.data.WeightedRandomSampler([1.0] * 8, 8, generator=generator),
        "own class": LengthSampler(),
        "range": range(8),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.prepare(loader(sampler=samplers[kind]))
    effect = found(accelerator)["use_seedable_sampler"]
    assert (effect.not_applied, effect.is_failure) == (True, False)


def test_trackers_that_nobody_started(tmp_path: Any) -> None:
    for starts in (True, False):
        accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
        model = Net()
        model, optimizer = accelerator.prepare(model, sgd(model))
        if starts:
            accelerator.init_trackers("run")
            step(accelerator, model, optimizer, torch.randn(2, 16))
            assert found(accelerator)["log_with"].applied
            accelerator.end_training()
        else:
            with pytest.warns(UserWarning, match="log_with=jsonl .*init_trackers"):
                step(accelerator, model, optimizer, torch.randn(2, 16))


@pytest.mark.parametrize(("options", "times"), [({}, 0), ({"gradient_accumulation_steps": 2}, 1)])
def test_only_the_first_step_looks(
    options: dict[str, int], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that only where it shows more than ``prepare`` did."""
    accelerator = Accelerator(**options)
    model = Net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    looked: list[OptionReporter] = []
    monkeypatch.setattr(OptionReporter, "report", lambda self: looked.append(self))
    for _ in range(3):
        step(accelerator, model, optimizer, torch.randn(2, 16))
    assert len(looked) == times
