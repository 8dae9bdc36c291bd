"""What changed from one run to another, in words that the terminal and the page share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from memadvisor.analyzers.before_after import Change
from memadvisor.analyzers.environment import Value
from memadvisor.analyzers.run_difference import StepTimeChange
from memadvisor.analyzers.step_time_shift import CONFIDENCE, Shift
from memadvisor.units import format_bytes, format_change, format_fraction, format_seconds

_ROUNDING = 1e-9  # of sums of the same times in another order
NOT_RECORDED = "not recorded"
Form = Callable[[Any], str]


class ShiftWords(NamedTuple):
    """What the test of step times says, by how much, and what was tested; `about` is empty where it cannot be told."""

    said: str
    about: str
    test: str


def texts(change: Change[Any], form: Form) -> tuple[str, str, str, str]:
    """Before, after, the difference with its sign, and its share of what was before; fractions differ by points alone."""
    if form is format_fraction and change.difference:
        points = f"{100 * change.difference:+.1f} points"
        return format_fraction(change.before), format_fraction(change.after), points, ""
    fraction = change.change_fraction
    is_same = fraction is not None and abs(fraction) < _ROUNDING
    return (
        NOT_RECORDED if change.before is None else form(change.before),
        NOT_RECORDED if change.after is None else form(change.after),
        "same" if is_same else signed(change.difference, form),
        "" if is_same or fraction is None else format_change(fraction),
    )


def signed(difference: Any, form: Form) -> str:
    """`+1.50 MiB`, `same`; `-` where a side is not known."""
    if difference is None:
        return "-"
    return "same" if difference == 0 else ("+" if difference > 0 else "") + form(difference)


def setting_text(name: str, value: Value) -> str:
    if value is None:
        return "none"
    if name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return str(value) or "none"


def spread_in_words(time: StepTimeChange) -> str:
    """`half of the steps take: before 900 ms to 1.00 s, after ...`; "" where neither run has two steps."""
    spread = [
        f"{name} {format_seconds(quartiles[0])} to {format_seconds(quartiles[1])}"
        for name, quartiles in zip(("before", "after"), time.quartiles_s, strict=True)
        if quartiles is not None
    ]
    return f"half of the steps take: {', '.join(spread)}" if spread else ""


def shift_in_words(time: StepTimeChange) -> ShiftWords | None:
    """None where a run has no steady step."""
    if time.shift is None:
        return None
    compared = (time.shift.num_before, time.shift.num_after)
    is_of_steps = compared == (time.num_steps.before, time.num_steps.after)
    return _in_words(time.shift, "steps" if is_of_steps else "stretches of steps")


def _in_words(shift: Shift, compared: str) -> ShiftWords:
    """`compared`: what the test took from each run."""
    test = (
        f"Mann-Whitney, {100 * CONFIDENCE:.0f} %, on {shift.num_before} and {shift.num_after} {compared}; "
        "how runs differ among themselves is not in it"
    )
    if shift.interval_s is None:
        return ShiftWords("too few steps to tell a difference from noise", "", test)
    low, high = (signed(end, format_seconds) for end in shift.interval_s)
    longer = "longer" if shift.shift_s > 0 else "shorter"
    said = (
        f"{longer} by more than the steps' own noise"
        if shift.is_significant
        else "not significant: within the steps' own noise"
    )
    return ShiftWords(said, f"{signed(shift.shift_s, format_seconds)}, between {low} and {high}", test)
