"""Errors around a sharded model: one process alone, states that are no whole, options that lie."""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.core.errors import PrepareError
from tests.support.long_run import select_cases
from tests.support.ranks import RankServer, same_on_all
from tests.support.scripts import run_to_exit
from tests.support.sharded_models import adamw, batches, loss_of, tiny
from tests.support.torch_versions import is_torch
from tests.support.watchdog import shown_error

# What the rank server imports once for this module.
PRELOAD = ("transformers.optimization",)
LAYERS: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}


def alone(call: str, others: str, folder: str, options: dict[str, Any]) -> None:
    """Rank 0 makes a call that is everybody's; the others train, or wait."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS, **options))
    model = tiny()
    model, optimizer = accelerator.prepare(model, adamw(model))
    words = next(batches(1))

    def step() -> None:
        accelerator.backward(loss_of(model, words))
        optimizer.step()
        optimizer.zero_grad()

    step()
    if accelerator.is_main_process:
        calls = {
            "state": lambda: accelerator.get_state_dict(model),
            "save": lambda: accelerator.save_state(folder),
            "model": lambda: accelerator.save_model(model, folder),
            "gather": lambda: accelerator.gather(torch.ones(1)),
        }
        calls[call]()
    if others == "train":
        step()
    elif others == "wait":
        accelerator.wait_for_everyone()


@pytest.mark.parametrize(
    ("call", "others"),
    select_cases(
        product(("state", "save", "gather"), ("train", "wait")),
        [("state", "train"), ("save", "wait"), ("gather", "train")],
    ),
)
def test_a_call_of_one_rank_alone_is_an_error_on_all(
    ranks: RankServer, tmp_path: Path, call: str, others: str
) -> None:
    """C5: what only the main process saves or gathers; no rank hangs."""
    outcomes = ranks.outcomes(2, alone, call, others, str(tmp_path / "x"), {}, grace=30, timeout=60)
    assert {outcome.status for outcome in outcomes} <= {"raised", "returned"}, list(map(str, outcomes))
    first, *rest = outcomes
    assert first.status == "raised"
    assert first.kind in ("CollectiveError", "CheckpointPeerError"), str(first)
    assert [outcome.status for outcome in rest] == ["raised"], str(rest[0])
    word = {"state": "get_state_dict", "save": "save the checkpoint", "gather": "gather"}[call]
    assert any(word in outcome.message for outcome in outcomes), list(map(str, outcomes))


def test_a_call_of_one_rank_alone_among_replicas_is_an_error_on_all(
    ranks: RankServer, tmp_path: Path
) -> None:
    """C5: the others wait in groups of their own."""
    copies = {"sharding_strategy": "HYBRID_SHARD", "replicate_size": 2}
    outcomes = ranks.outcomes(4, alone, "state", "train", str(tmp_path), copies, grace=30, timeout=60)
    assert {outcome.status for outcome in outcomes} == {"raised"}, list(map(str, outcomes))
    assert "get_state_dict" in outcomes[0].message


def optimizers(version: int) -> dict[str, tuple[str, str]]:
    """(Error, warning) of each optimizer that takes more than single elements, in prepare and three steps."""
    from transformers.optimization import Adafactor

    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    class TransformersAdafactor(Adafactor):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr=lr, relative_step=False)

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=version))
    kinds: dict[str, Any] = {
        "Adafactor": torch.optim.Adafactor,
        "TransformersAdafactor": TransformersAdafactor,
        "LBFGS": torch.optim.LBFGS,
        "AdamW": torch.optim.AdamW,
    }
    if hasattr(torch.optim, "Muon"):
        kinds["Muon"] = torch.optim.Muon
    found: dict[str, tuple[str, str]] = {}
    for name, kind in kinds.items():
        model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 1, bias=False))
        error = ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                model, optimizer = accelerator.prepare(model, kind(model.parameters(), lr=0.01))
                for _ in range(3):

                    def closure(model: Any = model) -> torch.Tensor:
                        loss = model(torch.ones(2, 4)).square().mean()
                        accelerator.backward(loss)
                        return loss

                    closure()
                    optimizer.step(closure) if name == "LBFGS" else optimizer.step()
            except ValueError as raised:
                error = str(raised)
        said = [
            str(each.message) for each in caught if name.removeprefix("Transformers") in str(each.message)
        ]
        found[name] = error.partition("\n")[0], " ".join(said).partition(":")[0]
    return found


def test_optimizers_of_whole_matrices_are_named(ranks: RankServer) -> None:
    """Not torch's raw words, and not another result without a word."""
    sharded = same_on_all(ranks(2, optimizers, 2))
    refused = {name: "cannot step sharded parameters" in error for name, (error, _) in sharded.items()}
    if is_torch("<2.12"):
        refused.pop("Muon", None)  # steps shards of any shape there
    if is_torch("<2.10"):
        del refused["Adafactor"]  # torch takes its means over the rank's piece there, without an error
    assert refused == {name: name != "AdamW" for name in refused}
    first, second = ranks(2, optimizers, 1)
    for name in {"LBFGS", "Muon"} & first.keys():
        assert first[name] == second[name] == (f"{name} cannot train under FSDP1", "")
    assert first["AdamW"] == ("", "")
    for name in ("Adafactor", "TransformersAdafactor"):
        assert "takes its means over this rank's piece" in first[name][1]
        assert second[name] == ("", "")


