"""What both ways of sharing sequences have in common: attention, blocks, loaders, numbers, refusals."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.support.long_run import LONG_RUN, long_run_param
from tests.support.ranks import RankServer, same_on_all
from tests.support.sequences import (
    CUT,
    IGNORED,
    RING,
    ROWS,
    SDPA,
    WORDS,
    adamw,
    gpt2,
    llama,
    loss_of,
    mistral,
    ring_options,
    small_decoder,
    targets,
    texts,
)

# What the rank server imports once for this module.
PRELOAD = ("transformers.models.llama.modeling_llama",)

BOTH = pytest.mark.parametrize("size", ["cp_size", "sp_size"])
Batch = dict[str, torch.Tensor]


def opened(size: str, stages: int = 1, **more: Any) -> Any:
    """Two processes share sequences; under ``"ring"`` their keys go around. Beside them, stages of layers.

    A loader that is prepared with a model gives parts.
    """
    from accelerate import Accelerator, ParallelismConfig

    sizes: dict[str, Any] = {"cp_size": CUT, "ring": RING}.get(size, {size: 2})
    sizes = {**sizes, "pp_size": stages}
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes), **more)


# --- kinds of attention


class Own(nn.Module):
    """A model of somebody's own; ``attend`` is its attention."""

    def __init__(self, attend: Callable[..., torch.Tensor], heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(WORDS, 32), nn.Embedding(64, 32)
        self.inner, self.out = nn.Linear(32, 96), nn.Linear(32, WORDS)
        self.attend, self.heads = attend, heads

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **more: Any) -> torch.Tensor:
        x = self.embed(input_ids) + self.places(position_ids)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.inner(x).chunk(3, -1)
        )
        y = self.attend(q, k, v, position_ids, **more)
        return self.out(x + y.transpose(1, 2).flatten(2))


def all_keys(q: Any, k: Any, v: Any, positions: Any, **more: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def some_keys(q: Any, k: Any, v: Any, positions: Any, attention_mask: Any) -> torch.Tensor:
    """Padding by a mask of one row."""
    return F.scaled_dot_product_attention(q, k, v, attention_mask[:, None, None].bool())


def biased(q: Any, k: Any, v: Any, positions: Any, attention_mask: Any) -> torch.Tensor:
    """A number for each pair, another for each head, and the future hidden."""
    keys = torch.arange(attention_mask.shape[1])
    far = (positions[:, None, :, None] - keys).float()
    slopes = torch.arange(1, 5).view(1, 4, 1, 1) / 8
    return F.scaled_dot_product_attention(
        q, k, v, (-slopes * far).masked_fill(far < 0, float("-inf")), scale=0.3
    )


def grouped(q: Any, k: Any, v: Any, positions: Any) -> torch.Tensor:
    """Two heads of keys for four of queries."""
    return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True)


def single(q: Any, k: Any, v: Any, positions: Any) -> torch.Tensor:
    """One head of keys, and narrower values."""
    return F.scaled_dot_product_attention(
        q, k[:, :1], v[:, :1, :, :4], is_causal=True, enable_gqa=True
    ).repeat(1, 1, 1, 2)


class Encoder(nn.Module):
    """Torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(WORDS, 32), nn.Embedding(64, 32)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.out = nn.Linear(32, WORDS)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(self.embed(input_ids) + self.places(position_ids)))


class Forgetful(Own):
    """Called without the positions that it could have."""

    def __init__(self) -> None:
        super().__init__(all_keys)

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, **more: Any) -> torch.Tensor:
        own = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        return super().forward(input_ids, own if position_ids is None else position_ids)


def recomputed() -> Any:
    model = llama(use_cache=False)
    model.gradient_checkpointing_enable()
    return model


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=WORDS, **sizes, **dropout, **SDPA))


def left(rows: int, length: int) -> torch.Tensor:
    """Padding before the tokens, of another length in each row."""
    return (torch.arange(length) >= 3 * torch.arange(rows)[:, None]).long()


def short() -> Batch:
    """A length that two processes do not divide."""
    return {"input_ids": words()["input_ids"][:, :13], "attention_mask": torch.ones(4, 13)}


def words() -> Batch:
    chance = torch.Generator().manual_seed(3)
    return {"input_ids": torch.randint(1, WORDS, (4, 16), generator=chance)}


def places(**more: Any) -> Batch:
    return {**words(), "position_ids": torch.arange(16).expand(4, -1), **more}


def packed() -> Batch:
    """Documents of other lengths in each row, which do not see each other."""
    lengths = [[16], [5, 11], [8, 8], [3, 6, 7]]
    rows = [torch.cat([torch.arange(n) for n in row]) for row in lengths]
    return {**words(), "position_ids": torch.stack(rows)}


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Batch]]] = {
    "all keys": (lambda: Own(all_keys), places),
    "some keys": (lambda: Own(some_keys), lambda: places(attention_mask=left(4, 16))),
    "biased": (lambda: Own(biased), lambda: places(attention_mask=torch.ones(4, 16))),
    "grouped": (lambda: Own(grouped), places),
    "single": (lambda: Own(single), places),
    "torch's layers": (Encoder, places),
    "recomputed": (recomputed, words),
    "not told where": (lambda: Forgetful(), words),
    "both ways": (bert, lambda: {**words(), "attention_mask": left(4, 16).flip(1)}),
    "padded before": (llama, lambda: {**words(), "attention_mask": left(4, 16)}),
    "filled up": (
        gpt2,
        lambda: {"input_ids": words()["input_ids"][:, :13], "attention_mask": torch.ones(4, 13)},
    ),
    "a token for each process": (gpt2, lambda: {"input_ids": words()["input_ids"][:, :2]}),
    "documents": (lambda: llama(use_cache=False), packed),
    "documents in windows": (lambda: mistral(use_cache=False), packed),
    "rows of a mask": (llama, lambda: {**words(), "attention_mask": torch.ones(4, 1, 16, 16).tril().bool()}),
}


def output_of(model: Any, batch: Batch) -> torch.Tensor:
    found = model(**batch)
    return found if isinstance(found, torch.Tensor) else found.logits


def score(output: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A number that depends on every output and its place."""
    return (output.float() * (1 + positions[..., None])).square().sum()


