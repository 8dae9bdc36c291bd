"""Names and scales that several figures share, in the glossary's words."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence

from memadvisor.analyzers.unfinished import UnfinishedRank
from memadvisor.run.records import CATEGORIES, UNEXPLAINED
from memadvisor.run.run import Run
from memadvisor.units import GIB, KIB, MIB, TIB, format_seconds

# From the bottom of a stack to its top: what is always there first, what comes and goes above it.
STACK = (
    "parameter",
    "optimizer_state",
    "gradient",
    "activation",
    "input",
    "temporary",
    "communication",
    "weight_copy",
    "other",
    UNEXPLAINED,
)
assert set(STACK) == {*CATEGORIES, UNEXPLAINED}

PHASE_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer step",
    "outside": "outside",
    "recompute": "recomputation",
}


_WITHOUT_ENDING = {
    None: "no ending: killed, hanging, or still at it",
    True: "no ending yet: still at it, or hanging",
    False: "ended without a word (killed?)",
}
_BARE_NUMBER = re.compile(r" of (?=\d+(?:\.\d+)*$)")


def clock_time(unix_s: float) -> str:
    """`2026-01-31 14:02:11 UTC`."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))


def unfinished_in_words(rank: UnfinishedRank) -> str:
    """`ended without a word (killed?); 7 steps, last record ..., 12.0 s before the newest of all ranks`."""
    behind = f", {format_seconds(rank.behind_s)} before the newest of all ranks" if rank.behind_s else ""
    steps = f"{rank.num_steps} step{'' if rank.num_steps == 1 else 's'}"
    how = "not recorded to its end" if rank.has_stopped else _WITHOUT_ENDING[rank.is_alive]
    return f"{how}; {steps}, last record {clock_time(rank.last_seen_unix_s)}{behind}"


def ranks_in_words(ranks: Sequence[int], most: int = 32) -> str:
    """`rank 3`, `ranks 0, 1`, `ranks 0, 1 and 8 more`; `most`: so many have their number."""
    more = len(ranks) - most
    named = ", ".join(map(str, ranks[:most])) + (f" and {more} more" if more > 0 else "")
    return f"rank{'s' * (len(ranks) > 1)} {named}"


def steps_in_words(run: Run) -> str:
    """`12 steps`, or `8 to 11 steps` where some ranks took fewer, as with inputs of uneven length."""
    counts = sorted(len(rank.steps) for rank in run.ranks)
    fewest, most = counts[0], counts[-1]
    return f"{'' if fewest == most else f'{fewest} to '}{most} step{'' if most == 1 else 's'}"


def color_of(category_or_phase: str) -> str:
    """The style's name for a color; categories and phases have one each."""
    return f"var(--{category_or_phase.replace('_', '-')})"


def place_name(position: str) -> str:
    """Where in a step: `backward of module 0`, for of a plain `nn.Sequential` a number is all that the module is called."""
    return _BARE_NUMBER.sub(" of module ", position)


def unit_name(unit: str) -> str:
    """The root module has no name of its own."""
    return unit or "(model)"


def bytes_scale(sizes_bytes: Iterable[float]) -> tuple[float, str]:
    """Factor and unit in which the largest of these reads well on an axis."""
    largest = max((abs(size) for size in sizes_bytes), default=0)
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if largest >= factor:
            return float(factor), unit
    return 1.0, "B"


def seconds_scale(durations_s: Iterable[float]) -> tuple[float, str]:
    """Factor and unit in which the longest of these reads well on an axis."""
    longest = max((abs(duration) for duration in durations_s), default=0)
    if longest >= 1:
        return 1.0, "s"
    return (1e-3, "ms") if longest >= 1e-3 else (1e-6, "us")
