"""The box at the top of a report whose run has run out of memory."""

from __future__ import annotations

from memadvisor.analyzers.analysis import Analysis
from memadvisor.analyzers.out_of_memory import OutOfMemoryEvent, way_on
from memadvisor.category_words import category_name
from memadvisor.report.blocks import MEASURED, split_bar, table
from memadvisor.report.escape import html_text, html_with_code, shortened
from memadvisor.report.words import place_name, unit_name
from memadvisor.units import format_bytes

MAX_RANKS, MAX_ROWS = 4, 8


def out_of_memory_box(analysis: Analysis) -> str:
    """Each rank's last event; "" where memory sufficed."""
    ranks = [rank for rank in analysis.ranks if rank.out_of_memory]
    boxes = []
    for rank in ranks[:MAX_RANKS]:
        of_rank = f" on rank {rank.rank}" if len(analysis.ranks) > 1 else ""
        boxes.append(_box(rank.out_of_memory[-1], of_rank, len(rank.out_of_memory), way_on(analysis.run)))
    return "".join(boxes)


def _box(event: OutOfMemoryEvent, of_rank: str, num_events: int, way: str | None) -> str:
    step = "" if event.step is None else f", step {event.step}"
    operator = f" ({event.operator})" if event.operator else ""
    limit = "" if event.limit_bytes is None else f" of {format_bytes(event.limit_bytes)} ({event.limit})"
    facts = (
        f"Asked for: {format_bytes(event.requested_bytes)}",
        f"Allocated then: {format_bytes(event.allocated_bytes)}{limit}",
        *((f"Reserved then: {format_bytes(event.reserved_bytes)}",) if event.reserved_bytes else ()),
        *((f"The last of {num_events} times in this run",) if num_events > 1 else ()),
        *((f"Hint: {event.hint}",) if event.hint else ()),
        *((f"What to do: {way}",) if way else ()),
    )
    items = "".join(f"<li>{html_with_code(fact)}</li>" for fact in facts)
    return (
        f'<div class="alert" role="status" id="out-of-memory"><b>Out of memory in '
        f"{html_text(shortened(place_name(event.position), 100))}{html_text(operator + step + of_rank)}.</b><ul>{items}</ul>"
        f"{split_bar(_parts(event))}</div>{_tables(event)}"
    )


def _parts(event: OutOfMemoryEvent) -> list[tuple[str, float, str, str]]:
    parts = [
        (category_name(name), float(size), name.replace("_", "-"), format_bytes(size))
        for name, size in event.by_category_bytes.items()
        if size
    ]
    if event.unlabelled_bytes:
        name = "activation and others, not recorded" if event.basis == "known" else "unexplained"
        parts.append(
            (name, float(event.unlabelled_bytes), "unexplained", format_bytes(event.unlabelled_bytes))
        )
    return parts


def _tables(event: OutOfMemoryEvent) -> str:
    rows = [
        (shortened(unit_name(row.module)), category_name(row.category), format_bytes(row.size_bytes))
        for row in event.by_module[:MAX_ROWS]
    ]
    if not rows:
        return ""
    largest = [
        (
            shortened(unit_name(s.module)),
            category_name(s.category),
            s.dtype,
            s.shape,
            s.operator,
            format_bytes(s.size_bytes),
        )
        for s in event.largest[:MAX_ROWS]
    ]
    by_module = table(
        "What held the memory", ("module", "category", "bytes"), rows, kinds=(MEASURED,), num_text=2
    )
    tensors = table(
        "The largest storages then",
        ("module", "category", "dtype", "shape", "made by", "bytes"),
        largest,
        kinds=(MEASURED,),
        num_text=5,
    )
    return by_module.text + tensors.text
