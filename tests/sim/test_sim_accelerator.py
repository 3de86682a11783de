"""A whole training script on an accelerator that no file of the package knows."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, dispatch_model
from accelerate.utils import GradScalerKwargs, find_executable_batch_size, set_seed
from tests.support import launch_plans, sim
from tests.support.command import launch
from tests.support.long_run import long_run_param
from tests.support.ranks import RankServer, same_on_all

MiB = 2**20
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
Weights = dict[str, torch.Tensor]
# Half precision holds no more than 65504, and the default scale is 65536: the first steps would be skipped.
FP16 = {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=128.0)]}


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(32, 8, generator=generator), torch.randn(32, 1, generator=generator))


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.ReLU(), nn.Linear(16, 1))


def by_hand(dtype: torch.dtype | None = None) -> Weights:
    """Two epochs on the CPU, in torch alone: what every other run is compared with."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in DataLoader(samples(), batch_size=8):
            optimizer.zero_grad()
            half = torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext()
            with half:
                out = model(x)
            F.mse_loss(out.float(), y).backward()
            optimizer.step()
    return model.state_dict()


def accelerated(batch_size: int = 8, **options: Any) -> tuple[Accelerator, Weights]:
    """The same two epochs through the ``Accelerator``."""
    accelerator = Accelerator(**options)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(samples(), batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            assert x.device == y.device == accelerator.device
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
    parameters = accelerator.unwrap_model(model).state_dict()
    assert all(value.device == accelerator.device for value in parameters.values())
    return accelerator, {name: value.cpu() for name, value in parameters.items()}


# ------------------------------------------------------------------------------------- one process


def test_a_model_loaded_by_a_map_of_one_device_goes_to_the_accelerator() -> None:
    """``from_pretrained(device_map="cpu")`` leaves such a map; quantized models stay where it says."""
    accelerator = Accelerator()
    model: Any = dispatch_model(network(), {"": "cpu"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert model(torch.ones(1, 8, device=accelerator.device)).device == accelerator.device
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    hooked = dispatch_model(network(), {"": "sim:1"}, force_hooks=True)
    assert accelerator.prepare_model(hooked)[0].weight.device == torch.device("sim:1")
    quantized: Any = dispatch_model(network(), {"": "cpu"})
    quantized.is_loaded_in_4bit = True
    assert accelerator.prepare_model(quantized, evaluation_mode=True)[0].weight.device.type == "cpu"


def test_one_process_trains_on_the_first_device_to_the_numbers_of_the_cpu() -> None:
    accelerator, weights = accelerated()
    assert accelerator.device == torch.device("sim", 0)
    assert str(accelerator.distributed_type.value) == "NO"
    torch.testing.assert_close(weights, by_hand(), **CLOSE)


def test_cpu_true_leaves_the_accelerator_alone() -> None:
    accelerator, weights = accelerated(cpu=True)
    assert accelerator.device == torch.device("cpu")
    torch.testing.assert_close(weights, by_hand(), **CLOSE)


def test_bf16_computes_in_bfloat16_and_trains_like_the_cpu_in_bfloat16() -> None:
    seen: list[torch.dtype] = []
    watch = nn.modules.module.register_module_forward_hook(
        lambda module, _, out: seen.append(out.dtype) if isinstance(module, nn.Linear) else None
    )
    try:
        _, weights = accelerated(mixed_precision="bf16")
    finally:
        watch.remove()
    assert set(seen) == {torch.bfloat16}
    torch.testing.assert_close(weights, by_hand(dtype=torch.bfloat16), rtol=1e-2, atol=1e-3)


def test_fp16_scales_the_loss_and_trains_close_to_float32() -> None:
    accelerator, weights = accelerated(**FP16)
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 128.0
    torch.testing.assert_close(weights, by_hand(), rtol=2e-2, atol=2e-3)


def test_an_overflow_in_fp16_skips_the_step_and_the_schedule() -> None:
    """B6: the optimizer steps not, the scheduler neither, and the script can see it."""
    accelerator = Accelerator(mixed_precision="fp16")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    before, scale = model.weight.detach().clone(), accelerator.scaler.get_scale()
    for factor, skipped, rate in ((float("inf"), True, 1.0), (1.0, False, 0.5)):
        optimizer.zero_grad()
        accelerator.backward((model(torch.ones(1, 2, device=accelerator.device)) * factor).sum())
        optimizer.step()
        scheduler.step()
        assert accelerator.optimizer_step_was_skipped is skipped
        assert torch.equal(model.weight, before) is skipped
        assert scheduler.get_last_lr() == [rate]
    assert accelerator.scaler.get_scale() < scale


def test_gradients_are_clipped_at_their_true_size_in_fp16() -> None:
    accelerator = Accelerator(**FP16)
    model = nn.Linear(2, 1, bias=False)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.tensor([[3.0, 4.0]], device=accelerator.device)).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.item() == pytest.approx(5.0, rel=1e-3)
    elsewhere = nn.Parameter(torch.zeros(1))
    elsewhere.grad = torch.full((1,), 12 * accelerator.scaler.get_scale())
    model.weight.grad.mul_(5 * accelerator.scaler.get_scale())
    accelerator.gradient_state.sync_gradients = False
    norm = accelerator.clip_grad_norm_([*model.parameters(), elsewhere], 1.0)
    assert norm.item() == pytest.approx(13.0, rel=1e-3), "of a model over two devices, in an open window"
    model.weight.grad.div_(5 * accelerator.scaler.get_scale())
    assert model.weight.grad.tolist()[0] == pytest.approx([0.6, 0.8], rel=1e-3)


def test_memory_goes_back_after_free_memory() -> None:
    accelerator = Accelerator()
    gc.collect()  # what earlier tests have left
    before = torch.sim.memory_allocated(), torch.sim.memory_reserved()
    model = nn.Linear(512, 512)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(4, 512, device=accelerator.device)).sum())
    optimizer.step()
    # Weights, gradients and two moments, of a MiB each.
    assert torch.sim.memory_allocated() - before[0] > 4 * MiB
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert (model, optimizer) == (None, None)
    assert torch.sim.memory_allocated() == before[0]
    # During the call the caller's variables held both; what they freed since then is in the cache.
    accelerator.free_memory()
    assert torch.sim.memory_reserved() <= before[1]


