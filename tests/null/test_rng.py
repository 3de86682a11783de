"""Named random streams, seeding, and the state of all generators."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerate import device as devices
from accelerate import utils
from accelerate.core import environ
from accelerate.core.errors import SettingError, UnknownNameError, WorldError
from accelerate.utils import RNGType
from accelerate.world import rng
from accelerate.world import world as worlds
from accelerate.world.world import World
from tests.support.devices import CountingDevice, install


@pytest.fixture(autouse=True)
def _own_generators() -> Any:
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def enter(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> World:
    """Puts a world in place that has no process group behind it."""
    world = World.fake(**facts)
    monkeypatch.setattr(worlds, "_current", world)
    return world


# --- streams


def test_streams_are_fixed_for_ever() -> None:
    """The numbers are part of what a checkpoint means: they may never change."""
    assert rng.derive(0, "order") == 7549455582517950997
    assert rng.derive(42, "order", 3) == 4600269348085479733
    assert rng.derive(42, "data", 1, 0, 3) == 5867691200487586784
    assert rng.derive(42, "model", 0) == 1782139837357328825


@given(st.integers(0, 2**64), st.sampled_from(rng.STREAMS), st.lists(st.integers(0, 2**32), max_size=4))
def test_a_stream_is_a_function_of_its_arguments(seed: int, stream: str, counters: list[int]) -> None:
    value = rng.derive(seed, stream, *counters)
    assert value == rng.derive(seed, stream, *counters)
    assert 0 <= value < 2**63
    assert torch.Generator().manual_seed(value).initial_seed() == value


def test_streams_of_other_names_counters_and_seeds_differ() -> None:
    """A8: no two of rank, worker and epoch share augmentation; counters do not run into each other."""
    values = [
        rng.derive(seed, stream, *counters)
        for seed in (0, 1, 12)
        for stream in rng.STREAMS
        for length in range(4)
        for counters in itertools.product((0, 1, 2, 12), repeat=length)
    ]
    assert len(values) == len(set(values))


def test_nearby_seeds_are_unrelated() -> None:
    bits = [rng.derive(seed, "order") ^ rng.derive(seed + 1, "order") for seed in range(200)]
    flipped = sum(value.bit_count() for value in bits) / len(bits)
    assert 28 < flipped < 35, "about half of 63 bits"


def test_an_unknown_stream_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'order'"):
        rng.derive(0, "ordre")


# --- seeding


def test_set_seed_seeds_python_numpy_and_torch() -> None:
    utils.set_seed(42)
    first = draw()
    utils.set_seed(42)
    assert draw() == first
    random.seed(42)
    np.random.seed(42)
    torch.manual_seed(42)
    assert draw() == first, "the numbers people have in their notebooks"
    utils.set_seed(43)
    assert all(new != old for new, old in zip(draw(), first, strict=True))


def test_a_bool_is_a_seed() -> None:
    rng.set_seed(True)
    drawn = torch.rand(1)
    rng.set_seed(1)
    assert torch.equal(torch.rand(1), drawn)


def test_a_large_seed_is_taken_though_numpy_has_32_bits() -> None:
    utils.set_seed(2**40 + 5)
    assert np.random.get_state()[1][0] == 5  # type: ignore[index]
    assert torch.initial_seed() == 2**40 + 5


def test_device_specific_adds_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, size=4, rank=3, device="cpu")
    utils.set_seed(10, device_specific=True)
    assert torch.initial_seed() == 13
    utils.set_seed(10)
    assert torch.initial_seed() == 10


def test_device_specific_knows_the_rank_before_the_world_is_open() -> None:
    """Called first thing in a script, every rank would otherwise silently draw the same numbers."""
    with environ.patch_environment(
        {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
        }
    ):
        utils.set_seed(10, device_specific=True)
    assert torch.initial_seed() == 11


def test_deterministic_asks_torch_and_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    readied: list[str] = []
    monkeypatch.setattr(
        type(devices.get("cpu")), "make_deterministic", lambda self: readied.append(self.type)
    )
    utils.set_seed(1)
    assert asked == []
    utils.set_seed(1, deterministic=True)
    assert (asked, readied) == ([True], ["cpu"])


def test_set_seed_seeds_the_device_of_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    null = CountingDevice(size=2)
    with devices.DEVICES.add("meta", null):
        enter(monkeypatch, size=2, rank=1)
        utils.set_seed(10, device_specific=True)
    assert null.seeds == [11]


# --- capture and restore


def test_capture_and_restore_bring_every_generator_back() -> None:
    utils.set_seed(5)
    draw()
    state = rng.capture()
    expected = [draw(), draw()]
    utils.set_seed(6)
    assert rng.restore(state) == []
    assert [draw(), draw()] == expected


def test_the_names_are_those_of_the_file() -> None:
    state = rng.capture()
    assert list(state) == ["random_state", "numpy_random_seed", "torch_manual_seed"]
    assert state["torch_manual_seed"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("name", "key", "kind"),
    [
        ("cuda", "torch_cuda_manual_seed", list),
        ("xpu", "torch_xpu_manual_seed", list),
        ("mlu", "torch_mlu_manual_seed", list),
        ("sdaa", "torch_sdaa_manual_seed", list),
        ("musa", "torch_musa_manual_seed", list),
        ("hpu", "torch_hpu_manual_seed", list),
        ("neuron", "torch_neuron_manual_seed", list),
        ("npu", "torch_npu_manual_seed", list),
        ("mps", "torch_mps_manual_seed", list),
        ("xla", "xm_seed", int),
    ],
)
def test_the_devices_generators_are_captured_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, key: str, kind: type
) -> None:
    install(monkeypatch, name)
    device = devices.get(name)
    device.seed(9)
    state = rng.capture()
    assert type(state[key]) is kind
    one = device.get_rng_state(0)
    device.seed(10)
    assert rng.restore(state) == []
    assert (one == device.get_rng_state(0)) if kind is int else torch.equal(one, device.get_rng_state(0))


def test_restore_tells_what_the_state_has_nothing_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A4: a checkpoint of a CPU, resumed on a GPU; the caller says so."""
    state = rng.capture()
    del state["numpy_random_seed"]
    install(monkeypatch, "cuda")
    assert rng.restore(state | {"step": 3}) == ["numpy_random_seed", "torch_cuda_manual_seed"]


