"""What less and more memory would buy: the table of `memadvisor advise`, with a budget and without one."""

from __future__ import annotations

from rich.table import Table

from memadvisor.planning.advise import Advice
from memadvisor.planning.ranked import FrontPoint
from memadvisor.units import GIB, format_bytes, format_seconds


def front_table(advice: Advice, *, has_budget: bool = True) -> Table:
    """Predicted peak against predicted step time, with the run as it was measured between them."""
    ranks = f", ZeRO {advice.front[0].zero_stage}" if advice.num_ranks > 1 else ""
    title = f"What memory buys{ranks}, predicted"
    table = Table(
        title=f"{title}{_price(advice) if has_budget else '.'}", title_justify="left", title_style=""
    )
    offloads = any(point.num_offloaded for point in advice.front)
    for heading in ("peak", "step time", "recomputed", *(["offloaded"] if offloads else []), ""):
        table.add_column(heading, justify="left" if not heading else "right")
    rows = [
        (
            point.peak_bytes,
            point.step_time_s,
            recomputed_text(point.num_recomputed, point.num_parted),
            str(point.num_offloaded),
            "within the budget" if has_budget and point.peak_bytes <= advice.budget_bytes else "",
        )
        for point in advice.front
        if not _is_measured(point, advice)
    ]
    measured = advice.measured_peak_bytes, advice.measured_step_time_s
    rows.append((*measured, "-", "-", _measured(advice)))
    for size_bytes, seconds, recomputed, offloaded, mark in sorted(rows):
        away = [offloaded] if offloads else []
        table.add_row(format_bytes(size_bytes), format_seconds(seconds), recomputed, *away, mark)
    return table


def _is_measured(point: FrontPoint, advice: Advice) -> bool:
    """Whether it is the run as it was: that is shown as measured, once."""
    if point.num_recomputed or point.num_parted or point.num_offloaded:
        return False
    return (format_bytes(point.peak_bytes), format_seconds(point.step_time_s)) == (
        format_bytes(advice.measured_peak_bytes),
        format_seconds(advice.measured_step_time_s),
    )


def _price(advice: Advice) -> str:
    """What a GiB more would be worth."""
    if advice.next_gib_s is None:
        return "."
    worth = format_seconds(advice.next_gib_s) if advice.next_gib_s > 0 else "nothing"
    most_bytes = max([advice.measured_peak_bytes, *(point.peak_bytes for point in advice.front)])
    if most_bytes <= advice.budget_bytes + GIB:  # there is nothing to buy beyond that
        return f". More memory than the budget saves {worth} a step{' at most' if advice.next_gib_s > 0 else ''}."
    return f". A GiB beyond the budget saves {worth} a step."


def recomputed_text(num_whole: int, num_parted: int) -> str:
    return f"{num_whole}, in parts {num_parted}" if num_parted else str(num_whole)


def _measured(advice: Advice) -> str:
    asked = advice.micro_batch is not None
    return f"measured, micro-batch {advice.recorded_micro_batch}" if asked else "measured, no plan"
