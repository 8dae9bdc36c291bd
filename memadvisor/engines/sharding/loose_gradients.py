"""A unit's gradients as autograd has made them, one tensor for each parameter, until they have been reduced to shards.

Between ranks of a CPU a message may be sent from wherever it lies, so what is large is not copied into a flat buffer first:
the buffer would be there beside the gradient that is being copied. Gradients of few bytes are collected in a buffer, in their
order, or there would be as many messages as parameters (memadvisor/loose.py says which). A tensor that is not the
parameter's alone, or lies otherwise than the parameter, is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch

from memadvisor.engines.collectives.wire import Pieces
from memadvisor.engines.sharding.flat import Flat, Label, Slot
from memadvisor.engines.sharding.holders import is_held
from memadvisor.loose import is_loose


def loose_gradients(flat: Flat, label: Label) -> LooseGradients | None:
    """Those of a flat some of which stay where they are made; None of any other."""
    is_sent_as_made = flat.reduce_bits is None and flat.reduce_dtype == flat.param_dtype
    if (
        not flat.trainable
        or flat.stage < 2
        or flat.num_ranks == 1
        or not is_sent_as_made
        or flat.device.type != "cpu"
    ):
        return None
    size = flat.reduce_dtype.itemsize
    small = {slot.index for slot in flat.slots if not is_loose((slot.end - slot.start) * size)}
    return LooseGradients(flat, small, label) if len(small) < len(flat.slots) else None


class LooseGradients:
    """Of one trainable flat. small: indices of slots whose gradients are collected. `label` is told of what is made here."""

    def __init__(self, flat: Flat, small: set[int], label: Label) -> None:
        self._flat = flat
        self._label = label
        sizes = [slot.end - slot.start if slot.index in small else 0 for slot in flat.slots]
        self._ends = dict(zip((slot.index for slot in flat.slots), accumulate(sizes), strict=True))
        self._small = small
        self._collected: torch.Tensor | None = None
        self._large: dict[int, torch.Tensor] = {}  # by index of the slot, 1-D in the order of the flat

    @property
    def is_there(self) -> bool:
        return bool(self._large) or self._collected is not None

    def take(self, slot: Slot, gradient: torch.Tensor, share: float) -> None:
        """Take over a parameter's gradient, times `share`."""
        if slot.index in self._flat.ready:
            self._shaped(slot).add_(gradient, alpha=share)
        elif slot.index in self._small or not _stays(slot, gradient):
            torch.mul(gradient, share, out=self._room(slot))
        else:
            own = gradient.detach().as_strided((slot.end - slot.start,), (1,))
            self._large[slot.index] = own.mul_(share)
            self._label(own, "gradient", self._flat.unit)

    def add_zeros(self, slot: Slot) -> None:
        """No gradient has come for a parameter."""
        self._room(slot).zero_()

    def clear(self) -> None:
        self._large.clear()
        self._collected = None

    def tensors(self) -> list[torch.Tensor]:
        """All that is there."""
        return [*self._large.values(), *(() if self._collected is None else (self._collected,))]

    def pieces(self) -> Pieces:
        """What each rank is sent, when all gradients are there."""
        flat = self._flat
        parts = (tuple(self._parts(rank)) for rank in range(flat.num_ranks))
        return Pieces(tuple(self.tensors()), tuple(parts), flat.padded_numel)

    def _parts(self, rank: int) -> Iterator[torch.Tensor]:
        """What lies side by side in memory is one part."""
        first = last = 0  # of what is collected and has not been given
        for slot in self._flat.slots:
            low, high = slot.range_on(rank)
            if low == high:
                continue
            offset = self._start(slot)
            if slot.index in self._small:
                first = first if last else offset + low - slot.start
                last = offset + high - slot.start
                continue
            yield from self._side_by_side(first, last)
            first = last = 0
            yield self._large[slot.index][low - slot.start : high - slot.start]
        yield from self._side_by_side(first, last)

    def _side_by_side(self, first: int, last: int) -> Iterator[torch.Tensor]:
        if last and self._collected is not None:
            yield self._collected[first:last]

    def _start(self, slot: Slot) -> int:
        """Where a parameter's gradient is among those that are collected."""
        return self._ends[slot.index] - (slot.end - slot.start)

    def _shaped(self, slot: Slot) -> torch.Tensor:
        """A parameter's gradient in the parameter's shape."""
        large = self._large.get(slot.index)
        if large is not None:
            return large.as_strided(slot.shape, slot.stride)
        if self._collected is None:
            self._collected = self._new(max(self._ends.values()))
        return self._collected.as_strided(slot.shape, slot.stride, self._start(slot))

    def _room(self, slot: Slot) -> torch.Tensor:
        """The same, not written yet."""
        if slot.index not in self._small:
            self._large[slot.index] = self._new(slot.end - slot.start)
        return self._shaped(slot)

    def _new(self, num_elements: int) -> torch.Tensor:
        made = self._flat.new(num_elements, self._flat.reduce_dtype)
        self._label(made, "gradient", self._flat.unit)
        return made


def _stays(slot: Slot, gradient: torch.Tensor) -> bool:
    """Whether it is the parameter's alone, and lies as the parameter does: autograd's sum of a product is."""
    return (
        not gradient.requires_grad
        and gradient.stride() == slot.stride
        and gradient.dtype == slot.flat.reduce_dtype
        and gradient.untyped_storage().nbytes() == (slot.end - slot.start) * gradient.itemsize
        and not is_held(gradient)
    )
