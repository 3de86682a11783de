"""ZeRO by DeepSpeed on two processes: the numbers of one, and states that others read."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from accelerate.utils import is_deepspeed_available
from tests.support.command import launch_variables
from tests.support.ranks import RanksError, RankServer, same_on_all
from tests.support.sharded_models import adamw, batches, loss_of, share, tiny

# What the rank server imports once for this module.
PRELOAD = ("deepspeed.runtime.zero.muon.muon_optimizer", "transformers.integrations.deepspeed")

pytestmark = [
    pytest.mark.skipif(not is_deepspeed_available(), reason="the package deepspeed is not installed"),
    pytest.mark.timeout(300),
]
STEPS = 8
Numbers = dict[str, Any]


class Rows(list[int], torch.utils.data.Dataset[int]):
    """Numbers as a dataset."""


def options(stage: int, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0, **more}
    return {"zero_optimization": zero, "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}


OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
BOTH = {**OFFLOAD, "offload_param": {"device": "cpu", "pin_memory": False}}
ASKED: dict[str, dict[str, Any]] = {
    "0": options(0),
    "1": options(1),
    "2": options(2),
    "3": options(3),
    "2 offload": options(2, **OFFLOAD),
    "3 offload": options(3, **BOTH),
}


@cache
def alone(window: int, clip: float = 0.5, steps: int = STEPS) -> Numbers:
    """The plain loop in one process, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train_plainly(window, clip, steps)
    finally:
        torch.set_num_threads(threads)


def train_plainly(window: int, clip: float, steps: int) -> Numbers:
    model = tiny()
    optimizer = adamw(model)
    losses, norms = [], []
    for step, words in enumerate(batches(steps), 1):
        loss = loss_of(model, words)
        (loss / window).backward()
        losses.append(loss.item())
        if step % window == 0:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            optimizer.zero_grad()
    return {
        "losses": losses,
        "norms": norms,
        "weights": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }


def engine(config: dict[str, Any], window: int = 1, seed: int = 0, **more: Any) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator, DeepSpeedPlugin

    accelerator = Accelerator(
        cpu=True,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        gradient_accumulation_steps=window,
        **more,
    )
    model = tiny(seed)
    return accelerator, *accelerator.prepare(model, adamw(model))


def loop(accelerator: Any, model: Any, optimizer: Any, clip: float = 0.5, steps: int = STEPS) -> Numbers:
    losses, norms = [], []
    for words in batches(steps):
        mine = share(words, accelerator.process_index, accelerator.num_processes)
        with accelerator.accumulate(model):
            loss = loss_of(model, mine)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {"losses": losses, "norms": norms}


def train_all(names: list[str], window: int, steps: int) -> dict[str, Numbers]:
    """All of ``names`` in one process, one after the other: an import of DeepSpeed costs seconds."""
    found: dict[str, Numbers] = {}
    for name in names:
        accelerator, model, optimizer = engine(ASKED[name], window)
        numbers = loop(accelerator, model, optimizer, steps=steps)
        weights = accelerator.get_state_dict(model)
        kept = accelerator.strategy.optimizer_state(optimizer.optimizer, [model])
        if accelerator.is_main_process:
            numbers |= {"weights": weights, "optimizer": kept}
        found[name] = numbers
        assert str(accelerator.distributed_type.value) == "DEEPSPEED"
    return found


def close(ours: Numbers, plain: Numbers, within: float = 1e-5) -> None:
    torch.testing.assert_close(
        torch.tensor(ours["losses"]), torch.tensor(plain["losses"]), rtol=0, atol=within
    )
    torch.testing.assert_close(
        torch.tensor(ours["norms"]), torch.tensor(plain["norms"]), rtol=1e-4, atol=within
    )
    assert ours["weights"].keys() == plain["weights"].keys()
    for name, value in plain["weights"].items():
        torch.testing.assert_close(ours["weights"][name], value, rtol=0, atol=within, msg=name)


