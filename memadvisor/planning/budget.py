"""The memory that `advise` is given: a size, or a share of what the run took at most."""

from __future__ import annotations

import re

from memadvisor.errors import UsageError
from memadvisor.run.run import Run
from memadvisor.units import parse_bytes

_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*")


def budget_bytes(text: str | None, run: Run) -> int:
    """Bytes of one rank: `24GiB`, or `60%` of the highest traced peak of all ranks, rounded down. Raises UsageError, of
    None too: what this is asked for depends on a budget."""
    if text is None:
        raise UsageError(
            "--memory is missing.",
            hint="give the budget of one rank: --memory 24GiB, or --memory 60% of the run's own peak.",
        )
    if not text.rstrip().endswith("%"):
        return parse_bytes(text)
    match = _SHARE.fullmatch(text)
    percent = float(match.group(1)) if match is not None else 0.0
    peaks = [rank.traced_step.peak_allocated_bytes for rank in run.ranks if rank.traced_step is not None]
    known = [peak for peak in peaks if peak is not None]
    if not known:
        option = next((rank.trace_option for rank in run.ranks if rank.trace_option is not None), None)
        raise UsageError(
            "The run's peak was not recorded: no step of it was traced.",
            hint=f"`memadvisor profile {option}` traces one." if option else "give a size, such as 24GiB.",
        )
    budget = max(known) * percent / 100
    if not 1 <= budget < 2**60:
        raise UsageError(
            f"{text!r} is no usable share of the run's peak.",
            hint="write it as 60%: it must be more than 0.",
        )
    return int(budget)
