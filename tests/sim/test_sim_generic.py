"""An accelerator that no file of ours knows works through the default ``Device``, end to end."""

from __future__ import annotations

import random

import pytest
import torch

from accelerate import device as devices
from accelerate.core.errors import DeviceError
from accelerate.device.base import Device
from accelerate.world import rng
from accelerate.world import world as worlds
from tests.support.ranks import RankServer

MiB = 2**20


def test_it_is_detected_with_its_facts() -> None:
    device = devices.detect()
    assert type(device) is Device
    assert (device.type, device.distributed_type, device.rng_key) == (
        "sim",
        "MULTI_GPU",
        "torch_sim_manual_seed",
    )
    assert device.is_available()
    assert device.count() == 2
    assert device.group_backend()
    assert isinstance(device.name(0), str)


def test_memory_is_counted_as_tensors_come_and_go() -> None:
    device = devices.get("sim")
    device.empty_cache()
    device.reset_peak_memory(0)
    before = device.memory_allocated(0)
    free, total = device.get_memory_info(0)
    assert before is not None
    block = torch.empty(MiB, dtype=torch.uint8, device=device.torch_device(0))
    assert (device.memory_allocated(0) or 0) - before >= MiB
    assert free - device.get_memory_info(0)[0] >= MiB
    assert device.get_memory_info(0)[1] == total
    del block
    device.empty_cache()
    assert device.memory_allocated(0) == before
    assert (device.max_memory_allocated(0) or 0) - before >= MiB


def test_a_full_device_is_recognised() -> None:
    device = devices.get("sim")
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2 * device.get_memory_info(0)[1], dtype=torch.uint8, device=device.torch_device(0))
    assert device.is_out_of_memory(caught.value)


def test_binding_synchronizing_and_streams() -> None:
    device = devices.get("sim")
    assert device.bind(1) == torch.device("sim", 1)
    try:
        assert device.current() == 1
        with device.use_stream(device.stream()):
            ones = torch.ones(3, device=device.torch_device(1))
        device.synchronize()
        assert ones.cpu().tolist() == [1, 1, 1]
        with pytest.raises(DeviceError, match="sim:2 does not exist"):
            device.bind(2)
    finally:
        device.bind(0)


def test_its_generators_are_captured_and_restored() -> None:
    rng.set_seed(11)
    state = rng.capture()
    assert len(state["torch_sim_manual_seed"]) == 2
    first = torch.rand(3, device="sim:1"), torch.rand(3), random.random()
    rng.set_seed(12)
    assert rng.restore(state) == []
    again = torch.rand(3, device="sim:1"), torch.rand(3), random.random()
    assert torch.equal(first[0].cpu(), again[0].cpu())
    assert torch.equal(first[1], again[1])
    assert first[2] == again[2]


def two_ranks() -> tuple[str, list[float], list[float]]:
    world = worlds.open()
    rng.set_seed(5, device_specific=True)
    own = torch.rand(2, device=world.device).cpu().tolist()
    rng.synchronize_rng_state(world.device.type)
    shared = torch.rand(2, device=world.device).cpu().tolist()
    return str(world.device), own, shared


def test_two_ranks_share_its_generator_when_asked(ranks: RankServer) -> None:
    (one, own_0, shared_0), (two, own_1, shared_1) = ranks(2, two_ranks)
    assert (one, two) == ("sim:0", "sim:1")
    assert own_0 != own_1
    assert shared_0 == shared_1


def checked_calls() -> tuple[list[str], str]:
    """Make five calls, the last but one with another value on each rank; the waits of the last two."""
    from accelerate import Accelerator
    from accelerate.core.errors import PrepareError
    from accelerate.strategy.parallelism.pipeline.micro_batches import CallCheck
    from tests.sim.test_sim_host_waits import HostWaits

    accelerator = Accelerator()
    rows = torch.ones(4, 2, device=accelerator.device)
    check = CallCheck(torch.distributed.group.WORLD, accelerator.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(accelerator.world.hardware), "pins_memory", True)
        for _ in range(3):
            check.check("equal", [rows])
        with HostWaits() as recorded:
            check.check("equal", [rows + accelerator.process_index])
            with pytest.raises(PrepareError) as error:
                check.check("equal", [rows])
    return recorded.waits, str(error.value)


def test_later_calls_of_a_pipeline_are_checked_without_waiting_for_them(ranks: RankServer) -> None:
    """What lies on the device is read in the call after."""
    for waits, error in ranks(2, checked_calls):
        assert waits == []
        assert "the stages of a pipeline were given different values" in error
