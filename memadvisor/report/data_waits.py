"""Waiting for DataLoaders, in words that every view has in common."""

from __future__ import annotations

from memadvisor.analyzers.data_waits import DataWaits
from memadvisor.analyzers.step_time import StepTime
from memadvisor.units import format_fraction, format_seconds

# Shares of a step: below the first a thing is not worth a line, and below the second not worth the closing one.
_WORTH_SAYING = 0.01
WORTH_CLOSING = 0.1
NOT_RECORDED = "waiting for a DataLoader not recorded"


def wait_in_words(time: StepTime, waits: DataWaits | None) -> str | None:
    """`waiting for the DataLoader 31.0 ms, 24.0% of a step (0 workers)`; None where it is not recorded."""
    if time.data_wait_s is None or waits is None:
        return None
    share = format_fraction(time.data_wait_fraction)
    name = "DataLoader" if len(waits.of_training) == 1 else "DataLoaders"
    return f"waiting for the {name} {format_seconds(time.data_wait_s)}, {share} of a step ({workers_in_words(waits)})"


def workers_in_words(waits: DataWaits) -> str:
    """`0 workers`; `2 of them, 0 and 4 workers`."""
    loaders = waits.of_training
    counts = [*dict.fromkeys(loader.num_workers for loader in loaders)]
    of_many = f"{len(loaders)} of them, " if len(loaders) > 1 else ""
    if len(counts) > 3:
        return f"{of_many}{min(counts)} to {max(counts)} workers"
    numbers = " and ".join(str(count) for count in counts)
    each = " each" if len(loaders) > 1 and len(counts) == 1 else ""
    return f"{of_many}{numbers} worker{'' if counts == [1] else 's'}{each}"


def waits_in_words(time: StepTime, waits: DataWaits | None) -> list[str]:
    """The wait of a step, and what is to be told apart from it, each a fact of its own."""
    said = wait_in_words(time, waits)
    facts = [said or NOT_RECORDED]
    if waits is None:
        return facts
    least_s, usual_s = _WORTH_SAYING * time.median_s, time.data_wait_s or 0.0
    starts, own = waits.starts, waits.evaluation
    if starts is not None and starts.median_s >= max(2 * usual_s, least_s) and starts.longest_s > 0:
        upto = f" (up to {format_seconds(starts.longest_s)})" if starts.num_steps > 1 else ""
        facts.append(
            f"the first batch of a pass over the data took {format_seconds(starts.median_s)}{upto}, "
            f"in {_steps(starts.num_steps)}"
        )
    if waits.thread_s is not None and waits.thread_s >= max(2 * usual_s, least_s) and waits.thread_s > 0:
        facts.append(
            f"the script itself waited {format_seconds(waits.thread_s)} for its batches, most of it while the device "
            "still had work"
        )
    if waits.inside_phases_s is not None and waits.inside_phases_s > least_s:
        facts.append(f"{format_seconds(waits.inside_phases_s)} of waiting is inside the other phases")
    if own is not None and own.num_batches:
        many = f"{own.num_batches} batch{'es' if own.num_batches != 1 else ''}"
        facts.append(
            f"evaluations waited {format_seconds(own.time_s)} for {many} in {_steps(own.num_steps)}, part of outside"
        )
    return facts


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"
