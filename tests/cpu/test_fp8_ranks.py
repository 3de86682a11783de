"""B4: 8-bit floats by torchao on several processes: replicas, shards, tensor parallelism; resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.laws.test_7_parity import accelerator_of, loop, whole
from tests.support import transformer_engine
from tests.support.long_run import LONG_RUN, long_run_param
from tests.support.numbers import same
from tests.support.parity import ROWS, adamw, decoder, loader, loss_of, plain
from tests.support.ranks import RankServer

# What the rank server imports once for this module.
PRELOAD = ("torchao.float8",)

STEPS, MIDDLE = (8, 4) if LONG_RUN else (4, 2)
BLOCKS = 2  # one that learns, and the frozen one
PROCESSES = {"one process": 1, "layers x shards": 4}
WAYS = [
    *((way, "tensorwise") for way in ("copies", "shards", "shards, version 1")),
    *((way, "rowwise_with_gw_hp") for way in ("shards", "layers")),
    long_run_param("layers x shards", "tensorwise"),
]


def prepared(
    way: str, recipe: str, seed: int, blocks: int = BLOCKS, **options: Any
) -> tuple[Any, Any, Any, Any]:
    from accelerate.utils import AORecipeKwargs

    handlers = [AORecipeKwargs(recipe_name=recipe)]  # type: ignore[arg-type]
    accelerator = accelerator_of(way, mixed_precision="fp8", kwargs_handlers=handlers, **options)
    model = decoder(seed, blocks)
    batches = loader(ROWS // accelerator.strategy.data_shard.count, steps=STEPS)
    return accelerator, *accelerator.prepare(model, adamw(model), batches)


def train(way: str, recipe: str, folder: str) -> tuple[list[float], dict[str, torch.Tensor], set[str]]:
    """Train and save in the middle; (losses, weights, the classes of gathered weights)."""
    from accelerate.state import PartialState

    rank = PartialState(cpu=True).process_index
    accelerator, model, optimizer, batches = prepared(way, recipe, rank)

    def save(number: int) -> None:
        if number == MIDDLE:
            accelerator.save_state(folder)

    losses, _ = loop(accelerator, model, optimizer, batches, save)
    weight = accelerator.unwrap_model(model).get_submodule("layers.1.up").weight
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    return losses, whole(accelerator, model), {type(local).__name__}


def resume(way: str, recipe: str, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    accelerator, model, optimizer, batches = prepared(way, recipe, 5)
    accelerator.load_state(folder)
    losses, _ = loop(accelerator, model, optimizer, accelerator.skip_first_batches(batches, MIDDLE))
    return losses, whole(accelerator, model)


def train_and_resume(way: str, recipe: str, folder: str) -> tuple[Any, Any]:
    """The results of ``train``, and of ``resume`` with new objects in the same processes."""
    trained = train(way, recipe, folder)
    return trained, resume(way, recipe, folder)


@pytest.mark.parametrize(("way", "recipe"), WAYS)
def test_it_trains_as_bf16_does_and_goes_on(ranks: RankServer, tmp_path: Path, way: str, recipe: str) -> None:
    """The losses are those of bfloat16 on one process within the noise; a resumed run ends where it did."""
    folder, count = str(tmp_path / "middle"), PROCESSES.get(way, 2)
    outcomes = ranks(count, train_and_resume, way, recipe, folder, timeout=110)
    results, (rest, end) = [trained for trained, _ in outcomes], outcomes[0][1]
    losses, weights, classes = results[0]
    theirs = plain(1, half=True, steps=STEPS, blocks=BLOCKS)[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(theirs), rtol=2e-2, atol=2e-2)
    assert losses != theirs
    assert all(result[0] == pytest.approx(losses, abs=1e-6) for result in results)
    # Weights travel in 8 bits where one scale serves the whole weight, and are saved as they are.
    gathers = way == "shards" and recipe == "tensorwise"
    assert (classes == {"WeightWithDynamicFloat8CastTensor"}) == gathers
    assert {type(value) for value in weights.values()} == {torch.Tensor}
    assert rest == pytest.approx(losses[MIDDLE:], abs=1e-5)
    same(end, weights, 1e-5)


def test_shards_in_8_bits_are_read_by_one_process(ranks: RankServer, tmp_path: Path) -> None:
    """A checkpoint holds float32 weights under the user's names, whatever travels."""
    folder = str(tmp_path / "middle")
    losses = ranks(2, train, "shards", "tensorwise", folder, timeout=110)[0][0]
    rest, _ = ranks(1, resume, "one process", "tensorwise", folder, timeout=110)[0]
    torch.testing.assert_close(torch.tensor(rest), torch.tensor(losses[MIDDLE:]), rtol=2e-2, atol=2e-2)


