"""Which births of a backward are gradients of parameters, and which of them comes last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from memadvisor.analyzers.gradient_buffers import Buffers
from memadvisor.analyzers.placement import Placed, Stretch
from memadvisor.run.run import RankRun

Gradients = Mapping[str, Set[tuple[str, str]]]  # by unit, shapes and dtypes


class _Event(Protocol):
    """What this file needs of a change of live bytes: `number` is that of the placed storage."""

    @property
    def delta_bytes(self) -> int: ...
    @property
    def number(self) -> int: ...


def gradients_of(rank: RankRun) -> dict[str, set[tuple[str, str]]]:
    """By unit, the shapes that gradients of its parameters may have, and their dtypes.

    A bias's gradient is a sum that keeps the dimension it sums over, until it is accumulated.
    """
    found: dict[str, set[tuple[str, str]]] = {unit.name: set() for unit in rank.units}
    for parameter in rank.parameters:
        if parameter.tied_to:
            continue
        own = found.setdefault(parameter.unit, set())
        if parameter.requires_grad:
            shape = parameter.shape
            own |= {(shape, parameter.dtype)}
            own |= set() if "," in shape else {(f"[1, {shape[1:]}", parameter.dtype)}
    return found


def gradient_unit(
    event: _Event,
    piece: Stretch,
    placed: Sequence[Placed],
    gradients: Gradients,
) -> str | None:
    """The unit of whose parameters something new-born is a gradient; None for anything else.

    A gradient that is added to an older one, or copied to a bucket, is a temporary of a parameter's shape. That of a layer
    which another unit lends is the layer's, whose gradients autograd adds up before anybody takes them over.
    """
    if event.delta_bytes <= 0 or event.number < 0 or piece.unit is None or piece.phase != "backward":
        return None
    row = placed[event.number].row
    if row.category == "gradient":
        return row.unit if row.unit in gradients else piece.unit
    is_lent = row.unit != piece.unit and row.unit in gradients
    is_alike = row.category == "temporary" and (row.shape, row.dtype) in gradients.get(piece.unit, ())
    return piece.unit if is_alike and not is_lent else None


def last_gradient_bytes(
    piece: Stretch,
    events: Sequence[_Event],
    placed: Sequence[Placed],
    gradients: Gradients,
    buffers: Buffers,
) -> int:
    """Of the last gradient that is added to those of the piece's unit, which autograd holds meanwhile; 0 of an only one, which
    becomes its unit's buffer."""
    unit = piece.unit
    if unit is None or piece.phase != "backward" or unit in buffers.adopting:
        return 0
    rows = [placed[e.number].row for e in events if gradient_unit(e, piece, placed, gradients) == unit]
    if len(rows) < 2:
        return 0
    return max(
        rows, key=lambda row: row.birth_s if row.accumulated_s is None else row.accumulated_s
    ).size_bytes