class Encoder(nn.Module):
    """A forward, and methods that compute without it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(8, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def encode(self, words: torch.Tensor) -> torch.Tensor:
        return self.body(self.embed(words)) * self.scale

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.encode(words).sum(-1)

    def fail(self) -> None:
        raise RuntimeError("of the user's own")


def bypasses(options: dict[str, Any]) -> dict[str, str]:
    """What each call around the forward says, before the first step and after it."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    more: dict[str, Any] = (
        {"parallelism_config": ParallelismConfig(**options)}
        if "dp_replicate_size" in options
        else {"fsdp_plugin": FullyShardedDataParallelPlugin(**options)}
    )
    accelerator = Accelerator(cpu=True, **more)
    model = Encoder()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    words, rows = torch.arange(4), torch.ones(2, 4)
    calls = {
        "method": lambda: model.encode(words),
        "submodule": lambda: model.body[1](rows),
        "embedding": lambda: model.embed(words),
        "forward": lambda: accelerator.unwrap_model(model).forward(words),
        "fail": lambda: model.fail(),
    }
    errors: dict[str, str] = {}
    for moment in ("before", "after"):
        for name, call in calls.items():
            try:
                call()
            except RuntimeError as error:  # noqa: PERF203 - each of them is
                errors[f"{name} {moment}"] = str(shown_error(error))
        accelerator.backward(model(words).mean())
        optimizer.step()
        optimizer.zero_grad()
    return errors


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fsdp_version": 1},
        {"fsdp_version": 1, "use_orig_params": False},
        {"dp_replicate_size": 2},
    ],
    ids=str,
)
def test_calls_around_the_forward_are_named(ranks: RankServer, options: dict[str, Any]) -> None:
    """Which method or submodule, at which line, and what to write instead."""
    for errors in ranks(2, bypasses, options):
        for moment in ("before", "after"):
            called = {
                "method": "Encoder.encode was called at test_fsdp_bad_input.py:",
                "submodule": "the submodule body.1 (Linear) was called at test_fsdp_bad_input.py:",
                "embedding": "the submodule embed (Embedding) was called at test_fsdp_bad_input.py:",
                "forward": "Encoder.forward was called at test_fsdp_bad_input.py:",
            }
            for name, start in called.items():
                text = errors[f"{name} {moment}"]
                assert text.startswith(start), text
                assert "fix: " in text
            assert errors[f"fail {moment}"] == "of the user's own"
            if not options:
                assert 'register_fsdp_forward_method(model, "encode")' in errors[f"method {moment}"]
                assert "call the prepared model itself" in errors[f"forward {moment}"]


