"""Copies in full precision that an optimizer updates in place of a model's parameters of 16 bits: its state, by what they are for.

fairseq's and apex's `FP16_Optimizer`, Megatron's `Float16Optimizer` and their like keep one for each parameter, or all of them
flat in one tensor, and copy what the update makes back into the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

_FULL_BYTES = 4  # of an element


def masters(
    parameters: Sequence[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer]
) -> list[torch.Tensor]:
    """What the optimizers have that is no model's parameter, where it holds an element for each of those of fewer bits that are
    trained and that no optimizer has."""
    updated = {
        id(each): each
        for optimizer in optimizers
        for group in optimizer.param_groups
        for each in group["params"]
    }
    known = {id(each) for each in parameters}
    copies = [each for key, each in updated.items() if key not in known and _is_full(each)]
    narrow = [
        each
        for each in parameters
        if each.requires_grad and id(each) not in updated and each.is_floating_point() and not _is_full(each)
    ]
    is_whole = bool(copies) and _num_elements(copies) == _num_elements(narrow)
    return copies if is_whole else []


def _is_full(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() >= _FULL_BYTES


def _num_elements(tensors: Sequence[torch.Tensor]) -> int:
    return sum(each.numel() for each in tensors)
