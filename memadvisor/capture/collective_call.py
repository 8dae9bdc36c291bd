"""One operation between ranks, as it is seen while it runs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from memadvisor.capture.clock import DeviceMark, seconds_of

Mark = float | DeviceMark


@dataclass(slots=True, eq=False)
class CollectiveCall:
    """One operation, growing while it runs; times in wall-clock nanoseconds.

    `peer` and `tag` are those of a send or receive: the other side's rank in the world, None where any will do.
    """

    operation: str
    group: str
    group_size: int
    sequence: int
    size_bytes: int
    dtype: str
    phase: str
    module: str
    unit: str
    issue_ns: int
    peer: int | None = None
    tag: int | None = None
    asynchronous: bool = True
    is_on_device: bool = False
    start_mark: Mark | None = None  # of an operation on the device alone, as is `end_mark`
    end_mark: Mark | None = None
    end_ns: int | None = None
    wait_start_ns: int | None = None
    wait_end_ns: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether the device, if it runs the operation, has passed its marks."""
        marks = [mark for mark in (self.start_mark, self.end_mark) if mark is not None]
        return all(seconds_of(mark) is not None for mark in marks)

    def finish(self, _: object = None) -> None:
        if self.end_ns is None:
            self.end_ns = time.time_ns()

    def waited(self, start_ns: int, end_ns: int) -> None:
        if self.wait_start_ns is None:
            self.wait_start_ns, self.wait_end_ns = start_ns, end_ns
        if self.end_ns is None and not self.is_on_device:
            self.end_ns = end_ns