@pytest.mark.parametrize(("window", "steps"), [(1, STEPS // 2), (4, STEPS)])
def test_every_stage_trains_like_one_process(ranks: RankServer, window: int, steps: int) -> None:
    """Losses, norms, weights and the optimizer's state; the norm is known before the step, which clips."""
    plain = alone(window, steps=steps)
    first, second = ranks(2, train_all, list(ASKED), window, steps, timeout=200)
    for name in ASKED:
        close(first[name], plain)
        assert first[name]["losses"] == second[name]["losses"]
        assert first[name]["norms"] == second[name]["norms"]
        assert "weights" not in second[name]
        mine, theirs = first[name]["optimizer"], plain["optimizer"]
        assert [g["params"] for g in mine["param_groups"]] == [g["params"] for g in theirs["param_groups"]]
        assert mine["state"].keys() == theirs["state"].keys()
        for number, kept in theirs["state"].items():
            for key, value in kept.items():
                torch.testing.assert_close(mine["state"][number][key], value, rtol=0, atol=1e-5)


def same_losses(ours: Numbers, window: int = 1, within: float = 1e-5) -> None:
    """The losses are the first ones of the plain loop."""
    plain = alone(window)["losses"][: len(ours["losses"])]
    torch.testing.assert_close(torch.tensor(ours["losses"]), torch.tensor(plain), rtol=0, atol=within)


# --- states


def saves(folder: str) -> None:
    """Trains three steps, saves in DeepSpeed's form and whole, trains on, leaves the weights of the end."""
    for stage in ("2", "3"):
        accelerator, model, optimizer = engine(ASKED[stage])
        loop(accelerator, model, optimizer, steps=3)
        accelerator.save_state(f"{folder}/own{stage}")
        accelerator.save_state(f"{folder}/whole{stage}", sharded=False)
        numbers = loop(accelerator, model, optimizer, steps=3)
        # Back in the same engine, and the same steps again.
        accelerator.load_state(f"{folder}/own{stage}")
        assert loop(accelerator, model, optimizer, steps=3) == numbers
        weights = accelerator.get_state_dict(model)
        accelerator.save_model(model, f"{folder}/export{stage}")
        if accelerator.is_main_process:  # alone: no rank holds shards of these
            accelerator.save_model(model if stage == "2" else tiny(), f"{folder}/alone{stage}")
        if accelerator.is_main_process:
            torch.save((numbers, weights), f"{folder}/end{stage}.pt")
        accelerator.wait_for_everyone()


def saves_on_the_main_process(folder: str) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin

    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    linear: Any = nn.Linear(2, 1)  # without buffers, which are exchanged in another group
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    rows: Any = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=1)  # type: ignore[arg-type]
    model, optimizer, rows = accelerator.prepare(linear, optimizer, rows)
    for row in rows:
        accelerator.backward(model(row).sum())
        optimizer.step()
        if accelerator.is_main_process:
            accelerator.save_state(folder)


def test_every_rank_must_call_save_state(ranks: RankServer, tmp_path: Path) -> None:
    """The others wait in a group of DeepSpeed's own: the error comes at once, not at the timeout."""
    with pytest.raises(RanksError) as info:
        ranks(2, saves_on_the_main_process, str(tmp_path / "c"))
    text = "\n".join(outcome.message for outcome in info.value.causes())
    assert "rank 0 is in save_state" in text
    assert "if accelerator.is_main_process" in text
    assert list(tmp_path.iterdir()) == []


def resumes(folder: str) -> None:
    """Fresh engines over other weights: each form, and the whole form in another stage."""
    for stage, source in (("2", "own2"), ("3", "own3"), ("3", "whole2"), ("2", "whole3"), ("0", "whole3")):
        numbers, weights = torch.load(f"{folder}/end{source[-1]}.pt")
        accelerator, model, optimizer = engine(ASKED[stage], seed=5)
        offered: list[int] = []
        accelerator.register_load_state_pre_hook(lambda models, _, seen=offered: seen.append(len(models)))
        accelerator.load_state(f"{folder}/{source}")
        assert offered == [0]  # as in 1.x: models that are sharded are not the hooks' to load
        ours = loop(accelerator, model, optimizer, steps=3)
        torch.testing.assert_close(
            torch.tensor(ours["losses"]), torch.tensor(numbers["losses"]), rtol=0, atol=1e-5
        )
        state = accelerator.get_state_dict(model)
        for name in weights if accelerator.is_main_process else ():
            torch.testing.assert_close(state[name], weights[name], rtol=0, atol=1e-5)


def ordinary(folder: str, kind: str) -> Numbers:
    """The whole form under another strategy."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    more: dict[str, Any] = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if kind == "fsdp" else {}
    accelerator = Accelerator(cpu=True, **more)
    model = tiny(5)
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.load_state(f"{folder}/whole3")
    return loop(accelerator, model, optimizer, steps=3)


def test_states_come_back_in_any_stage_and_under_other_strategies(ranks: RankServer, tmp_path: Path) -> None:
    folder = str(tmp_path)
    ranks(2, saves, folder, timeout=200)
    own = tmp_path / "own3"
    assert (own / "pytorch_model").is_dir()
    assert (own / "latest").read_text() == "pytorch_model"
    assert not (own / "model.safetensors").exists()
    for name in ("whole3", "alone2", "alone3"):
        assert (tmp_path / name / "model.safetensors").exists()
    ranks(2, resumes, folder, timeout=200)
    numbers, weights = torch.load(tmp_path / "end3.pt")
    for n, kind in ((1, "single"), (2, "fsdp")):
        ours = same_on_all(ranks(n, ordinary, folder, kind))
        torch.testing.assert_close(
            torch.tensor(ours["losses"]), torch.tensor(numbers["losses"]), rtol=0, atol=1e-5
        )
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "export3" / "model.safetensors")
    torch.testing.assert_close(exported["embed.weight"], weights["embed.weight"], rtol=0, atol=1e-6)


# --- ways of use, in one process each: an import of DeepSpeed costs seconds


def bf16() -> None:
    """Weights in 16 bits, the optimizer in 32; outputs in 16 bits where nothing else went in, as in 1.x."""
    for stage in ("0", "1", "3", "2"):
        accelerator, model, optimizer = engine(ASKED[stage], mixed_precision="bf16")
        same_losses(loop(accelerator, model, optimizer, steps=4), within=2e-2)
    words = next(batches(1))
    assert model(words).dtype is torch.bfloat16
    assert model.module.embed.weight.dtype is torch.bfloat16
    flat = optimizer.param_groups[0]["params"][0]
    assert flat.dtype is torch.float32
    assert optimizer.state[flat]["exp_avg"].dtype is torch.float32
    exact = accelerator.strategy.master_state(model)
    if accelerator.is_main_process:
        assert exact["embed.weight"].dtype is torch.float32
        assert accelerator.strategy.model_state(model)["embed.weight"].dtype is torch.bfloat16
    accelerator.get_state_dict(model)
    assert accelerator.mixed_precision == "bf16"


class Float32Norm(nn.LayerNorm):
    """Computes in float32 whatever the dtype of its weights, as models of diffusion have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x.float(), self.normalized_shape, self.weight.float()).type_as(x)


class StandardizedConv(nn.Conv1d):
    """Begins a model with a convolution of its own, as models of vision have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv1d(x, self.weight - self.weight.mean(), self.bias)


class Float32Inputs(nn.Module):
    """Gives float32, with which it computes before, to each kind of layer that torch would let raise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.own = nn.Linear(4, 4), nn.LayerNorm(4), Float32Norm(4, bias=False)
        self.conv, self.groups, self.prelu = nn.Conv1d(3, 3, 1), nn.GroupNorm(1, 3), nn.PReLU()
        self.first, self.lstm = StandardizedConv(3, 3, 1), nn.LSTM(4, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, batch: dict[str, torch.Tensor], packs: bool = False) -> dict[str, torch.Tensor]:
        """{"x": (rows, 3, 4)} -> what each layer makes of it."""
        x = batch["x"]
        spectrum = torch.fft.rfft(x.float()).abs() if packs else torch.fft.rfft(x).abs()
        sequences: Any = nn.utils.rnn.pack_padded_sequence(x, [3] * len(x), batch_first=True) if packs else x
        state = x.new_zeros(1, len(x), 4)
        layers = (self.linear, self.norm, self.first, self.conv, self.groups, self.prelu)
        outputs = {type(layer).__name__: layer(x) for layer in layers}
        recurrent = self.lstm(sequences, (state, state))[0]
        outputs["LSTM"] = recurrent.data if packs else recurrent
        outputs["attention"] = self.attention(x, key=x, value=x, attn_mask=x.new_zeros(3, 3))[0]
        return {**outputs, "own": self.own(x), "spectrum": spectrum}


def float32_inputs() -> None:
    """A model gets float32 as it is; its layers cast what torch would refuse; outputs are float32 then."""
    from accelerate import Accelerator, DeepSpeedPlugin

    for stage in ("2", "3"):
        plugin = DeepSpeedPlugin(hf_ds_config=ASKED[stage])
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, mixed_precision="bf16")
        module, x = Float32Inputs(), torch.randn(4, 3, 4)
        with torch.no_grad():
            plain = module({"x": x})
        model, optimizer = accelerator.prepare(cast("Any", module), adamw(module))
        for packs in (False, True):
            outputs = model({"x": x}, packs)
            assert {value.dtype for value in outputs.values()} == {torch.float32}
            for name, value in plain.items():
                exact = name in ("own", "spectrum")
                if not (packs and name == "LSTM"):
                    torch.testing.assert_close(outputs[name], value, rtol=0, atol=1e-6 if exact else 0.1)
        accelerator.backward(sum(value.sum() for value in outputs.values()))
        optimizer.step()
        assert model({"x": x.bfloat16()}, True)["Linear"].dtype is torch.bfloat16
    linear = nn.Linear(2, 1)
    model, _ = accelerator.prepare(cast("Any", linear), adamw(linear))
    with torch.autocast("cpu", torch.bfloat16):  # the program's own casts, as in 1.x
        assert model(torch.ones(1, 2)).dtype is torch.bfloat16
    linear = nn.Linear(2, 1)
    model, _ = accelerator.prepare(cast("Any", linear), adamw(linear))
    for _ in range(8):
        model(torch.ones(1, 2).bfloat16())
    with pytest.raises(RuntimeError, match="same dtype"):  # and no hook costs time any more
        model(torch.ones(1, 2))


