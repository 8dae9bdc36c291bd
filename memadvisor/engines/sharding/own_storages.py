"""Weights that a state dict names, each in a storage that is its own.

Parameters of stages 1 and 2, and lent ones, are views of their unit's flat. Whoever saves by storages takes tensors
that share one for tied weights: safetensors refuses them, accelerate's `save_model` leaves out all but one of a unit.
So what the script gets is a tensor of the same memory with a storage that begins and ends where it does. Writes into it
go to the parameter, as without a plan; the flat lives as long as it does; tied weights are one tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from memadvisor.engines.sharding.flat import Flat


class OwnStorages:
    """Makes such tensors, and knows those that the script still has: two dicts name one thing."""

    def __init__(self) -> None:
        self._made: weakref.WeakValueDictionary[Any, torch.Tensor] = weakref.WeakValueDictionary()

    def give(self, named: dict[str, Any], flats: Iterable[Flat]) -> None:
        """Put them into a state dict, in place of views of these flats."""
        shared = {memory.data_ptr(): flat for flat in flats for memory in _shared_memory(flat)}
        for name, value in named.items():
            if type(value) is torch.Tensor:
                flat = shared.get(value.untyped_storage().data_ptr())
                if flat is not None:
                    named[name] = self.of(value, flat)

    def of(self, view: torch.Tensor, flat: Flat) -> torch.Tensor:
        """A tensor of the memory of a dense view, and no more. The view's storage must never be resized."""
        if view.numel() == 0 or view.untyped_storage().nbytes() == view.nbytes:
            return view
        # Versions do not tell of what is written into such a tensor: a loan stays until it is kept.
        flat.is_loan_fixed = flat.loan is not None
        key = (view.data_ptr(), view.shape, view.stride(), view.dtype)
        made = self._made.get(key)
        if made is None:
            flattened = view.detach().as_strided((view.numel(),), (1,))
            made = from_dlpack(flattened).as_strided(view.shape, view.stride())
            self._made[key] = made
        return made


def _shared_memory(flat: Flat) -> list[torch.Tensor]:
    """What parameters are views of; not the full parameters of stage 3, whose storage is emptied between uses."""
    whole = flat.full if flat.stage in (1, 2) else None
    return [memory for memory in (whole, flat.loan) if memory is not None]
