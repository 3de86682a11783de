"""Device maps: inferred, balanced, tidied and checked; what 1.x gives where that is right, and what not.

Traps E4 (every tensor has a home, ties together) and E5 (devices and budgets that cannot be).
"""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelerate.core.errors import DeviceError, SettingError, UnknownNameError
from accelerate.utils import infer_auto_device_map as from_utils
from accelerate.utils.modeling import (
    check_device_map,
    check_tied_parameters_on_same_device,
    clean_device_map,
    compute_module_sizes,
    fallback_allocate,
    find_tied_parameters,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
)
from tests.null.test_model_sizes import Small, Tied
from tests.support.devices import device_named, pretend_memory
from tests.support.long_run import hypothesis_settings


def three() -> nn.Sequential:
    """236 bytes each."""
    return nn.Sequential(Small(), Small(), Small())


def chain() -> nn.Module:
    """176, 80 and 160 bytes, two levels down."""
    linears = {"linear1": nn.Linear(10, 4), "linear2": nn.Linear(4, 4), "linear3": nn.Linear(4, 8)}
    return nn.Sequential(OrderedDict(module=nn.Sequential(OrderedDict(linears))))


# --- infer_auto_device_map: the results of 1.15 -------------------------------------------------------------


def test_the_maps_of_1_x():
    infer = infer_auto_device_map
    assert infer(Small(), {0: 200, 1: 200}) == {"linear1": 0, "batchnorm": 1, "linear2": 1}
    assert infer(Small(), {0: 200, 1: 172, 2: 200}) == {"linear1": 0, "batchnorm": 1, "linear2": 1}
    assert infer(Small(), {0: "1KB"}) == {"": 0}
    cut = {"0": 0, "1.linear1": 0, "1.batchnorm": 0, "1.linear2": 1, "2": 1}
    assert infer(three(), {0: 500, 1: 500}) == cut
    assert infer(three(), {0: 500, 1: 500}, no_split_module_classes=["Small"]) == {"0": 0, "1": 1, "2": 1}
    assert infer(three(), {0: 500, 1: 500}, no_split_module_classes="Small") == {"0": 0, "1": 1, "2": 1}
    assert infer(three(), {1: 708, 0: 0}) == {"": 1}
    assert from_utils is infer


def test_a_map_for_the_cpu_and_the_disk():
    assert infer_auto_device_map(Small(), {"cpu": 1000}) == {"": "cpu"}
    found = infer_auto_device_map(Small(), {"cpu:0": 200, "disk": "1KB"})
    assert found == {"linear1": "cpu", "batchnorm": "cpu", "linear2": "disk"}


def test_a_narrower_dtype_takes_less_room():
    assert infer_auto_device_map(three(), {0: 366, "cpu": 1000}, dtype=torch.float16) == {"": 0}
    special = dict.fromkeys([name for name, _ in three().named_parameters()], torch.float16)
    assert infer_auto_device_map(three(), {0: 360, "cpu": 1000}, special_dtypes=special)["0"] == 0


def test_ties_go_together_and_count_once():
    with torch.device("meta"):
        model = Tied()
    assert infer_auto_device_map(model, {0: 1340}) == {"": 0}
    found = infer_auto_device_map(model, {0: 932, "cpu": 2000}, offload_buffers=True)
    assert {found["embed"], found["head"]} == {0}
    assert found["layers"] == "cpu"


def test_a_map_that_is_not_tidied_names_the_parts_of_the_model():
    found = infer_auto_device_map(three(), {0: 708}, clean_result=False)
    assert found == {"0": 0, "1": 0, "2": 0}
    assert infer_auto_device_map(nn.Linear(2, 2), {0: 100}, clean_result=False) == {"": 0}


def test_scalars_beside_submodules_have_a_home():
    """PAINS 16: "does not give any device for the parameter layer_scalar"."""
    model = Tied()
    for size in (700, 933, 1000, 1300):
        check_device_map(model, infer_auto_device_map(model, {0: size, "cpu": 10**4}, offload_buffers=True))


