"""What was asked of a GPU's allocator for each storage, whose block may be up to 1 MiB larger, where the rest was not worth
splitting off.

Of what operators make inside themselves only the block is known. Calls of an operator that read and write as much do the
same, layer by layer, so each of their buffers is taken for the smallest block that any of them was given for it; where that
cannot be told, for the smallest one of about as much that such an operator was given. And that is taken for what others asked
for that were mostly given as much.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from memadvisor.analyzers.shapes import dimensions
from memadvisor.cost.allocator_settings import MIN_BLOCK_BYTES, SMALL_BYTES
from memadvisor.run.records import CUBLAS, CUBLAS_LT, Operator, Storage

_ABOUT_AS_MUCH = 0.1  # how much smaller one may be, as a fraction
_INSIDE = "inside "
_ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
}

_Kind = tuple[str, int, int, int]  # of an operator's calls, and of a buffer in one


def requests(rows: Sequence[Storage], operators: Iterable[Operator] = ()) -> Callable[[Storage], int]:
    """Bytes that were asked for, of each row."""
    blocks: dict[int, Counter[int]] = defaultdict(Counter)  # that were given for so many bytes
    inside: dict[str, set[int]] = defaultdict(set)  # blocks of an operator's own
    alike: dict[_Kind, set[int]] = defaultdict(set)  # and of one buffer of calls that do the same
    kinds = _kinds(rows, operators)
    for row in rows:
        if row.shape and row.device != "cpu":
            blocks[_requested_bytes(row)][row.size_bytes] += 1
        elif not row.shape:
            inside[row.operator].add(row.size_bytes)
            if row.storage_id in kinds:
                alike[kinds[row.storage_id]].add(row.size_bytes)
    usual = {given.most_common(1)[0][0]: asked for asked, given in blocks.items()}

    def requested_bytes(row: Storage) -> int:
        if row.shape or row.device == "cpu" or row.operator in (CUBLAS, CUBLAS_LT):
            return _requested_bytes(row)
        least_bytes: float = row.size_bytes - SMALL_BYTES
        own = alike[kinds[row.storage_id]] if row.storage_id in kinds else None
        if own is None:
            own = inside.get(row.operator, set())
            least_bytes = max(least_bytes, row.size_bytes * (1 - _ABOUT_AS_MUCH))
        smallest = min((size for size in own if least_bytes <= size), default=row.size_bytes)
        smallest = min(smallest, row.size_bytes)
        return usual.get(smallest, smallest)

    return requested_bytes


def _kinds(rows: Iterable[Storage], operators: Iterable[Operator]) -> dict[int, _Kind]:
    """Of buffers inside operators, by storage: the operator, what the call reads and writes, and which of its buffers it is."""
    calls = sorted((row for row in operators if row.read_bytes), key=lambda row: row.start_s)
    starts = [call.start_s for call in calls]
    num_seen: Counter[int] = Counter()
    found: dict[int, _Kind] = {}
    for row in sorted(rows, key=lambda row: row.birth_s):
        place = bisect_right(starts, row.birth_s) - 1
        if not row.operator.startswith(_INSIDE) or place < 0:
            continue
        call = calls[place]
        if row.birth_s <= call.end_s:  # perhaps in another operator that it calls
            found[row.storage_id] = call.name, call.read_bytes or 0, call.written_bytes or 0, num_seen[place]
            num_seen[place] += 1
    return found


def _requested_bytes(row: Storage) -> int:
    item_bytes = _ITEM_BYTES.get(row.dtype)
    if row.device == "cpu" or item_bytes is None or not row.shape:
        return row.size_bytes
    size_bytes = item_bytes * math.prod(dimensions(row.shape))
    rest_bytes = row.size_bytes - size_bytes
    return (
        size_bytes if size_bytes > 0 and 0 <= rest_bytes <= SMALL_BYTES + MIN_BLOCK_BYTES else row.size_bytes
    )
