"""Who plays a plan on the live model, and how its collectives go. Pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memadvisor.errors import PlanError

EXECUTORS = ("built-in", "fsdp2")  # ours, or torch's FSDP2 that the script itself has set up
ALGORITHMS = (
    "pairwise",
    "native",
    "doubling",
    "together",
    "merged",
)  # native: what the backend does itself; others are ours
_OF_EXECUTORS = {"built-in": ("pairwise", "doubling", "together"), "fsdp2": ("pairwise", "native")}
_OPERATIONS = ("all_gather", "reduce_scatter")
_OF_ALL_REDUCES = ("merged", "native")  # and built-in alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """How collectives of an operation go whose full message has `min_bytes` or more, up to the next entry.

    pairwise: each rank sends every other its part; of a reduction one after another. together: a reduction's are all
    under way at once, and what comes is added up in the same order. doubling: in each round ranks twice as far apart
    exchange all that they have, so that log2 n rounds do (gathers of a power of two; Thakur, Rabenseifner and Gropp 2005,
    section 4.1). merged: all-reduces of units whose backwards follow each other go in one message, as long as all of it
    is less than the next entry's min_bytes. num_ranks: among so many alone; None: among any number.
    """

    operation: str  # all_gather, reduce_scatter or all_reduce
    min_bytes: int
    name: str
    num_ranks: int | None = None


def algorithm_for(
    algorithms: Sequence[Algorithm], operation: str, size_bytes: float, num_ranks: int
) -> str | None:
    """None: the plan says nothing, and what is usual on the backend is done."""
    if not algorithms:
        return None
    known = [
        a
        for a in algorithms
        if a.operation == operation and a.min_bytes <= size_bytes and a.num_ranks in (None, num_ranks)
    ]
    return max(known, key=lambda a: a.min_bytes).name if known else None


def merged_below(algorithms: Sequence[Algorithm], num_ranks: int) -> int:
    """Bytes that a message of several units' gradients stays below; 0 where each goes by itself."""
    ends = [
        a.min_bytes for a in algorithms if a.operation == "all_reduce" and a.num_ranks in (None, num_ranks)
    ]
    return max(
        (
            end
            for end in ends
            if end and algorithm_for(algorithms, "all_reduce", end - 1, num_ranks) == "merged"
        ),
        default=0,
    )


def can_double(operation: str, num_ranks: int | None) -> bool:
    """Whether an operation among so many ranks goes by doubling."""
    return (
        operation == "all_gather" and num_ranks is not None and num_ranks > 1 and num_ranks.bit_count() == 1
    )


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
        if entry.operation == "all_reduce":
            _check_all_reduce(entry, executor, source)
            continue
        if entry.operation not in _OPERATIONS or entry.name not in ALGORITHMS or entry.min_bytes < 0:
            raise PlanError(
                f"{source} has {entry.operation} by {entry.name!r} from {entry.min_bytes} bytes on.",
                hint=f"{' and '.join(_OPERATIONS)} go by {' or '.join(ALGORITHMS)}, from 0 bytes or more.",
            )
        if entry.name not in _OF_EXECUTORS[executor]:
            raise PlanError(
                f"{source} has {entry.operation} by {entry.name!r}, which {executor} does not do.",
                hint=f"it does {' and '.join(_OF_EXECUTORS[executor])}.",
            )
        if entry.name == "together" and entry.operation != "reduce_scatter":
            raise PlanError(
                f"{source} has {entry.operation} by 'together'.", hint="only a reduce_scatter goes so."
            )
        if entry.name == "doubling" and not can_double(entry.operation, entry.num_ranks):
            raise PlanError(
                f"{source} has {entry.operation} by doubling among {entry.num_ranks or 'any number of'} ranks.",
                hint="only an all_gather goes so, among a power of two of ranks.",
            )
    for what, is_asked in asked.items() if executor == "fsdp2" else ():
        if is_asked:
            raise PlanError(
                f"{source} is for FSDP2 and asks for {what}.",
                hint="FSDP2 is stage 3; its precision and groups of ranks are the script's own.",
            )


def _check_all_reduce(entry: Algorithm, executor: str, source: str) -> None:
    if executor == "fsdp2":
        raise PlanError(
            f"{source} is for FSDP2 and says how all-reduces go.",
            hint="FSDP2 reduces to shards; leave that out.",
        )
    if entry.name not in _OF_ALL_REDUCES or entry.min_bytes < 0:
        raise PlanError(
            f"{source} has all_reduce by {entry.name!r} from {entry.min_bytes} bytes on.",
            hint=f"all-reduces go by {' or '.join(_OF_ALL_REDUCES)}, from 0 bytes or more.",
        )
