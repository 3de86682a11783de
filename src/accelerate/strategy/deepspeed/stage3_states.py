"""State dicts of the module and of the optimizer under ZeRO stage 3, where both are partitioned."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate.core.errors import PrepareError, warn_user


def guard_state_dict(engine: Any) -> Any:
    """Make ``state_dict()`` of a partitioned model, whose tensors are empty, an error."""
    inside: list[bool] = []
    ask = engine.module_state_dict

    def by_engine(*args: Any, **kwargs: Any) -> Any:
        inside.append(True)
        try:
            return ask(*args, **kwargs)
        finally:
            inside.pop()

    def check(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        empty = [p for p in module.parameters() if is_partitioned(p)]
        if inside or keep_vars or not empty:
            return
        # Programs all-gather the adapters that train, and save these: what is frozen stays partitioned.
        trained = [p for p in module.parameters() if p.requires_grad]
        if not trained or any(map(is_partitioned, trained)):
            raise PrepareError(
                f"state_dict() of a {type(module).__name__} whose weights are partitioned over the processes",
                why="in stage 3 each rank holds a shard of every weight, and the tensors here are empty",
                fix="state = accelerator.get_state_dict(model), on all processes; process 0 gets it",
            )
        warn_user(
            f"state_dict() of a {type(module).__name__}: {len(empty)} frozen weights are partitioned over "
            "the processes, and empty here. accelerator.get_state_dict(model) gathers all"
        )

    engine.module_state_dict = by_engine
    return engine.module.register_state_dict_pre_hook(check)


def complete_optimizer_states(optimizer: Any, engine_optimizer: Any) -> list[Any]:
    """Let the optimizer have its vectors in ``state_dict``: stage 3 takes them out of it between steps.

    Args:
        optimizer: the one inside, or None.
        engine_optimizer: DeepSpeed's, around it.

    Returns:
        The handles of hooks.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return []

    def clear(*_: Any) -> None:
        engine_optimizer._clear_fp32_optimizer_param_groups()

    def fill(*_: Any) -> None:
        clear()  # DeepSpeed may have filled them for its own files
        engine_optimizer._set_fp32_optimizer_param_groups()

    return [
        optimizer.register_state_dict_pre_hook(fill),
        optimizer.register_state_dict_post_hook(clear),
        optimizer.register_load_state_dict_pre_hook(fill),
        optimizer.register_load_state_dict_post_hook(clear),
    ]


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is partitioned now (stage 3, not all-gathered)."""
    status = getattr(parameter, "ds_status", None)
    return status is not None and status.name != "AVAILABLE"
