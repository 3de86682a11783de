"""G7: every argument of every public class of options is checked by its declared type.

The generator tries wrong values on all of them. What comes is an error of this package that names the
argument, or the value is one that the annotation allows by the table ``ALLOWED_BY``.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import accelerate.utils
from accelerate import Accelerator
from accelerate.core.errors import AccelerateError, SettingError, UnknownNameError
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    MegatronLMPlugin,
    ProjectConfiguration,
)
from tests.support.long_run import LONG_RUN


class Odd:
    """A class that no argument wants."""

    def __repr__(self) -> str:
        return "Odd()"


_PATH = r"PathLike|PathText|Any"
_TEXT = r"\bstr\b|Path|Literal|Name|Any"
_WHOLE = r"\bint\b|\bfloat\b|Int|Count|Seed|Number|Fraction|Any"
_LIST = r"list|tuple|Iterable|Any"
_DICT = r"dict|Mapping|Plugin|Config|Any"
_CALL = r"Callable|Any"
# Value -> the words of an annotation that allow it; an empty text: none does.
ALLOWED_BY: list[tuple[Any, str]] = [
    (-1, _WHOLE),
    (0, rf"bool|{_WHOLE}"),
    (7, _WHOLE),
    (10**30, _WHOLE),
    (1.5, r"float|Number|Fraction|Any"),
    (float("nan"), "Any"),
    (float("inf"), r"float|NonNegativeNumber|Any"),
    (True, r"bool|Any"),
    ("", _TEXT),
    ("x", _TEXT),
    ("a\0b", "Any"),
    ("7", rf"{_TEXT}|{_WHOLE}"),
    ("7 ", _TEXT),
    (7.0, _WHOLE),
    (b"x", "Any"),
    ([], _LIST),
    ([1], r"list\[int\]|Any"),
    ({}, _DICT),
    ({"x": 1}, r"dict\[str, (int|Any)\]|Mapping\[str, (int|Any)\]|Any"),
    ({1: 2}, "Any"),
    ((1, 2), r"list\[int\]|Any"),
    (set[Any](), _LIST),
    (object, _CALL),
    (Odd, _CALL),
    (Odd(), "Any"),
    (len, _CALL),
    (Path("x"), _PATH),
    (torch.ones(2), "Any"),
    (torch.float16, r"torch\.dtype|Any"),
]
# Arguments annotated Any, each with its reason: their values are judged where they are used.
ANYTHING = {
    "custom_train_step_class": "the user's own class",
    "torch_device_mesh": "an object of torch",
    "config": "an object of torchao",
    "mixed_precision_policy": "a policy, its fields, or a name; a dtype too",
    "state_dict_config": "an object of torch",
    "optim_state_dict_config": "an object of torch",
}
# Settings that may hold an object too, which no text can say.
OBJECTS = {"auto_wrap_policy": "Callable", "ignored_modules": "Iterable", "hf_ds_config": "Any"}


def option_classes() -> dict[str, Callable[..., Any]]:
    """Return the public classes of options by name, and ``Accelerator``."""
    modules = [import_module(f"accelerate.{name}") for name in ("utils", "utils.dataclasses")]
    modules.append(import_module("accelerate.parallelism_config"))
    public = {name: getattr(module, name) for module in modules for name in dir(module) if name[0].isupper()}
    kinds = re.compile(r"(Kwargs|Plugin|Configuration|Config)$")
    options = {name: kind for name, kind in public.items() if kinds.search(name)}
    needs = {"TERecipeKwargs", "FP8RecipeKwargs"}  # packages that are not here
    usable = {n: c for n, c in options.items() if dataclasses.is_dataclass(c) and n not in needs}
    return {"Accelerator": Accelerator} | usable


def declared(cls: Any, name: str) -> str:
    """Return the annotation of an argument, of a setting its type."""
    fields = {each.name: each for each in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    annotation = inspect.signature(cls).parameters[name].annotation
    metadata = fields[name].metadata if name in fields else {}
    kinds = [metadata.get("type") or annotation, *(map(repr, metadata.get("choices") or ()))]
    return " | ".join(map(str, [*kinds, OBJECTS.get(name, "")]))


def tries(cls: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield (argument, value, the words that allow the value); the default run takes every fifth."""
    names = [n for n, each in inspect.signature(cls).parameters.items() if each.kind is not each.VAR_KEYWORD]
    rows = [(name, value, words) for name in names for value, words in ALLOWED_BY]
    return iter(rows if LONG_RUN else rows[::5])


def outcome(cls: Any, name: str, value: Any, words: str) -> str:
    """Return what is wrong with what comes; empty for nothing."""
    known = name in ANYTHING or (words and re.search(words, declared(cls, name)))
    try:
        cls(**{name: value})
    except AccelerateError as error:
        return "" if known or name in str(error) else f"not named: {error.what}"
    except Exception as error:  # noqa: BLE001 - this is what the test looks for
        return f"internal: {error!r}"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
    return "" if known else f"accepted, but it is {declared(cls, name)}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", option_classes())
