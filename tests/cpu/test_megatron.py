"""Training by megatron-core on processes, with the patches of tests/support/megatron.py."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support.long_run import LONG_RUN
from tests.support.packages import is_installed
from tests.support.ranks import RankServer, same_on_all

PRELOAD = (
    "megatron.core.models.gpt",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)
pytestmark = pytest.mark.skipif(
    not (is_installed("megatron.core") and is_installed("transformers")),
    reason="megatron-core is not installed",
)

ROWS, LENGTH, WORDS = 4, 12, 67
State = dict[str, torch.Tensor]
# Numbers of a run: losses, norms before clipping, learning rates, the weights at its end.
Run = tuple[list[float], list[float], list[float], State]


def gpt2() -> Any:
    """Tied embeddings, a vocabulary that does not divide, a frozen layer norm."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=32, n_layer=2, n_head=4,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.transformer.h[0].ln_2.requires_grad_(False)
    return model


def llama() -> Any:
    """Groups of queries that share a key, gated layers, an output layer of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS = {"gpt2": gpt2, "llama": llama}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, as transformers' scripts make them."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    small = [p for name, p in trained if p.dim() < 2]
    large = [p for name, p in trained if p.dim() >= 2]
    return torch.optim.AdamW(
        [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}],
        lr=1e-2,
        eps=1e-3,  # gradients that are zero but for rounding stay without effect
    )


def samples(batches: int) -> list[dict[str, torch.Tensor]]:
    """Rows of tokens, some with padding at their end."""
    chance = torch.Generator().manual_seed(1)
    ids = torch.randint(2, WORDS, (batches * ROWS, LENGTH), generator=chance)
    rows = []
    for number, row in enumerate(ids):
        length = LENGTH - 3 * (number % 2)
        mask = (torch.arange(LENGTH) < length).long()
        rows.append({"input_ids": row, "attention_mask": mask, "labels": row.masked_fill(mask == 0, -100)})
    return rows


def schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def plainly(kind: str, steps: int, window: int) -> Run:
    """What the user would write for one process."""
    model = MODELS[kind]()
    optimizer = optimizer_of(model)
    scheduler = schedule(optimizer)
    losses, norms, rates = [], [], []
    batches = iter(DataLoader(samples(steps * window), batch_size=ROWS))  # type: ignore[arg-type]
    for _ in range(steps):
        whole = [next(batches) for _ in range(window)]
        tokens = [(batch["labels"][:, 1:] != -100).sum() for batch in whole]
        for batch, count in zip(whole, tokens, strict=True):
            loss = model(**batch).loss
            losses.append(loss.item())
            (loss * count / sum(tokens)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses, norms, rates, {name: value.detach().clone() for name, value in model.state_dict().items()}


def accelerator_of(window: int = 1, precision: str = "no", **options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin, MegatronLMPlugin
    from tests.support.megatron import on_cpu

    on_cpu()
    return Accelerator(
        cpu=True,
        mixed_precision=precision,
        megatron_lm_plugin=MegatronLMPlugin(**options),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=window, step_scheduler_once=True),
    )


def prepared(accelerator: Any, kind: str, batches: int) -> tuple[Any, Any, Any, Any]:
    model = MODELS[kind]()
    if accelerator.process_index:  # the weights of process 0 count
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    optimizer = optimizer_of(model)
    scheduler = schedule(optimizer)
    plugin = accelerator.state.megatron_lm_plugin
    micro_batch = ROWS // accelerator.strategy.data_shard.count // plugin.num_micro_batches
    loader = DataLoader(samples(batches), batch_size=micro_batch)  # type: ignore[arg-type]
    if kind == "gpt2":  # the batches that it joins do not count as those of the user's loader
        loader = accelerator.prepare(loader)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    assert (plugin.micro_batch_size, plugin.global_batch_size) == (micro_batch, ROWS)
    return prepared


def trained(kind: str, steps: int, window: int, precision: str = "no", **options: Any) -> Run:
    """The same loop with the few lines changed."""
    accelerator = accelerator_of(window, precision, **options)
    model, optimizer, loader, scheduler = prepared(accelerator, kind, steps * window)
    return looped(accelerator, model, optimizer, loader, scheduler)


def looped(accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> Run:
    losses, norms, rates = [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            losses.append(over_copies(accelerator, batch, loss))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses, norms, rates, accelerator.get_state_dict(model)


def over_copies(accelerator: Any, batch: Mapping[str, torch.Tensor], loss: torch.Tensor) -> float:
    """The mean over the tokens of all copies of the model."""
    count = (batch["labels"][:, 1:] != -100).sum()
    both = accelerator.reduce(torch.stack([loss.detach() * count, count.float()]), "sum")
    return (both[0] / both[1]).item()


def check(ours: Run, plain: Run, near: float = 1e-5) -> None:
    assert ours[0] == pytest.approx(plain[0], abs=near)
    assert ours[1] == pytest.approx(plain[1], abs=near)
    assert ours[2] == pytest.approx(plain[2])
    assert ours[3].keys() == plain[3].keys()
    for name, value in plain[3].items():
        torch.testing.assert_close(
            ours[3][name], value, rtol=0, atol=10 * near, msg=lambda m, n=name: f"{n}: {m}"
        )


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp_degree": 2, "num_micro_batches": 2},
    "dp": {},
    "pp": {"pp_degree": 2, "num_micro_batches": 2},
    "sharded": {"use_distributed_optimizer": True},
}


def in_all_layouts(folder: str) -> dict[Any, Any]:
    """One program after another, in processes that have imported the engine once."""
    from megatron.core import parallel_state

    from tests.support.megatron import dropout_streams

    found: dict[Any, Any] = {"plain": plain_numbers()}
    for name, options in LAYOUTS.items():
        for kind in MODELS:
            found[kind, name] = trained(kind, 3, 2, **options)
        if name == "tp":
            found["resumed"] = resumed(folder, options)
            found["bf16"] = trained("llama", 2, 1, "bf16", **options)
            found["eval"] = evaluated(options)
            found["dropout"] = with_dropout(folder, options)
        if name == "pp":
            found["streams"] = dropout_streams(accelerator_of(**options).strategy.layout)
            found["frozen"] = frozen_stage(options)
        if name == "sharded":
            found["elsewhere"] = continued(folder, options)
            found["means"] = means()
        parallel_state.destroy_model_parallel()
    return found


def frozen_stage(options: dict[str, Any]) -> list[float]:
    """Norms of the gradients of a model whose first stage trains nothing."""
    accelerator, model = accelerator_of(**options), llama()
    for part in (model.model.embed_tokens, model.model.layers[0]):
        part.requires_grad_(False)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    batch = next(iter(DataLoader(samples(1), batch_size=ROWS)))  # type: ignore[arg-type]
    norms = []
    for kind in (2.0, math.inf, 1.0):
        accelerator.backward(model(**batch).loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0, kind)))
        optimizer.zero_grad()
    return norms


def with_dropout(folder: str, options: dict[str, Any]) -> tuple[State, Any]:
    """Weights that both ranks hold, trained with dropout after unequal seeds; loaded states of attention."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    accelerator = accelerator_of(**options, hidden_dropout=0.5)
    model, optimizer, _, scheduler = prepared(accelerator, "gpt2", 2)
    torch.manual_seed(accelerator.process_index)
    looped(accelerator, model, optimizer, some(accelerator, 0, 2), scheduler)
    sharded = {n for n, p in model.named_parameters() if getattr(p, "tensor_model_parallel", False)}
    held = {n: p.detach().clone() for n, p in model.named_parameters() if n not in sharded}
    tracker: Any = get_cuda_rng_tracker()
    tracker.set_states({"attention": torch.tensor([accelerator.process_index])})
    accelerator.save_state(f"{folder}/dropout")
    tracker.set_states({})
    accelerator.load_state(f"{folder}/dropout")
    states, _ = tracker.get_states(), tracker.reset()
    return held, states


