"""Sharded training on two processes: the numbers of one process, and what the model stays."""

from __future__ import annotations

import copy
import operator
import re
import tempfile
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils.data import DataLoader

from tests.support.command import launch_variables
from tests.support.long_run import LONG_RUN, long_run_param, select_cases
from tests.support.numbers import Numbers, close
from tests.support.packages import needs
from tests.support.ranks import RanksError, RankServer, same_on_all
from tests.support.sharded_models import (
    INITIALIZERS,
    STEPS,
    UNFILLED,
    WORDS,
    Tiny,
    adamw,
    batches,
    loss_of,
    plain,
    share,
    tiny,
    to_empty,
    whole,
)
from tests.support.torch_versions import is_torch

# What the rank server imports once for this module.
PRELOAD = ("transformers.trainer", "peft", "datasets")


def prepared(
    options: dict[str, Any],
    window: int,
    precision: str = "no",
    compiled: str = "no",
    each: bool = False,
    listed: bool = False,
) -> Numbers:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import GradientAccumulationPlugin, TorchDynamoPlugin

    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(**options),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=window, sync_each_batch=each),
        mixed_precision=precision,
        dynamo_plugin=TorchDynamoPlugin(backend=compiled, use_regional_compilation=True),
    )
    assert (accelerator.distributed_type, accelerator.is_fsdp2) == ("FSDP", True)
    # Every rank begins with other weights: those of rank 0 count.
    model = tiny(accelerator.process_index)
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses, norms = [], []
    for words in batches(STEPS):
        models: Any = [model] if listed else model
        with accelerator.accumulate(models):
            mine = share(words, accelerator.process_index, accelerator.num_processes).to(accelerator.device)
            loss = loss_of(model, mine)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                assert type(norm) is torch.Tensor
                norms.append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    assert model.head.weight is model.embed.weight
    return losses, norms, whole(model)


LAYERS: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}


OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "layers": LAYERS,
    "kept": {**LAYERS, "reshard_after_forward": False},
    "size": {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100},
    "recomputed": {**LAYERS, "activation_checkpointing": True, "cpu_offload": True},
}


@pytest.mark.parametrize(
    ("kind", "window"),
    select_cases(
        product(OPTIONS, (1, 4)), [("whole", 1), ("layers", 4), ("kept", 4), ("size", 1), ("recomputed", 1)]
    ),
)
def test_it_trains_to_the_numbers_of_one_process(ranks: RankServer, kind: str, window: int) -> None:
    """B7, F3: tied and frozen parameters, two groups, clipping by the true norm, accumulation."""
    ours = same_on_all(ranks(2, prepared, OPTIONS[kind], window))
    close(ours, plain(window), 1e-5)


@pytest.mark.parametrize("listed", [False, True])
def test_reducing_in_every_micro_batch_gives_the_same_numbers(ranks: RankServer, listed: bool) -> None:
    """It takes no memory for whole gradients. ``accumulate([model])`` does it too, as in 1.x."""
    close(same_on_all(ranks(2, prepared, LAYERS, 4, "no", "no", not listed, listed)), plain(4), 1e-5)


def test_bf16_trains_to_the_numbers_of_autocast(ranks: RankServer) -> None:
    ours = same_on_all(ranks(2, prepared, LAYERS, 1, "bf16"))
    close(ours, plain(1, half=True), 2e-2)
    assert {value.dtype for value in ours[2].values()} == {torch.float32}


@pytest.mark.parametrize("assigned", [False, True])
def test_fp16_scales_and_skips_together(ranks: RankServer, assigned: bool) -> None:
    """B6: the first scale overflows float16, on all ranks; also that of a scaler that the user assigned."""
    ours = same_on_all(ranks(2, train_with_overflow, assigned))
    assert ours["skipped"] > 0
    assert not ours["skipped_last"]
    assert ours["finite"]


def train_with_overflow(assigned: bool) -> dict[str, Any]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import GradScalerKwargs

    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS),
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(init_scale=2.0**18)],
    )
    model = tiny()
    model, optimizer = accelerator.prepare(model, adamw(model))
    if assigned:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    for words in batches(10):
        loss = loss_of(model, share(words, accelerator.process_index, 2))
        accelerator.backward(loss)
        # One rank alone sees the overflow.
        if accelerator.process_index == 1 and optimizer.skipped_steps == 0:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.to_local().fill_(float("inf"))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "skipped": optimizer.skipped_steps,
        "skipped_last": accelerator.optimizer_step_was_skipped,
        "finite": all(bool(torch.isfinite(p).all()) for p in whole(model).values()),
        "scale": accelerator.scaler.get_scale(),
    }


