"""G17, private names of torch: the table of core/torch_internals.py has all, and the running torch too.

A torch that drops one fails here, in the test of that name. So does a file that uses one without an entry.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.pipelining  # so that all modules of the table can be imported by name alone

from accelerate.core import torch_internals
from accelerate.core.errors import FeatureNotBuiltError
from accelerate.core.torch_internals import COMMON, INTERNALS, REFUSED, TESTED, Internals, TorchName
from tests.laws.source import Source, obey, read, sources

LAW = "private names of torch stand in core/torch_internals.py"
NAMES = {f"{each.subject}: {name}": name for each in INTERNALS for name in each}
ATTRIBUTES = {"getattr", "hasattr", "setattr", "delattr"}
# Private names that are not torch's: whose they are.
OTHERS = {
    "argparse": "_ActionsContainer _ArgumentGroup _StoreFalseAction _action_groups _current_section "
    "_option_string_actions _parser_class _filter",
    "Python": "_exit _current_frames _getframe _register_atexit _run_module_as_main _asdict _fields _replace "
    "_dir _metadata",
    "accelerate 1.x": "_hf_hook _old_forward _original_call _original_forward _use_sagemaker_dp",
    "transformers": "_attn_implementation _no_split_modules _tp_plan _tp_size _from_config",
    "datasets": "_distributed _fingerprint _epoch _ex_iterable",
    "torchao": "_linear_mm_config",
    "DeepSpeed": "_device _nvme_path _epilogue_ran_this_backward _build_compact_grad_partition_buffer "
    "_clear_fp32_optimizer_param_groups _create_optimizer_mapping "
    "_create_param_mapping _finalize_cpu_offload_gradient_accumulation "
    "_finalize_offload_gradient_accumulation _get_expert_parallel_world_size _get_norm_groups "
    "_get_param_partition_rank _hp_mapping "
    "_hp_optimizer_states_linked _link_all_hp_params _offload_accumulated_param_ids "
    "_offload_boundary_param_ids _param_slice_mappings _release_preflattened_grad_buffers "
    "_reassign_or_swap_out_partitioned_parameters "
    "_set_fp32_optimizer_param_groups _swappable_optimizer_subgroup _use_compact_grad_partition_buffer "
    "_wait_for_offload_copies",
    "torch_xla": "_XLAC _xla_get_spmd_config_is_locked",
    "Megatron-LM": "_get_model_param_range_map",
    "modules of other devices": "_is_fp16_supported _manual_seed",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_torch_has_it(name: TorchName) -> None:
    expected = name.is_expected(torch.__version__)
    assert name.exists() == expected, (
        f"torch {torch.__version__} {'has no' if expected else 'has'} {name}: write the versions that have "
        f"it into core/torch_internals.py (now: {name.versions or 'all'}), and let its files do without it"
    )


def private_imports(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Yield everything that a file imports from torch by a private name: ``module`` or ``module.name``.

    A text that is such a name is imported somewhere.
    """
    for node in source.nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = re.findall(r"\Atorch(?:\.\w+)+\Z", node.value)
        for name in names:
            if name.startswith("torch.") and any(_is_private(part) for part in name.split(".")):
                yield node, name


def private_attributes(source: Source, own: set[str]) -> Iterator[tuple[ast.AST, str]]:
    """Yield private attributes that no file of ours defines; of ``getattr`` and the like, too."""
    for node in source.nodes:
        name = node.attr if isinstance(node, ast.Attribute) else attribute_as_text(node)
        if _is_private(name) and name not in own:
            yield node, name


def attribute_as_text(node: ast.AST) -> str:
    """Return ``"_x"`` of ``getattr(value, "_x")`` and the like; empty where there is none."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ATTRIBUTES and len(node.args) > 1:
        text = node.args[1]
        return text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
    return ""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined(source: Source) -> Iterator[str]:
    """Yield the names that a file defines: functions, classes, fields, attributes of ``self``."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def findings(source: Source, own: set[str]) -> Iterator[str]:
    """What a file uses of torch, and no entry says so."""
    inside = "/".join(source.inside) + ".py"
    here = [each for each in INTERNALS if any(inside.startswith(file) for file in each.files)]
    modules = {module for each in here for module in each.names}
    names = {str(name) for each in here for name in each}
    for node, name in private_imports(source):
        if name not in names | modules and not any(known.startswith(f"{name}.") for known in names):
            yield source.at(node, f"{name} is imported, and no entry for {inside} has it")
    known = {part for name in names for part in name.split(".")} | {
        word for words in OTHERS.values() for word in words.split()
    }
    for node, name in private_attributes(source, own):
        if name not in known:
            yield source.at(node, f"{name} is used, and no entry for {inside} has it")


def test_every_private_name_is_in_the_table() -> None:
    files = [source for source in sources() if source.inside != ("core", "torch_internals")]
    own = {name for source in files for name in defined(source)}
    obey(LAW, (finding for source in files for finding in findings(source, own)))


def test_a_private_name_is_found() -> None:
    assert list(findings(read("import torch\ntorch._C._new_thing()\n"), set()))
    assert list(findings(read("from torch._new import thing\n"), set()))
    assert list(findings(read("hasattr(module, '_new_thing')\n"), set()))
    assert list(findings(read("NAME = 'torch._new.thing'\n"), set()))
    assert not list(findings(read("from torch import nn\nmodel._parameters\n"), set()))


def test_files_of_the_table_are_there() -> None:
    inside = {"/".join(source.inside) + ".py" for source in sources()}
    for each in INTERNALS:
        assert all(any(path.startswith(file) for path in inside) for file in each.files), each.subject


def required_subjects(source: Source) -> Iterator[str]:
    """Yield the texts in calls of ``require``."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require":
            yield from (each.value for each in node.args if isinstance(each, ast.Constant))


def test_every_subject_that_has_no_other_way_is_looked_at() -> None:
    """Else a newer torch without it would fail in the middle of a training."""
    required = {subject for source in sources() for subject in required_subjects(source)} | {*COMMON}
    refused = {each.subject for each in INTERNALS if each.without == REFUSED}
    assert refused == required


GONE = (
    Internals("a subject", ("a.py",), {"torch": "Tensor.shape Tensor._gone"}),
    Internals("another", ("a.py",), {"torch": "Tensor._gone"}, "it does without"),
)


def test_a_newer_torch_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "INTERNALS", GONE)
    torch_internals.require("a subject")  # a version that was tried
    monkeypatch.setattr(torch, "__version__", "9.0.1+cpu")
    torch_internals.require("another")
    with pytest.raises(FeatureNotBuiltError, match=r"no torch.Tensor._gone any more") as caught:
        torch_internals.require("a subject")
    assert "torch.Tensor.shape" not in str(caught.value)
    assert TESTED[-1] in caught.value.fix


def test_versions_that_count_as_tried_are_those_of_make_test_torch() -> None:
    root = Path(__file__).parents[2]
    newest = (root / "tests/support/requirements-newest.txt").read_text().strip().removeprefix("torch==")
    listed = re.search(r"^TORCHES \?= (.*) \$\(NEWEST\)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert listed is not None
    assert (*listed[1].split(), newest) == TESTED


def test_names_have_versions() -> None:
    name = TorchName("torch", "x", ">=2.10")
    assert not name.is_expected("2.9.1")
    assert name.is_expected("2.10.0+cpu")
    assert name.is_expected("2.10.0a0+git1234")
