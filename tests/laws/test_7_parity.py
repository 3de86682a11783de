"""Law 7, the longer way: a small decoder under every way to spread it, to the numbers of one process.

Tied embeddings, a frozen block, attention with rotated positions, AdamW with decay, clipped gradients; eight
steps, twenty in `make test-all`. Losses, global norms of gradients and all weights after gathering are those
of the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from accelerate.utils import is_deepspeed_available
from tests.support.long_run import LONG_RUN, hypothesis_settings, long_run_param
from tests.support.parity import PLAN, ROWS, STEPS, Numbers, adamw, close, decoder, loader, loss_of, plain
from tests.support.ranks import RankServer
from tests.support.sequences import CUT, RING
from tests.support.strategies import strategy_names

# What the rank server imports once for this module.
PRELOAD = ("deepspeed.runtime.zero.muon.muon_optimizer", "transformers.integrations.deepspeed")

# Batches of a training by window: one optimizer step each, or every four.
BATCHES = {1: STEPS if LONG_RUN else STEPS // 2, 4: STEPS}
MIDDLE = BATCHES[1] // 2
BLOCKS = 4 if LONG_RUN else 3  # the frozen one between two others
BF16_BATCHES = STEPS if LONG_RUN else 2  # the second loss shows the step, also a wrong one
IN_WINDOW = (5, 6, 7)  # micro-batches after which a window of four is open


def windows_of(way: str) -> tuple[int, ...]:
    """The windows a way trains with: by default a mesh of two dimensions, which both train alone, has one."""
    return (1, 4) if LONG_RUN or " x " not in way else (4,)


def between_steps(way: str) -> tuple[int, int]:
    """Where a way saves between two steps: (micro-batches before, window)."""
    return (MIDDLE, 1) if 1 in windows_of(way) else (4, 4)


# Way -> (processes, strategy, what says so: sizes of a mesh, options of the plugin, stage of the engine).
WAYS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one process": (1, "single", {}),
    "copies": (2, "ddp", {}),
    "shards": (2, "fsdp", {"fsdp": {}}),
    "shards, version 1": (2, "fsdp1", {"fsdp": {"fsdp_version": 1}}),
    "copies of shards": (4, "parallelism", {"dp_replicate_size": 2, "dp_shard_size": 2}),
    "layers": (2, "parallelism", {"tp_size": 2}),
    "layers x shards": (4, "parallelism", {"tp_size": 2, "dp_shard_size": 2}),
    "layers x copies": (4, "parallelism", {"tp_size": 2, "dp_replicate_size": 2}),
    "sequences, keys": (2, "parallelism", CUT),
    "sequences, keys x shards": (4, "parallelism", {**CUT, "dp_shard_size": 2}),
    "sequences, heads": (2, "parallelism", {"sp_size": 2}),
    "sequences, heads x shards": (4, "parallelism", {"sp_size": 2, "dp_shard_size": 2}),
    "sequences, keys x layers": (4, "parallelism", {**CUT, "tp_size": 2}),
    "sequences, heads x layers": (4, "parallelism", {"sp_size": 2, "tp_size": 2}),
    "sequences, ring": (2, "parallelism", RING),
    "stages": (2, "parallelism", {"pp_size": 2}),
    "stages x shards": (4, "parallelism", {"pp_size": 2, "dp_shard_size": 2}),
    "stages x sequences, keys": (4, "parallelism", {"pp_size": 2, **CUT}),
    "stages x sequences, heads": (4, "parallelism", {"pp_size": 2, "sp_size": 2}),
    "ZeRO 1": (2, "deepspeed", {"zero": 1}),
    "ZeRO 2": (2, "deepspeed", {"zero": 2}),
    "ZeRO 3": (2, "deepspeed", {"zero": 3}),
    "ZeRO 2, heads": (2, "deepspeed_mesh", {"zero": 2, "sp_size": 2}),
    "ZeRO 3, heads x shards": (4, "deepspeed_mesh", {"zero": 3, "sp_size": 2, "dp_shard_size": 2}),
}
# Two dimensions of a mesh that the default run trains in the files of one of them (tests/README.md).
IN_LONG_RUN = {
    *("sequences, keys x layers", "sequences, heads x layers"),
    *("stages x sequences, keys", "stages x sequences, heads"),
}
TRAINED = tuple(way for way in WAYS if LONG_RUN or way not in IN_LONG_RUN)
# Megatron-LM trains models of its own only: its tests hold it to this law with such a model. So do those of
# PyTorch/XLA (tests/xla), in an environment of their own.
ELSEWHERE = {"megatron", "xla", "xla_spmd"}


def accelerator_of(way: str, **more: Any) -> Any:
    """An ``Accelerator`` that is asked for that way."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.utils import TorchTensorParallelConfig

    _, strategy, said = WAYS[way]
    sizes = {name: value for name, value in said.items() if name not in ("zero", "fsdp")}
    # Of version 2, if it is named: sharded checkpoints.
    layers: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "fsdp_version": 2}
    if "zero" in said:
        from accelerate import DeepSpeedPlugin

        more["deepspeed_plugin"] = DeepSpeedPlugin(zero_stage=said["zero"])
    elif said:
        more["fsdp_plugin"] = FullyShardedDataParallelPlugin(**{**layers, **said.get("fsdp", {})})
    if sizes:
        tensor: dict[str, Any] = {}
        if "tp_size" in said:
            tensor["tp_handler"] = TorchTensorParallelConfig(plan=PLAN)
        more["parallelism_config"] = ParallelismConfig(**sizes, **tensor)
    accelerator = Accelerator(cpu=True, **more)
    assert accelerator.strategy.name == strategy
    return accelerator