@pytest.mark.skipif(not LONG_RUN, reason="law 7 has it in `make test`")
def test_blocks_are_compiled_in_place(ranks: RankServer) -> None:
    """D9: names stay."""
    ours = same_on_all(ranks(2, prepared, LAYERS, 1, "no", "aot_eager", timeout=300))
    close(ours, plain(1), 1e-5)


def kept() -> dict[str, Any]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **LAYERS))
    user = tiny()
    names = [name for name, _ in user.named_parameters()]
    model, optimizer = accelerator.prepare(user, adamw(user))
    assert model is user
    assert isinstance(model, Tiny)
    assert accelerator.unwrap_model(model) is user
    mine = sum(p.to_local().numel() for p in model.parameters())
    state = accelerator.get_state_dict(model)
    return {
        "names": [name for name, _ in model.named_parameters()] == names,
        "share": mine / sum(p.numel() for p in model.parameters()),
        "held": all(p in set(model.parameters()) for g in optimizer.param_groups for p in g["params"]),
        "again": accelerator.prepare(model) is user,
        "state": {name: value.shape for name, value in state.items()},
        "tied": bool(state) and state["head.weight"] is state["embed.weight"],
        "saves": accelerator.strategy.saves_sharded,
        "plugin": accelerator.state.fsdp_plugin.fsdp_version,
    }


def test_the_model_stays_the_users_object(ranks: RankServer) -> None:
    """F13, D6: its class, names and ties; every process holds about half of it."""
    first, second = ranks(2, kept)
    for found in (first, second):
        assert all(found[fact] for fact in ("names", "held", "again", "saves"))
        assert 0.4 < found["share"] < 0.6
    assert first["tied"]
    assert first["state"] == {name: value.shape for name, value in tiny().state_dict().items()}
    assert second["state"] == {}


def prepare_plan() -> tuple[str, bool]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS), mixed_precision="bf16")
    model = tiny()
    text = str(accelerator.plan(model, adamw(model)))
    return text, type(model) is Tiny


def test_the_plan_says_what_becomes_of_the_memory(ranks: RankServer) -> None:
    text, untouched = same_on_all(ranks(2, prepare_plan))
    assert untouched
    assert "each of 2 processes holds a shard of every parameter; all-gathered as 2 x Block and" in text
    assert "computed in torch.bfloat16, gradients reduced in torch.float32" in text
    assert " -> " in text


def by_launcher() -> tuple[str, bool, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(tiny())
    plugin = accelerator.state.fsdp_plugin
    return accelerator.strategy.name, plugin.reshard_after_forward, type(model.layers[0]).__name__


def variables_for_transformers(efficient: bool) -> tuple[str | None, ...]:
    """The two by which transformers' ``is_fsdp_enabled`` knows that rank 0 alone reads weights."""
    import os

    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=efficient))
    return os.environ.get("ACCELERATE_USE_FSDP"), os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING")


def test_a_plugin_lets_transformers_read_weights_on_rank_0_alone(ranks: RankServer) -> None:
    assert same_on_all(ranks(2, variables_for_transformers, True)) == ("true", "True")
    assert same_on_all(ranks(2, variables_for_transformers, False)) == (None, "False")


