"""Who else holds a tensor's memory: other tensors, storages, arrays of numpy."""

from __future__ import annotations

import torch


def num_holders(tensor: torch.Tensor) -> int:
    """How many tensors, storages and arrays there are of a tensor's memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_ALONE = num_holders(torch.empty(1, device="cpu"))


def num_holders_beside(tensor: torch.Tensor) -> int:
    """How many there are beside this one."""
    return num_holders(tensor) - _ALONE


def is_held(tensor: torch.Tensor) -> bool:
    """Whether the script or a graph of autograd has another tensor, a storage or an array of its memory."""
    return num_holders_beside(tensor) > 0
