"""ZeRO by DeepSpeed: which gradients a step takes, of several backwards and of unused parameters."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.utils import broadcast_object_list, is_deepspeed_available
from tests.cpu.test_deepspeed import ASKED, OFFLOAD, options
from tests.cpu.test_deepspeed_loop import FP32_SUMS
from tests.support.long_run import LONG_RUN
from tests.support.ranks import RankServer, same_on_all

# What the rank server imports once for this module.
PRELOAD = ("deepspeed.runtime.zero.muon.muon_optimizer", "transformers.integrations.deepspeed")

pytestmark = [
    pytest.mark.skipif(not is_deepspeed_available(), reason="the package deepspeed is not installed"),
    pytest.mark.timeout(300),
]
CONFIGS = {**ASKED, "1 offload": options(1, **OFFLOAD)}
# The configuration, its dtype of sums, and the precision.
KINDS = {
    **{kind: (kind, {}, "no") for kind in CONFIGS},
    **{f"{stage} bf16": (stage, {}, "bf16") for stage in "0123"},
    **{f"{kind} bf16, sums in fp32": (kind, FP32_SUMS, "bf16") for kind in ("1", "2", "2 offload", "3")},
}
# The scales and layers of the losses of three windows of two micro-batches.
WINDOWS = (
    (((1, True), (2, False)), ((2, False), (1, True), (3, True))),
    (((1, False),), ((1, True), (2, False))),
    (((1, True),), ((2, False), (1, False))),
)


class Branches(nn.Module):
    """Two layers, of which the second one is not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        """(rows, 4) -> (rows, 1)."""
        return self.always(x) + self.sometimes(x) if both else self.always(x)


def prepared(kind: str, window: int) -> tuple[Any, Any, Any]:
    """Under DistributedDataParallel, or under DeepSpeed."""
    from accelerate import Accelerator, DeepSpeedPlugin, DistributedDataParallelKwargs

    extras: dict[str, Any] = {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]}
    if kind in KINDS:
        stage, more, precision = KINDS[kind]
        config = {**CONFIGS[stage], **more}
        extras = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config), "mixed_precision": precision}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window, **extras)
    model = Branches()
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def steps_of(kind: str, mode: str) -> list[float]:
    """The norms of three windows, and a weight of each layer after them.

    Args:
        kind: ``ddp``, or one of ``KINDS``.
        mode: ``together`` computes the losses of a micro-batch before the first backward, ``weighted`` takes
            means over items, ``quiet`` has a ``no_sync`` between two losses that are reduced.
    """
    accelerator, model, optimizer = prepared(kind, 2)
    rows = torch.ones(2, 4) * (accelerator.process_index + 1) / 2
    items = {"num_items": torch.tensor(2 + accelerator.process_index)} if mode == "weighted" else {}
    norms: list[float] = []
    for micro_batch in chain(*WINDOWS):
        with accelerator.accumulate(model):
            open_losses = []
            for number, (scale, both) in enumerate(micro_batch):
                is_quiet = mode == "quiet" and 0 < number < len(micro_batch) - 1
                with accelerator.no_sync(model) if is_quiet else nullcontext():
                    open_losses.append(model(rows, both).mean() * scale)
                    if mode != "together":
                        accelerator.backward(open_losses.pop(), **items)
            for loss in open_losses:
                accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e9)))
            optimizer.step()
            optimizer.zero_grad()
    whole = accelerator.get_state_dict(model)
    mine = {name: float(whole[f"{name}.weight"][0, 0]) for name in ("always", "sometimes")} if whole else {}
    return norms + list(broadcast_object_list([mine])[0].values())


MODES = ("one by one", "weighted", "together", "quiet")


def kinds_of(mode: str) -> list[str]:
    """The kinds to train in a mode: by default the stages as they are in all, the others in one each."""
    place = MODES.index(mode)
    return [
        kind
        for number, kind in enumerate(KINDS)
        if LONG_RUN or kind in "0123" or number % len(MODES) == place
    ]


def compare_steps() -> list[str]:
    """The kinds that end elsewhere than DistributedDataParallel."""
    wrong: list[str] = []
    for mode in MODES:
        expected = steps_of("ddp", mode.replace("together", "one by one"))
        for kind in kinds_of(mode):
            precision = KINDS[kind][2]
            within = 1e-5 if precision == "no" else 2e-2
            actual = steps_of(kind, mode)
            if actual != pytest.approx(expected, rel=within, abs=within):
                wrong.append(f"{kind}, {mode}: {actual}, and not {expected}")
    return wrong


def test_all_backwards_of_a_step_count(ranks: RankServer) -> None:
    """Two losses in the micro-batch that ends a window; a layer that a window does not use stays."""
    assert same_on_all(ranks(2, compare_steps, timeout=200)) == []


# --- what prepare refuses


