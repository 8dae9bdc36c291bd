"""Gradients that meet in one node, as they would have been added without our dispatch mode.

Where two gradients meet, autograd's engine adds the second into the first in place if nobody else holds the first
(`InputBuffer::accumulate`), but never while a dispatch mode is on: then it makes a third tensor and drops the first.
So a traced step holds one gradient more, for as long as the addition takes, than every other step. The mode sees who
holds the first, by the engine's own rule; the profiler sees that it was the engine who added. Here the first ends
where the sum begins.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import torch

from memadvisor.capture.truth import AllocatorEvent

# A mode is called with a tensor that its caller alone holds: the caller, the call's arguments and Python count.
_OWNERS_OF_TENSOR = 4
_OWNERS_OF_STORAGE = 2  # the tensor, and the object that is asked
_REST_BYTES = 2**20  # by which a GPU's block may be larger than what was asked for


def may_be_overwritten(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the engine would add `second` into `first` in place: plain, dense, and held by the engine alone.

    Asked from within `__torch_dispatch__`, of that call's own arguments.
    """
    if torch.is_grad_enabled() or type(first) is not torch.Tensor or type(second) is not torch.Tensor:
        return False
    if first.layout != torch.strided or second.layout != torch.strided or first._is_zerotensor():
        return False
    if first._use_count() != _OWNERS_OF_TENSOR:  # type: ignore[attr-defined]
        return False
    storage = first.untyped_storage()
    if torch._C._storage_Use_Count(storage._cdata) != _OWNERS_OF_STORAGE:
        return False
    return storage.nbytes() == first.numel() * first.element_size()


def as_added_in_place(
    events: Sequence[AllocatorEvent], added: Iterable[tuple[int, int, int]]
) -> list[AllocatorEvent]:
    """The events with the end of each overwritten gradient moved to where its sum begins.

    `events` in order of time; `added` are (start, end, address of the first) of additions that would have been in
    place, times in nanoseconds. The totals in between are those without the sum.
    """
    changed = list(events)
    times = [event.time_ns for event in changed]
    for start_ns, end_ns, address in added:
        born = bisect_left(times, start_ns)
        while born < len(changed) and times[born] <= end_ns and not changed[born].is_meeting:
            born += 1
        if born == len(changed) or times[born] > end_ns:
            continue  # a node's own addition, no meeting
        _end_first_early(changed, born, address)
    return changed


def _end_first_early(events: list[AllocatorEvent], born: int, address: int) -> None:
    """Move the free of the block at `address` in front of event `born`, which allocates as much, or as good as that."""
    size_bytes = events[born].delta_bytes
    freed = next((i for i in range(born + 1, len(events)) if events[i].address == address), len(events))
    first_bytes = -events[freed].delta_bytes if freed < len(events) else 0
    if first_bytes <= 0 or abs(first_bytes - size_bytes) > _REST_BYTES:
        return
    free = dataclasses.replace(
        events[freed],
        time_ns=events[born].time_ns,
        allocated_bytes=events[born].allocated_bytes - size_bytes - first_bytes,
    )
    between = [
        dataclasses.replace(event, allocated_bytes=event.allocated_bytes - first_bytes)
        for event in events[born:freed]
    ]
    events[born : freed + 1] = [free, *between]
