"""Stages of layers on gloo processes train to the numbers of one process."""

from __future__ import annotations

import copy
import re
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from accelerate.core.errors import AccelerateError, PrepareError
from tests.laws.test_7_parity import BATCHES
from tests.support import parity
from tests.support.long_run import LONG_RUN, long_run_param
from tests.support.parity import Numbers
from tests.support.ranks import RankServer, same_on_all
from tests.support.scripts import run_to_exit
from tests.support.watchdog import speed_up_watchdog

# What the rank server imports once for this module.
PRELOAD = ("transformers.models.llama.modeling_llama",)


def made(window: int = 1, sizes: dict[str, int] | None = None, **options: Any) -> Any:
    """An ``Accelerator`` with stages."""
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import PipelineParallelConfig, TorchTensorParallelConfig

    handlers: dict[str, Any] = {"pp_handler": PipelineParallelConfig(**options)}
    if sizes and "tp_size" in sizes:
        # The weight of both is on the first and on the last stage.
        tied = {"embed": "rowwise", "head": "colwise_rep"}
        handlers["tp_handler"] = TorchTensorParallelConfig(plan={**parity.PLAN, **tied})
    config = ParallelismConfig(**(sizes or {"pp_size": 2}), **handlers)
    return Accelerator(cpu=True, parallelism_config=config, gradient_accumulation_steps=window)


def trained(
    window: int, sizes: dict[str, int], options: dict[str, Any], blocks: int
) -> tuple[Numbers, list[str], int]:
    from accelerate import init_empty_weights

    accelerator = made(window, sizes, **options)
    # It is enough if rank 0 has read the weights.
    with init_empty_weights() if accelerator.process_index else nullcontext():
        model = parity.decoder(blocks=blocks)
    optimizer = parity.adamw(model)
    rows = parity.ROWS // accelerator.strategy.data_shard.count
    data = parity.loader(rows, steps=BATCHES[window])
    model, optimizer, loader = accelerator.prepare(model, optimizer, data)
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            if "loss_fn" in options:
                loss = model(batch["input_ids"], target=batch["shift_labels"])
            else:
                loss = parity.loss_of(model, batch)
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    held = [name for name, _ in model.named_parameters()]
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    return (losses, norms, state), held, count


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


ALTERNATING = {"schedule": "1f1b", "loss_fn": cross_entropy}


@pytest.mark.parametrize("options", [pytest.param(ALTERNATING, id="1f1b"), long_run_param({})])
@pytest.mark.parametrize("window", [1, 4])
def test_two_stages_train_like_one_process(ranks: RankServer, window: int, options: dict[str, Any]) -> None:
    """The losses, norms and weights; both processes say the same."""
    (plain,) = ranks(1, parity.plain, window, False, BATCHES[window])
    first, second = ranks(2, trained, window, {"pp_size": 2}, {"num_microbatches": 4, **options}, 4)
    parity.close(first[0], plain, 1e-5)
    assert first[0][:2] == second[0][:2]
    tied, every = {"embed.weight"}, {name for name, _ in parity.decoder().named_parameters()}
    assert (set(first[1]) & set(second[1]), set(first[1]) | set(second[1])) == (tied, every)
    assert [first[2], second[2]] == [len(first[1]), len(second[1])], "optimizers hold what is here"


COMBINED = [
    long_run_param({"dp_shard_size": 2}, {}, 4),
    ({"dp_replicate_size": 2}, {}, 1),
    ({"dp_shard_size": 2}, ALTERNATING, 4),
    ({"tp_size": 2}, {}, 1),
]


@pytest.mark.parametrize(
    ("sizes", "options", "window"), COMBINED, ids=["shards", "copies", "shards-1f1b", "tensors"]
)
def test_pipeline_stages_of_replicas_train_like_one_process(
    ranks: RankServer, sizes: dict[str, int], options: dict[str, Any], window: int
) -> None:
    """Two stages, each on two processes that see different data, or share layers."""
    (plain,) = ranks(1, parity.plain, window, False, BATCHES[window], 2)
    sizes = {"pp_size": 2, **sizes}
    found = ranks(4, trained, window, sizes, {"num_microbatches": 2, **options}, 2, timeout=120)
    parity.close(found[0][0], plain, 1e-5)


class Mix(nn.Linear):
    """A layer on all stages."""


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.mix = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), Mix(4, 4)
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.mix(layer(x)).tanh() * self.scale
        return x


