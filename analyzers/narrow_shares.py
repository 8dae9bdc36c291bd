"""How much of a step's storages would be left its float32 parameters were computed with in another dtype."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Protocol

from memadvisor.analyzers.weight_casts import is_weight_cast
from memadvisor.precision import ITEM_BYTES, Precision
from memadvisor.run.records import Storage
from memadvisor.run.run import RankRun

_KEPT = ("parameter", "optimizer_state", "communication", "input", "weight_copy", "other")


class Stretch(Protocol):
    """What this file needs of a piece of the step (analyzers/pieces.py)."""

    @property
    def phase(self) -> str: ...
    @property
    def start_s(self) -> float: ...


def narrow_shares(rank: RankRun, pieces: Sequence[Stretch], precision: Precision) -> Mapping[int, float]:
    """The share that is left, by storage, of what a model makes of float32 in its forward and backward.

    Activations follow the parameters' dtype, and so do the gradients that autograd makes. What the script makes
    itself stays, with the model's output that it goes on with, which is given back as float32; so does the
    backward of a loss that the script computes. Weights that autocast casts are there already.
    """
    dtype = precision.of_parameter("float32")
    if dtype == "float32":
        return {}
    starts = [piece.start_s for piece in pieces]
    loss_is_outside = any(_is_saved_outside(row) for row in rank.storages)
    shares = {}
    for row in rank.storages:
        if row.category in _KEPT or row.phase not in ("forward", "recompute", "backward"):
            continue
        if row.dtype == dtype and is_weight_cast(row, rank.parameters):
            shares[row.storage_id] = 0.0
        if row.dtype != "float32" or (loss_is_outside and _is_of_script(row, pieces, starts)):
            continue
        shares[row.storage_id] = ITEM_BYTES[dtype] / ITEM_BYTES["float32"]
    return shares


def _is_saved_outside(row: Storage) -> bool:
    return row.phase == "outside" and row.category == "activation" and row.dtype == "float32"


def _is_of_script(row: Storage, pieces: Sequence[Stretch], starts: Sequence[float]) -> bool:
    """Whether the script's own loss makes it in the backward, or takes it from the model."""
    if row.phase == "backward":
        return not row.unit
    if row.last_forward_use_s is None:
        return False
    last = pieces[max(0, bisect_left(starts, row.last_forward_use_s) - 1)]
    return last.phase == "outside"