def compared(size: str, name: str, stages: int = 1) -> dict[str, float]:
    """Distances of outputs and gradients from those of one process."""
    accelerator = opened(size, stages)
    make, data = MODELS[name]
    alone, batch = make(), data()
    whole = output_of(alone, batch)
    order = torch.arange(batch["input_ids"].shape[1]).expand(4, -1)
    score(whole, order).backward()
    model = accelerator.prepare(make())
    dimension = accelerator.strategy.dimensions[-1]
    part = dimension.slice_batch(batch)
    mine = output_of(model, {key: value for key, value in part.items() if key in batch})
    place = dimension.sharder.local_shard(torch.arange(dimension.size * mine.shape[1]).expand(4, -1), 1)
    real = (place < order.shape[1]).nonzero()[:, 1].unique()
    loss = score(mine[:, real], place[:, real])
    accelerator.backward(loss * dimension.size)
    # A stage has some of them.
    held, wanted_here = dict(model.named_parameters()), dict(alone.named_parameters())
    assert held.keys() <= wanted_here.keys()
    assert stages > 1 or held.keys() == wanted_here.keys()
    far = [
        ((p.grad.full_tensor() - q.grad).norm() / (1 + q.grad.norm())).item()
        for q, p in ((wanted_here[name], p) for name, p in held.items())
        if q.grad is not None
    ]
    wanted = whole.gather(1, place[:, real, None].expand(-1, -1, whole.shape[-1]))
    seen = batch.get("attention_mask")
    kept = torch.ones_like(place[:, real], dtype=torch.bool)
    if seen is not None and seen.dim() == 2:
        kept = seen.bool().gather(1, place[:, real])
    return {"output": (mine[:, real] - wanted)[kept].abs().max().item(), "gradients": max(far)}


def compared_all(size: str) -> dict[str, dict[str, float]]:
    return {name: compared(size, name) for name in MODELS}


@BOTH
def test_outputs_and_gradients_are_those_of_one_process(ranks: RankServer, size: str) -> None:
    for found in ranks(2, compared_all, size, timeout=110):
        assert found.keys() == MODELS.keys()
        assert {name: far for name, far in found.items() if not max(far.values()) < 1e-5} == {}


def recomputed_in_turn(size: str) -> float:
    """Two forwards of other lengths and one on whole sequences, then the backward of the first two."""
    accelerator = opened(size)
    alone, model = recomputed(), accelerator.prepare(recomputed())
    dimension = accelerator.strategy.dimensions[-1]
    losses = []
    for length in (8, 16):
        batch = {"input_ids": words()["input_ids"][:, :length]}
        order = torch.arange(length).expand(4, -1)
        score(output_of(alone, batch), order).backward()
        part = dimension.slice_batch(batch)
        place = dimension.sharder.local_shard(order, 1)
        losses.append(score(output_of(model, {"input_ids": part["input_ids"]}), place))
    with accelerator.maybe_context_parallel(), torch.no_grad():
        output_of(model, words())
    accelerator.backward(sum(losses) * dimension.size)
    wanted = dict(alone.named_parameters())
    return max(
        ((p.grad.full_tensor() - wanted[name].grad).norm() / (1 + wanted[name].grad.norm())).item()
        for name, p in model.named_parameters()
    )


@BOTH
def test_blocks_are_computed_again_as_in_their_own_forward(ranks: RankServer, size: str) -> None:
    """A later forward, of another length or on whole sequences, made the gradients wrong or failed."""
    assert max(ranks(2, recomputed_in_turn, size)) < 1e-5


