"""The memory that `advise` is given: a size, or a share of what the run took at most.

Plans are for what the allocator may reserve. Who gives the memory of the very card that the run was recorded on gets plans
for what is left of it: the CUDA context and NCCL's buffers, which NVML counts, come on top.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from memadvisor.analyzers.fragmentation import outside_allocator_bytes
from memadvisor.errors import UsageError
from memadvisor.run.run import RankRun, Run
from memadvisor.units import format_bytes, parse_bytes

_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*")

# A card's name has more GiB than it tells the driver: a 24 GB one 23.6 GiB.
_AS_NAMED = 1.05


def budget_bytes(text: str | None, run: Run) -> int:
    """Bytes of one rank: `24GiB`, or `60%` of the highest traced peak of all ranks, rounded down; of the run's own card what
    is left of it. Raises UsageError, of None too: what this is asked for depends on a budget."""
    if text is None:
        raise UsageError(
            "--memory is missing.",
            hint="give the budget of one rank: --memory 24GiB, or --memory 60% of the run's own peak.",
        )
    if not text.rstrip().endswith("%"):
        size_bytes = parse_bytes(text)
        return min((size_bytes, *_rooms_of_own_cards(run, size_bytes)))
    match = _SHARE.fullmatch(text)
    percent = float(match.group(1)) if match is not None else 0.0
    peaks = [rank.traced_step.peak_allocated_bytes for rank in run.ranks if rank.traced_step is not None]
    known = [peak for peak in peaks if peak is not None]
    if not known:
        option = next((rank.trace_option for rank in run.ranks if rank.trace_option is not None), None)
        raise UsageError(
            "The run's peak was not recorded: no step of it was traced.",
            hint=f"`memadvisor profile {option}` traces one." if option else "give a size, such as 24GiB.",
        )
    budget = max(known) * percent / 100
    if not 1 <= budget < 2**60:
        raise UsageError(
            f"{text!r} is no usable share of the run's peak.",
            hint="write it as 60%: it must be more than 0.",
        )
    return int(budget)


def card_notes(run: Run, budget_bytes: int) -> Iterator[str]:
    """Where a budget is what is left of the run's own card."""
    for rank in run.ranks:
        total_bytes = rank.process.device_memory_bytes
        if total_bytes is not None and _room_bytes(rank) == budget_bytes:
            outside_bytes = outside_allocator_bytes(rank)
            yield (
                f"The budget is what is left to the allocator of the card's {format_bytes(total_bytes)}: "
                + (
                    "what the CUDA context and NCCL take was not recorded, and comes off it."
                    if outside_bytes is None
                    else f"the CUDA context and NCCL took {format_bytes(outside_bytes)} of it (measured)."
                )
            )
            return


def _rooms_of_own_cards(run: Run, size_bytes: int) -> Iterator[int]:
    """What is left to the allocator of cards whose memory, or nearly, `size_bytes` are."""
    for rank in run.ranks:
        room_bytes, total_bytes = _room_bytes(rank), rank.process.device_memory_bytes
        if (
            room_bytes is not None
            and total_bytes is not None
            and room_bytes < size_bytes <= _AS_NAMED * total_bytes
        ):
            yield room_bytes


def _room_bytes(rank: RankRun) -> int | None:
    """What is left to the allocator of the rank's card; None on a CPU."""
    total_bytes = rank.process.device_memory_bytes
    if total_bytes is None or not rank.process.device.startswith("cuda"):
        return None
    return total_bytes - (outside_allocator_bytes(rank) or 0)