def test_no_wrong_value_is_taken_or_shows_internals(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    cls = option_classes()[name]
    outcomes = {f"{arg}={value!r}": outcome(cls, arg, value, words) for arg, value, words in tries(cls)}
    assert {call: wrong for call, wrong in outcomes.items() if wrong} == {}


def test_the_generator_knows_the_classes() -> None:
    assert len(option_classes()) >= 20
    assert {"ParallelismConfig", "ProjectConfiguration", "PreemptionKwargs"} <= option_classes().keys()


@pytest.mark.parametrize(
    ("arguments", "text", "fix"),
    [
        ({"fsdp_plugin": FullyShardedDataParallelPlugin}, "is the class", "FullyShardedDataParallelPlugin()"),
        ({"deepspeed_plugin": DeepSpeedPlugin}, "is the class", "DeepSpeedPlugin()"),
        ({"dataloader_config": DataLoaderConfiguration}, "is the class", "DataLoaderConfiguration()"),
        ({"deepspeed_plugin": "ds.json"}, "a DeepSpeedPlugin", "DeepSpeedPlugin(hf_ds_config='ds.json')"),
        ({"deepspeed_plugin": {"a": 1}}, "'a'", ""),
        ({"megatron_lm_plugin": "x"}, "a MegatronLMPlugin", "megatron_lm_plugin=MegatronLMPlugin(...)"),
        ({"project_config": "runs"}, "the text 'runs'", "ProjectConfiguration(project_dir='runs')"),
        ({"gradient_accumulation_plugin": 4}, "is 4", "GradientAccumulationPlugin(num_steps=4)"),
        ({"dataloader_config": {"split_batchs": True}}, "dataloader_config", "did you mean 'split_batches'?"),
        ({"kwargs_handlers": DistributedDataParallelKwargs()}, "a list", "kwargs_handlers=[...]"),
    ],
)
def test_what_stands_where_a_plugin_belongs_is_refused(
    arguments: dict[str, Any], text: str, fix: str
) -> None:
    with pytest.raises(SettingError) as error:
        Accelerator(**arguments)
    assert text in error.value.what
    assert fix in error.value.fix


def test_a_misspelt_argument_is_a_type_error_with_the_nearest() -> None:
    for cls, name, near in (
        (Accelerator, "mixed_precison", "mixed_precision"),
        (FullyShardedDataParallelPlugin, "fsdp_versoin", "fsdp_version"),
    ):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}': did you mean '{near}'"):
            cls(**{name: None})


def test_an_argument_of_old_versions_leads_to_its_place() -> None:
    """``even_batches`` was taken for ``split_batches``, which changes the batch size."""
    for name, place in (
        ("even_batches", r"DataLoaderConfiguration\(even_batches=...\)"),
        ("dispatch_batches", r"DataLoaderConfiguration\(dispatch_batches=...\)"),
        ("fp16", 'mixed_precision="fp16"'),
        ("logging_dir", "project_dir="),
    ):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}': use .*{place}"):
            cast("Any", Accelerator)(**{name: True})


def test_a_dict_becomes_the_class_that_is_meant() -> None:
    accelerator = Accelerator(
        dataloader_config={"split_batches": True},  # type: ignore[arg-type]
        project_config={"project_dir": "runs", "total_limit": 2},  # type: ignore[arg-type]
        gradient_accumulation_plugin={"num_steps": 4},  # type: ignore[arg-type]
    )
    assert isinstance(accelerator.dataloader_config, DataLoaderConfiguration)
    assert accelerator.split_batches
    assert isinstance(accelerator.project_configuration, ProjectConfiguration)
    assert (accelerator.project_dir, accelerator.project_configuration.total_limit) == ("runs", 2)
    assert accelerator.gradient_accumulation_steps == 4


def test_an_error_inside_a_dict_names_the_class() -> None:
    with pytest.raises(SettingError, match=r"total_limit of ProjectConfiguration is 1\.5"):
        Accelerator(project_config={"total_limit": 1.5})  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="in the dict of the argument fsdp_plugin"):
        Accelerator(fsdp_plugin={"fsdp_versoin": 2})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"), [("iteration", -5), ("iteration", 1.5), ("total_limit", "abc"), ("total_limit", 1.5)]
)
def test_counts_of_a_project_are_refused_before_a_save(name: str, value: Any) -> None:
    """A save with them failed after its commit."""
    with pytest.raises(SettingError, match=f"{name} of ProjectConfiguration is "):
        ProjectConfiguration(**{name: value})


def test_what_is_meant_is_taken() -> None:
    """Numbers of NumPy and torch, 0 and 1, words for yes and no, members of enumerations by value."""
    assert GradientAccumulationPlugin(num_steps=torch.tensor(3)).num_steps == 3  # type: ignore[arg-type]
    assert (
        Accelerator(gradient_accumulation_steps=torch.arange(4).numpy()[2]).gradient_accumulation_steps == 2
    )
    assert DataLoaderConfiguration(split_batches=1).split_batches is True  # type: ignore[arg-type]
    assert DataLoaderConfiguration(even_batches="no").even_batches is False  # type: ignore[arg-type]
    assert DataLoaderConfiguration(non_blocking=None).non_blocking is False  # type: ignore[arg-type]
    kwargs = DistributedDataParallelKwargs(comm_hook="fp16")  # type: ignore[arg-type]
    assert kwargs.comm_hook is accelerate.utils.DDPCommunicationHookType.FP16
    for size in (None, 0, 0.5):  # torch takes parts of a MB; 0 is a bucket for each parameter
        assert DistributedDataParallelKwargs(bucket_cap_mb=size).to_kwargs() == {"bucket_cap_mb": size}
    assert ProjectConfiguration(Path("a")).project_dir == Path("a")
    assert MegatronLMPlugin(consumed_samples=(1, 2)).consumed_samples == [1, 2]  # type: ignore[arg-type]
    several = Accelerator(deepspeed_plugin={"a": DeepSpeedPlugin()}).state.deepspeed_plugins
    assert several is None or list(several) == ["a"]


def test_classes_derived_from_options_count_as_them() -> None:
    @dataclasses.dataclass
    class Mine(ProjectConfiguration):
        more: int = 1

    project = Mine(project_dir="runs")
    assert Accelerator(project_config=project).project_configuration is project
