"""Attention that torch's `scaled_dot_product_attention` writes out, as it does on CPUs with dropout: of bfloat16 it computes in
float32, on copies of queries, keys and values, and casts its result."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from memadvisor.analyzers.autocast.graph import FORWARDS, Call

_SOFTMAX, _PRODUCT = "aten::_safe_softmax", "aten::bmm"  # of no other operator


class MathAttention:
    """`inside`: ids of its operators' calls; `last`: of those whose result is cast back."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.inside: set[int] = set()
        self.last: set[int] = set()
        forward = [call for call in calls if call.row.phase in FORWARDS]
        maker = {row.storage_id: place for place, call in enumerate(forward) for row in call.made}
        products = [place for place, call in enumerate(forward) if call.row.name == _PRODUCT]
        parts = []
        for place, call in enumerate(forward):
            behind = bisect_right(products, place)
            if call.row.name != _SOFTMAX or not 0 < behind < len(products):
                continue
            before, after = products[behind - 1], products[behind]
            first = min([before, *(maker.get(row.storage_id, before) for row in forward[before].reads)])
            parts.append((first, after))
            self.last.add(id(forward[after]))
        done = 0  # parts of a damaged run may all begin with its first operator
        for first, after in sorted(parts):
            self.inside.update(id(each) for each in forward[max(first, done) : after + 1])
            done = max(done, after + 1)
