"""``prepare_pippy`` on gloo processes: the numbers of the plain model, whatever comes in and goes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from accelerate.core.errors import PrepareError, SettingError, UnknownNameError
from tests.support.long_run import long_run_param
from tests.support.packages import needs
from tests.support.ranks import RankServer, same_on_all

# What the rank server imports once for this module.
PRELOAD = ("transformers.models.llama.modeling_llama",)

# A chunk of rows may be multiplied by another kernel than the whole batch, which adds in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        h = self.down(F.gelu(self.up(self.norm(x))))
        return x + (h if mask is None else h * mask)


class Plain(nn.Module):
    """Layers in a list, an embedding that is also the head, a table of positions that is not saved."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.linspace(0, 1, 64)[:, None], persistent=False)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


class Skip(nn.Module):
    """The first value is used by every stage, and by the last one again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, flip: bool = False) -> dict[str, Any]:
        first, parts = x.transpose(1, 2).contiguous().transpose(1, 2), []
        for layer in self.layers:
            x = layer(x) + scale * first
            parts.append(x[:, :2].transpose(1, 2))
        return {
            "flat": x.flatten(0, 1),
            "table": torch.ones(4, 4, device=x.device),  # as long as a chunk of 8
            "out": x.flip(0) if flip else x,
            "parts": tuple(parts),
            "first": first,
            "layers": 4,
            "none": None,
        }


@dataclass
class Answer:
    logits: torch.Tensor
    states: list[torch.Tensor]


class Several(nn.Module):
    """Several inputs, of which one is no batch; an answer that is a dataclass; writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, a: torch.Tensor, b: torch.Tensor, table: torch.Tensor) -> Answer:
        x, states = a * 1.0, []
        view = x[:, 0]
        for layer in self.layers:
            x = layer(x + table) * b[:, None, None]
            view.add_(1.0)
            states.append(x)
        x[:, 0] += view
        return Answer(x, states)


class Untraceable(nn.Module):
    """What it does depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if x.sum().item() > 0 else x
        return x


ACTIONS: dict[int, Callable[[], Any]] = {}  # what stages do with each chunk, beside computing


@torch.library.custom_op("accelerate_tests::act", mutates_args=(), schema="(Tensor x, int stage) -> Tensor")
def act(x: torch.Tensor, stage: int) -> torch.Tensor:
    """An operation of the user's own: it is not traced."""
    if stage in ACTIONS:
        ACTIONS[stage]()
    return x.clone()


act.register_fake(lambda x, stage: torch.empty_like(x))


