"""Tensor parallel plans: which modules of a model are sharded, and how.

A plan comes from the model, as transformers' models have one, or from the user, or from both: the user's
entries count where both speak of a module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement

from accelerate.core.errors import PrepareError, SettingError, UnknownNameError, nearest

_REPLICATE = "replicate"


def _rowwise(module: nn.Module) -> ParallelStyle:
    # The input of an embedding are words, which cannot be cut.
    return RowwiseParallel(input_layouts=Replicate() if isinstance(module, nn.Embedding) else Shard(-1))


def _replicated_output(module: nn.Module) -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


def _replicated_input(module: nn.Module) -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


class ReplicatedWithGradAllReduce(ParallelStyle):
    """A style for replicated parameters that see sharded activations, as norms of attention heads do.

    The gradient of each process is then of its heads alone: ``ModuleSharder`` adds them up.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


STYLES: dict[str, Callable[[nn.Module], ParallelStyle] | None] = {
    "colwise": lambda module: ColwiseParallel(),
    "rowwise": _rowwise,
    "colwise_rep": _replicated_output,
    "colwise_gather_output": _replicated_output,
    "rowwise_rep": _replicated_input,
    "rowwise_split_input": _replicated_input,
    "embedding_rowwise": _replicated_input,
    "embedding_colwise": _replicated_output,
    "sequence_parallel": lambda module: SequenceParallel(),
    "replicated_with_grad_allreduce": lambda module: ReplicatedWithGradAllReduce(),
    _REPLICATE: None,
}
# Styles with replicated input and output: such a module can be left out of a plan alone.
_OPTIONAL_STYLES = (
    "colwise_rep",
    "colwise_gather_output",
    "embedding_rowwise",
    "embedding_colwise",
    _REPLICATE,
)
_HEADS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class TPPlanEntry:
    """A module that the plan shards.

    Attributes:
        name: of the module in the model.
        module: the module.
        style: torch's parallel style.
        placements: the placement of its own parameters by name; empty where only the style knows.
    """

    name: str
    module: nn.Module
    style: ParallelStyle
    placements: Mapping[str, Placement]


@dataclass(frozen=True)
class ResolvedTPPlan:
    """The plan resolved on a model: sharded modules, and those left replicated with the reason."""

    modules: list[TPPlanEntry]
    replicated: list[str]


def resolve_plan(
    model: nn.Module, given: Mapping[str, Any], size: int, matched: Collection[str] = ()
) -> ResolvedTPPlan:
    """Resolve which modules of ``model`` are sharded over ``size`` processes; change nothing.

    Args:
        model: the model.
        given: the user's plan: names, in which ``*`` stands for any text, and styles.
        matched: the names of the plan that match modules of other models. If there are some, a model without
            any match, and without a plan of its own, is replicated.

    Raises:
        PrepareError: there is no plan, or a module cannot be sharded so.
        SettingError: a name of the plan matches no module of any model.
        UnknownNameError: there is no such style.
    """
    modules = dict(model.named_modules())
    model_styles = dict(_model_plans(modules))
    chosen: dict[str, tuple[Any, bool]] = {name: (style, False) for name, style in model_styles.items()}
    for pattern, style in given.items():
        matches = match_pattern(modules, pattern)
        if not matches and pattern not in matched:
            raise _unmatched_error(model, modules, pattern)
        # Of two patterns that match one module the later counts.
        chosen.update(dict.fromkeys(matches, (style, True)))
    if not chosen:
        if matched:
            return ResolvedTPPlan([], [])
        raise _no_plan_error(model)
    ties = _tied_params(modules)
    parts, left = list[TPPlanEntry](), list[str]()
    for name, (style, from_user) in chosen.items():
        part = _sharded_module(name, modules[name], style)
        if part is None:
            continue
        error = _divisibility_error(part, size) or _tie_error(part, chosen, modules, ties)
        if error and (from_user or style not in _OPTIONAL_STYLES):
            raise error
        left += [f"{name} ({error.what})"] if error else []
        parts += [] if error else [part]
    _check_heads(modules, parts, size)
    return ResolvedTPPlan(parts, left)


# --- names


