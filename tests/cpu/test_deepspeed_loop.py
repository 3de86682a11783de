"""ZeRO by DeepSpeed: losses weighted by items, and layers of experts."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from accelerate.utils import find_executable_batch_size, is_deepspeed_available, is_transformers_available
from tests.cpu.test_deepspeed import ASKED, engine
from tests.support.long_run import LONG_RUN
from tests.support.ranks import NO_LAUNCHER, RankServer, same_on_all
from tests.support.scripts import run_to_exit
from tests.support.sharded_models import adamw, batches, loss_of, share, tiny
from tests.support.watchdog import speed_up_watchdog

# What the rank server imports once for this module.
PRELOAD = ("deepspeed.runtime.zero.muon.muon_optimizer", "transformers.integrations.deepspeed")

pytestmark = [
    pytest.mark.skipif(not is_deepspeed_available(), reason="the package deepspeed is not installed"),
    pytest.mark.timeout(300),
]
# Words that each process learns from in each micro-batch, of 4 x 4: one has none, so its mean is NaN.
COUNTS = ((16, 3), (5, 0), (7, 16), (1, 2), (0, 9))
CLIP = 0.3


def masked(words: torch.Tensor, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(words, labels) of one process; labels beyond its count say nothing."""
    mine = share(words, rank, 2)
    labels = mine[:, 1:].clone().flatten()
    labels[COUNTS[step][rank] :] = -100
    return mine, labels


def mean_of(model: nn.Module, words: torch.Tensor, labels: torch.Tensor, how: str = "mean") -> torch.Tensor:
    logits = model(words[:, :-1]).flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, labels, reduction=how)


def reference(rows: list[torch.Tensor]) -> tuple[nn.Module, list[float]]:
    """One process: the mean over all words of a window of three, and of the short one after it."""
    model = tiny()
    optimizer = adamw(model)
    norms = []
    for window in (range(3), range(3, 5)):
        for step in window:
            for rank in range(2):
                mean_of(model, *masked(rows[step], rank, step), how="sum").backward()
        items = sum(sum(COUNTS[step]) for step in window)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= items
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def weighted(kind: str, precision: str) -> None:
    """A window of three micro-batches, and a short one."""
    rows = list(batches(5))
    plain, norms = reference(rows)
    within = 1e-5 if precision == "no" else 2e-2
    accelerator, model, optimizer = engine(ASKED[kind], mixed_precision=precision)
    mine = [masked(words, accelerator.process_index, step) for step, words in enumerate(rows)]
    found = []
    for window in accelerator.windows(mine, 3):
        for words, labels in window:
            accelerator.backward(mean_of(model, words, labels), num_items=(labels != -100).sum())
        found.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    assert found == pytest.approx(norms, rel=within, abs=within)
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(weights[name].float(), value, rtol=0, atol=within, msg=name)


# By default each stage in one of two precisions.
WEIGHTED = [
    *(("0", "no"), ("1", "bf16"), ("2", "no"), ("2 offload", "no"), ("3", "bf16")),
    *((("1", "no"), ("3", "no"), ("0", "bf16"), ("2", "bf16")) if LONG_RUN else ()),
]


def items() -> list[str]:
    from accelerate.core.errors import PrepareError

    for kind, precision in WEIGHTED:
        weighted(kind, precision)
    accelerator, model, optimizer = engine(ASKED["2"], window=2)
    words, labels = masked(next(batches(1)), accelerator.process_index, 0)
    with accelerator.accumulate(model):
        accelerator.backward(mean_of(model, words, labels), num_items=3)
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(PrepareError, match="with num_items and without it"):
        accelerator.backward(mean_of(model, words, labels))
    with pytest.raises(PrepareError, match="was not computed by the model"):
        accelerator.backward(torch.zeros((), requires_grad=True), num_items=0)
    return [" ".join(each) for each in WEIGHTED]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(words, 8) -> the same."""
        return self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    """Each word goes to one of three; one that nobody sends a word to does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(words, 8) -> the same."""
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                result = result.index_add(0, rows, expert(x[rows]) * weights[rows, number, None])
        return result


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.ahead, self.layer, self.head = nn.Linear(4, 8), Experts(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(words, 4) -> (words, 1)."""
        x = self.ahead(x)
        return self.head(x + self.layer(x))


