"""The objects that one ``Accelerator`` has prepared: the only owner of these lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accelerate.strategy.base import ObjectKind, PrepareBundle

if TYPE_CHECKING:
    from torch import nn

    from accelerate.facade.optimizer import AcceleratedOptimizer
    from accelerate.facade.scheduler import AcceleratedScheduler


@dataclass
class PreparedObjects:
    """Models, optimizers, schedulers and loaders in the order of their ``prepare``, each once.

    Attributes:
        models: as ``prepare`` returned them.
        optimizers, schedulers, loaders: the wrappers.
    """

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)

    def add(self, kind: ObjectKind, item: Any) -> None:
        """Add one object, unless it is there."""
        items: list[Any] = getattr(self, f"{kind}s")
        if not any(item is other for other in items):
            items.append(item)

    def add_bundle(self, bundle: PrepareBundle) -> None:
        """Add the objects of one ``prepare``, and mark them as prepared."""
        for kind, item in zip(bundle.kinds, bundle.objects, strict=True):
            if kind != "other":
                self.add(kind, item)
                item._is_accelerate_prepared = True

    def clear(self) -> None:
        """Forget all objects. Lists that were handed out keep them."""
        self.models, self.optimizers, self.schedulers, self.loaders = [], [], [], []

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the present contents."""
        lists = {name: list(items) for name, items in vars(self).items()}

        def restore() -> None:
            vars(self).update({name: list(items) for name, items in lists.items()})

        return restore