def called_before(version: int) -> list[str]:
    """What the forward says after that of a unit; what the user's own module inside of its wrapper says."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Sequential"],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    texts: list[str] = []
    for unit_first in (True, False):
        model = accelerator.prepare(Encoder())
        try:
            if unit_first:
                model.body(torch.ones(2, 4))
                model(torch.arange(4))
            else:
                accelerator.unwrap_model(model)(torch.arange(4))
        except (RuntimeError, AssertionError) as error:
            texts.append(str(shown_error(error)))
        accelerator.free_memory(model)
    return texts


@pytest.mark.parametrize("version", [1, 2])
def test_a_unit_that_is_called_before_its_model_is_said(ranks: RankServer, version: int) -> None:
    """The error comes at the call of the model: its words say what was wrong before it."""
    for first, *inner in ranks(2, called_before, version):
        assert "called before the prepared model itself" in first
        assert "fix: call the prepared model, model(...), once" in first
        # FSDP1 alone gathers in a wrapper, which a call of the module inside goes around.
        assert [text.partition(" was called")[0] for text in inner] == ["the Encoder itself"][: 2 - version]


def told_method(told: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and weights of three steps through a method that torch was told of, or through the forward."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    torch.manual_seed(0)
    model = Encoder()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if told:
        register_fsdp_forward_method(model, "encode")  # type: ignore[arg-type]
    words, loss = torch.arange(4) + accelerator.process_index, torch.zeros(())
    params = list(model.parameters())
    for _ in range(3):
        with torch.no_grad():  # a look at other weights, such as an average
            for parameter in params:
                parameter.mul_(0.5)
            seen = model(words)  # whose forward calls the method
            if told:
                torch.testing.assert_close(model.encode(words).sum(-1), seen, rtol=0, atol=0)
            for parameter in params:
                parameter.mul_(2.0)
        loss = (model.encode(words).sum(-1) if told else model(words)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), dict(accelerator.get_state_dict(model) or {})


def test_a_method_that_torch_was_told_of_trains_as_the_forward(ranks: RankServer) -> None:
    """What the error tells people to write. A call without gradients left the weights of then in the root."""
    through_method, through_forward = ranks(2, told_method, True), ranks(2, told_method, False)
    for (loss, state), (other_loss, other) in zip(through_method, through_forward, strict=True):
        assert loss == other_loss
        torch.testing.assert_close(state, other, rtol=0, atol=0)


SCRIPT = """
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from tests.cpu.test_fsdp_bad_input import Encoder
model = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin()).prepare(Encoder())
model.encode(torch.arange(4))
"""


def test_a_script_that_goes_around_the_forward_ends_with_our_words(ranks: RankServer, tmp_path: Path) -> None:
    """The traceback shows the call, and the error says what to write."""
    for code, output in run_to_exit(ranks, 2, SCRIPT, tmp_path):
        assert code == 1
        assert "PrepareError: Encoder.encode was called at script.py:6" in output


def step_unprepared(sizes: dict[str, int], options: dict[str, Any]) -> list[str]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import ParallelismConfig

    if sizes:
        accelerator = Accelerator(parallelism_config=ParallelismConfig(**sizes))
    else:
        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS, **options))
    model, words = tiny(), next(batches(1)).to(accelerator.device)
    optimizer, other = adamw(model), adamw(tiny())
    model = accelerator.prepare(model)
    accelerator.backward(loss_of(model, words))
    other.step()  # of a model that nobody has prepared
    with pytest.raises(PrepareError) as error:
        optimizer.step()
    accelerator.prepare(optimizer).step()
    return [error.value.what, error.value.fix]


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {}),
        ({"dp_shard_size": 2}, {}),
        ({}, {"fsdp_version": 1, "use_orig_params": False, "ignored_modules": "frozen"}),
    ],
)
def test_the_step_of_an_optimizer_that_was_never_prepared_is_refused(
    ranks: RankServer, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    """It stepped what the model had before: nothing trained, and nothing was said."""
    what, fix = same_on_all(ranks(2, step_unprepared, sizes, options))
    assert what == "the AdamW steps parameters that sharding has replaced"
    assert fix == "model, optimizer = accelerator.prepare(model, optimizer)"
