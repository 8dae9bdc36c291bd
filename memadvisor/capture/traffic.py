"""Bytes that one operator must move: what it reads and writes of its tensors, each element once.

That is the least traffic, with which the roofline model is drawn (Williams, Waterman, Patterson, CACM 2009); what
an operator keeps inside, and what it reads twice because it did not fit a cache, is not in it. A view moves
nothing. A look-up (embedding, index, gather) reads what it takes, not its whole table; an update of some rows
touches those. An expanded tensor counts its stored elements. Collectives are not counted here.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from memadvisor.capture.tensor_storage import NO_TENSORS, PLAIN_TENSORS

_STRIDED = torch.strided
_NOTHING_MOVES = frozenset(
    (
        "_unsafe_view",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "set_",
    )
)
_LOOK_UPS = frozenset(("embedding", "index_select", "index", "gather", "take", "_embedding_bag"))
_PARTIAL_UPDATES = frozenset(
    ("index_put_", "_index_put_impl_", "scatter_", "scatter_add_", "index_add_", "index_copy_", "index_fill_")
)
_OVERWRITES = frozenset(
    ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_")
)


class Rule(NamedTuple):
    """What a schema says of an operator; `written` are the arguments it changes, `unread` those of them that it
    does not look at before."""

    moves: bool
    is_plain: bool  # reads its arguments, changes none of them and writes its results
    changes_first: bool  # reads its arguments, changes the first of them alone and returns it
    is_look_up: bool
    is_partial: bool
    written: frozenset[str]
    unread: frozenset[str]
    uses: tuple[tuple[bool, bool], ...]  # of each argument: whether it is written, whether it is read


def moved_bytes(rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[int, int]:
    """(read, written) bytes of one call. A tensor that does not tell its size raises."""
    if not rule.moves:
        return 0, 0
    read: dict[int, int] = {}
    results: dict[int, int] = {}
    if rule.is_plain:
        _add((out,), results)
        _add(args, read)
        if kwargs:
            _add(kwargs.values(), read)
        return sum(read.values()), sum(results.values())
    written: dict[int, int] = {}
    for value, (is_written, is_read) in zip(args, rule.uses, strict=False):
        kind = type(value)
        if kind in PLAIN_TENSORS:
            size_bytes = stored_bytes(value)
            if is_written:
                written[id(value)] = size_bytes
            if is_read:
                read[id(value)] = size_bytes
        elif kind not in NO_TENSORS:
            _use(value, written if is_written else None, read if is_read else None)
    for name, value in kwargs.items():
        is_written, is_read = name in rule.written, name not in rule.unread
        _use(value, written if is_written else None, read if is_read else None)
    if id(out) in written:  # most that change an argument return it
        taken = 0
    else:
        _add((out,), results)
        taken = sum(size_bytes for key, size_bytes in results.items() if key not in written)
    if rule.is_look_up and read:
        return sum(read.values()) - max(read.values()) + taken, taken
    if rule.is_partial and len(read) > 1:
        # The largest argument is the table; as many bytes of it are touched as there are values.
        values = sum(read.values()) - max(read.values())
        return values, min(values, sum(written.values()))
    return sum(read.values()), sum(written.values()) + taken


def rule_of(func: Any) -> Rule:
    name, schema = func._opname, func._schema
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    written = frozenset(
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    )
    if name.startswith("_fused_"):  # a fused optimizer's gradients are changed only where it unscales them
        written -= {"grads"}
    unread = frozenset(a.name for a in schema.arguments if a.is_out)
    if name in _OVERWRITES:
        unread |= {"self"}
    is_look_up, is_partial = name in _LOOK_UPS, name in _PARTIAL_UPDATES
    names = tuple(a.name for a in schema.arguments)
    is_special = bool(unread) or is_look_up or is_partial
    return Rule(
        moves=not is_view and name not in _NOTHING_MOVES,
        is_plain=not (written or is_special),
        changes_first=written == frozenset(names[:1]) and len(schema.returns) == 1 and not is_special,
        is_look_up=is_look_up,
        is_partial=is_partial,
        written=written,
        unread=unread,
        uses=tuple((name in written, name not in unread) for name in names),
    )


def _use(value: Any, written: dict[int, int] | None, read: dict[int, int] | None) -> None:
    """Add an argument to those that are written, read, or both."""
    found: dict[int, int] = {}
    _add((value,), found)
    if written is not None:
        written.update(found)
    if read is not None:
        read.update(found)


def stored_bytes(tensor: torch.Tensor) -> int:
    size_bytes = tensor.nbytes
    if (
        tensor.layout == _STRIDED
        and not tensor.is_contiguous()
        and _shares_elements(tensor.shape, tensor.stride())  # expanded, perhaps
    ):
        size_bytes = min(size_bytes, tensor.untyped_storage().nbytes())
    return size_bytes


@lru_cache(maxsize=4096)
def _shares_elements(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor has more elements than there are between its first and its last, and perhaps than its storage."""
    return prod(shape) > 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _add(values: Iterable[Any], found: dict[int, int]) -> None:
    """Bytes by tensor: the same one given twice is read once, and one that is changed in place is no result."""
    for value in values:
        kind = type(value)
        if kind in NO_TENSORS:
            continue
        if kind in PLAIN_TENSORS or isinstance(value, torch.Tensor):
            found[id(value)] = stored_bytes(value)
        elif isinstance(value, (list, tuple)):
            _add(value, found)
