"""A model spread over two devices, memory and disk: what crosses, in which form, and what compiles."""

from __future__ import annotations

import copy
import functools
import gc
from collections import UserDict
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from accelerate import Accelerator, cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
from accelerate.core.errors import DeviceError, OffloadError, PrepareError
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules
from accelerate.utils import align_module_device, recursively_apply, set_module_tensor_to_device
from tests.sim.test_sim_pager import WIDTH, Net, built, inputs
from tests.support import sim
from tests.support.offloaded import mover_of
from tests.support.packages import needs


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Generator[None]:
    yield
    gc.collect()
    assert [torch.sim.memory_allocated(device) for device in range(2)] == [0, 0]
    torch.sim.empty_cache()


SPREAD: dict[str, Any] = {
    "inp": "sim:0",
    "layers.0": "sim:0",
    "layers.1": 1,
    "layers.2": "cpu",
    "layers.3": "disk",
    "layers.4": "cpu:0",
    "layers.5": "sim:1",
    "out": "sim:1",
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_model_runs_over_two_devices_memory_and_disk(mode: Any, tmp_path: Path) -> None:
    model, x = built(), inputs()
    expected = model(x)
    with mode():
        assert dispatch_model(model, SPREAD, offload_dir=tmp_path) is model
        assert model.hf_device_map == SPREAD
        for given in (x, x.to("sim:1")):
            y = model(given)
            assert y.device == given.device
            torch.testing.assert_close(y.cpu(), expected)
    del y
    places = {name: str(p.device) for name, p in model.named_parameters() if name.endswith("weight")}
    assert places["layers.1.up.weight"] == places["out.weight"] == "sim:1"
    assert places["inp.weight"] == "sim:0"
    assert places["layers.4.up.weight"] == "meta"
    remove_hook_from_submodules(model)
    model.cpu()
    torch.testing.assert_close(model(x), expected)


def test_gradients_flow_over_two_devices() -> None:
    plain, x = built(), inputs()
    model = dispatch_model(copy.deepcopy(plain), {"inp": 0, "layers": 0, "layers.3": 1, "out": 1})
    for net in (plain, model):
        net(x).square().mean().backward()
    for (name, p), mine in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), p.grad, msg=name)


def test_what_is_tied_over_two_devices_is_on_both() -> None:
    model, x = built(), inputs()
    model.out.weight = model.inp.weight
    expected = model(x)
    dispatch_model(model, {"inp": 0, "layers": 0, "out": 1})
    assert (str(model.inp.weight.device), str(model.out.weight.device)) == ("sim:0", "sim:1")
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


def test_what_is_tied_to_a_resident_weight_is_not_loaded() -> None:
    model, x = built(), inputs()
    model.out.weight = model.inp.weight
    expected = model(x)
    dispatch_model(model, {"inp": 0, "layers": "cpu", "out": "cpu"})
    assert model.out.weight is model.inp.weight
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


# ------------------------------------------------------------------------------------------------ crossing


class Attention(nn.Module):
    """Keeps what it has seen in a cache of the caller, as transformers do."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place
        self.kv = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, cache: dict[str, Any], extra: Any = None
    ) -> torch.Tensor:
        mine = cache["layers"].setdefault(self.place, {"kv": []})
        mine["kv"].append(self.kv(x))
        cache["steps"] = cache.get("steps", 0) + 1
        return x + torch.stack(mine["kv"]).mean(0) * mask


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(place) for place in range(8))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, cache: dict[str, Any]) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask, cache=cache)
        return x


HALVES = {f"layers.{place}": place // 4 for place in range(8)}


def test_caches_are_not_moved_at_every_layer() -> None:
    """E10: a tensor moves once for each border that it crosses, and what layers keep stays with them."""
    plain, mask = built(Decoder), torch.rand(WIDTH)
    model = dispatch_model(copy.deepcopy(plain), HALVES)
    caches: list[dict[str, Any]] = [{"layers": {}} for _ in range(2)]
    for step in range(4):
        x = inputs()
        with torch.no_grad(), sim.traffic() as moved:
            found = model(x, mask, caches[0])
        with torch.no_grad():
            torch.testing.assert_close(found, plain(x, mask, caches[1]))
        assert (moved.to_device, moved.between, moved.to_host) == (2, 2, 1), (
            step
        )  # x and mask, twice; the output
    assert list(caches[0]["layers"]) == list(caches[1]["layers"]) == list(range(8))
    assert caches[0]["steps"] == caches[1]["steps"] == 32
    for place, layer in caches[0]["layers"].items():
        assert {str(kv.device) for kv in layer["kv"]} == {f"sim:{place // 4}"}


class SharedStates(UserDict[str, tuple[torch.Tensor, ...]]):
    """A mapping that moves itself in place, as the one by which layers of Gemma 3n share keys and values."""

    def to(self, device: Any) -> SharedStates:
        for name, states in list(self.items()):
            self[name] = tuple(state.to(device) for state in states)
        return self


class Sharing(nn.Module):
    """Its even layers set states in a mapping, and the others use them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SharingLayer(place) for place in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = SharedStates()
        for layer in self.layers:
            x = layer(x, states=states)
        return x


