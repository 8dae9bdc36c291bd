"""In words and rows: where memory ran out, and what held it. The command line says it with the same words."""

from __future__ import annotations

from rich.text import Text

from memadvisor.analyzers.out_of_memory import OutOfMemoryEvent, way_on
from memadvisor.report.words import place_name
from memadvisor.tui.drawing import CATEGORY_COLORS
from memadvisor.tui.text import paragraph
from memadvisor.tui.view import View
from memadvisor.units import format_bytes

_NUM_MODULES = 6


def out_of_memory_rows(view: View) -> list[Text]:
    """The rank's last event; nothing where memory sufficed."""
    events = view.result.out_of_memory
    if not events:
        return []
    event, earlier = events[-1], len(events) - 1
    before = f"; {earlier} time{'s' if earlier > 1 else ''} before that in this run" if earlier else ""
    return [
        paragraph(("Out of memory  ", "bold"), (sentence(event), "bold #e5484d"), before),
        paragraph(f"held by {held_by(event)}"),
        *(
            paragraph(
                f"{format_bytes(row.size_bytes):>11}  ",
                (row.category.replace("_", " "), CATEGORY_COLORS.get(row.category, "")),
                f"  {row.module or '(model)'}",
            )
            for row in event.by_module[:_NUM_MODULES]
        ),
        *(paragraph(("hint ", "bold"), hint) for hint in (event.hint,) if hint is not None),
        *(paragraph(("next ", "bold"), way) for way in (way_on(view.run),) if way is not None),
        Text(""),
    ]


def sentence(event: OutOfMemoryEvent, of_rank: str = "") -> str:
    """`in forward of blocks.3 (aten::relu), step 0: asked for 4 MiB, had 21 MiB of 24 MiB (--memory-limit)`."""
    operator = f" ({event.operator})" if event.operator else ""
    step = "" if event.step is None else f", step {event.step}"
    asked = f"asked for {format_bytes(event.requested_bytes)}"
    had = "" if event.allocated_bytes is None else f", with {format_bytes(event.allocated_bytes)} allocated"
    limit = "" if event.limit_bytes is None else f" of {format_bytes(event.limit_bytes)} ({event.limit})"
    return f"in {place_name(event.position)}{operator}{step}{of_rank}: {asked}{had}{limit}"


def held_by(event: OutOfMemoryEvent) -> str:
    """Categories from the largest on, and what is not told apart."""
    sizes = sorted(event.by_category_bytes.items(), key=lambda part: -part[1])
    parts = [f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in sizes if size]
    if event.basis == "known":
        parts.append(f"activation and others (not recorded) {_or_unknown(event.unlabelled_bytes)}")
    elif event.unlabelled_bytes:
        parts.append(f"unexplained {format_bytes(event.unlabelled_bytes)}")
    return ", ".join(parts)


def _or_unknown(size_bytes: int | None) -> str:
    return "of unknown size" if size_bytes is None else format_bytes(size_bytes)
