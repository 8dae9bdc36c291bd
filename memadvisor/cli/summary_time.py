"""The sections of `memadvisor show` about time: the step, its units, communication, ranks."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from memadvisor.analyzers.activations import Activations, SavedBytes
from memadvisor.analyzers.analysis import Analysis, RankAnalysis
from memadvisor.analyzers.communication import Communication, TrafficShare
from memadvisor.analyzers.step_time import UnitTime
from memadvisor.cli.tables import NOT_RECORDED, grid, heading, name_of, shorten_left, table
from memadvisor.report.data_waits import waits_in_words
from memadvisor.report.ranks import clocks_in_words
from memadvisor.report.times import evaluation_in_words
from memadvisor.run.records import Unit
from memadvisor.run.run import RankRun
from memadvisor.tui.drawing import PHASE_COLORS, bar
from memadvisor.tui.text import number, paragraph, plain, words
from memadvisor.units import counted, format_bytes, format_count, format_fraction, format_seconds

MAX_UNITS, MAX_RANKS, MAX_OPERATIONS = 20, 16, 8


def step_time(analysis: Analysis, rank: RankAnalysis, width: int) -> RenderableType:
    time = rank.step_time
    if time is None:
        return heading("Step time", f"{NOT_RECORDED}: no timed step was finished")
    title = heading(
        "Step time",
        (format_seconds(time.median_s), "bold"),
        f"  {time.basis}",
        f" ({format_seconds(min(time.durations_s))} to {format_seconds(max(time.durations_s))})"
        if time.num_steps > 1
        else "",
    )
    bar_width = max(10, min(50, width - 40))
    lines = grid(4)
    for phase, spent_s in time.by_phase_s.items():
        lines.add_row(
            words(phase),
            number(format_seconds(spent_s)),
            number(format_fraction(spent_s / time.median_s if time.median_s else None)),
            Text(bar(spent_s, time.median_s, bar_width), PHASE_COLORS[phase]),
        )
    fraction = time.recorder_fraction
    facts = [
        f"recorder {NOT_RECORDED if fraction is None else f'{format_fraction(fraction)} of a timed step'}"
    ]
    if time.num_listened_steps < time.num_steps:
        facts.append(
            f"phases and units from the {counted(time.num_listened_steps, 'step')} whose modules were listened to"
        )
    facts += waits_in_words(time, rank.data_waits)
    if evaluations := evaluation_in_words(rank.evaluation):
        facts.append(evaluations)
    if time.traced_step_s is not None:
        facts.append(f"the traced step took {format_seconds(time.traced_step_s)} and counts nowhere")
    facts.insert(0, throughput(analysis, rank))
    return Group(title, lines, paragraph(("  " + "; ".join(facts), "dim")))


def throughput(analysis: Analysis, rank: RankAnalysis) -> str:
    """Of all ranks where all recorded it; else of the one rank, and says so."""
    time = rank.step_time
    for what, total, own in (
        ("tokens", analysis.tokens_per_s, time and time.tokens_per_s),
        ("samples", analysis.samples_per_s, time and time.samples_per_s),
    ):
        if total is not None:
            of_what = " over all ranks" if len(analysis.ranks) > 1 else ""
            return f"{format_count(total)} {what}/s{of_what}"
        if isinstance(own, float):
            return f"{format_count(own)} {what}/s on rank {rank.rank}"
    return f"throughput {NOT_RECORDED}"


def moved_text(kept: Activations) -> str:
    """How much of what autograd keeps a plan had moved; nothing where it is none."""
    return (
        f", {format_bytes(kept.moved_bytes)} of it away on another tier in between"
        if kept.moved_bytes
        else ""
    )


def units(rank: RankAnalysis, recorded: RankRun, width: int) -> RenderableType:
    """One line a unit: what it holds, keeps for the backward, and takes."""
    times = {} if rank.step_time is None else {row.unit: row for row in rank.step_time.units}
    kept = {} if rank.activations is None else {row.name: row for row in rank.activations.units}
    described = {unit.name: unit for unit in recorded.units}
    names = list(dict.fromkeys((*described, *times, *kept)))
    if not names:
        return heading("Units", NOT_RECORDED)
    all_kept = rank.activations
    title = heading(
        "Units",
        f"{len(names)}; kept for the backward of one micro-batch: ",
        (format_bytes(None if all_kept is None else all_kept.saved_bytes), "bold"),
        "" if all_kept is None else moved_text(all_kept),
    )
    label_width = min(max(12, width // 4), max(len(plain(name_of(name))) for name in names))
    recomputes = any(time.recompute_s for time in times.values())
    room = width - label_width - (66 if recomputes else 54)  # beside the figures, as wide as they may get
    has_room = room >= 20
    lines = table("unit", "parameters", "saved", "forward", "backward", *(["recompute"] * recomputes))
    if has_room:
        lines.add_column("saved, by operator", no_wrap=True, overflow="ellipsis", max_width=room)
    for name in names[:MAX_UNITS]:
        cells = _unit_cells(described.get(name), kept.get(name), times.get(name))
        cells = cells if recomputes else cells[:-1]
        label = words(shorten_left(name_of(name), label_width))
        lines.add_row(label, *cells, *((_operators(kept.get(name)),) if has_room else ()))
    more = names[MAX_UNITS:]
    if more:
        rest_bytes = sum(kept[name].saved_bytes for name in more if name in kept)
        lines.add_row(words(f"{len(more)} more", "dim"), words(""), number(format_bytes(rest_bytes)))
    return Group(title, lines)


def _unit_cells(unit: Unit | None, kept: SavedBytes | None, time: UnitTime | None) -> tuple[Text, ...]:
    return (
        number("-" if unit is None else format_bytes(unit.parameter_bytes)),
        number("-" if kept is None else format_bytes(kept.saved_bytes)),
        # Of a unit that was not seen to run (torch.compile makes one graph of all) there is no time, rather than none.
        number("-" if time is None or not time.forward_s else format_seconds(time.forward_s)),
        number("-" if time is None or not time.backward_s else format_seconds(time.backward_s)),
        number("-" if time is None or not time.recompute_s else format_seconds(time.recompute_s)),
    )


def _operators(kept: SavedBytes | None) -> Text:
    if kept is None:
        return words("")
    largest = list(kept.by_operator_bytes.items())[:3]
    return words(
        ", ".join(f"{name.removeprefix('aten::')} {format_bytes(n)}" for name, n in largest if name), "dim"
    )


def communication(rank: RankAnalysis, analysis: Analysis) -> RenderableType:
    traffic = rank.communication
    if traffic is None:
        return heading("Communication", f"{NOT_RECORDED}: {analysis.run.rank(rank.rank).why_untraced}")
    if not traffic.num_calls:
        return heading("Communication", "none in the traced step")
    of_rank = f", rank {rank.rank}" if len(analysis.ranks) > 1 else ""
    title = heading(
        "Communication",
        (format_bytes(traffic.bytes), "bold"),
        f" in {counted(traffic.num_calls, 'operation')} of the traced step{of_rank}; its times carry the tracing's cost",
    )
    facts = paragraph(
        f"  {format_seconds(traffic.time_s)}: exposed {format_seconds(traffic.exposed_s)}, ",
        f"overlapped {format_seconds(traffic.overlapped_s)}; ",
        f"waiting for other ranks {format_seconds(traffic.waiting_s)}, ",
        f"transfer {format_seconds(traffic.transfer_s)}",
        f"; {traffic.num_unfinished} without an end" if traffic.num_unfinished else "",
    )
    lines = table("operation", "message", "ranks", "calls", "time", "algorithm", "bus")
    for row in traffic.operations[:MAX_OPERATIONS]:
        lines.add_row(
            words(row.operation),
            number(format_bytes(row.size_bytes)),
            number(str(row.group_size)),
            number(str(row.num_calls)),
            number(format_seconds(row.duration_s)),
            number(_rate(row.algorithm_bytes_per_s)),
            number(_rate(row.bus_bytes_per_s)),
        )
    if len(traffic.operations) > MAX_OPERATIONS:
        lines.add_row(words(f"{len(traffic.operations) - MAX_OPERATIONS} more", "dim"))
    shares = [_shares(kind, found) for kind, found in _kinds_of(traffic) if len(found) > 1]
    return Group(title, facts, lines, *shares)


def _kinds_of(traffic: Communication) -> tuple[tuple[str, tuple[TrafficShare, ...]], ...]:
    return ("group", traffic.groups), ("unit", traffic.units)


def _shares(kind: str, found: tuple[TrafficShare, ...]) -> RenderableType:
    lines = table(kind, "bytes", "calls", "time", "exposed", "waiting", "transfer")
    for row in found[:MAX_OPERATIONS]:
        lines.add_row(
            words(row.name or ("outside any unit" if kind == "unit" else "unnamed")),
            number(format_bytes(row.bytes)),
            number(str(row.num_calls)),
            number(format_seconds(row.time_s)),
            number(format_seconds(row.exposed_s)),
            number(format_seconds(row.waiting_s)),
            number(format_seconds(row.transfer_s)),
        )
    if len(found) > MAX_OPERATIONS:
        lines.add_row(words(f"{len(found) - MAX_OPERATIONS} more", "dim"))
    return lines


def _rate(bytes_per_s: float | None) -> str:
    return NOT_RECORDED if bytes_per_s is None else f"{format_bytes(bytes_per_s)}/s"


def ranks(analysis: Analysis) -> RenderableType:
    skew = analysis.skew
    assert skew is not None
    straggler = (
        "nobody waits" if skew.straggler is None else f"the others wait most for rank {skew.straggler}"
    )
    if all(row.caused_waiting_s is None for row in skew.ranks):
        straggler = f"who waits for whom is {NOT_RECORDED}"
    title = heading(
        "Ranks",
        f"{straggler}; spread of step time {format_fraction(skew.step_time_spread)}",
        f", compute {format_fraction(skew.compute_spread)}, peak {format_fraction(skew.peak_spread)}",
        "; compute and waits are of the traced step",
    )
    lines = table("rank", "peak", "step", "compute", "waits", "is waited for")
    for row in skew.ranks[:MAX_RANKS]:
        lines.add_row(
            number(str(row.rank)),
            number(format_bytes(row.peak_allocated_bytes)),
            number(format_seconds(row.step_time_s)),
            number(format_seconds(row.compute_s)),
            number(format_seconds(row.waiting_s)),
            number(format_seconds(row.caused_waiting_s)),
        )
    if len(skew.ranks) > MAX_RANKS:
        lines.add_row(words(f"{len(skew.ranks) - MAX_RANKS} more", "dim"))
    clocks = clocks_in_words(skew)
    return Group(title, lines, paragraph(f"  {clocks}")) if clocks else Group(title, lines)
