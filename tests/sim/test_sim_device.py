"""The simulated accelerator itself: devices, copies, memory, random numbers, streams."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch

from accelerate import utils
from tests.support import sim
from tests.support.ranks import RankServer

MiB = 2**20
OLD = not hasattr(torch.accelerator, "get_memory_info")


@pytest.fixture(autouse=True)
def _empty_devices() -> Generator[None]:
    """Each test begins with empty devices, and shows when it leaves something on them."""
    torch.sim.empty_cache()
    for device in range(2):
        torch.sim.reset_peak_memory_stats(device)
    yield
    if any(torch.sim.memory_allocated(device) for device in range(2)):
        gc.collect()  # it costs as much as ten tests
    assert [torch.sim.memory_allocated(device) for device in range(2)] == [0, 0]


# ------------------------------------------------------------------------------------------- devices


def test_torch_sees_one_accelerator_with_two_devices() -> None:
    assert torch.accelerator.is_available()
    assert str(torch.accelerator.current_accelerator()) == "sim"
    assert torch.accelerator.device_count() == torch.sim.device_count() == 2
    assert torch.get_device_module("sim") is torch.sim


def test_the_current_device_is_meant_where_an_index_is_missing(tmp_path: Path) -> None:
    utils.save({"w": torch.ones(1)}, tmp_path / "w.safetensors", safe_serialization=True)
    torch.accelerator.set_device_index(1)
    try:
        assert torch.ones(1, device="sim").device == torch.device("sim", 1)
        loaded = utils.load(tmp_path / "w.safetensors", torch.device("sim"))
        assert loaded["w"].device == torch.device("sim", 1)
        with torch.sim.device(0):
            assert torch.accelerator.current_device_index() == 0
        assert torch.sim.current_device() == 1
    finally:
        torch.sim.set_device(0)
    with pytest.raises(RuntimeError, match="invalid device index 2: sim has 2 devices"):
        torch.sim.set_device(2)


def test_the_number_of_devices_can_be_lowered() -> None:
    sim.set_count(1)
    try:
        assert torch.accelerator.device_count() == 1
        with pytest.raises(RuntimeError, match="invalid device index 1"):
            torch.ones(1, device="sim:1")
    finally:
        sim.set_count(2)


def test_loading_again_changes_nothing() -> None:
    module = torch.sim
    sim.load()
    assert torch.sim is module


@pytest.mark.parametrize(
    "mixed",
    [
        lambda here, there: here + there,
        lambda here, there: torch.cat([here, there]),
        lambda here, there: torch.nn.functional.linear(here, there),
        lambda here, there: torch.nn.functional.conv1d(here[:, :, None], there[:, :, None]),
    ],
    ids=["add", "cat", "linear", "conv"],
)
@pytest.mark.parametrize("other", ["cpu", "sim:1"])
def test_operators_refuse_to_mix_devices(mixed: Callable[..., torch.Tensor], other: str) -> None:
    here, there = torch.ones(2, 2, device="sim:0"), torch.ones(2, 2, device=other)
    with pytest.raises(RuntimeError, match="tensors to be on the same device"):
        mixed(here, there)


def test_numbers_and_indices_may_come_from_the_host() -> None:
    x = torch.arange(3.0, device="sim")
    assert (x * torch.tensor(2.0)).tolist() == [0, 2, 4]
    assert x[torch.tensor([2, 0])].tolist() == [2, 0]


# -------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64])
def test_copies_between_host_and_devices_keep_the_values(dtype: torch.dtype) -> None:
    x = torch.arange(12).reshape(3, 4).to(dtype)
    there = x.to("sim:1")
    assert there.device == torch.device("sim", 1)
    assert torch.equal(there.to("sim:0").cpu(), x)


def test_strided_views_are_copied_as_what_they_show() -> None:
    x = torch.randn(4, 6)
    y = x.to("sim")
    assert torch.equal(y.t().cpu(), x.t())
    assert torch.equal(y[1:, ::2].cpu(), x[1:, ::2])
    assert torch.equal(y.unfold(1, 2, 2).cpu(), x.unfold(1, 2, 2))
    y[1:, ::2].copy_(torch.zeros(3, 1))  # broadcast into a view
    x[1:, ::2] = 0
    assert torch.equal(y.cpu(), x)


def test_a_copy_converts_and_resolves_what_is_lazy() -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert torch.equal(z.to("sim").conj().cpu(), z.conj())
    assert torch.equal(z.to("sim").conj().imag.cpu(), z.conj().imag)
    half = torch.zeros(2, dtype=torch.float16, device="sim").copy_(torch.tensor([0.5, 2.0]))
    assert half.tolist() == [0.5, 2.0]


def test_traffic_counts_the_copies_of_a_block_by_direction() -> None:
    x = torch.ones(256)
    with sim.traffic() as moved:
        here = x.to("sim:0")
        there = here.to("sim:1")
        _ = (there + 1).exp_()  # the kernels run on the host, and what they move for that does not count
        there.cpu()
        there.cpu()
    assert moved == sim.Traffic(
        to_device=1, to_device_bytes=1024, to_host=2, to_host_bytes=2048, between=1, between_bytes=1024
    )


def test_pickle_and_load_find_the_device_again(tmp_path: Path) -> None:
    x = torch.arange(3.0, device="sim:1")
    assert pickle.loads(pickle.dumps(x)).device == x.device
    torch.save({"x": x}, tmp_path / "x.pt")
    for target, device in (
        (None, "sim:1"),
        ("cpu", "cpu"),
        ("sim:0", "sim:0"),
        ({"sim:1": "sim:0"}, "sim:0"),
    ):
        loaded = torch.load(tmp_path / "x.pt", map_location=target)["x"]
        assert loaded.device == torch.device(device)
        assert torch.equal(loaded.cpu(), x.cpu())


# -------------------------------------------------------------------------------------------- memory


def test_memory_is_accounted_for_to_the_byte_on_the_right_device() -> None:
    x = torch.empty(1000, device="sim:1")
    view = x[10:]
    assert torch.sim.memory_allocated(1) == 4000
    assert torch.sim.memory_allocated(0) == 0
    del x
    assert torch.sim.memory_allocated(1) == 4000  # the view keeps it
    del view
    assert torch.sim.memory_allocated(1) == 0
    assert torch.sim.max_memory_allocated(1) == 4000
    torch.sim.reset_peak_memory_stats(1)
    assert torch.sim.max_memory_allocated(1) == 0


def test_freed_memory_stays_reserved_until_the_cache_is_emptied() -> None:
    free, total = torch.sim.mem_get_info()
    assert free == total == 2**30
    x = torch.empty(MiB, dtype=torch.uint8, device="sim")
    del x
    assert torch.sim.memory_reserved() == MiB
    assert torch.sim.mem_get_info() == (total - MiB, total)
    y = torch.empty(MiB, dtype=torch.uint8, device="sim")  # served from the cache
    assert torch.sim.memory_reserved() == MiB
    del y
    torch.sim.empty_cache()
    assert torch.sim.mem_get_info() == (total, total)


@pytest.mark.skipif(OLD, reason="torch.accelerator does not speak of memory before 2.10")
def test_torchs_generic_memory_functions_know_the_device() -> None:
    accelerator = torch.accelerator
    with sim.capacity(2 * MiB, device=1), pytest.raises(torch.OutOfMemoryError):
        torch.empty(3 * MiB, dtype=torch.uint8, device="sim:1")
    accelerator.reset_accumulated_memory_stats(0)
    x = torch.empty(MiB, dtype=torch.uint8, device="sim:0")
    assert accelerator.memory_allocated(0) == accelerator.max_memory_allocated(0) == MiB
    assert accelerator.get_memory_info(0) == (2**30 - MiB, 2**30)
    del x
    stats = accelerator.memory_stats(0)
    assert stats["allocated_bytes.all.current"] == 0
    assert stats["allocated_bytes.all.freed"] == stats["reserved_bytes.all.current"] == MiB
    assert accelerator.memory_stats(1)["num_ooms"] >= 1
    accelerator.empty_cache()
    assert accelerator.memory_reserved(0) == 0


def test_out_of_memory_is_torchs_error_and_harms_nothing() -> None:
    with sim.capacity(10 * MiB, device=0):
        x = torch.empty(6 * MiB, dtype=torch.uint8, device="sim:0")
        with pytest.raises(torch.OutOfMemoryError, match=r"sim:0 out of memory\. Tried to allocate 5242880"):
            torch.empty(5 * MiB, dtype=torch.uint8, device="sim:0")
        torch.empty(5 * MiB, dtype=torch.uint8, device="sim:1")  # the other device has its own
        torch.empty(4 * MiB, dtype=torch.uint8, device="sim:0")  # exactly what is left
        assert torch.sim.memory_allocated(0) == 6 * MiB
        del x
        torch.empty(10 * MiB, dtype=torch.uint8, device="sim:0")
    assert torch.sim.mem_get_info(0)[1] == 2**30


def test_a_kernel_runs_out_of_memory_by_its_result() -> None:
    x = torch.ones(MiB, device="sim")
    with sim.capacity(6 * MiB), pytest.raises(torch.OutOfMemoryError):
        x + 1


def grow(x: torch.Tensor, times: int) -> torch.Tensor:
    """A graph that keeps ``times`` more tensors of the size of ``x``."""
    for _ in range(times):
        x = x.exp()
    return x


def test_a_graph_that_did_not_fit_is_freed() -> None:
    with sim.capacity(8 * MiB):
        x = torch.ones(MiB // 4, device="sim", requires_grad=True)
        with pytest.raises(torch.OutOfMemoryError):
            grow(x, times=10)
        assert torch.sim.memory_allocated() == MiB


def test_storages_are_resized_with_their_memory() -> None:
    x = torch.arange(4.0, device="sim:1")
    x.untyped_storage().resize_(0)
    assert torch.sim.memory_allocated(1) == 0
    x.untyped_storage().resize_(16)
    assert torch.sim.memory_allocated(1) == 16
    y = torch.arange(4.0, device="sim:1").resize_(2, 3)
    assert y.flatten()[:4].tolist() == [0, 1, 2, 3]


def test_fresh_memory_is_not_zero() -> None:
    assert torch.empty(3, device="sim").isnan().all()
    assert torch.nn.Linear(2, 2, device="meta").to_empty(device="sim").weight.isnan().all()


def test_pinned_memory_is_known_as_such() -> None:
    x = torch.ones(256).pin_memory()
    assert x.is_pinned()
    assert x[10:].is_pinned()
    assert sim.pinned() == 1024
    assert not torch.ones(3).is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    del x
    assert sim.pinned() == 0


@pytest.mark.skipif(OLD, reason="older loaders pin for CUDA only")
def test_a_loader_pins_its_batches() -> None:
    loader = torch.utils.data.DataLoader(torch.arange(4), batch_size=2, pin_memory=True)
    assert [batch.is_pinned() for batch in loader] == [True, True]


# ------------------------------------------------------------------------------------ random numbers


def test_a_seed_gives_the_numbers_of_the_cpu_on_every_device() -> None:
    torch.manual_seed(7)
    expected = torch.randn(5)
    assert torch.equal(torch.randn(5, device="sim:0").cpu(), expected)
    assert torch.equal(torch.randn(5, device="sim:1").cpu(), expected)


def test_devices_draw_from_generators_of_their_own() -> None:
    torch.manual_seed(7)
    host = torch.get_rng_state()
    first = torch.randn(5, device="sim:0")
    assert torch.equal(torch.get_rng_state(), host)
    assert torch.equal(torch.randn(5, device="sim:1").cpu(), first.cpu())
    assert not torch.equal(torch.randn(5, device="sim:0").cpu(), first.cpu())


@pytest.mark.parametrize(
    "draw",
    [
        lambda d: torch.rand(4, device=d),
        lambda d: torch.randperm(9, device=d),
        lambda d: torch.multinomial(torch.ones(9, device=d), 4),
        lambda d: torch.nn.functional.dropout(torch.ones(64, device=d), 0.5),
        lambda d: torch.empty(4, device=d).exponential_(),
        lambda d: torch.rand_like(torch.empty(4, device=d)),
    ],
    ids=["rand", "randperm", "multinomial", "dropout", "exponential_", "rand_like"],
)
def test_the_state_of_a_generator_decides_what_is_drawn(draw: Callable[[str], torch.Tensor]) -> None:
    state = torch.sim.get_rng_state(1)
    first = draw("sim:1")
    torch.manual_seed(int(first.sum()) + 1)  # every other generator goes elsewhere
    torch.sim.set_rng_state(state, 1)
    assert torch.equal(draw("sim:1"), first)
    assert not torch.equal(draw("sim:1"), first)


def test_fork_rng_and_states_of_all_devices() -> None:
    states = torch.sim.get_rng_state_all()
    with torch.random.fork_rng(devices=[0, 1], device_type="sim"):
        first = torch.rand(3, device="sim:1")
        torch.sim.manual_seed_all(3)
    assert all(map(torch.equal, torch.sim.get_rng_state_all(), states))
    assert torch.equal(torch.rand(3, device="sim:1"), first)


def test_a_generator_can_be_made_and_given() -> None:
    one, same = torch.Generator("sim:1").manual_seed(5), torch.Generator().manual_seed(5)
    assert one.device == torch.device("sim", 1)
    assert torch.equal(torch.randn(3, device="sim:1", generator=one).cpu(), torch.randn(3, generator=same))
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator"):
        torch.randn(3, device="sim", generator=torch.Generator())


# --------------------------------------------------------------------------- streams, events, processes


def test_streams_and_events_keep_the_order_of_time() -> None:
    side = torch.Stream("sim:1")
    assert torch.accelerator.current_stream(1) == torch.sim.default_stream(1) != side
    begin, end = torch.Event("sim", enable_timing=True), torch.Event("sim", enable_timing=True)
    begin.record()
    with torch.sim.stream(side):
        assert torch.accelerator.current_stream() == side
        assert torch.sim.current_device() == 1
        torch.ones(10, device="sim:1").record_stream(side)
    end.record(side)
    side.wait_event(begin)
    side.synchronize()
    assert torch.sim.current_device() == 0
    assert end.query()
    assert begin.elapsed_time(end) > 0
    assert end.elapsed_time(begin) < 0


def touch_in_fork() -> str:
    """Return the output of a fork of this process that uses a device."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            torch.ones(1, device="sim")
            said = f"worked {torch.sim._is_in_bad_fork()}"
        except RuntimeError as error:
            said = str(error)
        os.write(write, said.splitlines()[0].encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as answer:
        return answer.read()


def fork_before_and_after_use() -> list[str]:
    before = touch_in_fork()
    torch.ones(1, device="sim")
    return [before, touch_in_fork()]


def test_a_fork_can_use_a_device_only_if_its_parent_has_not(ranks: RankServer) -> None:
    [[before, after]] = ranks(1, fork_before_and_after_use)
    assert before == "worked False"
    assert after.startswith("Cannot re-initialize sim in forked subprocess")