def test_buffers_that_stay_on_the_executor_count():
    """1.15 puts 0.linear1 and 0.batchnorm on device 0, which then needs 136 + 100 + 2 x 40 bytes of 256."""
    found = infer_auto_device_map(three(), {0: 256, "cpu": 2000}, offload_buffers=True)
    assert found["0.linear1"] == found["0.batchnorm"] == 0
    with pytest.warns(
        UserWarning, match="nothing is on 0, of insufficient memory.* and the buffers of others"
    ):
        assert infer_auto_device_map(three(), {0: 256, "cpu": 2000}) == {"": "cpu"}


def test_smaller_modules_are_looked_for_when_asked():
    """``fallback_allocation`` keeps the promises of 1.x."""
    with pytest.warns(UserWarning, match="insufficient memory"):
        assert set(infer_auto_device_map(chain(), {0: 256}).values()) == {"disk"}
    expected = {"module.linear1": "disk", "module.linear2": 0, "module.linear3": "disk"}
    assert infer_auto_device_map(chain(), {0: 256}, fallback_allocation=True) == expected


def test_verbose_shows_the_plan(capsys):
    infer_auto_device_map(Small(), {0: 200, 1: 200}, verbose=True)
    assert capsys.readouterr().out.splitlines()[1] == "linear1                    0       64 bytes"


def test_a_list_of_classes_may_name_some_that_a_model_lacks():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infer_auto_device_map(Small(), {0: 1000}, no_split_module_classes=["Linear", "LlamaDecoderLayer"])
    with pytest.warns(UserWarning, match="did you mean 'Linear'"):
        infer_auto_device_map(Small(), {0: 1000}, no_split_module_classes=["Lineer"])


