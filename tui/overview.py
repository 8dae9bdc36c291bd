"""The Overview tab: the peak and its parts, the step's time and its parts, utilization, and how the run stands."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from memadvisor.analyzers.larger_steps import larger_steps
from memadvisor.analyzers.model_states import expected_text
from memadvisor.analyzers.peak import PeakBreakdown
from memadvisor.analyzers.step_time import StepTime
from memadvisor.analyzers.utilization import Utilization
from memadvisor.report.data_waits import waits_in_words
from memadvisor.report.next_steps import own_tensors, slow_parts
from memadvisor.report.view import RankView
from memadvisor.report.words import place_name, ranks_in_words
from memadvisor.run.records import UNEXPLAINED
from memadvisor.tui.drawing import CATEGORY_COLORS, PHASE_COLORS, bar, stacked_bar
from memadvisor.tui.out_of_memory import out_of_memory_rows
from memadvisor.tui.pane import Pane, why_no_step, why_untraced
from memadvisor.tui.text import flow, lines, paragraph
from memadvisor.tui.view import View
from memadvisor.units import format_bytes, format_count, format_fraction, format_seconds

_NAME_WIDTH = 16
_FIGURE_WIDTH = 11


class OverviewPane(Pane):
    """Two columns of text, memory and time; one below the other in a narrow terminal."""

    def content(self) -> ComposeResult:
        yield Static(id="overview-figures", markup=False)
        with VerticalScroll(id="overview-scroll"):
            yield Static(id="overview-memory", markup=False)
            yield Static(id="overview-time", markup=False)

    def missing(self, view: View) -> str | None:
        return None

    def fill(self, view: View) -> None:
        memory = self.query_one("#overview-memory", Static)
        time = self.query_one("#overview-time", Static)
        is_wide = self.size.width >= 120
        self.set_class(is_wide, "wide")
        width = max(40, (self.size.width - 8) // 2 if is_wide else self.size.width - 4)
        self.query_one("#overview-figures", Static).update(lines(flow(_figures(view), self.size.width - 4)))
        memory.update(lines([*out_of_memory_rows(view), *_memory(view, width), *_first(view), *_facts(view)]))
        time.update(
            lines([*_time(view, width), *_utilization(view), Text(""), *_run(view), Text(""), *_script(view)])
        )


def _figures(view: View) -> list[Text]:
    """The run in one row: what most readers came for."""
    result = view.result
    figures = [
        ("peak", None if result.peak is None else format_bytes(result.peak.allocated_bytes)),
        ("step", None if result.step_time is None else format_seconds(result.step_time.median_s)),
        ("MFU", None if result.utilization.mfu is None else format_fraction(result.utilization.mfu)),
    ]
    if view.analysis.tokens_per_s is not None:
        figures.append(("tokens/s", format_count(view.analysis.tokens_per_s)))
    return [
        paragraph((f" {name} ", "bold #10141a on #2ec4a6"), (f" {figure} ", "bold"))
        if figure is not None
        else paragraph((f" {name} ", "#10141a on #5b6675"), (" not recorded ", "dim"))
        for name, figure in figures
    ]


def _memory(view: View, width: int) -> list[Text]:
    peak = view.result.peak
    if peak is None:
        reason = why_untraced(view, beside_failure=True) or ""
        return [paragraph(("Peak memory  not recorded", "bold")), paragraph((reason, "dim")), Text("")]
    source = "by the allocator" if peak.is_allocators else "summed over storages; the allocator kept none"
    rows = [
        paragraph(
            ("Peak memory  ", "bold"), (format_bytes(peak.allocated_bytes), "bold #2ec4a6"), f"  {source}"
        ),
        paragraph(
            (
                f"in {place_name(peak.position)}, step {peak.step}, {format_seconds(peak.time_s)} after its start",
                "dim",
            )
        ),
    ]
    if peak.reserved_bytes is not None:
        rows.append(paragraph(("reserved from the device: " + format_bytes(peak.reserved_bytes), "dim")))
    parts = _parts(peak)
    rows.append(stacked_bar([(size, CATEGORY_COLORS.get(name, "#9aa4b2")) for name, size in parts], width))
    rows += [_part_row(name, size, peak.allocated_bytes, width) for name, size in parts]
    return [*rows, *_model_states(view), Text("")]


def _parts(peak: PeakBreakdown) -> list[tuple[str, int]]:
    """The categories that hold anything, in the charts' order; unexplained always."""
    sizes = {**peak.by_category_bytes, UNEXPLAINED: peak.unexplained_bytes}
    return [(name, sizes[name]) for name in CATEGORY_COLORS if sizes.get(name) or name == UNEXPLAINED]


def _part_row(name: str, size_bytes: int, total_bytes: int, width: int) -> Text:
    share = size_bytes / total_bytes if total_bytes else None
    figures = f"{format_bytes(size_bytes):>{_FIGURE_WIDTH}} {format_fraction(share):>8}  "
    room = width - _NAME_WIDTH - len(figures)
    color = CATEGORY_COLORS.get(name, "")
    return paragraph(
        f"{name.replace('_', ' '):<{_NAME_WIDTH}}", figures, (bar(size_bytes, total_bytes, room), color)
    )


def _model_states(view: View) -> list[Text]:
    states = view.result.model_states
    if states is None:
        return []
    per_parameter = states.bytes_per_parameter
    each = "" if per_parameter is None else f", {per_parameter:.2f} B/parameter"
    return [
        paragraph(
            (f"{'model states':<{_NAME_WIDTH}}", "bold"),
            f"{format_bytes(states.measured_bytes):>{_FIGURE_WIDTH}}, theory "
            f"{expected_text(states.theory_bytes)}{each}",
        )
    ]