def plain_numbers() -> dict[str, Any]:
    """What the user's own models give; here, where transformers is imported anyway."""
    found: dict[str, Any] = {kind: plainly(kind, 3, 2) for kind in MODELS}
    found["unwindowed"] = plainly("llama", 2, 1)
    batch = next(iter(DataLoader(samples(1), batch_size=ROWS)))  # type: ignore[arg-type]
    told = gpt2().eval()(**batch)
    found["eval"] = told.loss.item(), told.logits.detach()
    model = gpt2()
    for batch in DataLoader(samples(2), batch_size=ROWS // 2):  # type: ignore[arg-type]
        (model(**batch).loss / 4).backward()
    found["means"] = nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    return found


def some(accelerator: Any, first: int, last: int) -> list[Any]:
    """Batches of all copies of the model, from one to another."""
    rows, copies = samples(last), accelerator.strategy.data_shard
    loader = DataLoader(rows[first * ROWS :], batch_size=ROWS)  # type: ignore[arg-type]
    return [{k: v.chunk(copies.count)[copies.index] for k, v in batch.items()} for batch in loader]


def resumed(folder: str, options: dict[str, Any]) -> tuple[Run, Run]:
    """Two steps and one more; and the one more after loading what was saved between them."""
    accelerator = accelerator_of(**options)
    model, optimizer, _, scheduler = prepared(accelerator, "llama", 3)
    looped(accelerator, model, optimizer, some(accelerator, 0, 2), scheduler)
    accelerator.save_state(f"{folder}/between")
    whole = looped(accelerator, model, optimizer, some(accelerator, 2, 3), scheduler)
    return whole, continued(folder, options)


def continued(folder: str, options: dict[str, Any]) -> Run:
    """The third step of a run that was saved, perhaps in another layout."""
    accelerator = accelerator_of(**options)
    model, optimizer, _, scheduler = prepared(accelerator, "llama", 3)
    accelerator.load_state(f"{folder}/between")
    return looped(accelerator, model, optimizer, some(accelerator, 2, 3), scheduler)


# The layouts in which a model is saved in an open window; by default tensor parallelism has both, others one.
SAVED_LAYOUTS: dict[str, list[str]] = {
    "gpt2": list(LAYOUTS) if LONG_RUN else ["tp", "pp"],
    "llama": list(LAYOUTS) if LONG_RUN else ["tp", "dp", "sharded"],
}


def in_open_windows(folder: str) -> dict[Any, list[Run]]:
    """Of all layouts and models; in an order in which each loads what the one before it has saved."""
    from megatron.core import parallel_state

    found: dict[Any, list[Run]] = {}
    for name in LAYOUTS:
        for kind in MODELS:
            if name in SAVED_LAYOUTS[kind]:
                found[kind, name] = in_an_open_window(f"{folder}/{kind}", name, kind)
        parallel_state.destroy_model_parallel()
    found["means"] = in_an_open_window(f"{folder}/llama", "means", "llama")
    found["clipped"] = saved_after_clipping(folder)
    return found


def in_four_open_windows(folder: str) -> list[Run]:
    return in_an_open_window(f"{folder}/llama", "both", "llama")


# Layouts without one before them.
MORE_WINDOWS: dict[str, dict[str, Any]] = {
    "means": {"calculate_per_token_loss": False},
    "both": {"tp_degree": 2, "num_micro_batches": 2},
}


def saved_after_clipping(folder: str) -> list[str]:
    """What is said where the gradients that the next step would take are reduced, and scaled."""
    accelerator = accelerator_of(1)
    model, *_ = prepared(accelerator, "llama", 1)
    (batch,) = some(accelerator, 0, 1)
    accelerator.backward(model(**batch).loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.save_state(f"{folder}/clipped")
    return [str(warning.message) for warning in caught]


def in_an_open_window(folder: str, name: str, kind: str) -> list[Run]:
    """The rest of a run; the same after a resume in its layout, and of one that another layout has saved."""
    options = {**LAYOUTS, **MORE_WINDOWS}[name]
    accelerator = accelerator_of(3, **options)
    model, optimizer, _, scheduler = prepared(accelerator, kind, 6)
    looped(accelerator, model, optimizer, some(accelerator, 0, 2), scheduler)
    accelerator.save_state(f"{folder}-{name}")
    found = [looped(accelerator, model, optimizer, some(accelerator, 2, 6), scheduler)]
    order = SAVED_LAYOUTS[kind]
    before = dict(zip(order, (name, *order), strict=False)).get(name, name)
    for saved in (name, before):
        accelerator = accelerator_of(3, **options)
        found.append(resumed_in_window(f"{folder}-{saved}", kind, accelerator))
    return found


def resumed_in_window(saved: str, kind: str, accelerator: Any) -> Run:
    """The last four of the six batches of two windows, of which the first had two when it was saved."""
    model = MODELS[kind]()
    optimizer = optimizer_of(model)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, schedule(optimizer))
    accelerator.load_state(saved)
    return looped(accelerator, model, optimizer, some(accelerator, 2, 6), scheduler)


def without_megatron(folder: str) -> dict[str, list[Run]]:
    """The rest of a run of each user's own model, after what it saves; and of the last layout's run."""
    from accelerate import Accelerator

    found: dict[str, list[Run]] = {}
    for kind in MODELS:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        model = MODELS[kind]()
        optimizer = optimizer_of(model)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, schedule(optimizer))
        looped(accelerator, model, optimizer, some(accelerator, 0, 2), scheduler)
        accelerator.save_state(f"{folder}/{kind}-alone")
        whole = looped(accelerator, model, optimizer, some(accelerator, 2, 6), scheduler)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        last = f"{folder}/{kind}-{SAVED_LAYOUTS[kind][-1]}"
        found[kind] = [whole, resumed_in_window(last, kind, accelerator)]
    return found


