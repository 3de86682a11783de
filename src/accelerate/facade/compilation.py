"""Compiling models: the options of ``torch.compile``, and compilation block by block."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.core import environ
from accelerate.core.argument_checks import KwargsHandler, check_arguments
from accelerate.core.errors import warn_user
from accelerate.core.option_report import OptionStatus, RequestedOption, report_overridden, requested_options
from accelerate.core.setting import load_settings
from accelerate.device.base import Device
from accelerate.facade.launch_settings import CompileSettings, DynamoBackend
from accelerate.facade.module_queries import is_repeated_blocks

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@check_arguments
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
        cache_dir: keep what inductor compiles in this folder (``ACCELERATE_DYNAMO_CACHE_DIR``), for later
            runs. It holds for the whole process, as torch's ``TORCHINDUCTOR_CACHE_DIR``, which counts first.

    Raises:
        UnknownNameError: there is no such backend or mode.
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        code_values = {
            "dynamo_backend": None if self.backend is None else str(self.backend),
            "dynamo_mode": self.mode,
            "dynamo_use_fullgraph": self.fullgraph,
            "dynamo_use_dynamic": self.dynamic,
            "dynamo_use_regional_compilation": self.use_regional_compilation,
            "dynamo_cache_dir": self.cache_dir,
        }
        loaded = load_settings(CompileSettings, code=code_values)
        settings = loaded.value
        self.backend = DynamoBackend(settings.dynamo_backend or DynamoBackend.NO.value)
        self.mode = settings.dynamo_mode or "default"
        self.fullgraph, self.dynamic = settings.dynamo_use_fullgraph, settings.dynamo_use_dynamic
        self.use_regional_compilation = settings.dynamo_use_regional_compilation
        self.cache_dir = settings.dynamo_cache_dir
        # For the option report: what was requested, none where compilation was declined, and what lost.
        more = {"options": self.options, "disable": self.disable or None}
        self._requested_options = [
            *(option for option in requested_options(loaded) if option.value != DynamoBackend.NO.value),
            *(
                RequestedOption(n, value, type(self).__name__)
                for n, value in more.items()
                if value is not None
            ),
        ]
        self._overridden_options = list(report_overridden(loaded))
        # Whether there is anything to report of: nearly all runs compile nothing.
        self.has_options: bool = bool(self._requested_options or self._overridden_options)

    @property
    def is_enabled(self) -> bool:
        """Return whether anything is compiled."""
        return self.backend != DynamoBackend.NO and not self.disable

    def check_device(self, device: Device) -> None:
        """Warn that TorchInductor generates no code for a device whose vendor brings another backend."""
        if self.backend == DynamoBackend.INDUCTOR and device.compile_backend not in ("", "inductor"):
            warn_user(
                f"TorchInductor generates no code for {device.type!r} devices: their backend of "
                f"torch.compile is {device.compile_backend!r}; pass dynamo_backend={device.compile_backend!r}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return every field; the backend as ``torch.compile`` spells it."""
        return {**super().to_dict(), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return arguments of ``torch.compile`` that differ from its defaults; the backend always."""
        plain = {"mode": "default", "fullgraph": False, "dynamic": None, "options": None, "disable": False}
        fields = self.to_dict()
        chosen = {name: fields[name] for name, usual in plain.items() if fields[name] != usual}
        return chosen if self.backend == DynamoBackend.NO else {"backend": fields["backend"], **chosen}

    def use_cache(self) -> None:
        """Let inductor keep its code in ``cache_dir``; a folder that torch's own variable names stays."""
        if self.cache_dir is not None and environ.get(CACHE_VARIABLE) is None:
            environ.set_variables({CACHE_VARIABLE: os.path.abspath(os.path.expanduser(self.cache_dir))})


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile the repeated blocks of a model one by one, in place; without such blocks the whole model.

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


def option_statuses(
    plugin: TorchDynamoPlugin, models: Sequence[nn.Module], *, stepped: bool
) -> Iterator[OptionStatus]:
    """Yield the status of each compile option, as seen on the prepared models.

    Args:
        plugin: the options.
        models: the user's own modules.
        stepped: a training step is over, so that what is compiled has run.
    """
    yield from plugin._overridden_options
    reason = _reason_not_compiled(plugin, models, stepped=stepped)
    done = sum(map(_is_compiled, (part for model in models for part in model.modules())))
    for option in plugin._requested_options:
        if option.name == "disable" and not plugin.is_enabled:
            yield option.report_applied()
        elif reason:
            yield option.report_not_applied(reason)
        elif not models:
            yield option.report_pending("no model is prepared")
        elif option.name == "dynamo_cache_dir" and (kept := _reason_not_cached(plugin)):
            yield option.report_not_applied(kept)
        elif option.name == "dynamo_use_regional_compilation" and all(map(_is_compiled, models)):
            yield option.report_not_applied("no model has repeated blocks: it is compiled as a whole")
        else:
            regions = f"{done} modules are compiled" if plugin.use_regional_compilation else ""
            counts = _describe_graphs() if stepped and option.name == "dynamo_backend" else ""
            yield option.report_applied("; ".join(filter(None, (regions, counts))))


def _reason_not_compiled(plugin: TorchDynamoPlugin, models: Sequence[nn.Module], *, stepped: bool) -> str:
    """Return why some model is not compiled; empty when all are."""
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
    return _reason_not_run() if stepped else ""


def _reason_not_run() -> str:
    """Return why no graph ran in the first step; torch skips its own code, and may suppress errors."""
    from torch._dynamo.utils import counters

    graphs, frames = counters["stats"]["unique_graphs"], counters["frames"]
    hidden = torch._dynamo.config.suppress_errors and frames["total"] > frames["ok"]
    if hidden:
        return "torch._dynamo.config.suppress_errors hid an error, and some code runs uncompiled"
    return (
        "" if graphs else "the first step ran without it: torch compiles no code of modules that are its own"
    )


def _reason_not_cached(plugin: TorchDynamoPlugin) -> str:
    """Return why inductor keeps nothing in the folder that was asked for; empty if it does."""
    if plugin.backend != DynamoBackend.INDUCTOR:
        return f"only inductor keeps compiled code, and dynamo_backend is {plugin.backend}"
    folder, used = os.path.abspath(os.path.expanduser(str(plugin.cache_dir))), environ.get(CACHE_VARIABLE)
    return "" if used in (None, folder) else f"{CACHE_VARIABLE} is {used}, and counts first"


def _describe_graphs() -> str:
    """Return the graphs, graph breaks and recompilations of this process, with the reasons of torch.

    Torch keeps the reasons of its last 64 compilations, so that is the most recompilations that are counted.
    """
    from torch._dynamo.utils import counters, get_compilation_metrics

    breaks = {_shorten_graph_break(text): count for text, count in counters["graph_break"].items()}
    # Torch 2.6 keeps no reasons.
    kept = (getattr(each, "recompile_reason", None) for each in get_compilation_metrics())
    reasons = [reason for reason in kept if reason]
    texts = []
    for unit, count, why in (
        ("graph", counters["stats"]["unique_graphs"], ""),
        ("graph break", sum(breaks.values()), ", ".join(breaks)),
        ("recompilation", len(reasons), ", ".join(dict.fromkeys(reasons))),
    ):
        texts.append(f"{count} {unit}{'' if count == 1 else 's'}{f' ({why})' if why else ''}")
    return ", ".join(texts)


def _shorten_graph_break(text: str) -> str:
    """Return the first line of what torch says on a graph break, and where it gives that, the code."""
    first, *others = text.splitlines() or [text]
    codes = (line.partition("debug context:")[2].strip() for line in others)
    code = next(filter(None, codes), "")
    return f"{first}: {code}" if code else first


def _is_compiled(module: nn.Module) -> bool:
    """Return whether calls of ``module`` go to something that torch compiles."""
    return hasattr(module._compiled_call_impl, "_torchdynamo_orig_callable")
