"""Where a model is split into stages for training, what travels between them, and options that do not go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate.core.errors import PrepareError, SettingError, UnknownNameError
from accelerate.strategy.parallelism.pipeline.forward_trace import BlockOutputKey, FakeTensorModel
from accelerate.strategy.parallelism.pipeline.model_split import FullModelStateNames, assign_stages
from accelerate.utils import PipelineParallelConfig
from tests.support import parity

CPU = torch.device("cpu")


def options(processes: int = 2, **given: Any) -> PipelineParallelConfig:
    found = PipelineParallelConfig(**given)
    found.settle(processes)
    return found


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"schedule": "1f1c"}, "1f1b"),
    ({"schedule": "1f1b", "num_microbatches": 1}, "too few for 2 stages"),
    ({"schedule": "interleaved", "num_microbatches": 5}, "num_microbatches=6"),
    ({"stages_per_process": 2}, "schedule='interleaved'"),
    ({"num_microbatches": 0}, "(1 or more)"),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_options_that_do_not_go_together_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises((SettingError, UnknownNameError)) as error:
        options(**given)
    assert said in str(error.value)


def test_defaults_make_twice_as_many_chunks_as_stages() -> None:
    assert options(3).num_microbatches == 6
    assert options(2, schedule="interleaved").stages_per_process == 2
    assert options(2, schedule="1f1b").num_microbatches == 4


def test_a_model_is_cut_evenly_or_where_it_is_said() -> None:
    with torch.device("meta"):
        model = parity.Decoder()
    assert assign_stages(model, options(), 2).split_points() == ["layers.2"]
    assert assign_stages(model, options(split_points="layers.1"), 2).split_points() == ["layers.1"]
    assert assign_stages(model, options(split_points=["layers.1.up"]), 2).split_points() == ["layers.1.up"]
    several = assign_stages(model, options(schedule="interleaved"), 2)
    assert (several.count, several.rank_of("layers.0"), several.rank_of("layers.3")) == (4, 0, 1)
    assert "norm" not in assign_stages(model, options(on_all_stages=["norm"]), 2).stage_of
    with pytest.raises(UnknownNameError, match="nrm"):
        assign_stages(model, options(on_all_stages=["nrm"]), 2)
    with pytest.raises(PrepareError, match="leave a stage without parameters"):
        assign_stages(model, options(split_points=["embed"]), 2)


def test_tied_weights_have_several_holders() -> None:
    model = parity.decoder()
    names = FullModelStateNames.from_model(model, assign_stages(model, options(), 2))
    assert names.holders["embed.weight"] == (0, 1)
    assert (names.first["head.weight"], names.order[-1]) == ("embed.weight", "head.weight")
    assert names.holders["layers.0.up.weight"] == (0,)


class Skip(nn.Module):
    """The first value is used by all layers, and after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(torch.relu(x) + x.shape[0])
        return x + first.sin()


def test_a_dry_run_finds_what_travels() -> None:
    """Through a stage that does not need it, too; the model itself is not touched, and nothing is drawn."""
    model = Skip()
    cut = assign_stages(model, options(3, split_points=["layers.1", "layers.2"]), 3)
    before, random = {n: p.clone() for n, p in model.named_parameters()}, torch.get_rng_state()
    shadow = FakeTensorModel(model, list(cut.stage_of), CPU)
    trace = shadow.trace(cut.stage_of, 3, (torch.ones(5, 4),), {}, None)
    assert [(call.block, call.stage) for call in trace.calls] == [
        (f"layers.{n}", min(n, 2)) for n in range(4)
    ]
    assert trace.stage_inputs(1) == (BlockOutputKey(0, 0),)
    assert trace.stage_inputs(2) == (BlockOutputKey(0, 0), BlockOutputKey(1, 0))
    assert trace.stage_inputs(2) is trace.stage_inputs(2), "every micro-batch asks: it is computed once"
    assert trace.result_inputs == (BlockOutputKey(0, 0), BlockOutputKey(3, 0))
    assert trace.meta(BlockOutputKey(3, 0)) == ((5, 4), torch.float32, True)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert type(model.layers[0]) is nn.Linear
