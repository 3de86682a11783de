"""The table of public names against the promised ones (tests/laws/contract.json)."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias, cast

import pytest
import torch
from torch.utils.data import DataLoader

import accelerate
from accelerate.core.errors import FeatureNotBuiltError
from accelerate.core.lazy_names import (
    LazyCall,
    ObjectNameSource,
    PublicNames,
    get_override,
)
from accelerate.names import NAME_SOURCES, NAMES
from tests.laws.source import contract
from tests.support import pyi_stub_writer

# Accidental names of modules of 1.x: a loop's variables, an import for type checkers, a menu.
LEFTOVERS = {"TYPE_CHECKING", "additional_kwargs", "v", "version", "BulletMenu"}


def promised_names(tier: str | None = None) -> list[tuple[str, str]]:
    """Return (module, name) of the promised definitions."""
    return [
        (module, name)
        for module, names in contract()["modules"].items()
        for name, facts in names.items()
        if tier in (None, facts["tier"]) and name not in LEFTOVERS
    ]


def reexported_names() -> list[tuple[str, str, str]]:
    """Return (module, name, home) of names that a module of 1.x had because it imported them."""
    return [
        (module, name, home)
        for module, names in contract()["reexports"].items()
        for name, home in names.items()
        if not name.startswith("_") and name not in LEFTOVERS
    ]


def test_the_promise_is_whole():
    assert len(promised_names("exact")) == 187
    assert len(promised_names()) >= 580
    assert len(reexported_names()) >= 700


@pytest.mark.parametrize(("module", "name"), promised_names())
def test_a_promised_name_can_be_imported(module, name):
    assert getattr(import_module(module), name) is not None


def test_a_name_is_the_same_object_wherever_it_is_imported_from():
    different = [
        f"{module}.{name}"
        for module, name, home in reexported_names()
        if getattr(import_module(module), name) is not getattr(import_module(home.rpartition(".")[0]), name)
    ]
    assert not different


def test_private_names_that_other_programs_import():
    """optimum-habana, evaluation scripts and trainers with loaders of their own use these."""
    import safetensors.torch

    from accelerate.checkpointing import load_model
    from accelerate.data_loader import _PYTORCH_DATALOADER_KWARGS
    from accelerate.utils.operations import _gpu_broadcast, _gpu_gather, _gpu_gather_object

    options = dict(_PYTORCH_DATALOADER_KWARGS)
    assert (options["batch_size"], options["shuffle"], options.pop("prefetch_factor")) == (1, False, 2)
    loader = DataLoader([1, 2, 3], **options)
    assert len(loader) == 3
    value = torch.ones(2)
    assert torch.equal(_gpu_gather(value), value)
    assert torch.equal(_gpu_broadcast(value, src=0), value)
    assert _gpu_gather_object([1]) == [1]
    assert load_model is safetensors.torch.load_model


def test_torch_is_reached_through_the_module_of_the_accelerator():
    """ms-swift replaces ``accelerate.accelerator.torch.nn.parallel.DistributedDataParallel.__init__``."""
    import accelerate.accelerator

    assert accelerate.accelerator.torch is torch


def parameters(signature: str) -> list[tuple[str, str, str]]:
    """(name, kind, default) of a signature as text, annotations left out."""
    # A decorated function shows what its decorator takes, and then what it takes itself.
    text = signature.partition("source: ")[2] or signature
    depth = 0
    for end, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            text = text[: end + 1]
            break
    text = re.sub(r"<[\w.]+: ('[^']*')>", r"\1", text)
    text = re.sub(r"<[^<>]*(?:<[^<>]*>)?[^<>]*>", "Ellipsis", text)
    space: dict[str, Any] = {}
    # Annotations are text of another program: keep them unevaluated.
    exec(f"from __future__ import annotations\ndef signed{text}: ...", space)
    return describe_signature(inspect.signature(space["signed"]))


def describe_signature(signature: inspect.Signature) -> list[tuple[str, str, str]]:
    """Describe a real signature likewise; a default that is not a plain value, or a path, is ``...``."""
    return [(each.name, each.kind.name, _default(each.default)) for each in signature.parameters.values()]


def _default(value: object) -> str:
    if value is inspect.Parameter.empty:
        return ""
    plain = isinstance(value, bool | int | float | str | tuple | type(None)) and not str(value).startswith(
        "/"
    )
    # A member of a text enumeration is its text.
    return repr(str(value) if isinstance(value, str) else value) if plain else "..."


def promised_signatures() -> list[tuple[str, str]]:
    """Return the built names whose signature is promised."""
    return [
        (module, name)
        for module, name in promised_names("exact")
        if contract()["modules"][module][name].get("signature")
    ]


# Options of this package behind the promised ones. Each has a default, so no call changes.
OPTIONS = {
    "accelerate.accelerator.Accelerator": ["strict"],
    "accelerate.accelerator.Accelerator.backward": ["num_items"],
    "accelerate.accelerator.Accelerator.gather_for_metrics": ["rows_per_sample"],
    "accelerate.accelerator.Accelerator.prepare_data_loader": ["shard"],
    "accelerate.accelerator.Accelerator.save_state": ["sharded", "async_save", "metadata"],
    "accelerate.big_modeling.load_checkpoint_and_dispatch": ["allow_missing"],
    "accelerate.checkpointing.load_custom_state": ["load_kwargs"],
    "accelerate.data_loader.prepare_data_loader": ["shard", "legacy_random_numbers", "strict"],
    "accelerate.parallelism_config.ParallelismConfig": ["pp_size", "pp_handler"],
    "accelerate.utils.dataclasses.AORecipeKwargs": ["recipe_name"],
    "accelerate.utils.dataclasses.AutocastKwargs": ["upcast_outputs"],
    "accelerate.utils.dataclasses.DeepSpeedSequenceParallelConfig": ["cut"],
    "accelerate.utils.dataclasses.TorchContextParallelConfig": ["cut"],
    "accelerate.utils.dataclasses.TorchTensorParallelConfig": ["plan"],
    "accelerate.utils.dataclasses.DataLoaderConfiguration": ["shard", "legacy_random_numbers"],
    "accelerate.utils.dataclasses.FP8RecipeKwargs": ["scaling"],
    "accelerate.utils.dataclasses.FullyShardedDataParallelPlugin": ["replicate_size"],
    "accelerate.utils.dataclasses.GradientAccumulationPlugin": ["step_scheduler_once"],
    "accelerate.utils.dataclasses.ProfileKwargs": ["memory_timeline", "operator_table"],
    "accelerate.utils.dataclasses.TorchDynamoPlugin": ["cache_dir"],
    "accelerate.utils.modeling.load_checkpoint_in_model": ["allow_missing"],
    "accelerate.utils.dataclasses.ProjectConfiguration": ["async_save", "replica_check_interval"],
}
Rows: TypeAlias = list[tuple[str, str, str]]


def as_promised(dotted: str, rows: Rows) -> Rows:
    """Return a signature without this package's own options."""
    own = [row for row in rows if row[0] in OPTIONS.get(dotted, [])]
    assert [name for name, _, _ in own] == OPTIONS.get(dotted, [])
    assert all(default for _, _, default in own)
    return [row for row in rows if row not in own]