def test_the_variables_of_a_launcher_ask_for_it(ranks: RankServer) -> None:
    """F3. The second case is what the launcher of 1.x always writes, with version 2."""
    ask = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    assert same_on_all(ranks(2, by_launcher, env=ask)) == ("fsdp", True, "Block")
    written = {
        **ask,
        "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_OFFLOAD_PARAMS": "false",
        "FSDP_MIN_NUM_PARAMS": "100000000",
        "FSDP_FORWARD_PREFETCH": "false",
        "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_SYNC_MODULE_STATES": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": "false",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    }
    assert same_on_all(ranks(2, by_launcher, env=written)) == ("fsdp", False, "FSDPBlock")


def trained_as_told() -> tuple[str, str, float]:
    """Three steps of what the environment asks for."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = tiny(accelerator.process_index)
    model, optimizer = accelerator.prepare(model, adamw(model))
    for words in batches(3):
        loss = loss_of(model, share(words, accelerator.process_index, 2))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    mean = accelerator.gather(loss.detach()).mean().item()
    return accelerator.distributed_type.value, type(model.layers[0]).__name__, mean


FILE = """
distributed_type: FSDP
use_cpu: true
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_backward_prefetch: BACKWARD_PRE
"""


@pytest.mark.parametrize("how", ["flags", long_run_param("file")])
def test_a_launch_by_flags_or_by_a_file_shards(ranks: RankServer, tmp_path: Path, how: str) -> None:
    """F3: on the CPU too, and never by another strategy. Ranks train with its variables."""
    model = tiny()
    optimizer = adamw(model)
    for words in batches(3):
        loss = loss_of(model, words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    (tmp_path / "config.yaml").write_text(FILE)
    wrap = "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP"
    flags = {
        "flags": ("--cpu", "-n", "2", "--use_fsdp", "--fsdp_version", "2", wrap),
        "file": ("--config_file", f"{tmp_path}/config.yaml"),
    }
    for kind, block, mean in ranks(2, trained_as_told, env=launch_variables(*flags[how])):
        assert (kind, block) == ("FSDP", "FSDPBlock")
        assert mean == pytest.approx(loss.item(), abs=1e-4)


# --- loading


def loaded_once(kind: str) -> tuple[dict[str, torch.Tensor], bool]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    init = INITIALIZERS.get(kind)
    plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True, param_init_fn=init, **LAYERS)
    accelerator = Accelerator(fsdp_plugin=plugin)
    with torch.device("meta" if accelerator.process_index or kind != "once" else "cpu"):
        model = tiny()
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.backward(loss_of(model, next(batches(1))))
    optimizer.step()
    optimizer.zero_grad()
    return whole(model), model.head.weight is model.embed.weight


def test_only_rank_0_needs_the_weights(ranks: RankServer) -> None:
    """The others may have a model on the meta device; ties hold."""
    values, tied = same_on_all(ranks(2, loaded_once, "once"))
    assert tied
    model = tiny()
    optimizer = adamw(model)
    loss_of(model, next(batches(1))).backward()
    optimizer.step()
    for name, value in whole(model).items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=1e-5)
    filled, tied = same_on_all(ranks(2, loaded_once, "filled"))
    assert tied
    assert torch.equal(filled["frozen.weight"], torch.full((8, 8), 0.25))


@pytest.mark.parametrize(("kind", "first"), [("nowhere", "embed.weight"), *UNFILLED.items()])
def test_values_that_nobody_gives(ranks: RankServer, kind: str, first: str) -> None:
    """What a param_init_fn does not write to has no values either: memory as it was is none."""
    with pytest.raises(RanksError, match=rf"there are no values in {re.escape(first)}") as caught:
        ranks(2, loaded_once, kind)
    assert caught.value.causing_kinds() == {"PrepareError"}


def loaded_after_init() -> bool:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, load_checkpoint_in_model

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(param_init_fn=to_empty, **LAYERS))
    with torch.device("meta"):
        model = tiny()
    model = accelerator.prepare(model)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(tiny().state_dict(), f"{folder}/pytorch_model.bin")
        load_checkpoint_in_model(model, folder)
    model(next(batches(1)))
    values = whole(model)
    return all(torch.equal(values[name], value) for name, value in tiny().named_parameters())


def test_values_by_a_load_after_a_param_init_fn(ranks: RankServer) -> None:
    """The usual to_empty leaves all of them to a load."""
    assert same_on_all(ranks(2, loaded_after_init))


# --- functions that older scripts call


def sharded_by_hand() -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.core.errors import PrepareError
    from accelerate.utils import (
        fsdp2_apply_ac,
        fsdp2_load_full_state_dict,
        fsdp2_prepare_model,
        get_fsdp2_grad_scaler,
    )

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS))
    model, calls = tiny(1), []
    model.layers[0].up.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    loss_of(fsdp2_apply_ac(accelerator, model), next(batches(1))).backward()
    found: dict[str, Any] = {"computed": len(calls)}
    model = fsdp2_prepare_model(accelerator, tiny(1))
    found["sharded"] = all(type(p).__name__ == "DTensor" for p in model.parameters())
    state = tiny(0).state_dict() if accelerator.is_main_process else {}
    fsdp2_load_full_state_dict(accelerator, model, state)
    values = whole(model)
    found["loaded"] = all(torch.equal(values[name], value) for name, value in tiny(0).named_parameters())
    found["buffer"] = torch.equal(model.get_buffer("scale"), torch.full((3,), 0.5))
    found["scaler"] = type(get_fsdp2_grad_scaler(device="cpu")) is torch.amp.GradScaler
    # Programs that shard by themselves make the model empty, shard it, and then load.
    bare: Any = tiny(1).to("meta")
    for module in (*bare.layers, bare):
        fully_shard(module)
    held = list(bare.parameters())
    fsdp2_load_full_state_dict(accelerator, bare, state)
    found["the same objects"] = all(map(operator.is_, held, bare.parameters()))
    values = whole(bare)
    found["filled"] = all(torch.equal(values[name], value) for name, value in tiny(0).named_parameters())
    found["filled"] &= torch.equal(bare.get_buffer("scale"), torch.full((3,), 0.5))
    words = next(batches(1))
    with torch.no_grad():
        found["computes"] = torch.equal(loss_of(bare, words), loss_of(tiny(0), words))
    state.pop("layers.0.up.weight", None)
    with pytest.raises(PrepareError, match=r"the state does not fit the \w+: it lacks layers.0.up.weight"):
        fsdp2_load_full_state_dict(accelerator, model, state)
    state["layers.0.up.weight"] = torch.ones(2)
    with pytest.raises(PrepareError, match=r"layers.0.up.weight has the shape \(2,\), not"):
        fsdp2_load_full_state_dict(accelerator, model, state)
    return found


def test_functions_of_older_scripts(ranks: RankServer) -> None:
    found = same_on_all(ranks(2, sharded_by_hand))
    assert found.pop("computed") == 2
    assert len(found) == 7
    assert all(found.values()), found


def shard_without_fsdp() -> None:
    from accelerate import Accelerator
    from accelerate.utils import fsdp2_prepare_model

    fsdp2_prepare_model(Accelerator(), tiny())


def test_a_strategy_that_shards_nothing(ranks: RankServer) -> None:
    with pytest.raises(RanksError, match="trains by ddp, which shards nothing in place") as caught:
        ranks(2, shard_without_fsdp)
    assert caught.value.causing_kinds() == {"PrepareError"}


# --- optimizers


def optimizers() -> dict[str, Any]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS))
    rank = accelerator.process_index

    def step(model: nn.Module, optimizer: Any, words: torch.Tensor) -> None:
        accelerator.backward(loss_of(model, words))
        optimizer.step()
        optimizer.zero_grad()

    found = {}
    words = list(batches(2))
    for how in ("late", "after", "stepped", "evaluated"):
        model = tiny()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if how == "stepped":
            loss_of(model, words[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
            model, optimizer = accelerator.prepare(model, optimizer)
        elif how == "late":
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(optimizer)
            step(model, optimizer, share(words[0], rank, 2))
        else:
            model = accelerator.prepare(model)
            if how == "evaluated":
                # torch leaves the root's whole parameters in their places.
                with torch.no_grad():
                    model(words[0])
            optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            step(model, optimizer, share(words[0], rank, 2))
        step(model, optimizer, share(words[1], rank, 2))
        found[how] = whole(model)
    return found


def test_an_optimizer_follows_the_parameters(ranks: RankServer) -> None:
    """Prepared later, made afterwards or after an evaluation, or with a step whose momentum follows."""
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for words in batches(2):
        loss_of(model, words).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = whole(model)
    for how, found in same_on_all(ranks(2, optimizers)).items():
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=f"{how}: {name}")


# --- models without layers of a known class


class WithValue(nn.Module):
    """A model with a head of its own, as of a policy and its value; it does not say what the layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = tiny(), nn.Linear(WORDS, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.value(self.policy(words))


def wrapped_beside_others(version: int) -> tuple[list[int], list[int], list[str], list[bool]]:
    """The units in models that name no layers; those where two of three have a named class; the warnings."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    counts: list[list[int]] = []
    texts: list[str] = []
    trained: list[bool] = []
    words = next(batches(1))
    for names in (None, ["Block"]):
        models: list[nn.Module] = [nn.Linear(WORDS, 1), WithValue(), tiny()]
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=names,
            activation_checkpointing=True,
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            prepared_models = accelerator.prepare(*models)
            prepared_models += (accelerator.prepare(nn.Linear(2, 2)),)
        texts += [
            str(each.message).partition(":")[0] for each in caught if "layers of a" in str(each.message)
        ]
        kinds = (FSDPModule, FullyShardedDataParallel)
        counts.append([sum(isinstance(m, kinds) for m in model.modules()) for model in prepared_models])
        head, with_value, _, _ = prepared_models
        accelerator.backward(with_value(words).mean() + head(torch.ones(2, WORDS)).mean())
        trained.append(any(p.grad is not None for p in head.parameters()))
        accelerator.free_memory()
    return counts[0], counts[1], texts, trained


@pytest.mark.parametrize("version", [1, 2])
def test_a_model_without_known_layers_is_one_unit(ranks: RankServer, version: int) -> None:
    """As in 1.x, and with a warning; a model in a wrapper that names no layers still has its own."""
    text = "auto_wrap_policy is transformer_based_wrap, and no layers of a Linear are known"
    for found in ranks(2, wrapped_beside_others, version):
        assert found == ([1, 3, 3, 1], [1, 3, 3, 1], [text, text], [True, True])


# --- what is refused


def wrong(case: str) -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    options: dict[str, Any] = {
        "class": {**LAYERS, "transformer_cls_names_to_wrap": ["Blok"]},
        "ignored": {"ignored_modules": r"layers\.0"},
        "nothing ignored": {"ignored_modules": "nosuch"},
        "recomputed": {"activation_checkpointing": True},
    }.get(case, {})
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**options))
    model: nn.Module = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if case == "foreign":
        optimizer = torch.optim.SGD(tiny().parameters(), lr=0.1)
    if case == "types":
        model.get_submodule("layers.1").double()
    if case == "scalar":
        model.alpha = nn.Parameter(torch.tensor(1.0))
    if case == "sparse":
        model.more = nn.EmbeddingBag(2, 2, sparse=True)
    if case == "differs" and accelerator.process_index == 1:
        model.more = nn.Linear(1, 1)
    accelerator.prepare(model, optimizer)
    if case == "local":
        from accelerate.local_sgd import LocalSGD

        with LocalSGD(accelerator, model, 2):
            pass


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("class", "UnknownNameError", "did you mean 'Block'"),
        ("ignored", "PrepareError", "ignored modules hold trained parameters: layers.0.norm.weight"),
        ("nothing ignored", "SettingError", "matches no module of the Tiny"),
        ("recomputed", "PrepareError", "no module of the model is wrapped"),
        ("foreign", "PrepareError", "prepare both in one call"),
        ("types", "PrepareError", "embed.weight in torch.float32, layers.1.norm.weight in torch.float64"),
        ("scalar", "PrepareError", "the parameter alpha is a scalar"),
        ("sparse", "PrepareError", "the gradients of more.weight are sparse"),
        ("differs", "PrepareError", "of rank 1 has other parameters than that of rank 0"),
        ("local", "LocalTrainingStrategyError", "LocalSGD does not work with the strategy 'fsdp'"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(ranks: RankServer, case: str, kind: str, words: str) -> None:
    with pytest.raises(RanksError) as caught:
        ranks(2, wrong, case)
    assert caught.value.causing_kinds() == {kind}, str(caught.value)
    assert all(words in outcome.message for outcome in caught.value.causes()), str(caught.value)


def train_with_ignored() -> tuple[bool, bool]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(ignored_modules="frozen"))
    model = tiny(accelerator.process_index)
    model = accelerator.prepare(model)
    state = accelerator.get_state_dict(model)
    same = not state or torch.equal(state["frozen.weight"], tiny(0).frozen.weight)
    return type(model.frozen.weight) is nn.Parameter, same


def test_ignored_modules_stay_whole(ranks: RankServer) -> None:
    assert ranks(2, train_with_ignored) == [(True, True)] * 2


def train_pretrained(case: str) -> tuple[int, bool, float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS), mixed_precision=case)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    words = torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(1))
    for _ in range(5):
        loss = model(input_ids=words, labels=words).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.isfinite(norm)
    blocks = sum(type(part).__name__ == "FSDPLlamaDecoderLayer" for part in model.modules())
    return blocks, model.lm_head.weight is model.model.embed_tokens.weight, loss.item()


@needs("transformers")
@pytest.mark.parametrize("case", ["no", long_run_param("bf16")])
def test_a_model_of_transformers_names_its_layers_itself(ranks: RankServer, case: str) -> None:
    blocks, tied, loss = same_on_all(ranks(2, train_pretrained, case, timeout=120))
    assert (blocks, tied) == (2, True)
    assert loss < 3.4


def export_model(folder: str) -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS))
    model = accelerator.prepare(tiny(accelerator.process_index))
    accelerator.save_model(model, folder)


def test_save_model_exports_the_whole_model(ranks: RankServer, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    ranks(2, export_model, str(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    fresh = tiny(3)
    fresh.load_state_dict(saved, strict=False)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), tiny(0).parameters(), strict=True))


def trainer(version: int, folder: str) -> tuple[str, float, list[tuple[int, float]]]:
    """Train by a version of FSDP, or by DDP (0); return also the parameters and the decay of each group."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    rows = torch.randint(32, (32, 6))
    sharded_by = {"fsdp_version": version, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    arguments = TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, weight_decay=0.1, fsdp=bool(version), fsdp_config=sharded_by if version else None,
    )  # fmt: skip
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    ours = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data)
    loss = ours.train().training_loss
    groups = [(len(group["params"]), group["weight_decay"]) for group in ours.optimizer.param_groups]
    return ours.accelerator.strategy.name, loss, groups


@needs("transformers")
def test_the_trainer_of_transformers_shards_when_it_is_asked_to(ranks: RankServer, tmp_path: Path) -> None:
    """F3: it does not train by replicas without a word; the loss is theirs, and so is the weight decay."""
    ddp, *sharded = (
        ranks(2, trainer, version, str(tmp_path), timeout=120, env={"TMPDIR": str(tmp_path)})
        for version in range(3)
    )
    assert [[name for name, *_ in each] for each in (ddp, *sharded)] == [
        [n] * 2 for n in ("ddp", "fsdp1", "fsdp")
    ]
    for rank, (_, loss, groups) in enumerate(ddp):
        assert [decay for _, decay in groups] == [0.1, 0.0]
        assert groups[0][0] > groups[1][0] > 0
        for each in sharded:
            assert each[rank][1] == pytest.approx(loss, abs=1e-5)
            assert each[rank][2] == groups


def names_of_parameters(kind: str) -> tuple[set[str], set[str]]:
    """Names of parameters as a walk over children composes them, and as ``named_parameters`` has them."""
    from transformers.trainer_pt_utils import get_parameter_names

    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.utils import TorchTensorParallelConfig

    plan = TorchTensorParallelConfig(plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"})
    mesh = ParallelismConfig(tp_size=2, tp_handler=plan)
    options: dict[str, Any] = {"ddp": {}, "tp": {"parallelism_config": mesh}}
    for version in (1, 2):
        options[f"fsdp{version}"] = {"fsdp_version": version, **LAYERS}
    options["flat"] = {"fsdp_version": 1, "use_orig_params": False, **LAYERS}
    given = options[kind]
    if "fsdp_version" in given:
        given = {"fsdp_plugin": FullyShardedDataParallelPlugin(**given)}
    model = Accelerator(**given).prepare(tiny().requires_grad_(True))
    walked, named = set[str](), set[str]()
    for name, module in {
        "": model, "compiled.": torch.compile(model), "loss.": nn.ModuleDict({"model": model}),
    }.items():  # fmt: skip
        walked |= {name + each for each in get_parameter_names(module, [])}
        named |= {name + each for each, _ in module.named_parameters(remove_duplicate=False)}
        members = dict(module.named_parameters())
        assert {*map(id, members.values())} == {*map(id, module.parameters())}
        assert all(module.get_parameter(each) is value for each, value in members.items())
    return walked, named


@needs("transformers")
@pytest.mark.parametrize("kind", ["ddp", "tp", "fsdp1", "flat", "fsdp2"])
def test_names_of_parameters_are_those_of_a_walk_over_children(ranks: RankServer, kind: str) -> None:
    """The Trainer compares them to choose what decays, also in a loss that has the model as a part."""
    walked, named = same_on_all(ranks(2, names_of_parameters, kind))
    assert named <= walked  # which names biases that are None, too
    assert any("_fsdp_wrapped_module" in name for name in named) == (kind in ("fsdp1", "flat"))


def wrapped_before_sharding() -> list[str]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    class Wrapped(Accelerator):
        def _prepare_fsdp2(self, *args: Any) -> tuple[Any, ...]:
            each = (arg.to(torch.float32) if isinstance(arg, nn.Module) else arg for arg in args)
            return super()._prepare_fsdp2(*each)

    accelerator = Wrapped(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = nn.Linear(4, 4).to(torch.bfloat16)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = whole(model)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    changed = whole(model)
    assert any(not torch.equal(before[name], value) for name, value in changed.items())
    return [str(p.dtype) for p in model.parameters()]


def test_a_program_that_wraps_the_step_before_sharding_changes_the_model(ranks: RankServer) -> None:
    """ms-swift does on NPUs, where it stores the weights in float32."""
    assert same_on_all(ranks(2, wrapped_before_sharding)) == ["torch.float32", "torch.float32"]


def further_models() -> list[bool]:
    """Distillation trainers shard a copy in place; tests of axolotl take the tuple."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator: Any = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    copy, model = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
    (alone,) = accelerator._prepare_fsdp2(copy)
    prepared, optimizer = accelerator._prepare_fsdp2(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(prepared(torch.ones(2, 4)).sum())
    optimizer.step()
    sharded = [type(each.weight).__name__ == "DTensor" for each in (copy, model)]
    return [alone is copy, prepared is model, *sharded, accelerator._models == [copy, model]]


def test_a_program_may_call_the_step_before_sharding_itself(ranks: RankServer) -> None:
    assert same_on_all(ranks(2, further_models)) == [True] * 5


def sharded_by_the_program(replaced: bool, precision: str) -> tuple[Numbers, int]:
    import accelerate.accelerator as public
    from accelerate.utils import fsdp_utils

    own, calls = public.fsdp2_prepare_model, []

    def shard(accelerator: Any, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        calls.append(model)
        plugin, state = accelerator.state.fsdp_plugin, copy.deepcopy(model.state_dict())
        plugin.set_auto_wrap_policy(model)
        takes: Any = fsdp_utils.fsdp2_prepare_auto_wrap_policy(plugin, model)
        policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
        for module in [*filter(takes, model.modules()), model]:
            fully_shard(module, mp_policy=policy, reshard_after_forward=plugin.reshard_after_forward)
        fsdp_utils.fsdp2_load_full_state_dict(accelerator, model, state)
        return model

    if replaced:
        public.fsdp2_prepare_model = shard
    try:
        return prepared(LAYERS, 2, precision), len(calls)
    finally:
        public.fsdp2_prepare_model = own


@pytest.mark.parametrize("precision", [long_run_param("no"), "bf16"])
def test_a_program_that_replaces_the_sharding_shards_itself(ranks: RankServer, precision: str) -> None:
    """Axolotl replaces the function that ``Accelerator`` calls; it trains to the same numbers."""
    (theirs, calls), _ = ranks(2, sharded_by_the_program, True, precision)
    (ours, _), _ = ranks(2, sharded_by_the_program, False, precision)
    assert calls == 1
    close(theirs, ours, 1e-6 if precision == "no" else 1e-2)


def checkpointed_by_the_program() -> tuple[list[int], bool, bool, list[float]]:
    """Replace ``fsdp2_apply_ac``; the program checkpoints the first of two blocks, by torch's wrapper."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    import accelerate.accelerator as public
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    def apply_ac(accelerator: Accelerator, model: nn.Module) -> nn.Module:
        model.layers[0] = checkpoint_wrapper(model.layers[0])
        return model

    public.fsdp2_apply_ac = apply_ac
    model, calls = tiny(0), [0, 0]
    for place, block in enumerate(model.layers):
        block.register_forward_pre_hook(lambda *_, place=place: calls.__setitem__(place, calls[place] + 1))
    names = model.state_dict().keys()
    plugin = FullyShardedDataParallelPlugin(**LAYERS, activation_checkpointing=True)
    accelerator = Accelerator(fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses = []
    for words in batches(STEPS):
        loss = loss_of(model, share(words, accelerator.process_index, accelerator.num_processes))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    keeps_names = accelerator.get_state_dict(model).keys() in (names, set())  # it is on rank 0
    return calls, "not applied" in str(accelerator.effects()), keeps_names, losses


def shared_out_by_the_program() -> list[float]:
    """Replace ``prepare_data_loader``: the processes of an expert parallel group read the same rows."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.data_loader import prepare_data_loader

    class OwnData(Accelerator):
        def prepare_data_loader(self, data_loader: Any, *_: Any, **__: Any) -> Any:
            return prepare_data_loader(data_loader, num_processes=1, process_index=0)

    accelerator, model = OwnData(fsdp_plugin=FullyShardedDataParallelPlugin()), nn.Linear(1, 1)
    data = DataLoader(torch.arange(4.0)[:, None])
    return [row.item() for row in accelerator.prepare(model, adamw(model), data)[2]]


def sharded_beside_ddp() -> tuple[list[float], list[str], list[str]]:
    from torch.distributed.fsdp import fully_shard

    from accelerate import Accelerator
    from accelerate.core.errors import PrepareError

    class OwnSharding(Accelerator):
        def prepare_model(self, model: Any, *_: Any, **__: Any) -> Any:
            return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    model = tiny(0)
    for part in [*model.layers, model]:
        fully_shard(part)
    errors = []
    try:
        Accelerator().prepare(model)
    except PrepareError as error:
        errors.append(str(error))
    accelerator = OwnSharding()
    prepared, optimizer = accelerator.prepare(model, adamw(model))
    assert prepared is model
    assert accelerator._models[-1] is model
    losses = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for words in batches(STEPS):
            mine = share(words, accelerator.process_index, accelerator.num_processes)
            loss = loss_of(model, mine)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses, errors, [str(each.message) for each in warned if "optimizer.step" in str(each.message)]


def test_a_program_that_replaces_the_checkpointing_checkpoints_itself(ranks: RankServer) -> None:
    """Axolotl and others replace the function that ``Accelerator`` calls before it shards."""
    calls, is_refused, keeps_names, losses = same_on_all(ranks(2, checkpointed_by_the_program))
    assert calls == [2 * STEPS, STEPS]
    assert keeps_names
    assert not is_refused
    assert losses == pytest.approx(plain(1)[0], abs=1e-5)


def test_a_program_shares_out_the_data_of_a_sharded_model(ranks: RankServer) -> None:
    assert ranks(2, shared_out_by_the_program) == [[0, 1, 2, 3]] * 2


@pytest.mark.skipif(is_torch("<2.9"), reason="on a CPU, FSDP2 of 2.6 fails, and of 2.8 adds gradients up")
def test_a_program_that_shards_beside_plain_data_parallelism(ranks: RankServer) -> None:
    """Unsloth's FSDP2 replaces ``prepare_model``, so that nothing copies the model; else it is refused."""
    losses, errors, warned = same_on_all(ranks(2, sharded_beside_ddp))
    assert losses == pytest.approx(plain(1)[0], abs=1e-5)
    assert "cannot be replicated: it is sharded over all processes" in errors[0]
    assert "--use_fsdp" in errors[0]
    assert warned == []


def unwrapped() -> None:
    """Under version 1, whose class is around the model."""
    from peft import LoraConfig, get_peft_model

    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import extract_model_from_parallel, is_peft_model

    inner = get_peft_model(tiny(), LoraConfig(target_modules=["up"]))
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1, **LAYERS))
    model, _ = accelerator.prepare(inner, adamw(inner))
    assert model is not inner
    assert is_peft_model(model)
    assert extract_model_from_parallel(model) is accelerator.unwrap_model(model) is inner
    assert extract_model_from_parallel(nn.ModuleList([model]), recursive=True)[0] is inner


@needs("peft")
def test_the_module_inside_is_found_without_an_accelerator(ranks: RankServer) -> None:
    """trl asks ``is_peft_model`` of the wrapped model, and took it for one without adapters."""
    ranks(2, unwrapped)


def adapter_names() -> tuple[list[str], list[str], list[str]]:
    """Names of adapters: in a plain model, and in the state of a wrapped one, by both of its modules."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    inner = get_peft_model(tiny(), LoraConfig(target_modules=["up"]))
    names = [*get_peft_model_state_dict(inner)]
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1, **LAYERS))
    model, _ = accelerator.prepare(inner, adamw(inner))
    state = accelerator.get_state_dict(model)
    modules = {name for name, _ in model.named_modules()}
    assert modules == {name for name, _ in accelerator.unwrap_model(model).named_modules()}
    assert all(model.get_submodule(name) is not None for name in modules)
    assert not [name for name in modules if "_fsdp_wrapped_module" in name]
    saved = [*get_peft_model_state_dict(accelerator.unwrap_model(model), state_dict=state)]
    return names, saved, [*get_peft_model_state_dict(model, state_dict=state)]


@needs("peft")
def test_names_are_those_of_the_user(ranks: RankServer) -> None:
    """peft chooses adapters by names of modules: those of torch's wrapper gave a file without weights."""
    names, saved, of_wrapped = ranks(2, adapter_names)[0]  # rank 0 has the state
    assert names
    assert saved == of_wrapped == names


def adapter_in_files(folder: str, kind: str, replaced: bool, load: bool) -> tuple[float, int]:
    """Save or load a trained adapter; return a loss, and the all-gathers of the save or load."""
    from peft import LoraConfig, get_peft_model

    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import fsdp_utils, load_fsdp_model, save_fsdp_model

    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, state_dict_type=kind, **LAYERS)
    accelerator = Accelerator(fsdp_plugin=plugin)
    model: Any = get_peft_model(tiny(), LoraConfig(target_modules=["down"], init_lora_weights=False))
    with torch.no_grad():
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            parameter.fill_(0.0 if load else 0.3)
    model, optimizer = accelerator.prepare(model, adamw(model))
    get_state = fsdp_utils._get_model_state_dict
    if replaced:
        fsdp_utils._get_model_state_dict = lambda model, **more: get_state(model, **more)
    gathers = 0
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather = getattr(dist, name)

    def count(*args: Any, **more: Any) -> Any:
        nonlocal gathers
        gathers += 1
        return gather(*args, **more)

    setattr(dist, name, count)
    (load_fsdp_model if load else save_fsdp_model)(plugin, accelerator, model, folder, adapter_only=True)
    setattr(dist, name, gather)
    loss = loss_of(model, next(batches(1)))
    accelerator.backward(loss)
    optimizer.step()
    return loss.item(), gathers


@needs("peft")
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_adapters_are_loaded_before_the_first_forward(
    ranks: RankServer, tmp_path: Path, kind: str, replaced: bool
) -> None:
    """The Trainer resumes so. Names in PEFT's files are known without gathering: the values are, once."""
    saved, loaded = (
        same_on_all(ranks(2, adapter_in_files, str(tmp_path), kind, replaced, load)) for load in (False, True)
    )
    assert loaded[0] == pytest.approx(saved[0], abs=1e-6)
    if not replaced:
        # Two layers and the rest; the load of a part of a shard has DTensors to fill.
        assert (saved[1], loaded[1]) == (3, 3 if "SHARDED" in kind else 0)