class WithExtra(nn.Module):
    """A layer, and a parameter of another kind."""

    def __init__(self, extra: torch.Tensor) -> None:
        super().__init__()
        self.layer, self.extra = nn.Linear(4, 1), nn.Parameter(extra)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, 4) -> (rows, 1)."""
        return self.layer(x) + self.extra.sum().to(x.dtype)


def refused_params() -> list[str]:
    """What ``prepare`` says of each."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.core.errors import PrepareError

    messages = []
    double = torch.ones(4, dtype=torch.float64)
    cases = ((0, torch.ones(())), (2, torch.ones(())), (3, torch.zeros(0, 4)), (0, double), (2, double))
    for stage, extra in (*cases, (3, double)):
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
        model = WithExtra(extra)
        with pytest.raises(PrepareError) as refusal:
            accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        messages.append(refusal.value.what)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    first, second = accelerator.prepare(nn.Linear(4, 1), nn.Linear(4, 1))
    with pytest.raises(PrepareError, match="has parameters of two models"):
        accelerator.prepare(torch.optim.AdamW([*first.parameters(), *second.parameters()]))
    return messages


def train_without_elements(folder: str) -> list[list[int]]:
    """Train a parameter without elements in stage 2; save the full state, and shards for another stage."""
    numbers = []
    for sharded, kind in (False, "2"), (None, "1"):
        train_and_save(WithExtra(torch.zeros(0, 4)), "2", f"{folder}/{sharded}", sharded=sharded)
        accelerator, model, optimizer = train_and_save(WithExtra(torch.zeros(0, 4)), kind, f"{folder}/other")
        accelerator.load_state(f"{folder}/{sharded}")
        state = accelerator.strategy.optimizer_state(optimizer.optimizer, [model])
        numbers.append(sorted(broadcast_object_list([list(state.get("state", ()))])[0]))
    return numbers


# --- resuming


def train_and_save(model: nn.Module, kind: str, folder: str, **save: Any) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator, DeepSpeedPlugin

    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIGS[kind]))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 4)).mean())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state(folder, **{"sharded": False, **save})
    return accelerator, model, optimizer


def registered_twice() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 1))


def resume_shared_module(folder: str) -> list[str]:
    """The ways in which a module that is registered twice does not resume: save, and stage of the load."""
    wrong = []
    for sharded in (True, False, None):
        accelerator, model, _ = train_and_save(
            registered_twice(), "3", f"{folder}/{sharded}", sharded=sharded
        )
        saved = accelerator.strategy.master_state(model)
        for kind in "3", "2":
            accelerator, model, _ = train_and_save(registered_twice(), kind, f"{folder}/other")
            accelerator.load_state(f"{folder}/{sharded}")
            state = accelerator.strategy.master_state(model)
            if any(not torch.equal(value, state[name]) for name, value in saved.items()):
                wrong.append(f"{sharded}, {kind}")
    return wrong


def load_sharded_in_stage0(folder: str) -> list[float]:
    """Load the optimizer's shards of another strategy, which are read lazily."""
    from accelerate import Accelerator, DeepSpeedPlugin

    moments = []
    plugins: list[dict[str, Any]] = [{}, {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=CONFIGS["0"])}]
    for more in plugins:
        accelerator = Accelerator(cpu=True, **more)
        model = Branches()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        if not moments:
            accelerator.backward(model(torch.ones(2, 4), True).mean())
            optimizer.step()
            accelerator.save_state(f"{folder}/shards", sharded=True)
        else:
            accelerator.load_state(f"{folder}/shards")
        moments.append(float(next(iter(optimizer.state.values()))["exp_avg"].sum()))
    return moments


def adagrad_weights(kind: str, folder: str) -> list[list[float]]:
    """Weights of two groups under a schedule, from one run and from one that was resumed."""
    from accelerate import Accelerator, DeepSpeedPlugin

    runs = []
    for is_resumed in False, True:
        more: dict[str, Any] = {}
        if kind != "ddp":
            more["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=CONFIGS[kind])
        accelerator = Accelerator(cpu=True, **more)
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.01}]
        optimizer = torch.optim.Adagrad(groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        if is_resumed:
            accelerator.load_state(f"{folder}/{kind}")
        for number in range(2 * is_resumed, 4):
            accelerator.backward(model(torch.ones(2, 4)).mean())
            for each in (optimizer, schedule):
                each.step()
            optimizer.zero_grad()
            if number == 1:
                accelerator.save_state(f"{folder}/{kind}")
        whole = accelerator.get_state_dict(model)
        mine = [float(value.sum()) for value in whole.values()] if accelerator.is_main_process else []
        runs.append(broadcast_object_list([mine])[0])
    return runs


def train_channels_last() -> list[float]:
    """A sum of the weights of one step under DDP and in stages 0 and 3, which broadcast views of bytes."""
    from accelerate import Accelerator, DeepSpeedPlugin

    sums = []
    for stage in (None, 0, 3):
        plugin = None if stage is None else DeepSpeedPlugin(zero_stage=stage)
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 1))
        model.to(memory_format=torch.channels_last)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        images = torch.arange(96.0).view(2, 3, 4, 4) / 96
        accelerator.backward(model(images).square().mean())
        optimizer.step()
        whole = accelerator.get_state_dict(model)
        order = torch.arange(108.0).view(4, 3, 3, 3)
        mine = float((whole["0.weight"] * order).sum()) if accelerator.is_main_process else 0.0
        sums.append(broadcast_object_list([mine])[0])
    return sums


