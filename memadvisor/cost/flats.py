"""A unit's flats as memadvisor/engines/sharding/flat.py lays them out, and the pieces of parameters that ranks have of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from memadvisor.cost.states import FlatSizes, UnitStates
from memadvisor.loose import summed_gradients
from memadvisor.precision import Precision, bytes_in


def own_dtype(dtype: str) -> str:
    """Of what is not cast."""
    return dtype


def flat_bytes(
    states: UnitStates, num_ranks: int, *, frozen: bool, dtype_of: Callable[[str], str] = own_dtype
) -> int:
    """Bytes of a unit's flats: for each dtype and trainability, elements padded to a multiple of the ranks.

    `dtype_of`: the dtype of the flat, by that of the parameters.
    """
    return sum(
        _padded(count, num_ranks) * bytes_in(states.item_bytes[dtype], dtype, dtype_of(dtype))
        for (dtype, is_trained), count in states.num_elements.items()
        if is_trained or frozen
    )


def buffer_sizes(states: UnitStates, num_ranks: int, precision: Precision) -> dict[str, int]:
    """Bytes of the buffer of each trainable flat's gradients, by the parameters' dtype, with stages 2 and 3."""
    return {
        dtype: _padded(count, num_ranks)
        * bytes_in(states.item_bytes[dtype], dtype, precision.of_reduction(dtype))
        for (dtype, is_trained), count in states.num_elements.items()
        if is_trained
    }


def loose_bytes(states: UnitStates, num_ranks: int, precision: Precision) -> int | None:
    """Bytes of all of a unit's gradients where ranks of a CPU reduce them to shards and some stay where autograd has made
    them (engines/sharding/loose_gradients.py): flats with such a one are not padded. None where none stays.
    """
    sizes = buffer_sizes(states, num_ranks, precision)
    gradients = summed_gradients(states.parameters, precision)
    loose = {each.dtype for each in gradients if each.is_loose}
    for dtype in loose:
        sizes[dtype] = sum(each.size_bytes for each in gradients if each.dtype == dtype)
    return sum(sizes.values()) if loose else None


def _padded(num_elements: int, num_ranks: int) -> int:
    """Elements of a flat: shards of the ranks are alike."""
    return -(-num_elements // num_ranks) * num_ranks


def flat_sizes(states: UnitStates, stage: int, num_ranks: int, precision: Precision) -> FlatSizes:
    """Those of a unit of a stage; frozen parameters are sharded in stage 3 alone."""
    is_sharded = stage == 3
    masters = precision.of_optimizer if stage else own_dtype
    casts = precision.of_parameter if is_sharded else own_dtype
    sums = precision.of_reduction if stage >= 2 else own_dtype
    trainable_bytes = flat_bytes(states, num_ranks, frozen=False, dtype_of=masters)
    own_bytes = flat_bytes(states, num_ranks, frozen=False)
    frozen_bytes = flat_bytes(states, num_ranks, frozen=is_sharded) - own_bytes
    return FlatSizes(
        resting_bytes=(trainable_bytes if is_sharded else own_bytes) + frozen_bytes,
        trainable_bytes=trainable_bytes,
        full_bytes=flat_bytes(states, num_ranks, frozen=is_sharded, dtype_of=casts),
        buffer_bytes=flat_bytes(states, num_ranks, frozen=False, dtype_of=sums),
    )


def master_bytes(states: UnitStates, stage: int, num_ranks: int, precision: Precision) -> int:
    """Bytes of all ranks' masters of a unit, where those are kept beside whole parameters."""
    return sum(
        _padded(count, num_ranks) * bytes_in(states.item_bytes[dtype], dtype, precision.of_optimizer(dtype))
        for (dtype, is_trained), count in states.num_elements.items()
        if stage in (1, 2) and is_trained and precision.of_optimizer(dtype) != dtype
    )


def piece_elements(states: UnitStates, num_ranks: int, rank: int) -> dict[str, int]:
    """Elements of each trainable parameter, by name, in this rank's shards; with one rank all of them."""
    pieces: dict[str, int] = {}
    starts: dict[str, int] = defaultdict(int)  # of the next parameter in the flat of its dtype
    for parameter in states.parameters:
        if not parameter.requires_grad:
            continue
        shard = -(-states.num_elements[parameter.dtype, True] // num_ranks)
        start = starts[parameter.dtype]
        end = starts[parameter.dtype] = start + parameter.num_elements
        low, high = max(start, rank * shard), min(end, (rank + 1) * shard)
        pieces[parameter.name] = max(0, high - low)
    return pieces