def windows() -> None:
    """A short last window is divided by what it holds."""
    accelerator, model, optimizer = engine(ASKED["2"])
    reference = tiny()
    other = adamw(reference)
    rows = list(batches(5))
    mine = [share(words, accelerator.process_index, 2) for words in rows]
    norm = torch.zeros(())
    for window in accelerator.windows(mine, 3):
        for words in window:
            accelerator.backward(loss_of(model, words))
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    for held in (rows[:3], rows[3:]):
        sum(loss_of(reference, words) for words in held).div(len(held)).backward()  # type: ignore[union-attr]
        plain = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        other.step()
        other.zero_grad()
    torch.testing.assert_close(norm, plain, rtol=1e-4, atol=1e-6)
    for (name, ours), theirs in zip(model.module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5, msg=name)


def drop_gradients() -> None:
    """Gradients that zero_grad drops leave no trace, and a step without gradients does nothing."""
    for stage in ("0", "1", "2", "3", "2 offload"):
        accelerator, model, optimizer = engine(ASKED[stage], window=2)
        words = share(next(batches(1)), accelerator.process_index, 2)
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, words) * 100)
        accelerator.gradient_state.sync_gradients = True
        optimizer.zero_grad()
        accelerator.gradient_state.step = 0
        same_losses(loop(accelerator, model, optimizer, steps=4), window=2)
        optimizer.step()


