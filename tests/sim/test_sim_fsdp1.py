"""Version 1 of sharding on two simulated accelerators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.core.errors import PrepareError
from tests.cpu.test_fsdp1 import LAYERS, accelerator_of, params_in_state, whole
from tests.cpu.test_fsdp_bad_input import step_unprepared
from tests.support.numbers import close
from tests.support.ranks import RankServer, same_on_all
from tests.support.sharded_models import adamw, batches, loss_of, plain, share, tiny


def trained() -> Any:
    accelerator = accelerator_of({"auto_wrap_policy": "transformer_based_wrap"})
    model = tiny(accelerator.process_index)
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses, norms = [], []
    for words in batches(8):
        mine = share(words, accelerator.process_index, 2).to(accelerator.device)
        loss = loss_of(model, mine)
        accelerator.backward(loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    rests = {unit.local_values().device.type for unit in accelerator.strategy._flat_params()}
    return (losses, norms, params_in_state(whole(accelerator, model))), rests


def test_it_trains_to_the_numbers_of_one_cpu_process(ranks: RankServer) -> None:
    """B7: the optimizer was made for parameters on the host, which are others on the device."""
    ours, rests = same_on_all(ranks(2, trained))
    assert rests == {"sim"}
    close(ours, plain(1), 1e-4)


def test_the_step_of_an_optimizer_that_was_never_prepared_is_refused(ranks: RankServer) -> None:
    """torch's class would keep the parameters; here the device has others, and nothing trained."""
    what, _ = same_on_all(ranks(2, step_unprepared, {}, {"fsdp_version": 1}))
    assert what == "the AdamW steps parameters that sharding has replaced"


# --- parameters that rest on the host


@contextmanager
def host_data() -> Iterator[None]:
    """Let parameters rest on the host: torch takes it for granted that its own devices can do so."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_has_compatible_shallow_copy_type", lambda one, other: True, "PrivateUse1")
        yield


class Branch(nn.Module):
    """Three layers, of which a forward may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        first, second, third = self.layers
        return third(second(first(x)) if whole else first(x)).square().sum()


def branched(
    offload: bool,
    options: dict[str, Any],
    each: bool,
    precision: str,
    way: str,
    save: str = "",
    load: str = "",
) -> list[float]:
    """The weights after windows of two, whose micro-batches take the second layer or not.

    The first of them is saved, or done before.
    """
    from accelerate.utils import GradientAccumulationPlugin

    accelerator = accelerator_of(
        {"transformer_cls_names_to_wrap": ["Linear"], **LAYERS, **options, "cpu_offload": offload},
        precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=each),
    )
    torch.manual_seed(0)
    model = Branch()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    if load:
        accelerator.load_state(load)
    for number, step in list(enumerate(way))[bool(load) :]:
        with accelerator.accumulate(model):
            x = torch.ones(2, 4, device=accelerator.device) * (number + accelerator.process_index)
            accelerator.backward(model(x, step == "w"))
            accelerator.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
        if save and number == 0:
            accelerator.save_state(save)
    assert {unit.flat.is_cpu for unit in accelerator.strategy._flat_params()} == {offload}
    return [x for value in whole(accelerator, model).values() for x in value.flatten().tolist()]


def offloaded_and_not(precision: str) -> list[tuple[str, list[float], list[float]]]:
    strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    results = []
    with host_data():
        for strategy, original, each, way in product(
            strategies, (False, True), (False, True), ("wwww", "wwoo", "owow")
        ):
            options = {"sharding_strategy": strategy, "use_orig_params": original}
            one, other = (branched(offload, options, each, precision, way) for offload in (False, True))
            results.append((f"{options} {each} {way}", one, other))
    return results


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_offloaded_gradients_add_up_and_are_cleared(ranks: RankServer, precision: str) -> None:
    """torch keeps those of the last reduction only, and gives them again to a layer without new ones."""
    for case, one, other in same_on_all(ranks(2, offloaded_and_not, precision)):
        assert one == pytest.approx(other, abs=1e-6), case


def left_out_last(offload: bool) -> str:
    with host_data(), pytest.raises(PrepareError) as error:
        branched(offload, {}, False, "no", "wo")
    return error.value.what


@pytest.mark.parametrize("offload", [False, True])
def test_a_layer_that_ends_its_window_early_is_refused(ranks: RankServer, offload: bool) -> None:
    """Offloaded, its optimizer stepped with gradients of the step before; else torch had an assertion."""
    assert "did not reach a layer" in same_on_all(ranks(2, left_out_last, offload))


def resumed(folder: str) -> list[tuple[list[float], list[float]]]:
    results = []
    with host_data():
        for original, way in product((False, True), ("ww", "wo")):
            options, path = {"use_orig_params": original}, f"{folder}/{original}-{way}"
            expected = branched(True, options, way == "wo", "no", way, save=path)
            results.append((expected, branched(True, options, way == "wo", "no", way, load=path)))
    return results


def test_an_open_window_of_offloaded_gradients_goes_on(ranks: RankServer, tmp_path: Path) -> None:
    """torch dropped what a checkpoint had put back on the host."""
    for expected, found_again in same_on_all(ranks(2, resumed, str(tmp_path))):
        assert found_again == pytest.approx(expected, abs=1e-6)


# --- memory


def prepared_bytes(original: bool, offload: bool) -> tuple[float, float]:
    """What ``prepare`` leaves on the device, and its peak there, in layers."""
    options = {
        "use_orig_params": original,
        "cpu_offload": offload,
        "transformer_cls_names_to_wrap": ["Linear"],
    }
    accelerator, memory = accelerator_of({**LAYERS, **options}), torch.get_device_module("sim")
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
    before, layer = memory.memory_allocated(), 256 * 256 * 4
    memory.reset_peak_memory_stats()
    with host_data():
        model = accelerator.prepare(model)
    return tuple((size() - before) / layer for size in (memory.memory_allocated, memory.max_memory_allocated))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("original", [False, True])
def test_prepare_has_one_whole_layer_in_memory_at_a_time(
    ranks: RankServer, original: bool, offload: bool
) -> None:
    """Flat parameters kept the whole model in memory meanwhile, offloaded ones their shards for ever."""
    after, peak = same_on_all(ranks(2, prepared_bytes, original, offload))
    shards = 0 if offload else 8
    assert after == pytest.approx(shards, abs=0.1)
    assert peak < shards + 3
