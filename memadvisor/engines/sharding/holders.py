"""Who else holds a tensor's memory: other tensors, storages, arrays of numpy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its values are in one storage of its own kind, whose holders tell who else has them."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def num_holders(tensor: torch.Tensor) -> int:
    """How many tensors, storages and arrays there are of a tensor's memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_ALONE = num_holders(torch.empty(1, device="cpu"))


def is_held(tensor: torch.Tensor) -> bool:
    """Whether the script or a graph of autograd has another tensor, a storage or an array of its memory."""
    return num_holders(tensor) > _ALONE


def held_beside(own: Iterable[torch.Tensor]) -> frozenset[int]:
    """Addresses of the storages of these, each given once, that somebody has other tensors of."""
    own = list(own)
    numbers = Counter(each.untyped_storage().data_ptr() for each in own)
    held = {each.untyped_storage().data_ptr(): num_holders(each) - _ALONE + 1 for each in own}
    return frozenset(address for address, number in held.items() if number > numbers[address])