def wrapped_around_stages() -> None:
    """Wrap policy with classes of modules outside of the blocks: the model gathers their weights."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.utils import PipelineParallelConfig

    names = ["Inner", "Mix", "Linear"]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=names
    )
    handler = PipelineParallelConfig(num_microbatches=1, on_all_stages=["0.mix"])
    config = ParallelismConfig(pp_size=2, dp_shard_size=2, pp_handler=handler)
    torch.manual_seed(0)
    plain = nn.Sequential(Inner())
    model = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config).prepare(copy.deepcopy(plain))
    for each in plain, model:
        each(torch.ones(2, 4)).square().mean().backward()
    same_gradients(model, plain)


def test_wrap_policies_may_name_modules_outside_of_stages(ranks: RankServer) -> None:
    """Their outputs may not be in the graph: weights were read after they had been freed, a segfault."""
    ranks(4, wrapped_around_stages)


def small_decoder(seed: int = 0) -> Any:
    """A decoder with a block for each of two stages: tracing costs for each block."""
    return parity.decoder(seed, blocks=2)


def several(options: dict[str, Any]) -> None:
    """Forms of losses, modes and calls, against a plain model."""
    accelerator = made(**options)
    plain = small_decoder()
    model = accelerator.prepare(small_decoder())
    batch = next(iter(parity.loader(6)))
    loss, other = parity.loss_of(model, batch), parity.loss_of(plain, batch)
    torch.testing.assert_close(loss, other)
    second = parity.loss_of(model, {name: value[:3] for name, value in batch.items()})
    with pytest.MonkeyPatch.context() as patch:
        batches = recorded_transfers(patch)
        accelerator.backward(loss * 2 + second**2 / 3, retain_graph=True)
    # The weight of the embedding and the head, once for each forward.
    assert batches == [["irecv", "isend"]] * 2
    (other * 2 + parity.loss_of(plain, {n: v[:3] for n, v in batch.items()}) ** 2 / 3).backward()
    same_gradients(model, plain)
    with pytest.raises(PrepareError, match="second backward"):
        loss.backward()
    model.zero_grad(), plain.zero_grad()
    for each in model, plain:
        parity.loss_of(each, {name: value[:1] for name, value in batch.items()}).backward()
    same_gradients(model, plain)
    model.eval()
    with torch.no_grad():
        logits = model(batch["input_ids"])
    assert type(logits) is torch.Tensor
    torch.testing.assert_close(logits, plain.eval()(batch["input_ids"]))
    with torch.inference_mode():
        torch.testing.assert_close(model(batch["input_ids"][:1]), plain(batch["input_ids"][:1]))


def recorded_transfers(patch: pytest.MonkeyPatch) -> list[list[str]]:
    """The transfers of each batch, which NCCL runs at once: single ones are run one after another."""
    from torch import distributed as dist

    batches, run = [], dist.batch_isend_irecv

    def record(transfers: list[Any]) -> Any:
        batches.append(sorted(transfer.op.__name__ for transfer in transfers))
        return run(transfers)

    patch.setattr(dist, "batch_isend_irecv", record)
    return batches


def same_gradients(model: nn.Module, plain: nn.Module) -> None:
    """This stage's gradients are those of the plain model."""
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        grad, other = parameter.grad, expected[name].grad
        assert (grad is None) == (other is None), name
        if grad is not None:
            torch.testing.assert_close(whole(grad), other, msg=lambda text, n=name: f"{n}: {text}")


def whole(value: Any) -> torch.Tensor:
    """A sharded tensor as one process would have it."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def test_any_loss_and_several_calls(ranks: RankServer) -> None:
    """A batch that does not divide, a loss of two forwards, evaluation, another length."""
    ranks(2, several, {"num_microbatches": 4})


class Tempered(nn.Module):
    """A decoder with a number among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = small_decoder()

    def forward(self, input_ids: torch.Tensor, scale: Any) -> torch.Tensor:
        return self.decoder(input_ids) * scale


def other_numbers(options: dict[str, Any]) -> tuple[list[str], list[int], int]:
    """The warnings of calls with other numbers, their plans that have memory, and those of tensors."""
    accelerator = made(**options)
    plain, model = Tempered(), accelerator.prepare(Tempered())
    batch = next(iter(parity.loader(6)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for scale in (1.0, 2.0, 3.0, 4.0):
            for each in model, plain:
                logits = each(batch["input_ids"], scale=scale)
                cross_entropy(logits, batch["shift_labels"]).backward()
    same_gradients(model, plain)
    plans = model._runner.plans
    idle = [len(plan.idle_schedules) for plan in plans.values()]
    for scale in (5.0, 6.0, 7.0):
        model(batch["input_ids"], scale=torch.tensor(scale)).sum().backward()
    return [str(each.message) for each in said if "traced" in str(each.message)], idle, len(plans)


def test_calls_with_other_numbers_share_memory_and_are_warned_of(ranks: RankServer) -> None:
    (texts, idle, plans), (nothing, *same) = ranks(2, other_numbers, {"num_microbatches": 2})
    assert [text.partition(" of a pipeline")[0] for text in texts] == ["kwargs['scale']"]
    assert nothing == []
    assert [idle, plans] == same == [[0, 0, 0, 1], 5]


def steps(accelerator: Any, model: Any, optimizer: Any, begin: int, count: int) -> list[float]:
    """Losses of some training steps over the whole batch of each."""
    losses = []
    for batch in list(parity.loader())[begin : begin + count]:
        loss = parity.loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parts(accelerator: Any) -> tuple[Any, Any]:
    """Model and optimizer of two groups, prepared."""
    model = small_decoder(seed=1)
    groups = [{"params": list(model.layers.parameters())}, {"params": [*model.norm.parameters()]}]
    groups.append({"params": [model.embed.weight], "lr": 0.01})
    return accelerator.prepare(model, torch.optim.AdamW(groups, lr=0.005, eps=1e-4))


def sharded() -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))


