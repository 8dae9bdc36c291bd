"""What reductions to shards whose messages are all under way at once have beside one shard of staging."""

from __future__ import annotations

from memadvisor.cost.flats import buffer_sizes
from memadvisor.cost.states import UnitStates
from memadvisor.executors import algorithm_for
from memadvisor.schedule import Schedule


def together_bytes(states: UnitStates, stage: int, schedule: Schedule) -> int:
    """Of a unit: of each of its flats that goes so, a shard for each rank but this one and the last whose share is added.

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
