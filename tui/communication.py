"""The Communication tab: bytes, time, what hides behind compute, and how the ranks differ."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import DataTable, Static

from memadvisor.analyzers.communication import Communication, OperationBandwidth
from memadvisor.analyzers.skew import RankTimes, Skew
from memadvisor.tui.drawing import stacked_bar
from memadvisor.tui.pane import Pane, why_untraced
from memadvisor.tui.table import Column, Row, refill, row_table
from memadvisor.tui.text import flow, legend, lines, number, paragraph, words
from memadvisor.tui.view import View
from memadvisor.units import format_bytes, format_count, format_fraction, format_seconds

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
_RANKS = (
    Column("rank", is_number=True),
    Column("step", is_number=True),
    Column("compute", is_number=True),
    Column("waits", is_number=True),
    Column("made wait", is_number=True),
    Column("peak", is_number=True),
    Column(""),
)


class CommunicationPane(Pane):
    """Two tables: the traced step's collectives by kind, and the ranks beside each other."""

    def content(self) -> ComposeResult:
        yield Static(id="communication-summary", markup=False)
        yield row_table("communication-operations")
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
        refill(self.query_one("#communication-operations", DataTable), _OPERATIONS, rows)
        skew = view.analysis.skew
        ranks = self.query_one("#communication-ranks", DataTable)
        ranks.display = skew is not None
        self.query_one("#communication-skew", Static).update(_skew_line(skew))
        if skew is not None:
            refill(ranks, _RANKS, [_rank_row(times, skew) for times in skew.ranks])


def _summary(found: Communication, width: int) -> list[Text]:
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


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else format_count(bytes_per_s, "B/s")


def _skew_line(skew: Skew | None) -> Text:
    if skew is None:
        return Text("")
    straggler = (
        "nobody holds the others up"
        if skew.straggler is None
        else f"rank {skew.straggler} makes the others wait most"
    )
    spreads = (
        f"step time {format_fraction(skew.step_time_spread)}, compute {format_fraction(skew.compute_spread)}, "
        f"peak {format_fraction(skew.peak_spread)}"
    )
    return paragraph(("Ranks: ", "bold"), f"{straggler}. Spread: {spreads}")


def _rank_row(times: RankTimes, skew: Skew) -> Row:
    seconds = (times.step_time_s, times.compute_s, times.waiting_s, times.caused_waiting_s)
    return Row(
        key=str(times.rank),
        cells=(
            number(str(times.rank)),
            *(number(format_seconds(s) if s is not None else "-") for s in seconds),
            number(
                format_bytes(times.peak_allocated_bytes) if times.peak_allocated_bytes is not None else "-"
            ),
            words("straggler" if times.rank == skew.straggler else "", "#e5484d"),
        ),
    )