@pytest.mark.parametrize(("module", "name"), promised_signatures())
def test_a_promised_signature_is_kept(module, name):
    expected = parameters(contract()["modules"][module][name]["signature"])
    rows = describe_signature(inspect.signature(getattr(import_module(module), name)))
    assert as_promised(f"{module}.{name}", rows) == expected


def members(facts: dict[str, Any]) -> dict[str, str]:
    """Return public methods and properties with their description."""
    rows = facts.get("members", {})
    return {
        name: text for name, text in rows.items() if not name.startswith("_") and not text.startswith("attr")
    }


@pytest.mark.parametrize(("module", "name"), [row for row in promised_signatures() if row[1][0].isupper()])
def test_a_class_has_the_promised_methods(module, name):
    facts = contract()["modules"][module][name]
    cls = getattr(import_module(module), name)
    absent, different = [], []
    for member, text in members(facts).items():
        value = inspect.getattr_static(cls, member, None)
        if value is None:
            absent.append(f"{module}.{name}.{member}")
        elif text.startswith("method ") and "@contextmanager" not in text:
            expected = parameters(text.removeprefix("method "))
            signature = describe_signature(inspect.signature(getattr(cls, member)))
            if as_promised(f"{module}.{name}.{member}", signature) != expected:
                different.append(f"{member}{inspect.signature(getattr(cls, member))}, promised {text}")
    assert not absent
    assert not different