class SharingLayer(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.kv = place, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, states: SharedStates) -> torch.Tensor:
        if self.place % 2 == 0:
            states["kv"] = (self.kv(x),)
        return x + self.kv(x) * states["kv"][0]


def test_a_mapping_that_moves_itself_stays_the_one_that_layers_share() -> None:
    """Over each border, also back to a device where it has been, and in the second forward too."""
    plain, x = built(Sharing), inputs()
    places = {f"layers.{place}": device for place, device in enumerate((0, 1, 1, 0, 0, 1))}
    model = dispatch_model(copy.deepcopy(plain), places)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Parcel:
    """Neither a tensor nor a container, and moves by itself."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.moves = x, 0

    def to(self, device: torch.device) -> Parcel:
        twin = Parcel(self.x.to(device))
        twin.moves = self.moves + 1
        return twin


@dataclass
class Settings:
    scale: float


class Looking(nn.Module):
    """Shows what it was given, and changes some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.given: Any = None

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.given = args, kwargs
        if "change" in kwargs:
            kwargs["change"]["new"] = x
            kwargs["change"]["a"] = kwargs["change"]["a"] + 1
            del kwargs["change"]["gone"]
            kwargs["rows"].append(x)
            kwargs["rows"].pop(0)
            kwargs["scores"].add_(1)
        return x * self.w


def two() -> tuple[nn.Module, nn.Module, nn.Module]:
    model = nn.Sequential(Looking(), Looking())
    return dispatch_model(model, {"0": 0, "1": 1}), model[0], model[1]


def on(index: int) -> torch.Tensor:
    return torch.ones(2, device=f"sim:{index}")


def test_containers_are_rebuilt_only_where_something_moved() -> None:
    _, _, second = two()
    here: Any = {"t": on(1), "n": None, "inner": [1, "a", (on(1),)]}
    there: Any = {"t": on(0), "p": Point(on(0), on(1)), "inner": (1, {"u": [on(0)]})}
    parcel, module, settings = Parcel(on(0)), nn.Linear(1, 1), Settings(2.0)
    with torch.no_grad():
        second(on(0), here, there, parcel=parcel, layer=module, settings=settings)
    (first, moved), kwargs = second.given
    assert first is here
    assert moved is not there
    assert type(moved["p"]) is Point
    assert moved["p"].y is there["p"].y
    assert {str(t.device) for t in (moved["t"], moved["p"].x, moved["inner"][1]["u"][0])} == {"sim:1"}
    assert str(there["t"].device) == "sim:0"
    assert (kwargs["parcel"].moves, str(kwargs["parcel"].x.device)) == (1, "sim:1")
    assert kwargs["layer"] is module
    assert kwargs["settings"] is settings


class Graph:
    """Moves itself in place, as the data of PyTorch Geometric; it has no length and is no container."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Graph:
        self.x = self.x.to(device)
        return self


class OnGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, graph: Any) -> Any:
        graph.x = graph.x + self.w
        return graph


def test_objects_are_moved_by_their_own_method_at_each_call() -> None:
    """Also back to a device where they have been, and one that has changed since it was moved."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = OnGraph(), OnGraph(), Looking()

        def forward(self, graph: Graph, parcel: Parcel) -> list[Any]:
            seen = []
            for part in (self.a, self.b, self.a):
                part(graph)
            for _ in range(2):
                parcel.x = parcel.x + 1
                self.c(on(1), parcel)
                seen.append(self.c.given[0][0].x.tolist()[0])
            return [graph.x.tolist()[0], *seen]

    model = dispatch_model(Net(), {"a": 0, "b": 1, "c": 1})
    with torch.no_grad():
        assert model(Graph(torch.zeros(2)), Parcel(torch.zeros(2))) == [3, 1, 2]
    model.c.given = None


def test_objects_in_containers_are_moved_and_so_are_tuples_with_a_method_of_their_own() -> None:
    """The lengths in a PackedSequence stay on the CPU, wherever the sequence is."""

    class Pair(NamedTuple):
        start: torch.Tensor
        to: torch.Tensor

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.RNN(3, 4), nn.RNN(4, 4), OnGraph()

        def forward(self, sequence: Any, graphs: dict[str, list[Graph]], edges: Pair) -> Any:
            return self.b(self.a(sequence)[0])[0], self.c(graphs["g"][0]), edges.to * self.c.w

    plain = Net()
    sequence = nn.utils.rnn.pack_sequence([torch.ones(3, 3), torch.ones(2, 3)])
    model = dispatch_model(copy.deepcopy(plain), {"a": 0, "b": 1, "c": 0})
    with torch.no_grad():
        expected, (found, graph, edge) = (
            net(sequence, {"g": [Graph(torch.zeros(2))]}, Pair(torch.ones(2), torch.ones(2)))
            for net in (plain, model)
        )
    assert {str(tensor.device) for tensor in (found.data, found.batch_sizes, graph.x, edge)} == {"cpu"}
    torch.testing.assert_close(found.data, expected[0].data)


