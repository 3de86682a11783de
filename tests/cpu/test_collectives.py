"""Collectives over trees on gloo: contents, shapes, disagreements, timeouts."""

from __future__ import annotations

import os
import time
from collections import OrderedDict, namedtuple
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.core.errors import CollectiveError, PrepareError, SettingError
from tests.support.ranks import RankServer, same_on_all
from tests.support.worlds import fake_world

Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


FIRST_CALLS: dict[str, Any] = {
    "gather": lambda utils, rank: utils.gather(torch.tensor([rank])).tolist(),
    "gather_object": lambda utils, rank: utils.gather_object([rank]),
    "reduce": lambda utils, rank: utils.reduce(torch.tensor(float(rank)), "sum").item(),
    "broadcast": lambda utils, rank: utils.broadcast(torch.tensor(rank), 1).item(),
    "broadcast_object_list": lambda utils, rank: utils.broadcast_object_list([rank], 1),
    "pad": lambda utils, rank: utils.pad_across_processes(torch.ones(rank + 1)).tolist(),
    "copy": lambda utils, rank: utils.operations.copy_tensor_to_devices(
        torch.ones(1) if rank else None
    ).tolist(),
    "shapes": lambda utils, rank: utils.operations.gather_tensor_shape(torch.ones(rank)),
    "wait": lambda utils, rank: utils.wait_for_everyone(),
}


def first_calls(path: str) -> dict[str, Any]:
    """Make each call before there is a state or an ``Accelerator``, also in a group of the program's own."""
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    from accelerate import PartialState, utils
    from accelerate.data_loader import DataLoaderDispatcher, prepare_data_loader

    rank, results = int(os.environ["RANK"]), dict[str, Any]()
    loader: Any = DataLoader(torch.arange(4))  # pyright: ignore[reportArgumentType]
    calls = FIRST_CALLS | {
        "loader": lambda _, __: [b.tolist() for b in prepare_data_loader(loader)],
        "dispatcher": lambda _, __: [b.tolist() for b in DataLoaderDispatcher(range(4))],
    }
    for name, call in calls.items():
        results[name] = call(utils, rank)
        assert PartialState._shared_state["num_processes"] == 2, name
        PartialState._reset_state()  # the next call finds the group, but no state
    PartialState().destroy_process_group()
    PartialState._reset_state()
    for variable in "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE":
        del os.environ[variable]
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    results["own group"] = utils.gather_object([rank])
    return results


def test_a_collective_that_is_the_first_call_joins_the_ranks(ranks: RankServer, tmp_path: Path) -> None:
    first, second = ranks(2, first_calls, str(tmp_path / "store"))
    assert (first.pop("pad"), second.pop("pad")) == ([1.0, 0.0], [1.0, 1.0])
    assert (first.pop("loader"), second.pop("loader")) == ([[0], [2]], [[1], [3]])
    assert (first.pop("dispatcher"), second.pop("dispatcher")) == ([[0], [2]], [[1], [3]])
    assert first == second
    assert first == {
        "gather": [0, 1],
        "gather_object": [0, 1],
        "reduce": 1.0,
        "broadcast": 1,
        "broadcast_object_list": [1],
        "copy": [1.0],
        "shapes": [(0,), (1,)],
        "wait": None,
        "own group": [0, 1],
    }


def reduced_dtypes() -> list[Any]:
    """Reduce scalars that are floats on rank 0 and integers on rank 1, alone and beside a large tensor."""
    import warnings

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    score, integer = torch.tensor(2.5, requires_grad=True), torch.tensor(1)
    scalar = integer if rank else score
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        total = accelerator.reduce(scalar)
        tree = accelerator.reduce({"large": torch.ones(100_000), "score": scalar}, "mean")
        greatest = accelerator.reduce(torch.tensor(True) if rank else torch.tensor(-3), "max")
    for strict, pair in (True, (score, integer)), (False, (torch.ones(2), torch.ones(2).long())):
        with pytest.raises(CollectiveError, match=r"rank 1: torch\.int64"):
            Accelerator(cpu=True, strict=strict).reduce(pair[rank])
    numbers = [total.item(), tree["score"].item(), tree["large"].sum().item(), greatest.item()]
    return [
        numbers,
        str(total.dtype),
        str(greatest.dtype),
        total.requires_grad,
        [str(w.message) for w in caught],
    ]


