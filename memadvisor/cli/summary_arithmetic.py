"""The sections of `memadvisor show` about arithmetic: utilization in a convention."""

from __future__ import annotations

from rich.console import Group, RenderableType

from memadvisor.analyzers.utilization import Utilization
from memadvisor.cli.tables import NOT_RECORDED, heading
from memadvisor.run.run import RankRun
from memadvisor.tui.text import paragraph
from memadvisor.units import format_count, format_fraction

_WORDS = {
    "exact": "",
    "palm": " (6N + 12LHQT a token, N all parameters)",
    "torchtitan": " (6N active without look-up tables, attention's full square)",
    "megatron": " (products without router, attention halved)",
}


def utilization(used: Utilization, recorded: RankRun, convention: str) -> RenderableType:
    """MFU in one convention, HFU, and what the other conventions say."""
    if used.model_flops_per_step is None:
        return heading("Utilization", f"FLOPs {NOT_RECORDED}: no traced step was finished")
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
