"""Copies of weights in another dtype, as autocast makes them, and which of them its cache holds."""

from __future__ import annotations

from collections.abc import Iterable

from memadvisor.run.records import Parameter, Storage
from memadvisor.run.run import RankRun

_FLOATS = ("bfloat16", "float16", "float32")


def is_weight_cast(row: Storage, parameters: Iterable[Parameter]) -> bool:
    """Whether a storage is the copy of a parameter of its unit in another dtype, as autocast makes them.

    Whole numbers of that shape, as of T5's distances between tokens, are none.
    """
    return (
        row.operator == "aten::_to_copy"
        and row.dtype in _FLOATS
        and any(
            parameter.unit == row.unit and parameter.dtype != row.dtype and parameter.shape == row.shape
            for parameter in parameters
        )
    )


def cached_casts(rank: RankRun) -> frozenset[int]:
    """Storages of weights that autocast has cast and that its cache holds until its context is left.

    With `cache_enabled=False`, as Lightning has it, each use makes a copy that autograd alone keeps; and autocast caches
    no copy of a view. Runs of before `last_held_s` do not tell: there all copies count as held, which plans less.
    """
    tells = any(row.last_held_s is not None for row in rank.storages)
    return frozenset(
        row.storage_id
        for row in rank.storages
        if (row.last_held_s is not None or not tells) and is_weight_cast(row, rank.parameters)
    )
