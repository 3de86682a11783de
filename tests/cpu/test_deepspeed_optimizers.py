"""ZeRO by DeepSpeed: optimizers with modes, and those that compute with whole parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.utils import is_deepspeed_available
from tests.cpu.test_deepspeed import options
from tests.support.ranks import RankServer, same_on_all
from tests.support.sharded_models import batches, loss_of, tiny

pytestmark = [
    pytest.mark.skipif(not is_deepspeed_available(), reason="the package deepspeed is not installed"),
    pytest.mark.timeout(300),
]

CONFIGS = {
    **{str(stage): options(stage) for stage in range(4)},
    "3 persistent": options(3, stage3_param_persistence_threshold=10**6),
    "3 offload": options(3, offload_optimizer={"device": "cpu", "pin_memory": False}),
}


def accelerator_of(kind: str) -> Any:
    from accelerate import Accelerator, DeepSpeedPlugin

    return Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIGS[kind]))


class SGDWithModes(torch.optim.SGD):
    """It evaluates at half of the weights that it trains at."""

    factor = 1.0

    @torch.no_grad()
    def scale_weights(self, factor: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(factor / self.factor)
        self.factor = factor

    def train(self) -> None:
        self.scale_weights(1.0)

    def eval(self) -> None:
        self.scale_weights(0.5)


def with_modes(model: Any) -> SGDWithModes:
    return SGDWithModes([p for p in model.parameters() if p.requires_grad], lr=0.1)


def losses_in_both_modes(backward: Callable[[torch.Tensor], None], model: Any, optimizer: Any) -> list[float]:
    losses: list[float] = []
    for words in batches(3):
        optimizer.train()
        backward(loss_of(model, words))
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        with torch.no_grad():
            losses.append(loss_of(model, words).item())
    return losses


def modes_under_deepspeed(kind: str) -> list[float]:
    accelerator = accelerator_of(kind)
    model = tiny()
    model, optimizer = accelerator.prepare(model, with_modes(model))
    return losses_in_both_modes(accelerator.backward, model, optimizer)


def weights_in_both_modes(kind: str) -> list[float]:
    """Of a model in bf16, before and after ``eval``, and after ``train``."""
    from accelerate import Accelerator, DeepSpeedPlugin

    plugin = DeepSpeedPlugin(hf_ds_config=CONFIGS[kind])
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, mixed_precision="bf16")
    module = tiny()
    model, optimizer = accelerator.prepare(module, with_modes(module))
    sums = []
    for mode in (lambda: None, optimizer.eval, optimizer.train):
        mode()
        sums.append(float((accelerator.get_state_dict(model) or {}).get("embed.weight", torch.ones(1)).sum()))
    return sums


def test_modes_move_the_weights_of_stage_0_in_16_bits(ranks: RankServer) -> None:
    before, evaluated, trained = ranks(2, weights_in_both_modes, "0")[0]
    assert evaluated == pytest.approx(before / 2, rel=1e-2)
    assert trained == pytest.approx(before, rel=1e-2)


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_evaluation_has_the_weights_of_the_optimizers_mode(ranks: RankServer, kind: str) -> None:
    """As a schedule-free optimizer moves them; DeepSpeed copies its weights to the model in steps only."""
    model = tiny()
    alone = losses_in_both_modes(torch.Tensor.backward, model, with_modes(model))
    assert same_on_all(ranks(2, modes_under_deepspeed, kind)) == pytest.approx(alone, rel=1e-5)


def words_about_optimizers(kind: str) -> dict[str, str]:
    """What ``prepare`` says of each: an error, or its warnings."""
    said = {}
    for each in (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.AdamW):
        accelerator, model = accelerator_of(kind), tiny()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                accelerator.prepare(model, each(model.parameters(), lr=0.01))
            except ValueError as error:
                said[each.__name__] = str(error).partition("\n")[0]
                continue
        said[each.__name__] = " ".join(str(w.message) for w in caught if each.__name__ in str(w.message))
    return said


def test_optimizers_of_whole_matrices_are_named(ranks: RankServer) -> None:
    """Each rank steps one part of a flat vector of all parameters."""
    first, second = ranks(2, words_about_optimizers, "2")
    assert first["LBFGS"] == second["LBFGS"] == "LBFGS cannot train under DeepSpeed"
    assert "Adafactor under DeepSpeed takes its means over this rank's piece" in first["Adafactor"]
    assert first["AdamW"] == second["AdamW"] == ""
    assert ranks(2, words_about_optimizers, "0")[0]["Adafactor"] == ""


# --- groups of a DummyOptim, and states that not all groups have


def two_layers() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))


def groups_of_a_stand_in() -> list[list[tuple[float, float, int]]]:
    """Rates, decays and numbers of elements of the groups that DeepSpeed has made."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim

    params = {"lr": "auto", "weight_decay": "auto"}
    config = {**CONFIGS["2"], "optimizer": {"type": "AdamW", "params": params}}
    made = []
    for kind in "one group", "generators", "bare":
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        net = two_layers()
        groups: Any = {
            "one group": [{"params": list(net.parameters()), "lr": 2e-5, "weight_decay": 0.1}],
            "generators": ({"params": layer.parameters(), "lr": 0.5 + at} for at, layer in enumerate(net)),
            "bare": net.parameters(),
        }[kind]
        before = [p.detach().clone() for p in net.parameters()]
        model, optimizer = accelerator.prepare(net, DummyOptim(groups, lr=0.25))
        groups = optimizer.param_groups
        made.append([(g["lr"], g["weight_decay"], sum(p.numel() for p in g["params"])) for g in groups])
        accelerator.backward(model(torch.ones(2, 8)).mean())
        optimizer.step()
        assert not any(map(torch.equal, before, net.parameters()))
    return made


