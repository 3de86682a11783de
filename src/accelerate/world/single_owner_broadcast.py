"""Broadcast of a tensor from the only rank that has it, when the others do not know its shape."""

from __future__ import annotations

from typing import cast

import torch

from accelerate.core.errors import CollectiveError
from accelerate.world import collective
from accelerate.world import world as worlds
from accelerate.world.local_tensor_trees import TensorInformation


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Broadcast the tensor of the one rank that has it to the devices of all ranks.

    Args:
        tensor: the tensor on one rank, None on the others. A single process gets its tensor back.

    Returns:
        A new tensor of the same shape, dtype and values; on the rank that had it, that very tensor.

    Raises:
        CollectiveError: no rank has one, or several have; on all ranks.
    """
    local_info = None if tensor is None else TensorInformation(tensor.shape, tensor.dtype)
    infos = collective.all_gather_object(local_info)
    owners = [rank for rank, information in enumerate(infos) if information is not None]
    if len(owners) != 1:
        raise CollectiveError(
            f"one rank has the tensor to copy to all devices, but {len(owners)} of {len(infos)} have one",
            why="the tensor of that rank is what all the others get",
            fix="pass None on all ranks but one",
        )
    if tensor is None:
        information = cast(TensorInformation, infos[owners[0]])
        world = worlds.current()
        tensor = torch.empty(
            information.shape, dtype=information.dtype, device=world.device if world else None
        )
    return collective.broadcast(tensor, from_process=owners[0])