def test_what_a_module_changes_is_changed_for_its_caller() -> None:
    """E10: in containers that were rebuilt for it, and in tensors that were copied for it."""
    _, _, second = two()
    change: Any = {"a": on(0), "kept": on(0), "gone": on(0)}
    rows, scores = [on(0), on(0)], on(0)
    kept, last = change["kept"], rows[1]
    with torch.no_grad():
        second(on(0), change=change, rows=rows, scores=scores)
    assert list(change) == ["a", "kept", "new"]
    assert change["kept"] is kept
    assert change["a"].tolist() == [2, 2]
    assert rows[0] is last
    assert len(rows) == 2
    assert scores.tolist() == [2, 2]


def test_a_container_that_the_model_itself_changes_is_moved_in_each_forward() -> None:
    class Popping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Scaled(), Scaled()

        def forward(self, batch: dict[str, Any]) -> torch.Tensor:
            labels = batch.pop("labels")
            batch["rows"].append(labels)
            return self.b(self.a(batch["rows"][0])) - labels

    model = dispatch_model(Popping(), {"": 0, "b": "cpu"})
    with torch.no_grad():
        for _ in range(3):
            batch: Any = {"labels": torch.ones(2), "rows": [torch.ones(2)]}
            assert model(batch).tolist() == [3, 3]
            assert list(batch) == ["rows"]
            assert len(batch["rows"]) == 2


def test_a_tensor_that_was_changed_is_moved_again() -> None:
    """The copy of a tensor is used again only while it is a copy."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Looking(), Looking()

        def forward(self, x: torch.Tensor) -> list[Any]:
            scores, seen = on(0), []
            self.a(x)
            for _ in range(3):
                self.b(x, scores)
                seen.append(self.b.given[0][0].tolist()[0])
                self.b(x, scores)
                scores.add_(1)
            return seen

    for mode in (torch.no_grad, torch.inference_mode):
        model = dispatch_model(Net(), {"a": 0, "b": 1})
        with mode(), sim.traffic() as moved:
            assert model(on(0)) == [1, 2, 3]
        if mode is torch.no_grad:
            assert moved.between == 1 + 3  # x, and scores each time that it is new


class Scaled(nn.Module):
    """Adds what it computes to a sum of its caller, if it gets one, and then halves the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((2,), 2.0))

    def forward(self, x: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        y = x * self.w
        if total is not None:
            total.add_(y).mul_(0.5)
        return y


def test_gradients_flow_through_a_tensor_that_was_moved_without_them_before() -> None:
    """The teacher and the head share a device, and a tensor may be made to require gradients late."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.teacher, self.head = Scaled(), Scaled(), Scaled()

        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
            y = self.encoder(x)
            with torch.no_grad():
                teacher = self.teacher(y)
            self.head(shift)
            shift.requires_grad_()
            return (self.head(y) + self.head(shift) - teacher).sum()

    model, shift = dispatch_model(Net(), {"encoder": 0, "teacher": 1, "head": 1}), on(0)
    model(on(0), shift).backward()
    grads = [p.grad.tolist() if p.grad is not None else None for p in (*model.parameters(), shift)]
    assert grads == [[2, 2], None, [3, 3], [2, 2]]


def test_gradients_flow_into_a_tensor_that_a_module_on_another_device_changes() -> None:
    """Whether it required gradients before or not: what its caller then computes with it has them."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Scaled(), Scaled()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros_like(x)
            for part in (self.b, self.a, self.b, self.b):
                part(x, total)
            return total.sum()

    plain, x = Net(), torch.ones(2)
    model = dispatch_model(copy.deepcopy(plain), {"a": 0, "b": 1})
    for net in (plain, model):
        net(x).backward()
    for mine, p in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), p.grad)


def test_what_crossed_a_border_is_dropped_when_the_model_drops_it() -> None:
    """With a module on either device in turn, each result crosses, and only the running ones are there."""
    places = 12
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(places)))
    dispatch_model(model, {str(place): place % 2 for place in range(places)})
    weights, x = sum(p.nbytes for p in model.parameters()) // 2, torch.ones(512, WIDTH)
    with torch.no_grad():
        model(x[:1])
        for device in range(2):
            torch.sim.reset_peak_memory_stats(device)
        model(x)
    for device in range(2):
        assert torch.sim.max_memory_allocated(device) < weights + 4 * x.nbytes


