"""Communication: what moved when beside the compute, how fast, and who waited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memadvisor.analyzers.communication import Communication, TrafficShare, compute_intervals
from memadvisor.analyzers.matching import Matched
from memadvisor.analyzers.sides import Key, key_of, started_s, traced_collectives
from memadvisor.report.blocks import MEASURED, Block, Figure, Html, Missing, kinds_html, split_bar, table
from memadvisor.report.downsample import merged
from memadvisor.report.escape import html_text, prose
from memadvisor.report.lanes import bars, phase_bands, time_axis
from memadvisor.report.view import RankView
from memadvisor.report.words import seconds_scale
from memadvisor.run.records import Collective
from memadvisor.units import counted, format_bytes, format_seconds

MAX_OPERATIONS = 40
TITLE = "Compute and collectives"


def communication_lanes(view: RankView, matched: Mapping[Key, Matched]) -> Block:
    """A lane of compute, and below it as many lanes as collectives were in flight at once."""
    traffic = view.result.communication
    if traffic is None:
        return Missing(name="lanes", title=TITLE, why=view.why_untraced)
    if not traffic.num_calls:
        return Missing(name="lanes", title=TITLE, why=_why_none(view), absence="None.")
    calls = [
        _draw(view, call, matched) for call in traced_collectives(view.recorded) if call.end_s is not None
    ]
    calls.sort(key=lambda call: call.start_s - call.end_s)
    shown = sorted(calls[: 3 * view.detail], key=lambda call: call.start_s)
    lanes = _lanes(shown)
    factor, unit = seconds_scale([view.step.duration_s])
    num_lanes = 1 + max(lanes, default=0)
    is_cpu = view.recorded.process.device == "cpu"
    return Figure(
        name="lanes",
        title=TITLE,
        kinds=(MEASURED,),
        basis=view.traced_basis,
        label=f"{traffic.num_calls} collectives beside the compute: exposed {format_seconds(traffic.exposed_s)}, "
        f"overlapped {format_seconds(traffic.overlapped_s)}.",
        traces=[_compute(view, factor), *_bars(shown, lanes, factor)],
        layout={
            "xaxis": time_axis(view, factor, unit),
            "yaxis": {
                "tickvals": list(range(num_lanes)),
                "ticktext": [
                    "compute" if is_cpu else "launches",
                    "collectives",
                    *[""] * (num_lanes - 2),  # those under way at the same time
                ][:num_lanes],
                "range": [num_lanes - 0.5, -0.5],
                "showgrid": False,
                "zeroline": False,
            },
            "barmode": "overlay",
            "hovermode": "closest",
            "uniformtext": {"minsize": 9, "mode": "hide"},
            "shapes": phase_bands(view, factor),
        },
        height_px=min(700, 130 + 46 * num_lanes),
        note="A collective is drawn from its issue on this rank to its completion; the pale part is the wait for the "
        "last rank to start it. A traced step's times carry the tracing's own cost."
        + ("" if is_cpu else " Of operators it is the launch that is drawn: the device runs them later.")
        + (f" The {len(shown)} longest of {len(calls)} are drawn." if len(shown) < len(calls) else "")
        + (f" {traffic.num_unfinished} had no recorded end." if traffic.num_unfinished else ""),
    )


def _why_none(view: RankView) -> str:
    """No collective is a finding, not a gap, and says so."""
    world_size = view.analysis.run.manifest.world_size
    one = " The run has one rank." if world_size == 1 else ""
    return f"The traced step ran no collective.{one}"


@dataclass(frozen=True, slots=True)
class _Call:
    start_s: float  # these three since the traced step began
    last_start_s: float | None  # None: another rank's record is missing
    end_s: float
    hover: str
    name: str


def _draw(view: RankView, call: Collective, matched: Mapping[Key, Matched]) -> _Call:
    assert call.end_s is not None
    start_s = started_s(call) - view.step.start_s
    match = matched.get(key_of(call, view.result.rank))
    waited_s = None
    if match is not None:
        waited_s = min(
            max(0.0, match.last_start_s - match.issue_s[view.result.rank]), call.end_s - started_s(call)
        )
    waiting = (
        "wait not recorded"
        if waited_s is None
        else f"of which {format_seconds(waited_s)} wait for the last rank"
    )
    return _Call(
        start_s=start_s,
        last_start_s=None if waited_s is None else start_s + waited_s,
        end_s=call.end_s - view.step.start_s,
        hover=f"{call.operation} #{call.sequence} of group {call.group}, {format_bytes(call.size_bytes)} {call.dtype}: "
        f"{format_seconds(call.end_s - started_s(call))}, {waiting}",
        name=call.operation,
    )


def _lanes(calls: Sequence[_Call]) -> list[int]:
    """The first free lane for each call, from 1, in order of start."""
    free_s: list[float] = []
    lanes = []
    for call in calls:
        lane = next((lane for lane, free in enumerate(free_s) if free <= call.start_s), len(free_s))
        if lane == len(free_s):
            free_s.append(0.0)
        free_s[lane] = call.end_s
        lanes.append(lane + 1)
    return lanes


def _compute(view: RankView, factor: float) -> dict[str, Any]:
    start_s = view.step.start_s
    # Gaps narrower than a third of a pixel on a wide screen would only make the file larger.
    busy = merged(compute_intervals(view.recorded), view.step.duration_s / 4000)
    return bars(
        [(start - start_s, end - start_s) for start, end in busy],
        rows=[0.0] * len(busy),
        heights=[0.7] * len(busy),
        factor=factor,
        colors="var(--dim)",
        hovers=[f"operators for {format_seconds(end - start)}" for start, end in busy],
        more={"name": "compute", "marker": {"color": "var(--dim)", "line": {"width": 0}}},
    )


def _bars(calls: Sequence[_Call], lanes: Sequence[int], factor: float) -> list[dict[str, Any]]:
    placed = list(zip(calls, lanes, strict=True))
    matched = [(call, lane, call.last_start_s) for call, lane in placed if call.last_start_s is not None]
    waits = [(call, lane, (call.start_s, middle_s)) for call, lane, middle_s in matched]
    moves = [(call, lane, (middle_s, call.end_s)) for call, lane, middle_s in matched]
    unknown = [(call, lane, (call.start_s, call.end_s)) for call, lane in placed if call.last_start_s is None]
    traces = []
    for name, color, drawn in (
        ("waiting for the last rank", "var(--wait)", waits),
        ("collective", "var(--communication)", moves),
        ("collective, wait not recorded", "var(--communication)", unknown),
    ):
        trace = bars(
            [stretch for _, _, stretch in drawn],
            rows=[float(lane) for _, lane, _ in drawn],
            heights=[0.7] * len(drawn),
            factor=factor,
            colors=color,
            texts=[] if drawn is waits else [call.name for call, _, _ in drawn],
            hovers=[call.hover for call, _, _ in drawn],
            more={"name": name},
        )
        if drawn is unknown:
            trace["marker"]["pattern"] = {"shape": "/", "fillmode": "overlay", "fgcolor": "var(--card)"}
        if drawn:
            traces.append(trace)
    return traces


def traffic_summary(view: RankView) -> Block | None:
    """Exposed and overlapped time as one bar, waiting beside it."""
    traffic = view.result.communication
    if traffic is None or not traffic.num_calls:
        return None
    title = (
        "Communication" if traffic.time_s is None else f"{format_seconds(traffic.time_s)} of communication"
    )
    moved = f"{format_bytes(traffic.bytes)} in {counted(traffic.num_calls, 'call')}."
    return Html(
        f'<div class="card"><figcaption><h3>{html_text(title)}</h3>'
        f"{kinds_html((MEASURED,), view.traced_basis)}</figcaption>{_exposed_bar(traffic)}"
        f'<p class="note">{prose(f"{moved} {_waiting(traffic)}")}</p></div>'
    )


def _exposed_bar(traffic: Communication) -> str:
    if traffic.exposed_s is None or traffic.overlapped_s is None:
        why = (
            "no collective's end was seen" if traffic.time_s is None else "an operator's record is its launch"
        )
        return f"<p>Exposed and overlapped: not recorded, as {html_text(why)}.</p>"
    parts = (
        ("exposed", traffic.exposed_s, "exposed", format_seconds(traffic.exposed_s)),
        ("overlapped with compute", traffic.overlapped_s, "overlapped", format_seconds(traffic.overlapped_s)),
    )
    return split_bar(parts)


def _waiting(traffic: Communication) -> str:
    if traffic.waiting_s is None:
        return "Waiting for other ranks: not recorded, as another rank's record is missing."
    return f"Of this, {format_seconds(traffic.waiting_s)} was spent waiting for other ranks to start."


def bandwidth_table(view: RankView) -> Block | None:
    traffic = view.result.communication
    if traffic is None or not traffic.operations:
        return None
    more = len(traffic.operations) - MAX_OPERATIONS
    return table(
        "Bandwidth",
        ("operation", "message", "ranks", "calls", "time", "algorithm bandwidth", "bus bandwidth"),
        (
            (
                row.operation,
                format_bytes(row.size_bytes),
                str(row.group_size),
                str(row.num_calls),
                format_seconds(row.duration_s),
                _rate(row.algorithm_bytes_per_s),
                _rate(row.bus_bytes_per_s),
            )
            for row in traffic.operations[:MAX_OPERATIONS]
        ),
        kinds=(MEASURED,),
        basis=view.traced_basis,
        note="Time is the median from the last rank's start to the end. Bus bandwidth is the algorithm's times "
        "2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter and all_to_all (nccl-tests, "
        "PERFORMANCE.md). Collectives in flight together share the link, so these are lower bounds."
        + (f" {more} further kinds are left out." if more > 0 else ""),
    )


def group_table(view: RankView) -> Block | None:
    """By process group, where there are several."""
    traffic = view.result.communication
    return _share_table(view, "group", "By process group", () if traffic is None else traffic.groups)


def unit_table(view: RankView) -> Block | None:
    """By the unit that communicated, where there are several."""
    traffic = view.result.communication
    return _share_table(view, "unit", "By unit", () if traffic is None else traffic.units)


def _share_table(view: RankView, kind: str, title: str, found: Sequence[TrafficShare]) -> Block | None:
    if len(found) < 2:
        return None
    more = len(found) - MAX_OPERATIONS
    return table(
        title,
        (kind, "bytes", "calls", "time", "exposed", "waiting", "transfer"),
        (
            (
                row.name or ("outside any unit" if kind == "unit" else "unnamed"),
                format_bytes(row.bytes),
                str(row.num_calls),
                format_seconds(row.time_s),
                format_seconds(row.exposed_s),
                format_seconds(row.waiting_s),
                format_seconds(row.transfer_s),
            )
            for row in found[:MAX_OPERATIONS]
        ),
        kinds=(MEASURED,),
        basis=view.traced_basis,
        note="Waiting is for the last rank to start, transfer what comes after. What is in flight together counts "
        "in each row." + (f" {more} further rows are left out." if more > 0 else ""),
    )


def _rate(bytes_per_s: float | None) -> str:
    return "not recorded" if bytes_per_s is None else f"{format_bytes(bytes_per_s)}/s"