def in_windows(folder: str, saved: str, first: int) -> Run:
    """Two windows of ``accelerator.windows``, saved in the first one; or the rest, after a load."""
    from accelerate import Accelerator

    accelerator = accelerator_of() if saved != "alone" else Accelerator(cpu=True)
    model = llama()
    optimizer = optimizer_of(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    if first:
        accelerator.load_state(f"{folder}/windows")
    norms = []
    for window in accelerator.windows(some(accelerator, first, 6), 3):
        for batch in window:
            accelerator.backward(model(**batch).loss)
            if first == 0 and not norms and window.count == 2:
                accelerator.save_state(f"{folder}/windows")
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return [], norms, [], accelerator.get_state_dict(model)


def from_the_plain_model(folder: str) -> dict[str, Run]:
    """A window that the user's own model has begun, ended with two processes for each layer."""
    return {
        kind: resumed_in_window(f"{folder}/{kind}-alone", kind, accelerator_of(3, **LAYOUTS["tp"]))
        for kind in MODELS
    }


def alone(folder: str) -> Run:
    """The same in one process, by the user's own model."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = llama()
    optimizer = optimizer_of(model)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, schedule(optimizer))
    accelerator.load_state(f"{folder}/between")
    return looped(accelerator, model, optimizer, some(accelerator, 2, 3), scheduler)


def evaluated(options: dict[str, Any]) -> tuple[float, torch.Tensor, torch.Tensor, bool]:
    """A loss in evaluation, logits without labels, logits next to a loss; and whether gradients stayed."""
    accelerator = accelerator_of(**options, return_logits=True)
    model, *_ = prepared(accelerator, "gpt2", 1)
    (batch,) = some(accelerator, 0, 1)
    model.eval()
    told = model(**batch)
    only = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    assert only.loss is None
    return told.loss.item(), only.logits, told.logits, model.calls == 0


def means() -> tuple[float, float]:
    """Gradients of a mean of means, and the plugin's own limit, which counts where the loop does not clip."""
    accelerator = accelerator_of(2, calculate_per_token_loss=False, gradient_clipping=0.1)
    model, optimizer, *_ = prepared(accelerator, "gpt2", 2)
    norm = 0.0
    for batch in some(accelerator, 0, 2):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), float("inf")).item()
            optimizer.zero_grad()
    for batch in some(accelerator, 0, 2):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
    stepper: Any = model.stepper
    return norm, stepper.last_norm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def runs(ranks: RankServer, folder: str) -> list[dict[Any, Any]]:
    return ranks(2, in_all_layouts, folder, timeout=240)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MODELS)
