"""B4: optimizers with special needs, pure 16 bits, states in 8: trained, saved, resumed; also sharded."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.core.errors import PrepareError
from tests.laws.test_7_parity import accelerator_of, whole
from tests.support.long_run import LONG_RUN
from tests.support.numbers import same
from tests.support.parity import ROWS, decoder, loader, loss_of
from tests.support.ranks import RankServer

PRELOAD = ("pytorch_optimizer", "lomo_optim", "torchao.optim", "bitsandbytes", "schedulefree")
# Weights in bfloat16, rounded stochastically, with an optimizer state in 8 bits, or with float32 copies.
IN_16_BITS = (
    *("AdamW of torchao, stochastic rounding", "AdamW8bit of torchao", "AdamW8bit of bitsandbytes"),
    *("MasterSGD", "AdamW"),
)
OFFLOADED = "CPUOffloadOptimizer of torchao"
KINDS = ("AdamWScheduleFree", "Muon", "Shampoo", "SOAP", "Lomo", "AdaLomo", OFFLOADED, *IN_16_BITS)
# These step whole matrices, or a state of a layout of their own.
NOT_SHARDED = ("AdaLomo", "Shampoo", "SOAP", "AdamW8bit of bitsandbytes")
# A replica steps reduced gradients as one process does: the others are replicated in the long run.
IN_COPIES = ("AdamWScheduleFree", "Lomo", "AdaLomo", OFFLOADED, IN_16_BITS[0], "MasterSGD")
RATE = 0.01
# How far float32 may be from one process, where that is more than rounding: Muon computes in bfloat16, and
# rounding turns the eigenvectors of SOAP.
NEAR = {"Muon": 1e-3, "SOAP": 2e-2}


class MasterSGD(torch.optim.Optimizer):
    """Momentum over float32 copies of the weights, which its state keeps; the weights are these, rounded."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Do one step with momentum 0.9."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state.update(master=p.float(), momentum=torch.zeros_like(p, dtype=torch.float32))
                    state["momentum"].mul_(0.9).add_(p.grad.float())
                    state["master"].sub_(state["momentum"], alpha=group["lr"])
                    p.copy_(state["master"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep float32: torch casts a state to the dtype of its parameter."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, saved in state_dict["state"].items():
            self.state[parameters[number]] = {name: value.clone() for name, value in saved.items()}


class TorchWithStreams:
    """Torch as an optimizer sees it that copies to the host on a stream of a GPU."""

    class Stream:
        """Does all at once."""

        def wait_stream(self, other: Any) -> None: ...

        def record_event(self) -> Any:
            return self

        def synchronize(self) -> None: ...

    cuda = SimpleNamespace(Stream=Stream, current_stream=Stream, stream=nullcontext)

    def empty_like(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        """Without pinned memory, which takes a GPU."""
        return torch.empty_like(tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def optimizer_of(kind: str, model: Any, **more: Any) -> Any:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if kind == "AdamWScheduleFree":
        import schedulefree

        return schedulefree.AdamWScheduleFree(parameters, lr=0.005, eps=1e-4)
    if kind == "Muon":
        # Under FSDP2 each iteration of each matrix takes collectives.
        return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.01, ns_steps=2)
    if kind == "MasterSGD":
        return MasterSGD(parameters, lr=0.01)
    if kind == "AdamW":
        return torch.optim.AdamW(parameters, lr=0.005)
    if kind in ("Lomo", "AdaLomo"):
        # The second puts its averages on the current CUDA device.
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
            return vars(import_module("lomo_optim"))[kind](model, lr=RATE)
    if kind == OFFLOADED:
        module = import_module("torchao.optim.cpu_offload")
        vars(module).update(torch=TorchWithStreams(), get_available_devices=lambda: ["cuda"])
        options = {"minimal_size": 32, "lr": 0.005, **more}
        return vars(module)["CPUOffloadOptimizer"](parameters, **options)
    if kind == "AdamW8bit of bitsandbytes":
        optim = vars(import_module("bitsandbytes.optim"))
        return optim["AdamW8bit"](parameters, lr=0.005, min_8bit_size=16)
    if "torchao" in kind:
        optim = vars(import_module("torchao.optim"))
        if kind.startswith("AdamW8bit"):
            return optim["AdamW8bit"](parameters, lr=0.005)
        return optim["_AdamW"](parameters, lr=0.005, bf16_stochastic_round=True)
    import pytorch_optimizer

    return getattr(pytorch_optimizer, kind)(parameters, lr=0.005)


def train(way: str, kind: str, folder: str, resumes: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Three steps, saved after two of them; or the last of them."""
    accelerator = accelerator_of(way)
    dtype = torch.bfloat16 if kind in IN_16_BITS else torch.float32
    model: Any = decoder(3 if resumes else 0, blocks=1).to(dtype)
    batches: Any = loader(ROWS // accelerator.strategy.data_shard.count)
    model, optimizer, batches = accelerator.prepare(model, optimizer_of(kind, model), batches)
    if resumes:
        accelerator.load_state(folder)
        batches = accelerator.skip_first_batches(batches, 2)
    optimizer.train()
    losses = []
    for batch, number in zip(batches, range(3 if resumes else 1, 4), strict=False):
        loss = loss_of(model, batch)
        torch.manual_seed(number)  # the rounding draws
        accelerator.backward(loss, **({"learning_rate": RATE} if accelerator.has_lomo_optimizer else {}))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.mean_loss(loss.detach()).item())
        if number == 2 and not resumes:
            optimizer.eval()
            accelerator.save_state(folder)
            optimizer.train()
    optimizer.eval()
    return losses, whole(accelerator, model)


def train_and_resume(way: str, kind: str, folder: str) -> Any:
    """The results of ``train`` for both, or what was refused."""
    try:
        return train(way, kind, folder, False), train(way, kind, folder, True)
    except PrepareError as error:
        return error.what


def kinds_of(way: str) -> tuple[str, ...]:
    return IN_COPIES if way == "copies" and not LONG_RUN else KINDS


def train_all(ways: tuple[str, ...], folder: str) -> dict[str, dict[str, Any]]:
    torch.compiler.set_stance("force_eager")  # torchao compiles its steps, which takes seconds
    results = {
        way: {kind: train_and_resume(way, kind, f"{folder}/{way}/{kind}") for kind in kinds_of(way)}
        for way in ways
    }
    torch.compiler.set_stance("default")
    return results


def compare_ranks(first: Any, other: Any) -> None:
    """All ranks have the losses of rank 0, and its weights where they have any."""
    if isinstance(first, str):
        assert other == first
        return
    for (losses, weights), (other_losses, other_weights) in zip(first, other, strict=True):
        assert other_losses == losses
        if other_weights:
            same(other_weights, weights, 0.0)


@pytest.mark.timeout(600)
def test_they_train_and_go_on(ranks: RankServer, tmp_path: Path) -> None:
    """A resumed run ends where the other did, to the bit; what cannot be right is refused."""
    launches = {1: ("one process",), 2: ("copies", "shards")}
    results: dict[str, dict[str, Any]] = {}
    for count, ways in launches.items():
        first, *others = ranks(count, train_all, ways, str(tmp_path), timeout=280)
        results |= first
        for other in others:
            for way, kinds in first.items():
                for kind, result in kinds.items():
                    compare_ranks(result, other[way][kind])
    alone = results["one process"]
    refused = {(way, kind): r for way in results for kind, r in results[way].items() if isinstance(r, str)}
    assert refused == {
        **{("copies", kind): "lomo_backward under ddp with 2 processes" for kind in ("Lomo", "AdaLomo")},
        ("shards", OFFLOADED): "CPUOffloadOptimizer does not go with fsdp",
        **{
            (
                "shards",
                kind,
            ): f"{kind.split()[0]} cannot step sharded parameters: part of the step may be done"
            for kind in NOT_SHARDED
        },
    }
    for way, kind in {(way, kind) for way, kinds in results.items() for kind in kinds} - refused.keys():
        (losses, weights), (rest, end) = results[way][kind]
        if kind != "AdaLomo":  # its averages are no state, which a save warns of
            assert rest == losses[2:], (way, kind)
            same(end, weights, 0.0)
        near = 1e-2 if kind in IN_16_BITS else NEAR.get(kind, 1e-5)
        assert losses == pytest.approx(alone[kind][0][0], abs=near), (way, kind)
        if kind not in IN_16_BITS:
            same(weights, alone[kind][0][1], near)


def offloaded_and_not(way: str, clip: float) -> list[Any]:
    """How far weights are apart that were trained on the device, and offloaded with gradients kept or not.

    For what is refused, that.
    """
    ends = []
    for kind, more in (("SGD", {}), (OFFLOADED, {}), (OFFLOADED, {"offload_gradients": True})):
        accelerator = accelerator_of(way)
        model: Any = decoder(accelerator.process_index, blocks=1)
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
        if kind == OFFLOADED:
            optimizer = optimizer_of(kind, model, optimizer_class=torch.optim.SGD, lr=0.1, **more)
        model, optimizer, batches = accelerator.prepare(model, optimizer, loader(ROWS // 2))
        for batch, _ in zip(batches, range(3), strict=False):
            with pytest.MonkeyPatch.context() as monkeypatch:
                monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
                accelerator.backward(loss_of(model, batch))
            accelerator.clip_grad_norm_(model.parameters(), clip)
            try:
                optimizer.step()
            except PrepareError as error:
                return [apart(ends[0], ends[1]), error.what]
            optimizer.zero_grad()
        ends.append(whole(accelerator, model))
    return [apart(ends[0], end) for end in ends[1:]]


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_an_optimizer_on_the_host_gets_reduced_and_clipped_gradients(ranks: RankServer) -> None:
    """Torchao's copies gradients during the backward, and weights when it is made."""
    for kept, refused in ranks(2, offloaded_and_not, "copies", 0.05):
        assert kept < 1e-7
        assert refused == "CPUOffloadOptimizer with offload_gradients=True on several processes"
    with pytest.warns(UserWarning, match=r"clip_grad_norm_\(\) does not clip: CPUOffloadOptimizer"):
        kept, gone = offloaded_and_not("one process", 0.05)
    assert kept < 1e-7 < gone
    with pytest.raises(PrepareError, match="does not go with mixed_precision='fp16'"):
        Accelerator(cpu=True, mixed_precision="fp16").prepare(
            model := decoder(), optimizer_of(OFFLOADED, model)
        )


def step_without_its_mode() -> str:
    accelerator = accelerator_of("one process")
    model: Any = decoder()
    model, optimizer = accelerator.prepare(model, optimizer_of("AdamWScheduleFree", model))
    optimizer.eval()
    accelerator.backward(loss_of(model, next(iter(loader()))))
    with pytest.raises(Exception, match="train mode") as error:
        optimizer.step()
    return str(error.value)


def test_a_step_in_evaluation_mode_is_an_error(ranks: RankServer) -> None:
    """The prepared optimizer passes the mode on to the optimizer, which refuses the step."""
    assert "was not in train mode" in ranks(1, step_without_its_mode)[0]
