"""Saved-tensor hooks of the traced step: what autograd keeps, and until when."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr

from memadvisor.capture.compiled import never_compiled
from memadvisor.capture.label_log import LabelLog, SavedTensor
from memadvisor.capture.labels import LabelMode


class SavedTensorHooks:
    """Pack and unpack hooks that give autograd back the very tensor, and note when it lets go."""

    def __init__(
        self, mode: LabelMode, log: LabelLog, also: Callable[[torch.Tensor], None] | None = None
    ) -> None:
        self._also = also  # autograd asks the innermost hooks alone
        self._mode = mode
        self._log = log

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        address = self._mode.address(tensor)
        if self._also is not None:
            self._also(tensor)
        # Our own detach is none of the script's.
        was_active, self._mode.is_active = self._mode.is_active, False
        needs_gradient = tensor.requires_grad
        tensor = without_cycle(tensor)
        self._mode.is_active = was_active
        if not address or not was_active:
            return _Kept(tensor, None)
        size_bytes = tensor.untyped_storage().nbytes()
        now_ns = time.time_ns()
        self._mode._sight(tensor, address, now_ns)
        place, (_, shape) = self._mode._here, self._mode.describe(tensor)
        row = SavedTensor(
            address,
            size_bytes,
            shape,
            place,
            now_ns,
            node_number=_get_sequence_nr(),
            needs_gradient=needs_gradient,
        )
        self._log.saved.append(row)
        return _Kept(tensor, row)

    @staticmethod
    @never_compiled
    def unpack(kept: Any) -> torch.Tensor:
        if kept.row is not None:
            kept.row.unpacked_ns = time.time_ns()
        tensor: torch.Tensor = kept.tensor
        return tensor


def without_cycle(tensor: torch.Tensor) -> torch.Tensor:
    """What a pack hook may give back. Of an operator's own result autograd would otherwise keep the graph that
    keeps the result, and what no backward runs through would never be freed; it restores the rest by itself."""
    return tensor if tensor.grad_fn is None else tensor.data


class _Kept:
    """Stands for a saved tensor inside autograd; its end is the moment that autograd lets go."""

    __slots__ = ("row", "tensor")

    def __init__(self, tensor: torch.Tensor, row: SavedTensor | None) -> None:
        self.tensor = tensor
        self.row = row

    @never_compiled
    def __del__(self) -> None:
        if self.row is not None:
            self.row.released_ns = time.time_ns()
