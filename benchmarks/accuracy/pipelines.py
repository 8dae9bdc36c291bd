"""Pipeline schedules against each other: is their order right, and their bubble?"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import pandas as pd


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Groups of rows that differ in the schedule alone. `right`: those in which no two measured schedules that differ are
    predicted the other way round. `wrong` names the pairs of the others, the faster one by measurement first.
    """

    groups: int
    right: int
    wrong: tuple[str, ...]


def schedule_orders(rows: pd.DataFrame) -> Orders:
    """Of rows with `model`, `n_microbatches`, `schedule`, `measured_s` and `predicted_s`."""
    groups = right = 0
    wrong: list[str] = []
    for (model, count), group in rows[rows.measured_s.notna()].groupby(["model", "n_microbatches"]):
        groups += 1
        seen = list(zip(group.schedule, group.measured_s, group.predicted_s, strict=True))
        turned = []
        for one, other in combinations(seen, 2):
            fast, slow = sorted((one, other), key=lambda row: row[1])
            if fast[1] < slow[1] and not fast[2] < slow[2]:
                turned.append(f"{model}, {count} microbatches: {fast[0]} before {slow[0]}")
        right += not turned
        wrong += turned
    return Orders(groups=groups, right=right, wrong=tuple(wrong))
