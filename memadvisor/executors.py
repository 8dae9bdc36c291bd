"""Who plays a plan on the live model, and how its collectives go. Pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memadvisor.errors import PlanError

EXECUTORS = ("built-in", "fsdp2")  # ours, or torch's FSDP2 that the script itself has set up
ALGORITHMS = ("pairwise", "native")  # sends and receives of ours, or what the backend does itself
_OPERATIONS = ("all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """How collectives of an operation go whose full message has `min_bytes` or more, up to the next entry."""

    operation: str  # all_gather or reduce_scatter
    min_bytes: int
    name: str


def algorithm_for(algorithms: Sequence[Algorithm], operation: str, size_bytes: int) -> str | None:
    """None: the plan says nothing, and what is usual on the backend is done."""
    known = [a for a in algorithms if a.operation == operation and a.min_bytes <= size_bytes]
    return max(known, key=lambda a: a.min_bytes).name if known else None


def all_native(algorithms: Sequence[Algorithm]) -> bool:
    """Whether all gathers and reductions to shards are left to the backend."""
    from_nothing = {a.operation for a in algorithms if not a.min_bytes}
    return from_nothing == set(_OPERATIONS) and {a.name for a in algorithms} == {"native"}


def check_executor(
    executor: str, algorithms: Sequence[Algorithm], asked: Mapping[str, bool], source: str
) -> None:
    """Raise PlanError, naming `source`; `asked`: what FSDP2 is not told by a plan, and whether this one asks for it."""
    if executor not in EXECUTORS:
        raise PlanError(f"{source} has executor {executor!r}.", hint=f"it must be {' or '.join(EXECUTORS)}.")
    for entry in algorithms:
        if entry.operation not in _OPERATIONS or entry.name not in ALGORITHMS or entry.min_bytes < 0:
            raise PlanError(
                f"{source} has {entry.operation} by {entry.name!r} from {entry.min_bytes} bytes on.",
                hint=f"{' and '.join(_OPERATIONS)} go by {' or '.join(ALGORITHMS)}, from 0 bytes or more.",
            )
    if executor != "fsdp2" and algorithms:
        raise PlanError(
            f"{source} names algorithms of collectives, which the built-in engine does not choose.",
            hint="leave them out.",
        )
    for what, is_asked in asked.items() if executor == "fsdp2" else ():
        if is_asked:
            raise PlanError(
                f"{source} is for FSDP2 and asks for {what}.",
                hint="FSDP2 is stage 3; its precision and groups of ranks are the script's own.",
            )
