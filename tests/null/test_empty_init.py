"""``init_empty_weights``: no memory for parameters, and everything else as it would have been (E3)."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from accelerate import init_empty_weights, init_on_device


class Rotary(nn.Module):
    """Frequencies in buffers that no file holds, as RoPE has them."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.original = self.frequencies
        ones, zeros = torch.ones(4), torch.zeros(2, 4)
        zeros[1] += ones
        zeros.mul_(2)
        self.register_buffer("table", torch.cat([zeros, ones[None]]))
        self.register_buffer("mask", torch.tril(torch.ones(3, 3, dtype=torch.bool)))
        self.register_buffer("sevens", torch.full((2,), 7))
        self.register_buffer("nothing", None)
        self.register_buffer("noise", torch.randn(3))
        self.plain = torch.zeros(3)
        self.listed = [torch.ones(2), {"deep": torch.full((1,), 2.0)}]


class Model(nn.Module):
    """Parameters of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.norm = nn.BatchNorm1d(4)
        self.lin = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.lin.weight
        self.scale = nn.Parameter(0.02 * torch.randn(4), requires_grad=False)
        self.old = nn.Parameter(torch.Tensor(2, 2))
        self.counted = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        self.several = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(2)])
        self.gru = nn.GRU(2, 2)
        shared = nn.Parameter(torch.eye(2))
        shared.mark = "kept"  # pyright: ignore[reportAttributeAccessIssue]
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        self.one.weight = self.two.weight = shared
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2)


def same_buffers(model: nn.Module, normal: nn.Module) -> None:
    found, expected = dict(model.named_buffers()), dict(normal.named_buffers())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert {name: b.device for name, b in found.items()} == {name: b.device for name, b in expected.items()}


def test_parameters_are_empty_and_buffers_are_those_of_normal_construction() -> None:
    """E3: RoPE, counters of batches, masks; and values that are no buffers."""
    torch.manual_seed(0)
    normal = Model()
    torch.manual_seed(0)
    with init_empty_weights():
        model = Model()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    same_buffers(model, normal)
    torch.testing.assert_close(model.rotary.plain, normal.rotary.plain)
    torch.testing.assert_close(model.rotary.listed, normal.rotary.listed)
    assert model.rotary.original is model.rotary.frequencies
    shapes = {name: (p.shape, p.dtype, p.requires_grad) for name, p in normal.named_parameters()}
    assert {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()} == shapes
    assert model.state_dict().keys() == normal.state_dict().keys()


def test_ties_and_attributes_of_parameters_stay() -> None:
    with init_empty_weights():
        model = Model()
    assert model.head.weight is model.lin.weight
    assert model.one.weight is model.two.weight
    assert model.one.weight.mark == "kept"  # pyright: ignore[reportAttributeAccessIssue]
    assert type(model.one.weight) is nn.Parameter


def test_after_the_block_everything_is_as_before() -> None:
    with init_empty_weights():
        nn.Linear(2, 2)
    assert nn.Linear(2, 2).weight.device.type == "cpu"
    with pytest.raises(KeyError), init_empty_weights():
        raise KeyError
    made = nn.Linear(2, 2)
    assert made.weight.device.type == "cpu"
    assert not nn.modules.module._global_parameter_registration_hooks
    assert not nn.modules.module._global_buffer_registration_hooks


@pytest.mark.parametrize("include", [True, False, None])
def test_buffers_can_be_empty_too(include: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if include is None:
        monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "1")
    with init_empty_weights(include_buffers=include):
        model = Model()
        steps = [x.item() for x in torch.linspace(0, 1, 3)]
    expected = "cpu" if include is False else "meta"
    assert {b.device.type for b in model.buffers()} == {expected}
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert steps == [0, 0.5, 1]


def test_a_parameter_of_few_numbers_has_values_until_a_module_gets_it() -> None:
    module = nn.Module()
    with init_empty_weights():
        free = nn.Parameter(torch.ones(3))
        assert free.sum().item() == 3
        module.scale = free
        large = nn.Parameter(torch.ones(2**20))
    assert module.scale.is_meta
    assert large.is_meta
    assert not free.is_meta


def test_the_device_may_be_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_INIT_INCLUDE_BUFFERS", raising=False)
    torch.manual_seed(0)
    normal = Model()
    torch.manual_seed(0)
    with init_on_device(torch.device("cpu")):
        model = Model()
    model.old.data.zero_()
    normal.old.data.zero_()  # nobody has said what is in it
    torch.testing.assert_close(dict(model.state_dict()), dict(normal.state_dict()), rtol=0, atol=0)
    with init_on_device("meta", include_buffers=True):  # pyright: ignore[reportArgumentType]
        assert Rotary().mask.device.type == "meta"


def test_blocks_nest() -> None:
    """The innermost counts, and the outer one goes on after it."""
    with init_empty_weights():
        first = nn.BatchNorm1d(2)
        with init_on_device(torch.device("cpu")):
            inner = nn.BatchNorm1d(2)
        with init_empty_weights(include_buffers=True):
            empty = nn.BatchNorm1d(2)
        again = Rotary()
        with init_empty_weights():
            twice = nn.BatchNorm1d(2)
        last = nn.BatchNorm1d(2)
    for model in (first, last, twice):
        assert (model.weight.device.type, model.running_mean.device.type) == ("meta", "cpu")  # pyright: ignore
        torch.testing.assert_close(model.running_var, torch.ones(2))
    assert {t.device.type for t in inner.state_dict().values()} == {"cpu"}
    torch.testing.assert_close(inner.weight.data, torch.ones(2))
    assert {t.device.type for t in empty.state_dict().values()} == {"meta"}
    torch.testing.assert_close(again.plain, torch.zeros(3))


@pytest.mark.parametrize("outside", [True, False])
def test_under_torchs_own_context(outside: bool) -> None:
    """``torch.device`` outside or inside says where buffers are."""
    for device in ("meta", "cpu"):
        blocks: list[Callable[[], Any]] = [lambda d=device: torch.device(d), init_empty_weights]
        first, second = blocks if outside else reversed(blocks)
        with first(), second():
            model = Model()
        assert {p.device.type for p in model.parameters()} == {"meta"}
        assert {b.device.type for b in model.buffers()} == {device}
    assert torch.empty(1).device.type == "cpu"


def test_another_thread_is_not_concerned() -> None:
    made: list[nn.Module] = []
    with init_empty_weights():
        thread = threading.Thread(target=lambda: made.append(Model()))
        thread.start()
        thread.join()
        mine = Model()
    assert {p.device.type for p in made[0].parameters()} == {"cpu"}
    assert {p.device.type for p in mine.parameters()} == {"meta"}


def test_it_decorates_and_is_a_factory_of_contexts() -> None:
    """The context works as a factory, like diffusers uses it."""

    @init_empty_weights()
    def build() -> nn.Module:
        return Model()

    for _ in range(2):
        assert {p.device.type for p in build().parameters()} == {"meta"}
    for context, device in ((init_empty_weights, "meta"), (nullcontext, "cpu")):
        with context():
            assert nn.Linear(1, 1).weight.device.type == device


def test_every_use_of_a_tensor_gets_its_values() -> None:
    """A tensor that may become a parameter is materialized as soon as it is used."""
    with init_empty_weights():
        base = torch.zeros(2, 3)
        assert base.device.type == "cpu"
        alias, view = base, base[0]
        view += 1
        assert alias.sum().item() == 3
        assert torch.stack([torch.ones(2), torch.zeros(2)]).tolist() == [[1, 1], [0, 0]]
        assert float(torch.full((), 2.5)) == 2.5
        assert torch.ones(2).numpy().tolist() == [1, 1]
        assert torch.ones(()).item() == 1
        kept = torch.ones(2, 2)
        copied = copy.deepcopy(kept)
        assert [row.tolist() for row in torch.ones(2, 1)] == [[1], [1]]
        target = torch.empty(2)
        torch.add(torch.ones(2), 1, out=target)
        size = [2]
        held = torch.full(size, 3)
        size.append(9)
        torch.set_default_dtype(torch.float64)
        late = torch.ones(2, dtype=torch.float32)
        torch.set_default_dtype(torch.float32)
    assert target.tolist() == [2, 2]
    assert held.tolist() == [3, 3]
    assert late.dtype is torch.float32
    torch.testing.assert_close(copied, torch.ones(2, 2))
    torch.testing.assert_close(kept, torch.ones(2, 2))


def test_a_tensor_that_a_factory_writes_to_gets_its_values() -> None:
    with init_empty_weights():
        result = torch.ones(9, out=torch.empty(9))
    assert result.tolist() == [1] * 9


@pytest.mark.parametrize("options", [{}, {"weights_only": False}, {"mmap": True}])
def test_tensors_are_read_from_files(options: dict[str, Any], tmp_path: Path) -> None:
    """torch makes an empty tensor, and gives it the storage that it has read."""
    saved = {"large": torch.ones(9000), "small": torch.arange(3)}
    torch.save(saved, tmp_path / "values.bin")
    with init_empty_weights():
        loaded = torch.load(tmp_path / "values.bin", **options)
        copied = pickle.loads(pickle.dumps(saved["large"]))
        shared = torch.empty(0).set_(saved["large"].untyped_storage())
        assert nn.Parameter(torch.empty(0)).shape == (0,)
    torch.testing.assert_close(loaded, saved)
    torch.testing.assert_close([copied, shared], [saved["large"]] * 2)


def test_the_default_dtype_at_the_call_counts() -> None:
    with init_empty_weights():
        torch.set_default_dtype(torch.bfloat16)
        kept = torch.ones(2)
        torch.set_default_dtype(torch.float32)
    assert kept.dtype is torch.bfloat16
    assert kept.tolist() == [1, 1]


def test_random_buffers_are_drawn_in_order() -> None:
    """Small ones when they are asked for; large ones when they are looked at."""

    def draws() -> list[torch.Tensor]:
        torch.manual_seed(3)
        return [torch.rand(3), torch.randn(2, 2), torch.randn(1024, 1024), torch.rand(2)[:1]]

    with init_empty_weights():
        found = draws()
        torch.manual_seed(3)
        large = torch.empty(1024, 1024).normal_(std=2.0)
        assert torch.equal(torch.rand(2), torch.rand(2)) is False
    assert torch.equal(found[0], draws()[0])
    assert torch.equal(found[1], draws()[1])
    assert found[2].device.type == large.device.type == "cpu"
    assert abs(float(found[2].std()) - 1) < 0.01
    assert abs(float(large.std()) - 2) < 0.02


@pytest.mark.parametrize("used", ["inside", "outside", "buffer"])
def test_weak_references_and_attributes_of_tensors_stay(used: str) -> None:
    module, numbers, names = nn.Module(), WeakTensorKeyDictionary(), WeakValueDictionary[str, torch.Tensor]()
    with init_empty_weights():
        tensor: Any = torch.ones(5000)
        tensor.mark, numbers[tensor], names["it"] = "kept", 7, tensor
        if used == "buffer":
            module.register_buffer("it", tensor)
        elif used == "inside":
            tensor.add_(0)
    assert names["it"] is tensor
    assert (numbers[tensor], tensor.mark, tensor.sum().item()) == (7, "kept", 5000)
    del tensor, module
    assert not names
    assert not numbers


def test_lazy_modules_and_subclasses() -> None:
    class Marked(nn.Parameter):
        pass

    with init_empty_weights():
        lazy = nn.LazyLinear(3)
        module = nn.Module()
        module.weight = Marked(torch.ones(2), requires_grad=False)
    assert type(module.weight) is Marked
    assert module.weight.device.type == "meta"
    assert not module.weight.requires_grad
    lazy(torch.ones(1, 2, device=lazy.weight.device))
    assert lazy.weight.shape == (3, 2)


BIG = """
import resource, torch
from torch import nn
from accelerate import init_empty_weights

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

class Big(nn.Module):
    def __init__(self):
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(16384, 16384) for _ in range(8))   # 1 GiB each
        self.embed = nn.Embedding(65536, 16384)
        self.ones = nn.Parameter(torch.ones(16384, 16384))
        self.drawn = nn.Parameter(torch.randn(16384, 16384))
        self.filled = nn.Parameter(torch.empty(16384, 16384).normal_(0, 0.02))
        self.huge = nn.Parameter(torch.empty(1 << 24, 1 << 20))                # 64 TiB

with init_empty_weights():
    nn.Linear(2, 2)
before = peak()
with init_empty_weights():
    model = Big()
print(peak() - before)
"""


def test_no_memory_is_taken() -> None:
    """A model of 15 GiB, and a parameter larger than any machine: the peak does not move."""
    done = subprocess.run([sys.executable, "-c", BIG], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16 * 2**20
