"""The sections of `memadvisor diff`, each from the differences to something that rich prints. All figures are measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memadvisor.analyzers.analysis import Analysis
from memadvisor.analyzers.before_after import Change
from memadvisor.analyzers.environment import Setting
from memadvisor.analyzers.run_difference import (
    ModuleChange,
    OperatorChange,
    RankDifference,
    RunDifference,
)
from memadvisor.cli import summary
from memadvisor.cli.tables import heading, name_of, shorten_left, table
from memadvisor.gates import numbered
from memadvisor.report.difference_words import (
    NOT_RECORDED,
    Form,
    ShiftWords,
    setting_text,
    shift_in_words,
    signed,
    spread_in_words,
    texts,
)
from memadvisor.tui.text import number, paragraph, words
from memadvisor.units import format_bytes, format_count, format_fraction, format_seconds

MAX_ROWS, MAX_RANKS, MAX_LONGER, MAX_CALLED = 8, 16, 5, 4
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
        before, after = setting_text(setting.name, setting.before), setting_text(setting.name, setting.after)
        lines.add_row(label, paragraph(before, (" -> ", "bold"), after))
    return Group(heading("What differs", "between the two runs"), lines)


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
    before, after, difference, share = texts(change, form)
    return number(before), number(after), number(difference), number(share)


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
    spread = spread_in_words(time)
    lines = [paragraph((f"  {spread}", "dim"))] if spread else []
    if (told := shift_in_words(time)) is not None:
        lines.append(paragraph("  ", *_styled(told)))
    return Group(section, *lines)


def _styled(told: ShiftWords) -> tuple[tuple[str, str], ...]:
    if not told.about:
        return ((f"{told.said} ", "bold yellow"), (f"({told.test})", "dim"))
    return ((f"{told.said}:", "bold"), (f" {told.about} ", ""), (f"({told.test})", "dim"))


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
    yield "  exposed, of the step", rank.exposed_fraction, format_fraction


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