def routed() -> torch.Tensor:
    """(2, 6, 4): words of two processes; those of the first go to experts 0 and 1, the others to 2."""
    model, chance = Mixture(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        every = torch.randn(300, 4, generator=chance) * 3
        chosen = model.layer.router(model.ahead(every)).argmax(-1)
    first = torch.cat([every[chosen == 0][:3], every[chosen == 1][:3]])
    second = every[chosen == 2][:6]
    assert first.shape == second.shape == (6, 4)
    return torch.stack([first, second])


def experts() -> list[float]:
    """Processes that run different experts; without leaves they would wait for each other for ever."""
    from accelerate import Accelerator, DeepSpeedPlugin

    words = routed()
    plain = Mixture()
    other = torch.optim.AdamW(plain.parameters(), lr=0.01)
    plugin = DeepSpeedPlugin(hf_ds_config=ASKED["3"], transformer_moe_cls_names="Experts")
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = Mixture()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = []
    for _ in range(3):
        loss = model(words[accelerator.process_index]).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        theirs = torch.stack([plain(part).square().mean() for part in words]).mean()
        theirs.backward()
        other.step()
        other.zero_grad()
        torch.testing.assert_close(accelerator.reduce(loss.detach(), "mean"), theirs.detach())
        losses.append(theirs.item())
    return losses


def drive() -> None:
    """Settings go through; a machine without libaio says so before anything is compiled."""
    from deepspeed.ops import op_builder

    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.core.errors import SettingError

    plugin = DeepSpeedPlugin(zero_stage=3, offload_param_device="nvme", offload_param_nvme_path="/drive")
    with pytest.warns(UserWarning, match="libaio"):
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = Mixture()
    reader = mock.patch.object(vars(op_builder)["AsyncIOBuilder"], "is_compatible", return_value=False)
    with reader, pytest.raises(SettingError, match=r"offload_param: (.*\n)*.*apt install libaio-dev"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
IN_WINDOWS = {
    **{kind: (ASKED[kind], "no") for kind in ("0", "1", "2", "3", "2 offload", "3 offload")},
    **{f"{stage} bf16": (ASKED[stage], "bf16") for stage in "1023"},
    **{f"{stage} bf16, sums in fp32": ({**ASKED[stage], **FP32_SUMS}, "bf16") for stage in "123"},
}


def train_from(
    folder: Path,
    config: dict[str, Any],
    precision: str,
    begin: int,
    saves: tuple[int, ...],
    by_hand: bool = False,
) -> Any:
    """Train two windows of three, and save after these micro-batches; or go on after ``begin``.

    Without ``accumulate()``, ``by_hand``, each backward is complete.
    """
    window = 1 if by_hand else 3
    accelerator, model, optimizer = engine(config, window, seed=begin, mixed_precision=precision)
    if begin:
        accelerator.load_state(f"{folder}/{begin}")
    for number, words in enumerate(batches(6), 1):
        if number <= begin:
            continue
        with nullcontext() if by_hand else accelerator.accumulate(model):
            loss = loss_of(model, share(words, accelerator.process_index, accelerator.num_processes))
            accelerator.backward(loss * window / 3)
            if not by_hand or number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
        if not begin and number in saves:
            accelerator.save_state(f"{folder}/{number}")
    return {name: value.clone() for name, value in accelerator.strategy.master_state(model).items()}


def resume_in_windows(folder: str) -> list[str]:
    """The kinds whose resumed runs end elsewhere than the run that was not interrupted."""
    wrong = []
    for place, (kind, (config, precision)) in enumerate(IN_WINDOWS.items()):
        saves = (1, 2, 4, 5) if LONG_RUN else ((2, 4)[place % 2],)
        whole = train_from(Path(folder, kind), config, precision, 0, saves)
        for begin in saves:
            resumed = train_from(Path(folder, kind), config, precision, begin, saves)
            if any(not torch.equal(value, resumed[name]) for name, value in whole.items()):
                wrong.append(f"{kind}, after {begin}")
    for kind, begin in ("1", 3), ("2", 4), ("2 offload", 5):
        runs = [train_from(Path(folder), ASKED[kind], "no", at, (begin,), by_hand=True) for at in (0, begin)]
        if any(
            not torch.allclose(value, runs[1][name], rtol=0, atol=1e-6) for name, value in runs[0].items()
        ):
            wrong.append(f"{kind} by hand, after {begin}")
    return wrong


@pytest.mark.timeout(300)
def test_an_open_window_is_saved(ranks: RankServer, tmp_path: Path) -> None:
    """G2: in every stage, precision and buffer of DeepSpeed, after any micro-batch, to the bit."""
    assert same_on_all(ranks(2, resume_in_windows, str(tmp_path), timeout=280)) == []


def save_with_unknown_buffers(folder: str) -> None:
    """Another version of DeepSpeed may keep gradients elsewhere: it is said once, and the save goes on."""
    accelerator, model, optimizer = engine(ASKED["3"], 2)
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, next(batches(1))))
        optimizer.step()
    accelerator.save_state(f"{folder}/known")
    with (
        mock.patch(
            "accelerate.strategy.deepspeed.open_gradients._REQUIRED_ATTRIBUTES",
            {3: ("gradients_of_tomorrow",)},
        ),
        warnings.catch_warnings(record=True) as heard,
    ):
        warnings.simplefilter("always")
        accelerator.save_state(f"{folder}/unknown")
        accelerator.load_state(f"{folder}/known")
    told = [str(w.message) for w in heard if "in the middle of an accumulation window" in str(w.message)]
    assert len(told) == 2 * accelerator.is_main_process
    assert not list(Path(folder, "unknown").glob("open_gradients*"))


