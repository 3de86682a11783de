"""Cuts the parameters of shared modules: each process gets its part of the values of the first.

The first process of a layer has a whole parameter and sends the others their parts, one parameter at a time.
So a model that only rank 0 has read, the others being on the meta device, is enough, and no other process
ever has a whole shared parameter on its device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from accelerate.core.errors import PrepareError
from accelerate.strategy.parallelism.tensor_plan import Part
from accelerate.strategy.sharding.load import Values
from accelerate.strategy.sharding.shard import local, spread
from accelerate.strategy.sharding.whole import part_of


class Cutter:
    """Cuts parameters over processes that share layers.

    Args:
        mesh: those processes, one dimension.
        others: those that have the same part and see other data.
        device: where this process computes.
        values: where those of each parameter come from.

    Attributes:
        renewed: (old, new) of the parameters that were replaced, by ``id`` of the old one.
    """

    def __init__(self, mesh: DeviceMesh, others: DeviceMesh, device: torch.device, values: Values) -> None:
        self.mesh, self.others, self.device, self.values = mesh, others, device, values
        self.renewed: dict[int, tuple[Any, Any]] = {}

    @property
    def rehearses(self) -> bool:
        """There is no device, and nobody to send to."""
        return self.device.type == "meta"

    @property
    def _first(self) -> bool:
        """Whether the values count that these processes hold."""
        return not any(self.others.get_local_rank(axis) for axis in range(self.others.ndim))

    def cut(self, part: Part) -> None:
        """Shares one module: hooks around its forward, and this process's part of its parameters.

        Raises:
            PrepareError: a parameter with two places is cut in two ways.
        """
        module = part.module
        held = {n: p for n, p in module._parameters.items() if p is not None and not isinstance(p, DTensor)}
        for name, old in held.items():
            empty = torch.empty_like(old, device="meta")
            module._parameters[name] = nn.Parameter(empty, requires_grad=old.requires_grad)
        # On the meta device nothing is sent: only the layout is made.
        parallelize_module(module, self.mesh, part.style, src_data_rank=None)
        for name, old in held.items():
            made: Any = module._parameters[name]
            # A style may leave a parameter as it is.
            module._parameters[name] = self._cut(part, name, old, made) if isinstance(made, DTensor) else old

    def _cut(self, part: Part, name: str, old: nn.Parameter, like: DTensor) -> Any:
        placement = like.placements[0]
        if id(old) not in self.renewed:
            mine = self._part(old, like)
            whole = DTensor.from_local(
                mine, self.mesh, [placement], run_check=False, shape=like.shape, stride=like.stride()
            )
            self.renewed[id(old)] = old, nn.Parameter(whole, requires_grad=old.requires_grad)
        new = self.renewed[id(old)][1]
        if new.placements[0] != placement:
            raise _torn(f"{part.name}.{name}", placement, new.placements[0])
        return new

    @torch.no_grad()
    def _part(self, old: nn.Parameter, like: DTensor) -> torch.Tensor:
        value, placement, origin = old.detach(), like.placements[0], self.values.origin(old)
        if origin == "later":
            return like.to_local()
        mine = torch.empty(like.to_local().shape, dtype=value.dtype, device=self.device)
        if origin == "here":
            mine.copy_(part_of(value, like))
        if origin == "here" or self.rehearses or not self._first:
            return mine
        size, group = self.mesh.size(), self.mesh.get_group()
        source, here = dist.get_global_rank(group, 0), self.mesh.get_local_rank() == 0
        if not isinstance(getattr(placement, "dim", None), int):
            if here:
                mine.copy_(value)
            dist.broadcast(mine, source, group)
        else:
            pieces = value.chunk(size, placement.dim) if here else ()  # type: ignore[attr-defined]
            dist.scatter(mine, [p.to(self.device).contiguous() for p in pieces] or None, source, group)
        return mine

    def check(self, model: nn.Module) -> None:
        """Refuses a parameter that was cut and has another place, where it is whole.

        Raises:
            PrepareError: there is one.
        """
        for path, module in model.named_modules():
            for name, found in module._parameters.items():
                if found is not None and id(found) in self.renewed:
                    raise _torn(f"{path}.{name}", "whole", self.renewed[id(found)][1].placements[0])

    @torch.no_grad()
    def complete(self, model: nn.Module, *, equal: bool) -> None:
        """Gives what stays whole memory where it has none.

        Args:
            model: after its parts were cut.
            equal: and everything the values of rank 0, since it will not be sharded.

        Raises:
            PrepareError: ``equal``, and rank 0 has no values either.
        """
        brought: dict[int, tuple[Any, Any]] = {}
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, old in table.items():
                    if old is None or not (equal or old.is_meta):
                        continue
                    if id(old) not in brought:
                        brought[id(old)] = old, self._complete(old, equal)
                    table[name] = brought[id(old)][1]
        self.renewed |= {key: pair for key, pair in brought.items() if pair[0] is not pair[1]}

    def _complete(self, old: Any, equal: bool) -> Any:
        later = old.is_meta and (isinstance(old, DTensor) or self.values.origin(old) == "later")
        if self.rehearses or (later and not equal):
            return old
        if later:
            raise PrepareError(
                "a model that is only evaluated is on the meta device, on rank 0 too",
                why="its layers are shared, and nothing would fill them afterwards",
                fix="load its weights on rank 0 before prepare",
            )
        if isinstance(old, DTensor):
            spread(local(old), self.others)
            return old
        moved = torch.empty_like(old, device=self.device) if old.is_meta else old.data.to(self.device)
        if equal:
            spread(moved, self.mesh)
            spread(moved, self.others)
        if moved.device == old.device:
            old.data = moved
            return old
        return nn.Parameter(moved, old.requires_grad) if isinstance(old, nn.Parameter) else moved


def _torn(name: str, here: object, there: object) -> PrepareError:
    return PrepareError(
        f"tensor parallel: {name} is a parameter of another layer too, and the plan cuts it in two ways",
        why=f"{here} here and {there} there",
        fix="cut both alike, or give both 'replicate'",
    )
