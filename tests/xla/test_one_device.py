"""One device of PyTorch/XLA, the CPU client: numbers, graphs, checkpoints, random numbers and collectives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("torch_xla", exc_type=ImportError)

from accelerate.utils import DistributedType
from tests.support import parity
from tests.support.numbers import same
from tests.xla.training import compilations, epoch, prepared

pytestmark = [pytest.mark.usefixtures("xla"), pytest.mark.timeout(400)]


@pytest.mark.parametrize("window", [1, 2])
def test_losses_norms_and_weights_are_those_of_a_cpu(window: int) -> None:
    """Law 7 within 1e-5; and no graph is compiled after the third step of the optimizer."""
    training = prepared(gradient_accumulation_steps=window)
    assert training.accelerator.device.type == "xla"
    assert training.accelerator.distributed_type == DistributedType.XLA
    ours, compiled = epoch(training)
    parity.close(ours, parity.plain(window), 1e-5)
    assert compiled[3 * window - 1] > 0
    assert compiled[3 * window :] == compiled[3 * window - 1 : -1], compiled


def test_tied_weights_stay_tied() -> None:
    model = prepared().model
    assert model.head.weight is model.embed.weight
    assert model.head.weight.device.type == "xla"


def test_bf16_computes_in_bfloat16() -> None:
    training = prepared(mixed_precision="bf16")
    seen: list[torch.dtype] = []
    training.model.layers[0].up.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    ours, _ = epoch(training)
    assert set(seen) == {torch.bfloat16}
    parity.close(ours, parity.plain(1, half=True), 0.05)


def test_a_short_last_batch_is_compiled_once() -> None:
    """Its graph is another one; from the second epoch on nothing is compiled."""
    samples = parity.samples()[:20]
    training = prepared(DataLoader(samples, batch_size=8))  # type: ignore[arg-type]
    epoch(training)
    epoch(training)
    before = compilations()
    _, compiled = epoch(training)
    assert compiled == [before] * 3


def test_a_step_ends_without_a_prepared_loader_too() -> None:
    """Else one graph would hold all steps until a value is read."""
    import torch_xla

    training = prepared()
    accelerator, model, optimizer, _ = training
    for batch in parity.loader():
        moved = {name: value.to(accelerator.device) for name, value in batch.items()}
        accelerator.backward(parity.loss_of(model, moved))
        optimizer.step()
        optimizer.zero_grad()
        pending = torch_xla._XLAC._get_xla_tensors_text([model.embed.weight])
        assert "aten::" not in pending, "operations of the step wait to be run"


@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpoint_goes_on_as_if_nothing_had_happened(tmp_path: Path, in_background: bool) -> None:
    training = prepared()
    epoch(training, end=4)
    training.accelerator.save_state(str(tmp_path / "state"), async_save=in_background)
    drawn = torch.rand(3, device="xla").cpu()
    (losses, *_, expected), _ = epoch(training, begin=4)
    resumed = prepared(seed=1)
    resumed.accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(torch.rand(3, device="xla").cpu(), drawn)
    assert resumed.model.head.weight is resumed.model.embed.weight
    (again, *_, values), _ = epoch(resumed, begin=4)
    assert again == losses
    same(values, expected, 0)


def test_trees_are_gathered_reduced_and_broadcast() -> None:
    accelerator = prepared().accelerator
    tree = {"a": torch.arange(3.0, device="xla"), "b": [torch.ones((), device="xla")]}
    assert accelerator.gather(tree)["a"].tolist() == [0, 1, 2]
    assert accelerator.gather_for_metrics(tree)["b"][0].tolist() == [1]
    assert accelerator.reduce(tree, "mean")["a"].tolist() == [0, 1, 2]
    padded = accelerator.pad_across_processes(tree)
    assert padded["a"].device.type == "xla"
