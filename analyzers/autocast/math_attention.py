"""Attention that torch's `scaled_dot_product_attention` writes out, as it does on CPUs with dropout: of bfloat16 it computes in
float32, on copies of queries, keys and values, and casts its result."""

from __future__ import annotations

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
        for place, call in enumerate(forward):
            if call.row.name != _SOFTMAX:
                continue
            before = next((n for n in range(place - 1, -1, -1) if forward[n].row.name == _PRODUCT), None)
            after = next((n for n in range(place + 1, len(forward)) if forward[n].row.name == _PRODUCT), None)
            if before is None or after is None:
                continue
            first = min([before, *(maker.get(row.storage_id, before) for row in forward[before].reads)])
            self.inside.update(id(each) for each in forward[first : after + 1])
            self.last.add(id(forward[after]))
