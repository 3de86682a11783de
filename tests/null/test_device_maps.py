"""Device maps: inferred, balanced, tidied and checked; what 1.x gives where that is right, and what not.

Traps E4 (every tensor has a home, ties together) and E5 (devices and budgets that cannot be).
"""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelerate.core.errors import SettingError, UnknownNameError
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
from tests.null.test_model_sizes import Tied, TokenFilter
from tests.support.devices import device_named, pretend_memory
from tests.support.long_run import hypothesis_settings


def three() -> nn.Sequential:
    """376 bytes each."""
    return nn.Sequential(*[TokenFilter() for _ in range(3)])


def chain() -> nn.Module:
    """196, 96 and 176 bytes, two levels down."""
    linears = {"encode": nn.Linear(6, 7), "mix": nn.Linear(7, 3), "decode": nn.Linear(3, 11)}
    return nn.Sequential(OrderedDict(module=nn.Sequential(OrderedDict(linears))))


# --- infer_auto_device_map: the results of 1.15 -------------------------------------------------------------


ON_BOTH = {"0": 0, "1.table": 0, "1.filter": 1, "1.stats": 1, "2": 1}


@pytest.mark.parametrize(
    ("make", "budgets", "no_split", "expected"),
    [
        (TokenFilter, {0: "2KB"}, None, {"": 0}),
        (TokenFilter, {0: 350, 1: 260}, None, {"table": 0, "filter": 1, "stats": 1}),
        (TokenFilter, {0: 350, 1: 260}, ["TokenFilter"], {"table": 0, "filter": 1, "stats": 1}),
        (three, {0: 0, 1: 1128}, None, {"": 1}),
        (three, {0: 730, 1: 860}, None, ON_BOTH),
        (three, {0: 850, 1: 700}, (), ON_BOTH),
        (three, {0: 760, 1: 860}, ["TokenFilter"], {"0": 0, "1": 1, "2": 1}),
        (three, {0: 760, 1: 860}, "TokenFilter", {"0": 0, "1": 1, "2": 1}),
        (three, {0: 1128, 1: 1128}, ["Conv1d"], {"": 0}),
    ],
)
def test_the_maps_of_1_x(make, budgets, no_split, expected):
    found = infer_auto_device_map(make(), budgets, no_split_module_classes=no_split)
    assert (found, from_utils) == (expected, infer_auto_device_map)


def test_three_accelerators_are_filled_in_turn():
    found = infer_auto_device_map(three(), {0: 900, 1: 300, 2: 900})
    devices = [found[f"{number}.{name}"] for number in (1, 2) for name in ("table", "filter", "stats")]
    assert (found["0"], devices) == (0, [0, 0, 1, 1, 2, 2])


def test_a_budget_may_be_a_number_of_numpy_or_torch():
    for number in (numpy.int64(10**6), numpy.float32(1e6), torch.tensor(10**6)):
        assert infer_auto_device_map(nn.Linear(4, 4), {"cpu": number}) == {"": "cpu"}
        assert get_max_memory({"cpu": number}) == {"cpu": 10**6}


def test_a_map_for_the_cpu_and_the_disk():
    assert infer_auto_device_map(three(), {"cpu": 2000}) == {"": "cpu"}
    found = infer_auto_device_map(TokenFilter(), {"cpu:0": 330, "disk": "1KB"}, offload_buffers=True)
    assert found == {"table": "cpu", "filter": "cpu", "stats": "disk"}


def test_a_narrower_dtype_takes_less_room():
    assert infer_auto_device_map(three(), {0: 576, "cpu": 2000}, dtype=torch.float16) == {"": 0}
    assert infer_auto_device_map(three(), {0: 575, "cpu": 2000}, dtype=torch.float16) != {"": 0}
    halves = dict.fromkeys([name for name, _ in three().named_parameters()], torch.float16)
    assert infer_auto_device_map(three(), {0: 648, "cpu": 2000}, special_dtypes=halves) == {"": 0}


def test_ties_go_together_and_count_once():
    with torch.device("meta"):
        model = Tied()
    assert infer_auto_device_map(model, {0: 1340}) == {"": 0}
    found = infer_auto_device_map(model, {0: 932, "cpu": 2000}, offload_buffers=True)
    assert {found["embed"], found["head"]} == {0}
    assert found["layers"] == "cpu"


def test_a_map_that_is_not_tidied_names_the_parts_of_the_model():
    found = infer_auto_device_map(three(), {0: 1128}, clean_result=False)
    assert found == {"0": 0, "1": 0, "2": 0}
    assert infer_auto_device_map(nn.Linear(2, 2), {0: 100}, clean_result=False) == {"": 0}


