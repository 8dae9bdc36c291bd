"""How long the traced steps' own collectives took."""

from __future__ import annotations

from collections import defaultdict

from memadvisor.cost.collectives import Observation
from memadvisor.run.records import Collective
from memadvisor.run.run import Run


def observed_collectives(run: Run) -> tuple[Observation, ...]:
    """Each collective of the traced steps with its own duration.

    It starts when the last rank has issued it and the one before it in its group has ended. Ranks are
    matched by (group, sequence); where not all ranks recorded one, it is left out.
    """
    rows: dict[tuple[int, str, int], list[Collective]] = defaultdict(list)
    for rank in run.ranks:
        for row in rank.collectives:
            if row.end_s is not None:
                rows[row.step, row.group, row.sequence].append(row)
    found = []
    ends: dict[str, float] = {}
    for (_, group, _), same in sorted(rows.items()):
        end_s = max(row.end_s for row in same if row.end_s is not None)
        start_s = max(ends.get(group, 0.0), *(row.issue_s for row in same))
        ends[group] = end_s
        if len(same) == same[0].group_size and end_s > start_s:
            found.append(
                Observation(
                    operation=same[0].operation,
                    num_ranks=same[0].group_size,
                    size_bytes=same[0].size_bytes,
                    duration_s=end_s - start_s,
                )
            )
    return tuple(found)