# Ways that also train in 16 bits.
BF16_WAYS = (
    *("copies", "shards", "shards, version 1", "layers", "sequences, keys", "sequences, ring"),
    *("sequences, heads", "stages", "ZeRO 2"),
)
# Ways that also train compiled, as a whole or by regions; the others, and by inductor, in the long run.
# Pipeline stages refuse to be compiled.
COMPILED_WAYS = (("shards", True),)
COMPILED = (
    *((way, "aot_eager", regional) for way, regional in COMPILED_WAYS),
    *(long_run_param(way, "inductor", False) for way in ("one process", "copies", "shards")),
    *(
        long_run_param(way, "aot_eager", regional)
        for way, (_, _, said) in WAYS.items()
        for regional in (False, True)
        if "pp_size" not in said and (way, regional) not in COMPILED_WAYS
    ),
)
# Saved in the middle under one way, the run goes on under the other.
RESUME_PAIRS = (
    ("copies of shards", "shards"),
    ("layers x copies", "copies"),
    ("stages x shards", "layers"),
    ("sequences, keys", "shards, version 1"),
    ("sequences, heads", "sequences, ring"),
    ("shards, version 1", "stages"),
    ("one process", "copies"),
    ("copies", "one process"),
    ("shards", "ZeRO 3"),
    ("ZeRO 2", "shards"),
    ("ZeRO 2, heads", "sequences, heads"),
)
MORE_RESUME_PAIRS = (
    ("layers x shards", "copies"),
    ("sequences, keys x shards", "shards, version 1"),
    ("sequences, keys x layers", "sequences, ring"),
    ("stages x sequences, keys", "copies of shards"),
    ("copies", "layers"),
    *(("copies", "stages"), ("one process", "stages")),
    ("sequences, keys x layers", "ZeRO 1"),
    ("ZeRO 3", "stages"),
)


def positions_in_window(way: str) -> tuple[int, ...]:
    """The micro-batches of ``IN_WINDOW`` after which the way saves: by default one, others for other ways."""
    return IN_WINDOW if LONG_RUN else (IN_WINDOW[list(WAYS).index(way) % len(IN_WINDOW)],)


def do_nothing(number: int) -> None:
    """The default of ``after``."""


def loop(
    accelerator: Any, model: Any, optimizer: Any, batches: Any, after: Callable[[int], None] = do_nothing
) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for number, batch in enumerate(batches, 1):
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.mean_loss(loss.detach()).item())
        after(number)
    return losses, norms


def whole(accelerator: Any, model: Any) -> dict[str, torch.Tensor]:
    """Rank 0: the state by the user's names; others may have less."""
    state = accelerator.get_state_dict(model)
    return {name: value.detach().float().cpu().clone() for name, value in (state or {}).items()}