@pytest.mark.parametrize(
    ("module", "name"),
    [(m, n) for m, n in promised_names() if contract()["modules"][m][n]["kind"] == "enum"],
)
def test_an_enumeration_has_the_promised_members(module, name):
    expected = contract()["modules"][module][name].get("members", {})
    actual = {member.name: member.value for member in getattr(import_module(module), name)}
    assert {key: actual.get(key) for key in expected} == expected


def test_constants_have_the_promised_values():
    rows = {
        (module, name): facts["value"]
        for module, names in contract()["modules"].items()
        for name, facts in names.items()
        if facts["kind"] == "constant" and str(facts.get("value", "")).startswith(("'", "["))
    }
    wrong = {}
    for (module, name), value in rows.items():
        # Paths differ from home to home; a spelling error of one list is not repeated here.
        if (
            name in LEFTOVERS
            or "/root" in value
            or name in ("DYNAMO_BACKENDS", "TORCH_SAFE_GLOBALS", "description")
        ):
            continue
        if repr(getattr(import_module(module), name))[: len(value.rstrip("."))] != value.rstrip("."):
            wrong[module, name] = value
    assert not wrong


# Private names that programs in the wild touch: without them they break in silence.
PRIVATE = [
    ("accelerate.state", "PartialState", "_shared_state _reset_state _prepare_backend"),
    ("accelerate", "Accelerator", "_prepare_device_mesh _prepare_fsdp2 _prepare_cp _prepare_deepspeed"),
    ("accelerate.state", "AcceleratorState", "_shared_state _reset_state"),
    ("accelerate.state", "GradientState", "_set_sync_gradients _reset_state"),
]


@pytest.mark.parametrize(("module", "name", "wanted"), PRIVATE)
def test_private_names_that_programs_touch_exist(module, name, wanted):
    cls = getattr(import_module(module), name)
    assert [each for each in wanted.split() if not hasattr(cls, each)] == []


# --- how the table works


@pytest.fixture
def names(monkeypatch, tmp_path):
    """The names of a small package of its own."""
    folder = tmp_path / "toy"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "home.py").write_text("def real():\n    return 1\ndef make(kind):\n    return lambda: kind\n")
    (folder / "inner" / "__init__.py").write_text(
        "from table import module_hooks\n__getattr__, __dir__ = module_hooks(__name__)\n"
    )
    (folder / "inner" / "same.py").write_text(
        "from table import module_hooks\n__getattr__, __dir__ = module_hooks(__name__)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    homes = {
        "toy.inner": {"one": ObjectNameSource(1), "same": "home:real"},
        "toy.inner.same": {
            "made": LazyCall("home:make", "cat"),
            "text": LazyCall("home:make", "cat", then=lambda made: made().upper()),
        },
    }
    table = PublicNames("toy", homes, {"toy.inner": {"toy.inner.same": "made text"}})
    module = type(sys)("table")
    module.module_hooks = table.module_hooks
    monkeypatch.setitem(sys.modules, "table", module)
    yield table
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy"]:
        del sys.modules[name]


def test_a_name_wins_over_the_submodule_it_is_spelled_like(names):
    import toy.inner.same as module
    from toy.inner import same

    assert same() == 1
    assert sys.modules["toy.inner.same"].made() == "cat"
    assert cast(Any, module)() == 1


def test_a_name_is_looked_up_once_and_a_patch_stays(names, monkeypatch):
    from toy import inner

    assert "one" not in vars(inner)
    assert inner.one == 1
    assert vars(inner)["one"] == 1
    monkeypatch.setattr(inner, "one", 2)
    assert inner.one == 2
    from toy.inner import one

    assert one == 2


def test_code_below_sees_what_a_user_put_in_a_public_module(names, monkeypatch):
    def own() -> str:
        return "own"

    assert get_override("toy.inner", "same", own) is own
    from toy import inner

    assert get_override("toy.inner", "same", own) is own
    monkeypatch.setattr(inner, "same", lambda: "patched")
    assert get_override("toy.inner", "same", own)() == "patched"