def train_without_step(window: int, ends: str, kind: str = "2") -> tuple[Numbers, list[str]]:
    """Train by a loop for Accelerate 1.x, where DeepSpeed steps in ``backward``; return what is said too.

    Args:
        window: micro-batches of a step.
        ends: what is called in a micro-batch: ``accumulate``, ``evaluate``, ``schedule``, ``zero_grad``.
        kind: the configuration.
    """
    accelerator, model, optimizer = engine(ASKED[kind], window)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda _: 1.0)
    schedule = accelerator.prepare(schedule)
    losses = []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for words in batches(4):
            mine = share(words, accelerator.process_index, accelerator.num_processes)
            with accelerator.accumulate(model) if "accumulate" in ends else nullcontext():
                loss = loss_of(model, mine)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                if "schedule" in ends:
                    schedule.step()
                if "zero_grad" in ends:
                    optimizer.zero_grad()
            if "evaluate" in ends:
                with torch.inference_mode(kind == "2"):  # stage 3 keeps what it has all-gathered in it
                    loss_of(model, mine)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {"losses": losses}, [str(w.message) for w in heard if "step() was never called" in str(w.message)]


def omitted_steps() -> None:
    """Where a loop shows that no step will come, it is taken, and that is said once."""
    loops = (
        *((2, "accumulate, schedule"), (1, "accumulate, zero_grad"), (2, "accumulate")),
        *((1, "schedule, zero_grad"), (2, "schedule, zero_grad"), (1, "evaluate"), (2, "")),
    )
    for window, ends in loops:
        numbers, said = train_without_step(window, ends)
        same_losses(numbers, window)
        assert len(said) == 1, (window, ends, said)
    same_losses(train_without_step(1, "evaluate", "3")[0])


def windows_marked_by_hand() -> None:
    """``sync_gradients`` that a program assigns ends a window; after the first, ``backward`` takes the steps.

    LlamaFactory trains so, and reads the norm of DeepSpeed's engine after each window.
    """
    accelerator, model, _ = engine(ASKED["2"] | {"gradient_clipping": 0.5}, 2)
    losses, norms = [], []

    def train() -> None:
        for number, words in enumerate(batches(4), 1):
            loss = loss_of(model, share(words, accelerator.process_index, accelerator.num_processes))
            accelerator.sync_gradients = number % 2 == 0
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            norms.append(accelerator.deepspeed_engine_wrapped.get_global_grad_norm())

    with pytest.warns(UserWarning, match="never called"):
        train()
    plain = alone(2, steps=4)
    same_losses({"losses": losses}, 2)
    assert norms[-1] == pytest.approx(plain["norms"][-1], rel=1e-4)
    weights = accelerator.get_state_dict(model)
    for name, value in plain["weights"].items() if accelerator.is_main_process else ():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5, msg=name)


def omitted_step_before_a_save(folder: str) -> None:
    """The checkpoint has the step that no call has taken yet; weights that are only read have not."""
    accelerator, model, _ = engine(ASKED["2"])
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, share(next(batches(1)), accelerator.process_index, 2)))
    with pytest.warns(UserWarning, match="never called: the weights are those before it"):
        accelerator.get_state_dict(model)
    assert torch.equal(model.module.embed.weight, tiny().embed.weight)
    accelerator.save_state(f"{folder}/omitted")
    assert not torch.equal(model.module.embed.weight, tiny().embed.weight)
    assert not list(Path(folder, "omitted").glob("open_gradients*"))
    # A program may save by DeepSpeed itself, or by one process; a frozen reference runs in between.
    mine = share(next(batches(1)), accelerator.process_index, 2)
    for name in "save_checkpoint", "save_16bit_model", "":
        accelerator, model, _ = engine(ASKED["2"])
        before = model.module.embed.weight.clone()
        accelerator.backward(loss_of(model, mine))
        model.module.layers.requires_grad_(False)
        with torch.no_grad():
            loss_of(model, mine)
        model.module.layers.requires_grad_(True)
        assert torch.equal(model.module.embed.weight, before)
        getattr(model, name)(f"{folder}/by_engine") if name else accelerator.wait_for_everyone()
        assert not torch.equal(model.module.embed.weight, before)
    accelerator.backward(loss_of(model, mine))
    model.load_checkpoint(f"{folder}/by_engine")
    loaded = model.module.embed.weight.clone()
    loss_of(model, mine)
    assert torch.equal(model.module.embed.weight, loaded)
    module, hooks = model.module, {*model.module._forward_pre_hooks}
    accelerator.backward(loss_of(model, mine))
    accelerator.free_memory()
    assert module._forward_pre_hooks.keys() <= hooks