def checkpoints(folder: str) -> list[float]:
    """Saved in stages: in parts, whole, and from shards; loaded in stages."""
    accelerator = made(num_microbatches=2)
    model, optimizer = parts(accelerator)
    steps(accelerator, model, optimizer, 0, 2)
    accelerator.save_state(f"{folder}/parts")
    accelerator.save_state(f"{folder}/whole", sharded=False)
    accelerator.save_model(model, f"{folder}/weights")
    after = steps(accelerator, model, optimizer, 3, 2)
    for name in ("parts", "whole"):
        again = made(num_microbatches=4)
        model, optimizer = parts(again)
        steps(again, model, optimizer, 6, 1)
        again.load_state(f"{folder}/{name}")
        assert steps(again, model, optimizer, 3, 2) == pytest.approx(after, abs=1e-5), name
    other = sharded()
    model, optimizer = parts(other)
    other.load_state(f"{folder}/parts")
    other.save_state(f"{folder}/shards")
    assert steps(other, model, optimizer, 3, 2) == pytest.approx(after, abs=1e-5)
    again = made(num_microbatches=4)
    model, optimizer = parts(again)
    again.load_state(f"{folder}/shards")
    assert steps(again, model, optimizer, 3, 2) == pytest.approx(after, abs=1e-5)
    return after


class Average:
    """A copy of the parameters of this process."""

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[str, Any] = {name: p.detach().clone() for name, p in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "decay": 0.5}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def several_models(folder: str) -> None:
    """Two models with an optimizer each, in one prepare: in parts and whole; the parts are loaded."""

    def make(accelerator: Any) -> Any:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(2, width), nn.Linear(width, 2)) for width in (3, 4)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
        objects = accelerator.prepare(*models, *optimizers)
        average = Average(objects[0])
        accelerator.register_for_checkpointing(average)
        return *objects, average

    accelerator = made(num_microbatches=2)
    first, second, *optimizers, average = make(accelerator)
    averages = {name: value.full_tensor().clone() for name, value in average.values.items()}
    for ending in ("parts", "whole"):
        accelerator.backward(first(torch.ones(4, 2)).sum() + second(torch.ones(4, 2)).sum())
        for optimizer in optimizers:
            optimizer.step()
        accelerator.save_state(f"{folder}/{ending}", sharded=None if ending == "parts" else False)
    average.values = {}  # as of one that begins with the first step
    accelerator.load_state(f"{folder}/parts")
    assert len(averages) == 2
    assert average.values.keys() == averages.keys()
    for name, value in average.values.items():
        torch.testing.assert_close(value, averages[name])
    other = sharded()
    make(other)
    with pytest.raises(RuntimeError, match="load it with the same pp_size"):
        other.load_state(f"{folder}/parts")
    assert [len(optimizer.state_dict()["state"]) for optimizer in optimizers] == [2, 2]
    assert all(
        each["step"] == 1 for optimizer in optimizers for each in optimizer.state_dict()["state"].values()
    )