class Acting(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage, self.linear = stage, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return act(self.linear(x), self.stage)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().eval()


def tokens(rows: int, length: int = 6, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 11, (rows, length), generator=torch.Generator().manual_seed(seed))


def floats(rows: int, length: int = 6, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, length, 8, generator=torch.Generator().manual_seed(seed))


def compare(build: Callable[[], nn.Module], example: Any, calls: Any, options: dict[str, Any]) -> Any:
    """Runs calls by the pipeline and by the plain model, and gives what this rank is to know of itself."""
    from accelerate import PartialState, prepare_pippy

    state = PartialState()
    plain, model = seeded(build), seeded(build)
    args, kwargs = example
    made = prepare_pippy(model, example_args=args, example_kwargs=kwargs, **options)
    assert made is model
    for turn, (args, kwargs) in enumerate(calls):
        expected = plain(*args, **kwargs)
        if turn % 2:
            found = model(*args, **kwargs)
        else:
            with torch.no_grad():
                found = model(*args, **kwargs)
        if state.is_last_process or options.get("gather_output"):
            torch.testing.assert_close(found, expected, **CLOSE) if not isinstance(expected, Answer) else [
                torch.testing.assert_close(vars(found)[name], value, **CLOSE)
                for name, value in vars(expected).items()
            ]
            assert type(found) is type(expected)
        else:
            assert found is None
    return model.hf_split_points


def held() -> tuple[list[str], int]:
    from accelerate import prepare_pippy

    model = prepare_pippy(seeded(Plain), split_points=["layers.2"], example_args=(tokens(4),))
    here = [n for n, p in model.named_parameters() if p.device.type != "meta"]
    return sorted({name.rpartition(".")[0] for name in here}), sum(
        p.numel() for p in model.parameters() if not p.is_meta
    )


@pytest.mark.parametrize("processes", [long_run_param(2), 3, long_run_param(4)])
def test_a_pipeline_gives_what_the_plain_model_gives(ranks: RankServer, processes: int) -> None:
    """Tied weights, a buffer that is not saved, uneven batches, longer sequences, with no_grad or not."""
    calls = [((tokens(n, length, seed=n),), {}) for n, length in [(8, 6), (1, 6), (20, 9)]]
    build = build_short if processes == 3 else Plain
    points = same_on_all(ranks(processes, compare, build, ((tokens(8),), None), calls, {}))
    assert len(points) == processes - 1


def test_the_result_comes_on_all_ranks_when_asked(ranks: RankServer) -> None:
    options = {"gather_output": True, "num_chunks": 3}
    ranks(2, compare, build_short, ((tokens(8),), None), [((tokens(7),), {})], options)


def test_weights_of_other_stages_are_let_go(ranks: RankServer) -> None:
    """A tied weight stays on both ranks that use it."""
    (one, first), (two, last) = ranks(2, held)
    assert "embedding" in one
    assert not [name for name in one if name.startswith(("layers.2", "layers.3", "layers.4", "norm"))]
    assert "layers.2.up" in two
    assert not [name for name in two if name.startswith(("layers.0", "layers.1"))]
    whole = sum(p.numel() for p in seeded(Plain).parameters())
    assert first + last == whole + 88, "each weight on one rank, the tied one on both"


@pytest.mark.parametrize("processes", [long_run_param(2), 3, long_run_param(4)])
def test_values_skip_stages_and_trees_come_back(ranks: RankServer, processes: int) -> None:
    """Values of the first stage that the last one needs, plain values in and out, keywords."""
    calls = [
        ((floats(8),), {"scale": 0.5}),
        ((floats(5),), {"scale": 0.5}),
        ((floats(8), 0.25), {}),
    ]
    ranks(processes, compare, Skip, ((floats(8),), {"scale": 0.5}), calls, {})


def test_several_inputs_and_one_that_is_no_batch(ranks: RankServer) -> None:
    """Also when it is as long as a later batch. And writes through views, which reach other stages."""

    def inputs(rows: int) -> Any:
        return (floats(rows, 10), torch.arange(rows, dtype=torch.float32), floats(1, 10, seed=3)[0]), {}

    options = {"split_points": ["layers.1", "layers.2"], "gather_output": True}
    ranks(3, compare, Several, inputs(6), [inputs(6), inputs(10)], options)


def masked(rows: int) -> Any:
    return (), {"tokens": tokens(rows), "mask": torch.ones(rows, 1, 8) * 0.5}


def test_keywords_alone(ranks: RankServer) -> None:
    ranks(2, compare, build_short, masked(4), [masked(4), masked(3)], {"num_chunks": 4})


def build_short() -> nn.Module:
    """A layer for each of three stages, at most: tracing costs for each."""
    return Plain(3)


def build_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=32, eos_token_id=1, bos_token_id=1
    )
    return GPT2LMHeadModel(config)


def build_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 40}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


def build_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 40}
    return BertForSequenceClassification(BertConfig(**sizes, num_attention_heads=2))


def build_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 40}
    config: Any = T5Config
    return T5ForConditionalGeneration(config(**sizes, decoder_start_token_id=0))


def words(rows: int, length: int = 6) -> torch.Tensor:
    return torch.randint(2, 40, (rows, length), generator=torch.Generator().manual_seed(rows + length))


def attended(rows: int, length: int = 6) -> dict[str, torch.Tensor]:
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, -2:] = 0
    return {"input_ids": words(rows, length), "attention_mask": mask}


def compare_transformers(name: str) -> Any:
    from accelerate import PartialState, prepare_pippy

    build = {"gpt2": build_gpt2, "llama": build_llama, "bert": build_bert, "t5": build_t5}[name]
    plain, model = seeded(build), seeded(build)
    more = {"decoder_input_ids": words(4, 3)} if name == "t5" else {}
    everywhere = name in ("bert", "t5")
    prepare_pippy(model, example_kwargs=attended(4) | more, gather_output=everywhere)
    # Another number of rows is traced anew.
    for rows, length in {"llama": [(3, 9)], "t5": [(4, 6)]}.get(name, [(3, 6)]):
        more = {"decoder_input_ids": words(rows, 3)} if name == "t5" else {}
        inputs = attended(rows, length) | more
        with torch.no_grad():
            expected, found = (
                plain(**inputs, use_cache=False) if name != "bert" else plain(**inputs),
                model(**inputs),
            )
        if everywhere or PartialState().is_last_process:
            assert type(found) is type(expected)
            assert list(found) == list(expected)
            for key in expected:
                torch.testing.assert_close(found[key], expected[key], **CLOSE)
    return model.hf_split_points