def test_the_batch_size_shrinks_until_it_fits_the_device() -> None:
    Accelerator()
    tried = []

    @find_executable_batch_size(starting_batch_size=32)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        rows = torch.empty(batch_size, MiB, dtype=torch.uint8, device="sim")
        return len(rows)

    with sim.capacity(torch.sim.memory_allocated() + 20 * MiB):
        assert train() <= 20
    assert tried[0] == 32
    assert max(tried[1:]) < 32
    assert torch.sim.memory_reserved() <= 20 * MiB


def test_a_checkpoint_brings_back_weights_moments_and_random_numbers(tmp_path: Path) -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    model = network(dropout=0.5)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    x = torch.ones(4, 8, device=accelerator.device)

    def step() -> tuple[float, list[float], Weights]:
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        drawn = torch.rand(2, device="sim:0").tolist() + torch.rand(2, device="sim:1").tolist()
        return loss.item(), drawn, {n: v.cpu().clone() for n, v in model.state_dict().items()}

    step()
    accelerator.save_state(str(tmp_path / "state"))
    expected = step()
    set_seed(99)
    step()
    accelerator.load_state(str(tmp_path / "state"))
    again = step()
    assert again[:2] == expected[:2]
    assert all(torch.equal(again[2][name], expected[2][name]) for name in expected[2])


# ------------------------------------------------------------------------------------ two processes


def facts_and_weights(options: dict[str, Any]) -> tuple[dict[str, Any], Weights]:
    accelerator, weights = accelerated(batch_size=4, **options)
    facts = {
        "device": str(accelerator.device),
        "type": str(accelerator.distributed_type.value),
        "processes": accelerator.num_processes,
        "backend": torch.distributed.get_backend(),
        "gathered": accelerator.gather(torch.tensor([accelerator.process_index], device=accelerator.device)),
        "elsewhere": torch.sim.memory_allocated(1 - accelerator.process_index),
    }
    return facts | {"gathered": facts["gathered"].tolist()}, weights


def test_two_processes_take_a_device_each_and_train_like_one(ranks: RankServer) -> None:
    results = ranks(2, facts_and_weights, {})
    for rank, (facts, _) in enumerate(results):
        assert facts.pop("device") == f"sim:{rank}"
        assert "simccl" in facts.pop("backend")
        assert facts == {"type": "MULTI_GPU", "processes": 2, "gathered": [0, 1], "elsewhere": 0}
    torch.testing.assert_close(same_on_all([w for _, w in results]), by_hand(), **CLOSE)


@pytest.mark.parametrize("options", [{"mixed_precision": "bf16"}, FP16], ids=["bf16", "fp16"])
def test_two_processes_train_in_half_precision(ranks: RankServer, options: dict[str, Any]) -> None:
    results = ranks(2, facts_and_weights, options)
    weights = same_on_all([w for _, w in results])
    torch.testing.assert_close(weights, by_hand(), rtol=5e-2, atol=1e-2)


def overflow_on_one_rank() -> list[tuple[bool, float]]:
    accelerator = Accelerator(mixed_precision="fp16")
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    seen = []
    for factor in (float("inf") if accelerator.process_index == 1 else 1.0, 1.0):
        optimizer.zero_grad()
        accelerator.backward((model(torch.ones(1, 2, device=accelerator.device)) * factor).sum())
        optimizer.step()
        seen.append((accelerator.optimizer_step_was_skipped, accelerator.scaler.get_scale()))
    return seen


def test_an_overflow_on_one_rank_skips_the_step_on_both(ranks: RankServer) -> None:
    """B6: no rank takes a step that another one has skipped."""
    first, second = same_on_all(ranks(2, overflow_on_one_rank))
    assert [first[0], second[0]] == [True, False]
    assert second[1] == first[1]


# -------------------------------------------------------------------------------- from the command line


def device_and_size() -> tuple[str, int]:
    accelerator = Accelerator()
    return str(accelerator.device), accelerator.num_processes


def test_two_processes_of_a_launch_for_the_cpu_leave_the_devices_alone(ranks: RankServer) -> None:
    planned = launch_plans.plan(launch_plans.request(use_cpu=True, num_processes="2"), "local")
    assert ranks(2, device_and_size, env=planned.variables) == [("cpu", 2)] * 2


SCRIPT = """
    import sys
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    index = torch.tensor([accelerator.process_index + 1.0], device=accelerator.device)
    line = f"{accelerator.device} {accelerator.num_processes} {accelerator.gather(index).tolist()}\\n"
    sys.stdout.write(line)  # whole, beside the other rank's
    accelerator.end_training()
"""


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--num_processes", "2"], ["sim:0 2 [1.0, 2.0]", "sim:1 2 [1.0, 2.0]"]),
        long_run_param(["--cpu", "--num_processes", "2"], ["cpu 2 [1.0, 2.0]", "cpu 2 [1.0, 2.0]"]),
    ],
)
def test_a_script_is_launched_on_devices_it_knows_nothing_of(flags: list[str], expected: list[str]) -> None:
    done = launch(*flags, script_text=SCRIPT)
    assert done.returncode == 0, done.output
    assert sorted(done.stdout.splitlines()) == expected