def accumulate_by_hand() -> None:
    """From its first step on, the steps of a program are its own, of as many backwards as it likes."""
    accelerator, model, optimizer = engine(ASKED["2"])
    with pytest.warns(UserWarning, match="optimizer.step.. before any"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        losses = []
        for number, words in enumerate(batches(4), 1):
            loss = loss_of(model, share(words, accelerator.process_index, accelerator.num_processes))
            accelerator.backward(loss / 2)
            if number % 2 == 0:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        same_losses({"losses": losses}, 2)


def zero_grad_first() -> None:
    """At the beginning of a micro-batch it leaves the gradients of the others alone, as under 1.x.

    Also of the second engine, when the first one has stepped.
    """
    accelerator, *first = engine(ASKED["2"], 2)
    raw = tiny()
    pairs = [first, accelerator.prepare(cast("Any", raw), adamw(raw))]
    losses: list[list[float]] = [[], []]
    for words in batches(4):
        mine = share(words, accelerator.process_index, accelerator.num_processes)
        with accelerator.accumulate(*(model for model, _ in pairs)):
            for (model, optimizer), so_far in zip(pairs, losses, strict=True):
                optimizer.zero_grad()
                loss = loss_of(model, mine)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                so_far.append(accelerator.reduce(loss.detach(), "mean").item())
    for so_far in losses:
        same_losses({"losses": so_far}, 2)


def step_without_backward() -> None:
    """The gradients of a plain ``loss.backward()`` are not DeepSpeed's, and the step says that.

    It adds nothing for a program that drives the engine by itself.
    """
    _, model, optimizer = engine(ASKED["2"])
    loss_of(model, next(batches(1))).backward()
    with pytest.warns(UserWarning, match=r"before any accelerator.backward\(loss\)"):
        optimizer.step()
    accelerator, model, optimizer = engine({**ASKED["2"], "gradient_clipping": 0.5})
    inner, losses = accelerator.deepspeed_engine_wrapped.engine, []
    for words in batches(3):
        loss = loss_of(model, share(words, accelerator.process_index, 2))
        inner.backward(loss)
        inner.step()
        with pytest.warns(match=r"engine.step\(\) alone") if not losses else nullcontext():
            optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    same_losses({"losses": losses})


def two_models() -> None:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.core.errors import PrepareError
    from accelerate.state import AcceleratorState

    plugins = {"one": DeepSpeedPlugin(zero_stage=2), "two": DeepSpeedPlugin(zero_stage=3)}
    accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins)
    state = AcceleratorState()
    assert state.deepspeed_plugin is plugins["one"] is accelerator.deepspeed_plugin
    assert str(state).startswith("Distributed environment: DistributedType.DEEPSPEED  Backend: gloo\n")
    assert str(state).endswith(f"\nds_config: {plugins['one'].deepspeed_config}\n")
    first, second = tiny(0), tiny(1)
    first, optimizer = accelerator.prepare(cast("Any", first), adamw(first))
    state.select_deepspeed_plugin("two")
    assert state.deepspeed_plugin is state.get_deepspeed_plugin("two")
    assert not plugins["one"].selected
    second, other = accelerator.prepare(cast("Any", second), adamw(second))
    assert (first.zero_optimization_stage(), second.zero_optimization_stage()) == (2, 3)
    reference = tiny(1)
    # Below stage 3 a copy, on any rank: not a view of the flat buffer, which trains on.
    copies = accelerator.get_state_dict(first)
    kept = {name: value.clone() for name, value in copies.items()}
    if accelerator.is_main_process:
        copy = accelerator.get_state_dict(first.module.embed)["weight"]
        assert copy.untyped_storage().nbytes() == copy.nbytes
    plain = adamw(reference)
    mine = torch.zeros(0)
    for words in batches(3):
        mine = share(words, accelerator.process_index, 2)
        accelerator.backward(loss_of(first, mine))
        optimizer.step()
        accelerator.backward(loss_of(second, mine))
        other.step()
        loss_of(reference, words).backward()
        plain.step()
        plain.zero_grad()
    assert all(torch.equal(value, kept[name]) for name, value in copies.items())
    weights, part = accelerator.get_state_dict(second), accelerator.get_state_dict(second.module.embed)
    if accelerator.is_main_process:
        assert torch.equal(part["weight"], weights["embed.weight"])
        torch.testing.assert_close(
            weights["embed.weight"], reference.embed.weight.detach(), rtol=0, atol=1e-5
        )
    both = loss_of(first, mine) + loss_of(second, mine)
    with pytest.raises(PrepareError, match="comes from 2 of 2 prepared models"):
        accelerator.backward(both)
    with pytest.raises(PrepareError, match="once for each model"):
        accelerator.clip_grad_norm_([*first.module.parameters(), *second.module.parameters()], 1.0)


def two_accelerators() -> None:
    """The second has the plugins of the first, as in the public guide to several models."""
    from accelerate import Accelerator, DeepSpeedPlugin

    plugins = {"one": DeepSpeedPlugin(zero_stage=2), "two": DeepSpeedPlugin(zero_stage=3)}
    accelerators = Accelerator(cpu=True, deepspeed_plugins=plugins), Accelerator()
    for accelerator, name in zip(accelerators, plugins, strict=True):
        accelerator.state.select_deepspeed_plugin(name)
        raw = tiny()
        model, optimizer = accelerator.prepare(cast("Any", raw), adamw(raw))
        assert model.zero_optimization_stage() == plugins[name].zero_stage
        same_losses(loop(accelerator, model, optimizer, steps=3))


def reference_model() -> None:
    """Trainers of preferences prepare a model without an optimizer beside the trained one."""
    from accelerate import Accelerator, DeepSpeedPlugin

    accelerator: Any = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
    module = tiny(0)
    loader = torch.utils.data.DataLoader(Rows(range(8)), batch_size=4)
    model, optimizer, _ = accelerator.prepare(module, adamw(module), loader)
    (reference,) = accelerator._prepare_deepspeed(tiny(1))
    reference.eval()
    for words in batches(2):
        mine = share(words, accelerator.process_index, 2)
        with torch.no_grad():
            torch.testing.assert_close(loss_of(reference, mine), loss_of(tiny(1), mine))
        accelerator.backward(loss_of(model, mine))
        optimizer.step()