class LossAlone(nn.Module):
    """Returns the mean over its labels and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_decoder()

    def forward(self, input_ids: Any, position_ids: Any, shift_labels: Any, **more: Any) -> torch.Tensor:
        logits = self.inner(input_ids, position_ids)
        mask, labels = shift_labels.flatten() != IGNORED, shift_labels.flatten().clamp(min=0)
        losses = F.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
        return (losses * mask).sum() / mask.sum()


def loss_alone(size: str) -> tuple[list[int], float]:
    """The labels of this process, and how far gradients are from those of one process."""
    accelerator = opened(size)
    alone, model = LossAlone(), LossAlone()
    rows = texts(2)[ROWS:]  # with labels at their ends alone
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    order = torch.arange(batch["input_ids"].shape[1]).expand(ROWS, -1)
    alone(batch["input_ids"], order, targets(batch)).backward()
    model, loader = accelerator.prepare(model, DataLoader(rows, batch_size=ROWS))  # type: ignore[arg-type]
    (part,) = loader
    count = (part["shift_labels"] != IGNORED).sum()
    accelerator.backward(model(**part), num_items=count)
    held = dict(model.named_parameters())
    far = [
        (held[name].grad.full_tensor() - p.grad).norm().item()  # type: ignore[union-attr]
        for name, p in alone.named_parameters()
        if p.grad is not None
    ]
    return accelerator.gather(count.view(1)).tolist(), max(far)


@pytest.mark.parametrize("size", ["cp_size", "sp_size", "ring"])
def test_a_part_without_labels_adds_nothing(ranks: RankServer, size: str) -> None:
    """Zero times infinity inside of the model made all gradients NaN."""
    for counts, far in ranks(2, loss_alone, size):
        assert sorted(counts)[0] == 0 < sorted(counts)[1]
        assert far < 1e-6


# Those whose attention is in modules that are split into stages; the loss is outside of the model.
STAGED = (
    *("recomputed", "padded before", "filled up", "documents"),
    *(("torch's layers", "both ways", "documents in windows") if LONG_RUN else ()),
)


def compared_staged(size: str) -> dict[str, dict[str, float]]:
    return {name: compared(size, name, 2) for name in STAGED}


@pytest.mark.parametrize("size", ["cp_size", long_run_param("sp_size")])
def test_they_are_so_in_stages_too(ranks: RankServer, size: str) -> None:
    """Stages see the rows of a batch in chunks; each chunk is a part of its sequences."""
    for found in ranks(4, compared_staged, size, timeout=110):
        assert found.keys() == set(STAGED)
        assert {name: far for name, far in found.items() if not max(far.values()) < 1e-5} == {}


# --- loaders and blocks


def blocks(size: str) -> list[Any]:
    """Whole sequences by a loader of its own, cut for the time of a block; what the forward is on."""
    accelerator = opened(size)
    model = accelerator.prepare(llama())
    model.eval()
    alone = llama().eval()
    batch = words()
    tokens, kept, same = batch["input_ids"], torch.arange(16).expand(4, 16), batch["input_ids"].clone()
    wanted = alone(same).logits
    seen: list[Any] = []
    exchange = accelerator.strategy.dimensions[0].attention
    with torch.no_grad():
        # Not cut: whole sequences, computed by each process for itself.
        seen.append(torch.allclose(model(tokens).logits, wanted, atol=1e-5) and not exchange.calls)
        with accelerator.maybe_context_parallel([tokens, kept], [1, 1], {kept}):
            mine = model(input_ids=tokens, position_ids=kept).logits
            seen.append((tuple(tokens.shape), exchange.calls))
            seen.append(torch.allclose(accelerator.strategy.merge_model_parallel(mine), wanted, atol=1e-5))
            # Cut once: in a block of a block, and by name afterwards.
            with accelerator.maybe_context_parallel(buffers=[kept], buffer_seq_dims=[1]):
                seen.append(tuple(kept.shape))
            with accelerator.maybe_context_parallel():
                seen.append(torch.allclose(model(same).logits, wanted, atol=1e-5))
        seen.append((torch.equal(tokens, same), tuple(kept.shape)))
        try:
            with accelerator.maybe_context_parallel(buffers=[tokens, tokens[:, :7]], buffer_seq_dims=[1, 1]):
                pass
        except ValueError as error:
            seen.append((str(error).splitlines()[0], torch.equal(tokens, same)))
    return seen


@BOTH
def test_whole_sequences_are_parts_for_the_time_of_a_block(ranks: RankServer, size: str) -> None:
    """A6: cut in place, whole again afterwards, never cut twice."""
    found = same_on_all(ranks(2, blocks, size))
    refused = ("sequences of 7 tokens cannot be sharded over 2 processes", True)
    assert found == [True, ((4, 8), 2), True, (4, 8), True, (True, (4, 8)), refused]


def read(size: str) -> dict[str, Any]:
    """Which tokens loaders give, by how they were prepared."""
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig

    def rows(loader: Any) -> list[list[int]]:
        return [row.tolist() for batch in loader for row in batch["input_ids"]]

    data = [{"input_ids": torch.arange(8) + 10 * row} for row in range(4)]
    default: dict[str, Any] = {size: 2}
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**default))
    model, together = accelerator.prepare(llama(), DataLoader(data, batch_size=1))  # type: ignore[arg-type]
    apart = accelerator.prepare(DataLoader(data, batch_size=1))  # type: ignore[arg-type]
    adapted = accelerator.deepspeed_ulysses_dl_adapter(apart, None)
    found: dict[str, Any] = {"together": rows(together), "apart": rows(apart), "adapted": rows(adapted)}
    found["lengths"] = [len(together), len(apart), len(adapted)]

    def shard(tokens: torch.Tensor) -> None:
        with accelerator.maybe_context_parallel([tokens], [1]):
            assert tokens.shape == (1, 4)

    found["block"] = said(lambda: shard(next(iter(apart))["input_ids"]))
    shard(torch.arange(8).view(1, 8))
    with mock.patch("torch.distributed.all_gather_object") as exchange:  # not in every step
        shard(torch.arange(8).view(1, 8))
    assert not exchange.called
    if size == "cp_size":
        (tokens, *_), own = (batch["input_ids"] for batch in apart), accelerator.prepare(Counting())
        model.train()
        uses = [lambda: model(tokens), lambda: model(tokens + 0), lambda: own(tokens)]
        found["training"] = [said(use) for use in uses]
        with torch.no_grad():
            model(tokens)
        with accelerator.maybe_context_parallel():
            model(tokens)
    # Whole sequences, as long as the parts of others before them.
    short = accelerator.prepare(DataLoader([torch.arange(4)], batch_size=1))  # type: ignore[arg-type]
    for batch in short if size == "sp_size" else ():
        expected = llama().eval()(batch).logits
        torch.testing.assert_close(model.eval()(batch).logits, expected)
        with pytest.raises(ValueError, match="none of a prepared loader's"):
            model(batch + 0)
        with pytest.raises(ValueError, match="none of a prepared loader's"):
            model.train()(batch)
    kind = TorchContextParallelConfig if size == "cp_size" else DeepSpeedSequenceParallelConfig
    for cut in (True, False, {"input_ids": 1}):
        sizes: dict[str, Any] = {size: 2, f"{size[:2]}_handler": kind(cut=cut)}
        asked = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
        found[str(cut)] = rows(asked.prepare(DataLoader(data, batch_size=1)))  # type: ignore[arg-type]
    return found


def test_loaders_give_whole_sequences_under_context_parallelism(ranks: RankServer) -> None:
    """As in 1.x, where only the block shards; training on them outside of one would share nothing."""
    whole = [[10 * row + token for token in range(8)] for row in range(4)]
    parts = [[0, 1, 6, 7], [2, 3, 4, 5]]
    for place, found in enumerate(ranks(2, read, "cp_size")):
        mine = [[row[token] for token in parts[place]] for row in whole]
        assert found.pop("lengths") == [4, 4, 4]
        assert found.pop("block") == "nothing"
        *calls, own = found.pop("training")
        assert calls == ["LlamaForCausalLM trains on whole sequences"] * 2
        assert own == "Counting trains on whole sequences"
        asked = {"together": whole, "apart": whole, "adapted": whole}
        assert found == {**asked, "True": mine, "False": whole, "{'input_ids': 1}": mine}


def test_ulysses_reads_other_data_where_nothing_is_sharded(ranks: RankServer) -> None:
    """C7: the adapter gives the batches of all processes, one after another, each cut for all."""
    whole = [[10 * row + token for token in range(8)] for row in range(4)]
    for place, found in enumerate(ranks(2, read, "sp_size")):
        mine = [row[4 * place : 4 * place + 4] for row in whole]
        assert found.pop("lengths") == [4, 2, 4]
        assert found.pop("block") == "the 2 processes that share sequences have different ones"
        other = whole[place::2]
        asked = {"together": mine, "apart": other, "adapted": mine}
        assert found == {**asked, "True": mine, "False": other, "{'input_ids': 1}": mine}


# --- numbers


def measured(sizes: dict[str, Any]) -> dict[str, Any]:
    """The same functions in training and evaluation, over a number of rows that nothing divides."""
    from accelerate import Accelerator, ParallelismConfig

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes) if sizes else None)
    data = [{**row, "number": torch.tensor(index)} for index, row in enumerate(texts(2)[:7])]
    model, loader = accelerator.prepare(llama(), DataLoader(data, batch_size=2))  # type: ignore[arg-type]
    means, words_, numbers, mean = [], [], [], []
    before = [accelerator.gather_for_metrics(batch["input_ids"] + 0) for batch in loader]
    assert torch.cat(before).tolist() == [row["input_ids"].tolist() for row in data]
    for mode in (model.train, model.eval):
        mode()
        losses, counts = [], []
        for batch in loader:
            number, real = batch.pop("number"), loader.real
            wanted = targets(batch)[:real]
            with torch.no_grad():
                output = model(**batch)
                without_shifted = {k: v for k, v in batch.items() if k != "shift_labels"}
                torch.testing.assert_close(model(**without_shifted).loss, output.loss, equal_nan=True)
                logits = output.logits[:real]
            counts.append((wanted != IGNORED).sum())
            losses.append(F.cross_entropy(logits.flatten(0, 1), wanted.flatten()))
            if not model.training:
                filled = F.pad(logits.argmax(-1), (0, 0, 0, 2 - len(logits)))
                words_.append(accelerator.gather_for_metrics(filled))
                as_array = accelerator.gather_for_metrics(filled.numpy())
                assert (as_array == words_[-1].numpy()).all()
                numbers.append(accelerator.gather_for_metrics({"number": number})["number"])
                mean.append(accelerator.gather_for_metrics(losses[-1].nan_to_num()).mean())
        means.append(accelerator.mean_loss(losses, counts).item())
    return {
        "loss": means,
        "words": torch.cat(words_).tolist(),
        "numbers": torch.cat(numbers).tolist(),
        "mean": len(mean),
    }


def test_numbers_of_parts_are_those_of_the_whole(ranks: RankServer) -> None:
    """C1: the loss over all tokens, in training and in evaluation; words joined, each sample once.

    A mean of the means of parts would be another number, and so would their sum.
    """
    (alone,) = ranks(1, measured, {})
    assert alone["loss"][0] == alone["loss"][1]
    layouts: list[tuple[dict[str, Any], int]] = [
        *(({"sp_size": 2}, 2), ({**CUT, "dp_shard_size": 2}, 4), ({}, 2)),
        *([(CUT, 2)] if LONG_RUN else []),
    ]
    for sizes, n in layouts:
        found = same_on_all(ranks(n, measured, sizes))
        assert found["loss"] == pytest.approx(alone["loss"], abs=1e-6)
        for what in ("words", "numbers"):
            # Where the last batch has no fillers, the row that the program pads with is kept, as in 1.x.
            assert found[what][:7] == alone[what][:7], (sizes, what)
            assert len(found[what]) == (8 if what == "words" and sizes == {"sp_size": 2} else 7), sizes


# --- states


def saved(size: str, folder: str) -> None:
    """Trains a step and saves, whole and in parts."""
    accelerator = opened(size)
    model = llama()
    model, optimizer, loader = accelerator.prepare(
        model,
        adamw(model),
        DataLoader(texts(2), batch_size=ROWS),  # type: ignore[arg-type]
    )
    for batch in loader:
        accelerator.backward(loss_of(model, batch), num_items=(targets(batch) != IGNORED).sum())
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(f"{folder}/state")
    accelerator.save_model(model, f"{folder}/model")


def loaded(folder: str) -> dict[str, Any]:
    """Goes on alone."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = llama()
    loader: Any = DataLoader(texts(2), batch_size=ROWS)  # type: ignore[arg-type]
    model, *_ = accelerator.prepare(model, adamw(model), loader)
    accelerator.load_state(f"{folder}/state")
    return {name: value.clone() for name, value in model.state_dict().items()}