def test_it_trains_as_the_users_own_model_does(runs: Any, kind: str, layout: str) -> None:
    """B1, B7: losses, norms, rates and weights, with accumulation and micro-batches of unequal tokens."""
    ours, theirs = (run[kind, layout] for run in runs)
    assert ours[:3] == theirs[:3]
    assert not theirs[3], "states are whole on process 0 only"
    check(ours, runs[0]["plain"][kind])


def in_four_processes() -> list[Run]:
    from megatron.core import parallel_state

    found = []
    for options in FOUR:
        found.append(trained("llama", 2, 1, **options))
        parallel_state.destroy_model_parallel()
    return found


FOUR: list[dict[str, Any]] = [
    {"tp_degree": 2},
    {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2},
]


def test_it_trains_so_in_two_dimensions(runs: Any, ranks: RankServer) -> None:
    """Each layer on two processes, and two copies of the model or two stages."""
    for ours in ranks(4, in_four_processes, timeout=240)[0]:
        check(ours, runs[0]["plain"]["unwindowed"])


def test_activations_that_are_computed_again_are_the_same(single: Any) -> None:
    """With dropout, which is drawn again, and a loss function of the user's own."""
    kept, *others = single[2]
    assert kept[1][0] > 0
    for other in others:
        assert other[0] == pytest.approx(kept[0], abs=1e-5)
        assert other[1] == pytest.approx(kept[1], abs=1e-5)