def engine_of_the_accelerator() -> None:
    from accelerate.utils import DeepSpeedEngineWrapper

    accelerator, model, optimizer = engine(ASKED["2"])
    wrapped = accelerator.deepspeed_engine_wrapped
    assert isinstance(wrapped, DeepSpeedEngineWrapper)
    assert wrapped.engine is model
    assert accelerator.deepspeed_config["zero_optimization"]["stage"] == 2
    for words in batches(2):
        accelerator.backward(loss_of(model, words))
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5).item()
        assert wrapped.get_global_grad_norm() == norm > 0  # Trainers ask for it before the step
        optimizer.step()
        assert wrapped.get_global_grad_norm() == pytest.approx(norm)
    accelerator.free_memory()
    assert accelerator.deepspeed_engine_wrapped is None
    assert not hasattr(accelerator, "deepspeed_config")


def engine_wrappers_of_a_program() -> None:
    """Its ``backward`` is called, and may step; None makes the next ``prepare`` build a new engine."""
    from accelerate.core.errors import PrepareError
    from accelerate.utils import DeepSpeedEngineWrapper

    class CountingWrapper(DeepSpeedEngineWrapper):
        calls = 0

        def backward(self, loss: Any, sync_gradients: bool = True, **kwargs: Any) -> None:
            self.calls += 1
            super().backward(loss, sync_gradients, **kwargs)

    endless = float("inf")
    accelerator, model, optimizer = engine(ASKED["2"], window=2)
    wrapper = accelerator.deepspeed_engine_wrapped = CountingWrapper(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*optimizer.step.. before any")
        losses = loop(accelerator, model, optimizer, clip=endless)["losses"]
    assert losses == pytest.approx(alone(2, endless)["losses"], abs=1e-5)
    assert accelerator.deepspeed_engine_wrapped is wrapper
    assert wrapper.calls == STEPS
    with pytest.raises(PrepareError, match="num_items"):
        accelerator.backward(loss_of(model, next(batches(1))), num_items=1)
    # Trainers that choose other layers in the middle of a run, as LMFlow's does for LISA.
    model.destroy()
    accelerator.deepspeed_engine_wrapped = None
    assert accelerator.deepspeed_engine_wrapped is None
    with pytest.raises(PrepareError, match="DeepSpeedEngine was released"):
        accelerator.deepspeed_engine_wrapped = wrapper
    module = model.module
    module.load_state_dict(tiny().state_dict())
    _, optimizer = accelerator.prepare(module, adamw(module))
    same_losses(loop(accelerator, model, optimizer, steps=4), window=2)
    accelerator.deepspeed_engine_wrapped = own = DeepSpeedEngineWrapper(model)
    accelerator.backward(loss_of(model, next(batches(1))))
    assert accelerator.deepspeed_engine_wrapped is own
    assert accelerator.clip_grad_norm_(model.parameters(), endless) > 0


def apart() -> None:
    """A model alone, then its optimizer; both stay the objects that the script has."""
    for stage in ("2", "3"):
        from accelerate import Accelerator, DeepSpeedPlugin

        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ASKED[stage]))
        raw = tiny()
        # Made before: afterwards the shapes of stage 3 say nothing about which parameters are matrices.
        plain = adamw(raw)
        model = accelerator.prepare(raw)
        assert accelerator.unwrap_model(model) is model.module
        with torch.no_grad():
            before = loss_of(model, next(batches(1)))
        torch.testing.assert_close(before, loss_of(tiny(), next(batches(1))))
        optimizer = accelerator.prepare(plain)
        same_losses(loop(accelerator, model, optimizer, steps=3))


def prepare_again() -> None:
    """After free_memory the same module goes into another engine, of another stage."""
    from accelerate.utils import DeepSpeedOptimizerWrapper, extract_model_from_parallel

    accelerator, model, optimizer = engine(ASKED["2"])
    assert isinstance(optimizer, DeepSpeedOptimizerWrapper)
    loop(accelerator, model, optimizer, steps=1)
    module = accelerator.unwrap_model(model)
    assert extract_model_from_parallel(model) is module

    def start_anew() -> None:
        accelerator.free_memory()
        assert list(accelerator.strategy.engines) == []
        with torch.no_grad():
            for parameter, fresh in zip(module.parameters(), tiny().parameters(), strict=True):
                parameter.copy_(fresh)

    start_anew()
    model, optimizer = accelerator.prepare(module, adamw(module))
    same_losses(loop(accelerator, model, optimizer, steps=3))
    # transformers' Trainer keeps the engine, and prepares another optimizer alone.
    start_anew()
    optimizer = accelerator.prepare(adamw(module))
    assert accelerator.prepare(module) is model
    same_losses(loop(accelerator, model, optimizer, steps=3))