def _model_plans(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield (module name, style) of the plans that models bring along; ``*`` stands for a number there."""
    done: list[str] = []
    for path, module in modules.items():
        plan: Any = getattr(module, "_tp_plan", None)
        if not isinstance(plan, Mapping) or not plan or any(_is_below(path, top) for top in done):
            continue
        done.append(path)
        for pattern, style in plan.items():
            expression = re.compile(re.escape(str(pattern)).replace(r"\*", r"\d+"))
            for name in modules:
                if _is_below(name, path) and expression.fullmatch(name[len(path) + 1 if path else 0 :]):
                    yield name, style


def _is_below(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}.")


def match_pattern(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names of modules that a pattern of the user's plan matches."""
    return [name for name in names if name and fnmatchcase(name, pattern)]


def _unmatched_error(model: nn.Module, modules: Mapping[str, nn.Module], pattern: str) -> SettingError:
    nearest_name = nearest(pattern.rpartition(".")[2], {name.rpartition(".")[2] for name in modules if name})
    inside = [name for name in modules if nearest_name and name.rpartition(".")[2] == nearest_name][:3]
    other = "; a name of another model: prepare both in one call, or that model first"
    return SettingError(
        f"tensor parallel: {pattern!r} matches no module of the {type(model).__name__}",
        why="the whole name is compared, and * stands for any text",
        fix=(f"near names: {', '.join(inside)}" if inside else "look at model.named_modules()") + other,
    )


def _no_plan_error(model: nn.Module) -> PrepareError:
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    widening = (re.sub(r"\b\d+\b", "*", n) for n, m in layers if m.out_features > m.in_features)
    linear = next(widening, "layers.*.up")
    return PrepareError(
        f"tensor parallel: the {type(model).__name__} has no plan of what is shared",
        why="only the author of a model knows which of its layers can be cut by columns and by rows",
        fix="ParallelismConfig(tp_size=..., tp_handler=TorchTensorParallelConfig("
        f"plan={{{linear!r}: 'colwise', ...: 'rowwise'}}))",
    )


# --- one module


def _sharded_module(name: str, module: nn.Module, style: Any) -> TPPlanEntry | None:
    if isinstance(style, str):
        if style not in STYLES:
            why = (
                f"known: {', '.join(STYLES)}. A model whose own plan has others may apply it by itself: "
                "from_pretrained(..., tp_plan='auto') of transformers does; that is recognised here"
            )
            raise UnknownNameError("tensor parallel style", style, STYLES, where=f"of {name}", why=why)
        make = STYLES[style]
        if make is None:
            return None
        style = make(module)
    if not isinstance(style, ParallelStyle):
        raise SettingError(
            f"tensor parallel: the style of {name} is a {type(style).__name__}",
            fix=f"use one of {', '.join(STYLES)}, or a torch.distributed.tensor.parallel.ParallelStyle",
        )
    if isinstance(style, ColwiseParallel | RowwiseParallel) and not isinstance(
        module, nn.Linear | nn.Embedding
    ):
        raise PrepareError(
            f"tensor parallel: {name} is a {type(module).__name__}, and {type(style).__name__} cuts Linear "
            "and Embedding layers",
            fix="name a layer inside of it, or give a ParallelStyle of your own",
        )
    return TPPlanEntry(name, module, style, _placements(module, style))


def _placements(module: nn.Module, style: ParallelStyle) -> dict[str, Placement]:
    names = [name for name, p in module._parameters.items() if p is not None]
    if isinstance(style, SequenceParallel):
        return dict.fromkeys(names, Replicate())
    if isinstance(style, ColwiseParallel):
        return dict.fromkeys(names, Shard(1 if isinstance(module, nn.Embedding) else 0))
    if isinstance(style, RowwiseParallel):
        cut = Shard(0 if isinstance(module, nn.Embedding) else 1)
        return {name: Replicate() if name == "bias" else cut for name in names}
    return {}


def _divisibility_error(part: TPPlanEntry, size: int) -> PrepareError | None:
    for name, placement in part.placements.items():
        shape = tuple(part.module._parameters[name].shape)  # type: ignore[union-attr]
        if isinstance(placement, Shard) and shape[placement.dim] % size:
            return PrepareError(
                f"tensor parallel: {part.name}.{name} {shape} cannot be sharded into {size} equal parts",
                why=f"tp_size={size} does not divide {shape[placement.dim]}, its dimension {placement.dim}",
                fix=f"choose a tp_size that does, or leave it whole: plan={{{part.name!r}: 'replicate'}}",
            )
    return None


# --- tied parameters


def _tied_params(modules: Mapping[str, nn.Module]) -> dict[int, list[tuple[str, str]]]:
    """Return the (module, name) pairs of every tied parameter, by its ``id``."""
    places: dict[int, list[tuple[str, str]]] = {}
    for path, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((path, name))
    return {key: uses for key, uses in places.items() if len(uses) > 1}


def _tie_error(
    part: TPPlanEntry,
    chosen: Mapping[str, tuple[Any, bool]],
    modules: Mapping[str, nn.Module],
    ties: Mapping[int, list[tuple[str, str]]],
) -> PrepareError | None:
    for name, placement in part.placements.items():
        for path, other in ties.get(id(part.module._parameters[name]), ()):
            style = chosen.get(path, (_REPLICATE, False))[0]
            tied_module = _sharded_module(path, modules[path], style)
            other_placement = None if tied_module is None else tied_module.placements.get(other)
            if other_placement != placement:
                return PrepareError(
                    f"tensor parallel: {part.name}.{name} and {path}.{other} are one parameter, and the plan "
                    "cuts them in two ways",
                    why=f"{placement} here and {other_placement or 'whole'} there",
                    fix=f"cut both alike (an embedding 'rowwise' and an output layer 'colwise_rep'), or give "
                    f"both 'replicate': plan={{{part.name!r}: 'replicate', {path!r}: 'replicate'}}",
                )
    return None


# --- heads


def _check_heads(modules: Mapping[str, nn.Module], parts: Iterable[TPPlanEntry], size: int) -> None:
    """Refuse a size that does not divide attention heads: a head must not be split.

    A projection whose output is all-gathered gives every process all heads.
    """
    for part in parts:
        style: Any = part.style
        if not isinstance(style, ColwiseParallel) or not isinstance(part.module, nn.Linear):
            continue
        if style.output_layouts == (Replicate(),):
            continue
        around = modules[part.name.rpartition(".")[0]]
        inside = "attn" in part.name.lower() or "attention" in part.name.lower()
        for holder in (around, getattr(around, "config", None) if inside else None):
            for name in _HEADS:
                heads = getattr(holder, name, None)
                if isinstance(heads, int) and not isinstance(heads, bool) and heads % size:
                    raise PrepareError(
                        f"tensor parallel: {part.name} has {name}={heads}, and tp_size={size} does not "
                        "divide that",
                        why="each process computes whole heads",
                        fix=f"choose a tp_size that divides {heads}",
                    )
