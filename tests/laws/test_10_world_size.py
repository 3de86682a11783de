"""Law 10: cost does not grow with the world.

In a collective whose result is of a fixed size, what a rank sends, stores and waits for is bounded by the
logarithm of the world size. One half of the test reads the source: each call that brings a value of every
rank to one, or opens a group of ranks, is in a table with its reason. The other half counts the bytes of
calls in worlds whose ranks are threads.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.laws.source import Function, Source, obey, read, sources
from tests.support.thread_ranks import FIXED_SIZE, PER_RANK, Cost, open_ranks

LAW = "law 10, cost does not grow with the world"

# What brings a value of each rank to another one, or opens a group of ranks.
OPERATIONS = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_gather_single_autograd",
    "all_gather_tensor_autograd",
    "_allgather_base",
    "combine_objects",
    "exchange",
    "exchange_objects",
    "gather",
    "gather_object",
    "new_group",
    "ProcessGroupGloo",
}
REASONS = {
    "result": "its result has a value of each rank",
    "bounded": "equal headers are one, however many ranks send them; values come from one rank, or none do",
    "difference": "only after the ranks have seen that they differ",
    "one rank": "one rank needs what all have, and the others get a result of fixed size",
    "mesh": "the ranks of one dimension of a mesh, whose size the user sets",
    "open": "breaks the law",
}
# "path:function" -> a reason, and more about it where the function's name does not say it.
CALLS = {
    "check/checks.py:_check_coverage": "result",
    "check/checks.py:check_gather": "result",
    "check/checks.py:check_objects": "result",
    "check/checks.py:check_parity": "result",
    "check/checks.py:check_ranks": "result",
    "checkpoint/rank_group.py:collective_section": "one rank: plans and reports of a save or load",
    "checkpoint/rank_group.py:combine": "one rank: plans and reports of a save in the background",
    "checkpoint/registered_objects.py:gather_rank_shards": "one rank: it writes the shards of all",
    "checkpoint/registered_objects.py:gather_rank_states": "one rank: it writes the states of all",
    "data/batch_channel.py:_open_group": "open: rank 0 sends to each rank, and a group connects all with all",
    "data/dataset_rows.py:find_split_rows": "difference",
    "data/epoch_order.py:broadcast": "open: rank 0 gets an index and a digest of each rank",
    "data/iterable_dataset.py:_exchange": "open: rank 0 gets a count of each rank at every step of a stream",
    "facade/accelerator.py:gather": "result",
    "facade/accelerator.py:gather_for_metrics": "result",
    "facade/checkpoint_manager.py:_check_ranks": "bounded: values follow only where they differ",
    "facade/client_test_utils.py:are_the_same_tensors": "result: a helper of tests compares all values",
    "facade/metrics.py:_gather_objects": "result",
    "facade/metrics.py:gather": "result",
    "facade/metrics.py:gather_for_metrics": "result",
    "facade/optimizer.py:settle_optimizers": "difference",
    "offload/pipeline/inference_pipeline.py:timeline": "result",
    "strategy/fsdp1/flat_parameter_layout.py:gather_flat": "result: a flat parameter of all shards",
    "strategy/fsdp1/optimizer_state.py:gather_state": "result: the state of each rank's shards",
    "strategy/megatron/full_state.py:gather_tp_shards": "mesh",
    "strategy/megatron/public_functions.py:gather_leaf": "result: Megatron-LM's own function",
    "strategy/megatron/user_optimizer_adapter.py:_gather_over_replicas": "result: the state of all shards",
    "strategy/parallelism/context/attention.py:all_gather_with_grad": "mesh",
    "strategy/parallelism/context/output_comparison.py:check_equal": "mesh",
    "strategy/parallelism/context/sequence_sharding_base.py:_merge_leaf": "mesh",
    "strategy/parallelism/context/ulysses.py:__iter__": "mesh",
    "strategy/parallelism/context/ulysses.py:shard_sequences": "mesh",
    "strategy/parallelism/pipeline/micro_batches.py:check": "mesh",
    "strategy/parallelism/pipeline/runner.py:pipeline_timeline": "mesh",
    "strategy/sharding/fsdp2_sharder.py:_refuse_unlike_models": "difference: also of pipeline stages",
    "world/collective.py:_all_gather": "result",
    "world/collective.py:all_gather_object": "result",
    "world/collective.py:all_reduce": "open: rank 0 gets the small values of each rank, and not their sums",
    "world/collective.py:barrier": "bounded",
    "world/collective.py:broadcast": "bounded",
    "world/collective.py:broadcast_object": "bounded",
    "world/collective.py:combine_objects": "one rank",
    "world/collective.py:compare_objects": "bounded: values follow only where they differ",
    "world/collective.py:copy_tensor_to_devices": "open: rank 0 hears of each rank whether it has the tensor",
    "world/collective.py:gather": "result",
    "world/collective.py:gather_object": "result",
    "world/collective.py:gather_tensor_shape": "result",
    "world/collective.py:gather_to_first": "mesh",
    "world/collective.py:pad_across_processes": "open: all get the shapes of each rank, for their maximum",
    "world/control_channel.py:_gather_large_objects": "result",
    "world/control_channel.py:_open_group": "open: host values above a limit need a group of all with all",
    "world/control_channel.py:all_gather": "result",
    "world/control_channel.py:combine_objects": "one rank",
    "world/control_channel.py:exchange": "bounded",
    "world/control_channel.py:exchange_objects": "bounded: by what its callers send",
    "world/packed_tree.py:_structure_mismatch": "difference",
    "world/packed_tree.py:exchange": "bounded: by what its callers send",
}


def calls(source: Source) -> Iterator[tuple[str, int]]:
    """(function, line) of each operation that a function names: calls it, passes it on or looks it up."""

    nodes: list[tuple[str, Any]] = [("", source.tree)]
    for function, node in nodes:
        name = ""
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value if node.value.startswith("all_gather_") else ""
        if name in OPERATIONS and function and ast.unparse(node) != "asyncio.gather":
            yield function, node.lineno
        inner = node.name if isinstance(node, Function) else function
        nodes += ((inner, child) for child in ast.iter_child_nodes(node))


def keys(source: Source) -> dict[str, int]:
    """The entries of the table that a file needs, with a line of each."""
    path = "/".join(source.inside) + ".py"
    return {f"{path}:{function}": line for function, line in calls(source)}


@cache
def keys_by_source() -> list[tuple[Source, dict[str, int]]]:
    return [(source, keys(source)) for source in sources()]


def test_each_collective_that_grows_with_the_world_has_its_reason() -> None:
    obey(
        LAW,
        (
            source.at(line, f"{key} is not in the table of this law: who needs a value of each rank?")
            for source, named in keys_by_source()
            for key, line in named.items()
            if key not in CALLS
        ),
    )


def test_every_entry_is_still_needed() -> None:
    named = {key for _, named in keys_by_source() for key in named}
    assert not CALLS.keys() - named
    assert {reason.partition(":")[0] for reason in CALLS.values()} <= REASONS.keys()


@pytest.mark.parametrize(
    "line",
    [
        "collective.all_gather_object(1)",
        "x = partial(dist.all_gather, group=group)",
        "getattr(dist, 'all_gather_single')(out, tensor)",
        "gather(tensor)",
        "group = dist.new_group()",
    ],
)
def test_the_table_sees(line: str) -> None:
    assert keys(read(f"def f():\n    {line}\n")) == {"example/module.py:f": 2}


# --- bytes of real exchanges

SIZES = 8, 64
# Calls whose result has a fixed size, and that cost more with every rank. A call that no longer does is taken
# out: the table only gets shorter.
OPEN = {"reduce", "pad_across_processes", "combine_objects"}


@pytest.fixture(scope="module")
def costs() -> dict[str, list[list[Cost]]]:
    """The costs of each call in the smaller and in the larger world, by rank."""
    measured: dict[str, list[list[Cost]]] = {name: [] for name in (*FIXED_SIZE, *PER_RANK)}
    for size in SIZES:
        with open_ranks(size) as run:
            run(FIXED_SIZE["barrier"])  # opens the tree
            for name, call in (*FIXED_SIZE.items(), *PER_RANK.items()):
                measured[name].append(run(call))
    return measured


def grows(small: list[Cost], large: list[Cost]) -> bool:
    """True if the busiest rank sends and receives more than the logarithm of the world size allows."""
    growth = math.log2(SIZES[1]) / math.log2(SIZES[0])
    return max(cost.size for cost in large) > growth * max(cost.size for cost in small) + 256


def test_calls_of_fixed_size_cost_the_logarithm_of_the_world_size(costs: dict[str, list[list[Cost]]]) -> None:
    broken = {name for name in FIXED_SIZE if grows(*costs[name])}
    assert broken - OPEN == set(), {name: [max(c.size for c in by) for by in costs[name]] for name in broken}
    assert OPEN - broken == set(), "these no longer break the law: take them out"
    for name in FIXED_SIZE:
        for size, by_rank in zip(SIZES, costs[name], strict=True):
            assert {cost.exchanges for cost in by_rank} == {1}, name
            assert max(cost.messages for cost in by_rank) <= 2 * math.log2(size), name


def test_calls_with_a_value_of_each_rank_exceed_the_bound(costs: dict[str, list[list[Cost]]]) -> None:
    """Or the bound would see nothing."""
    assert all(grows(*costs[name]) for name in PER_RANK)
