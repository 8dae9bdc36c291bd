"""The sections of `memadvisor show` about memory: the peak, whose it is, and the model states."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from memadvisor.analyzers.analysis import RankAnalysis
from memadvisor.analyzers.model_states import ModelStates, difference_text, expected_text
from memadvisor.analyzers.peak import PeakBreakdown
from memadvisor.analyzers.state_components import StateComponent
from memadvisor.cli.tables import NOT_RECORDED, grid, heading, name_of, shorten_left, table
from memadvisor.report.words import place_name
from memadvisor.run.records import UNEXPLAINED
from memadvisor.run.run import RankRun
from memadvisor.tui.drawing import CATEGORY_COLORS, bar, stacked_bar
from memadvisor.tui.text import number, paragraph, words
from memadvisor.units import counted, format_bytes, format_count, format_fraction

MAX_MODULES = 10
_NO_MODULE = "(no module)"


def peak(
    rank: RankAnalysis, recorded: RankRun, num_ranks: int, width: int, *, has_color: bool
) -> RenderableType:
    found = rank.peak
    if found is None:
        return heading("Peak memory", without_breakdown(rank, recorded))
    source = "the allocator's peak" if found.is_allocators else "summed over storages; no allocator peak"
    of_rank = f", rank {rank.rank}, the largest" if num_ranks > 1 else ""
    title = heading(
        "Peak memory",
        (format_bytes(found.allocated_bytes), "bold"),
        f"  in {place_name(found.position)} (step {found.step}{of_rank}); {source}",
        "" if found.reserved_bytes is None else f"; {format_bytes(found.reserved_bytes)} reserved",
    )
    parts = peak_parts(found)
    bar_width = max(10, min(50, width - 40))
    lines = grid(4)
    for name, size_bytes in sorted(parts, key=lambda part: (part[0] == UNEXPLAINED, -part[1])):
        color = CATEGORY_COLORS[name]
        lines.add_row(
            words(name.replace("_", " ")),
            number(format_bytes(size_bytes)),
            number(format_fraction(size_bytes / found.allocated_bytes if found.allocated_bytes else 0.0)),
            Text(bar(size_bytes, found.allocated_bytes, bar_width), color),
        )
    if not has_color:  # one bar of all parts tells them apart by color alone
        return Group(title, lines)
    shares = [(max(0, size), CATEGORY_COLORS[name]) for name, size in parts]
    return Group(title, Text("  ").append_text(stacked_bar(shares, min(width - 4, 100))), lines)


def without_breakdown(rank: RankAnalysis, recorded: RankRun) -> str:
    """What is still known of the peak, and why no more."""
    why = why_no_peak(recorded)
    if rank.highest_peak_bytes is None:
        return f"{NOT_RECORDED}: {why}"
    return f"{format_bytes(rank.highest_peak_bytes)} by the allocator; its breakdown is {NOT_RECORDED}: {why}"


def why_no_peak(recorded: RankRun) -> str:
    """The run was cut short, or damaged."""
    if recorded.traced_step is None:
        option = recorded.trace_option
        return recorded.why_untraced + (
            f"; `profile {option}` traces one of its {counted(len(recorded.steps), 'step')}" if option else ""
        )
    return recorded.why_untraced


def peak_parts(found: PeakBreakdown) -> list[tuple[str, int]]:
    """Category and bytes, with the unexplained rest last; they sum to the peak."""
    sizes = ((name, size) for name, size in found.by_category_bytes.items() if size or name != "weight_copy")
    return [*sizes, (UNEXPLAINED, found.unexplained_bytes)]


def modules(found: PeakBreakdown, width: int) -> RenderableType:
    """The modules and units whose bytes fill the peak."""
    sizes: dict[str, dict[str, int]] = {}
    for row in found.by_module:
        name = row.module or row.unit
        own_bytes = 0 if name else found.by_root_bytes.get(row.category, 0)
        for label, size_bytes in ((name_of(""), own_bytes), (name or _NO_MODULE, row.size_bytes - own_bytes)):
            if size_bytes:
                categories = sizes.setdefault(label, {})
                categories[row.category] = categories.get(row.category, 0) + size_bytes
    label_width = max(16, width // 3)
    lines = grid(2)
    lines.add_column(no_wrap=True, overflow="ellipsis", max_width=max(10, width - label_width - 17))
    largest = sorted(sizes.items(), key=lambda item: -sum(item[1].values()))
    for name, categories in largest[:MAX_MODULES]:
        parts = sorted(categories.items(), key=lambda item: -item[1])
        words_of_parts = ", ".join(f"{c.replace('_', ' ')} {format_bytes(n)}" for c, n in parts[:3] if n)
        lines.add_row(
            words(shorten_left(name, label_width)),
            number(format_bytes(sum(categories.values()))),
            words(words_of_parts, "dim"),
        )
    rest = largest[MAX_MODULES:]
    if rest:
        size_bytes = sum(sum(categories.values()) for _, categories in rest)
        lines.add_row(words(f"{len(rest)} more", "dim"), number(format_bytes(size_bytes)), words(""))
    return Group(heading("Largest at the peak", "by module that ran at birth"), lines)


def model_states(states: ModelStates | None) -> RenderableType:
    if states is None:
        return heading("Model states", NOT_RECORDED)
    each = states.bytes_per_parameter
    title = heading(
        "Model states",
        (format_bytes(states.measured_bytes), "bold"),
        f"  of {format_count(states.num_params)} parameters",
        "" if each is None else f", {each:.2f} B each",
        f"; theory: {states.theory_text}",
    )
    lines = table("", "dtype", "theory", "measured", "difference")
    names = {"parameter": "parameters", "gradient": "gradients", "optimizer_state": "optimizer state"}
    for kind, expected_bytes, measured_bytes in states.by_kind:
        rows = [row for row in states.components if row.kind == kind]
        dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
        lines.add_row(words(names[kind]), words(dtypes), *_theory(expected_bytes, measured_bytes))
        if kind == "optimizer_state":
            for row in rows:
                lines.add_row(*_component(row))
    total = _theory(states.theory_bytes, states.measured_bytes)
    lines.add_row(words("together", "bold"), words(""), *total)
    notes = [paragraph("  ", (note, "dim")) for note in states.notes]
    return Group(title, lines, *notes)


def _theory(expected_bytes: int | None, measured_bytes: int) -> tuple[Text, Text, Text]:
    expected = expected_text(expected_bytes)
    return (
        words(expected, "dim") if expected_bytes is None else number(expected),
        number(format_bytes(measured_bytes)),
        number(difference_text(expected_bytes, measured_bytes)),
    )


def _component(row: StateComponent) -> tuple[Text, ...]:
    recorded = row.recorded_bytes or 0
    figures = _theory(row.expected_bytes, recorded)
    return words(f"  {row.component}", "dim"), words(row.dtype, "dim"), *figures
