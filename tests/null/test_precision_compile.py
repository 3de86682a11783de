"""Models that ``torch.compile`` compiles after ``prepare``; and mixed precision that is taken off again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin, extract_model_from_parallel
from tests.support.long_run import long_run_param

INPUTS = torch.linspace(-1, 1, 8).reshape(2, 4)


class Pair(nn.Module):
    """Two layers, and whether the second computes in 16 bits; ``splits`` breaks the graph between them."""

    def __init__(self, splits: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.splits = nn.Linear(4, 4), nn.Linear(4, 2), splits
        self.is_half: torch.Tensor
        self.register_buffer("is_half", torch.zeros((), dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.splits:
            torch._dynamo.graph_break()
        y = self.second(x)
        self.is_half.fill_(y.dtype.itemsize == 2)
        return y


def compiled(how: str, accelerator: Accelerator, model: nn.Module, **options: Any) -> Callable[..., Any]:
    """Compile a prepared model as programs do."""
    if how == "in place":
        model.compile(**options)
        return model
    if how == "inside another":
        return torch.compile(nn.Sequential(model), **options)
    if how == "called by a function":
        return torch.compile(lambda x: model(x), **options)
    return torch.compile(accelerator.unwrap_model(model) if how == "unwrapped" else model, **options)


WAYS = ("itself", "unwrapped", "in place", "inside another", "called by a function")


def computes_in_half(call: Callable[..., Any], model: Any) -> bool:
    model.is_half.fill_(False)
    assert call(INPUTS).dtype == torch.float32
    return bool(model.is_half)


def train(call: Callable[..., Any], model: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """Run forward and backward in 16 bits; return the output and a gradient."""
    model.zero_grad()
    model.is_half.fill_(False)
    output = call(INPUTS)
    assert model.is_half
    output.square().sum().backward()
    assert not torch.is_autocast_enabled("cpu")
    gradient = model.first.weight.grad
    assert gradient is not None
    return output, gradient


# How the graph is made -> the backend, options, and the ways in which it is compiled by default.
GRAPHS: dict[str, tuple[str, dict[str, bool], tuple[str, ...]]] = {
    "eager": ("eager", {}, ("in place",)),
    "aot": ("aot_eager", {}, ("unwrapped",)),
    "fullgraph": ("aot_eager", {"fullgraph": True}, WAYS),
    "split graph": ("aot_eager", {"splits": True}, ("itself",)),
}


@pytest.mark.parametrize(
    ("graph", "how"),
    [
        (graph, how) if how in by_default else long_run_param(graph, how)
        for graph, (_, _, by_default) in GRAPHS.items()
        for how in WAYS
    ],
)
def test_a_prepared_model_is_compiled_later(graph: str, how: str) -> None:
    backend, options, _ = GRAPHS[graph]
    torch._dynamo.reset()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(Pair(options.get("splits", False)))
    output, gradient = train(model, model)
    call = compiled(how, accelerator, model, backend=backend, fullgraph=options.get("fullgraph", False))
    for _ in range(2):
        own_output, own_gradient = train(call, model)
        assert own_output.dtype == torch.float32
        torch.testing.assert_close(own_output, output, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(own_gradient, gradient, rtol=2e-2, atol=2e-2)
    with torch.no_grad():
        assert computes_in_half(call, model)


@pytest.mark.parametrize("how", WAYS)
def test_a_model_that_was_never_called_compiles_as_one_graph(how: str) -> None:
    torch._dynamo.reset()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Sequential(nn.Linear(4, 4)))
    call = compiled(how, accelerator, model, backend="eager", fullgraph=True)
    assert call(torch.ones(2, 4)).dtype == torch.float32


def test_a_model_with_a_dict_of_outputs_is_compiled_later() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.layer(x)}

    torch._dynamo.reset()
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(Named())
    expected = model(INPUTS)["logits"]
    logits = torch.compile(model, backend="aot_eager")(INPUTS)["logits"]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=1e-2, atol=1e-2)


def test_a_prepared_model_is_one_graph() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = accelerator.prepare(Pair())
    call = torch.compile(lambda x: model(x) + model(2 * x), backend="eager", fullgraph=True)
    torch.testing.assert_close(call(INPUTS), model(INPUTS) + model(2 * INPUTS))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("compiles_first", [False, True])
def test_unwrap_model_takes_mixed_precision_off(compiles_first: bool) -> None:
    """As in 1.x the model itself computes in float32 then; prepared again it does so in bfloat16."""
    torch._dynamo.reset()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    user: Any = Pair()
    if compiles_first:
        user = torch.compile(user, backend="eager")
    model = accelerator.prepare(user)
    assert computes_in_half(accelerator.unwrap_model(model), model)
    assert not computes_in_half(accelerator.unwrap_model(model, keep_fp32_wrapper=False), model)
    assert not computes_in_half(model, model)
    assert computes_in_half(accelerator.prepare(model), model)


def test_a_model_compiled_by_prepare_loses_mixed_precision_with_its_wrapper() -> None:
    torch._dynamo.reset()
    plugin = TorchDynamoPlugin(backend="eager")
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", dynamo_plugin=plugin)
    model = accelerator.prepare(Pair())
    assert computes_in_half(model, model)
    inner = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert not computes_in_half(inner, inner)
    assert not computes_in_half(model, model)


def test_hooks_run_around_the_forward_without_names_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.precision.autocast.is_available", lambda subject: False)
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(nn.Linear(4, 4))
    compiled_model = torch.compile(model, backend="eager")
    x = torch.ones(1, 4)
    assert torch.equal(compiled_model(x), model(x))
    assert compiled_model(x).dtype is torch.float32


def test_every_mode_of_inductor_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """``TrainingArguments(torch_compile_mode=...)`` of transformers hands the mode on by the variable."""
    for mode in torch._inductor.list_mode_options():
        assert TorchDynamoPlugin(backend="inductor", mode=mode).to_kwargs().get("mode", "default") == mode
        monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", mode)
        assert TorchDynamoPlugin().mode == mode