def _first(view: View) -> list[Text]:
    """What to change first, in a line each."""
    changes = view.analysis.first_changes(view.result)
    if not changes:
        return []
    title = paragraph(("What saves most", "bold"), ("  predicted, each by itself", "dim"))
    return [
        title,
        *(paragraph((each.saved_in_words, "bold #2ec4a6"), f": {each.in_words}") for each in changes),
        Text(""),
    ]


def _facts(view: View) -> list[Text]:
    """What else makes the peak high or a step long, in the report's words; after a plan the Plan tab says more."""
    if view.run.plan is not None:
        return []
    own = RankView(view.analysis, view.rank, view.result, 0)
    said = [paragraph(each) for each in (*own_tensors(own), *slow_parts(own))]
    return [*said, Text("")] if said else []


def _script(view: View) -> list[Text]:
    """What to change in the script itself."""
    changes = view.result.script_changes
    if not changes:
        return []
    rows = [
        paragraph(("Change in the script", "bold"), ("  in full; predicted, each by itself", "dim")),
    ]
    for change in changes:
        saved = change.saved_in_words
        rows.append(paragraph(*(((saved, "bold #2ec4a6"), ": ") if saved else ()), change.seen))
        rows.append(paragraph((f"  {change.change_in_words}", "dim")))
    return [*rows, Text("")]


def _time(view: View, width: int) -> list[Text]:
    time = view.result.step_time
    if time is None:
        return [
            paragraph(("Step time    not recorded", "bold")),
            paragraph((_why_no_time(view), "dim")),
        ]
    rows = [
        paragraph(
            ("Step time    ", "bold"),
            (format_seconds(time.median_s), "bold #2ec4a6"),
            f"  {time.basis}",
        )
    ]
    phases = [(name, seconds) for name, seconds in time.by_phase_s.items() if seconds > 0]
    rows.append(stacked_bar([(s, PHASE_COLORS.get(name, "#9aa4b2")) for name, s in phases], width))
    for name, seconds in phases:
        figures = (
            f"{format_seconds(seconds):>{_FIGURE_WIDTH}} {format_fraction(seconds / time.median_s):>8}  "
        )
        room = width - _NAME_WIDTH - len(figures)
        block = bar(seconds, time.median_s, room)
        rows.append(paragraph(f"{name:<{_NAME_WIDTH}}", figures, (block, PHASE_COLORS.get(name, ""))))
    return [*rows, *_throughput(view, time)]


def _why_no_time(view: View) -> str:
    if view.rank.steps:
        return "No timed step has ended." if view.has_ended else "No timed step has ended yet."
    return why_no_step(view, beside_failure=True)


def _throughput(view: View, time: StepTime) -> list[Text]:
    rows = [Text("")]
    for waiting in waits_in_words(time, view.result.data_waits):
        rows.append(_fact("data", waiting))
    for name, whole, own in (
        ("tokens", view.analysis.tokens_per_s, time.tokens_per_s),
        ("samples", view.analysis.samples_per_s, time.samples_per_s),
    ):
        if own is not None:
            ranks = f"{_rate(whole)} all ranks, " if whole is not None and len(view.run.ranks) > 1 else ""
            rows.append(_fact(name, f"{ranks}{_rate(own)} this rank"))
    if time.recorder_fraction is not None:
        rows.append(
            _fact(
                "recording", f"{format_fraction(time.recorder_fraction)} of step time in memadvisor's hooks"
            )
        )
    return rows


def _rate(per_s: float) -> str:
    return f"{format_count(float(f'{per_s:.3g}'))}/s"


def _utilization(view: View) -> list[Text]:
    utilization = view.result.utilization
    if utilization.mfu is None:
        rows = [_fact("MFU", f"not recorded: {_why_no_mfu(utilization, view.has_ended)}")]
    else:
        rows = [
            _fact(
                "MFU",
                f"{format_fraction(utilization.mfu)} ({utilization.convention}), "
                f"HFU {format_fraction(utilization.hfu)}, {utilization.dtype} on {utilization.hardware_name} "
                f"({utilization.hardware_kind})",
            )
        ]
    if utilization.model_flops_per_step is not None:
        rows.append(
            _fact(
                "FLOPs a step",
                f"{format_count(utilization.model_flops_per_step)} needed, "
                f"{format_count(utilization.executed_flops_per_step)} executed",
            )
        )
    return rows


def _why_no_mfu(utilization: Utilization, has_ended: bool) -> str:
    if utilization.model_flops_per_step is None:
        return "no traced step counted FLOPs" if has_ended else "FLOPs come with the traced step"
    if utilization.step_time_s is None:
        return "no timed step" if has_ended else "no timed step yet"
    return "no peak FLOP/s known (see `memadvisor calibrate`)"


def _run(view: View) -> list[Text]:
    process = view.rank.process
    rows = [
        _fact("device", f"{process.device_name} ({process.device}) on {process.host}"),
        _fact("state", view.message),
    ]
    if view.run.missing_ranks:
        missing = ranks_in_words(view.run.missing_ranks, most=12)
        rows.append(_fact("missing", f"nothing readable from {missing}", "#e5484d"))
    larger = larger_steps(view.run.ranks)
    if larger is not None:
        rows.append(_fact("larger steps", larger.in_words, "#f2c14e"))
    num_notes = len(view.run.problems) + sum(len(rank.notes) for rank in view.run.ranks)
    if num_notes:
        rows.append(_fact("notes", f"{num_notes}, under Notes"))
    return rows


def _fact(name: str, text: str, style: str = "") -> Text:
    return paragraph((f"{name:<{_NAME_WIDTH}}", "bold"), (text, style))
