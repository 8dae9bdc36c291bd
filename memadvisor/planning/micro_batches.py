"""The captured step with other micro-batches than the recorded ones: those that are asked about, and splits of them.

Who runs out of memory records a step with a micro-batch that fits, and asks about the one that does not. Times go with the
samples, and bytes as docs/captured-layouts.md says of another micro-batch: exact where they are linear in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fractions import Fraction

from memadvisor.analyzers.segments import RecordedStep
from memadvisor.cost.step import CapturedStep
from memadvisor.errors import UsageError

MAX_DIVISOR = 8  # of a micro-batch that plans split
MAX_GROWTH = 8


def step_with(step: RecordedStep, size: int | None) -> tuple[CapturedStep, int | None]:
    """The step with as many micro-batches as recorded, each of `size` samples, or with None as recorded; and the samples
    of a recorded one, where they are known.

    Raises UsageError for a size that nobody can tell the step of.
    """
    recorded = step.captured()
    known = recorded.micro_batch_size
    if size is None or size == known:
        return recorded, known
    if known is None:
        raise UsageError(
            "The samples of a micro-batch were not recorded, or more than these makes up the step: nobody can tell it "
            f"with {size}.",
            hint="leave --micro-batch out, and profile the script with the micro-batch that you mean.",
        )
    if not known < size <= MAX_GROWTH * known:
        why = (
            "plans with smaller ones are among those shown without it"
            if size < known
            else f"what is more than {MAX_GROWTH} times as large is told too badly"
        )
        raise UsageError(
            f"--micro-batch {size} beside a recorded micro-batch of {known}: {why}.",
            hint=f"give {known + 1} to {MAX_GROWTH * known}, or profile the script with another micro-batch.",
        )
    divisor = Fraction(known, size)
    return step.captured(divisor), known


def splits(
    step: RecordedStep,
    whole: CapturedStep,
    recorded_size: int | None,
    may_show: Callable[[], bool] = lambda: True,
) -> Iterator[tuple[CapturedStep, bool]]:
    """The step as it is, and with its micro-batch halved again and again, for as long as it divides; and whether it is the
    last.

    may_show: asked before each split whether a plan of it may be shown. Where none may, the last one alone is cut, for its
    least peak.
    """
    size, divisors = whole.micro_batch_size, _divisors(whole.micro_batch_size, recorded_size)
    yield whole, not divisors
    for divisor in divisors:
        is_last = divisor == divisors[-1]
        if size is None or recorded_size is None or not (is_last or may_show()):
            continue
        split = step.captured(Fraction(recorded_size * divisor, size), divisor)
        yield replace(split, time_factors=whole.time_factors), is_last


def split_notes(step: RecordedStep, recorded_size: int | None, sizes: Iterable[int | None]) -> Iterator[str]:
    """What is not predicted of plans with micro-batches of these sizes."""
    for size in sorted({size for size in sizes if size}):
        modules = step.slow_convolutions(Fraction(recorded_size or size, size))
        if modules:
            yield (
                f"With {size} sample{'s' if size > 1 else ''} a micro-batch torch computes {len(modules)} "
                f"convolution{'s' if len(modules) > 1 else ''} by another algorithm than in the recorded step: times of such plans "
                "are those of the recorded one, and often too short."
            )


def _divisors(size: int | None, recorded_size: int | None) -> list[int]:
    """Of a micro-batch of so many samples; none where they are not known."""
    powers = [2**power for power in range(1, MAX_DIVISOR.bit_length())]
    return [d for d in powers if size is not None and recorded_size is not None and size % d == 0]
