"""Shard the parameters of tensor parallel modules: each process gets its shard of the first one's values.

The first tensor parallel rank has the full parameter and scatters the shards, one parameter at a time. So it
is enough that rank 0 has loaded the model, the others being on the meta device, and no other process ever has
a full sharded parameter on its device.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from accelerate.core.errors import PrepareError
from accelerate.core.torch_internals import accepts
from accelerate.strategy.parallelism.tensor.tp_plan import ReplicatedWithGradAllReduce, TPPlanEntry
from accelerate.strategy.sharding.fsdp2_sharder import broadcast_over_mesh
from accelerate.strategy.sharding.initial_weights import InitialWeights
from accelerate.world.shard_boxes import local_shard, shards_of_ranks

# The functions of transformers around modules of that style, and on their parameters, begin with this.
_SUMMING_STYLE = "ReplicatedWithGradAllReduce.install_forward.<locals>."


class ModuleSharder:
    """Shards parameters over the tensor parallel mesh.

    Args:
        mesh: the tensor parallel mesh, one dimension.
        replicas: the mesh of processes with the same shard and other samples.
        device: where this process computes.
        values: the source of each parameter's values.

    Attributes:
        replaced: (old, new) of the parameters that were replaced, by ``id`` of the old one.
    """

    def __init__(
        self, mesh: DeviceMesh, replicas: DeviceMesh, device: torch.device, values: InitialWeights
    ) -> None:
        self.mesh, self.replicas, self.device, self.values = mesh, replicas, device, values
        self.replaced: dict[int, tuple[Any, Any]] = {}
        self._summed_params: set[nn.Parameter] = set()

    @property
    def is_dry_run(self) -> bool:
        """Return whether this is a dry run: no device, and no process to send to."""
        return self.device.type == "meta"

    @property
    def _is_first_replica(self) -> bool:
        """Return whether this process is in the first replica, whose values count."""
        return not any(self.replicas.get_local_rank(axis) for axis in range(self.replicas.ndim))

    def shard_module(self, part: TPPlanEntry) -> None:
        """Shard one module: add hooks around its forward, and keep this process's shard of its parameters.

        Raises:
            PrepareError: a tied parameter is sharded in two ways.
        """
        module = part.module
        if isinstance(part.style, ReplicatedWithGradAllReduce):
            sum_gradients(module, self.mesh, self._summed_params)
            return
        full_params = {
            n: p for n, p in module._parameters.items() if p is not None and not isinstance(p, DTensor)
        }
        for name, old in full_params.items():
            empty = torch.empty_like(old, device="meta")
            module._parameters[name] = nn.Parameter(empty, requires_grad=old.requires_grad)
        # On the meta device nothing is sent: only the layout is made. Torch 2.6 cannot be told so.
        local: dict[str, Any] = (
            {"src_data_rank": None} if accepts(parallelize_module, "src_data_rank") else {}
        )
        parallelize_module(module, self.mesh, part.style, **local)
        for name, old in full_params.items():
            new_param: Any = module._parameters[name]
            # A style may leave a parameter as it is.
            module._parameters[name] = (
                self._shard_param(part, name, old, new_param) if isinstance(new_param, DTensor) else old
            )

    def _shard_param(self, part: TPPlanEntry, name: str, old: nn.Parameter, like: DTensor) -> Any:
        placement = like.placements[0]
        if id(old) not in self.replaced:
            shard = self._local_shard(old, like)
            whole = DTensor.from_local(
                shard, self.mesh, [placement], run_check=False, shape=like.shape, stride=like.stride()
            )
            self.replaced[id(old)] = old, nn.Parameter(whole, requires_grad=old.requires_grad)
        new = self.replaced[id(old)][1]
        if new.placements[0] != placement:
            raise _tie_error(f"{part.name}.{name}", placement, new.placements[0])
        return new

    @torch.no_grad()
    def _local_shard(self, old: nn.Parameter, like: DTensor) -> torch.Tensor:
        value, placement, origin = old.detach(), like.placements[0], self.values.origin(old)
        if origin == "later":
            return like.to_local()
        shard = torch.empty(like.to_local().shape, dtype=value.dtype, device=self.device)
        if origin == "here":
            shard.copy_(local_shard(value, like))
        if origin == "here" or self.is_dry_run or not self._is_first_replica:
            return shard
        group = self.mesh.get_group()
        source, is_source = dist.get_global_rank(group, 0), self.mesh.get_local_rank() == 0
        if not isinstance(getattr(placement, "dim", None), int):
            if is_source:
                shard.copy_(value)
            dist.broadcast(shard, source, group)
        else:
            pieces = shards_of_ranks(value, like) if is_source else ()
            dist.scatter(shard, [p.to(self.device).contiguous() for p in pieces] or None, source, group)
        return shard

    def replace_tied(self, part: TPPlanEntry) -> None:
        """Give a module of another pipeline stage the sharded parameters that are tied to those here.

        Raises:
            PrepareError: a tied parameter is sharded in two ways.
        """
        parameters: dict[str, Any] = part.module._parameters
        for name, old in parameters.items():
            if old is None or isinstance(part.style, ReplicatedWithGradAllReduce):
                continue
            new = self.replaced.get(id(old), (old, old))[1]
            here = new.placements[0] if isinstance(new, DTensor) else "whole"
            if here == "whole" or here != part.placements.get(name, here):
                raise _tie_error(f"{part.name}.{name}", part.placements.get(name, "cut"), here)
            parameters[name] = new

    def check_ties(self, model: nn.Module) -> None:
        """Refuse a sharded parameter that is tied to one that stays replicated.

        Raises:
            PrepareError: there is one.
        """
        for path, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in self.replaced:
                    raise _tie_error(f"{path}.{name}", "whole", self.replaced[id(parameter)][1].placements[0])

    @torch.no_grad()
    def materialize_rest(self, model: nn.Module, *, equal: bool) -> None:
        """Materialize replicated parameters and buffers that are on the meta device.

        Args:
            model: after its modules were sharded.
            equal: also give everything rank 0's values, since the model will not be sharded by FSDP2.

        Raises:
            PrepareError: ``equal``, and rank 0 has no values either.
        """
        materialized: dict[int, tuple[Any, Any]] = {}
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, old in table.items():
                    if old is None or not (equal or old.is_meta):
                        continue
                    if id(old) not in materialized:
                        materialized[id(old)] = old, self._materialize(old, equal)
                    table[name] = materialized[id(old)][1]
        self.replaced |= {key: pair for key, pair in materialized.items() if pair[0] is not pair[1]}

    def _materialize(self, old: Any, equal: bool) -> Any:
        later = old.is_meta and (isinstance(old, DTensor) or self.values.origin(old) == "later")
        if self.is_dry_run or (later and not equal):
            return old
        if later:
            raise PrepareError(
                "a model that is only evaluated is on the meta device, on rank 0 too",
                why="its layers are shared, and nothing would fill them afterwards",
                fix="load its weights on rank 0 before prepare",
            )
        if isinstance(old, DTensor):
            broadcast_over_mesh(old.to_local().detach(), self.replicas)
            return old
        moved = torch.empty_like(old, device=self.device) if old.is_meta else old.data.to(self.device)
        if equal:
            broadcast_over_mesh(moved, self.mesh)
            broadcast_over_mesh(moved, self.replicas)
        if moved.device == old.device:
            old.data = moved
            return old
        return nn.Parameter(moved, old.requires_grad) if isinstance(old, nn.Parameter) else moved


def sum_gradients(module: nn.Module, mesh: DeviceMesh, summed: set[nn.Parameter]) -> None:
    """Sum the gradients of replicated parameters over the mesh; FSDP2 keeps the hooks.

    A parameter of several modules has its whole gradient in one hook.

    Args:
        module: the module.
        mesh: the tensor parallel mesh.
        summed: the parameters that have the hook already; gets those of ``module``.
    """
    group = mesh.get_group()

    def all_reduce(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter not in summed:
            summed.add(parameter)
            trains = parameter.requires_grad  # one that is frozen now may train later
            parameter.requires_grad_(True).register_hook(all_reduce)
            parameter.requires_grad_(trains)


def sum_gradients_once(model: nn.Module, mesh: DeviceMesh) -> None:
    """Sum the gradients of replicated parameters in place of transformers, which has sharded the model.

    Its hook is called after a gradient has been accumulated, and sums the micro-batches before it again.
    """
    summed = set[nn.Parameter]()
    for module in model.modules():
        wrapper: Any = vars(module).get("forward")
        original = (
            inspect.getclosurevars(wrapper).nonlocals.get("original_forward")
            if _is_summing(wrapper)
            else None
        )
        if original is None:
            continue
        del vars(module)["forward"]
        if getattr(original, "__func__", None) is not type(module).forward:
            vars(module)["forward"] = original  # a program has replaced it before
        for parameter in module.parameters(recurse=False):
            hooks = parameter._post_accumulate_grad_hooks or {}
            for key in [k for k, hook in hooks.items() if _is_summing(hook)]:
                del hooks[key]
        sum_gradients(module, mesh, summed)


def _is_summing(function: Any) -> bool:
    return getattr(function, "__qualname__", "").startswith(_SUMMING_STYLE)


def _tie_error(name: str, here: object, there: object) -> PrepareError:
    return PrepareError(
        f"tensor parallel: {name} is a parameter of another layer too, and the plan cuts it in two ways",
        why=f"{here} here and {there} there",
        fix="cut both alike, or give both 'replicate'",
    )
