"""The section of `memadvisor show` about what the CUDA caching allocator reserves beyond what is allocated."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from memadvisor.analyzers.fragmentation import Fragmentation, Measured, SegmentUse
from memadvisor.cli.tables import NOT_RECORDED, heading
from memadvisor.tui.text import paragraph
from memadvisor.units import format_bytes, format_change

MAX_SEGMENTS = 3


def allocator(found: Fragmentation) -> RenderableType:
    """One line of totals, what lies outside the allocator, the segments that waste most, and the replay."""
    measured = found.measured
    if measured is None:
        title = heading(
            "Reserved",
            f"predicted for a CUDA device, whose blocks may be larger than what is asked for: {_replayed(found)}",
        )
        return Group(title)
    title = heading(
        "Reserved",
        (format_bytes(measured.peak_reserved_bytes), "bold"),
        f"  at most, for {format_bytes(measured.peak_allocated_bytes)} allocated and "
        f"{format_bytes(measured.peak_active_bytes)} active at most",
        f"; settings {found.settings}" if found.settings else "",
    )
    return Group(title, *_lines(found, measured))


def _lines(found: Fragmentation, measured: Measured) -> Iterator[Text]:
    yield paragraph(
        f"  when the step ends {format_bytes(measured.fragmentation_bytes)} are reserved but not allocated: "
        f"{format_bytes(measured.pinned_free_bytes)} inside segments in use, "
        f"{format_bytes(measured.cached_bytes)} in free segments"
    )
    for use in measured.segments[:MAX_SEGMENTS]:
        yield paragraph((f"    {segment_in_words(use)}", "dim"))
    outside = measured.outside_allocator_bytes
    yield paragraph(
        "  outside the allocator (CUDA context, NCCL): "
        + (NOT_RECORDED if outside is None else format_bytes(outside))
    )
    yield paragraph(f"  predicted by replay: {_replayed(found)}{_error(found)}")


def segment_in_words(use: SegmentUse) -> str:
    """`12.0 MiB free of 20.0 MiB (large), pinned by 6.00 MiB optimizer state of blocks.3`."""
    pins = ", ".join(
        f"{format_bytes(pin.size_bytes)} {pin.category.replace('_', ' ')} of {pin.module or '(no module)'}"
        for pin in use.pinned_by[:2]
    )
    text = f"{format_bytes(use.free_bytes)} free of {format_bytes(use.total_bytes)} ({use.pool})"
    return f"{text}, pinned by {pins}" if pins else text


def _replayed(found: Fragmentation) -> str:
    if found.predicted_reserved_bytes is None:
        return NOT_RECORDED
    return (
        f"{format_bytes(found.predicted_reserved_bytes)} reserved for "
        f"{format_bytes(found.predicted_allocated_bytes)} allocated"
    )


def _error(found: Fragmentation) -> str:
    return "" if found.error_fraction is None else f" ({format_change(found.error_fraction)} of measured)"