def stand_ins() -> None:
    """DeepSpeed makes the optimizer and the schedule, by values of the stand-ins."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DeepSpeedSchedulerWrapper, DummyOptim, DummyScheduler

    config = {
        **ASKED["2"],
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": "auto"}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
    }
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = tiny()
    optimizer = DummyOptim(model.parameters(), lr=0.01, weight_decay=0.1)
    schedule = DummyScheduler(optimizer, warmup_num_steps=2)
    loader = torch.utils.data.DataLoader(Rows(range(8)), batch_size=4)
    # A teacher has no optimizer; the configuration of those that train stays as it is, and may be changed.
    accelerator.prepare(tiny(1))
    assert {"optimizer", "scheduler"} < plugin.deepspeed_config.keys()
    plugin.deepspeed_config["wall_clock_breakdown"] = False
    prepared: list[Any] = [*accelerator.prepare(model, optimizer, schedule, loader)]
    model, optimizer, schedule, loader = prepared
    assert (model.zero_optimization_stage(), plugin.deepspeed_config["wall_clock_breakdown"]) == (2, False)
    assert isinstance(schedule, DeepSpeedSchedulerWrapper)
    assert plugin.deepspeed_config["train_micro_batch_size_per_gpu"] == 4
    assert plugin.deepspeed_config["optimizer"]["params"]["lr"] == 0.01
    assert type(optimizer.optimizer) is torch.optim.AdamW
    rates = []
    for words in batches(3):
        accelerator.backward(loss_of(model, share(words, accelerator.process_index, 2)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] < rates[-1] == 0.01


def configured_optimizer() -> None:
    """DeepSpeed makes the optimizer of its configuration for a model without one; a reference gets none."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim

    params = {"lr": 0.01, "weight_decay": 0.1, "betas": [0.8, 0.9]}
    config = {**ASKED["2"], "optimizer": {"type": "AdamW", "params": params}}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    frozen, evaluated = tiny().requires_grad_(False), accelerator.prepare_model(tiny(), evaluation_mode=True)
    assert accelerator.prepare(frozen).optimizer is None  # type: ignore[attr-defined]
    assert not hasattr(evaluated, "optimizer")
    unknown = object()
    assert "engine" in str(accelerator.plan(cast("Any", tiny()), unknown, None))
    model, same, nothing = accelerator.prepare(cast("Any", tiny()), unknown, None)
    assert (same is unknown, nothing, len(accelerator._optimizers)) == (True, None, 1)
    assert accelerator.prepare(cast("Any", tiny(1))).optimizer is None
    reference = tiny()
    plain = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], **params)
    for words in batches(3):
        accelerator.backward(loss_of(model, share(words, accelerator.process_index, 2)))
        loss_of(reference, words).backward()
        plain.step()
        plain.zero_grad()
    accelerator.wait_for_everyone()  # with the last step, which this program leaves out
    for ours, theirs in zip(model.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    # Beside a trained one a model has none.
    accelerator, raw = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config)), tiny()
    model, other, _ = accelerator.prepare(
        cast("Any", raw), cast("Any", tiny(1)), DummyOptim(raw.parameters(), lr=0.01, weight_decay=0.1)
    )
    assert (model.optimizer is None, other.optimizer) == (False, None)


def total_of_a_schedule() -> None:
    """``total_num_steps`` counts as for a schedule of torch, which two processes advance twice in a step."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DataLoaderConfiguration, DummyScheduler, GradientAccumulationPlugin

    decay = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}
    options: list[tuple[dict[str, Any], int]] = [
        ({}, 6),
        ({"dataloader_config": DataLoaderConfiguration(split_batches=True)}, 11),
        ({"gradient_accumulation_plugin": GradientAccumulationPlugin(step_scheduler_once=True)}, 11),
    ]
    for option, total in options:
        plugin = DeepSpeedPlugin(hf_ds_config={**ASKED["2"], "scheduler": decay})
        accelerator, model = Accelerator(cpu=True, deepspeed_plugin=plugin, **option), tiny()
        optimizer = adamw(model)
        dummy = DummyScheduler(optimizer, total_num_steps=11, warmup_num_steps=3)
        accelerator.prepare(model, optimizer, dummy)
        params = plugin.deepspeed_config["scheduler"]["params"]
        assert params == {"warmup_num_steps": 3, "total_num_steps": total}


def gathered_adapters() -> None:
    """``state_dict()`` gives what trains, all-gathered by the program; the frozen base stays partitioned."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    from accelerate import Accelerator, DeepSpeedPlugin

    config = {**ASKED["3"], "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    adapter = nn.Linear(8, 4)
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), adapter)
    engine, _ = accelerator.prepare(model, torch.optim.SGD(adapter.parameters(), lr=0.1))
    gathered = GatheredParameters(list(adapter.parameters()))
    with gathered, pytest.warns(UserWarning, match="2 frozen weights are partitioned"):
        assert accelerator.unwrap_model(engine).state_dict()["1.weight"].shape == (4, 8)


def test_the_adapters_that_a_program_gathers_can_be_saved(ranks: RankServer) -> None:
    ranks(2, gathered_adapters)


