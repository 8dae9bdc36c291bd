"""What an export is: the text, where it differs from the plan, and what is left for the user to set."""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.plan import Plan
from memadvisor.units import format_bytes, format_seconds

MORE_MEMORY = "more memory"
MORE_TIME = "more time"
LESS_MEMORY_MORE_TIME = "less memory, more time"
MORE_MEMORY_LESS_TIME = "more memory, less time"
WITHIN_BUDGET = "more memory, within the budget by what was predicted"
MORE_HOST_MEMORY = "more of the host's memory"
OTHER_TIME = "memory and time of its own, either way"
COARSER = "coarser rounding"
FINER = "finer rounding, more time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What a plan asks for and an engine cannot be told, what stands in its place, and which way that errs."""

    wanted: str
    instead: str
    errs: str

    @property
    def needs_more_memory(self) -> bool:
        """Of the device; an engine's own way (OTHER_TIME) may need either more or less."""
        return self.errs in (MORE_MEMORY, MORE_MEMORY_LESS_TIME)

    def line(self) -> str:
        return f"{self.wanted}: {self.instead} ({self.errs})."


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """`text` is what the engine reads. `has_comments`: all that `remarks` says stands in it as comments, too."""

    text: str
    has_comments: bool
    remarks: tuple[str, ...]
    differences: tuple[Difference, ...]


def remarks(plan: Plan, differences: list[Difference], to_set: list[str]) -> tuple[str, ...]:
    """Lines for a human, names of the user's program as they are; whoever writes them escapes them (quoting.py)."""
    ranks = f"{plan.num_ranks} rank{'s' * (plan.num_ranks != 1)}"
    lines = [f"A memadvisor plan for {ranks}.", *_prediction(plan)]
    if plan.why:
        lines.append(f"Why memadvisor chose it: {plan.why}")
    if differences:
        lines.append(
            "What the plan asks for and this engine cannot be told, what stands in its place, and how that errs:"
        )
        lines += [f"- {difference.line()}" for difference in differences]
        lines += _budget_warning(plan, differences)
    else:
        lines.append("All that the plan asks for is said below.")
    if to_set:
        lines.append("Left for you:")
        lines += [f"- {line}" for line in to_set]
    return tuple(lines)


def _prediction(plan: Plan) -> list[str]:
    prediction = plan.prediction
    if prediction is None:
        return []
    reserved = prediction.reserved_bytes
    parts = [
        f"peak {format_bytes(prediction.peak_bytes)} a rank",
        *([f"reserved {format_bytes(reserved)}"] if reserved is not None else []),
        f"step {format_seconds(prediction.step_time_s)}",
        *([f"budget {format_bytes(plan.budget_bytes)}"] if plan.budget_bytes is not None else []),
    ]
    return [f"Predicted for memadvisor's engine, not for this one: {', '.join(parts)}."]


def _budget_warning(plan: Plan, differences: list[Difference]) -> list[str]:
    """The plan was chosen to fit; whatever makes the export need more may end that."""
    if not any(difference.needs_more_memory for difference in differences):
        return []
    budget = "the plan's budget" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    return [f"NOT THE PLAN'S MEMORY: this export needs more of it than the plan, and may not fit {budget}."]
