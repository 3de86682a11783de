"""Checks of training: mixed precision, and parity with a single process."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from accelerate.check.base import CheckNotApplicableError, expect, expect_equal
from accelerate.core.setting import load_settings
from accelerate.facade.accelerator import Accelerator
from accelerate.precision.settings import PrecisionSettings

_FORMATS = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_WIDTH, _BATCH, _STEPS, _RATE = 8, 4, 4, 0.05


def make_tiny_model() -> nn.Module:
    """Return a model that is the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.Tanh(), nn.Linear(2 * _WIDTH, 1))


def make_samples(count: int) -> TensorDataset:
    """Return ``count`` inputs of width 8 with targets, the same on every rank."""
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, _WIDTH, generator=draw)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def check_precision(accelerator: Accelerator) -> str:
    """Check that a layer inside a forward returns the requested dtype."""
    requested = load_settings(PrecisionSettings).value.mixed_precision or "no"
    expect_equal(accelerator.mixed_precision, requested, "the precision in use")
    if accelerator.mixed_precision not in _FORMATS:
        raise CheckNotApplicableError(f"what {accelerator.mixed_precision} does is not seen from outside")
    model, seen = make_tiny_model(), list[torch.dtype]()
    next(model.children()).register_forward_hook(lambda layer, args, output: seen.append(output.dtype))
    prepared = Accelerator().prepare(model)
    prepared(torch.ones(2, _WIDTH, device=accelerator.device)).sum().backward()
    dtype = _FORMATS[accelerator.mixed_precision]
    expect_equal({str(each) for each in seen}, {str(dtype)}, "the format inside a forward")
    return f"{accelerator.mixed_precision}: a layer gives {str(dtype).removeprefix('torch.')}"


def check_parity(accelerator: Accelerator) -> str:
    """Check that a tiny model trains to the same weights on all ranks and on one process alone."""
    accelerator = Accelerator()
    model = make_tiny_model()
    alone = copy.deepcopy(model).to(accelerator.device)
    window = _BATCH * accelerator.num_processes * accelerator.gradient_accumulation_steps
    data = make_samples(_STEPS * window)
    model, skipped = _train_prepared(accelerator, model, data)
    _train_alone(alone, data, window, skipped)
    if not accelerator.strategy.shards_params:
        local_weights = torch.cat([weight.detach().float().flatten() for weight in model.parameters()])
        rank_weights = accelerator.gather(local_weights[None])
        different = [rank for rank, row in enumerate(rank_weights) if not torch.equal(row, rank_weights[0])]
        expect(not different, f"the weights of ranks {different} are not those of rank 0")
    state = accelerator.get_state_dict(model)
    if not accelerator.is_main_process:
        return ""
    reference = alone.state_dict()
    gap = max(float((state[name].to(value) - value).abs().max()) for name, value in reference.items())
    limit = 1e-5 if accelerator.mixed_precision == "no" else 3e-2
    expect(gap <= limit, f"weights differ by {gap:.1e} from those of one process alone, more than {limit:g}")
    return f"{_STEPS} steps, weights within {max(gap, 1e-9):.0e} of those of one process alone"


def _train_prepared(
    accelerator: Accelerator, model: nn.Module, data: TensorDataset
) -> tuple[nn.Module, list[bool]]:
    """Train one epoch; return the prepared model and, per window, whether its step was skipped (fp16)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    skipped: list[bool] = []
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=_BATCH))
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(inputs).float(), targets))
            optimizer.step()
            if accelerator.sync_gradients:
                skipped.append(bool(accelerator.optimizer_step_was_skipped))
            optimizer.zero_grad()
    return model, skipped


def _train_alone(model: nn.Module, data: TensorDataset, window: int, skipped: list[bool]) -> None:
    """Take the same steps in plain torch, each over the samples of all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    device = next(model.parameters()).device
    for (inputs, targets), skip in zip(DataLoader(data, batch_size=window), skipped, strict=True):
        optimizer.zero_grad()
        F.mse_loss(model(inputs.to(device)), targets.to(device)).backward()
        if not skip:
            optimizer.step()