def test_weights_that_are_to_be_tied_and_are_not_are_told():
    class PreTrainedModel(nn.Module):
        """Only the attributes that are read."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(4, 4), nn.Linear(4, 4)
            self.config = type("Config", (), {"tie_word_embeddings": True})()

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    with pytest.warns(UserWarning, match="tie_weights"):
        infer_auto_device_map(PreTrainedModel(), {0: 1000})


@pytest.mark.parametrize(
    ("budgets", "error", "said"),
    [
        ({0: 0, "cpu": 0}, SettingError, "every budget is 0"),
        ({"gpu": 100}, UnknownNameError, "an accelerator is a number"),
        ({"cudo:0": 100}, UnknownNameError, "unknown device 'cudo:0'"),
        ({0: "10 gigs"}, SettingError, "not a size"),
        ({0: -5}, SettingError, "negative"),
    ],
)
def test_budgets_that_cannot_work(budgets, error, said):
    """E5: each a clear error, and a ValueError for those who caught that."""
    with pytest.raises(error, match=said) as caught:
        infer_auto_device_map(Small(), budgets)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("first", "wanted"),
    [(90, {"linear1": 0, "batchnorm": "cpu", "linear2": "cpu"}), (50, {"": "cpu"})],
)
def test_a_block_larger_than_the_accelerator_is_placed_with_a_warning(first, wanted):
    """E5: what fits the accelerator is placed there, as in 1.15; computing the block there may fail."""
    said = "running the model may fail" if 0 in wanted.values() else "nothing is on 0"
    with pytest.warns(UserWarning, match=said):
        assert infer_auto_device_map(Small(), {0: first, "cpu": 1000}) == wanted


def random_module(chance: random.Random, depth: int, pool: list[nn.Parameter]) -> nn.Module:
    """Modules with scalars, buffers of both kinds, and parameters that others have too."""
    module = nn.Linear(chance.randint(1, 4), 2) if chance.random() < 0.3 else nn.Module()
    for number in range(chance.randint(0, 2)):
        if pool and chance.random() < 0.3:
            module.register_parameter(f"tied{number}", chance.choice(pool))
        else:
            module.register_parameter(
                f"own{number}", nn.Parameter(torch.ones(chance.choice([(), (3,), (9,)])))
            )
            pool.append(module.get_parameter(f"own{number}"))
    if chance.random() < 0.3:
        module.register_buffer("buffer", torch.ones(5), persistent=chance.random() < 0.5)
    for number in range(chance.randint(1, 3) if depth else 0):
        module.add_module(f"m{number}", random_module(chance, depth - 1, pool))
    return module


def deciding_entry(name, device_map):
    """The entry of a map that says where a weight goes; "" is that of the whole model."""
    return max((key for key in device_map if not key or f"{name}.".startswith(f"{key}.")), key=len)


@hypothesis_settings(50, in_long_run=150)
@given(st.integers(0, 2**48))
def test_maps_of_random_models_are_whole(seed):
    """E4: every tensor has exactly one home, tied ones the same, at any budget."""
    chance = random.Random(seed)
    with torch.device("meta"):
        model = random_module(chance, chance.randint(0, 3), [])
    total = compute_module_sizes(model)[""]
    budgets = {0: int(total * chance.random()), 1: int(total * chance.random()), "cpu": 10 * total + 1}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found = infer_auto_device_map(model, budgets, clean_result=chance.random() < 0.7)
    except SettingError:
        return
    check_device_map(model, found)
    for name, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        assert sum(not key or f"{name}.".startswith(f"{key}.") for key in found) == 1
    for group in find_tied_parameters(model):
        assert len({found[deciding_entry(name, found)] for name in group}) == 1
    assert clean_device_map(dict(found)) == clean_device_map(clean_device_map(dict(found)))


# --- budgets ------------------------------------------------------------------------------------------------


def test_balanced_budgets_of_1_x():
    balanced = get_balanced_memory
    assert balanced(Small(), {0: 200, 1: 200}) == {0: 200, 1: 200}
    assert balanced(Small(), {0: 300, 1: 300}) == {0: 215, 1: 300}
    assert balanced(Small(), {0: 300, 1: 500}) == {0: 215, 1: 500}
    assert balanced(Small(), {0: 300, 1: 500}, low_zero=True) == {0: 0, 1: 500}
    assert balanced(Small(), {0: 0, 1: 300, 2: 300}) == {0: 0, 1: 215, 2: 300}
    assert balanced(Small(), {"cpu": 100}) == {"cpu": 100}
    assert balanced(Small(), {0: "1KB", "cpu": 100}) == {0: 1000, "cpu": 100}


def test_balanced_budgets_hold_what_the_full_ones_hold():
    """1.15 leaves 36 bytes to device 0 here, and so sends linear2 to the disk."""
    budgets = get_balanced_memory(Small(), {0: 200, 1: 200}, low_zero=True)
    assert set(infer_auto_device_map(Small(), budgets).values()) == {0, 1}
    big = nn.Sequential(nn.Linear(2, 2), nn.Linear(60, 60), nn.Linear(2, 2), nn.Linear(2, 2))
    budgets = get_balanced_memory(big, {0: 20000, 1: 20000, 2: 20000, "cpu": 10**6})
    assert "cpu" not in infer_auto_device_map(big, budgets).values()


def test_a_single_accelerator_of_this_machine_keeps_a_tenth_free(monkeypatch):
    pretend_memory(monkeypatch, 1, 1000, as_type="cuda")
    budgets = get_balanced_memory(Small())
    assert budgets[0] == 900
    assert list(budgets) == [0, "cpu"]


def test_the_memory_of_this_machine(monkeypatch):
    free, total = device_named("cpu").get_memory_info()
    assert 0 < get_max_memory()["cpu"] <= total
    assert free > 0
    null = pretend_memory(monkeypatch, 2, 1000, as_type="cuda")
    null.allocate(400, 1)
    assert {**get_max_memory(), "cpu": 1} == {0: 1000, 1: 600, "cpu": 1}
    assert get_max_memory({"disk": "2KB", 1: "1KB", "cpu": "1GiB"}) == {1: 1000, "cpu": 2**30, "disk": 2000}


def test_an_accelerator_that_is_part_of_the_processor_stands_for_all_memory(monkeypatch):
    pretend_memory(monkeypatch, 1, 1000)
    assert get_max_memory() == {"meta": 1000}


def test_devices_that_are_not_here_are_refused(monkeypatch):
    """E5: 1.15 prints "Device 0 is not available" and goes on."""
    with pytest.raises(DeviceError, match="device 0 is not here\n  why: it sees no accelerator"):
        get_max_memory({0: "1GB"})
    with pytest.raises(UnknownNameError, match="'foo'"):
        get_max_memory({"foo": 1})
    pretend_memory(monkeypatch, 2, 1000)
    assert get_max_memory({1: 5}) == {1: 5}
    with pytest.raises(DeviceError, match="device 2 is not here\n  why: this process sees 2 'meta'"):
        get_max_memory({2: 5})


# --- maps that others made ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_map", "expected"),
    [
        ({"a": 0, "b": 0}, {"": 0}),
        ({"a.b": 0, "a.c": 0, "d": 1}, {"a": 0, "d": 1}),
        ({"a.b.c": 0, "a.b.d": 0, "a.e": 1, "f": 1}, {"a.b": 0, "a.e": 1, "f": 1}),
        ({"x.1": 0, "x.10": 1, "x.2": 0}, {"x.1": 0, "x.10": 1, "x.2": 0}),
        ({"a.b": 0}, {"a.b": 0}),
        ({"": 0}, {"": 0}),
        ({}, {}),
        # 1.15 gives {"": 0, "a": 1} and {"a": 1}: parts that are not listed would change their device.
        ({"": 0, "a.x": 1, "a.y": 1}, {"": 0, "a.x": 1, "a.y": 1}),
        ({"a": 0, "a.b": 1, "a.c": 1}, {"a": 0, "a.b": 1, "a.c": 1}),
        ({"": 0, "a.x": 0, "a.y": 1}, {"": 0, "a.y": 1}),
    ],
)
def test_tidying_a_map_changes_no_home(given_map, expected):
    device_map = dict(given_map)
    assert clean_device_map(device_map) is device_map
    assert device_map == expected


def test_tidying_a_part_of_a_map():
    device_map = {"a.b": 0, "a.c": 0, "d.e": 1, "d.f": 1}
    assert clean_device_map(device_map, "a") == {"a": 0, "d.e": 1, "d.f": 1}
    assert clean_device_map(device_map, "no.such") == {"a": 0, "d.e": 1, "d.f": 1}


def test_a_map_is_checked_against_the_model():
    check_device_map(Small(), {"linear1": 0, "batchnorm": "disk", "linear2": torch.device("cpu")})
    check_device_map(Tied(), {"": 1})
    with pytest.raises(SettingError, match=r"gives no device to batchnorm.weight, .*linear2.bias"):
        check_device_map(Small(), {"linear1": 0})
    with pytest.raises(UnknownNameError, match="'linear3'"):
        check_device_map(Small(), {"": 0, "linear3": 1})
    with pytest.raises(UnknownNameError, match="device 'gpu'"):
        check_device_map(Small(), {"": "gpu"})
    with pytest.raises(SettingError, match="-1 is no device"):
        check_device_map(Small(), {"": -1})


def test_a_buffer_that_is_not_saved_may_be_left_out_of_a_map():
    check_device_map(Tied(), {"scale": 0, "embed": 0, "layers": 0, "head": 0})


def test_tied_weights_on_two_devices_are_told():
    tied = find_tied_parameters(Tied())
    with pytest.warns(UserWarning, match="embed.weight on 0, head.weight on 'cpu'"):
        check_tied_parameters_on_same_device(tied, {"embed": 0, "head": "cpu", "": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_tied_parameters_on_same_device(tied, {"embed": 0, "head": 0, "layers": 1})


def test_the_first_module_that_fits():
    model = chain()
    sizes, modules = compute_module_sizes(model), list(model.named_children())
    names = [fallback_allocate(modules, sizes, limit)[0] for limit in (500, 176, "100", 80, 10)]
    assert names == ["module", "module.linear1", "module.linear2", "module.linear2", None]
    name, module, rest = fallback_allocate(modules, sizes, 100)
    assert (name, module) == ("module.linear2", model.module.linear2)
    assert [each for each, _ in rest] == ["module.linear1", "module.linear3"]
    assert fallback_allocate(modules, sizes, 100, ["Sequential"])[0] is None


def test_a_module_is_taken_with_what_it_is_tied_to():
    model = Tied()
    sizes, tied = compute_module_sizes(model), find_tied_parameters(model)
    modules = list(model.named_children())
    assert fallback_allocate(modules, sizes, 600, tied_parameters=tied)[0] == "layers"
    assert fallback_allocate(modules, sizes, 640, tied_parameters=tied)[0] == "embed"
