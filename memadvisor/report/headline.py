"""The first answer: how much, made of what, at which moment; how long; how well used; what next."""

from __future__ import annotations

from collections.abc import Iterator

from memadvisor.analyzers.analysis import Analysis
from memadvisor.analyzers.model_states import expected_text
from memadvisor.analyzers.out_of_memory import way_on
from memadvisor.category_words import category_name, category_plural
from memadvisor.report.blocks import MEASURED, PREDICTED, Html, kinds_html, split_bar
from memadvisor.report.data_waits import WORTH_CLOSING, wait_in_words
from memadvisor.report.escape import html_text, html_with_code, prose
from memadvisor.report.next_steps import NextStep, next_steps
from memadvisor.report.plan_effect import plan_card
from memadvisor.report.view import RankView
from memadvisor.report.words import PHASE_NAMES, STACK, place_name
from memadvisor.run.records import UNEXPLAINED
from memadvisor.units import format_bytes, format_count, format_fraction, format_seconds


def headline(view: RankView) -> Html:
    """Peak and step, what to do about them, one card more where a plan was applied, and two on how well all is used."""
    steps = "".join(f"<li>{_saves(step)}{html_with_code(step.text)}</li>" for step in next_steps(view))
    return Html(
        f"{cards(_peak(view), _step(view))}{plan_card(view.analysis)}"
        f'<div class="card next"><span class="name">What to do next</span><ol>{steps}</ol></div>'
        f"{cards(_used(view), _kept(view))}"
    )


def cards(*bodies: str) -> str:
    """Cards beside each other, made by `card`."""
    each = "".join(f'<div class="card">{body}</div>' for body in bodies)
    return f'<div class="cards">{each}</div>'


def _saves(step: NextStep) -> str:
    """What a change saves, marked as the prediction that it is."""
    return f"{kinds_html((PREDICTED,))}<b>{html_text(step.saves)}</b>: " if step.saves else ""


def card(name: str, value: str | None, basis: str, body: str, kinds: tuple[str, ...] = (MEASURED,)) -> str:
    absent = " absent" if value is None else ""
    return (
        f'<div class="name">{html_text(name)}</div>'
        f'<div class="value{absent}">{html_text(value or "not recorded")}</div>'
        f'<p>{kinds_html(kinds if value else ())}<span class="basis">{html_with_code(basis)}</span></p>{body}'
    )


def _peak(view: RankView) -> str:
    peak = view.result.peak
    if peak is None:
        return card("Peak memory", None, view.why_untraced, "")
    source = "the allocator's own peak" if peak.is_allocators else "largest sum of storages"
    sizes = {**peak.by_category_bytes, UNEXPLAINED: peak.unexplained_bytes}
    parts = [
        (category_name(name), float(sizes[name]), name.replace("_", "-"), format_bytes(sizes[name]))
        for name in STACK
    ]
    reserved = "" if peak.reserved_bytes is None else f"; {format_bytes(peak.reserved_bytes)} reserved"
    return card(
        "Peak memory",
        format_bytes(peak.allocated_bytes),
        f"in {place_name(peak.position)}; {source}, {view.traced_basis}{reserved}",
        split_bar(parts),
    )


def _step(view: RankView) -> str:
    time = view.result.step_time
    if time is None:
        return card("Step time", None, "No timed step was finished.", "")
    parts = [
        (PHASE_NAMES[phase], spent_s, phase, format_seconds(spent_s))
        for phase, spent_s in time.by_phase_s.items()
    ]
    return card(
        "Step time",
        format_seconds(time.median_s),
        "; ".join((f"{time.basis}{view.of_rank}", *_waiting(view), *_throughput(view))),
        split_bar(parts),
    )


def _waiting(view: RankView) -> Iterator[str]:
    """Where it is worth a reader's first minute."""
    time = view.result.step_time
    said = None if time is None else wait_in_words(time, view.result.data_waits)
    if time is not None and said is not None and (time.data_wait_fraction or 0.0) >= WORTH_CLOSING:
        yield said


