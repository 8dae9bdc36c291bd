"""In which order segments of a step are played, each micro-batch as often as a plan asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class _Segment(Protocol):
    """What of a segment (step.py) says when it is played."""

    @property
    def micro_batch(self) -> int | None: ...
    @property
    def walk(self) -> int: ...
    @property
    def phase(self) -> str: ...


def play_order(segments: Sequence[_Segment], repeats: int) -> Iterator[tuple[int, bool, bool]]:
    """Positions in order, each micro-batch `repeats` times; whether it is of the last, and was played before."""
    blocks = dict.fromkeys(s.micro_batch for s in segments if s.micro_batch is not None)
    last = next(reversed(blocks), None)
    position = 0
    while position < len(segments):
        micro_batch = segments[position].micro_batch
        if micro_batch is None:
            yield position, False, False
            position += 1
            continue
        end = position
        while end < len(segments) and segments[end].micro_batch == micro_batch:
            end += 1
        final = max(segments[inside].walk for inside in range(position, end))
        for repeat in range(repeats):
            is_last = micro_batch == last and repeat == repeats - 1
            for inside in range(position, end):
                segment = segments[inside]
                is_of_derivative = segment.phase == "backward" and segment.walk < final
                yield inside, is_last and not is_of_derivative, repeat > 0
        position = end
