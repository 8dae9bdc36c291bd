"""Which algorithm each collective goes by: what was measured to be the fastest for its size, among as many ranks.

Without other algorithms' curves in a hardware file (`memadvisor calibrate`), nothing is chosen, and what is usual goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memadvisor.cost.collectives import curve_seconds
from memadvisor.executors import Algorithm
from memadvisor.hardware.hardware import CollectiveCurve, Hardware
from memadvisor.units import format_bytes

USUAL = "pairwise"  # on a CPU, where alone there is a choice
_WORTH = 0.9  # of the usual seconds: a gain of less may be noise
_MOST_COPIED_BYTES = (
    2**20
)  # of a message of several units: copying it in and out must take less than a message does
_MOST_STAGED_BYTES = (
    2**22
)  # of a message whose parts all wait in memory for their turn: larger ones go one by one


def choose_algorithms(hardware: Hardware | None, num_ranks: int) -> tuple[Algorithm, ...]:
    """By operation, size and number of ranks, where something else than the usual was measured to be faster.

    Among all of `num_ranks`, or groups that they can be cut into.
    """
    if hardware is None:
        return ()
    usual = {(curve.operation, curve.num_ranks): curve for curve in hardware.collectives}
    found: list[Algorithm] = []
    for other in hardware.alternatives:
        plain = usual.get((other.operation, other.num_ranks))
        if plain is not None and other.algorithm is not None and num_ranks % other.num_ranks == 0:
            found += _ranges(plain, other, other.algorithm)
    for (operation, ranks), plain in usual.items():
        if operation == "all_reduce" and ranks == num_ranks:
            found += _merged(plain)
    return tuple(found)


def _merged(plain: CollectiveCurve) -> Iterator[Algorithm]:
    """Below which size two messages of half of it take longer than one, at all measured sizes up to there.

    But the smallest: what half of that takes is not known.
    """
    limit_bytes = 0
    for size_bytes in plain.sizes_bytes[1:]:
        together_s, apart_s = curve_seconds(plain, size_bytes), 2 * curve_seconds(plain, size_bytes / 2)
        if size_bytes > _MOST_COPIED_BYTES or together_s > _WORTH * apart_s:
            break
        limit_bytes = size_bytes
    if limit_bytes:
        for min_bytes, name in ((0, "merged"), (limit_bytes, "native")):
            yield Algorithm(operation="all_reduce", min_bytes=min_bytes, name=name, num_ranks=plain.num_ranks)


def algorithms_notes(algorithms: Sequence[Algorithm]) -> Iterator[str]:
    """What was chosen, in words."""
    for place, entry in enumerate(algorithms):
        if entry.name in (USUAL, "native"):
            continue
        of = entry.operation, entry.num_ranks
        following = next((e for e in algorithms[place + 1 :] if (e.operation, e.num_ranks) == of), None)
        below = "" if following is None else f" below {format_bytes(following.min_bytes)}"
        if entry.name == "merged":
            yield (
                f"Gradients of neighbouring units that are whole on all of {entry.num_ranks} ranks go in one message{below}, "
                "which was measured to be faster than one for each; nothing is computed otherwise."
            )
            continue
        start = f" of {format_bytes(entry.min_bytes)} and more" if entry.min_bytes else ""
        yield (
            f"Each {entry.operation}{start}{below} among {entry.num_ranks} ranks goes by {entry.name}, which was "
            "measured to be faster; nothing is computed otherwise."
        )


def _ranges(plain: CollectiveCurve, other: CollectiveCurve, name: str) -> Iterator[Algorithm]:
    """Where the other one is worth taking, and from where on it is not: at measured sizes, and at the staging's limit."""
    is_taken = False
    for place, size_bytes in enumerate(_sizes(plain, other)):
        is_worth = curve_seconds(other, size_bytes) <= _WORTH * curve_seconds(plain, size_bytes)
        is_worth &= name != "together" or size_bytes < _MOST_STAGED_BYTES
        if is_worth != is_taken:
            is_taken = is_worth
            yield Algorithm(
                operation=other.operation,
                min_bytes=size_bytes if place else 0,
                name=name if is_taken else USUAL,
                num_ranks=other.num_ranks,
            )


def _sizes(plain: CollectiveCurve, other: CollectiveCurve) -> Sequence[int]:
    return sorted({*plain.sizes_bytes, *other.sizes_bytes, _MOST_STAGED_BYTES})