def refused_case() -> None:
    """Mistakes that are said on every process, before anything is changed."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.core.errors import PrepareError, SettingError
    from accelerate.utils import DummyOptim

    accelerator, model, optimizer = engine(ASKED["3"])
    with pytest.raises(PrepareError, match=r"accelerator.get_state_dict\(model\)"):
        model.state_dict()
    with pytest.raises(PrepareError, match=r"accelerator.get_state_dict\(model\)"):
        model.module.state_dict()
    with pytest.raises(PrepareError, match="clip_grad_norm_"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    accelerator.backward(loss_of(model, next(batches(1))))
    with pytest.warns(UserWarning, match=r"given 2 of \d+ trained parameters"):
        accelerator.clip_grad_norm_(model.module.layers[0].up.parameters(), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.zero_grad()
    with accelerator.no_sync(model):
        accelerator.backward(loss_of(model, next(batches(1))))
    with pytest.raises(PrepareError, match="not complete"):
        optimizer.step()
    optimizer.zero_grad()
    twice = {**ASKED["2"], "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    with pytest.raises(SettingError, match="AdamW in prepare, and AdamW"):
        engine(twice)
    plain = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ASKED["2"]))
    loose = tiny()
    with pytest.raises(SettingError, match="no optimizer"):
        plain.prepare(loose, DummyOptim(loose.parameters()))
    with pytest.raises(PrepareError, match="together"):
        plain.prepare(adamw(loose))
    other = tiny()
    with pytest.raises(PrepareError, match="one AdamW has parameters of two models"):
        plain.prepare(loose, other, torch.optim.AdamW([*loose.parameters(), *other.parameters()]))
    batch = {**ASKED["2"], "train_micro_batch_size_per_gpu": 3}
    loader = torch.utils.data.DataLoader(Rows(range(8)), batch_size=4)
    given = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=batch))
    with pytest.warns(UserWarning, match=r"train_micro_batch_size_per_gpu: 3.*batches of 4"):
        wrapped, _, taken = given.prepare(cast("Any", loose), adamw(loose), loader)
    assert wrapped.train_batch_size() == 3 * given.num_processes
    assert [len(batch) for batch in taken] == [4]
    accelerator, model, optimizer = engine({"zero_optimization": {"stage": 2}}, strict=True)
    accelerator.backward(loss_of(model, next(batches(1))))
    with pytest.raises(SettingError, match=r"has no gradient_clipping, and DeepSpeed takes 1\.0"):
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
    accelerator, model, optimizer = engine({**ASKED["2"], "scheduler": {"type": "WarmupLR", "params": {}}})
    with pytest.raises(SettingError, match="LambdaLR in prepare, and WarmupLR in"):
        accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda _: 1.0))
    closed = {**ASKED["3"]}
    closed["zero_optimization"] = {
        **closed["zero_optimization"],
        "stage3_gather_16bit_weights_on_model_save": False,
    }
    accelerator, model, _ = engine(closed)
    with pytest.raises(ValueError, match="zero3_save_16bit_model"):
        accelerator.get_state_dict(model)


def another_limit() -> None:
    """The limit of the configuration counts, as in 1.x, beside one that a program lowers in each step."""
    accelerator, model, optimizer = engine({**ASKED["2"], "gradient_clipping": 0.5})
    reference = tiny()
    plain = adamw(reference)
    with warnings.catch_warnings(record=True) as caught:
        for limit, words in zip((0.1, 0.001), batches(2), strict=True):
            accelerator.backward(loss_of(model, words))
            norm = accelerator.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            loss_of(reference, words).backward()
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            torch.testing.assert_close(norm, expected, rtol=1e-4, atol=1e-6)
            plain.step()
            plain.zero_grad()
    (said,) = (text for each in caught if "clip_grad_norm_" in (text := str(each.message)))
    assert "given 0.1, but the DeepSpeed configuration says gradient_clipping: 0.5, which counts" in said
    torch.testing.assert_close(model.module.embed.weight, reference.embed.weight, rtol=0, atol=1e-5)


USES = (
    *(omitted_steps, windows_marked_by_hand, accumulate_by_hand, step_without_backward, zero_grad_first),
    *(bf16, float32_inputs, windows, drop_gradients, two_models, two_accelerators, reference_model, apart),
    *(prepare_again, engine_of_the_accelerator, engine_wrappers_of_a_program, stand_ins),
    *(configured_optimizer, total_of_a_schedule, refused_case, another_limit),
)


def uses(folder: str) -> list[str]:
    """Runs them; the first that fails ends it on its rank."""
    omitted_step_before_a_save(folder)
    done = []
    for use in USES:
        use()
        done.append(use.__name__)
    return done


def test_ways_of_use(ranks: RankServer, tmp_path: Path) -> None:
    assert same_on_all(ranks(2, uses, str(tmp_path), timeout=200)) == [use.__name__ for use in USES]


def trained_as_told() -> tuple[str, int, float]:
    """Eight batches in windows of two, as the environment asks."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model: Any = tiny()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for words in batches(8):
        with accelerator.accumulate(model):
            loss = loss_of(model, share(words, accelerator.process_index, accelerator.num_processes))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    total = accelerator.reduce(loss.detach(), "mean").item()
    return accelerator.distributed_type.value, model.zero_optimization_stage(), total


def test_a_launch_trains(ranks: RankServer) -> None:
    """``accelerate launch --use_deepspeed --zero_stage 2``; ranks train with its variables."""
    told = launch_variables("--use_deepspeed", "--zero_stage", "2", "-n", "2", "--cpu")
    plain = alone(2, clip=float("inf"))["losses"][-1]
    for kind, stage, total in ranks(2, trained_as_told, env=told):
        assert (kind, stage) == ("DEEPSPEED", 2)
        assert total == pytest.approx(plain, abs=1e-5)
