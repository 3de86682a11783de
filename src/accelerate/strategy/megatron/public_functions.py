"""Functions of the public API around Megatron-LM: process groups, and functions that older scripts call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate.core import tree
from accelerate.core.errors import FeatureNotBuiltError, PrepareError
from accelerate.strategy.megatron.engine_factory import MegatronLMDummyScheduler, build_lr_schedule
from accelerate.strategy.megatron.layout import open_groups

_SCRIPT = (
    "it is part of Megatron-LM's training script, and the package megatron-core is a library without one"
)


def _data_group() -> Any:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        raise PrepareError(
            "there are no data parallel groups of Megatron-LM yet",
            fix="model, optimizer = accelerator.prepare(model, optimizer) makes them",
        )
    return parallel_state.get_data_parallel_group()


def avg_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Average each of some losses over the data parallel group.

    Args:
        losses: scalars.

    Returns:
        A tensor of as many elements.
    """
    group = _data_group()
    values = torch.stack([loss.detach().reshape(()).float() for loss in losses])
    dist.all_reduce(values, group=group)
    return values / group.size()


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """All-gather tensors (any tree) over the data parallel group, joined along dimension 0."""
    group = _data_group()

    def gather_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        local = leaf.reshape(1) if leaf.dim() == 0 else leaf.contiguous()
        shards = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(shards, local, group=group)
        return torch.cat(shards)

    return tree.map_tree(gather_leaf, tensor)


def initialize(accelerator: Any, extra_args_provider: Any = None, args_defaults: Any = None) -> None:
    """Initialize Megatron-LM's process groups; ``prepare`` does it too.

    Args:
        accelerator: an ``Accelerator`` whose strategy is Megatron-LM.
        extra_args_provider, args_defaults: of Megatron-LM's training script; refused.
    """
    if extra_args_provider is not None or args_defaults:
        raise FeatureNotBuiltError(
            "further arguments of Megatron-LM's training script cannot be given",
            why=_SCRIPT,
            fix="MegatronLMPlugin(other_megatron_args=...) sets fields of its TransformerConfig",
        )
    layout = getattr(accelerator.strategy, "layout", None)
    if layout is None:
        raise PrepareError(
            f"the strategy is {accelerator.strategy.name}, not Megatron-LM's",
            fix="Accelerator(megatron_lm_plugin=MegatronLMPlugin())",
        )
    open_groups(layout, accelerator.strategy.world.hardware.backend)


def finish_mpu_init() -> None:
    """Nothing: ``initialize`` and ``prepare`` make the groups at once. Refused as long as there are none."""
    _data_group()


def model_provider_func(
    pre_process: bool = True, post_process: bool = True, add_encoder: bool = True, add_decoder: bool = True
) -> Any:
    """Refused: ``prepare`` builds Megatron-LM's model of the user's."""
    raise FeatureNotBuiltError(
        "model_provider_func builds a model of the arguments of a script",
        why=_SCRIPT,
        fix="model, optimizer = accelerator.prepare(model, optimizer)",
    )


def prepare_model_optimizer_scheduler(accelerator: Any) -> Any:
    """Refused: ``prepare`` takes the objects themselves."""
    raise FeatureNotBuiltError(
        "prepare_model_optimizer_scheduler makes objects of the arguments of a script",
        why=_SCRIPT,
        fix="model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)",
    )


def prepare_optimizer(accelerator: Any, model: Any) -> Any:
    """Return Megatron-LM's optimizer of a prepared model; None if it was prepared without one."""
    if not hasattr(model, "stepper"):
        raise PrepareError(
            f"a {type(model).__name__} has no optimizer of Megatron-LM's",
            fix="give the model that accelerator.prepare(model, optimizer) returned",
        )
    return model.optimizer


def prepare_scheduler(accelerator: Any, optimizer: Any, scheduler: Any) -> Any:
    """Build the schedule that a ``MegatronLMDummyScheduler`` stands for; others stay."""
    if isinstance(scheduler, MegatronLMDummyScheduler):
        return build_lr_schedule(
            scheduler, accelerator.strategy.plugin, accelerator.strategy.data_shard.count
        )
    return scheduler


def prepare_data_loader(accelerator: Any, dataloader: Any) -> Any:
    """Prepare a loader: processes of one model replica read the same samples."""
    if isinstance(dataloader, MegatronLMDummyDataLoader):
        raise _no_datasets_error()
    return accelerator.prepare_data_loader(dataloader)


class MegatronLMDummyDataLoader:
    """The placeholder of Megatron-LM's own indexed datasets, which are refused.

    Args:
        dataset_kwargs: of those datasets.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args = dataset_kwargs

    def set_megatron_data_args(self) -> None:
        """Refused."""
        raise _no_datasets_error()

    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Any:
        """Refused."""
        raise _no_datasets_error()

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> Any:
        """Refused."""
        raise _no_datasets_error()


def _no_datasets_error() -> FeatureNotBuiltError:
    return FeatureNotBuiltError(
        "Megatron-LM's own datasets cannot be read",
        why=_SCRIPT,
        fix="prepare a DataLoader whose batches have input_ids and labels",
    )
