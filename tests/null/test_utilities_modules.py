"""Small questions about objects and modules, compilation, recipes and helpers for other projects' tests."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from accelerate import Accelerator, utils
from accelerate.core.errors import (
    LaunchError,
    MissingExtraError,
    SettingError,
    UnknownNameError,
)
from accelerate.test_utils import testing
from accelerate.utils import (
    CustomDtype,
    DistributedType,
    KwargsHandler,
    PrecisionType,
    RNGType,
    TorchDynamoPlugin,
    compile_regions,
    get_grad_scaler,
    get_mixed_precision_context_manager,
)


class Block(nn.Module):
    """A layer of a deep model."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) * self.scale


class Deep(nn.Module):
    """Three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


# --- objects


def test_a_dotted_path_is_followed():
    model = Deep()
    assert utils.recursive_getattr(model, "blocks.1.linear") is model.blocks[1].linear
    with pytest.raises(AttributeError):
        utils.recursive_getattr(model, "blocks.9")


def test_pretty_names():
    assert utils.get_pretty_name(nn.Linear) == "Linear"
    assert utils.get_pretty_name(nn.Linear(1, 1)) == "Linear"
    assert utils.get_pretty_name(print) == "print"
    assert utils.get_pretty_name(3) == "int"


def test_dicts_are_merged_level_by_level():
    destination = {"a": {"c": 2, "both": 0}, "d": 3, "kind": {"x": 1}}
    merged = utils.merge_dicts({"a": {"b": 1, "both": 9}, "e": {"f": 4}, "kind": 7}, destination)
    assert merged is destination
    assert merged == {"a": {"c": 2, "both": 9, "b": 1}, "d": 3, "e": {"f": 4}, "kind": 7}


@dataclass
class Options(KwargsHandler):
    """Options of a component."""

    rate: float = 0.1
    tags: list[str] = field(default_factory=list)
    name: str | None = None


def test_only_options_that_differ_travel_on():
    options = Options(tags=["a"])
    assert options.to_dict() == {"rate": 0.1, "tags": ["a"], "name": None}
    assert options.to_kwargs() == {"tags": ["a"]}
    options.to_dict()["tags"].append("b")
    assert options.tags == ["a"]
    assert Options().to_kwargs() == {}

    class Plain(KwargsHandler):
        def __init__(self, size: int = 1) -> None:
            self.size = size

    assert (Plain(2).to_kwargs(), Plain().to_kwargs(), KwargsHandler().to_kwargs()) == ({"size": 2}, {}, {})


def test_enumerations_equal_their_text():
    assert PrecisionType.FP16 == "fp16"
    assert f"{PrecisionType.FP16}" == "fp16"
    assert "bf16" in PrecisionType
    assert "int3" not in PrecisionType
    assert set(PrecisionType.list()) == {"no", "fp8", "fp16", "bf16"}
    assert DistributedType("MULTI_GPU") is DistributedType.MULTI_GPU
    assert {DistributedType.NO: 1}["NO"] == 1
    assert not isinstance(CustomDtype.INT4, str)
    with pytest.raises(ValueError, match="zzz"):
        DistributedType("zzz")


def test_devices_of_the_registry_are_members():
    from accelerate import device as devices

    for device in devices.DEVICES:
        assert device.distributed_type in DistributedType
    for device in devices.accelerators():
        assert device.type in RNGType


# --- modules


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 4),
        (torch.bfloat16, 2),
        (torch.float8_e4m3fn, 1),
        (torch.complex64, 8),
        (torch.bool, 1 / 8),
        ("float16", 2),
        ("torch.int64", 8),
        (CustomDtype.FP8, 1),
        (CustomDtype.INT4, 0.5),
        (CustomDtype.INT2, 0.25),
    ],
)
def test_bytes_of_one_element(dtype, size):
    assert utils.dtype_byte_size(dtype) == size


def test_torch_dtypes_by_name():
    """Unsloth plans device maps with this private function."""
    from accelerate.utils.modeling import _get_proper_dtype

    assert _get_proper_dtype("torch.bfloat16") is _get_proper_dtype(torch.bfloat16) is torch.bfloat16


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="float17"):
        utils.dtype_byte_size("float17")
    with pytest.raises(ValueError, match="None is no dtype"):
        utils.dtype_byte_size(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"),
    [("1.5GiB", 1610612736), ("5GB", 5 * 10**9), ("8Gb", 10**9), (12, 12), ("2KB", 2000), ("1e3MB", 10**9)],
)
def test_sizes_of_files(text, size):
    assert utils.convert_file_size_to_int(text) == size


def test_a_wrong_size_is_refused():
    with pytest.raises(ValueError, match="5zb"):
        utils.convert_file_size_to_int("5zb")


def test_tensors_by_name_parameters_first():
    model = Deep()
    names = [name for name, _ in utils.named_module_tensors(model, recurse=True)]
    assert names == [*dict(model.named_parameters()), *dict(model.named_buffers())]
    assert list(utils.named_module_tensors(model)) == []
    block = model.blocks[0]
    assert [name for name, _ in utils.named_module_tensors(block)] == ["scale", "count"]
    assert list(utils.named_module_tensors(block, include_buffers=False)) == []
    kept = dict(utils.named_module_tensors(model, recurse=True, remove_non_persistent=True))
    assert set(kept) == set(model.state_dict())


def test_buffers_that_are_not_saved():
    model = Deep()
    assert utils.get_non_persistent_buffers(model) == set()
    assert utils.get_non_persistent_buffers(model, recurse=True) == {"scale"}
    expected = {f"blocks.{index}.scale" for index in range(3)}
    assert utils.get_non_persistent_buffers(model, recurse=True, fqns=True) == expected
    assert utils.get_non_persistent_buffers(model.blocks[0], fqns=True) == {"scale"}


def test_children_come_before_their_parents_and_once():
    model = Deep()
    model.again = model.blocks[0]
    order = utils.get_module_children_bottom_up(model)
    assert order[-1] is model
    assert len(order) == len(set(order)) == len(list(model.modules()))
    for module in order:
        assert all(order.index(child) < order.index(module) for child in module.children())
    pairs = utils.get_module_children_bottom_up(model, return_fqns=True)
    assert [module for _, module in pairs] == order
    assert all(model.get_submodule(path) is module for path, module in pairs)


def test_a_class_is_found_by_name():
    assert utils.get_module_class_from_name(Deep(), "Block") is Block
    assert utils.get_module_class_from_name(Deep(), "Deep") is Deep
    assert utils.get_module_class_from_name(Deep(), "Other") is None


def test_repeated_blocks():
    assert utils.has_repeated_blocks(Deep())
    assert utils.is_repeated_blocks(Deep().blocks)
    assert not utils.is_repeated_blocks(nn.ModuleList([nn.ReLU(), nn.Linear(1, 1)]))
    assert not utils.has_repeated_blocks(nn.Sequential(nn.ReLU(), nn.ReLU()))
    assert not utils.is_repeated_blocks(nn.ModuleList())


def test_a_model_without_sharding():
    model = Deep()
    assert not utils.model_has_dtensor(model)
    assert utils.get_model_tp_size(model) is None
    model.tp_size = 4
    assert utils.get_model_tp_size(model) == 4


def test_peft_models_are_known_by_their_class(monkeypatch):
    import types

    model = Deep()
    assert utils.is_peft_model(model) is False
    peft = types.ModuleType("peft")
    peft.PeftModel = Deep
    monkeypatch.setitem(sys.modules, "peft", peft)
    assert utils.is_peft_model(model) is True
    assert utils.is_peft_model(nn.DataParallel(model)) is True
    assert utils.is_peft_model(torch.compile(model, backend="eager")) is True
    assert utils.is_peft_model(Block()) is False


def test_the_users_model_comes_out_of_its_wrappers():
    model = Deep()
    wrapped = nn.DataParallel(model)
    assert utils.extract_model_from_parallel(model) is model
    assert utils.extract_model_from_parallel(wrapped) is model
    compiled = torch.compile(wrapped, backend="eager")
    assert utils.is_compiled_module(compiled)
    assert not utils.is_compiled_module(model)
    assert utils.extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    kept = utils.extract_model_from_parallel(compiled)
    assert utils.is_compiled_module(kept)
    assert kept._orig_mod is model
    assert compiled._orig_mod is wrapped, "the given model is not changed"
    x = torch.randn(2, 4)
    assert torch.equal(kept(x), model(x))
    plain = torch.compile(model, backend="eager")
    assert utils.extract_model_from_parallel(plain) is plain
    assert utils.extract_model_from_parallel(nn.DataParallel(plain)) is plain, "as in 1.x"


def test_wrappers_inside_a_model_come_off_on_request():
    model = Deep()
    inner = model.first
    model.first = nn.DataParallel(inner)
    assert isinstance(utils.extract_model_from_parallel(model).first, nn.DataParallel)
    assert utils.extract_model_from_parallel(model, recursive=True).first is inner


def test_mixed_precision_comes_off_on_request():
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = accelerator.prepare(Deep())
    seen: list[torch.dtype] = []
    model.first.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model(torch.randn(2, 4))
    utils.extract_model_from_parallel(model)(torch.randn(2, 4))
    utils.extract_model_from_parallel(model, keep_fp32_wrapper=False)(torch.randn(2, 4))
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_a_forward_that_gives_float32_is_copied_and_pickled_with_its_model():
    """As a function it is bound in a class; a copy computes with its own weights."""

    class Decorated(nn.Module):
        @utils.convert_outputs_to_fp32
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.half()

    assert Decorated()(torch.ones(1)).dtype == torch.float32
    model = Deep().to(torch.bfloat16)
    model.forward = utils.convert_outputs_to_fp32(model.forward)
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    expected = model(x)
    assert expected.dtype == torch.float32
    assert str(inspect.signature(model.forward)) == "(x: 'torch.Tensor') -> 'torch.Tensor'"
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), expected)
        for parameter in twin.parameters():
            nn.init.zeros_(parameter)
        assert not twin(x).any()
    assert torch.equal(model(x), expected)


# --- compilation


def test_compile_options_come_from_arguments_then_variables(monkeypatch):
    assert TorchDynamoPlugin().to_kwargs() == {}
    assert TorchDynamoPlugin().to_dict()["backend"] == "no"
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "False")
    assert TorchDynamoPlugin().to_kwargs() == {"backend": "eager", "dynamic": False}
    given = TorchDynamoPlugin(
        backend="inductor", mode="max-autotune", fullgraph=True, use_regional_compilation=True
    )
    assert given.to_kwargs() == {
        "backend": "inductor",
        "mode": "max-autotune",
        "fullgraph": True,
        "dynamic": False,
    }
    assert given.is_enabled
    with pytest.raises(UnknownNameError, match="INDUCTOR"):
        TorchDynamoPlugin(backend="inducto")


def test_blocks_are_compiled_in_place_and_names_stay():
    """D9."""
    model = Deep()
    names, x = list(model.state_dict()), torch.randn(2, 4)
    expected = model(x)
    compiled: list[int] = []

    def backend(graph, inputs):
        compiled.append(1)
        return graph.forward

    assert compile_regions(model, backend=backend) is model
    assert utils.has_compiled_regions(model)
    assert torch.equal(model(x), expected)
    assert list(model.state_dict()) == names
    assert len(compiled) == 1, "blocks of one class share the compiled code"
    assert not utils.has_compiled_regions(Deep())


def test_a_model_without_blocks_is_compiled_whole():
    model = nn.Linear(2, 2)
    assert compile_regions(model, backend="eager") is model
    assert model._compiled_call_impl is not None
    assert not utils.has_compiled_regions(model)
    assert utils.has_compiled_regions(torch.compile(nn.Linear(2, 2), backend="eager")), "as in 1.x"


def test_a_model_around_a_compiled_one_is_not_compiled():
    """PEFT models, and FSDP1, pass on attributes of what they hold: they were taken for compiled ones."""
    peft = pytest.importorskip("peft")
    compiled = torch.compile(Deep(), backend="eager")
    model = peft.get_peft_model(compiled, peft.LoraConfig(target_modules=["first"]))
    assert isinstance(model._orig_mod, Deep)
    assert not utils.is_compiled_module(model)
    assert utils.extract_model_from_parallel(model) is model
    assert Accelerator(cpu=True).unwrap_model(model) is model


# --- precision by hand


def test_a_context_needs_a_state():
    with pytest.raises(ValueError, match="Accelerator"):
        get_mixed_precision_context_manager()


def test_a_context_of_the_chosen_precision():
    from accelerate.state import AcceleratorState

    AcceleratorState(mixed_precision="bf16", cpu=True)
    try:
        x, layer = torch.randn(2, 2), nn.Linear(2, 2)
        with get_mixed_precision_context_manager():
            assert layer(x).dtype == torch.float32
        with get_mixed_precision_context_manager(native_amp=True):
            assert layer(x).dtype == torch.bfloat16
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_a_scaler_for_each_way_of_training():
    assert get_grad_scaler(init_scale=4.0, enabled=False).is_enabled() is False
    assert isinstance(get_grad_scaler(DistributedType.MULTI_CPU), torch.amp.GradScaler)
    assert isinstance(get_grad_scaler(DistributedType.DEEPSPEED), torch.amp.GradScaler)
    sharded = get_grad_scaler(DistributedType.FSDP, init_scale=4.0)
    assert (type(sharded), sharded.get_scale()) == (ShardedGradScaler, 4.0)


# --- recipes


@pytest.fixture
def library(monkeypatch):
    """``library(name)`` pretends that a package is installed."""
    import types

    def add(name: str) -> types.ModuleType:
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return add


def test_a_recipe_needs_its_library():
    with pytest.raises(MissingExtraError, match="pip install transformer_engine"):
        utils.TERecipeKwargs()


def test_recipes_take_variables_then_defaults(monkeypatch, library):
    library("transformer_engine")
    recipe = utils.TERecipeKwargs()
    assert recipe.to_kwargs() == {}
    assert (recipe.fp8_format, recipe.margin, recipe.amax_history_len) == ("HYBRID", 0, 1024)
    assert recipe.override_linear_precision == (False, False, False)
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "2")
    monkeypatch.setenv("ACCELERATE_FP8_OVERRIDE_WGRAD", "true")
    recipe = utils.TERecipeKwargs(fp8_format="e4m3", amax_compute_algo="max")
    assert (recipe.fp8_format, recipe.margin, recipe.amax_compute_algo) == ("E4M3", 2, "max")
    assert recipe.override_linear_precision == (False, False, True)
    with pytest.raises(UnknownNameError, match="HYBRID"):
        utils.TERecipeKwargs(fp8_format="HYBRI")
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "two")
    with pytest.raises(SettingError, match="ACCELERATE_FP8_MARGIN is the text 'two'"):
        utils.TERecipeKwargs()


def test_a_level_of_optimisation(monkeypatch):
    assert utils.MSAMPRecipeKwargs().opt_level == "O2"
    assert utils.MSAMPRecipeKwargs(opt_level="O1").to_kwargs() == {"opt_level": "O1"}
    with pytest.raises(UnknownNameError, match="O1"):
        utils.MSAMPRecipeKwargs(opt_level="O3")
    assert utils.MSAMPRecipeKwargs().to_kwargs() == {}
    monkeypatch.setenv("ACCELERATE_FP8_OPT_LEVEL", "O1")
    assert utils.MSAMPRecipeKwargs().to_kwargs() == {"opt_level": "O1"}


def test_the_old_recipe_still_works_and_says_it_is_old(library):
    with pytest.warns(FutureWarning, match="TERecipeKwargs"):
        recipe = utils.FP8RecipeKwargs(backend="msamp", opt_level="O1")
    assert recipe.opt_level == "O1"
    assert recipe.to_kwargs() == {"opt_level": "O1"}
    with pytest.warns(FutureWarning), pytest.raises(MissingExtraError, match="transformer_engine"):
        utils.FP8RecipeKwargs(backend="TE")
    with pytest.warns(FutureWarning), pytest.raises(UnknownNameError, match="MSAMP"):
        utils.FP8RecipeKwargs(backend="other")
    library("transformer_engine")
    with pytest.warns(FutureWarning):
        recipe = utils.FP8RecipeKwargs(backend="TE", margin=2, use_mxfp8_block_scaling=True)
    expected = utils.TERecipeKwargs(margin=2, use_mxfp8_block_scaling=True).to_kwargs()
    assert recipe.to_kwargs() == expected
    assert expected["margin"] == 2


# --- helpers for other projects' tests


def test_a_command_is_run_and_its_output_kept(capfd):
    code = "import sys; print('out'); print('err', file=sys.stderr)"
    result = testing.execute_subprocess_async([sys.executable, "-c", code])
    assert (result.returncode, result.stdout, result.stderr) == (0, ["out"], ["err"])
    shown = capfd.readouterr()
    assert "Running:" in shown.out
    assert shown.out.rstrip().endswith("out")
    assert "err" in shown.err
    code = "print('x' * 200_000)"  # longer than a stream of asyncio takes by default
    long = testing.execute_subprocess_async([sys.executable, "-c", code], quiet=True, echo=False)
    assert long.stdout == ["x" * 200_000]
    assert capfd.readouterr() == ("", "")


def test_a_failing_command_raises_with_the_end_of_its_output():
    with pytest.raises(LaunchError, match="exit status 3") as caught:
        testing.execute_subprocess_async(
            [sys.executable, "-c", "import sys; print('the reason', file=sys.stderr); sys.exit(3)"],
            quiet=True,
        )
    assert "the reason" in str(caught.value)
    with pytest.raises(LaunchError, match=r"more than 0\.2 s"):
        testing.execute_subprocess_async([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2)


def test_each_test_worker_has_a_port(monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    assert testing.get_torch_dist_unique_port() == 29500
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw7")
    assert testing.get_torch_dist_unique_port() == 29507
    assert testing.path_in_accelerate_package("core", "errors.py").is_file()
    assert Path(testing.path_in_accelerate_package()).name == "accelerate"
