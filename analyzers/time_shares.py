"""What each operator takes of the time of all.

On a CPU that is known from the traced step. An accelerator's operators are only launched there: of their time each has a
share by the least that the hardware's roofs allow it (Williams et al., CACM 2009), its FLOPs at the peak of the dtype that
products run in, and its bytes at the memory's bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterable

from memadvisor.analyzers.utilization import product_dtype
from memadvisor.hardware.load import named_hardware
from memadvisor.run.records import Operator
from memadvisor.run.run import RankRun


class TimeShares:
    """Of one rank's operators."""

    def __init__(self, rank: RankRun) -> None:
        self._is_cpu = rank.process.device == "cpu"
        self._roofs = None if self._is_cpu else _roofs(rank)

    def of(self, rows: Iterable[Operator]) -> dict[int, float] | None:
        """By id of each, seconds of the traced step, or of the roofs; None where these are not known."""
        if self._is_cpu:
            return {id(row): row.end_s - row.start_s for row in rows}
        if self._roofs is None:
            return None
        flops_per_s, bytes_per_s = self._roofs
        found = {}
        for row in rows:
            if row.read_bytes is None or row.written_bytes is None:
                return None
            moved_bytes = row.read_bytes + row.written_bytes
            found[id(row)] = max(row.executed_flops / flops_per_s, moved_bytes / bytes_per_s)
        return found


def _roofs(rank: RankRun) -> tuple[float, float] | None:
    """FLOP/s and bytes/s."""
    hardware = named_hardware(rank.process.device_name)
    if hardware is None or not hardware.memory_bandwidth_bytes_per_s or not hardware.peak_flops_per_s:
        return None
    peaks = hardware.peak_flops_per_s
    flops_per_s = peaks.get(product_dtype(rank, hardware) or "") or max(peaks.values())
    return flops_per_s, hardware.memory_bandwidth_bytes_per_s
