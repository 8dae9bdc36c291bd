"""How long bytes take between the memory that computes and the tiers of the lanes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from memadvisor.hardware.cluster import Link
from memadvisor.hardware.hardware import Hardware, PagingCost, TierBandwidth
from memadvisor.schedule import Lane


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """Measured bandwidths by lane, that of compute for bytes that it decodes and codes; `source` says where they are from.
    `is_cached`: the disk's is the page cache's. `paging`: what the engine itself takes for what they carry; None where not
    known. `sheet`: the link that the host's is of, where it is a data sheet's and not measured."""

    bandwidths: Mapping[Lane, TierBandwidth]
    source: str
    is_cached: bool = False
    paging: PagingCost | None = None
    sheet: str = ""

    def read_s(self, lane: Lane, size_bytes: int) -> float:
        """Seconds to bring bytes into memory."""
        return size_bytes / self.bandwidths[lane].read_bytes_per_s

    def write_s(self, lane: Lane, size_bytes: int) -> float:
        """Seconds to put bytes away."""
        return size_bytes / self.bandwidths[lane].write_bytes_per_s


def transfer_times(hardware: Hardware | None, kept_bytes: int) -> TransferTimes | None:
    """What a hardware file says of other tiers; None for nothing.

    `kept_bytes`: what all ranks of the machine have on the disk at one time. The kernel keeps it in memory too where
    that is at most half of what was free, as it does with files that are written again and again.
    """
    if hardware is None:
        return None
    disk, cache = hardware.disk, hardware.page_cache
    is_cached = disk is not None and cache is not None and 2 * kept_bytes <= cache.size_bytes
    if is_cached and cache is not None:
        disk = cache.bandwidth
    found = {Lane.DISK: disk, Lane.HOST: hardware.host, Lane.COMPUTE: hardware.coder}
    known = {lane: bandwidth for lane, bandwidth in found.items() if bandwidth is not None}
    return TransferTimes(known, hardware.source, is_cached, hardware.paging) if known else None


def with_sheet(times: TransferTimes | None, link: Link | None) -> TransferTimes | None:
    """`times`, and where they know no way to a GPU's host the `link` of its data sheet, at its full rate in each direction."""
    if link is None or (times is not None and Lane.HOST in times.bandwidths):
        return times
    host = TierBandwidth(read_bytes_per_s=link.bytes_per_s, write_bytes_per_s=link.bytes_per_s)
    sheet = f"{link.kind}, {link.bytes_per_s / 1e9:g} GB/s each way"
    if times is None:
        return TransferTimes({Lane.HOST: host}, f"the data sheet of {link.kind}", sheet=sheet)
    return replace(times, bandwidths={**times.bandwidths, Lane.HOST: host}, sheet=sheet)