def test_a_stand_in_keeps_its_groups(ranks: RankServer) -> None:
    """The options of a single group, and parameters that can be read once, as of ``module.parameters()``."""
    one, generators, bare = ranks(1, groups_of_a_stand_in)[0]
    assert [(rate, decay) for rate, decay, _ in one] == [(2e-5, 0.1)]
    assert [(rate, decay) for rate, decay, _ in generators] == [(0.5, 0), (1.5, 0)]
    assert [rate for rate, *_ in bare] == [0.25]


def states_of_unequal_groups(kind: str, stage: str, other: str, folder: str) -> dict[int, list[str]]:
    """The names in the full state of groups that keep different ones; resumed runs go on alike.

    Args:
        kind: the optimizer.
        stage: that of the run which saves a full state, and DeepSpeed's own.
        other: the stage that loads DeepSpeed's own.
    """
    from accelerate import Accelerator, DeepSpeedPlugin

    def prepared(stage: str) -> tuple[Any, Any, Any]:
        plugin = DeepSpeedPlugin(hf_ds_config=CONFIGS[stage])
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
        net = two_layers()
        more = {"SGD": {"momentum": 0.9}, "AdamW": {"amsgrad": True}}[kind]
        groups: Any = [{"params": net[0].parameters(), **more}, {"params": net[1].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.1) if kind == "SGD" else torch.optim.AdamW(groups, lr=0.1)
        return accelerator, *accelerator.prepare(net, optimizer)

    def losses(accelerator: Any, model: Any, optimizer: Any) -> list[float]:
        values = []
        for at in range(2):
            loss = model(torch.full((2, 8), 1.0 + at)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            values.append(loss.item())
        return values

    accelerator, model, optimizer = prepared(stage)
    losses(accelerator, model, optimizer)
    accelerator.save_state(f"{folder}/full", sharded=False)
    accelerator.save_state(f"{folder}/own")
    state = accelerator.strategy.optimizer_state(optimizer.optimizer, [model])
    expected = losses(accelerator, model, optimizer)
    for name, resumed_stage in ("full", stage), ("own", other):
        accelerator, model, optimizer = prepared(resumed_stage)
        accelerator.load_state(f"{folder}/{name}")
        assert losses(accelerator, model, optimizer) == pytest.approx(expected, rel=1e-5)
    return {number: sorted(kept) for number, kept in state.get("state", {}).items()}


@pytest.mark.parametrize(("stage", "other"), [("1", "2"), ("2", "3"), ("3", "1")])
def test_groups_may_keep_different_states(ranks: RankServer, stage: str, other: str, tmp_path: Path) -> None:
    """Momentum, or ``amsgrad``, in one group: some ranks waited for the one that failed."""
    names, _ = ranks(2, states_of_unequal_groups, "SGD", stage, other, str(tmp_path / "SGD"))
    assert names == {0: ["momentum_buffer"], 1: ["momentum_buffer"]}
    names, _ = ranks(2, states_of_unequal_groups, "AdamW", stage, other, str(tmp_path / "AdamW"))
    moments = ["exp_avg", "exp_avg_sq"]
    with_maximum = [*moments, "max_exp_avg_sq", "step"]
    assert names == {0: with_maximum, 1: with_maximum, 2: [*moments, "step"], 3: [*moments, "step"]}


class BlockSGD(torch.optim.SGD):
    """It keeps one number for each block of four elements, as 8-bit optimizers keep scales."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["absmax"] = torch.ones(parameter.numel() // 4)


def refuse_blocks(folder: str) -> list[str]:
    """What a full save, and a load in another stage, say of such a state."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.core.errors import CheckpointError, PrepareError

    def prepared(stage: str) -> tuple[Any, Any]:
        plugin = DeepSpeedPlugin(hf_ds_config=CONFIGS[stage])
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
        net = two_layers()
        model, optimizer = accelerator.prepare(net, BlockSGD(net.parameters(), lr=0.1, momentum=0.9))
        accelerator.backward(model(torch.ones(2, 8)).mean())
        optimizer.step()
        return accelerator, model

    accelerator, _ = prepared("2")
    with pytest.raises(PrepareError) as full:
        accelerator.save_state(f"{folder}/full", sharded=False)
    accelerator.save_state(f"{folder}/own")
    accelerator.load_state(f"{folder}/own")
    accelerator, model = prepared("1")
    before = accelerator.get_state_dict(model)
    with pytest.raises(CheckpointError) as resharded:
        accelerator.load_state(f"{folder}/own")
    after = accelerator.get_state_dict(model)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    return [str(full.value), str(resharded.value)]


def test_states_of_blocks_of_elements_are_refused(ranks: RankServer, tmp_path: Path) -> None:
    """Those of rank 0 would stand for all: whole states need one value for each element."""
    for full, resharded in ranks(2, refuse_blocks, str(tmp_path)):
        assert "the full state of BlockSGD" in full
        assert "it keeps absmax for each rank's elements as a whole" in full
        assert "the optimizer keeps absmax for each rank's elements as a whole" in resharded


def skip_steps(stage: str) -> list[tuple[bool, int]]:
    """Whether the last step was skipped, and how many were; two of four gradients are not finite."""
    accelerator = accelerator_of(stage)
    net = two_layers()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    said = []
    for factor in 1.0, float("inf"), float("inf"), 1.0:
        accelerator.backward(model(torch.ones(2, 8)).sum() * factor)
        optimizer.step()
        optimizer.zero_grad()
        said.append((optimizer.step_was_skipped, optimizer.skipped_steps))
    return said


@pytest.mark.parametrize("stage", ["2", "3"])
def test_skipped_steps_are_counted(ranks: RankServer, stage: str) -> None:
    assert same_on_all(ranks(2, skip_steps, stage)) == [(False, 0), (True, 1), (True, 2), (False, 2)]


def refuse_full_experts(folder: str) -> list[str]:
    """What full states say of experts that are partitioned over the ranks; of others they say nothing."""
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    from accelerate.core.errors import PrepareError

    messages = []
    for ep_size in 2, 1:
        accelerator = accelerator_of("2")
        net = torch.nn.Sequential(torch.nn.Linear(8, 8))
        moe = MoE(hidden_size=8, expert=torch.nn.Linear(8, 8), num_experts=2, ep_size=ep_size)
        net.add_module("moe", moe)
        group = {"params": list(net.parameters()), "name": "all"}
        groups = split_params_into_different_moe_groups_for_optimizer(group)
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(groups, lr=0.1))
        strategy, path = accelerator.strategy, f"{folder}/{ep_size}"
        for ask in (
            partial(accelerator.get_state_dict, model),
            partial(accelerator.save_model, model, f"{path}/export"),
            partial(accelerator.save_state, f"{path}/full", sharded=False),
            partial(strategy.optimizer_state, optimizer.optimizer, [model]),
        ):
            with pytest.raises(PrepareError) if ep_size > 1 else nullcontext() as error:
                ask()
            messages += [str(error.value)] if error is not None else []
        accelerator.save_state(f"{path}/own")
    return messages


def test_full_states_of_partitioned_experts_are_refused(ranks: RankServer, tmp_path: Path) -> None:
    """The ranks have different experts under one name: their sums were written as moments."""
    for messages in ranks(2, refuse_full_experts, str(tmp_path)):
        assert len(messages) == 4
        assert all("of which each rank has others" in each for each in messages)
        assert all("moe.deepspeed_moe.experts" in each for each in messages)