def test_scalars_beside_submodules_have_a_home():
    """PAINS 16: "does not give any device for the parameter layer_scalar"."""
    model = Tied()
    for size in (700, 933, 1000, 1300):
        check_device_map(model, infer_auto_device_map(model, {0: size, "cpu": 10**4}, offload_buffers=True))


def test_buffers_that_stay_on_the_executor_count():
    """1.15 puts 0.table on device 0, which then needs 2 x 168 + 3 x 56 bytes of 400."""
    found = infer_auto_device_map(three(), {0: 400, "cpu": 2000}, offload_buffers=True)
    assert (found.pop("0.table"), set(found.values())) == (0, {"cpu"})
    with pytest.warns(
        UserWarning, match="nothing is on 0, of insufficient memory.* and the buffers of others"
    ):
        assert infer_auto_device_map(three(), {0: 400, "cpu": 2000}) == {"": "cpu"}


def test_smaller_modules_are_looked_for_when_asked():
    """``fallback_allocation`` keeps the promises of 1.x."""
    with pytest.warns(UserWarning, match="insufficient memory"):
        assert set(infer_auto_device_map(chain(), {0: 300}).values()) == {"disk"}
    expected = {"module.encode": "disk", "module.mix": 0, "module.decode": "disk"}
    assert infer_auto_device_map(chain(), {0: 300}, fallback_allocation=True) == expected


def test_verbose_shows_the_plan(capsys):
    infer_auto_device_map(TokenFilter(), {0: 350, 1: 260}, verbose=True)
    assert capsys.readouterr().out.splitlines()[1].split() == ["table", "0", "168", "bytes"]


def test_a_list_of_classes_may_name_some_that_a_model_lacks():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infer_auto_device_map(
            TokenFilter(), {0: 1000}, no_split_module_classes=["Conv1d", "LlamaDecoderLayer"]
        )
    with pytest.warns(UserWarning, match="did you mean 'Conv1d'"):
        infer_auto_device_map(TokenFilter(), {0: 1000}, no_split_module_classes=["Conv1"])


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
        ({0: 0, "disk": 0}, SettingError, "every budget is 0"),
        ({"gpu": 100}, UnknownNameError, "an accelerator is a number"),
        ({"cudo:0": 100}, UnknownNameError, "unknown device 'cudo:0'"),
        ({0: "10 gigs"}, SettingError, "not a size"),
        ({0: -5}, SettingError, "negative"),
    ],
)
def test_budgets_that_cannot_work(budgets, error, said):
    """E5: each a clear error, and a ValueError for those who caught that."""
    with pytest.raises(error, match=said) as caught:
        infer_auto_device_map(TokenFilter(), budgets)
    assert isinstance(caught.value, ValueError)