def both(folder: str) -> tuple[list[str], list[float]]:
    """In one process each: an import of DeepSpeed costs seconds."""
    drive()
    save_with_unknown_buffers(folder)
    return items(), experts()


def test_items_and_experts(ranks: RankServer, tmp_path: Path) -> None:
    """The mean over all words of a window on all processes, in every stage; no items add nothing.

    ``transformer_moe_cls_names``: stage 3 gathers such a layer as a whole, whoever needs what of it.
    """
    weighted, losses = same_on_all(ranks(2, both, str(tmp_path), timeout=200))
    assert len(weighted) == len(WEIGHTED)
    assert losses[-1] < losses[0]


def fill_memory_of_one() -> None:
    """Rank 1 has no memory for its second batch; rank 0 averages gradients in a group of DeepSpeed."""
    from accelerate import Accelerator, DeepSpeedPlugin

    speed_up_watchdog()
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))

    @find_executable_batch_size(starting_batch_size=20)
    def train(batch_size: int) -> None:
        model = nn.Linear(2, 2)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        for number in range(2):
            loss = model(torch.ones(batch_size, 2)).sum()
            if number and accelerator.process_index == 1:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            accelerator.backward(loss)
            optimizer.step()

    train()


def test_a_full_memory_is_said_while_another_rank_averages(ranks: RankServer) -> None:
    """C8: DeepSpeed's collectives are counted, so that it is known for whom a rank waits."""
    waiting, full = ranks.outcomes(2, fill_memory_of_one, grace=60)
    assert "find_executable_batch_size at test_deepspeed_loop.py:" in waiting.message
    assert "the memory of rank 1 is full with batches of 20" in full.message
    assert {waiting.kind, full.kind} == {"CollectiveError"}


def gather_on_one() -> None:
    """Rank 0 gathers, while rank 1 averages gradients in a group of DeepSpeed."""
    from accelerate import Accelerator, DeepSpeedPlugin

    speed_up_watchdog()
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    model = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for number in range(2):
        if number and accelerator.is_main_process:
            accelerator.gather(torch.ones(1))
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()


def test_ranks_that_wait_for_each_other_in_a_group_of_deepspeed_are_named(ranks: RankServer) -> None:
    """G11: the first one knows it by the collectives of the other."""
    first, _ = ranks.outcomes(2, gather_on_one, grace=60)
    assert first.kind == "CollectiveError"
    assert "gather at test_deepspeed_loop.py:" in first.message
    assert re.search(r"rank 1 is in \w+ at test_deepspeed_loop.py:", first.message), first.message


