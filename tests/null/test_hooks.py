"""Hooks around a forward: duck-typed, chained, removed without a trace, told when a forward raises (E12)."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from tests.support.devices import device_types


class Layer(nn.Module):
    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Doubles."""
        if scale < 0:
            raise ValueError("negative")
        return x * 2 * scale


class Adding(ModelHook):
    """Adds to the input and to the output, and writes down what is called."""

    def __init__(self, before: float = 0, after: float = 0) -> None:
        self.before, self.after = before, after
        self.calls: list[str] = []

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.calls.append("init")
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.calls.append("pre")
        return (args[0] + self.before, *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.calls.append("post")
        return output + self.after

    def abort(self, module: nn.Module) -> None:
        self.calls.append("abort")

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.calls.append("detach")
        return module


class Foreign:
    """A hook of another library: no subclass of ours."""

    no_grad = False

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name not in ("init_hook", "pre_forward", "post_forward", "detach_hook"):
            raise AttributeError(name)

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.seen.append(name)
            return (args, kwargs) if name == "pre_forward" else args[0] if args else module

        return call


X = torch.ones(2)


def test_a_hook_sees_inputs_and_outputs() -> None:
    hook = Adding(before=1, after=10)
    layer = add_hook_to_module(Layer(), hook)
    assert layer(X).tolist() == [14, 14]
    assert layer(X, scale=0.5).tolist() == [12, 12]
    assert hook.calls == ["init", "pre", "post", "pre", "post"]


def test_what_a_hooked_module_carries() -> None:
    layer = Layer()
    own = layer.forward
    hook = ModelHook()
    assert add_hook_to_module(layer, hook) is layer
    assert vars(layer)["_hf_hook"] is hook
    assert vars(layer)["_old_forward"] == own
    forward = vars(layer)["forward"]
    assert isinstance(forward, functools.partial)
    assert forward.__doc__ == "Doubles."
    assert inspect.signature(forward) == inspect.signature(own)


def test_removal_leaves_no_trace() -> None:
    """What a model names like a device, where dispatching puts ``cuda`` and its like, is its own."""
    layer, hook = Layer(), Adding()
    vars(layer).update(dict.fromkeys(device_types(), 5))
    before = dict(vars(layer))
    add_hook_to_module(layer, hook)
    assert remove_hook_from_module(layer) is layer
    assert vars(layer) == before
    assert hook.calls == ["init", "detach"]
    assert layer.to("cpu") is layer
    assert remove_hook_from_module(layer) is layer


def test_a_forward_of_the_instance_comes_back() -> None:
    layer = Layer()
    own = vars(layer)["forward"] = lambda x: x * 3
    add_hook_to_module(layer, Adding(after=1))
    assert layer(X).tolist() == [4, 4]
    remove_hook_from_module(layer)
    assert layer.forward is own


def test_hooks_of_all_modules_are_removed() -> None:
    model = nn.Sequential(Layer(), nn.Sequential(Layer()))
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    remove_hook_from_module(model)
    assert [hasattr(module, "_hf_hook") for module in model.modules()] == [False, True, True, True]
    remove_hook_from_submodules(model)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


def test_a_second_hook_takes_the_place_of_the_first() -> None:
    layer = Layer()
    own = layer.forward
    first, second = Adding(after=1), Adding(after=100)
    add_hook_to_module(layer, first)
    add_hook_to_module(layer, second)
    assert layer(X).tolist() == [102, 102]
    assert vars(layer)["_old_forward"] == own
    remove_hook_from_module(layer)
    assert layer(X).tolist() == [2, 2]


def test_appended_hooks_run_in_order() -> None:
    layer = Layer()
    first, second, third = Adding(before=1, after=1), Adding(before=2, after=2), Adding(before=4, after=4)
    add_hook_to_module(layer, first)
    add_hook_to_module(layer, second, append=True)
    assert vars(layer)["_hf_hook"].hooks == (first, second)
    add_hook_to_module(layer, third, append=True)
    assert layer(X).tolist() == [23, 23]
    remove_hook_from_module(layer)
    assert all(hook.calls[-1] == "detach" for hook in (first, second, third))
    lone = add_hook_to_module(Layer(), first, append=True)
    assert lone._hf_hook is first


def test_a_hook_of_another_library_is_a_hook() -> None:
    """Diffusers passes hooks of its own class."""
    layer, hook = Layer(), Foreign()
    add_hook_to_module(layer, hook)
    assert layer(X).tolist() == [2, 2]
    remove_hook_from_module(layer)
    assert hook.seen == ["init_hook", "pre_forward", "post_forward", "detach_hook"]


def test_init_hook_is_looked_up_as_any_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    """compressed-tensors replaces it on the class for a while."""
    monkeypatch.setattr(Adding, "init_hook", lambda _, module: module)
    hook = Adding()
    add_hook_to_module(Layer(), hook)
    assert hook.calls == []


def test_gradients_are_asked_for_at_each_forward() -> None:
    hook = ModelHook()
    layer = add_hook_to_module(Layer(), hook)
    x = torch.ones(2, requires_grad=True)
    assert layer(x).requires_grad
    hook.no_grad = True
    assert not layer(x).requires_grad
    both = add_hook_to_module(Layer(), SequentialHook(ModelHook(), hook))
    assert not both(x).requires_grad


def test_an_error_of_the_forward_reaches_the_hook_and_the_caller() -> None:
    """E12."""
    hook, plain = Adding(), Foreign()
    layer = add_hook_to_module(Layer(), hook)
    add_hook_to_module(layer, plain, append=True)
    with pytest.raises(ValueError, match="negative"):
        layer(X, scale=-1.0)
    assert hook.calls[-2:] == ["pre", "abort"]
    assert layer(X).tolist() == [2, 2]


def test_an_error_of_a_hook_reaches_those_before_it() -> None:
    """E12."""

    class Failing(Adding):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            raise KeyboardInterrupt

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            raise KeyError("post")

    first, failing, last = Adding(), Failing(), Adding()
    hooks = SequentialHook(first, failing, last)
    layer = add_hook_to_module(Layer(), hooks)
    with pytest.raises(KeyboardInterrupt):
        layer(X)
    assert [hook.calls for hook in hooks.hooks] == [["init", "pre", "abort"], ["init"], ["init"]]
    with pytest.raises(KeyError):
        hooks.post_forward(layer, X)
    assert last.calls == ["init", "abort"]


def test_a_traced_module_keeps_its_edits() -> None:
    """A ``torch.fx.GraphModule`` makes its forward anew when its graph is edited."""

    class Doubling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    traced = torch.fx.symbolic_trace(Doubling())
    add_hook_to_module(traced, Adding(after=1))
    assert traced(X).tolist() == [3, 3]
    for node in traced.graph.nodes:
        if node.op == "call_function" and node.args[1] == 2:
            node.args = (node.args[0], 5)
    traced.recompile()
    assert traced(X).tolist() == [6, 6]
    remove_hook_from_module(traced)
    assert "forward" not in vars(traced)
    assert traced(X).tolist() == [5, 5]


def test_a_copy_of_a_hooked_module_is_hooked_itself() -> None:
    layer = nn.Linear(2, 2)
    add_hook_to_module(layer, ModelHook())
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin._hf_hook is not layer._hf_hook
        with torch.no_grad():
            twin.weight.add_(1)
        assert not torch.equal(twin(X), layer(X))
        remove_hook_from_module(twin)
        assert twin.forward.__self__ is twin
    assert hasattr(layer, "_hf_hook")


def test_an_argument_may_have_any_name() -> None:
    class Odd(nn.Module):
        def forward(self, module: int, hook: int) -> int:
            return module + hook

    class Passing(ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return args, {**kwargs, "module": 1}

    assert add_hook_to_module(Odd(), Passing())(hook=2) == 3


def test_the_compiler_goes_through_a_hook_that_does_nothing() -> None:
    layer = add_hook_to_module(Layer(), ModelHook())
    explained = torch._dynamo.explain(layer)(X)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)