def all_reduces(folder: str) -> dict[str, list[int]]:
    """The all-reduces of forwards and steps; the last forward comes after a checkpoint was loaded."""
    from torch.distributed.tensor.debug import CommDebugMode

    def count(mode: CommDebugMode) -> int:
        return sum(n for kind, n in mode.get_comm_counts().items() if "all_reduce" in str(kind))

    accelerator, model, optimizer, batches = prepared("shards", "tensorwise", 0)
    counts: dict[str, list[int]] = {"forward": [], "step": []}
    first = model.get_parameter("layers.0.up.weight")
    for number, batch in zip(range(3), batches, strict=False):
        if number == 2:
            accelerator.load_state(folder)
            with torch.no_grad():
                first.mul_(64)  # a scale of before would cut it off
        with CommDebugMode() as mode:
            loss = loss_of(model, batch)
        counts["forward"].append(count(mode))
        if number == 1:
            accelerator.save_state(folder)
        accelerator.backward(loss)
        with CommDebugMode() as mode:
            optimizer.step()
        counts["step"].append(count(mode))
        optimizer.zero_grad()
    return counts


def test_the_scales_of_gathered_weights_take_one_all_reduce_a_step(ranks: RankServer, tmp_path: Path) -> None:
    """Computed after the step; weights that were written otherwise since are scaled in the forward."""
    for counts in ranks(2, all_reduces, str(tmp_path / "middle")):
        layers = counts["forward"][0]
        assert layers > 10
        assert counts == {"forward": [layers, 0, layers], "step": [1, 1, 1]}


def compiled_losses(way: str, recipe: str, regional: bool) -> tuple[list[float], list[float]]:
    """The losses of three steps: not compiled, and compiled."""
    from accelerate.utils import TorchDynamoPlugin

    torch._dynamo.reset()
    blocks = BLOCKS if LONG_RUN else 1  # to compile a frozen one takes as long
    losses = []
    for backend in ("no", "aot_eager"):
        plugin = TorchDynamoPlugin(backend=backend, use_regional_compilation=regional)
        accelerator, model, optimizer, batches = prepared(way, recipe, 0, blocks, dynamo_plugin=plugin)
        rows = [batch for batch, _ in zip(batches, range(3), strict=False)]
        losses.append(loop(accelerator, model, optimizer, rows)[0])
    return losses[0], losses[1]


@pytest.mark.parametrize(
    ("way", "recipe", "regional"),
    [
        ("shards", "tensorwise", True),
        long_run_param("copies", "tensorwise", True),
        long_run_param("one process", "rowwise", False),
    ],
)
def test_it_trains_compiled(ranks: RankServer, way: str, recipe: str, regional: bool) -> None:
    """To the same losses: layers in 8 bits are compiled with what is around them."""
    for plainly, compiled in ranks(
        PROCESSES.get(way, 2), compiled_losses, way, recipe, regional, timeout=110
    ):
        assert compiled == pytest.approx(plainly, abs=1e-5)


def train_by_te(way: str, folder: str = "") -> tuple[list[float], list[float], set[int]]:
    """Train and save in the middle; (losses, those of new objects from there on, lengths of histories)."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import TERecipeKwargs

    with pytest.MonkeyPatch.context() as monkeypatch:
        library = transformer_engine.install(monkeypatch)
        AcceleratorState._reset_state(True)
        accelerator = accelerator_of(way, mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()])
        rows = ROWS // accelerator.strategy.data_shard.count

        def prepared(seed: int) -> Any:
            model = decoder(seed, BLOCKS)
            return accelerator.prepare(model, adamw(model), loader(rows, steps=STEPS))

        def save(number: int) -> None:
            if number == MIDDLE:
                accelerator.save_state(folder)

        first: tuple[Any, Any, Any] = prepared(0)
        losses, _ = loop(accelerator, *first, save)
        del first
        accelerator.free_memory()
        model, optimizer, batches = prepared(5)
        accelerator.load_state(folder)
        kept = {len(m.history) for m in model.modules() if isinstance(m, library.Linear)}
        rest, _ = loop(accelerator, model, optimizer, accelerator.skip_first_batches(batches, MIDDLE))
        return losses, rest, kept


@pytest.mark.parametrize("way", ["copies", "shards", "shards, version 1", "stages"])
def test_transformer_engine_trains_as_bf16_does_and_goes_on(
    ranks: RankServer, tmp_path: Path, way: str
) -> None:
    """With a fake of the library, whose layers have a state that grows with the forwards."""
    (losses, rest, kept), others = ranks(2, train_by_te, way, str(tmp_path / "middle"))
    theirs = plain(1, half=True, steps=STEPS, blocks=BLOCKS)[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(theirs), rtol=3e-2, atol=3e-2)
    assert losses != theirs
    assert others[:2] == (losses, rest)
    assert rest == pytest.approx(losses[MIDDLE:], abs=1e-5)
    assert 0 not in kept


def te_refusal() -> tuple[str, str]:
    from accelerate.core.errors import SettingError

    with pytest.raises(SettingError) as error:
        train_by_te("layers")
    return error.value.what, error.value.fix


def test_transformer_engine_does_not_go_with_tensor_parallelism(ranks: RankServer) -> None:
    """Its layers would take the place of those that are sharded."""
    for what, fix in ranks(2, te_refusal):
        assert "TransformerEngine" in what
        assert "tp_size=2" in what
        assert "AORecipeKwargs()" in fix
