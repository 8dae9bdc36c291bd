"""Which tensors the forward keeps for the backward in one run and not in the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memadvisor.analyzers.activations import Activations, Lifetime
from memadvisor.analyzers.before_after import Change


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensorChange:
    """Tensors of one kind that one micro-batch keeps from its forward on: of one module, made by one operator, of one dtype,
    shape and size. What a second forward makes again in the backward is not kept, and counts as gone."""

    module: str
    operator: str
    dtype: str
    shape: str
    size_bytes: int  # of one
    num_kept: Change[int]
    saved_bytes: Change[int]


def saved_tensors(
    before: Activations | None, after: Activations | None
) -> tuple[SavedTensorChange, ...] | None:
    """Kinds of which more or fewer are kept, the largest difference of bytes first; None where either run recorded none.
    Their differences sum to that of `saved_bytes`."""
    if before is None or after is None:
        return None
    first, second = (_counted(kept) for kept in (before, after))
    rows = [
        _change(kind, first.get(kind, 0), second.get(kind, 0))
        for kind in {**first, **second}
        if first.get(kind, 0) != second.get(kind, 0)
    ]
    return tuple(sorted(rows, key=lambda row: -abs(row.saved_bytes.difference or 0)))


_Kind = tuple[str, str, str, str, int]


def _kind(life: Lifetime) -> _Kind:
    return life.module or life.unit, life.operator, life.dtype, life.shape, life.size_bytes


def _counted(kept: Activations) -> Mapping[_Kind, int]:
    found: dict[_Kind, int] = {}
    for life in kept.of_one_micro_batch:
        found[_kind(life)] = found.get(_kind(life), 0) + 1
    return found


def _change(kind: _Kind, num_before: int, num_after: int) -> SavedTensorChange:
    module, operator, dtype, shape, size_bytes = kind
    return SavedTensorChange(
        module=module,
        operator=operator,
        dtype=dtype,
        shape=shape,
        size_bytes=size_bytes,
        num_kept=Change(before=num_before, after=num_after),
        saved_bytes=Change(before=num_before * size_bytes, after=num_after * size_bytes),
    )