def test_scalars_of_other_dtypes_are_promoted(ranks: RankServer) -> None:
    first, second = ranks(2, reduced_dtypes)
    assert first[:3] == second[:3] == [[3.5, 1.75, 100_000.0, 1], "torch.float32", "torch.int64"]
    assert (first[3], second[3]) == (True, False)
    assert first[4][0] == (
        "the ranks give other dtypes to reduce(sum), which returns torch.float32: "
        "torch.float32 on rank 0, torch.int64 on rank 1"
    )
    assert (len(first[4]), second[4]) == (3, [])


class CallingDataset(torch.utils.data.Dataset[Any]):
    """A dataset whose items come from a collective."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        from accelerate.utils import gather_object

        return gather_object([index])


def test_no_group_is_opened_alone_or_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import PartialState
    from accelerate.utils import gather_object

    assert gather_object([3]) == [3]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")  # of a rank that has not opened its group yet
    loader = torch.utils.data.DataLoader(
        CallingDataset(), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=20
    )
    assert list(loader) == [[0]]
    assert PartialState._shared_state == {}


def gathered() -> dict[str, object]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    rank = accelerator.process_index
    strided = torch.arange(6.0).reshape(2, 3).t() + rank  # not contiguous: gloo must not see it
    tree = {
        "scalar": torch.tensor(float(rank)),
        "strided": strided,
        "ragged": torch.full((1 + rank, 2), rank),
        "bool": torch.tensor([rank == 0]),
        "half": torch.ones(2, dtype=torch.bfloat16) * rank,
        "pair": Pair([torch.tensor([rank])], None),
        "output": Output(torch.tensor(float(rank)), torch.ones(1, 2) * rank),
        "ordered": OrderedDict(a=torch.tensor([rank])),
    }
    found = accelerator.gather(tree)
    assert type(found["pair"]) is Pair
    assert type(found["output"]) is Output
    assert type(found["ordered"]) is OrderedDict
    return {
        "scalar": found["scalar"].tolist(),
        "strided": found["strided"].tolist(),
        "ragged": found["ragged"].tolist(),
        "bool": found["bool"].tolist(),
        "half": (found["half"].dtype, found["half"].tolist()),
        "pair": (found["pair"].left[0].tolist(), found["pair"].right),
        "output": (found["output"].loss.tolist(), found["output"].logits.tolist()),
        "ordered": found["ordered"]["a"].tolist(),
    }


def test_gather_joins_every_leaf_in_rank_order(ranks: RankServer) -> None:
    found = same_on_all(ranks(2, gathered))
    plain = torch.arange(6.0).reshape(2, 3).t()
    assert found == {
        "scalar": [0.0, 1.0],
        "strided": torch.cat([plain, plain + 1]).tolist(),
        "ragged": [[0, 0], [1, 1], [1, 1]],
        "bool": [True, False],
        "half": (torch.bfloat16, [0.0, 0.0, 1.0, 1.0]),
        "pair": ([0, 1], None),
        "output": ([0.0, 1.0], [[0.0, 0.0], [1.0, 1.0]]),
        "ordered": [0, 1],
    }


def sized(rows: list[int], dtype: torch.dtype) -> list[object]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    mine = rows[accelerator.process_index]
    tensor = (torch.arange(mine * 3).reshape(mine, 3) + accelerator.process_index).to(dtype)
    found = accelerator.gather(tensor)
    assert found.dtype == dtype
    assert found.is_contiguous()
    return found.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("rows", [[2, 2], [0, 3], [0, 0], [400, 400], [1, 2000], [2000, 0]])
def test_gather_of_any_size(ranks: RankServer, rows: list[int], dtype: torch.dtype) -> None:
    """Few values travel with their shape."""
    plain = [(torch.arange(n * 3).reshape(n, 3) + rank).to(dtype) for rank, n in enumerate(rows)]
    assert same_on_all(ranks(2, sized, rows, dtype)) == torch.cat(plain).tolist()


def exchange_large(rows: list[int], dtype: torch.dtype) -> bool:
    from accelerate import Accelerator
    from accelerate.utils import broadcast

    accelerator = Accelerator()
    plain = [(torch.arange(n * 3).reshape(n, 3) % 7 + rank).to(dtype) for rank, n in enumerate(rows)]
    if dtype.is_complex:
        plain = [(each * 1j).conj() for each in plain]
    found = accelerator.gather(plain[accelerator.process_index])
    assert torch.equal(found, torch.cat(plain))
    ones = torch.ones(600_000) * (accelerator.process_index + 1)
    assert torch.equal(accelerator.reduce(ones, "sum"), torch.full((600_000,), 3.0))
    wanted = torch.arange(600_000.0).reshape(1000, 600).t()
    sent = torch.zeros(1000, 600).t() if accelerator.process_index == 0 else wanted.clone()
    if dtype.is_complex:
        sent, wanted = (sent * 1j).conj(), (wanted * 1j).conj()
    broadcast(sent, from_process=1)
    return torch.equal(sent, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
@pytest.mark.parametrize("rows", [[500_000, 500_000], [500_000, 400_000], [0, 500_000]])
def test_large_values_follow_their_shapes(ranks: RankServer, rows: list[int], dtype: torch.dtype) -> None:
    """More than a MiB of a rank does not fit beside its shape; a rank may have less than another, or none."""
    assert ranks(2, exchange_large, rows, dtype) == [True, True]


def test_gather_on_one_process_has_the_types_and_shapes_of_two(ranks: RankServer) -> None:
    """C6."""
    (alone,) = ranks(1, gathered)
    assert alone["scalar"] == [0.0]
    assert alone["output"] == ([0.0], [[0.0, 0.0]])
    assert alone["pair"] == ([0], None)


def disagree(shape: str) -> str:
    from accelerate import Accelerator

    accelerator = Accelerator()
    rank = accelerator.process_index
    tensor = {
        "dim 1": torch.ones(2, 2 + rank),
        "dtype": torch.ones(2, dtype=torch.float64 if rank else torch.float32),
        "dims": torch.ones((2, 1) if rank else (2,)),
        "dims to pad": torch.ones((2, 1) if rank else (2,)),
    }[shape]
    with pytest.raises(CollectiveError) as error:
        (accelerator.pad_across_processes if shape == "dims to pad" else accelerator.gather)(tensor)
    accelerator.wait_for_everyone()  # the group still works
    return str(error.value)


@pytest.mark.parametrize("shape", ["dim 1", "dtype", "dims", "dims to pad"])
def test_a_gather_the_ranks_disagree_about_is_the_same_error_on_all(ranks: RankServer, shape: str) -> None:
    """C2."""
    text = same_on_all(ranks(2, disagree, shape))
    assert "rank 0: torch.float32 (2" in text
    assert "rank 1: torch.float" in text


def test_a_single_item_is_concatenated_with_nothing() -> None:
    from accelerate.utils import concatenate

    assert concatenate(["x"]) == "x"
    assert concatenate([{"a": ["x", 1]}]) == {"a": ["x", 1]}
    with pytest.raises(PrepareError, match="type str cannot be concatenated"):
        concatenate(["x", "y"])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_not_padded_and_a_warning_says_so() -> None:
    from accelerate.utils import pad_across_processes

    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.warns(UserWarning, match="nested tensor is not padded") as caught:
        assert pad_across_processes(nested).is_nested
    assert caught[0].filename == __file__


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NARROW_FLOATS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)


def reduce_extremes(count: int, world_size: int) -> None:
    """Values near the end of what a dtype holds; with a large ``count`` they do not travel inline."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    rank, size = accelerator.process_index, accelerator.num_processes
    assert size == world_size

    def check(
        value: float, dtype: torch.dtype, reduction: str, wanted: float, to: torch.dtype, scale: float = 1.0
    ) -> None:
        got = accelerator.reduce(torch.full((count,), value).to(dtype), reduction, scale)
        assert got.dtype == to, (dtype, reduction, got.dtype)
        torch.testing.assert_close(got, torch.full((count,), wanted, dtype=torch.float64).to(to))

    for dtype in INTEGERS:
        greatest = torch.iinfo(dtype).max
        for value in greatest, -greatest - 1, -7:
            if value >= torch.iinfo(dtype).min:
                check(value, dtype, "mean", value, torch.float32)
        top = min(greatest, 2**40)
        near = top - 1 + rank % 2  # one less on even ranks
        check(top, dtype, "sum", size * top, torch.int64)
        check(near, dtype, "max", top - 1 + (size > 1), dtype)
        check(near, dtype, "min", top - 1, dtype)
    check(rank % 2, torch.bool, "mean", size // 2 / size, torch.float32)
    check(1, torch.bool, "sum", size, torch.int64)
    check(rank % 2, torch.bool, "max", size > 1, torch.bool)
    for dtype in NARROW_FLOATS:
        top = min(torch.finfo(dtype).max, 2.0**120)
        check(top, dtype, "mean", top, dtype)
        check(top, dtype, "max", top, dtype)
        check(2.0, dtype, "none", 1.0, dtype, scale=0.5)
    mixed = torch.tensor([rank, -rank, torch.nan if rank == 0 else 1.0]).repeat(count)
    assert accelerator.reduce(mixed, "max")[:2].tolist() == [size - 1, 0]
    assert accelerator.reduce(mixed, "min")[:2].tolist() == [0, 1 - size]
    assert accelerator.reduce(mixed, "max")[2].isnan()
    assert accelerator.reduce(mixed, "min")[2].isnan()
    with pytest.raises(PrepareError, match="have no order"):
        accelerator.reduce(torch.ones(count, dtype=torch.complex64), "max")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("count", [2, 300_000], ids=["inline", "large"])
def test_reduce_does_not_overflow_on_the_way(ranks: RankServer, world_size: int, count: int) -> None:
    """G4. The ends of each dtype: their mean is themselves, their sum is in int64."""
    ranks(world_size, reduce_extremes, count, world_size)


def reduce_differently(reductions: list[str]) -> str:
    from accelerate import Accelerator

    accelerator = Accelerator()
    tensor = torch.ones(2)
    accelerator.reduce(tensor, "sum")  # the layout is known
    with pytest.raises(CollectiveError) as error:
        accelerator.reduce(tensor, reductions[accelerator.process_index])
    return str(error.value)


def test_the_ranks_agree_about_the_reduction(ranks: RankServer) -> None:
    """G4. A mean on one rank and a sum on another are one error on both."""
    text = same_on_all(ranks(2, reduce_differently, ["sum", "mean"]))
    assert "reduce(sum)" in text
    assert "reduce(mean)" in text


def reduced() -> tuple[object, ...]:
    from accelerate import Accelerator
    from accelerate.utils import reduce

    accelerator = Accelerator()
    mine = torch.tensor([1.0, 2.0]) * (accelerator.process_index + 1)
    kept = mine.clone()
    total = accelerator.reduce({"a": mine})["a"].tolist()
    mean = reduce(mine).tolist()
    scaled = accelerator.reduce(mine, "sum", scale=0.5).tolist()
    whole = accelerator.reduce(torch.tensor([accelerator.process_index]), "mean").tolist()
    assert torch.equal(mine, kept), "reduce must not change its argument"
    with pytest.raises(SettingError, match="reduction 'median'"):
        accelerator.reduce(mine, "median")
    return total, mean, scaled, whole


def test_reduce_sums_and_averages_without_touching_its_argument(ranks: RankServer) -> None:
    assert same_on_all(ranks(2, reduced)) == ([3.0, 6.0], [1.5, 3.0], [1.5, 3.0], [0.5])


def slopes(reduction: str, count: int) -> float:
    """The gradient of a loss that has a reduced term, beside one of this rank alone."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    weight = torch.full((count,), 1.0 + accelerator.process_index, requires_grad=True)
    reduced = accelerator.reduce({"loss": 2 * weight}, reduction, scale=0.5)["loss"]
    reduced += 1  # a result may be changed in place
    (weight + reduced).sum().backward()
    assert weight.grad is not None
    return weight.grad[0].item() - 1


@pytest.mark.parametrize("count", [2, 300_000], ids=["inline", "large"])
@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("sum", [1.0, 1.0]),
        ("mean", [0.5, 0.5]),
        ("max", [0.0, 1.0]),
        ("min", [1.0, 0.0]),
        ("none", [1.0, 1.0]),
    ],
)
def test_reduce_keeps_the_gradient_of_the_own_values(
    ranks: RankServer, reduction: str, expected: list[float], count: int
) -> None:
    assert ranks(2, slopes, reduction, count) == expected
    assert ranks(1, slopes, reduction, count) == [1.0]


def padded_slopes() -> list[float]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    weight = torch.ones(1 + accelerator.process_index, requires_grad=True)
    (weight.sum() + 3 * accelerator.pad_across_processes(weight).sum()).backward()
    assert weight.grad is not None
    return weight.grad.tolist()


def test_padding_keeps_the_gradient(ranks: RankServer) -> None:
    assert ranks(2, padded_slopes) == [[4.0], [4.0, 4.0]]


def padded() -> list[object]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    rank = accelerator.process_index
    mine = torch.full((2 - rank, 1 + rank), rank + 1)
    return [
        accelerator.pad_across_processes(mine, dim=1, pad_index=-100).tolist(),
        accelerator.pad_across_processes(mine, dim=0, pad_first=True).tolist(),
        accelerator.pad_across_processes(torch.tensor(rank), dim=1).tolist(),
        accelerator.pad_across_processes(mine, dim=-1).shape[-1],
    ]


def test_padding_reaches_the_longest_rank_on_the_asked_side(ranks: RankServer) -> None:
    assert ranks(2, padded) == [
        [[[1, -100], [1, -100]], [[1], [1]], 0, 2],
        [[[2, 2]], [[0, 0], [2, 2]], 1, 2],
    ]


def objects() -> tuple[object, ...]:
    from accelerate import Accelerator
    from accelerate.utils import broadcast, broadcast_object_list, gather_object

    accelerator = Accelerator()
    rank = accelerator.process_index
    sent = ["x", local := {"rank": rank}]
    broadcast_object_list(sent, from_process=1)
    assert (sent[1] is local) == (rank == 1)
    with pytest.raises(CollectiveError, match="a tuple cannot be changed"):
        broadcast_object_list(("x", rank))  # type: ignore[arg-type]
    tensor = torch.full((2, 2), float(rank)).t()
    broadcast(tensor, from_process=1)
    with pytest.raises(PrepareError, match="str cannot go through"):
        accelerator.gather(["text"])
    return gather_object([f"rank {rank}"] * (rank + 1)), sent, tensor.tolist()


def test_objects_travel_as_lists(ranks: RankServer) -> None:
    found = same_on_all(ranks(2, objects))
    assert found == (["rank 0", "rank 1", "rank 1"], ["x", {"rank": 1}], [[1.0, 1.0], [1.0, 1.0]])


def parts(lengths: list[int]) -> list[object]:
    from accelerate import PartialState

    state = PartialState()
    found: list[object] = []
    for length in lengths:
        with state.split_between_processes(list(range(length))) as part:
            found.append(part)
        with state.split_between_processes(torch.arange(length)) as part:
            assert part.tolist() == found[-1]
        with state.split_between_processes({"a": list(range(length))}) as part:
            assert part == {"a": found[-1]}
        with state.split_between_processes(list(range(length)), apply_padding=True) as part:
            found.append(len(part))
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_splitting_is_disjoint_complete_in_order_and_even(ranks: RankServer, size: int) -> None:
    """C7."""
    lengths = [0, 1, 3, 17]
    results = ranks(size, parts, lengths)
    for place, length in enumerate(lengths):
        shares = [result[2 * place] for result in results]
        assert [item for share in shares for item in share] == list(range(length))
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert len({result[2 * place + 1] for result in results}) == 1, "padded parts have one length"


def test_splitting_over_eight_processes_needs_no_processes() -> None:
    """C7."""
    from accelerate import PartialState

    for length in (0, 1, 3, 17):
        shares = []
        for rank in range(8):
            with fake_world(8, rank), PartialState().split_between_processes(list(range(length))) as share:
                shares.append(share)
        assert [item for share in shares for item in share] == list(range(length))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def late(folder: Path, seconds: float) -> tuple[float, str]:
    from accelerate import Accelerator, InitProcessGroupKwargs

    (folder / os.environ["RANK"]).touch()
    while len(list(folder.iterdir())) < 2:  # the ranks may start further apart than the timeout
        time.sleep(0.01)
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=4))])
    accelerator.wait_for_everyone()
    started = time.perf_counter()
    if accelerator.process_index == 1:
        while not (folder / "gave up").exists() and time.perf_counter() - started < seconds:
            time.sleep(0.05)
        return 0.0, ""
    with pytest.raises(RuntimeError) as error:
        accelerator.wait_for_everyone()
    waited = time.perf_counter() - started
    (folder / "gave up").touch()
    return waited, str(error.value)


def test_a_barrier_gives_up_after_the_asked_timeout(ranks: RankServer, tmp_path: Path) -> None:
    """C9."""
    waited, text = ranks(2, late, tmp_path, 11.0)[0]
    assert 3.5 < waited < 10.0, "after its 4 seconds, not when the late rank comes"
    assert text


def sparse() -> list[Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    matrix = (torch.eye(2) * (accelerator.process_index + 1)).to_sparse()
    total = accelerator.reduce(matrix, "sum")
    with (
        pytest.raises(PrepareError, match=r"to_dense\(\)") if accelerator.num_processes > 1 else nullcontext()
    ):
        accelerator.gather({"a": torch.ones(1), "b": matrix})
    with pytest.raises(CollectiveError) if accelerator.num_processes > 1 else nullcontext() as error:
        accelerator.gather(matrix if accelerator.is_main_process else torch.ones(2, 2))
    assert error is None or "rank 0: a torch.sparse_coo tensor" in str(error.value)
    accelerator.wait_for_everyone()
    return [total.layout, total.to_dense().tolist()]


def test_sparse_tensors_are_reduced_and_else_refused(ranks: RankServer) -> None:
    assert same_on_all(ranks(2, sparse)) == [torch.sparse_coo, [[3.0, 0.0], [0.0, 3.0]]]
    assert ranks(1, sparse) == [[torch.sparse_coo, [[1.0, 0.0], [0.0, 1.0]]]]


def gather_others() -> list[Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return [accelerator.gather({"loss": 0.5, "text": "x"}), accelerator.gather([1, torch.tensor(2.0)])]


def test_one_process_gives_back_what_is_no_tensor(ranks: RankServer) -> None:
    """As 1.x; several processes refuse it."""
    assert ranks(1, gather_others) == [[{"loss": 0.5, "text": "x"}, [1, torch.ones(1) * 2]]]
