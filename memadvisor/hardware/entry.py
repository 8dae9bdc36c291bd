"""What the catalogue holds of a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """`aliases` are the names by which drivers and people call the device, in any case.

    `power_w` is its limit as sold, of the page of its rates; None where that was not looked up. `sources` name the page
    of each figure: `memory`, `bandwidth`, `flops`. `matmul_share`: what large products are known to reach of the rates,
    where that is another share than other cards' (the cost model's `matmul_share`); `sources` then name where it is from
    as `matmul`. `narrow_matmul_share`: the same of products of 8 bits and fewer, where it is another.
    """

    name: str
    aliases: tuple[str, ...]
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    peak_flops_per_s: dict[str, float]
    sources: dict[str, str]
    power_w: float | None = None
    matmul_share: float | None = None
    narrow_matmul_share: float | None = None


def one_page(page: str) -> dict[str, str]:
    """All figures from one source."""
    return dict.fromkeys(("memory", "bandwidth", "flops"), page)
