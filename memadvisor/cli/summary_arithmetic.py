"""The sections of `memadvisor show` about arithmetic: utilization in a convention, roofline, operators."""

from __future__ import annotations

from rich.console import Group, RenderableType

from memadvisor.analyzers.operators import OperatorTable
from memadvisor.analyzers.roofline import Roofline
from memadvisor.analyzers.utilization import Utilization
from memadvisor.cli.tables import NOT_RECORDED, heading, name_of, shorten_left, table
from memadvisor.run.run import RankRun
from memadvisor.tui.text import number, paragraph, words
from memadvisor.units import format_bytes, format_count, format_fraction, format_seconds

MAX_POINTS, MAX_OPERATORS = 8, 4

_WORDS = {
    "exact": "",
    "palm": " (6N + 12LHQT a token, N all parameters)",
    "torchtitan": " (6N active without look-up tables, attention's full square)",
    "megatron": " (products without router, attention halved)",
}


def utilization(used: Utilization, recorded: RankRun, convention: str) -> RenderableType:
    """MFU in one convention, HFU, and what the other conventions say."""
    if used.model_flops_per_step is None:
        return heading("Utilization", f"FLOPs {NOT_RECORDED}: {recorded.why_untraced}")
    chosen = used.conventions[convention]
    flops = (
        f"{_needed(chosen.flops_per_step, convention)}, "
        f"{format_count(used.executed_flops_per_step, 'FLOP')} executed"
    )
    others = _others(used, convention)
    if chosen.mfu is None:
        why = chosen.reason and f"convention {convention}: {chosen.reason}"
        title = heading("Utilization", f"MFU {NOT_RECORDED}: {why or _why_no_peak(used, recorded)}")
        return Group(title, paragraph((f"  {flops}{others}", "dim")))
    title = heading(
        "Utilization",
        (f"MFU {format_fraction(chosen.mfu)}", "bold"),
        f"  HFU {format_fraction(used.hfu)}",
        f"  convention {convention}{_WORDS[convention]}",
    )
    peak_rate = format_count(used.peak_flops_per_s, "FLOP/s")
    against = f"against {peak_rate} in {used.dtype} ({used.hardware_name}, {used.hardware_kind})"
    return Group(title, paragraph((f"  {flops}; {against}{others}", "dim")))


def _needed(flops: int | None, convention: str) -> str:
    counted = "needed" if convention == "exact" else f"by {convention}"
    return f"{format_count(flops, 'FLOP')} a step {counted}"


def _others(used: Utilization, convention: str) -> str:
    """MFU of the other conventions where it is known, else their FLOPs; nothing where none knows the model."""
    known = [
        f"{name} {format_count(found.flops_per_step, 'FLOP') if found.mfu is None else format_fraction(found.mfu)}"
        for name, found in used.conventions.items()
        if name != convention and found.flops_per_step is not None
    ]
    return f"; in other conventions: {', '.join(known)}" if known else ""


def _why_no_peak(used: Utilization, recorded: RankRun) -> str:
    if used.step_time_s is None:
        return "no timed step was finished"
    hint = "pass --peak-tflops, or --hardware from `memadvisor calibrate`"
    return f"no peak FLOP/s of {used.dtype or 'its dtype'} known for {recorded.process.device_name}; {hint}"


def roofline(found: Roofline, width: int) -> RenderableType:
    """The heaviest units: where they stand, and what they wait for."""
    title = heading(
        "Roofline",
        f"ridge at {_short(found.ridge_flops_per_byte)} FLOP/byte: ",
        f"{format_count(found.peak_flops_per_s, 'FLOP/s')}, ",
        f"{format_bytes(found.memory_bandwidth_bytes_per_s)}/s",
    )
    lines = table("unit", "FLOP/byte", "FLOP/s", "bytes", "of the roof", "bound by")
    for point in found.units[:MAX_POINTS]:
        lines.add_row(
            words(shorten_left(name_of(point.name), max(12, width // 4))),
            number(_short(point.intensity_flops_per_byte)),
            number("-" if not point.attained_flops_per_s else format_count(point.attained_flops_per_s)),
            number("-" if point.moved_bytes is None else format_bytes(point.moved_bytes)),
            number("-" if point.roof_fraction is None else format_fraction(point.roof_fraction)),
            number(point.bound or "-"),
        )
    return Group(title, lines)


def operators(found: OperatorTable, width: int) -> RenderableType:
    """The operators that took longest in the traced step."""
    title = heading(
        "Operators",
        "of the traced step",
        "; times are of launching, the device runs them later" if found.time_is_launch else "",
    )
    lines = table("operator", "calls", "time", "share", "FLOPs", "bytes")
    for row in found.by_operator[:MAX_OPERATORS]:
        lines.add_row(
            words(shorten_left(row.name.removeprefix("aten::"), max(12, width // 3))),
            number(str(row.num_calls)),
            number(format_seconds(row.time_s)),
            number(format_fraction(row.time_fraction)),
            number(format_count(row.executed_flops) if row.executed_flops else "-"),
            number("-" if row.moved_bytes is None else format_bytes(row.moved_bytes)),
        )
    if len(found.by_operator) > MAX_OPERATORS:
        lines.add_row(words(f"{len(found.by_operator) - MAX_OPERATORS} more", "dim"))
    return Group(title, lines)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
