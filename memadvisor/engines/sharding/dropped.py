"""Gradients that the script has dropped (`zero_grad`), and the buffers that go with them.

What it holds of a dropped gradient by another name would be the next gradient when it is looked at: it is told apart, and
refused then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import SimpleNamespace

import torch

from memadvisor.engines.sharding.flat import Flat, Slot

_PLACE = SimpleNamespace(token=object())
_ALONE = sys.getrefcount(_PLACE.token)


def leave_to_script(slots: Iterable[Slot]) -> None:
    """Of gradients that are shards and are about to go: those that the script has dropped from their parameters and holds by
    another name, or views of them."""
    for slot in slots:
        is_held = slot.token is not None and sys.getrefcount(slot.token) > _ALONE
        if is_held and slot.parameter.grad is None and slot.flat.has_gradient:
            slot.token = slot.token.leave()


def let_go_of_dropped(flat: Flat) -> None:
    """Free a trainable flat's gradients where no parameter has one any more, else zero those that are gone."""
    if flat.stage >= 2:
        dropped = [slot for slot in flat.slots if slot.parameter.grad is None]
        if len(dropped) == len(flat.slots):
            flat.grad_shard = None
        elif flat.page is not None:
            _drop_paged(flat, [slot for slot in dropped if slot.had_gradient])
        elif flat.grad_shard is not None:
            for slot in dropped:
                slot.piece(flat.grad_shard).zero_()
    elif flat.grad is not None and not any(is_ours(slot) for slot in flat.slots):
        flat.grad = None


def _drop_paged(flat: Flat, dropped: list[Slot]) -> None:
    if dropped and flat.has_gradient:
        with torch.no_grad(), flat.changing_gradient() as gradient:
            for slot in dropped:
                slot.piece(gradient).zero_()
                slot.had_gradient = False


def is_ours(slot: Slot) -> bool:
    """Whether a parameter's gradient lies in its flat's buffer."""
    gradient, buffer = slot.parameter.grad, slot.flat.grad
    if gradient is None or buffer is None:
        return False
    return bool(gradient.untyped_storage()._cdata == buffer.untyped_storage()._cdata)