def trained(
    way: str,
    window: int,
    precision: str = "no",
    folder: Path | None = None,
    workers: int = 0,
    steps: int = 0,
    **more: Any,
) -> Numbers:
    accelerator = accelerator_of(way, gradient_accumulation_steps=window, mixed_precision=precision, **more)
    share = accelerator.strategy.data_shard
    # Every rank begins with other weights: those of rank 0 count.
    model = decoder(accelerator.process_index, BLOCKS)
    batches = loader(ROWS // share.count, workers, steps or BATCHES[window])
    model, optimizer, batches = accelerator.prepare(model, adamw(model), batches)

    positions = positions_in_window(way) if window > 1 else ()
    begin, saved_window = between_steps(way)
    if window == saved_window:
        positions = (begin, *positions)

    def save(number: int) -> None:
        if number in positions:
            accelerator.save_state(str(folder / f"{window}-{number}"))

    losses, norms = loop(accelerator, model, optimizer, batches, do_nothing if folder is None else save)
    return losses, norms, whole(accelerator, model)


def train_in_each_setting(way: str, folder: str, workers: int) -> dict[int | str, Numbers]:
    """Train on single batches and save in the middle, over four and save in a window; in 16 bits."""
    numbers: dict[int | str, Numbers] = {}
    for window in windows_of(way):
        numbers[window] = trained(way, window, folder=Path(folder), workers=workers)
    if way in BF16_WAYS and not workers:
        numbers["bf16"] = trained(way, 1, "bf16", steps=BF16_BATCHES)
    return numbers


def can_run(way: str) -> bool:
    """Tell whether the package that the way needs is installed."""
    return "zero" not in WAYS[way][2] or is_deepspeed_available()


class Runs(Protocol):
    """The numbers of every rank under a way, and the folder of its checkpoints."""

    def __call__(self, way: str, workers: int = 0) -> tuple[list[dict[int | str, Numbers]], Path]:
        """Train, unless that was done before; skip where the way cannot run."""
        ...


@pytest.fixture(scope="module")
def runs(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Each way trains once with each number of workers."""
    known: dict[tuple[str, int], tuple[list[dict[int | str, Numbers]], Path]] = {}

    def run(way: str, workers: int = 0) -> tuple[list[dict[int | str, Numbers]], Path]:
        if not can_run(way):
            pytest.skip("deepspeed is not installed: pip install deepspeed")
        if (way, workers) not in known:
            folder = tmp_path_factory.mktemp("middle")
            numbers = ranks(WAYS[way][0], train_in_each_setting, way, str(folder), workers, timeout=115)
            known[way, workers] = numbers, folder
        return known[way, workers]

    return run


def test_every_strategy_is_under_this_law() -> None:
    missing = set(strategy_names()) - {strategy for _, strategy, _ in WAYS.values()} - ELSEWHERE
    assert not missing, f"say in WAYS how to ask for {sorted(missing)}"


@pytest.mark.parametrize("way", [long_run_param(way) if way in IN_LONG_RUN else way for way in WAYS])
def test_it_trains_to_the_numbers_of_one_process(runs: Runs, way: str) -> None:
    """B7, B8: with gradients of one batch, and accumulated over four."""
    every, _ = runs(way)
    for window in windows_of(way):
        theirs = plain(window, steps=BATCHES[window], blocks=BLOCKS)
        assert min(theirs[0]) < 0.92 * theirs[0][0], "the loop learns nothing, so equality would say nothing"
        close(every[0][window], theirs, 1e-5)
        for one in every:
            for told, first in zip(one[window][:2], every[0][window][:2], strict=True):
                assert told == pytest.approx(first, abs=1e-6)


@pytest.mark.parametrize("way", BF16_WAYS)
def test_in_16_bits_too(runs: Runs, way: str) -> None:
    """B8: where each way rounds is its own."""
    ours = runs(way)[0][0]["bf16"]
    losses, _, _ = plain(1, half=True, steps=BF16_BATCHES, blocks=BLOCKS)
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(losses), rtol=2e-2, atol=2e-2)


def train_compiled(way: str, backend: str, regional: bool) -> tuple[Numbers, int]:
    """The numbers of windows of four, and how many graphs this process compiled."""
    from torch._dynamo.utils import counters

    from accelerate.utils import TorchDynamoPlugin

    torch._dynamo.reset()
    counters.clear()
    plugin = TorchDynamoPlugin(backend=backend, use_regional_compilation=regional)
    return trained(way, 4, dynamo_plugin=plugin), counters["stats"]["unique_graphs"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("way", "backend", "regional"), COMPILED)
def test_compiled_too(ranks: RankServer, way: str, backend: str, regional: bool) -> None:
    """B9: as a whole, and block by block."""
    if not can_run(way):
        pytest.skip("deepspeed is not installed: pip install deepspeed")
    numbers, graphs = ranks(WAYS[way][0], train_compiled, way, backend, regional, timeout=580)[0]
    assert graphs > 0
    close(numbers, plain(4, blocks=BLOCKS), 1e-5)


def second_part(way: str, folder: str, window: int, workers: int) -> Numbers:
    from accelerate import DataLoaderConfiguration

    goes_on = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = accelerator_of(way, gradient_accumulation_steps=window, dataloader_config=goes_on)
    model = decoder(5, BLOCKS)
    batches = loader(ROWS // accelerator.strategy.data_shard.count, workers, BATCHES[window])
    model, optimizer, batches = accelerator.prepare(model, adamw(model), batches)
    accelerator.load_state(folder)
    losses, norms = loop(accelerator, model, optimizer, batches)
    return losses, norms, whole(accelerator, model)


def second_parts(way: str, checkpoints: list[tuple[str, int]]) -> list[Numbers]:
    """Resume from each (folder, window), one after the other, in the processes of one launch."""
    numbers = []
    for folder, window in checkpoints:
        print("resuming from", folder)  # which one failed
        numbers.append(second_part(way, folder, window, 0))
    return numbers


@dataclass(frozen=True)
class Resume:
    """A run that was saved under one way, after ``begin`` micro-batches, and goes on under another."""

    one: str
    other: str
    begin: int
    window: int


IN_WINDOW_PAIRS = (
    *(("copies", "copies"), ("shards", "shards"), ("shards, version 1", "shards, version 1")),
    *(("stages x shards", "layers"), ("layers x copies", "copies"), ("stages x shards", "stages")),
    *(("sequences, keys", "shards, version 1"), ("ZeRO 1", "ZeRO 3"), ("ZeRO 3", "shards")),
    ("ZeRO 2", "ZeRO 1"),
)
MORE_IN_WINDOW_PAIRS = (
    *(("stages x shards", "stages x shards"), ("layers x shards", "copies")),
    *(("sequences, keys x shards", "shards, version 1"), ("stages x shards", "layers x copies")),
    *(("stages x shards", "ZeRO 2"), ("copies", "stages")),
)
BETWEEN_STEPS = [
    Resume(one, other, *between_steps(one))
    for one, other in (*RESUME_PAIRS, *(MORE_RESUME_PAIRS if LONG_RUN else ()))
]
IN_A_WINDOW = [
    Resume(one, other, begin, 4)
    for one, other in (*IN_WINDOW_PAIRS, *(MORE_IN_WINDOW_PAIRS if LONG_RUN else ()))
    for begin in positions_in_window(one)
]


class ResumedRuns(Protocol):
    """The numbers of the second part, on rank 0."""

    def __call__(self, resume: Resume) -> Numbers:
        """Resume, unless that was done before; skip where one of the two ways cannot run."""
        ...


@pytest.fixture(scope="module")
def resumed(ranks: RankServer, runs: Runs) -> ResumedRuns:
    """One launch of a way resumes all that is to go on under it."""
    known: dict[Resume, Numbers] = {}

    def run(resume: Resume) -> Numbers:
        if resume not in known:
            for way in (resume.one, other := resume.other):
                runs(way)  # skips where it cannot run
            every = (*BETWEEN_STEPS, *IN_A_WINDOW)
            same_launch = [each for each in every if each.other == other and can_run(each.one)]
            folders = [
                (str(runs(each.one)[1] / f"{each.window}-{each.begin}"), each.window) for each in same_launch
            ]
            numbers = ranks(WAYS[other][0], second_parts, other, folders, timeout=100 * len(folders))[0]
            known.update(zip(same_launch, numbers, strict=True))
        return known[resume]

    return run


def check_second_part(ours: Numbers, begin: int, window: int) -> None:
    """Compare with the rest of the plain loop."""
    losses, norms, values = plain(window, steps=BATCHES[window], blocks=BLOCKS)
    close(ours, (losses[begin:], norms[begin // window :], values), 1e-5)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("resume", BETWEEN_STEPS, ids=lambda each: f"{each.one}-{each.other}")
def test_it_goes_on_under_another_strategy(resumed: ResumedRuns, resume: Resume) -> None:
    """Saved on four processes and loaded on two, and from one strategy to another; the optimizer too."""
    check_second_part(resumed(resume), resume.begin, resume.window)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("resume", IN_A_WINDOW, ids=lambda each: f"{each.one}-{each.other}-{each.begin}")
def test_an_open_window_goes_on(resumed: ResumedRuns, resume: Resume) -> None:
    """G2: saved after any micro-batch of a window, on the same ranks or others."""
    check_second_part(resumed(resume), resume.begin, resume.window)


# Those of a mesh save by the code of FSDP2, and ZeRO 1 by that of ZeRO 2.
SAVED_IN_BACKGROUND = [
    way
    for way, (_, strategy, _) in WAYS.items()
    if LONG_RUN or (strategy != "parallelism" and way != "ZeRO 1")
]


def save_in_background(way: str, folder: str) -> tuple[list[float], Numbers]:
    """Train, from the first step on under ``async_save``; the losses, and the numbers of a resumed run."""
    from accelerate.utils import ProjectConfiguration

    accelerator = accelerator_of(way, project_config=ProjectConfiguration(folder, async_save=True))
    model = decoder(blocks=BLOCKS)
    batches = loader(ROWS // accelerator.strategy.data_shard.count, steps=BATCHES[1])
    model, optimizer, batches = accelerator.prepare(model, adamw(model), batches)

    def save(number: int) -> None:
        if number == MIDDLE:
            accelerator.save_state(f"{folder}/1-{MIDDLE}")

    losses, _ = loop(accelerator, model, optimizer, batches, save)
    accelerator.wait_for_checkpoint()
    return losses, second_part(way, f"{folder}/1-{MIDDLE}", 1, 0)


@pytest.mark.parametrize("way", SAVED_IN_BACKGROUND)
def test_a_save_in_the_background_is_the_state_at_its_call(
    ranks: RankServer, way: str, tmp_path: Path
) -> None:
    """D10, under every strategy: training goes on as without, and so does a resumed run."""
    if not can_run(way):
        pytest.skip("deepspeed is not installed: pip install deepspeed")
    losses, numbers = ranks(WAYS[way][0], save_in_background, way, str(tmp_path), timeout=100)[0]
    assert losses == pytest.approx(plain(1, steps=BATCHES[1], blocks=BLOCKS)[0], rel=1e-5)
    check_second_part(numbers, MIDDLE, 1)


@pytest.mark.timeout(7200 if LONG_RUN else 600)  # a way that was not trained yet takes its time
@hypothesis_settings(2, in_long_run=80, shrink=False)
@given(
    st.sampled_from(TRAINED),
    st.sampled_from(TRAINED),
    st.sampled_from((None, 0, 1, 2)),
    st.tuples(st.sampled_from((0, 2)), st.sampled_from((0, 2))),
)
def test_any_way_goes_on_under_any_other(
    ranks: RankServer, runs: Runs, one: str, other: str, position: int | None, workers: tuple[int, int]
) -> None:
    """D11, G2, G9: any strategy, world size and workers, between steps or in a window, then any others."""
    assume(can_run(one) and can_run(other))
    begin, window = between_steps(one)
    if position is not None:
        in_window = positions_in_window(one)
        begin, window = in_window[position % len(in_window)], 4
    folder = runs(one, workers[0])[1] / f"{window}-{begin}"
    ours = ranks(WAYS[other][0], second_part, other, str(folder), window, workers[1], timeout=100)[0]
    check_second_part(ours, begin, window)