@needs("transformers")
@pytest.mark.parametrize("name", [long_run_param("gpt2"), "llama", "bert", "t5"])
def test_transformers(ranks: RankServer, name: str) -> None:
    (point,) = same_on_all(ranks(2, compare_transformers, name, timeout=180))
    assert point


def refusals() -> dict[str, str]:
    from accelerate import prepare_pippy

    example = (tokens(4),)
    cases: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
        "unknown": (
            UnknownNameError,
            lambda: prepare_pippy(seeded(Plain), ["layer.2"], example_args=example),
        ),
        "too many": (
            PrepareError,
            lambda: prepare_pippy(seeded(Plain), ["layers.1", "norm"], example_args=example),
        ),
        "few blocks": (
            PrepareError,
            lambda: prepare_pippy(nn.Sequential(nn.Linear(8, 8)), example_args=(floats(4),)),
        ),
        "no example": (PrepareError, lambda: prepare_pippy(seeded(Plain))),
        "no chunks": (SettingError, lambda: prepare_pippy(seeded(Plain), example_args=example, num_chunks=0)),
        "no values": (PrepareError, lambda: prepare_pippy(seeded(Plain).to("meta"), example_args=example)),
        "no trace": (PrepareError, lambda: prepare_pippy(seeded(Untraceable), example_args=(floats(4),))),
        "cache": (PrepareError, lambda: prepare_pippy(seeded(Plain), example_args=(tokens(4), object()))),
    }
    texts = {}
    for name, (kind, action) in cases.items():
        with pytest.raises(kind) as error:
            action()
        texts[name] = str(error.value)
    return texts


def test_refusals(ranks: RankServer) -> None:
    texts = same_on_all(ranks(2, refusals))
    assert "did you mean 'layers.2'" in texts["unknown"]
    assert "2 split points make 3 stages, but there are 2 processes" in texts["too many"]
    assert "1 blocks for 2 processes" in texts["few blocks"]
    assert "example_args=(input,)" in texts["no example"]
    assert "at least 1" in texts["no chunks"]
    assert "'embedding.weight' has no values" in texts["no values"]
    assert "cannot be traced" in texts["no trace"]
    assert "torch.library.custom_op" in texts["no trace"]
    assert "[0][1] is a object" in texts["cache"]


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor, *, pooled: bool = False) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x.mean() if pooled else x


def later_refusals() -> dict[str, str]:
    from accelerate import PartialState, prepare_pippy

    state = PartialState()
    model = prepare_pippy(seeded(Mean), example_args=(floats(4),))
    texts = {}
    with pytest.raises(PrepareError) as error:
        model(floats(0)) if state.is_main_process else model()
    texts["empty"] = str(error.value)
    with pytest.raises(PrepareError) as error:
        prepare_pippy(model, example_args=(floats(4),))
    texts["twice"] = str(error.value)
    output = model(floats(4)) if state.is_main_process else model()  # the group still works
    assert (output is not None) is state.is_last_process
    return texts


def test_what_rank_0_refuses_is_refused_on_every_rank(ranks: RankServer) -> None:
    texts = same_on_all(ranks(2, later_refusals))
    assert "without a batch" in texts["empty"]
    assert "is a pipeline already" in texts["twice"]


def mean_of_a_batch() -> None:
    from accelerate import PartialState, prepare_pippy

    model = prepare_pippy(seeded(Mean), example_args=(floats(4),), example_kwargs={"pooled": True})
    if PartialState().is_last_process:
        with pytest.raises(PrepareError, match="differs between the chunks"):
            model()
    else:
        assert model(floats(4), pooled=True) is None


def test_a_mean_over_the_batch_is_refused(ranks: RankServer) -> None:
    """The mean of a chunk is not that of the batch."""
    ranks(2, mean_of_a_batch)


