"""The sections of `memadvisor diff`, each from the differences to something that rich prints. All figures are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memadvisor.analyzers.analysis import Analysis
from memadvisor.analyzers.environment import Setting, Value
from memadvisor.analyzers.run_difference import (
    Change,
    ModuleChange,
    OperatorChange,
    RankDifference,
    RunDifference,
)
from memadvisor.analyzers.step_time_shift import CONFIDENCE, Shift
from memadvisor.cli import summary
from memadvisor.cli.tables import NOT_RECORDED, heading, name_of, shorten_left, table
from memadvisor.gates import numbered
from memadvisor.tui.text import number, paragraph, words
from memadvisor.units import format_bytes, format_change, format_count, format_fraction, format_seconds

MAX_ROWS, MAX_RANKS, MAX_LONGER, MAX_CALLED = 8, 16, 5, 4
_ROUNDING = 1e-9  # of sums of the same times in another order
Form = Callable[[Any], str]
Row = tuple[str, Change[Any], Form]


def sections(found: RunDifference, width: int) -> Iterator[RenderableType]:
    """What the runs are, what of it differs, then figures of the rank with the highest peak, then all ranks."""
    yield _runs(found)
    yield from _kinds(found)
    yield _settings(found.settings)
    rank = found.largest_rank
    if rank is None:
        yield paragraph(("no rank is recorded in both runs", "bold yellow"))
        return
    of_rank = f", rank {rank.rank}" if len(found.ranks) > 1 else ""
    yield _memory(rank, of_rank)
    yield _model_states(rank, of_rank)
    yield _step_time(found, rank, of_rank)
    yield _section("Utilization", f"FLOPs of a step{of_rank}", _utilization_rows(rank))
    yield _section(
        "Communication", f"of the traced steps{of_rank}, whose times carry the tracing's cost", _traffic(rank)
    )
    yield _modules(rank, of_rank, width)
    yield _operators(rank, of_rank, width)
    if len(found.ranks) > 1:
        yield _ranks(found)


def _runs(found: RunDifference) -> RenderableType:
    lines: list[RenderableType] = []
    for name, analysis in (("before", found.before), ("after ", found.after)):
        lines.append(paragraph((f"{name}  ", "bold"), (str(analysis.run.path), "bold")))
        lines.append(summary.header(analysis))
        lines += summary.trouble(analysis)
    lines += _lone_ranks(found.ranks_only_before, "before", found.after)
    lines += _lone_ranks(found.ranks_only_after, "after", found.before)
    lines.append(paragraph(("all figures are measured", "dim")))
    return Group(*lines)


def _lone_ranks(ranks: tuple[int, ...], side: str, other: Analysis) -> Iterator[RenderableType]:
    if ranks:
        are = "are" if len(ranks) > 1 else "is"
        yield paragraph(
            ("only " + side + " ", "bold yellow"), f"{numbered(ranks)} {are} not in {other.run.path}"
        )


def _kinds(found: RunDifference) -> Iterator[RenderableType]:
    if not found.are_of_one_kind:
        names = ", ".join(setting.label for setting in found.settings if setting.changes_kind)
        yield paragraph(
            ("different work ", "bold yellow"),
            f"the runs differ in {names}, so that what follows compares different work",
        )


def _settings(settings: Sequence[Setting]) -> RenderableType:
    if not settings:
        return heading("What differs", "nothing of script, arguments, batch, plan, machine and versions")
    lines = Table(box=None, show_header=False, pad_edge=True, padding=(0, 1, 0, 1))
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold", ratio=1)
    for setting in settings:
        label = words(setting.label, "bold yellow" if setting.changes_kind else "")
        before, after = _value(setting.name, setting.before), _value(setting.name, setting.after)
        lines.add_row(label, paragraph(before, (" -> ", "bold"), after))
    return Group(heading("What differs", "between the two runs"), lines)


def _value(name: str, value: Value) -> str:
    if value is None:
        return "none"
    if name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return str(value) or "none"


def _section(title: str, basis: str, rows: Iterable[Row]) -> RenderableType:
    """A table; parts (indented names) that are 0, or not recorded, in both runs are left out of it."""
    rows = list(rows)
    if all(change.before is None and change.after is None for _, change, _ in rows):
        return heading(title, f"{NOT_RECORDED} in either run")
    if all(change.before == 0 and change.after == 0 for _, change, _ in rows):
        return heading(title, "none in either run")
    lines = table("", "before", "after", "difference", "")
    for name, change, form in rows:
        is_part = name.startswith(" ")
        if change.before or change.after or not is_part:
            lines.add_row(words(name, "" if is_part else "bold"), *cells(change, form))
    return Group(heading(title, basis), lines)


def cells(change: Change[Any], form: Form) -> tuple[Text, Text, Text, Text]:
    """Before, after, the difference with its sign, and its share of what was before."""
    fraction = change.change_fraction
    is_same = fraction is not None and abs(fraction) < _ROUNDING
    return (
        number(_recorded(change.before, form)),
        number(_recorded(change.after, form)),
        number("same" if is_same else signed(change.difference, form)),
        number("" if is_same or fraction is None else format_change(fraction)),
    )


def _recorded(value: Any, form: Form) -> str:
    return NOT_RECORDED if value is None else form(value)


def signed(difference: Any, form: Form) -> str:
    """`+1.50 MiB`, `same`; `-` where a side is not known."""
    if difference is None:
        return "-"
    return "same" if difference == 0 else ("+" if difference > 0 else "") + form(difference)


def _memory(rank: RankDifference, of_rank: str) -> RenderableType:
    where = " -> ".join(dict.fromkeys(place or NOT_RECORDED for place in rank.peak_position))
    rows: list[Row] = [
        ("peak of the traced step", rank.peak_bytes, format_bytes),
        *(
            (f"  {name.replace('_', ' ')}", change, format_bytes)
            for name, change in rank.by_category_bytes.items()
        ),
    ]
    known = rank.known_peak_bytes
    if (known.before, known.after) != (rank.peak_bytes.before, rank.peak_bytes.after):
        rows.append(("highest of all steps", known, format_bytes))
    rows.append(("reserved", rank.reserved_bytes, format_bytes))
    return _section("Memory", f"peak in {where}{of_rank}", rows)


def _model_states(rank: RankDifference, of_rank: str) -> RenderableType:
    rows: list[Row] = [
        (name.removesuffix("_bytes").replace("_", " "), change, format_bytes)
        for name, change in rank.model_states.items()
    ]
    rows.append(("number of parameters", rank.num_params, format_count))
    return _section("Model states", f"when the optimizer step begins{of_rank}", rows)


def _step_time(found: RunDifference, rank: RankDifference, of_rank: str) -> RenderableType:
    time = rank.step_time
    rows: list[Row] = [("median step", time.median_s, format_seconds)]
    rows += [(f"  {name}", change, format_seconds) for name, change in time.by_phase_s.items()]
    if not (time.data_wait_s.before is None and time.data_wait_s.after is None):
        rows.append(("    waiting for data", time.data_wait_s, format_seconds))
    for name, of_all, own in (
        ("tokens/s", found.tokens_per_s, rank.tokens_per_s),
        ("samples/s", found.samples_per_s, rank.samples_per_s),
    ):
        if of_all.difference is not None:
            rows.append((f"{name} of all ranks" if of_rank else name, of_all, format_count))
            break
        if own.before is not None or own.after is not None:
            rows.append((f"{name} of rank {rank.rank}", own, format_count))
            break
    section = _section("Step time", f"steady steps{of_rank}", rows)
    spread = [
        f"{name} {format_seconds(quartiles[0])} to {format_seconds(quartiles[1])}"
        for name, quartiles in zip(("before", "after"), time.quartiles_s, strict=True)
        if quartiles is not None
    ]
    lines = [paragraph((f"  half of the steps take: {', '.join(spread)}", "dim"))] if spread else []
    if time.shift is not None:
        compared = (time.shift.num_before, time.shift.num_after)
        is_of_steps = compared == (time.num_steps.before, time.num_steps.after)
        lines.append(paragraph("  ", *in_words(time.shift, "steps" if is_of_steps else "stretches of steps")))
    return Group(section, *lines)


def in_words(shift: Shift, compared: str) -> tuple[tuple[str, str], ...]:
    """What the test says, and its name; `compared`: what it took from each run."""
    test = (
        f"Mann-Whitney, {100 * CONFIDENCE:.0f} %, on {shift.num_before} and {shift.num_after} {compared}; "
        "how runs differ among themselves is not in it"
    )
    if shift.interval_s is None:
        return (("too few steps to tell a difference from noise ", "bold yellow"), (f"({test})", "dim"))
    low, high = (signed(end, format_seconds) for end in shift.interval_s)
    longer = "longer" if shift.shift_s > 0 else "shorter"
    if shift.is_significant:
        said = f"{longer} by more than the steps' own noise"
    else:
        said = "not significant: within the steps' own noise"
    about = f" {signed(shift.shift_s, format_seconds)}, between {low} and {high} "
    return ((said + ":", "bold"), (about, ""), (f"({test})", "dim"))


def _utilization_rows(rank: RankDifference) -> Iterable[Row]:
    def flops(value: float) -> str:
        return format_count(value, "FLOP")

    return (
        ("MFU", rank.mfu, format_fraction),
        ("HFU", rank.hfu, format_fraction),
        ("needed", rank.model_flops_per_step, flops),
        ("executed", rank.executed_flops_per_step, flops),
    )


def _traffic(rank: RankDifference) -> Iterable[Row]:
    yield "bytes", rank.communication_bytes, format_bytes
    yield "operations", rank.num_collectives, str
    for name, change in rank.communication_s.items():
        yield {"time_s": "time"}.get(name, "  " + name.removesuffix("_s")), change, format_seconds


def _modules(rank: RankDifference, of_rank: str, width: int) -> RenderableType:
    title = "Kept for the backward"
    if rank.modules is None:
        return _section(title, f"one micro-batch{of_rank}", [("kept in all", rank.saved_bytes, format_bytes)])
    lines = table("module", "before", "after", "difference", "")
    lines.add_row(words("kept in all", "bold"), *cells(rank.saved_bytes, format_bytes))
    label_width = max(16, width - 58)
    for row in rank.modules[:MAX_ROWS]:
        label = words(shorten_left(name_of(row.name), label_width))
        lines.add_row(label, *_kept_by(row))
    if len(rank.modules) > MAX_ROWS:
        lines.add_row(words(f"{len(rank.modules) - MAX_ROWS} more that differ", "dim"))
    return Group(heading(title, f"one micro-batch, and modules that keep more or less{of_rank}"), lines)


def _kept_by(row: ModuleChange) -> tuple[Text, ...]:
    if not row.only_in:
        return cells(row.saved_bytes, format_bytes)
    before, after, *_ = cells(row.saved_bytes, format_bytes)
    absent = number("no module")
    if row.only_in == "before":
        return before, absent, number("only before")
    return absent, after, number("only after")


def _operators(rank: RankDifference, of_rank: str, width: int) -> RenderableType:
    if rank.operators is None:
        return heading("Operators", f"{NOT_RECORDED} in both runs")
    if not rank.operators:
        return heading("Operators", "the same calls of the same length in both traced steps")
    lines = table("operator", "calls", "after", "time", "after", "difference")
    shown = _shown(rank.operators)
    for row in shown:
        lines.add_row(
            words(shorten_left(row.name.removeprefix("aten::"), max(16, width - 52))),
            number(str(row.num_calls.before)),
            number(str(row.num_calls.after)),
            number(format_seconds(row.time_s.before)),
            number(format_seconds(row.time_s.after)),
            number(signed(row.time_s.difference, format_seconds)),
        )
    if len(rank.operators) > len(shown):
        lines.add_row(words(f"{len(rank.operators) - len(shown)} more", "dim"))
    basis = f"whose time or calls differ most{of_rank}; one traced step each, so times differ by chance, too"
    return Group(heading("Operators", basis), lines)


def _shown(operators: Sequence[OperatorChange]) -> list[OperatorChange]:
    """Those whose time differs most, then those whose calls do."""
    by_calls = sorted(operators, key=lambda row: -abs(row.num_calls.difference or 0))
    called = [row for row in by_calls if row.num_calls.difference]
    return list(dict.fromkeys((*operators[:MAX_LONGER], *called[:MAX_CALLED])))


def _ranks(found: RunDifference) -> RenderableType:
    lines = table("rank", "peak before", "after", "difference", "step before", "after", "difference")
    for rank in found.ranks[:MAX_RANKS]:
        peak, step = (
            cells(rank.known_peak_bytes, format_bytes),
            cells(rank.step_time.median_s, format_seconds),
        )
        lines.add_row(number(str(rank.rank)), *peak[:3], *step[:3])
    if len(found.ranks) > MAX_RANKS:
        lines.add_row(words(f"{len(found.ranks) - MAX_RANKS} more", "dim"))
    return Group(heading("Ranks", "that both runs recorded"), lines)