def test_skipped_arguments_are_never_touched() -> None:
    model = nn.Sequential(Looking(), Looking())
    dispatch_model(model, {"0": 0, "1": 1}, skip_keys=["cache", "deep"])
    cache, deep = on(0), {"deep": on(0), "other": on(0)}
    with torch.no_grad():
        model[1](on(0), cache=cache, more=deep)
    given = model[1].given[1]
    assert given["cache"] is cache
    assert given["more"]["deep"] is deep["deep"]
    assert str(given["more"]["other"].device) == "sim:1"


def test_an_error_in_a_module_leaves_nothing_behind() -> None:
    """E12"""
    model, x = built(), inputs()
    expected = model(x)
    dispatch_model(model, {"inp": 0, "layers": 0, "layers.2": 1, "out": 1})
    model.layers[3].fails = True
    for _ in range(2):
        with torch.no_grad(), pytest.raises(ArithmeticError):
            model(x)
    mover = mover_of(model)
    assert not mover.thread.calls
    assert not mover.thread.copies
    model.layers[3].fails = False
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


# ------------------------------------------------------------------------------------------------ one device


def test_one_device_for_everything_needs_no_hooks() -> None:
    model = dispatch_model(built(), {"inp": 0, "layers": 0, "out": 0})
    assert not any("_hf_hook" in vars(module) for module in model.modules())
    assert {str(p.device) for p in model.parameters()} == {"sim:0"}
    assert model.hf_device_map == {"inp": 0, "layers": 0, "out": 0}


@pytest.mark.parametrize("device", ["cpu", "disk", 1])
def test_inputs_are_brought_where_a_map_names_several_devices(device: Any, tmp_path: Path) -> None:
    """Automatic maps put modules of buffers, or of nothing, on the CPU."""
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)), inputs()
    expected = model(x)
    dispatch_model(model, {"0": 0, "1": device}, offload_dir=tmp_path)
    y = model(x)
    assert y.device == x.device
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("places", [{"": "disk"}, {"0": "cpu", "1": "disk"}])
def test_inputs_are_brought_to_a_cpu_that_computes_what_is_on_disk(places: Any, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), inputs()
    expected = model(x)
    dispatch_model(model, places, offload_dir=tmp_path)
    y = model(x.to("sim"))
    assert y.device.type == "sim"
    torch.testing.assert_close(y.to("cpu"), expected)


@pytest.mark.parametrize("disk", [True, False])
def test_inputs_are_brought_to_a_cpu_that_a_whole_model_computes_on(disk: bool, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), inputs()
    expected = model(x)
    model = disk_offload(model, tmp_path) if disk else cpu_offload(model, "cpu")
    y = model(x.to("sim"))
    assert y.device.type == "sim"
    torch.testing.assert_close(y.to("cpu"), expected)


def test_a_weight_that_moves_is_not_truncated() -> None:
    norm = nn.BatchNorm1d(WIDTH).requires_grad_(False)
    for name in ("weight", "running_var"):
        getattr(norm, name).fill_(0.5)
        with pytest.warns(UserWarning, match="not truncated to torch.int8"):
            set_module_tensor_to_device(norm, name, "sim", dtype=torch.int8)
        assert getattr(norm, name).tolist() == [0.5] * WIDTH


def test_buffers_return_to_the_device_that_they_had(tmp_path: Path) -> None:
    """They stay on it while the weights beside them are offloaded."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).to("sim:0").eval()
    dispatch_model(model, {"0": 0, "1": "disk"}, offload_dir=tmp_path)
    remove_hook_from_submodules(model)
    assert {str(tensor.device) for tensor in model.state_dict().values()} == {"sim:0"}


@pytest.mark.parametrize("in_place", [False, True], ids=["new parameters", "in place"])
def test_adapters_return_with_the_weights_beside_them(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained weights beside frozen ones stay on the device, those added after the dispatch too.

    A GPU's parameters are moved in place; here torch does so on request.
    """
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", in_place)
    base, adapter, late = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    model, x = nn.Sequential(base.requires_grad_(False), adapter), inputs()
    cpu_offload(model, 0)
    base.adapter = late
    with torch.no_grad():
        model(x)
    assert {adapter.weight.device.type, late.weight.device.type} == {"sim"}
    remove_hook_from_submodules(model)
    assert {str(p.device) for p in model.parameters()} == {"cpu"}
    assert model(x).device.type == "cpu"


