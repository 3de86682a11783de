"""A device as it really is: facts, memory, random numbers, copies, streams."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from accelerate import device as devices
from accelerate.core.errors import DeviceError
from accelerate.device.base import Device
from accelerate.world import rng

MiB = 2**20


def test_what_was_probed_is_there(device: Device) -> None:
    """The launcher's guess from device nodes, and torch's own answer."""
    if device.priority == 0:
        pytest.skip(f"{device.type} has no file that could tell without torch")
    probed, count = devices.probe_devices()
    assert (probed.type, count) == (device.type, device.count())


def test_probing_leaves_torch_and_the_driver_alone() -> None:
    script = (
        "import sys; from accelerate import device; device.probe_devices(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_asking_what_is_available_leaves_a_process_able_to_fork(device: Device) -> None:
    """F14: a parent that only asked has not initialized the driver, which torch itself does not tell."""
    script = (
        "import os, sys, torch; from accelerate import device as d; here = d.detect(); here.count()\n"
        "if child := os.fork(): sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "torch.ones(1, device=here.torch_device(0)).item()"
    )
    # Whoever runs the tests may have told torch how to look: the package is to say it itself.
    unset = {name: text for name, text in os.environ.items() if name not in device.check_environment}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env=unset)


def test_facts(device: Device) -> None:
    assert device.is_available()
    assert device.count() >= 1
    assert device.name(0)
    assert device.supports("fp32")
    assert device.supports("bf16") or device.supports("fp16")
    assert device.bind(0).type == device.type
    assert device.current() == 0
    with pytest.raises(DeviceError, match="does not exist"):
        Device.bind(device, device.count())


def test_memory_follows_a_tensor(device: Device) -> None:
    device.empty_cache()
    before = device.memory_allocated(0)
    assert before is not None
    free, total = device.get_memory_info(0)
    assert 0 < free <= total
    peaked = device.reset_peak_memory(0)
    block = torch.empty(64 * MiB, dtype=torch.uint8, device=device.torch_device(0))
    device.synchronize(0)
    assert (device.memory_allocated(0) or 0) - before >= 64 * MiB
    assert free - device.get_memory_info(0)[0] >= 48 * MiB, "other programs may give back a little meanwhile"
    del block
    device.empty_cache()
    assert device.memory_allocated(0) == before
    if peaked:
        assert (device.max_memory_allocated(0) or 0) - before >= 64 * MiB


def test_a_full_device_is_recognised(device: Device) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(4 * device.get_memory_info(0)[1], dtype=torch.uint8, device=device.torch_device(0))
    assert device.is_out_of_memory(caught.value)


def test_generators_go_round(device: Device) -> None:
    rng.set_seed(3)
    state = rng.capture()
    assert device.rng_key in state
    where = device.torch_device(0)
    first, first_host = torch.rand(8, device=where).cpu(), torch.rand(8)
    rng.set_seed(4)
    assert not torch.equal(torch.rand(8, device=where).cpu(), first)
    assert rng.restore(state) == []
    assert torch.equal(torch.rand(8, device=where).cpu(), first)
    assert torch.equal(torch.rand(8), first_host)


def test_copies_go_both_ways_and_beside_each_other(device: Device) -> None:
    there = device.torch_device(0)
    source = torch.arange(2**20, dtype=torch.float32)
    pinned = source.pin_memory() if device.type == "cuda" else source
    stream = device.stream(0)
    with device.use_stream(stream):
        copy = pinned.to(there, non_blocking=True)
    device.synchronize(0)
    back = (copy * 2).cpu()
    assert torch.equal(back, source * 2)


def test_what_it_says_it_supports_it_computes(device: Device) -> None:
    there = device.torch_device(0)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if device.supports(name):
            left = torch.full((32, 32), 0.5, dtype=dtype, device=there)
            assert (left @ left).float().cpu().eq(8.0).all()
    if device.supports("fp8") and device.type == "cuda":
        ones = torch.ones(32, 32, device=there).to(torch.float8_e4m3fn)
        one = torch.ones((), device=there)
        out = torch._scaled_mm(ones, ones.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        assert out.float().cpu().eq(32.0).all()


def test_deterministic_kernels_run_after_set_seed(device: Device) -> None:
    script = (
        "import torch; from accelerate.world import rng; from accelerate import device as d\n"
        "rng.set_seed(1, deterministic=True)\n"
        "x = torch.rand(64, 64, device=d.detect().torch_device(0)); (x @ x).sum().item()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