@BOTH
def test_a_checkpoint_goes_on_in_one_process(ranks: RankServer, size: str, tmp_path: Path) -> None:
    """D6: weights of the step that one process would have taken."""
    from safetensors.torch import load_file

    from tests.support.sequences import alone

    ranks(2, saved, size, str(tmp_path))
    (found,) = ranks(1, loaded, str(tmp_path))
    file = load_file(tmp_path / "model" / "model.safetensors")
    for name, value in alone("llama", 2, 1)[2].items():
        assert torch.equal(found[name], file[name])
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)


# --- refusals


def local_mask(q: Any, k: Any, v: Any, positions: Any) -> torch.Tensor:
    """What models make that know of their own tokens only."""
    return F.scaled_dot_product_attention(q, k, v, torch.ones(q.shape[-2], k.shape[-2]).tril().bool())


def prefix(q: Any, k: Any, v: Any, positions: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, F.pad(k, (0, 0, 3, 0)), F.pad(v, (0, 0, 3, 0)))


def by_hand(q: Any, k: Any, v: Any, positions: Any) -> torch.Tensor:
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class Weights(nn.Module):
    """Torch's attention, with the weights that it gives by default."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        return self.attention(x, x, x)[0]


class Counting(nn.Module):
    """It counts its positions by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Own(all_keys)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.inner(words, torch.arange(words.shape[1]).expand(words.shape))


