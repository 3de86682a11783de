"""Cutting sequences into parts and joining them again, as functions of plain tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate.core.errors import PrepareError
from accelerate.strategy.parallelism.context.attention import ACTIVE, document_ids, register_mask_function
from accelerate.strategy.parallelism.context.context_parallel import AllGatherAttention
from accelerate.strategy.parallelism.context.sequence_shards import (
    IGNORED,
    SequenceSharder,
    join_shards,
    shard_tokens,
    shift_labels,
    token_ranges,
)

SIZES = [(size, balanced) for size in (1, 2, 3, 4, 8) for balanced in (False, True)]


@pytest.mark.parametrize(("size", "balanced"), SIZES)
def test_each_token_is_in_one_part_and_parts_are_equal(size: int, balanced: bool) -> None:
    for total in range(size, 6 * size + 1, size):
        found = [token_ranges(total, size, place, balanced) for place in range(size)]
        tokens = [[t for a, b in part for t in range(a, b)] for part in found]
        assert sorted(t for part in tokens for t in part) == list(range(total))
        assert {len(part) for part in tokens} == {total // size}


@pytest.mark.parametrize("size", [2, 3, 8])
def test_balanced_parts_have_the_same_work(size: int) -> None:
    """Causal attention of a token costs as much as there are tokens before it."""
    pairs = [
        sum(t for a, b in token_ranges(12 * size, size, place, True) for t in range(a, b))
        for place in range(size)
    ]
    assert len(set(pairs)) == 1


@pytest.mark.parametrize(("size", "balanced"), SIZES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_joined_parts_are_the_whole(size: int, balanced: bool, dim: int) -> None:
    whole = torch.arange(24 * 24 * 24).view(24, 24, 24)
    parts = [shard_tokens(whole, dim, size, place, balanced) for place in range(size)]
    assert torch.equal(join_shards(parts, dim, balanced), whole)
    parts[0].zero_()
    assert torch.equal(whole.flatten(), torch.arange(24**3)), "a part is a tensor of its own"


def batch(length: int, **more: Any) -> dict[str, Any]:
    tokens = torch.arange(2 * length).view(2, length)
    return {"input_ids": tokens, "labels": tokens.clone(), "names": ["a", "b"], **more}


def parts_of(whole: dict[str, Any], size: int, balanced: bool = False) -> list[dict[str, Any]]:
    return [SequenceSharder(size, place, balanced)(whole) for place in range(size)]


@pytest.mark.parametrize("balanced", [False, True])
def test_labels_are_shifted_before_they_are_sharded(balanced: bool) -> None:
    """The last token of a part learns the first of the next."""
    whole = batch(8)
    parts = parts_of(whole, 2, balanced)
    targets = join_shards([part["shift_labels"] for part in parts], 1, balanced)
    assert torch.equal(targets, shift_labels(whole["labels"]))
    assert targets[:, -1].tolist() == [IGNORED] * 2
    assert sum((part["shift_labels"] != IGNORED).sum() for part in parts) == 2 * 7
    assert torch.equal(join_shards([part["labels"] for part in parts], 1, balanced), whole["labels"])


def test_labels_that_are_shifted_already_stay() -> None:
    given = torch.full((2, 8), 5)
    parts = parts_of(batch(8, shift_labels=given), 2)
    assert all((part["shift_labels"] == 5).all() and part["shift_labels"].shape == (2, 4) for part in parts)


@pytest.mark.parametrize("balanced", [False, True])
def test_positions_are_those_of_the_whole_sequence(balanced: bool) -> None:
    for part in parts_of(batch(8), 2, balanced):
        assert torch.equal(part["position_ids"], part["input_ids"] % 8)
    given = torch.arange(8).flip(0).expand(1, 8)
    found = [part["position_ids"] for part in parts_of(batch(8, position_ids=given), 2, balanced)]
    assert torch.equal(join_shards(found, 1, balanced), given)


def test_masks_of_keys_stay_whole_and_rows_are_sharded() -> None:
    keys, rows = torch.ones(2, 8, dtype=torch.long), torch.ones(2, 1, 8, 8).tril()
    assert all(
        torch.equal(part["attention_mask"], keys) for part in parts_of(batch(8, attention_mask=keys), 2)
    )
    found = [part["attention_mask"] for part in parts_of(batch(8, attention_mask=rows), 2)]
    assert torch.equal(torch.cat(found, 2), rows)


def test_what_has_no_tokens_stays() -> None:
    image = torch.ones(2, 3, 4)
    for part in parts_of(batch(8, image=image, weight=torch.ones(2), loss_mask=torch.ones(2, 8)), 2):
        assert part["image"] is image
        assert part["weight"].shape == (2,)
        assert part["loss_mask"].shape == (2, 4)
        assert part["names"] == ["a", "b"]


@pytest.mark.parametrize("balanced", [False, True])
def test_a_mask_allows_padding(balanced: bool) -> None:
    mask = torch.ones(2, 7, dtype=torch.long)
    parts = parts_of(batch(7, attention_mask=mask), 2, balanced)
    assert all(part["input_ids"].shape == (2, 4) for part in parts)
    assert [part["attention_mask"].tolist() for part in parts] == [[[1] * 7 + [0]] * 2] * 2
    targets = join_shards([part["shift_labels"] for part in parts], 1, balanced)
    assert targets[:, 6:].tolist() == [[IGNORED] * 2] * 2


def test_a_length_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(PrepareError, match=r"7 tokens.*2 processes(.|\n)*pad_to_multiple_of=4"):
        SequenceSharder(2, 0, True)(batch(7))


def test_named_keys_alone_are_sharded() -> None:
    given = {
        "tokens": torch.arange(16).view(2, 8),
        "frames": torch.zeros(8, 3),
        "input_ids": torch.ones(2, 8),
    }
    part = SequenceSharder(2, 1, False, {"tokens": 1, "frames": 0})(given)
    assert {name: tuple(value.shape) for name, value in part.items()} == {
        "tokens": (2, 4), "frames": (4, 3), "input_ids": (2, 8), "position_ids": (2, 4),
    }  # fmt: skip
    with pytest.raises(PrepareError, match="no words"):
        SequenceSharder(2, 1, False, {"words": 1, "tokens": 1})(given)


@pytest.mark.parametrize("balanced", [False, True])
def test_tokens_may_come_before_rows(balanced: bool) -> None:
    """Labels are shifted along the tokens, and what is added has them first too."""
    rows_first = {"tokens": torch.arange(24).view(3, 8), "labels": torch.arange(24).view(3, 8)}
    tokens_first = {name: value.T for name, value in rows_first.items()}
    for place in range(2):
        expected = SequenceSharder(2, place, balanced, {"tokens": 1, "labels": 1})(rows_first)
        part = SequenceSharder(2, place, balanced, {"tokens": 0, "labels": 0})(tokens_first)
        assert part.keys() == {"tokens", "labels", "shift_labels", "position_ids"}
        for name, value in part.items():
            assert torch.equal(value, expected[name].T), name


def test_added_keys_follow_tokens_in_the_second_dimension() -> None:
    given = {"frames": torch.zeros(8, 3), "tokens": torch.arange(16).view(2, 8)}
    part = SequenceSharder(2, 1, False, {"frames": 0, "tokens": 1})(given)
    assert part["position_ids"].tolist() == [[4, 5, 6, 7]] * 2


@pytest.mark.parametrize("version", [4, 5])
def test_masks_of_the_library_are_of_own_queries_over_all_keys(
    monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """Version 4 of transformers gives the places of queries, version 5 their number: a stand-in of each."""
    utils = pytest.importorskip("transformers.masking_utils")

    def make(kv_length: int, **given: Any) -> torch.Tensor:
        assert given.keys() >= ({"cache_position"} if version == 4 else {"q_length", "q_offset"})
        start = given.get("q_offset", 0)
        queries = given.get("cache_position", torch.arange(start, start + given.get("q_length", 0)))
        return queries[:, None] >= torch.arange(kv_length)

    monkeypatch.setattr(utils, "ALL_MASK_ATTENTION_FUNCTIONS", functions := {"sdpa": make})
    monkeypatch.setattr(utils.AttentionMaskInterface, "register", functions.__setitem__)
    monkeypatch.setattr("accelerate.strategy.parallelism.context.attention._registered_ids", set())
    register_mask_function()
    monkeypatch.setattr(ACTIVE, "attention", AllGatherAttention(2, 1, None, False))
    own = {"cache_position": torch.arange(4)} if version == 4 else {"q_length": 4, "q_offset": 0}
    assert torch.equal(functions["sdpa"](kv_length=4, **own), torch.ones(8, 8).tril().bool()[4:])


def test_a_single_query_gets_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library leaves the mask of a causal sequence out, and then calls one query alone not causal."""
    utils = pytest.importorskip("transformers.masking_utils")

    def make(kv_length: int, q_length: int, q_offset: int, **options: Any) -> torch.Tensor | None:
        if options.get("allow_is_causal_skip", True):
            return None
        return torch.arange(q_offset, q_offset + q_length)[:, None] >= torch.arange(kv_length)

    monkeypatch.setattr(utils, "ALL_MASK_ATTENTION_FUNCTIONS", functions := {"sdpa": make})
    monkeypatch.setattr(utils.AttentionMaskInterface, "register", functions.__setitem__)
    monkeypatch.setattr("accelerate.strategy.parallelism.context.attention._registered_ids", set())
    register_mask_function()
    monkeypatch.setattr(ACTIVE, "attention", AllGatherAttention(2, 0, None, False))
    assert functions["sdpa"](kv_length=4, q_length=4, q_offset=0) is None
    single: Any = functions["sdpa"](kv_length=1, q_length=1, q_offset=0)
    assert single.tolist() == [[True, False]]


def test_embeddings_are_tokens_too() -> None:
    part = SequenceSharder(2, 1, False)(
        {"inputs_embeds": torch.ones(2, 8, 3), "labels": torch.ones(2, 8).long()}
    )
    assert part["inputs_embeds"].shape == (2, 4, 3)
    assert part["shift_labels"].tolist() == [[1, 1, 1, IGNORED]] * 2


def test_a_batch_without_known_tokens_is_no_batch_of_sequences() -> None:
    cutter = SequenceSharder(2, 0, False)
    assert not cutter.has_tokens({"pixel_values": torch.ones(2, 8)})
    assert not cutter.has_tokens((torch.ones(2, 8), torch.ones(2, 8)))


def test_documents_in_a_row_are_told_by_their_positions() -> None:
    assert document_ids(torch.arange(8).expand(2, 8)) is None
    found = document_ids(torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]))
    assert found is not None
    assert found.tolist() == [[0, 0, 0, 1, 1, 2], [0] * 6]