def overlap() -> list[tuple[int, int, float, float]]:
    """Stage 0 does not end its last chunk before stage 1 begins its first."""
    import torch.distributed as dist

    from accelerate import prepare_pippy

    model: Any = nn.Sequential(Acting(0), Acting(1))
    prepare_pippy(model, example_args=(floats(8),), num_chunks=4)
    store, chunks = dist.distributed_c10d._get_default_store(), iter(range(4))
    ACTIONS[0] = lambda: next(chunks) == 3 and store.wait(["stage 1 has begun"])
    ACTIONS[1] = lambda: store.set("stage 1 has begun", "yes")
    return [(i.stage, i.chunk, i.begin, i.end) for i in model.pipeline_timeline(floats(8))]


def test_stages_work_at_the_same_time(ranks: RankServer) -> None:
    """Stage 0 waits in its last chunk for stage 1 to begin its first: stages in turn would never end."""
    found = same_on_all(ranks(2, overlap))
    assert [(stage, chunk) for stage, chunk, *_ in found] == [(s, c) for s in (0, 1) for c in range(4)]
    begin = {(stage, chunk): begin for stage, chunk, begin, _ in found}
    end = {(stage, chunk): end for stage, chunk, _, end in found}
    assert begin[1, 0] < end[0, 3]
    for chunk in range(4):
        assert end[0, chunk] <= begin[1, chunk], "a chunk is sent when it is done"


def fail() -> None:
    raise ArithmeticError("the stage fails")


def failing() -> None:
    from accelerate import PartialState, prepare_pippy

    model = prepare_pippy(nn.Sequential(Acting(0), Acting(1)), example_args=(floats(4),))
    ACTIONS[1] = fail
    model(floats(4))
    PartialState().wait_for_everyone()


def test_a_stage_that_fails_ends_all(ranks: RankServer) -> None:
    """C3: a stage that waits for another in torch's schedule is freed as well."""
    first, second = ranks.outcomes(2, failing, grace=30)
    assert (first.status, second.status) == ("raised", "raised")
    assert "ArithmeticError: the stage fails" in second.traceback


def fail_in_turn(gathered: bool) -> list[str]:
    """Let each stage fail in its first chunk, and compute a batch after each failure."""
    from accelerate import PartialState, prepare_pippy

    state, seen = PartialState(), list[str]()
    plain, model = (seeded(lambda: nn.Sequential(*map(Acting, range(3)))) for _ in range(2))
    prepare_pippy(model, example_args=(floats(6),), gather_output=gathered)
    for stage in range(3):
        ACTIONS[stage] = fail
        try:
            assert model(floats(6)) is None
            seen.append("nothing")
        except RuntimeError as error:
            seen.append(f"{type(error).__name__} {type(error.__cause__).__name__}")
        del ACTIONS[stage]
        x = (stage + 1) * floats(6)
        found = model(x)
        if gathered or state.is_last_process:
            torch.testing.assert_close(found, plain(x), **CLOSE)
    return seen


def test_a_batch_after_one_that_failed_has_its_own_result(ranks: RankServer) -> None:
    """No stage keeps a chunk of the failed batch, and the last rank gives nothing that was made of it."""
    failed, none, peer = "RuntimeError ArithmeticError", "nothing", "PeerError NoneType"
    outcomes = ranks(3, fail_in_turn, False)
    assert outcomes == [[failed, none, none], [none, failed, none], [peer, peer, failed]]
    outcomes = ranks(3, fail_in_turn, True)
    assert outcomes == [[failed, peer, peer], [peer, failed, peer], [peer, peer, failed]], "all miss a result"


def alone() -> None:
    from accelerate import prepare_pippy

    plain, model = seeded(Plain), seeded(Plain)
    with pytest.warns(UserWarning, match="one process"):
        prepare_pippy(model, example_args=(tokens(4),))
    assert torch.equal(model(tokens(3)), plain(tokens(3)))
    assert model.hf_split_points == []


def test_one_process_runs_the_whole_model(ranks: RankServer) -> None:
    ranks(1, alone)


def by_hand() -> Any:
    """The pieces of 1.x, as its own users put them together."""
    from accelerate import PartialState
    from accelerate.inference import build_pipeline, pippy_forward

    plain, model = seeded(Plain), seeded(Plain)
    pipeline = build_pipeline(model, "auto", (tokens(4),), None, 2)
    found = pippy_forward(pipeline.step, 2, True, tokens(5))
    torch.testing.assert_close(found, plain(tokens(5)), **CLOSE)
    return PartialState().num_processes


def test_the_pieces_can_be_used_by_hand(ranks: RankServer) -> None:
    assert ranks(2, by_hand) == [2, 2]
