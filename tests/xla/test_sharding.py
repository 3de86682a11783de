"""Four virtual devices of the CPU client, by SPMD: sharded batches, and sharded parameters under FSDP."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torch_xla", exc_type=ImportError)

from accelerate import Accelerator
from tests.support import parity
from tests.support.numbers import same

# A training of its own process each, which compiles some hundred small graphs.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module", params=["fsdp", "data"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """What a kind of training gave, and the folder with its checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    command = [sys.executable, "-m", "tests.xla.sharded_job", request.param, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {"kind": request.param, **torch.load(folder / "result.pt")}, folder


def test_losses_norms_and_weights_are_those_of_one_cpu(job: tuple[Any, Path]) -> None:
    """Law 7 within 1e-5, also with accumulation."""
    result, _ = job
    assert result["strategy"] == "xla_spmd"
    assert result["distributed_type"] == "DistributedType.XLA"
    parity.close(result["numbers"], parity.plain(1), 1e-5)
    parity.close(result["accumulated"], parity.plain(2), 1e-5)


def test_tensors_are_sharded(job: tuple[Any, Path]) -> None:
    """Batches by samples; parameters and moments along a dimension of their own, after a load as well."""
    result, _ = job
    assert result["asked_sharding"] == "{devices=[1,4]0,1,2,3}"
    for sharding in (result["sharding"], result["resumed_sharding"]):
        assert sharding["batch"] == "{devices=[4,1]0,1,2,3}"
        tensors = [*sharding["parameters"].values(), *sharding["states"].values()]
        assert len(sharding["states"]) > 20
        if result["kind"] == "fsdp":
            assert all(text.startswith("{devices=[") for text in tensors), tensors
        else:
            assert set(tensors) == {"{replicated}"}


def test_nothing_is_compiled_after_the_third_step(job: tuple[Any, Path]) -> None:
    result, _ = job
    assert len(set(result["compiled"][2:])) == 1
    assert len(set(result["accumulated_compiled"][5:])) == 1
    assert result["compiled"][-1] > 0


def test_a_checkpoint_goes_on_and_loads_on_one_cpu(job: tuple[Any, Path]) -> None:
    result, folder = job
    losses, norms, expected = parity.plain(1)
    parity.close(result["resumed"], (losses[4:], norms[4:], expected), 1e-5)
    accelerator = Accelerator(cpu=True)
    model = parity.decoder(seed=1)
    model, optimizer = accelerator.prepare(model, parity.adamw(model))
    accelerator.load_state(str(folder / "state"))
    moments = optimizer.state[model.embed.weight]
    assert moments["step"].item() == 4
    assert moments["exp_avg"].abs().sum() > 0
    batches = list(parity.loader())[4:]
    continued = []
    for batch in batches:
        loss = parity.loss_of(model, batch)
        accelerator.backward(loss)
        continued.append(loss.item())
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(torch.tensor(continued), torch.tensor(losses[4:]), rtol=0, atol=1e-5)
    same(dict(model.state_dict()), expected, 1e-5)


@pytest.mark.parametrize("begin", ["", "torch.ones(2, device='xla')"])
def test_a_runtime_that_has_started_is_refused(begin: str) -> None:
    """It ended in a segmentation fault of torch_xla 2.9."""
    script = (
        "import os\nos.environ.update(PJRT_DEVICE='CPU', ACCELERATE_TORCH_DEVICE='xla')\n"
        f"import torch, torch_xla\n{begin}\n"
        "from accelerate import Accelerator, FullyShardedDataParallelPlugin\n"
        "print(Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)).strategy.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if begin:
        assert done.returncode == 1
        assert "this program has used the device already" in done.stderr
        assert "create the Accelerator first" in done.stderr
    else:
        assert done.stdout.strip() == "xla_spmd", done.stderr
