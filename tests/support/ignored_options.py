"""Engines that ignore an option which they were given, for tests of what is said of it (F15)."""

from __future__ import annotations

import pytest


def ignore_replica_options(patch: pytest.MonkeyPatch) -> None:
    """Let replicas be made with torch's defaults and without a communication hook."""
    from accelerate.strategy import ddp

    plain = ddp.replicate
    patch.setattr(ddp, "replicate", lambda module, **_: plain(module))
    patch.setattr(ddp.DistributedDataParallelKwargs, "register_comm_hook", lambda *_: None)


def ignore_sharding_option(patch: pytest.MonkeyPatch, option: str) -> None:
    """Let models be sharded without one option.

    Args:
        patch: undoes it.
        option: ``"offload"``: parameters on the host; ``"recompute"``: activation checkpointing; ``"keep"``:
            unsharded parameters between forward and backward.
    """
    from torch.distributed.fsdp import OffloadPolicy

    from accelerate.strategy.sharding import fsdp2_sharder

    plain = fsdp2_sharder.fully_shard
    if option == "offload":
        patch.setattr(
            fsdp2_sharder,
            "fully_shard",
            lambda m, **kw: plain(m, **{**kw, "offload_policy": OffloadPolicy()}),
        )
    elif option == "recompute":
        patch.setattr(fsdp2_sharder, "checkpoint_activations", lambda model, blocks, offload: None)
    else:
        assert option == "keep"
        patch.setattr(
            fsdp2_sharder,
            "fully_shard",
            lambda m, **kw: plain(m, **{**kw, "reshard_after_forward": True}),
        )
