"""Whether other steps were larger than the traced one: what it says of memory is of steps as large as it.

Batches that are padded to their own longest sample, or bucketed by length, make steps of many sizes, and the largest takes
the most memory. Where the allocator kept every step's peak, as on CUDA, peaks are compared; elsewhere what the largest call of
a model was given, in elements of its tensors, and where none was given more, what gradients later steps had: layers that are
unfrozen one after another, or added, are trained from then on. Memory need not grow as these do, so how much more such a step
takes is not said.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from memadvisor.run.records import Step
from memadvisor.run.run import RankRun
from memadvisor.units import format_bytes

Compared = Literal["peak_bytes", "input_elements", "gradient_bytes"]
_NOTICEABLE = 0.02  # of the traced step's size


@dataclass(frozen=True, slots=True, kw_only=True)
class LargerSteps:
    """The largest of a run's steps, where it is noticeably larger than the traced one.

    `size` and `traced_size` are bytes, elements where `compared` is "input_elements"; of several
    ranks, those of the rank that has most. `num_larger` of `num_compared` other steps were noticeably larger.
    `is_past_first`: the first step had the largest elements, and is left out where a later one is larger than the traced
    one too. Of gradients, steps before the traced one are left out. Traced, it would not show what optimizers keep from then on.
    """

    compared: Compared
    step: int
    size: int
    traced_step: int
    traced_size: int
    num_larger: int
    num_compared: int
    is_past_first: bool = False

    @property
    def in_words(self) -> str:
        """A sentence, and what to do."""
        shares = f"{self.num_larger} of {self.num_compared}"
        if self.compared == "peak_bytes":
            return (
                f"The traced step is not the largest: {shares} other steps had a higher peak, the highest "
                f"{format_bytes(self.size)} in step {self.step}. Profile again with --trace-step {self.step} to see what it "
                "is made of."
            )
        if self.compared == "gradient_bytes":
            return (
                f"The traced step is not the largest: {shares} later steps trained more, most step {self.step}, in which an "
                f"optimizer had gradients of {format_bytes(self.size)}; in the traced one the most that one had was "
                f"{format_bytes(self.traced_size)}. What that step takes is not recorded: profile again with "
                f"--trace-step {self.step}."
            )
        ratio = self.size / self.traced_size
        steps = "steps after the first" if self.is_past_first else "other steps"
        times = f"{100 * (ratio - 1):.0f} % more" if ratio < 1.995 else f"{ratio:.1f} times as much"
        return (
            f"The traced step is not the largest: in {shares} {steps} whose inputs were recorded the model was "
            f"given more at once, most in step {self.step} ({times}). What that step takes is not recorded: profile again with "
            f"--trace-step {self.step}."
        )


def larger_steps(ranks: Iterable[RankRun]) -> LargerSteps | None:
    """None where no step was traced, no other step's size is known, or none is larger."""
    ranks = tuple(ranks)
    traced = [rank.traced_step.index for rank in ranks if rank.traced_step is not None]
    if not traced:
        return None
    has_peaks = any(
        step.peak_allocated_bytes is not None for rank in ranks for step in rank.steps if not step.traced
    )
    if has_peaks:
        return _compared(ranks, traced[0], "peak_bytes")
    return _compared(ranks, traced[0], "input_elements") or _compared(ranks, traced[0], "gradient_bytes")


def _compared(ranks: tuple[RankRun, ...], traced: int, compared: Compared) -> LargerSteps | None:
    sizes: dict[int, int] = {}
    for rank in ranks:
        for step in rank.steps:
            size = _size(step, compared)
            is_due = compared != "gradient_bytes" or step.index >= traced
            if size is not None and is_due:
                sizes[step.index] = max(sizes.get(step.index, 0), size)
    traced_size = sizes.pop(traced, None)
    if not traced_size:
        return None
    larger = [index for index, size in sizes.items() if size > (1 + _NOTICEABLE) * traced_size]
    if not larger:
        return None
    largest = max(larger, key=lambda index: (sizes[index], -index))
    is_past_first = compared == "input_elements" and not largest and any(larger)
    if is_past_first:
        del sizes[0]
        larger.remove(0)
        largest = max(larger, key=lambda index: (sizes[index], -index))
    return LargerSteps(
        compared=compared,
        step=largest,
        size=sizes[largest],
        traced_step=traced,
        traced_size=traced_size,
        num_larger=len(larger),
        num_compared=len(sizes),
        is_past_first=is_past_first,
    )


def _size(step: Step, compared: Compared) -> int | None:
    if compared == "gradient_bytes":
        return step.gradient_bytes
    return step.peak_allocated_bytes if compared == "peak_bytes" else step.largest_input_elements
