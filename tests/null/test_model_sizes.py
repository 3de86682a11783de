"""Sizes of models: bytes of modules, largest layers, weights that are one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.utils import CustomDtype
from accelerate.utils.modeling import (
    calculate_maximum_sizes,
    check_tied_parameters_in_config,
    compute_module_sizes,
    compute_module_total_buffer_size,
    find_tied_parameters,
    get_max_layer_size,
    get_module_leaves,
    get_module_size_with_ties,
)


class TokenFilter(nn.Module):
    """168 bytes of a table, 152 of a convolution, and 56 of buffers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.filter = nn.Conv1d(6, 2, kernel_size=3)
        self.stats = nn.InstanceNorm1d(6, track_running_stats=True)


class Tied(nn.Module):
    """An embedding that is the head too, a scalar beside submodules, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("angles", torch.ones(30), persistent=False)


MODULES = {"": 376, "table": 168, "filter": 152, "stats": 56}


def test_bytes_of_every_module_and_tensor():
    sizes = compute_module_sizes(TokenFilter())
    assert {name: sizes[name] for name in MODULES} == MODULES
    assert sizes["filter.weight"] == 144
    assert sizes["stats.num_batches_tracked"] == 8
    assert sizes["no.such.name"] == 0
    assert sum(sizes[name] for name in get_module_leaves(sizes)) == 376


def test_modules_come_before_what_is_in_them_and_parameters_before_buffers():
    model = nn.ModuleDict({"norm": nn.InstanceNorm1d(6, track_running_stats=True), "linear": nn.Linear(2, 2)})
    sizes = ["", "linear", "linear.weight", "linear.bias", "norm", "norm.running_mean", "norm.running_var"]
    assert list(compute_module_sizes(model)) == [*sizes, "norm.num_batches_tracked"]


def test_sizes_are_those_of_the_tensors_whatever_the_device():
    with torch.device("meta"):
        empty = TokenFilter()
    assert compute_module_sizes(empty) == compute_module_sizes(TokenFilter())


@pytest.mark.parametrize(
    ("dtype", "total"),
    [(torch.float16, 192), ("bfloat16", 192), (torch.float64, 376), (CustomDtype.FP8, 100)],
)
def test_a_dtype_counts_floats_as_converted_and_nothing_larger_than_it_is(dtype, total):
    assert compute_module_sizes(TokenFilter(), dtype=dtype)[""] == total


def test_formats_that_share_a_byte_are_rounded_up_to_whole_bytes():
    sizes = compute_module_sizes(nn.Linear(3, 3), dtype=CustomDtype.INT4)
    assert sizes == {"weight": 5, "bias": 2, "": 7}


def test_a_weight_may_have_a_dtype_of_its_own():
    sizes = compute_module_sizes(TokenFilter(), torch.float16, {"filter.bias": torch.float32})
    assert sizes["filter"] == 144 // 2 + 8


def test_a_bool_takes_a_byte():
    module = nn.Module()
    module.register_buffer("mask", torch.ones(16, dtype=torch.bool))
    assert compute_module_sizes(module) == {"mask": 16, "": 16}


def test_buffers_alone_those_that_are_not_saved_too():
    """E4: they take room like all others."""
    assert compute_module_total_buffer_size(TokenFilter()) == 56
    assert compute_module_total_buffer_size(Tied()) == 120
    assert set(compute_module_sizes(TokenFilter(), buffers_only=True)) == {
        "",
        "stats",
        "stats.running_mean",
        "stats.running_var",
        "stats.num_batches_tracked",
    }


def test_a_tied_weight_counts_once_where_it_comes_first():
    sizes = compute_module_sizes(Tied())
    assert sizes["embed"] == 640
    assert sizes["head"] == 0
    assert sizes[""] == 4 + 640 + 2 * 288 + 120


def test_ties_are_found_without_values():
    with torch.device("meta"):
        model = nn.Sequential(Tied(), Tied())
    model[1].layers[0].weight = model[0].layers[1].weight
    assert find_tied_parameters(model) == [
        ["0.embed.weight", "0.head.weight"],
        ["0.layers.1.weight", "1.layers.0.weight"],
        ["1.embed.weight", "1.head.weight"],
    ]
    assert find_tied_parameters(TokenFilter()) == []
    with pytest.raises(PrepareError, match="no named_parameters"):
        find_tied_parameters(model, named_parameters={})


def test_a_module_that_is_used_twice_is_tied_to_itself():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert find_tied_parameters(model) == [["0.weight", "2.weight"], ["0.bias", "2.bias"]]


def test_largest_layers():
    model, sizes = (
        nn.Sequential(TokenFilter(), TokenFilter()),
        compute_module_sizes(nn.Sequential(TokenFilter(), TokenFilter())),
    )
    modules = list(model.named_children())
    assert get_max_layer_size(modules, sizes, []) == (168, ["0.table", "1.table"])
    assert get_max_layer_size(modules, sizes, ["TokenFilter"]) == (376, ["0", "1"])
    assert get_max_layer_size(modules[1:], sizes, None) == (168, ["1.table"])


def test_a_tensor_beside_submodules_is_a_layer():
    model = Tied()
    model.positions = nn.Parameter(torch.ones(1000))
    assert calculate_maximum_sizes(model) == (5340, (4000, ["positions"]))
    model._no_split_modules = ["ModuleList"]
    assert calculate_maximum_sizes(model)[1] == (4000, ["positions"])
    assert calculate_maximum_sizes(nn.Linear(4, 4)) == (80, (64, ["weight"]))


def test_the_size_of_a_module_with_what_it_is_tied_to():
    model = Tied()
    sizes = compute_module_sizes(model)
    others = [pair for pair in model.named_children() if pair[0] != "embed"]
    total, names, modules = get_module_size_with_ties(["head.weight"], sizes["embed"], sizes, others)
    assert (total, names, modules) == (640, ["head"], [model.head])
    with pytest.raises(PrepareError, match="is in none of the modules"):
        get_module_size_with_ties(["embed.weight"], 0, sizes, others)


def test_whether_a_model_of_transformers_says_it_ties_weights():
    assert not check_tied_parameters_in_config(Tied())
    transformers = pytest.importorskip("transformers")
    numbers = {"vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    for tied in (True, False):
        config = transformers.LlamaConfig(intermediate_size=8, tie_word_embeddings=tied, **numbers)
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config)
        assert check_tied_parameters_in_config(model) is tied