@needs("torchao")
@torch.no_grad()
def test_quantized_weights_of_torchao_are_moved_one_by_one(tmp_path: Path) -> None:
    """Their class wraps tensors, so that they have no bytes to be copied with those of others."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    whole, x = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), inputs()
    quantize_(whole, Int8WeightOnlyConfig())
    expected = whole(x)
    model: Any = dispatch_model(copy.deepcopy(whole), {"0": "sim", "1": "cpu", "2": "cpu"})
    assert model[2].weight.device.type == "meta"
    torch.testing.assert_close(model(x), expected)
    with align_module_device(model[2]):
        assert model[2].weight.qdata.device.type == "sim"
    for each in (model, copy.deepcopy(model)):
        torch.testing.assert_close(each(x), expected)
        assert each[2].weight.device.type == "meta"
    with pytest.raises(OffloadError, match=r"2\.weight cannot be offloaded to disk"):
        dispatch_model(copy.deepcopy(whole), {"0": "sim", "1": "cpu", "2": "disk"}, offload_dir=tmp_path)


def test_a_dispatch_takes_the_place_of_a_hook_that_moves_the_whole_model() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), inputs()
    expected = model(x)
    cpu_offload_with_hook(model, 0)
    dispatch_model(model, {"0": 0, "1": 1})
    torch.testing.assert_close(model(x), expected)


@torch.no_grad()
def test_a_model_that_is_on_its_device_is_not_moved_again() -> None:
    """Each of thousands of weights would cost host time in every step of a diffusion."""
    moves: list[str] = []

    class Recording(nn.Linear):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            moves.append(self.name)
            return super()._apply(fn, recurse)

    first, second = Recording(WIDTH, WIDTH), Recording(WIDTH, WIDTH)
    first.name, second.name = "first", "second"
    x = inputs()
    _, handle = cpu_offload_with_hook(first, 0)
    cpu_offload_with_hook(second, 0, prev_module_hook=handle)
    moves.clear()
    for _ in range(3):
        first(x)
    assert moves == ["first"]
    for _ in range(3):
        second(x)
    assert moves == ["first", "first", "second"]
    first.to("cpu")
    second.bias = nn.Parameter(second.bias.detach().to("cpu"))  # moved in part
    moves.clear()
    assert second(x).device.type == "sim"
    assert moves == ["second"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda layer: torch.jit.trace(layer, inputs())])
@pytest.mark.parametrize("device", [1, "cpu", "disk"])
def test_compiled_modules_have_their_weights_on_their_device(
    compiled: Any, device: Any, tmp_path: Path
) -> None:
    """TorchScript runs no hooks of the modules inside."""
    compiled_layers = compiled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), compiled_layers), inputs()
    expected = model(x)
    dispatch_model(model, {"0": 0, "1": device}, offload_dir=tmp_path)
    torch.testing.assert_close(model(x), expected)
    remove_hook_from_submodules(model)
    torch.testing.assert_close(model.to("cpu")(x), expected)


@pytest.mark.parametrize(("places", "forced"), [({"": 0}, True), ({"": 0, "inp": "sim:0"}, False)])
def test_hooks_are_attached_if_asked_and_bring_the_inputs(places: dict[str, Any], forced: bool) -> None:
    """A map that writes one device in two ways asks for them too: as BAGEL's, on one GPU."""
    model, x = built(), inputs()
    expected = model(x)
    dispatch_model(model, places, force_hooks=forced)
    hooked = {name for name, module in model.named_modules() if "_hf_hook" in vars(module)}
    assert {"", "inp", "layers.0.up", "out"} <= hooked
    with torch.no_grad():
        y = model(x)
    assert y.device == x.device
    torch.testing.assert_close(y, expected)
    assert not any("forward" in vars(module) and "_hf_hook" not in vars(module) for module in model.modules())
    with pytest.warns(UserWarning, match="this model was dispatched"):
        model.to("sim:1")


def test_a_method_that_is_named_like_a_device_is_the_models_own() -> None:
    class Named(Net):
        def neuron(self) -> int:
            return 5

    model: Any = dispatch_model(built(Named), {"inp": 0, "layers": "cpu", "out": 0})
    assert model.neuron() == 5
    with pytest.raises(OffloadError, match="cannot be moved"):
        model.cuda()


def test_modules_that_replace_others_go_to_their_device() -> None:
    """E7"""
    model, x = built(), inputs()
    dispatch_model(model, {"inp": 0, "layers": 0, "out": 1})
    plain = built()
    for net in (plain, model):
        torch.manual_seed(3)
        net.out = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))


def test_a_model_waits_on_the_cpu_until_it_runs() -> None:
    models, x = [built(), built()], inputs()
    expected = models[0](x)
    first, hook = cpu_offload_with_hook(models[0], "sim:1")
    second, last = cpu_offload_with_hook(models[1], "sim:1", prev_module_hook=hook)
    with torch.no_grad():
        for model, other in ((first, second), (second, first)):
            torch.testing.assert_close(model(x).cpu(), expected)
            assert {str(p.device) for p in model.parameters()} == {"sim:1"}
            assert {str(p.device) for p in other.parameters()} == {"cpu"}
    last.offload()
    assert torch.sim.memory_allocated(1) == 0
    last.remove()
    hook.remove()
    assert "_hf_hook" not in vars(first)


