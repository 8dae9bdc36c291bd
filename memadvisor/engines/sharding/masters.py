"""Masters beside parameters that stay whole: what stages 1 and 2 keep with a precision's `optimizer_dtype`.

A flat's `full` is as narrow as the script made its parameters, and is the script's to read and write, seen or unseen
(`p.data`, a view that it kept). `own_shard` is this rank's masters, in float32, which the optimizer updates; they are
rounded into this rank's slice of `full`, and gathered from there. So between an update and the next, an element of the
slice that is not its master rounded has been written by the script: that value becomes the master, and all others keep
their digits. No copy of what was gathered has to be kept for that.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memadvisor.engines.collectives.wire import Wire
from memadvisor.engines.sharding.arrivals import settle
from memadvisor.engines.sharding.flat import Flat, Slot, with_written


def take_written(flats: Iterable[Flat]) -> None:
    """Take over what the script has written into parameters."""
    with torch.no_grad():
        for flat in flats:
            if flat.has_masters_beside:
                flat.keep_written()


def piece_of_masters(slot: Slot) -> torch.Tensor:
    """A copy of this rank's piece, with what the script has written; nothing is taken over, so any thread may ask."""
    flat = slot.flat
    if flat.shard is None or flat.full is None:
        raise AssertionError("a flat without a shard has no masters")
    masters = slot.piece(flat.shard)
    if not flat.has_masters_beside:
        return masters.clone()
    return with_written(masters, slot.piece(flat.own_slice(flat.full)), masters)


def seen_from_here(slot: Slot, whole: torch.Tensor) -> torch.Tensor:
    """A parameter's masters from all ranks, 1-D, with what the script has written here: others may come by it later."""
    with torch.no_grad():
        return with_written(whole, slot.flattened(slot.parameter.detach()), whole)


def show_masters(wire: Wire, flat: Flat) -> None:
    """Masters have been loaded, on all ranks: the parameters are these, rounded."""
    if flat.has_masters_beside and flat.full is not None:
        settle(flat)
        with torch.no_grad():
            wire.gather(flat.full, flat.own_part(flat.full), flat.unit, flat.index)
