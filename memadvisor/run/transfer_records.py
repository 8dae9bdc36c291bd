"""What a profiled process leaves behind of the bytes that an engine moves between its device and another tier.

As in records.py each class is one table of the journal. Runs without such a plan, and of an older version, have no rows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes of the traced step that were written to a tier, or read from it.

    `lane`: "disk"; what a GPU copies to its host and back is not recorded. `kind`: "write" or "read". From `start_s` to
    `end_s` the thread that does nothing else was at it; one that was under way when the step ended is not recorded.
    """

    step: int
    lane: str
    kind: str
    size_bytes: int
    start_s: float
    end_s: float