def eager() -> Any:
    return llama(attn_implementation="eager")


def stateful() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.LSTM(8, 8))


def mixing() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Conv1d(8, 8, 3))


def odd() -> Any:
    return Own(all_keys, heads=1)


def refused(size: str) -> dict[str, str]:
    """The first line of each refusal."""
    accelerator = opened(size)
    batch = places()
    uses: dict[str, Callable[[], Any]] = {
        "eager": lambda: accelerator.prepare(eager()),
        "state": lambda: accelerator.prepare(stateful()),
        "mixing": lambda: accelerator.prepare(mixing()),
        "local mask": lambda: run(Own(local_mask)),
        "prefix": lambda: run(Own(prefix)),
        "by hand": lambda: run(Own(by_hand)),
        "weights": lambda: run(Weights()),
        "positions": lambda: run(Counting(), change=lambda part: {"words": part["input_ids"]}),
        "heads": lambda: run(odd()),
        "slice": lambda: run(llama(), change=lambda part: {"input_ids": part["input_ids"][:, 1:]}),
        "copy": lambda: run(llama(), change=lambda part: {"input_ids": part["input_ids"] + 0}),
        "copy in evaluation": lambda: run(
            llama().eval(), change=lambda part: {"input_ids": part["input_ids"] + 0}
        ),
        "copied labels": lambda: run(
            llama(), change=lambda part: {**part, "labels": part["input_ids"].clone()}
        ),
        "length": lambda: slice_batch({"input_ids": torch.ones(2, 7)}),
        "pooled": lambda: slice_batch({**words(), "labels": torch.ones(4)}),
        "buffers": lambda: accelerator.maybe_context_parallel([torch.ones(2, 8)], []).__enter__(),
        "counts": lambda: accelerator.mean_loss([1.0, 2.0], [3]),
        "rows": lambda: accelerator.strategy.merge_model_parallel(torch.tensor([accelerator.process_index])),
        "texts": lambda: accelerator.gather_for_metrics([str(accelerator.process_index)]),
        "objects": lambda: accelerator.gather_for_metrics(
            [accelerator.process_index], use_gather_object=True
        ),
        "equal texts": lambda: accelerator.gather_for_metrics(["a", "b"], use_gather_object=True),
        "missing texts": lambda: accelerator.gather_for_metrics(
            {"scores": torch.ones(1), "texts": ["a"] * accelerator.process_index}
        ),
        "equal objects": lambda: accelerator.gather_for_metrics(
            [
                *(math.nan, torch.tensor([math.nan]), np.array([math.nan]), nn.Identity()),
                *({"a", "b", "c"}, SimpleNamespace(values=torch.ones(2))),
            ],
            use_gather_object=True,
        ),
        "other objects": lambda: accelerator.gather_for_metrics(
            [SimpleNamespace(values=torch.full((2,), accelerator.process_index))], use_gather_object=True
        ),
    }

    def slice_batch(whole: Any) -> Any:
        return accelerator.strategy.dimensions[-1].slice_batch(whole)

    def run(model: Any, *names: str, change: Callable[[Any], Any] = lambda part: part) -> Any:
        part = change(slice_batch(batch))
        return accelerator.prepare(model)(**{name: part[name] for name in names or part})

    return {name: said(use) for name, use in uses.items()}


