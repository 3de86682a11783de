"""Compiling models: the options of ``torch.compile``, and compilation block by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

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
        settings = load(CompileSettings, code=given).value
        self.backend = DynamoBackend(settings.dynamo_backend or DynamoBackend.NO.value)
        self.mode = settings.dynamo_mode or "default"
        self.fullgraph, self.dynamic = settings.dynamo_use_fullgraph, settings.dynamo_use_dynamic
        self.use_regional_compilation = settings.dynamo_use_regional_compilation

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
