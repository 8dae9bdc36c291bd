"""What a unit's states take on one rank at a stage: worked out once, since every simulation of a search asks for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction

from memadvisor.cost.flats import flat_sizes, loose_bytes, master_bytes, own_dtype
from memadvisor.cost.states import UnitSizes, UnitStates
from memadvisor.precision import Precision, bytes_in


def unit_sizes(states: UnitStates, stage: int, num_ranks: int, precision: Precision) -> UnitSizes:
    """Those of a unit, which keeps them."""
    key = stage, num_ranks, precision
    if key not in states.sizes:
        states.sizes[key] = _sizes(states, stage, num_ranks, precision)
    return states.sizes[key]


def _sizes(states: UnitStates, stage: int, num_ranks: int, precision: Precision) -> UnitSizes:
    flats = flat_sizes(states, stage, num_ranks, precision)
    own_bytes = 0 if stage else states.given_parameter_bytes - states.mapped_bytes
    resting_bytes = states.parameter_bytes + own_bytes
    if stage == 3:
        resting_bytes = flats.resting_bytes // num_ranks
    elif stage:
        resting_bytes += flats.resting_bytes - states.trainable_bytes
    masters = precision.of_optimizer if stage else own_dtype
    trainable = [p for p in states.parameters if p.requires_grad]
    wide_bytes = sum(bytes_in(p.size_bytes, p.dtype, masters(p.dtype)) for p in trainable)
    widening = Fraction(wide_bytes, sum(p.size_bytes for p in trainable) or 1)
    state_bytes = math.ceil(states.optimizer_bytes * widening)
    return UnitSizes(
        flats=flats,
        resting_bytes=resting_bytes,
        state_bytes=-(-state_bytes // num_ranks) if stage else state_bytes,
        widening=widening,
        largest_parameter=max((p.num_elements for p in trainable), default=0),
        largest_piece=_largest_piece(states, num_ranks if stage else 1) * widening,
        master_bytes=master_bytes(states, stage, num_ranks, precision) // num_ranks,
        whole_bytes=sum(update.parameter.size_bytes for update in states.whole_updates),
        whole_state_bytes=sum(update.state_bytes for update in states.whole_updates),
        loose_bytes=loose_bytes(states, num_ranks, precision) if stage >= 2 and num_ranks > 1 else None,
    )


def _largest_piece(states: UnitStates, num_ranks: int) -> int:
    """Elements that this rank updates at once: of a parameter, or of what a shard may have of it."""
    trainable = [p for p in states.parameters if p.requires_grad]
    shard = -(-sum(p.num_elements for p in trainable) // num_ranks)
    wholes = {update.parameter.name for update in states.whole_updates}
    return max(
        (p.num_elements if p.name in wholes else min(p.num_elements, shard) for p in trainable), default=0
    )


def largest_piece_share(sizes: Mapping[str, UnitSizes], names: Iterable[str]) -> float:
    """The largest piece of these units that a rank updates at once, as a fraction of the largest parameter of all."""
    whole = max((each.largest_parameter for each in sizes.values()), default=0)
    piece = max((sizes[name].largest_piece for name in names), default=Fraction(0))
    return float(max(piece, Fraction(1)) / max(whole, 1))
