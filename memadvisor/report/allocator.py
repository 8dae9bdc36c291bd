"""What the CUDA caching allocator reserves beyond what is allocated: totals, and the segments that hold it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memadvisor.analyzers.fragmentation import Fragmentation, Measured, SegmentUse
from memadvisor.category_words import category_name
from memadvisor.report.blocks import INNER, MEASURED, PREDICTED, Block, table
from memadvisor.report.view import RankView
from memadvisor.units import format_bytes, format_fraction

MAX_SEGMENTS = 20
_NOT_RECORDED = "not recorded"


def reserved_memory(view: RankView) -> Block | None:
    """Totals, measured or predicted; nothing where there is nothing worth saying."""
    found = view.result.fragmentation
    if found is None or not found.is_worth_showing:
        return None
    measured = found.measured
    settings = f" Allocator settings: {found.settings}." if found.settings else ""
    if measured is None:
        return table(
            "Predicted for a CUDA device",
            ("", "size"),
            _predicted(found),
            kinds=(PREDICTED,),
            basis=view.traced_basis,
            note="This run was on a CPU. Its allocations and frees were replayed through a simulated CUDA caching "
            "allocator, whose blocks may be larger than what was asked for; what a GPU's operators allocate inside themselves may differ.",
        )
    rows = [*_totals(measured), *_predicted(found)]
    if found.error_fraction is not None:
        rows.append(("error of the replay", format_fraction(found.error_fraction)))
    return table(
        "Reserved by the CUDA caching allocator",
        ("", "size"),
        rows,
        kinds=(MEASURED, PREDICTED),
        basis=f"{view.traced_basis}, when it ends; peaks since the script last reset them",
        note="The allocator takes whole segments from the device and keeps what is freed. What is free inside a "
        f"segment in use serves no larger request.{settings}",
    )


def fragmented_segments(view: RankView) -> Block | None:
    """The segments in use with most free bytes, and what keeps each from being given back."""
    found = view.result.fragmentation
    if found is None or found.measured is None or not found.measured.segments:
        return None
    segments = found.measured.segments
    return table(
        "Segments that are partly free",
        ("segment", "pinned by", "free", "largest free block", "size"),
        [_segment(use) for use in segments[:MAX_SEGMENTS]],
        kinds=(MEASURED,),
        basis=f"{view.traced_basis}, when it ends",
        num_text=2,
    )


def _totals(measured: Measured) -> Iterator[Sequence[str]]:
    outside = measured.outside_allocator_bytes
    yield "peak allocated", format_bytes(measured.peak_allocated_bytes)
    yield "peak active", format_bytes(measured.peak_active_bytes)
    yield "peak reserved", format_bytes(measured.peak_reserved_bytes)
    yield "reserved, not allocated, when the step ends", format_bytes(measured.fragmentation_bytes)
    yield INNER + "inside segments in use", format_bytes(measured.pinned_free_bytes)
    yield INNER + "in free segments", format_bytes(measured.cached_bytes)
    yield (
        "outside the allocator (CUDA context, NCCL)",
        _NOT_RECORDED if outside is None else format_bytes(outside),
    )
    if measured.num_retries is not None:
        yield "allocations that first had to release cached memory", str(measured.num_retries)


def _predicted(found: Fragmentation) -> Iterator[Sequence[str]]:
    if found.predicted_reserved_bytes is not None:
        yield "peak allocated, by replay", format_bytes(found.predicted_allocated_bytes)
        yield "peak reserved, by replay", format_bytes(found.predicted_reserved_bytes)


def _segment(use: SegmentUse) -> Sequence[str]:
    pins = ", ".join(
        f"{format_bytes(pin.size_bytes)} {category_name(pin.category)} of {pin.module or '(no module)'}"
        for pin in use.pinned_by
    )
    expandable = ", expandable" if use.is_expandable else ""
    return (
        f"{use.pool}{expandable}, stream {use.stream}",
        pins or "-",
        format_bytes(use.free_bytes),
        format_bytes(use.largest_free_bytes),
        format_bytes(use.total_bytes),
    )