# ------------------------------------------------------------------------------- outputs, and parts alone

PARTS: dict[str, Any] = {"inp": 0, "layers": 0, "layers.2": "cpu", "layers.5": 1, "out": 1}


def test_an_output_goes_back_where_a_client_says_so() -> None:
    """transformers sets ``io_same_device`` on hooks after the model was dispatched."""
    model: Any = dispatch_model(built(), PARTS)
    x = inputs()
    expected = built()(x)
    root, last = model._hf_hook, model.out._hf_hook
    with torch.no_grad():
        assert model(x).device == x.device
        assert root.input_device == x.device
        root.io_same_device = False
        y = model(x)
        assert str(y.device) == "sim:1"
        torch.testing.assert_close(y.cpu(), expected)
        assert str(model.out(x).device) == "sim:1"
        last.io_same_device = True
        assert model.out(x).device == x.device
        root.io_same_device = True
        assert model(x).device == x.device


class Traced(nn.Module):
    """Returns the states of all its layers too, and puts one into a cache of the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor, cache: dict[str, Any]) -> dict[str, Any]:
        states = [self.net.inp(x)]
        for layer in self.net.layers:
            states.append(layer(states[-1]))
        cache["last"] = [states[-1]]
        return {"y": self.net.out(states[-1]), "states": tuple(states), "cache": cache}


def test_nested_outputs_go_back_and_caches_stay() -> None:
    model = dispatch_model(built(Traced), {"net": 0, "net.layers.4": 1, "net.layers.5": 1, "net.out": 1})
    x, cache = inputs(), {}
    with torch.no_grad():
        expected = built(Traced)(x, {})
        for device in ("sim:0", "sim:1", "cpu"):
            y = model(x.to(device), cache)
            assert {str(state.device) for state in (y["y"], *y["states"])} == {device}
            torch.testing.assert_close(torch.stack(y["states"]).cpu(), torch.stack(expected["states"]))
            assert y["cache"] is cache
            assert str(cache["last"][0].device) == "sim:1"


@pytest.mark.parametrize("part", ["inp", "layers.0", "layers.1.up", "layers.2", "layers.2.up", "layers.5.up"])
def test_a_part_that_is_called_alone_gets_its_inputs(part: str) -> None:
    """Also inside of a block, and where nothing is moved in a forward of the whole model."""
    model, x = dispatch_model(built(), PARTS), inputs()
    expected = built().get_submodule(part)(x)
    device = "sim:1" if part.startswith("layers.5") else "sim:0"
    with torch.no_grad():
        for _ in range(2):
            y = model.get_submodule(part)(x)
            assert str(y.device) == device
            torch.testing.assert_close(y.cpu(), expected)
        torch.testing.assert_close(model(x), built()(x))


@pytest.mark.parametrize("places", [{"": 0, "1": "sim:0"}, {"": 0, "1": 1}, {"": "cpu"}])
def test_a_part_without_weights_of_its_own_is_called_alone(places: dict[str, Any]) -> None:
    """As BAGEL calls decoder layers: it adds its input to what the layers inside give. The last map makes
    a block of the part around it.
    """
    plain, x = built(lambda: nn.Sequential(Net(), nn.Linear(WIDTH, WIDTH))), inputs()
    model = dispatch_model(copy.deepcopy(plain), places, main_device=0)
    with torch.no_grad():
        for part in ("", "0", "0.layers.2"):
            y = model.get_submodule(part)(x)
            torch.testing.assert_close(y.cpu(), plain.get_submodule(part)(x))


def test_a_part_that_reads_its_weights_device_is_called_alone() -> None:
    """BART and its like make positions on the device of their weights."""

    class Positions(nn.Embedding):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.arange(x.shape[1], device=self.weight.device))

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.mix = Positions(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mix(self.positions(x))

    model, x = nn.Sequential(nn.Sequential(Encoder(), nn.Linear(8, 8)), nn.Linear(8, 8)), torch.ones(1, 3)
    encoder: Any = model[0][0]
    expected = encoder(x)
    dispatch_model(model, {"0": "cpu", "1": 0}, main_device="sim:0")
    with torch.no_grad():
        y = encoder(x)
    assert str(y.device) == "sim:0"
    torch.testing.assert_close(y.cpu(), expected)


def test_parts_that_a_model_calls_past_their_parents_get_their_inputs() -> None:
    class Shortcut(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            layer: Any = self.layers[0]
            return self.out(layer.down(layer.up(self.inp(x))))

    model, x = built(Shortcut), inputs()
    expected = model(x)
    dispatch_model(model, {"inp": 0, "layers": 1, "out": 0})
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


def test_what_a_model_makes_on_the_host_is_moved_to_a_resident_part() -> None:
    class Shifted(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.out(self.inp(torch.ones(x.shape)))

    model, x = built(Shifted), inputs()
    expected = model(x)
    dispatch_model(model, {"inp": 0, "layers": "cpu", "out": 0})
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("named", [True, False])
def test_any_argument_that_a_model_makes_on_the_host_is_moved(named: bool) -> None:
    class Positioned(nn.Linear):
        def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return super().forward(x + places)

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Positioned(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = torch.arange(WIDTH).float()
            return self.attention(x, places=places) if named else self.attention(x, places)

    model, x = built(lambda: nn.Sequential(Attending(), Attending(), Attending())), inputs()
    expected = model(x)
    dispatch_model(model, {"0": "cpu", "1": 0, "2": 1}, main_device=0)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


# ------------------------------------------------------------------------------------------------ compiling


def call_counts(compiled: Any, x: torch.Tensor, graphs: list[int]) -> list[int]:
    with torch.no_grad():
        for _ in range(2):
            compiled(x)
    torch._dynamo.reset()
    return sorted(graphs)


@pytest.mark.parametrize("places", [{"": 0}, {"": "cpu"}, {"inp": 0, "layers": "cpu", "out": 0}])
def test_layers_are_compiled_whole(places: dict[str, Any]) -> None:
    """E8: hooks inside of a block break no graph, and layers of one kind share one."""
    model, graphs = built(), list[int]()
    dispatch_model(model, places, main_device="sim:0", force_hooks=True)

    def count(graph: Any, _: Any) -> Any:
        graphs.append(len([node for node in graph.graph.nodes if node.op.startswith("call")]))
        return graph.forward

    torch._dynamo.reset()
    counts = call_counts(torch.compile(model, backend=count), inputs().to("sim:0"), graphs)
    of_a_layer = 4  # two linear layers, a ReLU, a sum
    assert counts[-1] in (of_a_layer, 2 + 6 * of_a_layer), counts
    assert len(counts) <= 3, counts


@pytest.mark.parametrize("home", ["cpu", 0])
def test_layers_may_be_compiled_one_by_one(home: Any) -> None:
    model, x, graphs = built(), inputs(), list[int]()
    expected = model(x)
    torch._dynamo.reset()
    dispatch_model(model, {"inp": "cpu", "layers": home, "out": 0})
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    layer: Any = model.layers[0]  # type: ignore[index]
    assert isinstance(layer.up.forward, functools.partial), "clients look for it, until something is compiled"

    def count(graph: Any, _: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    for place, layer in enumerate(list(model.layers)):
        model.layers[place] = torch.compile(layer, backend=count)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(x), expected)
    assert len(graphs) <= 2
    torch._dynamo.reset()


def test_a_compiled_model_has_at_most_one_break_for_each_block(tmp_path: Path) -> None:
    """E8"""
    model, x = built(lambda: Net(4)), inputs()
    expected = model(x)
    places = {"inp": 0, "layers.0": 0, "layers.1": 1, "layers.2": "cpu", "layers.3": "disk", "out": 1}
    dispatch_model(model, places, offload_dir=tmp_path)
    with torch.no_grad():
        model(x)
        explained = torch._dynamo.explain(model)(x)
        assert explained.graph_break_count <= len(places), explained
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager")
        for _ in range(3):
            torch.testing.assert_close(compiled(x), expected)
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("device", [2, "sim:2", "cuda:0"])
def test_a_device_that_is_not_here_is_told_at_once(device: Any) -> None:
    with pytest.raises(DeviceError):
        dispatch_model(built(), {"": device})


def test_a_folder_is_asked_for_where_it_is_needed() -> None:
    model = built()
    with pytest.raises(PrepareError, match=r"an offload folder is needed for layers\.0\.up\.weight"):
        dispatch_model(model, {"": 0, "layers.0": "disk"})


def test_training_what_is_offloaded_is_refused_by_prepare() -> None:
    """Said before anything runs; evaluating it is fine."""
    model, x = built(), inputs()
    expected = model(x)
    dispatch_model(model, {"": 0, "layers.0": "cpu"})
    accelerator = Accelerator()
    with pytest.raises(PrepareError, match=r"layers\.0\.up\.weight is offloaded and cannot be trained"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        torch.testing.assert_close(accelerator.prepare(model)(x), expected)
    accelerator.end_training()


def test_prepare_leaves_a_dispatched_part_of_a_model_on_its_devices() -> None:
    """A backbone in a wrapper that has no device map of its own, and no offloaded weights."""
    model, x = nn.Sequential(built(), nn.Linear(WIDTH, 1)), inputs()
    expected = model(x)
    dispatch_model(model[0], {**HALVES, "inp": 0, "out": 1})
    model[1].to("sim:0")
    accelerator = Accelerator()
    model = accelerator.prepare(model)
    assert {str(p.device) for p in model[0].parameters()} == {"sim:0", "sim:1"}
    torch.testing.assert_close(model(x.to("sim:0")).cpu(), expected)
    accelerator.end_training()


def test_a_move_to_the_main_device_is_a_move_too() -> None:
    """Of a wrapper: what lies on the other device would go there beside the offloaded weights."""
    model = nn.Sequential(dispatch_model(built(), PARTS))
    with pytest.raises(OffloadError, match="cannot be moved: some of its weights are offloaded"):
        model.to("sim:0")
    assert str(model[0].out.weight.device) == "sim:1"  # pyright: ignore
    assert model.bfloat16()[0].out.weight.dtype is torch.bfloat16  # pyright: ignore


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_model_whose_parts_are_offloaded_computes_where_they_do(device: str | None, tmp_path: Path) -> None:
    """GPTQModel offloads layers, and then the module around them on the device that a weight reports."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, affine=False)).to("sim:1").eval()
    x = torch.ones(2, WIDTH, device="sim:1")
    expected = model(x)
    cpu_offload(model[0], "sim:1")
    disk_offload(model, tmp_path, device and next(model.parameters()).device, offload_buffers=True)
    torch.testing.assert_close(model(x), expected)
    remove_hook_from_submodules(model)