def test_dropout_is_equal_on_ranks_that_share_layers(runs: Any) -> None:
    """Their replicated weights drifted apart silently; no checkpoint had the state of attention's dropout."""
    (first, one), (second, two) = (run["dropout"] for run in runs)
    assert len(first) > 4
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert (one["attention"].item(), two["attention"].item()) == (0, 1)


def test_stages_drop_elements_of_their_own(runs: Any) -> None:
    """Each layer of a stage had the masks of a layer of the first stage, in every micro-batch."""
    (first, one, kept), (second, two, kept_too) = (run["streams"] for run in runs)
    assert (first, second) == ([3], [103])
    assert not set(one) & set(two)
    assert kept
    assert kept_too


def test_norms_of_any_kind_count_on_a_stage_that_trains_nothing(runs: Any) -> None:
    """It ended in an error inside of the norm, and the other stages waited for it."""
    one, other = (run["frozen"] for run in runs)
    assert one == other
    assert 0 < one[1] < one[0] < one[2]


def test_a_run_in_two_parts_is_the_run_in_one(runs: Any) -> None:
    """D11"""
    whole, parts = runs[0]["resumed"]
    check_equal(parts, whole)


def test_states_load_in_another_layout_and_in_one_process(runs: Any, single: Any) -> None:
    """Saved with two processes for each layer; loaded with a sharded optimizer, and by the plain model."""
    whole = runs[0]["resumed"][0]
    check(runs[0]["elsewhere"], whole)
    check(single[0], whole)


@pytest.fixture(scope="module")
def windows(ranks: RankServer, folder: str) -> list[dict[Any, list[Run]]]:
    return ranks(2, in_open_windows, folder, timeout=120)


@pytest.mark.parametrize(
    ("kind", "layout"), [(kind, name) for kind, names in SAVED_LAYOUTS.items() for name in names]
)
def test_an_open_window_is_saved(windows: Any, kind: str, layout: str) -> None:
    """D4: to the bit in the same layout; weights that are tied over two stages, parts of a fused one."""
    whole, same, other = windows[0][kind, layout]
    assert len(whole[1]) == 2, "two steps"
    check_equal(same, whole)
    check(other, whole)


def check_equal(ours: Run, other: Run) -> None:
    assert ours[:3] == other[:3]
    for name, value in other[3].items():
        torch.testing.assert_close(ours[3][name], value, rtol=0, atol=0)


def test_an_open_window_of_other_means_is_saved(windows: Any, ranks: RankServer, folder: str) -> None:
    """The mean over micro-batches; and, with two dimensions, tokens that the ranks of a layer share."""
    whole, same, _ = windows[0]["means"]
    check_equal(same, whole)
    whole, same, _ = ranks(4, in_four_open_windows, folder, timeout=120)[0]
    check_equal(same, whole)
    check(whole, windows[0]["llama", "tp"][0])


