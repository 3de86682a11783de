"""Compiling models: the options of ``torch.compile``, and compilation block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.core import environ
from accelerate.core.effects import Effect, Option, given, overridden
from accelerate.core.handler import KwargsHandler
from accelerate.core.setting import load
from accelerate.facade.modules import is_repeated_blocks
from accelerate.precision.settings import CompileSettings, DynamoBackend


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of ``torch.compile`` (see there); a field that is None takes its variable, then its default.

    Attributes:
        backend: compiler, by its ``DynamoBackend`` name in any case (``ACCELERATE_DYNAMO_BACKEND``, no).
        mode: see ``torch.compile`` (``ACCELERATE_DYNAMO_MODE``, default).
        fullgraph: refuse a model that does not compile as one graph (``ACCELERATE_DYNAMO_USE_FULLGRAPH``).
        dynamic: compile for any shape; None lets torch decide (``ACCELERATE_DYNAMO_USE_DYNAMIC``).
        options: options of the backend.
        disable: make ``torch.compile`` do nothing, for tests.
        use_regional_compilation: compile repeated blocks one by one
            (``ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION``).

    Raises:
        UnknownNameError: there is no such backend or mode.
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        given = {
            "dynamo_backend": None if self.backend is None else str(self.backend),
            "dynamo_mode": self.mode,
            "dynamo_use_fullgraph": self.fullgraph,
            "dynamo_use_dynamic": self.dynamic,
            "dynamo_use_regional_compilation": self.use_regional_compilation,
        }
        self._found = load(CompileSettings, code=given)
        settings = self._found.value
        self.backend = DynamoBackend(settings.dynamo_backend or DynamoBackend.NO.value)
        self.mode = settings.dynamo_mode or "default"
        self.fullgraph, self.dynamic = settings.dynamo_use_fullgraph, settings.dynamo_use_dynamic
        self.use_regional_compilation = settings.dynamo_use_regional_compilation

    @property
    def options_asked(self) -> list[Option]:
        """What was asked of the compiler, and where; none where compilation was declined."""
        found = [option for option in given(self._found) if option.value != DynamoBackend.NO.value]
        more = {"options": self.options, "disable": self.disable or None}
        where = type(self).__name__
        return found + [Option(name, value, where) for name, value in more.items() if value is not None]

    @property
    def enabled(self) -> bool:
        """Whether anything is compiled."""
        return self.backend != DynamoBackend.NO and not self.disable

    def to_dict(self) -> dict[str, Any]:
        """Every field; the backend as ``torch.compile`` spells it."""
        return {**super().to_dict(), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Arguments of ``torch.compile``: what differs from its own defaults, the backend always."""
        plain = {"mode": "default", "fullgraph": False, "dynamic": None, "options": None, "disable": False}
        fields = self.to_dict()
        chosen = {name: fields[name] for name, usual in plain.items() if fields[name] != usual}
        return chosen if self.backend == DynamoBackend.NO else {"backend": fields["backend"], **chosen}


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compiles the repeated blocks of a model one by one, in place; without such blocks the whole model.

    Blocks of one class share the compiled code, so a deep model starts as fast as one block. Names,
    parameters and ``state_dict`` stay as they are.

    Args:
        module: the model.
        compile_kwargs: arguments of ``torch.compile``.

    Returns:
        The same model.
    """
    lists = [part for part in module.modules() if is_repeated_blocks(part)]
    blocks = {block: None for part in lists for block in part.children()}
    # The outermost blocks only: a block inside one is compiled with it.
    inside = {part for block in blocks for part in block.modules() if part is not block}
    for block in blocks:
        if block not in inside:
            block.compile(**compile_kwargs)
    if not blocks:
        module.compile(**compile_kwargs)
    return module


def effects(plugin: TorchDynamoPlugin, models: Sequence[nn.Module], *, stepped: bool) -> Iterator[Effect]:
    """What became of the options of compilation, seen on prepared models.

    Args:
        plugin: the options.
        models: the user's own modules.
        stepped: a training step is over, so that what is compiled has run.
    """
    why = _not_compiled(plugin, models, stepped=stepped)
    done = sum(map(_is_compiled, (part for model in models for part in model.modules())))
    yield from overridden(plugin._found)
    for option in plugin.options_asked:
        if option.name == "disable" and not plugin.enabled:
            yield option.applied()
        elif why:
            yield option.failed(why)
        elif not models:
            yield option.pending("no model is prepared")
        elif option.name == "dynamo_use_regional_compilation" and all(map(_is_compiled, models)):
            yield option.failed("no model has repeated blocks: it is compiled as a whole")
        else:
            yield option.applied(f"{done} modules are compiled" if plugin.use_regional_compilation else "")


def _not_compiled(plugin: TorchDynamoPlugin, models: Sequence[nn.Module], *, stepped: bool) -> str:
    """Why nothing is compiled, or not all; empty when all is."""
    if plugin.disable:
        return "TorchDynamoPlugin(disable=True) turns compilation off"
    if plugin.backend == DynamoBackend.NO:
        return "no dynamo_backend is chosen, so nothing is compiled"
    if not models:
        return ""
    bare = [model for model in models if not any(map(_is_compiled, model.modules()))]
    for variable in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
        if environ.get(variable) == "1":
            return f"{variable}=1 turns torch.compile off"
    dynamo: Any = torch._dynamo
    if dynamo.config.disable:
        return "torch._dynamo.config.disable turns torch.compile off"
    if bare:
        return f"no part of the {type(bare[0]).__name__} is compiled"
    return _not_run() if stepped else ""


def _not_run() -> str:
    """After a step torch must have made graphs; it skips code of its own, and may hide its errors."""
    from torch._dynamo.utils import counters

    graphs, frames = counters["stats"]["unique_graphs"], counters["frames"]
    hidden = torch._dynamo.config.suppress_errors and frames["total"] > frames["ok"]
    if hidden:
        return "torch._dynamo.config.suppress_errors hid an error, and some code runs uncompiled"
    return (
        "" if graphs else "the first step ran without it: torch compiles no code of modules that are its own"
    )


def _is_compiled(module: nn.Module) -> bool:
    """Whether calls of ``module`` go to something that torch compiles."""
    call: Any = module._compiled_call_impl
    while call is not None and not hasattr(call, "_torchdynamo_orig_callable"):
        call = getattr(call, "__wrapped__", None)
    return call is not None
