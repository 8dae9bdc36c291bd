"""Ranks that left no record: what cannot be worked out without them, and what to do."""

from __future__ import annotations

from memadvisor.run.run import Run

_MOST_NAMED = 8


def lost_ranks_text(run: Run) -> str:
    """`rank 1 of 2`, `ranks 1, 3 of 4`; for a run that lacks some."""
    lost = run.missing_ranks
    more = f" and {len(lost) - _MOST_NAMED} more" if len(lost) > _MOST_NAMED else ""
    return f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost[:_MOST_NAMED]))}{more} of {run.manifest.world_size}"


def lost_ranks_hint(run: Run) -> str:
    """Where their records may be."""
    return (
        f"put the files of all ranks into {str(run.path)!r} (rank{run.missing_ranks[0]}.*.journal: of a job on several machines each "
        "may have kept its own), or profile again into a directory that all of them write to"
    )
