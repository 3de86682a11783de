"""Not built yet: asked for, it refuses instead of training in another way."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from accelerate.core import environ
from accelerate.strategy.base import Bundle, Request, Step, Strategy


@contextmanager
def GatheredParameters(  # noqa: N802 - the engine's own name for it
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Generator[None]:
    """Inside the block, parameters that the engine has partitioned are whole; others always are.

    Args:
        params: one parameter, or several.
        modifier_rank: the rank whose changes all take over at the end; None forbids changes.
        fwd_module: the module whose forward uses them, so that the engine fetches them in time.
        enabled: false leaves them partitioned.
    """
    every = list(params) if isinstance(params, Iterable) and not hasattr(params, "grad") else [params]
    # The engine marks what it has partitioned.
    if not (enabled and any(hasattr(parameter, "ds_id") for parameter in every)):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(params, modifier_rank=modifier_rank, fwd_module=fwd_module):
        yield


class DeepSpeed(Strategy):
    """Claims its variable, so that no run silently trains by another strategy."""

    name: ClassVar[str] = "deepspeed"
    priority: ClassVar[int] = 10
    planned: ClassVar[str] = (
        "ZeRO 1 to 3 by the DeepSpeed engine "
        "will come with the sharded strategies; until then train with data parallelism"
    )
    instead: ClassVar[str] = (
        "leave out --use_deepspeed, or call the engine in the script, which finds what was "
        "asked in its variables"
    )

    @classmethod
    def claims(cls, request: Request) -> bool:
        """When the launcher's variable says so."""
        return environ.flag("ACCELERATE_USE_DEEPSPEED")

    def steps(self, bundle: Bundle) -> Iterator[Step]:
        """Never reached: ``check`` refuses."""
        return iter(())


PLUGIN = DeepSpeed
