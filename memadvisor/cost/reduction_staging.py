"""What is there only while a gradient is reduced to shards, or written to another tier."""

from __future__ import annotations

from memadvisor.cost.flats import buffer_sizes
from memadvisor.cost.messages import Message
from memadvisor.cost.states import UnitStates
from memadvisor.executors import algorithm_for
from memadvisor.schedule import Schedule


def scattered(
    size_bytes: int, gradient_bytes: int, staging_bytes: int, older_bytes: int, shard_bytes: int
) -> Message:
    """A reduction of `size_bytes` that is waited for where it begins: of a whole gradient, with staging beside it and the
    shard of earlier micro-batches, to a shard.

    It is simulated before the action is over, so what it holds beside the shard is staging. The sum is cast, if it is, when
    the buffer has gone: on two ranks and more that takes no more.
    """
    beside = {"communication": max(0, staging_bytes - shard_bytes)}
    whole = {"gradient": gradient_bytes + older_bytes + min(0, staging_bytes - shard_bytes)}
    return Message(
        operation="reduce_scatter", size_bytes=size_bytes, staging={**beside, **whole}, beside=beside
    )


def written(gradient_bytes: int, older_bytes: int, *, overlaps: bool) -> Message:
    """A write of a gradient; that of earlier micro-batches is read and added first."""
    staging = {"gradient": older_bytes + gradient_bytes * (not overlaps)}
    beside = {"gradient": older_bytes}
    return Message(operation="write", size_bytes=gradient_bytes, staging=staging, beside=beside)


def together_bytes(states: UnitStates, stage: int, schedule: Schedule) -> int:
    """What a reduction has beside one shard of staging whose messages are all under way at once.

    Of a unit: of each of its flats that goes so, a shard for each rank but this one and the last whose share is added.

    Messages of another width go by themselves (engines/sharding/transfers.py).
    """
    num_ranks = schedule.shard_ranks
    if stage < 2:
        return 0
    return sum(
        (num_ranks - 2) * size_bytes // num_ranks
        for dtype, size_bytes in buffer_sizes(states, num_ranks, schedule.precision).items()
        if schedule.compression.reduce_bits_of(dtype) is None
        and algorithm_for(schedule.algorithms, "reduce_scatter", size_bytes, num_ranks) == "together"
    )