def test_a_window_of_the_loader_is_saved(ranks: RankServer, folder: str) -> None:
    """``accelerator.windows`` knows its size, and no setting does."""
    whole = ranks(2, in_windows, folder, "dp", 0, timeout=120)[0]
    check_equal(ranks(2, in_windows, folder, "dp", 2, timeout=120)[0], whole)
    check(ranks(1, in_windows, folder, "alone", 2, timeout=120)[0], whole)


def test_gradients_that_are_clipped_are_not_saved(windows: Any) -> None:
    assert any("are not in the checkpoint" in said for said in windows[0]["clipped"])


def test_an_open_window_goes_on_elsewhere(windows: Any, ranks: RankServer, folder: str) -> None:
    """Without Megatron-LM, and back."""
    plain = ranks(1, without_megatron, folder, timeout=120)[0]
    again = ranks(2, from_the_plain_model, folder, timeout=120)[0]
    for kind in MODELS:
        whole, resumed = plain[kind]
        check(windows[0][kind, "tp"][0], whole)
        check(resumed, whole)
        check(again[kind], whole)


def test_16_bit_models_keep_32_bit_weights(runs: Any) -> None:
    ours, plain = runs[0]["bf16"], runs[0]["plain"]["unwindowed"]
    check(ours, plain, near=2e-2)
    assert {value.dtype for value in ours[3].values()} == {torch.float32}