def loads(folder: str, name: str) -> list[float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = parts(accelerator)
    accelerator.load_state(f"{folder}/{name}")
    return steps(accelerator, model, optimizer, 3, 2)


def test_checkpoints_load_in_any_layout(ranks: RankServer, tmp_path: Path) -> None:
    """D6: saved in stages, in parts and whole, loaded in stages, shards and one process; tied weights."""
    after, _ = ranks(2, checkpoints, str(tmp_path), timeout=120)
    for name in ("parts", "whole"):
        assert ranks(1, loads, str(tmp_path), name)[0] == pytest.approx(after, abs=1e-5), name
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    plain = small_decoder()
    missing, surplus = plain.load_state_dict(weights, strict=False)
    assert (set(missing) <= {"head.weight", "embed.weight"}, surplus) == (True, [])


def test_each_optimizer_of_several_models_has_its_state(ranks: RankServer, tmp_path: Path) -> None:
    """Under the numbers of one process, and in parts."""
    ranks(2, several_models, str(tmp_path))
    for name, width in (("optimizer.bin", 3), ("optimizer_1.bin", 4)):
        state = torch.load(tmp_path / "whole" / name)["state"]
        shapes = {number: tuple(values["exp_avg"].shape) for number, values in state.items()}
        assert shapes == {0: (width, 2), 1: (width,), 2: (2, width), 3: (2,)}, name


def gpt() -> Any:
    """A small GPT-2 of transformers: tied embeddings, the loss inside, one block frozen."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=4,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    model = GPT2LMHeadModel(config)
    model.transformer.h[2].requires_grad_(False)
    return model


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


def mixtral() -> Any:
    """Experts in float32: torch's grouped product takes it, and its meta kernel does not."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=32, num_local_experts=2, num_key_value_heads=2, **sizes)
    return MixtralForCausalLM(config)


def words(rows: int = 8) -> dict[str, torch.Tensor]:
    found = torch.stack([sample["input_ids"] for sample in parity.samples()[:rows]])
    mask = torch.ones_like(found)
    mask[0, -2:] = 0
    return {"input_ids": found, "labels": found.clone(), "attention_mask": mask}


def labelled(kinds: tuple[str, ...], options: dict[str, Any]) -> None:
    """Trained with the loss inside of the model, in windows of two, against the plain loop."""
    for kind in kinds:
        compared({"gpt": gpt, "llama": llama, "mixtral": mixtral}[kind], made(window=2, **options))


def compared(make: Any, accelerator: Any) -> None:
    plain, model = make(), make()
    optimizer, other = (
        torch.optim.AdamW(model.parameters(), lr=0.01),
        torch.optim.AdamW(plain.parameters(), lr=0.01),
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(model, type(plain))
    losses, expected = [], []
    for step in range(6 if LONG_RUN else 4):
        batch = words(8)
        with accelerator.accumulate(model):
            outputs = model(**batch)
            accelerator.backward(outputs.loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(outputs.loss.item())
        loss = plain(**batch, use_cache=False).loss
        (loss / 2).backward()
        expected.append(loss.item())
        if step % 2:
            other.step()
            other.zero_grad()
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0]
    model.eval(), plain.eval()
    with torch.no_grad():
        ours, theirs = model(**words(6)), plain(**words(6), use_cache=False)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.loss, theirs.loss, atol=1e-5, rtol=0)
    # With a backward, which stages of one process begin with the last of them.
    with pytest.MonkeyPatch.context() as patch:
        batches = recorded_transfers(patch)
        model(**words(6)).loss.backward()
    plain(**words(6), use_cache=False).loss.backward()
    same_gradients(model, plain)
    if vars(model)["_runner"].options.stages_per_process > 1:
        assert batches.count(["irecv", "isend"]) >= 8, "neighbours of a ring send and receive at once"


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [long_run_param("gpipe", "gpt"), ("1f1b", "llama"), ("interleaved", "gpt"), ("gpipe", "mixtral")],
)
def test_transformers_train_with_their_own_loss(ranks: RankServer, schedule: str, kind: str) -> None:
    """By default one model for each schedule."""
    kinds = ("gpt", "llama") if LONG_RUN and kind != "mixtral" else (kind,)
    ranks(2, labelled, kinds, {"num_microbatches": 4, "schedule": schedule}, timeout=120)


def weighted() -> None:
    """A window of three micro-batches weighted by items, the last without any; against one big batch."""
    accelerator = made(num_microbatches=2)
    plain, model = small_decoder(), small_decoder()
    model, optimizer, loader = accelerator.prepare(model, parity.adamw(model), parity.loader())
    counts, sums = (3, 8, 0), []
    for window in accelerator.windows(loader, 3):
        for count, batch in zip(counts, window, strict=True):
            words, labels = batch["input_ids"], batch["shift_labels"][:count].flatten()
            logits = model(words)[:count].flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, labels)  # of nothing it is no number
            accelerator.backward(loss, num_items=labels.numel())
            logits = plain(words)[:count].flatten(0, 1)
            sums.append(nn.functional.cross_entropy(logits, labels, reduction="sum"))
        (sum(sums) / (11 * parity.LENGTH)).backward()
        same_gradients(model, plain)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        torch.testing.assert_close(accelerator.clip_grad_norm_(model.parameters(), 1e9), norm)
        optimizer.step()
        break


def test_windows_weighted_by_items(ranks: RankServer) -> None:
    """B1, B7, B9: the mean over all items, and the true norm, with a micro-batch that has none."""
    ranks(2, weighted)