LEAVES = """
import sys
import torch
from accelerate import Accelerator, DeepSpeedPlugin
accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage={stage}))
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
def train():
    accelerator.backward(model(torch.ones(4, 2)).sum())
    optimizer.step()
train()
if accelerator.process_index == 1: sys.exit(0)
train()
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_ends_well_while_another_trains_is_named(
    ranks: RankServer, tmp_path: Path, stage: int
) -> None:
    """G11: in collectives of DeepSpeed's own groups, of a backward and of a forward."""
    (code, text), (fine, _) = run_to_exit(ranks, 2, LEAVES.format(stage=stage), tmp_path)
    assert (code, fine) == (1, 0)
    message = text.rpartition("Error: ")[2]
    assert "rank 1 has ended" in message, message


def frozen_later(kind: str) -> list[str]:
    """Change what trains after ``prepare``: the step says so, until it is changed back."""
    accelerator, model, optimizer = engine(ASKED[kind])
    said = []
    user = accelerator.unwrap_model(model)
    for part, trains in (user.layers[0], False), (user.frozen, True), (user.frozen, False):
        part.requires_grad_(trains)
        (words,) = batches(1)
        accelerator.backward(model(words).square().mean())
        try:
            optimizer.step()
        except ValueError as error:
            said.append(str(error))
        user.layers[0].requires_grad_(True)
    return said


@pytest.mark.parametrize("kind", ["2", "3"])
def test_what_trains_cannot_change_after_prepare(ranks: RankServer, kind: str) -> None:
    frozen, unfrozen = same_on_all(ranks(2, frozen_later, kind))
    assert "requires_grad of layers.0.norm.weight, layers.0.norm.bias" in frozen
    assert unfrozen.startswith("requires_grad of frozen.weight, frozen.bias was changed after prepare")


def partition_before_the_accelerator() -> int:
    """Make a model as ``from_pretrained`` does in stage 3, with a batch size of all ranks."""
    import deepspeed

    from accelerate import PartialState
    from accelerate.utils import gather_object

    gather_object([])  # opens the group; the state that is made later has strategies join it nevertheless
    PartialState()
    sizes = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    with deepspeed.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}, **sizes}):
        model: Any = nn.Linear(4, 4)
    return model.weight.ds_tensor.numel()


def test_models_are_partitioned_before_there_is_an_accelerator(ranks: RankServer) -> None:
    """As with ``TrainingArguments(deepspeed=...)``: it makes a ``PartialState``, then the model is loaded."""
    env = {"ACCELERATE_USE_DEEPSPEED": "true"}
    assert ranks(2, partition_before_the_accelerator, env=env) == [8, 8]


def types_of_the_world(folder: str) -> list[str]:
    """The types that ``PartialState`` says: by the environment, by an ``Accelerator``, by one without."""
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState
    from accelerate.state import AcceleratorState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    kinds = [PartialState(cpu=True).distributed_type]
    del os.environ["ACCELERATE_USE_DEEPSPEED"]
    AcceleratorState._reset_state(reset_partial_state=True)
    kinds.append(PartialState(cpu=True).distributed_type)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    assert str(accelerator.state).startswith("Distributed environment: DistributedType.DEEPSPEED")
    kinds.append(PartialState().distributed_type)
    if is_transformers_available():
        from transformers import TrainingArguments

        config = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}
        configured = {"use_configured_state": True}
        arguments: Any = TrainingArguments(
            folder, use_cpu=True, report_to=[], deepspeed=config, accelerator_config=configured
        )
        assert arguments.distributed_state.distributed_type == "DEEPSPEED"
        assert arguments.n_gpu == 0
    AcceleratorState._reset_state()
    Accelerator(cpu=True)
    return [*map(str, kinds), str(PartialState().distributed_type)]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_world_has_the_type_of_deepspeed(ranks: RankServer, processes: int, tmp_path: Path) -> None:
    """transformers takes a configured state for its ``deepspeed`` only if this one says so."""
    plain = "DistributedType.NO" if processes == 1 else "DistributedType.MULTI_CPU"
    deepspeed = "DistributedType.DEEPSPEED"
    env = NO_LAUNCHER if processes == 1 else {}
    for kinds in ranks(processes, types_of_the_world, str(tmp_path), env=env):
        assert kinds == [deepspeed, plain, deepspeed, plain]
