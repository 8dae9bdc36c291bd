"""Which storages are weights that get no gradient."""

from __future__ import annotations

from collections import defaultdict

from memadvisor.run.records import Parameter, Storage
from memadvisor.run.run import RankRun


def frozen_storages(rank: RankRun) -> frozenset[int]:
    """By unit and shape, in the order in which a model has its parameters; where there are more or fewer storages than
    parameters, those of which no such parameter gets one."""
    parameters: dict[tuple[str, str], list[Parameter]] = defaultdict(list)
    for parameter in rank.parameters:
        if not parameter.tied_to:
            parameters[parameter.unit, parameter.shape].append(parameter)
    storages: dict[tuple[str, str], list[Storage]] = defaultdict(list)
    for row in sorted(rank.storages, key=lambda row: row.storage_id):
        if row.category == "parameter":
            storages[row.unit, row.shape].append(row)
    found: set[int] = set()
    for key, rows in storages.items():
        own = parameters[key]
        if len(own) == len(rows):
            found.update(row.storage_id for row, one in zip(rows, own, strict=True) if not one.requires_grad)
        elif own and not any(one.requires_grad for one in own):
            found.update(row.storage_id for row in rows)
    return frozenset(found)