class Odd(nn.Module):
    """A frozen first stage, a value that is used again, a weight and a buffer between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8).requires_grad_(False)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("table", torch.arange(8.0))
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, names: list[str]) -> dict[str, Any]:
        if bool(mask.all()):  # the batch has values on every stage
            x = x * 2
        first = self.inner(x) * self.scale
        x = first
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale + self.table
        return {"out": self.out(x + first), "pair": (first, names), "rows": x.shape[0]}


def odd(folder: str) -> None:
    accelerator = made(num_microbatches=1, split_points=["layers.1"])
    torch.manual_seed(0)
    plain, given = Odd(), Odd()
    given.load_state_dict(plain.state_dict())
    model = accelerator.prepare(given)
    x, mask = torch.randn(4, 8), torch.ones(4, dtype=torch.bool)
    for turn in range(2):
        ours, theirs = (each(x, mask=mask, names=["a"]) for each in (model, plain))
        assert (ours["pair"][1], ours["rows"]) == (["a"], 4)
        torch.testing.assert_close(ours["out"], theirs["out"])
        for each, back in ((ours, accelerator.backward), (theirs, torch.Tensor.backward)):
            back((each["out"] ** 2).mean() + each["pair"][0].sum() * turn)
    same_gradients(model, plain)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        assert list(state) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, msg=lambda text, n=name: f"{n}: {text}")
    accelerator.save_state(f"{folder}/odd")
    again = made(num_microbatches=1, split_points=["layers.1"])
    other = again.prepare(Odd())
    again.load_state(f"{folder}/odd")
    for name, value in other.state_dict().items():
        torch.testing.assert_close(
            whole(value), plain.state_dict()[name], msg=lambda text, n=name: f"{n}: {text}"
        )


def test_what_stages_share_and_pass_on(ranks: RankServer, tmp_path: Path) -> None:
    """Values that pass by a stage, weights between layers, frozen parts, running means, any results."""
    ranks(2, odd, str(tmp_path))


class Pair(NamedTuple):
    """An output that begins with its loss."""

    cost: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class Frozen:
    """An output with a loss, that cannot be assigned to."""

    logits: torch.Tensor
    loss: torch.Tensor


class Labelled(nn.Sequential):
    """Gives a pair, or a frozen dataclass."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, pair: bool) -> Any:  # type: ignore[override]
        logits = super().forward(x)
        loss = nn.functional.cross_entropy(logits, labels)
        return Pair(loss, logits) if pair else Frozen(logits, loss)


def forms_of_losses() -> None:
    """Losses inside and beside the model under 1F1B: their forms, without items, and in evaluation."""
    options = {"num_microbatches": 4, "schedule": "1f1b"}
    torch.manual_seed(0)
    plain = Labelled(nn.Linear(2, 2), nn.Linear(2, 3))
    model = made(**options).prepare(copy.deepcopy(plain))
    x, labels = torch.randn(8, 2), torch.arange(8) % 3
    for pair in (True, False):
        output, expected = model(x, labels, pair), plain(x, labels, pair)
        assert type(output) is type(expected)
        assert output.logits is None
        for loss in (output[0], expected[0]) if pair else (output.loss, expected.loss):
            loss.backward()
        same_gradients(model, plain)
    # The first of the micro-batches has no label, and its mean is no number.
    labels[:2] = -100
    items = {"items": lambda x, labels, pair: (labels != -100).sum()}
    model = made(**options, **items).prepare(copy.deepcopy(plain))
    plain.zero_grad()
    losses = [each(x, labels, pair=True).cost for each in (model, plain)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    same_gradients(model, plain)
    options |= {"loss_fn": nn.functional.mse_loss, "items": lambda x, target: torch.tensor(0)}
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = made(**options).prepare(copy.deepcopy(plain))
    loss = model(x, target=x)
    loss.backward()
    assert (loss.item(), max(p.grad.abs().max().item() for p in model.parameters())) == (0, 0)
    # The stages agree on the format of a loss, though only the last one computes it.
    options = {**options, "loss_fn": lambda out, target: (out.double() - target).pow(2).mean(), "items": None}
    wide = made(**options).prepare(copy.deepcopy(plain))
    torch.testing.assert_close(wide(x, target=x), nn.functional.mse_loss(plain(x), x))
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x, target=x), nn.functional.mse_loss(plain(x), x))
        torch.testing.assert_close(model(x), plain(x))


def test_forms_of_losses_in_alternating_schedules(ranks: RankServer) -> None:
    ranks(2, forms_of_losses)


