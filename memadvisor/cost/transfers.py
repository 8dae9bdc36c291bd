"""How long bytes take between the memory that computes and the tiers of the lanes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memadvisor.hardware.hardware import Hardware, TierBandwidth
from memadvisor.schedule import Lane


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """Measured bandwidths by lane; `source` says where they are from."""

    bandwidths: Mapping[Lane, TierBandwidth]
    source: str

    def read_s(self, lane: Lane, size_bytes: int) -> float:
        """Seconds to bring bytes into memory."""
        return size_bytes / self.bandwidths[lane].read_bytes_per_s

    def write_s(self, lane: Lane, size_bytes: int) -> float:
        """Seconds to put bytes away."""
        return size_bytes / self.bandwidths[lane].write_bytes_per_s


def transfer_times(hardware: Hardware | None) -> TransferTimes | None:
    """What a hardware file says of other tiers; None for nothing."""
    if hardware is None:
        return None
    found = {Lane.DISK: hardware.disk, Lane.HOST: hardware.host}
    known = {lane: bandwidth for lane, bandwidth in found.items() if bandwidth is not None}
    return TransferTimes(known, hardware.source) if known else None