def said(use: Callable[[], Any]) -> str:
    try:
        use()
    except (ValueError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return "nothing"


@BOTH
def test_what_cannot_be_right_is_refused_with_words(ranks: RankServer, size: str) -> None:
    """The same words on every process, before anything is trained."""
    found = same_on_all(ranks(2, refused, size))
    what = "context parallelism" if size == "cp_size" else "sequence parallelism"
    local = "where each of 2 processes has 8"
    none = "LlamaForCausalLM got tensors that are none of a prepared loader's: (4, {})"
    heads = "attention of 1 heads cannot be sharded over sp_size=2 processes"
    assert found == {
        "eager": f"attn_implementation='eager' does not go with {what}",
        "state": "1 (LSTM) cannot compute a part of a sequence",
        "mixing": "1 (Conv1d) cannot compute a part of a sequence",
        "local mask": f"an attention mask of 8 queries over 8 keys, {local} of 16 tokens",
        "prefix": f"attention of 8 queries over 11 keys, {local} tokens of a sequence",
        "by hand": "Own has computed a part of its sequences without any attention",
        "weights": "nn.MultiheadAttention with need_weights=True on shared sequences",
        "positions": "Counting does not get the positions of its tokens",
        "heads": heads if size == "sp_size" else "nothing",
        "slice": none.format(7),
        "copy": none.format(8),
        "copy in evaluation": none.format(8),
        "copied labels": "LlamaForCausalLM got labels, and no shift_labels",
        "length": "sequences of 7 tokens cannot be sharded over 2 processes",
        "pooled": "a batch of sequences to shard has labels (4,), no value for each token",
        "buffers": "1 buffers and 0 buffer_seq_dims",
        "counts": "mean_loss of 2 losses with 1 numbers of items",
        "rows": "a tensor of torch.int64, (1,), differs between processes of one sequence",
        "texts": "texts or objects to gather differ between processes of one sequence",
        "objects": "texts or objects to gather differ between processes of one sequence",
        "equal texts": "nothing",
        "missing texts": "texts or objects to gather differ between processes of one sequence",
        "equal objects": "nothing",
        "other objects": "texts or objects to gather differ between processes of one sequence",
    }


class Halo(nn.Module):
    """A convolution over tokens that exchanges them itself: it keeps the mesh of those who share them."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mesh, self.embed, self.mix = mesh, nn.Embedding(WORDS, 8), nn.Conv1d(8, 8, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(words) for _ in range(self.mesh.size())]
        torch.distributed.all_gather(parts, words.contiguous(), group=self.mesh.get_group())
        mixed = self.mix(F.pad(self.embed(torch.cat(parts, 1)).transpose(1, 2), (1, 0)))
        return mixed.chunk(self.mesh.size(), -1)[self.mesh.get_local_rank()]


def sharded_by_hand() -> tuple[dict[str, tuple[str, str]], list[list[int]], bool]:
    """Whole sequences, then parts, for models that cannot compute these; parts in a row, for one that can."""
    from accelerate import Accelerator, ParallelismConfig

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))

    def shard(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with accelerator.maybe_context_parallel([tokens], [1]):
            return model(tokens)

    uses: dict[str, tuple[str, str]] = {}
    for name, make in {"eager": eager, "state": stateful, "mixing": mixing}.items():
        model, tokens = accelerator.prepare(make()), words()["input_ids"][:, :8].clone()
        model.train(name != "eager")
        with mock.patch("warnings.warn") as warned:
            whole = said(lambda m=model, t=tokens: m(t))
        assert warned.called is (name == "state")  # once for all
        uses[name] = whole, said(lambda m=model, t=tokens: shard(m, t))
    with mock.patch.dict(ring_options(), enable_load_balance=False):
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    tokens = torch.arange(8).view(1, 8)
    mesh = accelerator.torch_device_mesh["cp"]
    expected = F.pad((layer := Halo(mesh)).embed(tokens).transpose(1, 2), (1, 0))
    expected = layer.mix(expected).detach().chunk(2, -1)[accelerator.process_index]
    with accelerator.maybe_context_parallel([tokens], [1]):
        parts = tokens.tolist()
    return uses, parts, torch.allclose(shard(accelerator.prepare(layer), tokens), expected, atol=1e-6)


def test_models_are_refused_when_they_compute_parts(ranks: RankServer) -> None:
    """A program may shard in layers of its own, that the model has instead or beside: 1.x takes it too."""
    for place, (uses, parts, is_right) in enumerate(ranks(2, sharded_by_hand)):
        assert uses == {
            "eager": ("nothing", "attn_implementation='eager' does not go with context parallelism"),
            "state": ("nothing", "1 (LSTM) cannot compute a part of a sequence"),
            "mixing": ("nothing", "1 (Conv1d) cannot compute a part of a sequence"),
        }
        assert (parts, is_right) == ([[[0, 1, 2, 3], [4, 5, 6, 7]][place]], True)


def flash_losses() -> tuple[list[float], str, str]:
    """Losses of two documents in a row, with and without flash attention in the configuration."""
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="flash_attention_2")
    accelerator: Any = Accelerator(
        cpu=True, parallelism_config=ParallelismConfig(sp_size=2, sp_handler=handler)
    )
    tokens = torch.arange(16).remainder(5)[None]
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(16).remainder(8)[None]}
    losses, notes = [], []
    for name, cached in (
        ("sdpa", False),
        ("flash_attention_2", True),
        ("kernels-community/flash-attn2", True),
    ):
        model = llama(use_cache=cached)
        model.config._attn_implementation = name
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = accelerator.prepare(model)
        notes.append(sum("(sdpa)" in str(each.message) for each in caught))
        losses.append(model(**accelerator.strategy.dimensions[-1].slice_batch(batch)).loss.item())
    lengths = {"cu_seq_lens_q": torch.tensor([0, 8, 16]), "position_ids": torch.arange(16)[None]}
    part = accelerator.strategy.dimensions[-1].slice_batch({**batch, **lengths})
    capped = llama()
    capped.config._attn_implementation, capped.config.attn_logit_softcapping = "flash_attention_2", 50.0
    refusals = (said(lambda: model(**part)), said(lambda: accelerator.prepare(capped)))
    return [*losses, *notes], *refusals


def test_ulysses_computes_flash_attention_by_torchs_function(ranks: RankServer) -> None:
    """Pages about Ulysses ask for it; documents stay apart, also with a cache."""
    for (sdpa, flash, hub, *notes), lengths, capped in ranks(2, flash_losses):
        assert sdpa == pytest.approx(flash) == pytest.approx(hub)
        assert notes == [0, 1, 1]
        assert lengths == "cu_seq_lens_q names several documents, and position_ids one"
        assert capped == "attn_implementation='flash_attention_2' does not go with sequence parallelism"


# --- keys around a ring


def before(q: Any, k: Any, v: Any, positions: Any) -> torch.Tensor:
    """Causal, and scaled otherwise."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)


def dropped(q: Any, k: Any, v: Any, positions: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)


def rounds(length: int) -> Batch:
    """A length of which no process has a part from the head and one from the tail."""
    return {name: value[:, :length] for name, value in places().items()}


AROUND: dict[str, tuple[Callable[[], Any], Callable[[], Batch]]] = {
    **{name: MODELS[name] for name in ("all keys", "grouped", "torch's layers", "recomputed")},
    "a mask of ones": (llama, lambda: {**words(), "attention_mask": torch.ones(4, 16)}),
    "scaled": (lambda: Own(before), places),
    "narrow heads": (lambda: Own(before, heads=8), places),
    "unbalanced": (lambda: Own(before), lambda: rounds(10)),
}
# What its kernels do not take: all-gathered.
GATHERED = {
    **{name: MODELS[name] for name in ("single", "padded before", "documents")},
    "windows": (mistral, words),
}


def around() -> tuple[dict[str, dict[str, float]], list[str], dict[str, Any]]:
    MODELS.update(AROUND | GATHERED | {"dropout": (lambda: Own(dropped), places)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        right = {name: compared("ring", name) for name in AROUND | GATHERED}
        compared("ring", "dropout")  # each layout has random numbers of its own
    notes = [text for each in caught if "all-gathered" in (text := str(each.message))]
    options = ring_options()
    return right, notes, {name: str(value) for name, value in options.items()}


def test_keys_go_around_torchs_ring(ranks: RankServer) -> None:
    """B1: with its own kernel of the host, which its table for rings has not. Its options stay the user's."""
    found = ranks(2, around, timeout=110)
    for right, _, _ in found:
        assert {name: far for name, far in right.items() if not max(far.values()) < 1e-5} == {}
    notes, options = same_on_all([told for _, *told in found])
    reasons = [
        note.partition("attention call: ")[2].partition(",")[0].partition(". Its")[0] for note in notes
    ]
    assert reasons == [
        "its kernels take queries",
        "its kernels take no attention mask",
        "the gradient of dropout would use the random numbers of the last block only",
    ]
    assert options == {
        "convert_to_f32": "True",
        "enable_load_balance": "True",
        "rotate_method": "_RotateMethod.ALL_GATHER",
    }


# --- beside stages


def staged(size: str) -> list[str]:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import PipelineParallelConfig

    def alternating() -> None:
        options = PipelineParallelConfig(schedule="1f1b")
        config = ParallelismConfig(pp_size=2, pp_handler=options, **{size: 2})  # type: ignore[arg-type]
        Accelerator(cpu=True, parallelism_config=config)

    def between() -> None:
        accelerator = opened(size, 2)
        model = accelerator.prepare(Between())
        model(**accelerator.strategy.dimensions[-1].slice_batch(places()))

    def by_hand() -> None:
        accelerator = opened(size, 2)
        model = accelerator.prepare(nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 8)))
        with accelerator.maybe_context_parallel([tokens := words()["input_ids"]], [1]):
            model(tokens)

    def unshifted() -> None:
        accelerator = opened(size, 2)
        model = accelerator.prepare(llama(use_cache=False))
        part = accelerator.strategy.dimensions[-1].slice_batch({**words(), "labels": words()["input_ids"]})
        model(input_ids=part["input_ids"], labels=part["labels"])

    return [said(alternating), said(between), said(by_hand), said(unshifted)]


class Between(Own):
    """Its attention is a function in the forward of the model, between modules."""

    def __init__(self) -> None:
        super().__init__(all_keys)


@BOTH
def test_what_stages_cannot_do_with_parts_is_refused(ranks: RankServer, size: str) -> None:
    """On all processes, in the same words."""
    alternating, between, by_hand, unshifted = same_on_all(ranks(4, staged, size))
    assert alternating == f"schedule='1f1b' does not go with {size}=2"
    assert between == "Between calls attention between the modules that are split into stages"
    assert by_hand == "Sequential has computed a part of its sequences without any attention"
    assert unshifted == "LlamaForCausalLM got labels, and no shift_labels"


def whole_in_stages(size: str) -> list[bool]:
    """Sequences that nothing has cut, as whole ones."""
    accelerator = opened(size, 2)
    alone, model = llama().eval(), accelerator.prepare(llama()).eval()
    tokens = words()["input_ids"]
    with torch.no_grad():
        wanted = alone(tokens).logits
        found = [torch.allclose(model(tokens).logits, wanted, atol=1e-5)]
        with accelerator.maybe_context_parallel([tokens], [1]):
            mine = model(input_ids=tokens).logits
            found.append(torch.allclose(accelerator.strategy.merge_model_parallel(mine), wanted, atol=1e-5))
    return found


@pytest.mark.parametrize("size", ["cp_size", long_run_param("sp_size")])
def test_stages_take_whole_sequences_and_blocks(ranks: RankServer, size: str) -> None:
    assert ranks(4, whole_in_stages, size) == [[True, True]] * 4


# --- number formats


def mixed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Queries and keys in float32, as rotary positions leave them under autocast; values in 16 bits."""
    return F.scaled_dot_product_attention(q.float(), k.float(), v, is_causal=True)


def under_autocast(size: str) -> torch.Tensor:
    accelerator = opened(size, mixed_precision="bf16")
    loader = DataLoader([dict(row) for row in texts(1)], batch_size=ROWS)  # type: ignore[arg-type]
    model, loader = accelerator.prepare(Own(mixed), loader)
    (batch,) = loader
    return model(batch["input_ids"], batch["position_ids"]).float().pow(2).mean().detach()


@pytest.mark.parametrize("size", ["cp_size", "sp_size", "ring"])
def test_attention_takes_what_autocast_casts(ranks: RankServer, size: str) -> None:
    """Torch's own function casts all three; formats that differ are no mistake of the model."""
    whole = Own(mixed)
    batch = {name: torch.stack([row[name] for row in texts(1)]) for name in ("input_ids",)}
    places = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    with torch.autocast("cpu", torch.bfloat16):
        expected = whole(batch["input_ids"], places).float().pow(2).mean().detach()
    found = torch.stack(ranks(2, under_autocast, size)).mean()
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3)