class Normed(nn.Module):
    """Linear layer of 24 bytes, and a batch norm with 24 bytes of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)


@pytest.mark.parametrize("budgets", [{}, {"cpu": 0}, {0: 0}, {0: 20, 1: 20, "cpu": 20}, {"cpu": 20}])
def test_budgets_that_hold_nothing_leave_all_to_the_disk(budgets):
    with pytest.warns(UserWarning, match="hold no part of the model: all of it is on the disk"):
        assert infer_auto_device_map(Normed(), budgets) == {"": "disk"}
    with pytest.raises(SettingError, match="fits nowhere"):
        infer_auto_device_map(Normed(), {**budgets, "cpu": 20, "disk": 30})


@pytest.mark.parametrize("budgets", [{0: 160}, {0: 40}, {0: 160, 1: 150}])
def test_the_cpu_computes_a_model_with_a_block_larger_than_every_accelerator(budgets):
    """E5: it computes what would fit the accelerators too, as a forward needs them for the block."""
    with pytest.warns(UserWarning, match="of insufficient memory: .* largest block") as warned:
        assert infer_auto_device_map(TokenFilter(), {**budgets, "cpu": 1000}) == {"": "cpu"}
    assert len(warned) == len(budgets)


@pytest.mark.parametrize(("budgets", "home"), [({0: 100}, "cpu"), ({0: 100, 1: 1000}, 1)])
def test_first_modules_without_weights_name_the_device_where_inputs_are(budgets, home):
    """QwenImage of diffusers begins with such embeddings: the map names 0, so the rest is hooked."""
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4), nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        placement = infer_auto_device_map(model, {**budgets, "cpu": 1000}, no_split_module_classes=["Linear"])
    assert placement == {"0": 0, "1": home, "2": home}


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


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [
        ({0: 900, 1: 900}, {0: 720, 1: 900}),
        ({0: 700, 1: 700, 2: 700}, {0: 532, 1: 532, 2: 700}),
        ({0: 0, 1: 900, 2: 900}, {0: 0, 1: 720, 2: 900}),
        ({0: 500, 1: 500}, {0: 500, 1: 500}),
        ({0: "3KB", "cpu": 640}, {0: 3000, "cpu": 640}),
        ({"cpu": 640}, {"cpu": 640}),
    ],
)
def test_balanced_budgets_of_1_x(budgets, expected):
    assert get_balanced_memory(three(), budgets) == expected
    assert get_balanced_memory(three(), budgets, ["Sequential"]) == expected, "the model is no block"


def test_the_first_accelerator_is_left_out_of_balanced_budgets_where_asked():
    assert get_balanced_memory(three(), {0: 900, 1: 1200}, low_zero=True) == {0: 0, 1: 1200}


def test_balanced_budgets_hold_what_the_full_ones_hold():
    """1.15 leaves 26 bytes to device 0 here, and so sends stats to the disk."""
    budgets = get_balanced_memory(TokenFilter(), {0: 350, 1: 350}, low_zero=True)
    assert set(infer_auto_device_map(TokenFilter(), budgets).values()) == {0, 1}
    big = nn.Sequential(nn.Linear(2, 2), nn.Linear(60, 60), nn.Linear(2, 2), nn.Linear(2, 2))
    budgets = get_balanced_memory(big, {0: 20000, 1: 20000, 2: 20000, "cpu": 10**6})
    assert "cpu" not in infer_auto_device_map(big, budgets).values()


def test_a_single_accelerator_of_this_machine_keeps_a_tenth_free(monkeypatch):
    pretend_memory(monkeypatch, 1, 1000, as_type="cuda")
    budgets = get_balanced_memory(TokenFilter())
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


def test_budgets_of_devices_that_are_not_here_are_told_and_kept(monkeypatch):
    """E5: the plan may be for another machine."""
    with pytest.warns(UserWarning, match="a budget for device 0, and this process sees no accelerator"):
        assert get_max_memory({0: "1GB", "cpu": "10MiB"}) == {0: 10**9, "cpu": 10 * 2**20}
    with pytest.raises(UnknownNameError, match="'foo'"):
        get_max_memory({"foo": 1})
    pretend_memory(monkeypatch, 2, 1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_max_memory({1: 5}) == {1: 5}
    with pytest.warns(UserWarning, match="a budget for device 2, and this process sees 2 'meta'"):
        assert get_max_memory({2: 5}) == {2: 5}


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
    check_device_map(TokenFilter(), {"table": 0, "filter": "disk", "stats": torch.device("cpu")})
    check_device_map(Tied(), {"": 1})
    with pytest.raises(SettingError, match=r"gives no device to filter.weight, .*filter.bias"):
        check_device_map(TokenFilter(), {"table": 0})
    with pytest.raises(SettingError, match=r"the model has no 'tables' \(did you mean 'table'\?\)"):
        check_device_map(TokenFilter(), {"tables": 0})
    with pytest.warns(UserWarning, match=r"the model has no 'tables', 'eyes' \(did you mean 'table'\?\)"):
        check_device_map(TokenFilter(), {"": 0, "tables": 1, "eyes": 0})
    with pytest.raises(UnknownNameError, match="device 'gpu'"):
        check_device_map(TokenFilter(), {"": "gpu"})
    with pytest.raises(SettingError, match="-1 is no device"):
        check_device_map(TokenFilter(), {"": -1})


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
    names = [fallback_allocate(modules, sizes, limit)[0] for limit in (470, 196, "100", 96, 10)]
    assert names == ["module", "module.encode", "module.mix", "module.mix", None]
    name, module, rest = fallback_allocate(modules, sizes, 100)
    assert (name, module) == ("module.mix", model.module.mix)
    assert [each for each, _ in rest] == ["module.encode", "module.decode"]
    assert fallback_allocate(modules, sizes, 100, ["Sequential"])[0] is None


def test_a_module_is_taken_with_what_it_is_tied_to():
    model = Tied()
    sizes, tied = compute_module_sizes(model), find_tied_parameters(model)
    modules = list(model.named_children())
    assert fallback_allocate(modules, sizes, 600, tied_parameters=tied)[0] == "layers"
    assert fallback_allocate(modules, sizes, 640, tied_parameters=tied)[0] == "embed"


def test_texts_in_a_dict_of_budgets_become_bytes() -> None:
    """transformers takes the minimum of what it has given and what it gets back."""
    budgets: dict[int | str, int | str] = {"cpu": "1KB", "disk": 5}
    assert get_max_memory(budgets) == budgets == {"cpu": 1000, "disk": 5}
