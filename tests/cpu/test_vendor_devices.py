"""Devices of vendors that torch has no type of its own for, each played by the simulated accelerator.

Such a vendor's package gives its name to torch's spare device type, and registers a module and a backend of
collectives under it; so does the simulated one, under each of their names. All but the kernels is then real:
the device file is the one that counts, and two ranks train, save and resume on ``npu:0`` and ``npu:1``.
"""

from __future__ import annotations

import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import sim
from tests.support.devices import device_named, vendors_by_rename
from tests.support.long_run import long_run_param
from tests.support.numbers import close
from tests.support.ranks import RankServer, same_on_all
from tests.support.sharded_models import STEPS, adamw, batches, loss_of, plain, share, tiny, whole

pytestmark = pytest.mark.skipif(sim.missing() is not None, reason=str(sim.missing()))


def become(name: str) -> Any:
    """Let this rank have the vendor's package and its devices."""
    device = device_named(name)
    sys.modules[device.extension] = types.ModuleType(device.extension)
    sim.load(name, device.backend)
    return device


def trained(name: str, folder: str) -> Any:
    """FSDP2 on two devices of the vendor; what the device file says of them on the way."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    device = become(name)
    # Before the first collective, whose threads release tensors when they like: bytes are counted.
    check_device(device, int(os.environ["LOCAL_RANK"]))
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(fsdp_plugin=plugin)
    rank = accelerator.process_index
    assert accelerator.device == torch.device(name, rank)
    assert accelerator.state.distributed_type == "FSDP"
    assert f"{name}:{device.backend}" in dist.get_backend_config()
    assert (device.current(), device.count()) == (rank, 2)
    model = tiny()
    optimizer = adamw(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, norms = [], []
    for words in batches(STEPS):
        mine = share(words, rank, 2).to(accelerator.device)
        loss = loss_of(model, mine)
        accelerator.backward(loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    assert {parameter.device for parameter in model.parameters()} == {accelerator.device}
    values = {key: value.cpu() for key, value in whole(model).items()}
    accelerator.save_state(folder)
    check_resume(accelerator, model, folder, values)
    return losses, norms, values


def check_resume(accelerator: Any, model: Any, folder: str, values: dict[str, torch.Tensor]) -> None:
    """Weights and the generator of the device come back from the checkpoint."""
    drawn = torch.rand(4, device=accelerator.device).cpu()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(folder)
    assert torch.equal(torch.rand(4, device=accelerator.device).cpu(), drawn)
    for key, value in whole(model).items():
        assert torch.equal(value.cpu(), values[key]), key


def check_device(device: Any, rank: int) -> None:
    """Memory, out of memory, streams and events, as the device file asks the module for them."""
    assert device.bind(rank) == torch.device(device.type, rank)
    device.reset_peak_memory()
    before, (free, total) = device.memory_allocated(), device.get_memory_info()
    block = torch.empty(2**20, dtype=torch.uint8, device=device.torch_device(rank))
    assert device.memory_allocated() == before + 2**20
    assert free - device.get_memory_info()[0] == 2**20
    assert device.max_memory_allocated() == before + 2**20
    stream = device.stream()
    with device.use_stream(stream):
        block.fill_(1)
        event = device.record_event(device.current_stream())
    device.wait_event(event, device.current_stream())
    device.synchronize()
    del block
    device.empty_cache()
    assert device.memory_allocated() == before
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2 * total, dtype=torch.uint8, device=device.torch_device(rank))
    assert device.is_out_of_memory(caught.value)


@pytest.fixture(scope="module")
def numbers_of_the_cpu() -> Any:
    return plain(1)


@pytest.mark.parametrize(
    "name", [name if name in ("npu", "neuron") else long_run_param(name) for name in vendors_by_rename()]
)
def test_fsdp2_trains_saves_and_resumes(
    ranks: RankServer, tmp_path: Path, numbers_of_the_cpu: Any, name: str
) -> None:
    """B1: to the numbers of one CPU process."""
    ours = same_on_all(ranks(2, trained, name, str(tmp_path / "state")))
    close(ours, numbers_of_the_cpu, 1e-4)


def mixed(name: str, precision: str) -> Any:
    """DDP in a 16-bit format: what autocast and the loss scaler were made for, and a loss."""
    from accelerate import Accelerator

    device = become(name)
    check_device(device, int(os.environ["LOCAL_RANK"]))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Accelerator(mixed_precision=precision, dynamo_backend="inductor").prepare(torch.nn.Linear(8, 8))
    is_warned = any("TorchInductor generates no code" in str(w.message) for w in told)
    assert is_warned == (device.compile_backend != "inductor")
    accelerator = Accelerator(mixed_precision=precision)
    model = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.autocast():
        product = torch.ones(2, 8, device=accelerator.device) @ torch.ones(8, 2, device=accelerator.device)
    loss = model(torch.ones(2, 8, device=accelerator.device)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    scale = accelerator.scaler.get_scale() if accelerator.scaler is not None else None
    return str(product.dtype), str(accelerator.distributed_type), scale


@pytest.mark.parametrize("name", vendors_by_rename())
def test_autocast_is_the_vendors(ranks: RankServer, name: str) -> None:
    device = device_named(name)
    for precision, dtype in {"bf16": "torch.bfloat16", "fp16": "torch.float16"}.items():
        if precision in device.dtypes:
            kind = f"DistributedType.{device.distributed_type}"
            (told, distributed, scale), *_ = ranks(2, mixed, name, precision)
            assert (told, distributed) == (dtype, kind)
            assert (scale is not None) == (precision == "fp16")