class Scaled(nn.Sequential):
    """Frozen layers, and a weight after the last one."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))
        self.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self[1](self[0](x)) * self.scale


def scaled() -> None:
    """Losses and norms of some steps; and a batch of one sample, which is one micro-batch."""
    accelerator = made(num_microbatches=2)
    torch.manual_seed(0)
    plain = Scaled()
    user = copy.deepcopy(plain)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(user, torch.optim.SGD(user.parameters(), lr=0.1))
    for rows in (4, 1, 4):
        x = torch.randn(rows, 2)
        losses = [each(x).square().sum() for each in (model, plain)]
        accelerator.backward(losses[0])
        losses[1].backward()
        torch.testing.assert_close(*losses)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()


def test_a_weight_after_frozen_layers_trains(ranks: RankServer) -> None:
    """Its loss was said to need no gradient; and gradients of a single sample were never reduced."""
    ranks(2, scaled)


def add_hooks(model: Any) -> None:
    for name in ("layers.0.up.weight", "layers.3.up.weight", "norm.weight", "embed.weight"):
        model.get_parameter(name).register_hook(lambda gradient: gradient * 3)


def hooked() -> None:
    """Hooks of weights of each stage, of one outside of the blocks and of a tied one; a batch norm."""
    accelerator = made(num_microbatches=2)
    plain, given = parity.decoder(), parity.decoder()
    for model in (plain, given):
        add_hooks(model)
    model = accelerator.prepare(given)
    batch = next(iter(parity.loader()))
    accelerator.backward(parity.loss_of(model, batch))
    parity.loss_of(plain, batch).backward()
    same_gradients(model, plain)
    norms = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        made(num_microbatches=2).prepare(norms)
    said = [str(each.message) for each in warned if "one of 4 batch norms" in str(each.message)]
    assert len(said) == (accelerator.process_index == 0), said


def test_hooks_of_parameters_are_called_in_their_stage(ranks: RankServer) -> None:
    """They were not; and statistics of micro-batches, which are not those of one process, are warned of."""
    ranks(2, hooked)


def misuse(accelerator: Any, case: str) -> None:
    model, rank = small_decoder(), accelerator.process_index
    if case == "few":
        accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    elif case in ("split", "late", "alone", "differ", "values", "recomputed"):
        model = accelerator.prepare(model)
    if case == "late":
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1))
    elif case == "alone":
        model.layers[1 - rank](torch.ones(1, 2, 16), 1)
    elif case == "differ":
        model(torch.zeros(2 + rank, 4, dtype=torch.long))
    elif case == "gradient":
        linear = nn.Linear(2, 2)
        accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))(linear(torch.ones(4, 2)))
    elif case == "values":
        model(torch.full((4, 4), rank))
    elif case in ODD:
        accelerator.prepare(ODD[case]())(torch.ones(4, 3))
    elif case == "recomputed":
        checkpoint(model, torch.zeros(4, 4, dtype=torch.long), use_reentrant=False)
    elif case in ("uneven", "labels", "lossless"):
        batch = words(6 if case == "uneven" else 8)
        batch["labels"][0] = -100
        if case == "lossless":
            del batch["labels"]
        accelerator.prepare(gpt())(**batch)


def refused() -> dict[str, str]:
    """What is said when a model cannot be cut or called so."""
    found: dict[str, str] = {}
    for case in REFUSED:
        options: dict[str, Any] = (
            {"split_points": ["layers.9"]} if case == "split" else {"num_microbatches": 4}
        )
        if case in ("uneven", "labels", "lossless"):
            options["schedule"] = "1f1b"
        accelerator = made(**options)
        with pytest.raises(AccelerateError) as error:
            misuse(accelerator, case)
        found[case] = str(error.value)
    return found


class Outside(nn.Module):
    """Uses a weight outside of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) @ self.first.weight.T


class Backwards(Outside):
    """Runs in another order than it was defined in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.second(x))


class Looking(Outside):
    """Looks at values between its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if x.sum() > 0 else x


class Mean(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x).mean(0)


class Meaning(Outside):
    """A layer gives a mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.second = Mean(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Empty(Outside):
    """A buffer of its has no values."""

    def __init__(self) -> None:
        super().__init__()
        self.second.register_buffer("mask", torch.ones(3, device="meta"), persistent=False)


ODD: dict[str, type[nn.Module]] = {
    "empty": Empty,
    "outside": Outside,
    "order": Backwards,
    "looks": Looking,
    "mean": Meaning,
}
REFUSED = {
    "few": ("has 1 blocks for 2", "start 1 processes"),
    "split": ("layers.9", "split_points"),
    "late": ("made from a model split into stages", "prepare(model, optimizer)"),
    "alone": ("is on stage", "call the prepared model itself"),
    "differ": ("called in different ways", "same batch"),
    "values": ("given different values", "prepare the loader"),
    "recomputed": ("torch.utils.checkpoint around", "inside of the model"),
    "gradient": ("an argument that needs a gradient", "a part of the model"),
    "empty": ("second.mask is on the meta device", "load the weights on rank 0"),
    "outside": ("weight first.weight outside", "on_all_stages=['first']"),
    "order": ("first is on stage 0", "is called after second of stage 1", "split_points"),
    "looks": ("looks at values", "torch.where"),
    "mean": ("second gives a tensor of shape (3,)", "num_microbatches=1"),
    "uneven": ("6 samples is not divisible by 4", "drop_last"),
    "labels": ("labels that count", "items=", "schedule='gpipe'"),
    "lossless": ("needs the loss inside of the model", "loss_fn"),
}


def test_what_cannot_be_is_refused_alike_on_all(ranks: RankServer) -> None:
    for found in ranks(2, refused, timeout=120):
        for case, parts in REFUSED.items():
            assert [part for part in parts if part not in found[case]] == [], found[case]


class Failing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if x.device.type == "cpu" and type(x) is torch.Tensor and self.armed:
            raise ArithmeticError("the second stage fails")
        return super().forward(x)

    armed = False


def failing() -> None:
    accelerator = made(num_microbatches=2)
    model = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), Failing(2, 2)))
    accelerator.backward(model(torch.ones(4, 2)).sum())
    model[1].armed = True
    accelerator.backward(model(torch.ones(4, 2)).sum())


def test_a_stage_that_fails_ends_all(ranks: RankServer) -> None:
    """C3: a stage that waits for another in torch's schedule is freed as well."""
    first, second = ranks.outcomes(2, failing, grace=30)
    assert (first.status, second.status) == ("raised", "raised")
    assert "ArithmeticError: the second stage fails" in second.traceback


