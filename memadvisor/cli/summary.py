"""The sections of `memadvisor show`, each from the analysis to something that rich prints.

Every word from the user's program goes through memadvisor.tui.text, which never reads markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memadvisor.analyzers.activations import SavedBytes
from memadvisor.analyzers.analysis import Analysis, RankAnalysis
from memadvisor.analyzers.comparison import Compared
from memadvisor.analyzers.model_states import ModelStates, StateComponent
from memadvisor.analyzers.peak import PeakBreakdown
from memadvisor.analyzers.step_time import UnitTime
from memadvisor.analyzers.utilization import Utilization
from memadvisor.run.records import UNEXPLAINED, Unit
from memadvisor.run.run import RankRun, Run
from memadvisor.tui.drawing import CATEGORY_COLORS, PHASE_COLORS, bar, stacked_bar
from memadvisor.tui.text import number, paragraph, plain, words
from memadvisor.units import format_bytes, format_count, format_fraction, format_seconds

MAX_UNITS, MAX_MODULES, MAX_RANKS, MAX_OPERATIONS = 24, 10, 16, 8
_NOT_RECORDED = "not recorded"


def sections(analysis: Analysis, width: int, *, has_color: bool) -> Iterator[RenderableType]:
    """All sections, in the order in which a reader asks; details are of the rank with the highest peak."""
    rank = analysis.largest_rank
    recorded = record_of(rank, analysis)
    yield header(analysis.run)
    yield from trouble(analysis.run)
    if analysis.comparison is not None:
        yield prediction(analysis)
    yield peak(rank, recorded, len(analysis.ranks), width, has_color=has_color)
    if rank.peak is not None:
        yield modules(rank.peak, width)
    yield model_states(rank.model_states)
    yield step_time(analysis, rank, width)
    yield utilization(rank.utilization, recorded)
    yield units(rank, recorded, width)
    yield communication(rank, analysis)
    if analysis.skew is not None:
        yield ranks(analysis)


def record_of(rank: RankAnalysis, analysis: Analysis) -> RankRun:
    return next(r for r in analysis.run.ranks if r.process.rank == rank.rank)


def heading(title: str, *rest: str | tuple[str, str]) -> Text:
    return paragraph((title, "bold"), *((("  "), *rest) if rest else ()))


def name_of(unit: str) -> str:
    """The root module has no name of its own."""
    return unit or "(model)"


def _shorten_left(name: str, width: int) -> str:
    """The end of a dotted name, where modules differ."""
    name = plain(name)
    return name if len(name) <= width else "..." + name[len(name) - width + 3 :]


def header(run: Run) -> RenderableType:
    process = run.ranks[0].process
    num_ranks = run.manifest.world_size
    command = " ".join((run.manifest.script, *run.manifest.arguments))
    traced = run.ranks[0].traced_step
    steps = run.ranks[0].steps
    facts = (
        f"{num_ranks} rank{'s' if num_ranks > 1 else ''} on {process.device_name} ({process.device})",
        f"torch {process.torch_version}",
        f"{len(steps)} step{'' if len(steps) == 1 else 's'}",
        "none traced" if traced is None else f"step {traced.index} traced",
    )
    return Group(paragraph((command, "bold"), "  ", ending(run)), paragraph((" | ".join(facts), "dim")))


def ending(run: Run) -> tuple[str, str]:
    """How the run ended, with the color that fits."""
    endings = [rank.ending for rank in run.ranks]
    failed = next((end for end in endings if end is not None and (end.exit_code or end.exception)), None)
    if failed is not None:
        raised = "" if failed.exception is None else f" ({failed.exception})"
        return f"exit code {failed.exit_code}{raised}", "bold red"
    if not run.is_finished:
        return "no ending: killed, or still running", "bold yellow"
    return "exit code 0", "green"


def trouble(run: Run) -> Iterator[RenderableType]:
    """Missing ranks, damage and what the recorder noted, each on a line."""
    if run.missing_ranks:
        named = ", ".join(str(rank) for rank in run.missing_ranks[:MAX_RANKS])
        more = len(run.missing_ranks) - MAX_RANKS
        yield paragraph(
            ("missing ", "bold yellow"),
            f"rank {named}",
            f" and {more} more" if more > 0 else "",
            ": no record",
        )
    for problem in run.problems:
        yield paragraph(("problem ", "bold yellow"), problem)
    told: dict[tuple[str, str], list[int]] = {}
    for rank in run.ranks:
        for note in rank.notes:
            told.setdefault((note.level, note.text), []).append(rank.process.rank)
    for (level, text), of_ranks in told.items():
        style = {"error": "bold red", "warning": "bold yellow"}.get(level, "bold")
        where = "" if len(of_ranks) == len(run.ranks) else f" (rank {', '.join(map(str, of_ranks))})"
        yield paragraph((f"{level} ", style), text, where)


def peak(
    rank: RankAnalysis, recorded: RankRun, num_ranks: int, width: int, *, has_color: bool
) -> RenderableType:
    found = rank.peak
    if found is None:
        return heading("Peak memory", f"{_NOT_RECORDED}: {why_no_peak(recorded)}")
    source = "the allocator's peak" if found.is_allocators else "summed over storages; no allocator peak"
    of_rank = f", rank {rank.rank}, the largest" if num_ranks > 1 else ""
    title = heading(
        "Peak memory",
        (format_bytes(found.allocated_bytes), "bold"),
        f"  in {found.position} (step {found.step}{of_rank}); {source}",
        "" if found.reserved_bytes is None else f"; {format_bytes(found.reserved_bytes)} reserved",
    )
    parts = peak_parts(found)
    bar_width = max(10, min(50, width - 40))
    table = _grid(4)
    for name, size_bytes in sorted(parts, key=lambda part: (part[0] == UNEXPLAINED, -part[1])):
        color = CATEGORY_COLORS[name]
        table.add_row(
            words(name.replace("_", " ")),
            number(format_bytes(size_bytes)),
            number(format_fraction(size_bytes / found.allocated_bytes if found.allocated_bytes else 0.0)),
            Text(bar(size_bytes, found.allocated_bytes, bar_width), color),
        )
    if not has_color:  # one bar of all parts tells them apart by color alone
        return Group(title, table)
    shares = [(max(0, size), CATEGORY_COLORS[name]) for name, size in parts]
    return Group(title, Text("  ").append_text(stacked_bar(shares, min(width - 4, 100))), table)


def why_no_peak(recorded: RankRun) -> str:
    """The run was cut short, or damaged."""
    if recorded.traced_step is None:
        return "no traced step was finished"
    return "a step was traced, but its storages are missing"


def peak_parts(found: PeakBreakdown) -> list[tuple[str, int]]:
    """Category and bytes, with the unexplained rest last; they sum to the peak."""
    return [*found.by_category_bytes.items(), (UNEXPLAINED, found.unexplained_bytes)]


def modules(found: PeakBreakdown, width: int) -> RenderableType:
    """The modules and units whose bytes fill the peak."""
    sizes: dict[str, dict[str, int]] = {}
    for row in found.by_module:
        categories = sizes.setdefault(row.module or row.unit, {})
        categories[row.category] = categories.get(row.category, 0) + row.size_bytes
    label_width = max(16, width // 3)
    table = _grid(2)
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=max(10, width - label_width - 17))
    largest = sorted(sizes.items(), key=lambda item: -sum(item[1].values()))
    for name, categories in largest[:MAX_MODULES]:
        parts = sorted(categories.items(), key=lambda item: -item[1])
        words_of_parts = ", ".join(f"{c.replace('_', ' ')} {format_bytes(n)}" for c, n in parts[:3] if n)
        label = _shorten_left(name, label_width) if name else "(no module)"
        table.add_row(
            words(label), number(format_bytes(sum(categories.values()))), words(words_of_parts, "dim")
        )
    rest = largest[MAX_MODULES:]
    if rest:
        size_bytes = sum(sum(categories.values()) for _, categories in rest)
        table.add_row(words(f"{len(rest)} more", "dim"), number(format_bytes(size_bytes)), words(""))
    return Group(heading("Largest at the peak", "by module that ran at birth"), table)


def model_states(states: ModelStates | None) -> RenderableType:
    if states is None:
        return heading("Model states", _NOT_RECORDED)
    stages = "/".join(str(stage) for stage in states.zero_stages)
    each = states.bytes_per_parameter
    title = heading(
        "Model states",
        (format_bytes(states.measured_bytes), "bold"),
        f"  of {format_count(states.num_params)} parameters",
        "" if each is None else f", {each:.2f} B each",
        f"; theory: ZeRO stage {stages} on {states.num_ranks} rank{'s' if states.num_ranks > 1 else ''}",
    )
    table = _table("", "dtype", "theory", "measured", "difference")
    for kind, label, measured_bytes in (
        ("parameter", "parameters", states.parameter_bytes),
        ("gradient", "gradients", states.gradient_bytes),
        ("optimizer_state", "optimizer state", states.optimizer_state_bytes),
    ):
        rows = [row for row in states.components if row.kind == kind]
        expected_bytes = sum(row.expected_bytes for row in rows)
        dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
        table.add_row(words(label), words(dtypes), *_theory(expected_bytes, measured_bytes))
        if kind == "optimizer_state":
            for row in rows:
                table.add_row(*_component(row))
    total = _theory(states.expected_bytes, states.measured_bytes)
    table.add_row(words("together", "bold"), words(""), *total)
    return Group(title, table)


def _theory(expected_bytes: int, measured_bytes: int) -> tuple[Text, Text, Text]:
    difference = measured_bytes - expected_bytes
    return (
        number(format_bytes(expected_bytes)),
        number(format_bytes(measured_bytes)),
        number("exact" if difference == 0 else ("+" if difference > 0 else "") + format_bytes(difference)),
    )


def _component(row: StateComponent) -> tuple[Text, ...]:
    recorded = row.recorded_bytes or 0
    figures = _theory(row.expected_bytes, recorded)
    return words(f"  {row.component}", "dim"), words(row.dtype, "dim"), *figures


def step_time(analysis: Analysis, rank: RankAnalysis, width: int) -> RenderableType:
    time = rank.step_time
    if time is None:
        return heading("Step time", f"{_NOT_RECORDED}: no timed step was finished")
    title = heading(
        "Step time",
        (format_seconds(time.median_s), "bold"),
        f"  median of {time.num_steps} steady step{'' if time.num_steps == 1 else 's'}",
        f" ({format_seconds(min(time.durations_s))} to {format_seconds(max(time.durations_s))})",
    )
    bar_width = max(10, min(50, width - 40))
    table = _grid(4)
    for phase, spent_s in time.by_phase_s.items():
        table.add_row(
            words(phase),
            number(format_seconds(spent_s)),
            number(format_fraction(spent_s / time.median_s if time.median_s else None)),
            Text(bar(spent_s, time.median_s, bar_width), PHASE_COLORS[phase]),
        )
    facts = [f"recorder {format_fraction(time.recorder_fraction)} of a timed step"]
    if time.traced_step_s is not None:
        facts.append(f"the traced step took {format_seconds(time.traced_step_s)} and counts nowhere")
    facts.insert(0, throughput(analysis, rank))
    return Group(title, table, paragraph(("  " + "; ".join(facts), "dim")))


def throughput(analysis: Analysis, rank: RankAnalysis) -> str:
    """Of all ranks where all recorded it; else of the one rank, and says so."""
    time = rank.step_time
    for what, total, own in (
        ("tokens", analysis.tokens_per_s, time and time.tokens_per_s),
        ("samples", analysis.samples_per_s, time and time.samples_per_s),
    ):
        if total is not None:
            return f"{format_count(total)} {what}/s over all ranks"
        if isinstance(own, float):
            return f"{format_count(own)} {what}/s on rank {rank.rank}"
    return f"throughput {_NOT_RECORDED}"


def utilization(used: Utilization, recorded: RankRun) -> RenderableType:
    if used.model_flops_per_step is None:
        return heading("Utilization", f"FLOPs {_NOT_RECORDED}: no traced step was finished")
    flops = (
        f"{format_count(used.model_flops_per_step, 'FLOP')} a step needed, "
        f"{format_count(used.executed_flops_per_step, 'FLOP')} executed"
    )
    if used.mfu is None:
        hint = "pass --peak-tflops, or --hardware from `memadvisor calibrate`"
        why = (
            f"no peak FLOP/s of {used.dtype or 'its dtype'} known for {recorded.process.device_name}; {hint}"
        )
        if used.step_time_s is None:
            why = "no timed step was finished"
        return Group(heading("Utilization", f"MFU {_NOT_RECORDED}: {why}"), paragraph(("  " + flops, "dim")))
    title = heading(
        "Utilization",
        (f"MFU {format_fraction(used.mfu)}", "bold"),
        f"  HFU {format_fraction(used.hfu)}",
        f"  convention {used.convention}",
        "" if used.mfu_palm is None else f" (palm, 6N+12LHQT: {format_fraction(used.mfu_palm)})",
    )
    peak_rate = format_count(used.peak_flops_per_s, "FLOP/s")
    against = f"  {flops}; against {peak_rate} in {used.dtype} ({used.hardware_name}, {used.hardware_kind})"
    return Group(title, paragraph((against, "dim")))


def units(rank: RankAnalysis, recorded: RankRun, width: int) -> RenderableType:
    """One line a unit: what it holds, keeps for the backward, and takes."""
    times = {} if rank.step_time is None else {row.unit: row for row in rank.step_time.units}
    kept = {} if rank.activations is None else {row.name: row for row in rank.activations.units}
    described = {unit.name: unit for unit in recorded.units}
    names = list(dict.fromkeys((*described, *times, *kept)))
    if not names:
        return heading("Units", _NOT_RECORDED)
    saved_bytes = None if rank.activations is None else rank.activations.saved_bytes
    title = heading(
        "Units",
        f"{len(names)}; kept for the backward of one micro-batch: ",
        (format_bytes(saved_bytes), "bold"),
    )
    label_width = min(max(12, width // 4), max(len(plain(name_of(name))) for name in names))
    recomputes = any(time.recompute_s for time in times.values())
    room = width - label_width - (66 if recomputes else 54)  # beside the figures, as wide as they may get
    has_room = room >= 20
    table = _table("unit", "parameters", "saved", "forward", "backward", *(["recompute"] * recomputes))
    if has_room:
        table.add_column("saved, by operator", no_wrap=True, overflow="ellipsis", max_width=room)
    for name in names[:MAX_UNITS]:
        cells = _unit_cells(described.get(name), kept.get(name), times.get(name))
        cells = cells if recomputes else cells[:-1]
        label = words(_shorten_left(name_of(name), label_width))
        table.add_row(label, *cells, *((_operators(kept.get(name)),) if has_room else ()))
    more = names[MAX_UNITS:]
    if more:
        rest_bytes = sum(kept[name].saved_bytes for name in more if name in kept)
        table.add_row(words(f"{len(more)} more", "dim"), words(""), number(format_bytes(rest_bytes)))
    return Group(title, table)


def _unit_cells(unit: Unit | None, kept: SavedBytes | None, time: UnitTime | None) -> tuple[Text, ...]:
    return (
        number("-" if unit is None else format_bytes(unit.parameter_bytes)),
        number("-" if kept is None else format_bytes(kept.saved_bytes)),
        number("-" if time is None else format_seconds(time.forward_s)),
        number("-" if time is None else format_seconds(time.backward_s)),
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
        return heading("Communication", f"{_NOT_RECORDED}: no traced step was finished")
    if not traffic.num_calls:
        return heading("Communication", "none in the traced step")
    of_rank = f", rank {rank.rank}" if len(analysis.ranks) > 1 else ""
    title = heading(
        "Communication",
        (format_bytes(traffic.bytes), "bold"),
        f" in {traffic.num_calls} operations of the traced step{of_rank}; its times carry the tracing's cost",
    )
    facts = paragraph(
        f"  {format_seconds(traffic.time_s)}: exposed {format_seconds(traffic.exposed_s)}, ",
        f"overlapped {format_seconds(traffic.overlapped_s)}; ",
        f"waiting for other ranks {format_seconds(traffic.waiting_s)}",
        f"; {traffic.num_unfinished} without an end" if traffic.num_unfinished else "",
    )
    table = _table("operation", "message", "ranks", "calls", "time", "algorithm", "bus")
    for row in traffic.operations[:MAX_OPERATIONS]:
        table.add_row(
            words(row.operation),
            number(format_bytes(row.size_bytes)),
            number(str(row.group_size)),
            number(str(row.num_calls)),
            number(format_seconds(row.duration_s)),
            number(_rate(row.algorithm_bytes_per_s)),
            number(_rate(row.bus_bytes_per_s)),
        )
    if len(traffic.operations) > MAX_OPERATIONS:
        table.add_row(words(f"{len(traffic.operations) - MAX_OPERATIONS} more", "dim"))
    return Group(title, facts, table)


def _rate(bytes_per_s: float | None) -> str:
    return _NOT_RECORDED if bytes_per_s is None else f"{format_bytes(bytes_per_s)}/s"


def ranks(analysis: Analysis) -> RenderableType:
    skew = analysis.skew
    assert skew is not None
    straggler = (
        "nobody waits" if skew.straggler is None else f"the others wait most for rank {skew.straggler}"
    )
    if all(row.caused_waiting_s is None for row in skew.ranks):
        straggler = f"who waits for whom is {_NOT_RECORDED}"
    title = heading(
        "Ranks",
        f"{straggler}; spread of step time {format_fraction(skew.step_time_spread)}",
        f", compute {format_fraction(skew.compute_spread)}, peak {format_fraction(skew.peak_spread)}",
    )
    table = _table("rank", "peak", "step", "compute", "waits", "is waited for")
    for row in skew.ranks[:MAX_RANKS]:
        table.add_row(
            number(str(row.rank)),
            number(format_bytes(row.peak_allocated_bytes)),
            number(format_seconds(row.step_time_s)),
            number(format_seconds(row.compute_s)),
            number(format_seconds(row.waiting_s)),
            number(format_seconds(row.caused_waiting_s)),
        )
    if len(skew.ranks) > MAX_RANKS:
        table.add_row(words(f"{len(skew.ranks) - MAX_RANKS} more", "dim"))
    return Group(title, table)


def prediction(analysis: Analysis) -> RenderableType:
    compared = analysis.comparison
    assert compared is not None
    title = heading("Prediction", "the plan's figures beside this run's, of the largest and slowest rank")
    table = _table("", "predicted", "measured", "error")
    table.add_row(words("peak", "bold"), *_compared(compared.peak_bytes, in_bytes=True))
    table.add_row(words("step time", "bold"), *_compared(compared.step_time_s, in_bytes=False))
    for name, pair in compared.by_category_bytes.items():
        table.add_row(words("  " + name.replace("_", " "), "dim"), *_compared(pair, in_bytes=True))
    return Group(title, table, *_budget(analysis))


def _budget(analysis: Analysis) -> Sequence[RenderableType]:
    compared = analysis.comparison
    if compared is None or compared.budget_bytes is None or compared.within_budget is None:
        return ()
    budget = format_bytes(compared.budget_bytes)
    if compared.within_budget:
        return (paragraph(f"  the budget of {budget} ", ("held", "bold green")),)
    return (paragraph(f"  the budget of {budget} ", ("did not hold", "bold red")),)


def _compared(pair: Compared, *, in_bytes: bool) -> tuple[Text, Text, Text]:
    form = format_bytes if in_bytes else format_seconds
    return (
        number("-" if pair.predicted is None else form(pair.predicted)),
        number(form(pair.measured)),
        number(error_in_words(pair)),
    )


def error_in_words(pair: Compared) -> str:
    """`+1.9 %`: predicted above measured."""
    return "-" if pair.error_fraction is None else f"{100 * pair.error_fraction:+.1f} %"


def _grid(num_columns: int) -> Table:
    """Columns without a head, indented."""
    table = Table(box=None, show_header=False, pad_edge=True, padding=(0, 1, 0, 1))
    for _ in range(num_columns):
        table.add_column(no_wrap=True, overflow="ellipsis")
    return table


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=True, padding=(0, 1, 0, 1), header_style="dim")
    for position, head in enumerate(heads):
        is_text = position == 0 or head == "dtype"
        table.add_column(head, no_wrap=True, overflow="ellipsis", justify="left" if is_text else "right")
    return table
