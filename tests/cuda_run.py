"""A synthetic run on CUDA with what its allocator held when the traced step ended."""

from __future__ import annotations

import dataclasses

from memadvisor.cost.allocator_settings import MIB
from memadvisor.run.allocator_records import AllocatorState, DeviceSegment
from memadvisor.run.records import Storage
from memadvisor.run.run import RankRun, Run
from tests.make_run import make_run

ADDRESS = 1 << 32
NUM_PINNING = 2  # live storages in the first segment


def cuda_run(*, state: dict[str, object] | None = None, **run_settings: object) -> Run:
    """One rank with a segment that is partly free, a full one and a free one.

    `state` overrides fields of its AllocatorState.
    """
    run = make_run(num_ranks=1, device="cuda:0", **run_settings)
    rank = run.ranks[0]
    assert rank.traced_step is not None
    step = rank.traced_step.index
    places = {row.storage_id: ADDRESS + n * MIB for n, row in enumerate(pinning(rank))}
    rank = dataclasses.replace(
        rank,
        storages=tuple(dataclasses.replace(row, address=places.get(row.storage_id)) for row in rank.storages),
        segments=(
            _segment(step, ADDRESS, 20, 6, 8, 7),
            _segment(step, ADDRESS + 20 * MIB, 30, 30, 30, 0),
            _segment(step, ADDRESS + 50 * MIB, 10, 0, 0, 10),
        ),
        allocator_states=(_state(step, **state or {}),),
    )
    return dataclasses.replace(run, ranks=(rank,))


def pinning(rank: RankRun) -> list[Storage]:
    alive = [row for row in rank.storages if row.death_s is None and row.device == "cuda:0"]
    return alive[:NUM_PINNING]


def _segment(
    step: int, address: int, total: int, allocated: int, active: int, largest_free: int
) -> DeviceSegment:
    return DeviceSegment(
        step=step,
        address=address,
        pool="large",
        stream=0,
        is_expandable=False,
        is_private=False,
        total_bytes=total * MIB,
        allocated_bytes=allocated * MIB,
        active_bytes=active * MIB,
        largest_free_bytes=largest_free * MIB,
        num_blocks=4,
    )


def _state(step: int, **changes: object) -> AllocatorState:
    state = AllocatorState(
        step=step,
        time_s=1.0,
        allocated_bytes=36 * MIB,
        active_bytes=38 * MIB,
        reserved_bytes=60 * MIB,
        peak_allocated_bytes=50 * MIB,
        peak_active_bytes=52 * MIB,
        peak_reserved_bytes=60 * MIB,
        num_retries=0,
        process_used_bytes=None,
        device_used_bytes=None,
        settings="",
    )
    return dataclasses.replace(state, **changes)