class FullBackward(nn.Linear):
    """A layer whose backward finds the memory full once it is armed."""

    armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y = super().forward(x)
        if self.armed and y.requires_grad:
            y.register_hook(self.fail)
        return y

    def fail(self, gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("simulated")


def full_alone(where: str) -> None:
    """The memory of the last rank is full with batches of 16: before its forward or backward, or in one."""
    from accelerate.utils import find_executable_batch_size

    speed_up_watchdog()
    accelerator = made(sizes={"pp_size": 2, "dp_replicate_size": 2}, num_microbatches=2)

    @find_executable_batch_size(starting_batch_size=16, reduce_batch_size_fn=lambda: 8)
    def train(size: int) -> None:
        model = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), FullBackward(2, 2)))
        for step in range(3):
            is_full = accelerator.process_index == 3 and size > 8 and step == 1
            if is_full and where == "forward":
                raise torch.OutOfMemoryError("simulated")
            model[1].armed = is_full and where == "inside"
            loss = model(torch.ones(size, 2)).sum()
            if is_full and where == "backward":
                raise torch.OutOfMemoryError("simulated")
            accelerator.backward(loss)

    train()


@pytest.mark.parametrize("where", ["forward", "backward", "inside"])
def test_a_full_memory_ends_the_search_of_all_stages(ranks: RankServer, where: str) -> None:
    """C8: the others wait in transfers between stages, and in collectives of the copies of a stage."""
    outcomes = ranks.outcomes(4, full_alone, where, grace=30, timeout=60)
    assert [outcome.kind for outcome in outcomes] == ["CollectiveError"] * 4, list(map(str, outcomes))
    assert "memory of rank 3 is full with batches of 16" in outcomes[3].message
    assert "starting_batch_size=8" in outcomes[3].message
    for outcome in outcomes[:3]:
        assert "find_executable_batch_size at test_pipeline_training.py:" in outcome.message
        assert "rank 0 is in a transfer between stages at test_pipeline_training.py:" in outcome.message


def change_what_trains(schedule: str, trains: bool) -> tuple[list[float], list[float]]:
    """Change after a step whether the first stage trains; the losses, and those of one process."""
    goal = torch.zeros(4, 2)
    loss_fn = {} if schedule == "gpipe" else {"schedule": schedule, "loss_fn": nn.functional.mse_loss}
    accelerator = made(num_microbatches=2, **loss_fn)
    torch.manual_seed(0)
    user = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    user[0].requires_grad_(not trains)
    plain: Any = copy.deepcopy(user)
    model, optimizer = accelerator.prepare(user, torch.optim.SGD(user.parameters(), lr=0.1))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses, expected = [], []
    warnings.filterwarnings("error", "the first optimizer.step")  # a stage may have nothing that trains
    for _ in range(3):
        x = torch.ones(4, 2)
        loss = model(x, target=goal) if loss_fn else nn.functional.mse_loss(model(x), goal)
        accelerator.backward(loss)
        expected.append(nn.functional.mse_loss(plain(x), goal))
        expected[-1].backward()
        losses.append(loss.item())
        for each in optimizer, reference:
            each.step()
            each.zero_grad()
        for each in model, plain:
            each[0].requires_grad_(trains)
    return losses, [loss.item() for loss in expected]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_stage_can_be_frozen_after_prepare(ranks: RankServer, schedule: str) -> None:
    for losses, expected in ranks(2, change_what_trains, schedule, False):
        assert losses == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_stage_that_is_unfrozen_after_prepare_is_named(ranks: RankServer, schedule: str) -> None:
    """G6: in torch's words it was a failed backward; no other stage sends a gradient back."""
    first, second = ranks.outcomes(2, change_what_trains, schedule, True, grace=30)
    assert first.kind == "PrepareError", first
    assert "requires_grad of 0.weight, 0.bias was changed after prepare" in first.message
    assert second.status == "raised", second