def load_own_state() -> list[bool]:
    """Whether the state that each rank's optimizer tells and takes back is complete, by stage."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState

    equal: list[bool] = []
    for stage in (2, 3):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        groups = [{"params": layer.parameters()} for layer in model]
        model, optimizer = accelerator.prepare(model, torch.optim.Adam(groups, lr=0.1))
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        told = deepcopy(optimizer.state_dict())
        for values in optimizer.state.values():
            values["exp_avg"].zero_()
        optimizer.load_state_dict(told)
        taken = optimizer.state_dict()
        averages = [state["state"][number]["exp_avg"] for state in (told, taken) for number in (0, 1)]
        equal += [told["param_groups"] == taken["param_groups"], any(map(torch.any, averages[:2]))]
        equal += [torch.equal(*pair) for pair in zip(averages[:2], averages[2:], strict=True)]
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
    return equal


def check_all(folder: str) -> dict[str, Any]:
    """All in one process: an import of DeepSpeed costs seconds."""
    return {
        "refused": refused_params(),
        "empty": train_without_elements(folder),
        "shared": resume_shared_module(folder),
        "moments": load_sharded_in_stage0(folder),
        "channels last": train_channels_last(),
        "own states": load_own_state(),
        "adagrad": {kind: adagrad_weights(kind, folder) for kind in ("ddp", "1", "2", "3", "2 offload")},
    }


def test_special_parameters_and_optimizers(ranks: RankServer, tmp_path: Path) -> None:
    """Refusals name the parameter; a module registered twice, other shards, and Adagrad resume."""
    results = same_on_all(ranks(2, check_all, str(tmp_path), timeout=200))
    assert results["refused"] == [
        "the parameter extra has 0 dimensions",
        "the parameter extra has 0 dimensions",
        "the parameter extra has no elements",
        "DeepSpeed cannot train extra in torch.float64 in stage 0",
        "DeepSpeed cannot train layer.weight in torch.float32, extra in torch.float64 in stage 2",
        "DeepSpeed cannot train layer.weight in torch.float32, extra in torch.float64 in stage 3",
    ]
    assert (results["empty"], results["shared"]) == ([[1, 2], [1, 2]], [])
    assert results["own states"] == [True] * 8
    first, *others = results["channels last"]
    assert others == pytest.approx([first] * 2, rel=1e-5)
    assert results["moments"][0] == results["moments"][1] != 0
    expected = results["adagrad"].pop("ddp")
    assert all(runs == [pytest.approx(run) for run in expected] for runs in results["adagrad"].values())


# --- clipping


def clip_an_open_window() -> list[str]:
    """What clipping says after a backward that reduces nothing, in each stage."""
    from accelerate.core.errors import PrepareError

    messages = []
    for kind in "0", "1", "2", "3":
        accelerator, model, _ = prepared(kind, 1)
        with accelerator.no_sync(model):
            accelerator.backward(model(torch.ones(2, 4), True).mean())
        with pytest.raises(PrepareError) as error:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        messages.append(str(error.value))
    return messages


def clip_without_norms(strict: bool) -> list[str]:
    """What is said where the configuration forbids the norm in the step; the steps are taken."""
    from accelerate import Accelerator, DeepSpeedPlugin

    config = {**options(2, compute_grad_norm=False)}
    accelerator = Accelerator(cpu=True, strict=strict, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = Branches()
    before = model.always.weight.detach().clone()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    messages = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 4), True).mean())
            try:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            except ValueError as error:
                messages.append(str(error))
            optimizer.step()
            optimizer.zero_grad()
    assert not torch.equal(model.always.weight, before)
    return messages + [str(w.message) for w in caught if "compute_grad_norm" in str(w.message)]


def test_what_cannot_be_clipped_is_said(ranks: RankServer) -> None:
    """DeepSpeed fails on both far from the cause: KeyError, and TypeError in the step."""
    for message in ranks(2, clip_an_open_window)[0]:
        assert message.startswith("clip_grad_norm_ with gradients that are not complete")
    [warning] = ranks(2, clip_without_norms, False)[0]
    errors = ranks(2, clip_without_norms, True)[0]
    assert len(errors) == 2
    for text in (warning, *errors):
        assert "says compute_grad_norm: false, without which DeepSpeed clips nothing" in text