def _throughput(view: RankView) -> Iterator[str]:
    """Of all ranks where all recorded it; else of this rank, and says so."""
    time = view.result.step_time
    for what, of_all, own in (
        ("tokens", view.analysis.tokens_per_s, time and time.tokens_per_s),
        ("samples", view.analysis.samples_per_s, time and time.samples_per_s),
    ):
        if of_all is not None:
            yield f"{_rate(of_all)} {what}/s{' over all ranks' if len(view.analysis.ranks) > 1 else ''}"
        elif isinstance(own, float):
            yield f"{_rate(own)} {what}/s on rank {view.result.rank}"


def _rate(per_s: float) -> str:
    return format_count(per_s) if per_s >= 1000 else f"{per_s:.3g}"


def _used(view: RankView) -> str:
    used = view.result.utilization
    flops = ""
    if used.model_flops_per_step is not None:
        needed, ran = (
            format_count(n, "FLOP") for n in (used.model_flops_per_step, used.executed_flops_per_step)
        )
        flops = f'<p class="note">{prose(f"A step needs {needed} and executes {ran} (traced step).")}</p>'
    if used.mfu is None or used.hardware_kind is None:
        return card("Model FLOPs utilization (MFU)", None, _why_no_mfu(view), flops)
    others = ", ".join(
        f"{name} {format_fraction(found.mfu)}"
        for name, found in used.conventions.items()
        if name != used.convention and found.mfu is not None
    )
    others = f" (by others: {others})" if others else ""
    rate = format_count(used.peak_flops_per_s, "FLOP/s")
    return card(
        "Model FLOPs utilization (MFU)",
        format_fraction(used.mfu),
        f"HFU {format_fraction(used.hfu)}; convention {used.convention}{others}; against {rate} in {used.dtype} "
        f"({used.hardware_name}, {used.hardware_kind})",
        flops,
        (MEASURED, used.hardware_kind),
    )


def _why_no_mfu(view: RankView) -> str:
    used = view.result.utilization
    if used.model_flops_per_step is None:
        return view.why_untraced
    if used.step_time_s is None:
        return "No timed step was finished."
    return (
        f"No peak FLOP/s of {used.dtype or 'its dtype'} is known for {view.recorded.process.device_name}: measure it with "
        "`memadvisor calibrate -o hardware.json` and pass `--hardware hardware.json`."
    )


def _kept(view: RankView) -> str:
    kept, states = view.result.activations, view.result.model_states
    if kept is None:
        return card("Kept for the backward", None, view.why_untraced, "")
    lines = "1 unit keeps it" if len(kept.units) == 1 else f"{len(kept.units)} units keep it"
    if kept.moved_bytes:
        lines += f"; {format_bytes(kept.moved_bytes)} of it away on another tier in between"
    if states is not None:
        lines += (
            f". Model states: {format_bytes(states.measured_bytes)} measured, "
            f"{expected_text(states.theory_bytes)} in theory, {format_count(states.num_params)} parameters"
        )
    return card(
        "Kept for the backward",
        format_bytes(kept.saved_bytes),
        f"by autograd, of one micro-batch; {view.traced_basis}",
        f'<p class="note">{prose(lines)}.</p>',
    )


def title_of(analysis: Analysis) -> str:
    """The page's first line: the finding, in words."""
    rank = analysis.largest_rank
    if way_on(analysis.run) is not None:
        event = next(each.out_of_memory[-1] for each in analysis.ranks if each.out_of_memory)
        return f"Out of memory in {place_name(event.position)}"
    if rank.peak is None:
        time = rank.step_time
        return (
            ("No traced step" if analysis.run.ranks[0].steps else "No training step was seen")
            if time is None
            else f"{format_seconds(time.median_s)} a step; memory not recorded"
        )
    category, size_bytes = max(rank.peak.by_category_bytes.items(), key=lambda part: part[1])
    share = format_fraction(size_bytes / rank.peak.allocated_bytes if rank.peak.allocated_bytes else None)
    return (
        f"Peak {format_bytes(rank.peak.allocated_bytes)} in {place_name(rank.peak.position)}; "
        f"{share} of it is {category_plural(category)}"
    )