LEAVES = """
import sys
import torch
from torch import nn
from tests.cpu.test_pipeline_training import made
accelerator = made(sizes={"pp_size": 2, "dp_replicate_size": 2}, num_microbatches=2)
model = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
def train():
    accelerator.backward(model(torch.ones(4, 2)).sum())
train()
"""


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_ends_well_is_named_where_stages_wait(
    ranks: RankServer, tmp_path: Path, leaver: int
) -> None:
    """C3: no other rank is blamed, in words of gloo or of torch's stage; also in backward.

    Without a launcher the store ends with rank 0: then nobody can tell how rank 0 has ended.
    """
    script = f"{LEAVES}\nif accelerator.process_index == {leaver}: sys.exit(0)\ntrain()\n"
    ends = run_to_exit(ranks, 4, script, tmp_path)
    assert [code for code, _ in ends] == [int(rank != leaver) for rank in range(4)]
    for rank in {0, 1, 2, 3} - {leaver}:
        message = ends[rank][1].rpartition("Error: ")[2]
        ended = (
            rf"rank {leaver}( has ended|, or the launcher, is gone) while rank [0-3] was in .* at script.py:"
        )
        assert re.match(ended, message), message


class Meeting(nn.Linear):
    """Stage 0 does not end its last chunk before stage 1 begins its first."""

    armed, stage, chunk = False, 0, -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        import torch.distributed as dist

        if self.armed:
            self.chunk += 1
            store = dist.distributed_c10d._get_default_store()
            if (self.stage, self.chunk) == (1, 0):
                store.set("stage 1 has begun", "yes")
            if (self.stage, self.chunk) == (0, 3):
                store.wait(["stage 1 has begun"])
        return super().forward(x)


def overlap() -> list[tuple[str, int, int, float, float]]:
    accelerator = made(num_microbatches=4)
    given = nn.Sequential(Meeting(2, 2), Meeting(2, 2))
    given[1].stage = 1
    model = accelerator.prepare(given)
    with torch.no_grad():
        model(torch.ones(8, 2))  # rehearses
    for block in given:
        block.armed = True
    with model.pipeline_timeline() as work, torch.no_grad():
        model(torch.ones(8, 2))
    return [tuple(each) for each in work]


def test_stages_work_at_the_same_time(ranks: RankServer) -> None:
    """Stage 0 waits in its last chunk for stage 1 to begin its first: stages in turn would never end."""
    found = same_on_all(ranks(2, overlap))
    assert [work[:3] for work in found] == [
        ("forward", stage, chunk) for stage in (0, 1) for chunk in range(4)
    ]
    times = {(stage, chunk): (begin, end) for _, stage, chunk, begin, end in found}
    assert times[1, 0][0] < times[0, 3][1]
    for chunk in range(4):
        assert times[0, chunk][1] <= times[1, chunk][0], "a chunk is sent when it is done"


def halved() -> None:
    """bfloat16: the numbers of the plain loop under autocast, within what the format has."""
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig

    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", parallelism_config=ParallelismConfig(pp_size=2)
    )
    model, plain = small_decoder(), small_decoder()
    optimizer, other = parity.adamw(model), parity.adamw(plain)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in list(parity.loader())[:3]:
        loss = parity.loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            expected = parity.loss_of(plain, batch)
        expected.backward()
        other.step()
        other.zero_grad()
        torch.testing.assert_close(loss, expected, atol=2e-2, rtol=0)


def test_stages_in_bfloat16(ranks: RankServer) -> None:
    ranks(2, halved)


def overflow_on_one_rank(size: str) -> tuple[int, float]:
    """Skipped steps, and the scale, where rank 1 alone sees a gradient that is not finite."""
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import GradScalerKwargs, TorchTensorParallelConfig

    # The first gradient is replicated, and reduced over no other process.
    sizes: dict[str, Any] = {size: 2}
    if size == "tp_size":
        sizes["tp_handler"] = TorchTensorParallelConfig(plan={"1": "colwise", "2": "rowwise"})
    accelerator: Any = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        parallelism_config=ParallelismConfig(**sizes),
        kwargs_handlers=[GradScalerKwargs(init_scale=2.0**10)],
    )
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    if accelerator.process_index == 1:
        weight = dict(model.named_parameters())["2.weight"]
        weight.grad.to_local().fill_(float("inf"))
    optimizer.step()
    return optimizer.skipped_steps, accelerator.scaler.get_scale()


@pytest.mark.parametrize("size", ["pp_size", "tp_size"])
def test_an_overflow_of_one_rank_is_that_of_all(ranks: RankServer, size: str) -> None:
    """They hold different weights: a step that some of them skip trains another model."""
    assert same_on_all(ranks(2, overflow_on_one_rank, size)) == (1, 2.0**9)


def compiled() -> list[str]:
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import TorchDynamoPlugin

    found = []
    for regional in (False, True):
        plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
        config = ParallelismConfig(pp_size=2)
        accelerator = Accelerator(cpu=True, dynamo_plugin=plugin, parallelism_config=config)
        with pytest.raises(ValueError, match="no pipeline stages") as caught:
            accelerator.prepare(parity.decoder())
        found.append(str(caught.value))
    return found


def test_stages_are_not_compiled(ranks: RankServer) -> None:
    for words in same_on_all(ranks(2, compiled)):
        assert words.startswith("torch.compile goes with no pipeline stages, and pp_size is 2")