def hook_of_part(module: nn.Module) -> Any:
    return module._hf_hook


def expected_with(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The output of the model with other weights in its layer 2."""
    model = built()
    model.layers[2].up.load_state_dict(values)  # type: ignore[union-attr]
    return model(x)


def test_a_map_that_a_client_sets_has_the_values_from_then_on(tmp_path: Path) -> None:
    """In memory, in files, with entries that change, and in the middle of a forward."""
    model, x = built(), inputs()
    dispatch_model(model, SPREAD, offload_dir=tmp_path)
    with torch.no_grad():
        model(x)
    up: Any = model.layers[2].up  # type: ignore[union-attr]
    values = {name: torch.ones_like(p, device="cpu") for name, p in up.named_parameters()}
    zeros = {name: torch.zeros_like(value) for name, value in values.items()}
    with torch.no_grad():
        hook_of_part(up).weights_map = values
        torch.testing.assert_close(model(x), expected_with(values, x))
        values.update(zeros)
        torch.testing.assert_close(model(x), expected_with(zeros, x))
        ones = {name: value + 1 for name, value in zeros.items()}
        handle = up.register_forward_hook(lambda *_: setattr(hook_of_part(up), "weights_map", ones))
        torch.testing.assert_close(model(x), expected_with(zeros, x), msg="of the next forward")
        handle.remove()
        torch.testing.assert_close(model(x), expected_with(ones, x))
        twin = copy.deepcopy(model)
        hook_of_part(up).weights_map = zeros
        torch.testing.assert_close(twin(x), expected_with(ones, x))
        on_disk: Any = model.layers[3].up  # type: ignore[union-attr]
        hook_of_part(on_disk).weights_map = zeros
        model(x)
        assert on_disk.weight.device.type == "meta"
    remove_hook_from_submodules(model)
    assert not on_disk.weight.any()


def test_an_entry_of_a_dispatched_models_weights_can_be_assigned() -> None:
    model, x = built(), inputs()
    dispatch_model(model, {"": "cpu"}, main_device="sim:0", force_hooks=True)
    up: Any = model.layers[2].up  # type: ignore[union-attr]
    ones = {name: torch.ones_like(p, device="cpu") for name, p in up.named_parameters()}
    weights: Any = hook_of_part(up).weights_map
    for name, value in ones.items():
        weights.dataset[f"{weights.prefix}{name}"] = value
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected_with(ones, x))
    remove_hook_from_submodules(model)


def test_inputs_are_moved_by_a_function_that_a_program_has_put_in_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where two devices cannot copy to each other, programs go by way of host memory."""
    moved: list[tuple[str, str]] = []

    def by_host(value: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved.append((str(tensor.device), str(torch.device(device))))
            return tensor.to("cpu").to(device)

        return recursively_apply(move, value)

    model, x = built(), inputs()
    expected = model(x)
    dispatch_model(model, SPREAD, offload_dir=tmp_path)
    monkeypatch.setattr("accelerate.hooks.send_to_device", by_host)
    with torch.no_grad():
        y = model(x)
    torch.testing.assert_close(y, expected)
    assert ("sim:0", "sim:1") in moved
    assert moved[0] == ("cpu", "sim:0")
    assert moved[-1] == ("sim:1", "cpu")
    remove_hook_from_submodules(model)
    layer: Any = nn.Linear(2, 2)
    add_hook_to_module(layer, AlignDevicesHook("sim:1", io_same_device=True))
    moved.clear()
    layer(torch.ones(1, 2))
    assert moved == [("cpu", "sim:1"), ("sim:1", "cpu")]
    del y