def test_names_of_another_module_are_its_objects(names):
    from toy.inner import made, same, text

    submodule = sys.modules["toy.inner.same"]
    assert made is submodule.made
    assert made.__name__ == "made"
    assert made.__module__ == "toy.inner.same"
    assert text is submodule.text
    assert text == "CAT"
    assert same.__name__ == "real"


def test_dir_and_star_know_every_name(names):
    from toy import inner

    assert {"one", "same", "made", "text"} <= set(dir(inner))
    space: dict[str, Any] = {}
    exec("from toy.inner import *", space)
    assert {"one", "same", "made", "text"} <= set(space)


def test_a_star_import_of_the_utilities_hides_no_names_of_other_modules():
    """Those of Megatron-LM are called like functions of DeepSpeed and of this package."""
    import accelerate.utils

    names = accelerate.utils.__all__
    assert not {"initialize", "prepare_data_loader", "prepare_optimizer", "_gpu_gather"} & set(names)
    assert {"GPTTrainStep", "MegatronEngine", "gather"} <= set(names)


def test_an_unknown_name_is_an_attribute_error_with_a_hint(names):
    from toy import inner

    with pytest.raises(AttributeError, match="did you mean 'made'"):
        _ = inner.mode
    assert not hasattr(inner, "nothing")
    assert not hasattr(inner, "__wrapped__")


def test_a_function_without_a_counterpart_says_what_to_type():
    with pytest.raises(FeatureNotBuiltError, match=r"no counterpart here\n  why: .*\n  fix: pip install"):
        accelerate.utils.install_xla()


# --- the package itself


def run(code: str) -> str:
    """Return the output of a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_import_is_cheap_and_free_of_torch():
    """In half the time of two modules of Python, here; twice as long is allowed."""
    code = (
        "import time, sys; a = time.process_time(); import accelerate; b = time.process_time(); "
        "torch = 'torch' in sys.modules; import email.message, http.client; "
        "print((b - a) / (time.process_time() - b), torch, accelerate.__version__)"
    )
    runs = [run(code).split() for _ in range(3)]
    assert runs[0][1:] == ["False", accelerate.__version__]
    assert accelerate.__version__ == "2.0.0"
    assert min(float(ratio) for ratio, *_ in runs) < 2


def test_submodules_are_reachable_without_importing_them():
    code = (
        "import accelerate; print(accelerate.hooks.__name__, accelerate.utils.memory.__name__, "
        "accelerate.commands.config.config_args.__name__)"
    )
    expected = "accelerate.hooks accelerate.utils.memory accelerate.commands.config.config_args"
    assert run(code) == expected


def test_the_progress_bar_is_a_function_whatever_is_imported_first():
    for first in (
        "import accelerate.utils.tqdm",
        "from accelerate.utils.tqdm import tqdm",
        "import accelerate.utils",
    ):
        assert run(f"{first}\nfrom accelerate.utils import tqdm\nprint(type(tqdm).__name__)") == "function"


def test_the_deprecated_module_says_so():
    code = "import warnings; warnings.simplefilter('error'); import accelerate.memory_utils"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run(code)
    assert "FutureWarning" in caught.value.stderr


@pytest.mark.parametrize("module", list(NAME_SOURCES))
def test_a_public_module_is_two_lines(module):
    lines = Path(import_module(module).__file__).read_text().splitlines()
    code = [line for line in lines if line and not line.startswith(("#", '"""'))]
    assert "from accelerate.names import module_hooks" in code
    assert "__getattr__, __dir__ = module_hooks(__name__)" in code


def test_the_stubs_show_the_table():
    stale = [
        str(path)
        for path, text in pyi_stub_writer.stub_texts(NAMES).items()
        if not path.is_file() or path.read_text() != text
    ]
    assert not stale, f"run: {pyi_stub_writer.COMMAND}"


@pytest.mark.parametrize("name", ["BatchSampler", "DataLoader", "IterableDataset", "RandomSampler"])
def test_programs_find_torchs_classes_of_data_where_1_15_has_them_too(name: str) -> None:
    """finetrainers 0.2 imports ``DataLoader`` from there."""
    assert getattr(import_module("accelerate.data_loader"), name) is getattr(torch.utils.data, name)