def test_a_state_survives_a_file(tmp_path: Any) -> None:
    utils.set_seed(5)
    torch.save(rng.capture(), tmp_path / "random_states_0.pkl")
    expected = draw()
    utils.set_seed(6)
    rng.restore(torch.load(tmp_path / "random_states_0.pkl", weights_only=False))
    assert draw() == expected


# --- synchronizing


def test_synchronizing_alone_changes_nothing() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    own = torch.Generator().manual_seed(4)
    utils.synchronize_rng_states(["torch", RNGType.TORCH, "generator"], generator=own)
    assert torch.equal(torch.get_rng_state(), before)
    assert own.initial_seed() == 4


def test_nothing_to_synchronize_is_not_an_error() -> None:
    utils.synchronize_rng_state(None)
    utils.synchronize_rng_state("cuda")
    utils.synchronize_rng_states([])


def test_every_rng_type_of_the_contract_is_taken() -> None:
    for each in RNGType:
        utils.synchronize_rng_state(each, generator=torch.Generator())


def test_the_devices_generator_is_read_and_set(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, "cuda")
    asked: list[Any] = []

    def from_rank_0(state: torch.Tensor) -> torch.Tensor:
        asked.append(state.clone())
        return torch.tensor([99], dtype=torch.uint8)

    monkeypatch.setattr("accelerate.world.collective.broadcast_object", from_rank_0)
    fake.set_device(1)
    utils.synchronize_rng_state("cuda")
    assert [int(state) for state in asked] == [1]
    assert int(fake.states[1]) == 99
    assert int(fake.states[0]) == 0


def test_a_generator_must_be_given() -> None:
    with pytest.raises(SettingError, match="needs a generator"):
        utils.synchronize_rng_state("generator")


def test_an_unknown_generator_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'torch'"):
        utils.synchronize_rng_state("troch")


def test_synchronizing_before_the_group_is_open_is_refused() -> None:
    """Each rank would keep its own state and nobody would notice."""
    with (
        environ.patch_environment(
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        ),
        pytest.raises(WorldError, match="before the processes know each other"),
    ):
        utils.synchronize_rng_state("torch")
