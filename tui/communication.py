"""The Communication tab: bytes, time, what hides behind compute, by group and unit, and how the ranks differ."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import DataTable, Static

from memadvisor.analyzers.clocks import RankClock
from memadvisor.analyzers.communication import Communication, OperationBandwidth, TrafficShare
from memadvisor.analyzers.skew import RankTimes, Skew
from memadvisor.report.ranks import clocks_in_words, verdict
from memadvisor.tui.drawing import stacked_bar
from memadvisor.tui.pane import Pane, why_untraced
from memadvisor.tui.table import Column, Row, refill, row_table
from memadvisor.tui.text import flow, legend, lines, number, paragraph, words
from memadvisor.tui.view import View
from memadvisor.units import format_bytes, format_fraction, format_seconds

_EXPOSED, _OVERLAPPED = "#e5484d", "#2ec4a6"
_OPERATIONS = (
    Column("operation"),
    Column("bytes", is_number=True),
    Column("ranks", is_number=True),
    Column("calls", is_number=True),
    Column("median", is_number=True),
    Column("algorithm", is_number=True),
    Column("bus", is_number=True),
)
_SHARE = tuple(
    Column(title, is_number=True) for title in ("bytes", "calls", "time", "exposed", "waiting", "transfer")
)
_RANKS = (
    Column("rank", is_number=True),
    Column("step", is_number=True),
    Column("compute", is_number=True),
    Column("waits", is_number=True),
    Column("made wait", is_number=True),
    Column("peak", is_number=True),
    Column("clock", is_number=True),
    Column(""),
)


class CommunicationPane(Pane):
    """Tables: the traced step's collectives by kind, by group and by unit, and the ranks beside each other.

    What there is one of alone, a group or a unit, has no table: its figures are the summary's.
    """

    def content(self) -> ComposeResult:
        yield Static(id="communication-summary", markup=False)
        yield row_table("communication-operations")
        yield row_table("communication-groups")
        yield row_table("communication-units")
        yield Static(id="communication-skew", markup=False)
        yield row_table("communication-ranks")

    def missing(self, view: View) -> str | None:
        if view.result.communication is None:
            return why_untraced(view) or "Collectives were not recorded in the traced step."
        if view.result.communication.num_calls == 0 and view.analysis.skew is None:
            return "This rank communicated with nobody: no collective ran in the traced step."
        return None

    def fill(self, view: View) -> None:
        found = view.result.communication
        if found is None:
            return
        width = max(20, self.size.width - 4)
        self.query_one("#communication-summary", Static).update(lines(_summary(found, width)))
        rows = [_operation_row(i, operation) for i, operation in enumerate(found.operations)]
        operations = self.query_one("#communication-operations", DataTable)
        operations.display = bool(rows)
        refill(operations, _OPERATIONS, rows)
        self._fill_shares("groups", Column("group"), [_share_row(row, "unnamed") for row in found.groups])
        self._fill_shares(
            "units", Column("unit"), [_share_row(row, "outside any unit") for row in found.units]
        )
        skew = view.analysis.skew
        ranks = self.query_one("#communication-ranks", DataTable)
        ranks.display = skew is not None
        self.query_one("#communication-skew", Static).update(_skew_line(skew))
        if skew is not None:
            clocks = {clock.rank: clock for clock in skew.clocks}
            rows = [_rank_row(times, skew, _clock(clocks.get(times.rank), skew)) for times in skew.ranks]
            refill(ranks, _RANKS, rows)

    def _fill_shares(self, name: str, first: Column, rows: list[Row]) -> None:
        table = self.query_one(f"#communication-{name}", DataTable)
        table.display = len(rows) > 1
        refill(table, (first, *_SHARE), rows)


def _summary(found: Communication, width: int) -> list[Text]:
    if found.num_calls == 0:
        return [paragraph("No collective ran in the traced step: this rank communicated with nobody.")]
    unfinished = f", {found.num_unfinished} never seen to end" if found.num_unfinished else ""
    rows = [
        paragraph(
            (format_bytes(found.bytes), "bold #2ec4a6"),
            f" in {found.num_calls} collectives of the traced step{unfinished}",
        ),
        *flow(
            [
                paragraph(f"{format_seconds(found.time_s)} in all:"),
                *legend(
                    [
                        ("exposed", _EXPOSED, format_seconds(found.exposed_s)),
                        ("behind compute", _OVERLAPPED, format_seconds(found.overlapped_s)),
                    ]
                ),
                paragraph(f"waiting for others {format_seconds(found.waiting_s)}"),
            ],
            width,
        ),
    ]
    if found.time_s and found.exposed_s is not None and found.overlapped_s is not None:
        rows.append(stacked_bar([(found.exposed_s, _EXPOSED), (found.overlapped_s, _OVERLAPPED)], width))
    return rows


def _operation_row(position: int, row: OperationBandwidth) -> Row:
    return Row(
        key=str(position),
        cells=(
            words(row.operation),
            number(format_bytes(row.size_bytes)),
            number(str(row.group_size)),
            number(str(row.num_calls)),
            number(format_seconds(row.duration_s) if row.duration_s is not None else "-"),
            number(_rate(row.algorithm_bytes_per_s)),
            number(_rate(row.bus_bytes_per_s)),
        ),
    )


def _share_row(row: TrafficShare, without_name: str) -> Row:
    seconds = (row.time_s, row.exposed_s, row.waiting_s, row.transfer_s)
    return Row(
        key=row.name,
        cells=(
            words(row.name or without_name),
            number(format_bytes(row.bytes)),
            number(str(row.num_calls)),
            *(number(format_seconds(s) if s is not None else "-") for s in seconds),
        ),
    )


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{format_bytes(bytes_per_s)}/s"


def _skew_line(skew: Skew | None) -> Text:
    if skew is None:
        return Text("")
    spreads = (
        f"step time {format_fraction(skew.step_time_spread)}, compute {format_fraction(skew.compute_spread)}, "
        f"peak {format_fraction(skew.peak_spread)}"
    )
    clocks = clocks_in_words(skew)
    return paragraph(
        ("Ranks: ", "bold"),
        f"{verdict(skew)} Spread: {spreads}. Compute and waits are of the traced step"
        + (f". {clocks}" if clocks else ""),
    )


def _clock(clock: RankClock | None, skew: Skew) -> Text:
    """The first rank's is the reference; another is shared with it, or so far ahead of it."""
    if clock is None:
        return number("-")
    if clock is skew.clocks[0]:
        return number("reference")
    if clock.contradicted:
        return number("contradicted", "#e5484d")
    if clock.source == "shared":
        return number("shared")
    ahead = f"{'+' if clock.offset_s >= 0 else ''}{format_seconds(clock.offset_s)}"
    if clock.uncertainty_s is None:
        return number(f"{ahead} by wall clock" if clock.source == "wall clocks" else ahead)
    return number(f"{ahead} ± {format_seconds(clock.uncertainty_s)}")


def _rank_row(times: RankTimes, skew: Skew, clock: Text) -> Row:
    seconds = (times.step_time_s, times.compute_s, times.waiting_s, times.caused_waiting_s)
    return Row(
        key=str(times.rank),
        cells=(
            number(str(times.rank)),
            *(number(format_seconds(s) if s is not None else "-") for s in seconds),
            number(
                format_bytes(times.peak_allocated_bytes) if times.peak_allocated_bytes is not None else "-"
            ),
            clock,
            words("straggler" if times.rank == skew.straggler else "", "#e5484d"),
        ),
    )