def test_evaluation_gives_losses_and_logits_of_the_users_model(runs: Any) -> None:
    loss, only, told, untouched = runs[1]["eval"]
    expected, logits = runs[1]["plain"]["eval"]
    assert loss == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(only, logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(told, logits, rtol=0, atol=1e-5)
    assert untouched


def test_means_of_means_where_tokens_do_not_count(runs: Any) -> None:
    """B7: the norm is that of both halves of each of two batches, equally weighted."""
    norm, limited = runs[0]["means"]
    expected = runs[0]["plain"]["means"]
    assert [norm, limited] == pytest.approx([expected, expected], abs=1e-5)
    assert expected > 0.1


# --- functions that older scripts call


def public_functions() -> dict[str, Any]:
    from accelerate.core.errors import AccelerateError
    from accelerate.utils import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
    from accelerate.utils import megatron_lm as functions

    accelerator = accelerator_of()
    found: dict[str, Any] = {}
    functions.initialize(accelerator)
    functions.finish_mpu_init()
    rank = accelerator.process_index
    losses = [torch.tensor(1.0 + rank), torch.tensor([4.0 * rank])]
    found["mean"] = functions.avg_losses_across_data_parallel_group(losses).tolist()
    tensors = {"x": torch.full((2, 1), rank), "n": torch.tensor(rank), "name": "kept"}
    gathered = functions.gather_across_data_parallel_groups(tensors)
    found["gathered"] = gathered["x"].flatten().tolist(), gathered["n"].tolist(), gathered["name"]
    plain = optimizer_of(llama())
    dummy = MegatronLMDummyScheduler(plain, total_num_steps=8, warmup_num_steps=2)
    schedule_of_dummy = functions.prepare_scheduler(accelerator, plain, dummy)
    found["rates"] = []
    for _ in range(3):
        found["rates"].append(plain.param_groups[0]["lr"])
        plain.step()
        schedule_of_dummy.step()
    found["others stay"] = (
        functions.prepare_scheduler(accelerator, plain, schedule_of_dummy) is schedule_of_dummy
    )
    loader = functions.prepare_data_loader(accelerator, DataLoader(samples(2), batch_size=2))  # type: ignore[arg-type]
    found["batches"] = len(loader)
    model = llama()
    model, _ = accelerator.prepare(model, optimizer_of(model))
    found["optimizer"] = type(functions.prepare_optimizer(accelerator, model)).__name__
    refused = {
        "provider": functions.model_provider_func,
        "all": lambda: functions.prepare_model_optimizer_scheduler(accelerator),
        "arguments": lambda: functions.initialize(accelerator, args_defaults={"a": 1}),
        "data": lambda: functions.prepare_data_loader(accelerator, MegatronLMDummyDataLoader()),
        "plain": lambda: functions.prepare_optimizer(accelerator, llama()),
    }
    for name, call in refused.items():
        with pytest.raises(AccelerateError) as caught:
            call()
        found[name] = str(caught.value)
    return found


def test_functions_of_older_scripts(ranks: RankServer) -> None:
    found = same_on_all(ranks(2, public_functions, timeout=120))
    assert found["mean"] == [1.5, 2.0]
    assert found["gathered"] == ([0, 0, 1, 1], [0, 1], "kept")
    assert found["rates"][0] < found["rates"][1] < found["rates"][2]
    assert found["others stay"]
    assert found["batches"] == 2 * ROWS // 4
    assert found["optimizer"] == "FP32Optimizer"
    assert "accelerator.prepare(model, optimizer)" in found["provider"]
    assert "accelerator.prepare(model, optimizer, scheduler)" in found["all"]
    assert "other_megatron_args" in found["arguments"]
    assert "datasets" in found["data"]
    assert "LlamaForCausalLM has no optimizer" in found["plain"]


# --- what is refused


def refused() -> dict[str, tuple[str, str]]:
    """Mistakes in a loop, in one process: kind and text of the error of each."""
    found: dict[str, tuple[str, str]] = {}

    def tried(name: str, call: Any) -> None:
        try:
            call()
        except ValueError as error:
            found[name] = type(error).__name__, str(error)

    accelerator = accelerator_of(num_micro_batches=2)
    model, optimizer, loader, _ = prepared(accelerator, "gpt2", 1)
    batch = next(iter(loader))
    found["type"] = accelerator.distributed_type.value, type(optimizer).__name__
    tried("odd", lambda: model(**{k: v[:3] for k, v in batch.items()}))
    tried("no labels", lambda: model(input_ids=batch["input_ids"]))
    tried("column", lambda: model(**batch, token_type_ids=batch["labels"]))
    tried("scaled", lambda: accelerator.backward(model(**batch).loss * 2))
    tried("twice", lambda: model(**batch))
    optimizer.zero_grad()
    accelerator.backward(model(**{"position_ids": None, **batch}).loss)
    tried("some", lambda: accelerator.clip_grad_norm_(list(model.parameters())[:2], 1.0))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    tried("after clipping", lambda: model(**batch))
    tried("second model", lambda: accelerator.prepare(gpt2()))
    optimizer.step()
    accelerator.free_memory()
    found["schedule"] = stand_in(accelerator)
    fused = accelerator_of(other_megatron_args={"bias_dropout_fusion": True}).prepare(llama())
    found["fused"] = type(fused).__name__, str(fused.module_config.bias_dropout_fusion)

    def again(change: Any, **options: Any) -> Any:
        other = llama()
        return lambda: accelerator_of(**options).prepare(other, change(other) or optimizer_of(other))

    tried("kind", lambda: accelerator_of().prepare(nn.Linear(2, 2)))
    tried("groups", again(_key_apart))
    tried("given", again(optimizer_of, other_megatron_args={"layernorm_epsilon": 1e-5, "bf16": True}))
    tried("frozen", again(lambda m: m.model.layers[0].self_attn.k_proj.requires_grad_(False) and None))
    tried("foreign", lambda: accelerator_of().prepare(llama(), optimizer_of(llama())))
    tried("degrees", lambda: accelerator_of(tp_degree=2))
    return found


def in_one_process(folder: str) -> tuple[Run, dict[str, tuple[str, str]], list[Run]]:
    return alone(folder), refused(), again_and_again()


def again_and_again() -> list[Run]:
    """The same run, keeping activations and computing them again; and with a loss of one's own."""
    found = []
    for options in AGAIN:
        torch.manual_seed(5)
        found.append(trained("gpt2", 2, 1, hidden_dropout=0.1, **options))
    return found


def mean_of_tokens(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    """As the public package calls it: a loss, and what is reported of it."""
    loss = (losses * mask).sum() / mask.sum()
    return loss, {"lm loss": loss.detach().clone()}


AGAIN: list[dict[str, Any]] = [
    {},
    {"recompute_activations": True},
    {"recompute_granularity": "full"},
    {"custom_loss_function": mean_of_tokens},
]


@pytest.fixture(scope="module")
def single(ranks: RankServer, runs: Any, folder: str) -> Any:
    """After the runs, whose state it loads."""
    return ranks(1, in_one_process, folder, timeout=240)[0]


def stand_in(accelerator: Any) -> tuple[str, str]:
    """An engine was let go: another is prepared, with a schedule that the engine describes."""
    from accelerate.utils import MegatronLMDummyScheduler

    model = gpt2()
    optimizer = optimizer_of(model)
    dummy: Any = MegatronLMDummyScheduler(optimizer, total_num_steps=4, warmup_num_steps=1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, dummy)
    rates: list[float] = []
    for batch in some(accelerator, 0, 3):
        rates.append(round(optimizer.param_groups[1]["lr"], 6))
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        scheduler.step()
    return type(scheduler.scheduler).__name__, str(rates)


def _key_apart(model: Any) -> torch.optim.Optimizer:
    key = model.model.layers[0].self_attn.k_proj.weight
    rest = [parameter for parameter in model.parameters() if parameter is not key]
    return torch.optim.AdamW([{"params": [key]}, {"params": rest}], lr=1e-2)


REFUSED = {
    "odd": "a batch of 3 samples does not divide into 2 micro-batches",
    "no labels": "a batch without labels was given to a model in training",
    "column": "the batch for Megatron-LM has token_type_ids",
    "scaled": "backward was given a loss that is the model's times 2",
    "twice": "a model was called again before its loss was given to backward",
    "some": "clipping of other gradients than all those of the prepared model",
    "after clipping": "between clipping its gradients and the optimizer's step",
    "second model": "several models for Megatron-LM",
    "kind": "Megatron-LM cannot train a Linear",
    "groups": "are in different groups of the optimizer",
    "given": "other_megatron_args gives bf16, layernorm_epsilon once more",
    "frozen": "are frozen, and some are trained",
    "foreign": "parameters of no model in this prepare",
    "degrees": "tp_degree=2 times pp_degree=1 is 2, which does not divide 1 processes",
}


def test_mistakes_are_told_in_words(single: Any) -> None:
    found = dict(single[1])
    assert found.pop("type") == ("MEGATRON_LM", "MegatronLMOptimizerWrapper")
    assert found.pop("fused") == ("MegatronEngine", "True")
    assert found.pop("schedule") == ("LambdaLR", "[0.0, 0.01, 0.006667]")
    assert found.keys() == REFUSED.keys()
    for name, words in REFUSED.items():
        assert words in found[name][1], name


def unpatched() -> str:
    from accelerate import Accelerator
    from accelerate.core.errors import DeviceError

    with pytest.raises(DeviceError) as caught:
        Accelerator(cpu=True)
    return str(caught.value)


def test_without_its_devices_it_refuses_on_every_process(ranks: RankServer) -> None:
    """F3: asked for by the launcher's variable; nothing else trains instead."""
    text = same_on_all(ranks(2, unpatched, env={"ACCELERATE_USE_MEGATRON_LM": "true"}))
    assert text.startswith("Megatron-LM trains on cuda devices only, and this process has cpu")
    assert "ParallelismConfig(tp_size=..., pp_size=...)" in text


def absent() -> str:
    import sys

    from accelerate import Accelerator
    from accelerate.core.errors import MissingExtraError

    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("megatron")]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "megatron.core", None)  # for Python a module that cannot be found
        with pytest.raises(MissingExtraError) as caught:
            Accelerator(cpu=True)
    return str(caught.value)


def test_without_the_package_it_says_what_to_install(ranks: RankServer) -> None:
    (text,) = ranks(1, absent, env={"ACCELERATE_USE_MEGATRON_LM": "true"})
    assert text.splitlines()[-1].strip() == "fix: pip install megatron-core"
