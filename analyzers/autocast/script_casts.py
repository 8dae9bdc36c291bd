"""The script's own casts to float32, of what is float32 in the recorded step and may be bfloat16 under autocast.

There they are copies, which the operators that follow in the same call of a module are given in place of the original: what
else the script has of it, it has of the original. Where nothing follows the cast there, it is what the call returns.

Which dtype was asked for stands in the run as float32, whether the script says `.float()` or `.to(x.dtype)`. So of what was
computed from such a copy, in the same call, a further cast is the way back (`hidden.to(input_dtype)` at the end of a norm of
transformers' models): nobody casts float32 to float32.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from memadvisor.analyzers.autocast.graph import FORWARDS, Call, StepGraph
from memadvisor.analyzers.autocast.recasting import NARROW, WIDE, Recasting
from memadvisor.run.autocast_records import IdleCast
from memadvisor.run.records import Storage
from memadvisor.run.run import RankRun

_OF_THE_SCRIPT = ("aten::to", "aten::type_as")  # else an operator's, for itself
IsNarrow = Callable[[Storage, float], bool]


@dataclass(frozen=True, slots=True)
class _Form:
    """What operators are given of a storage from `start_s` on, before `end_s`: the copy of this number."""

    start_s: float
    end_s: float
    is_narrow: bool
    number: int
    row: Storage


class ScriptCasts:
    """To be told of the forwards' operators one after the other, each before it is looked at. `is_narrow` tells of a storage,
    but for the copies here, whether it is bfloat16 at a moment."""

    def __init__(self, rank: RankRun, graph: StepGraph, recasting: Recasting, is_narrow: IsNarrow) -> None:
        self._graph = graph
        self._recasting = recasting
        self._is_narrow_else = is_narrow
        self._rows = {row.storage_id: row for row in rank.storages}
        self._casts = sorted(rank.idle_casts, key=lambda cast: cast.time_s, reverse=True)
        self._modules = sorted(rank.module_calls, key=lambda call: call.start_s)
        self._given = {
            (tensor.storage_id, tensor.call_id) for tensor in rank.call_tensors if tensor.role == "input"
        }
        self._calls = [call for call in graph.calls if call.row.phase in FORWARDS]
        self._forms: dict[int, list[_Form]] = defaultdict(list)
        self._made_of_copies: dict[int, float] = {}  # by storage, until when that matters

    def is_narrow(self, row: Storage, time_s: float) -> bool:
        form = self._form(row.storage_id, time_s)
        return self._is_narrow_else(row, time_s) if form is None else form.is_narrow

    def go_on_to(self, call: Call) -> None:
        """Make the copies of casts before this operator, and see whether it works on one of them."""
        while self._casts and self._casts[-1].time_s <= call.row.start_s:
            self._cast(self._casts.pop())
        if not self._forms:
            return
        time_s = call.row.start_s
        wide = [row.storage_id for row in call.reads if not self.is_narrow(row, time_s)]
        ends = [form.end_s for number in wide if (form := self._form(number, time_s)) is not None]
        ends += [end_s for number in wide if (end_s := self._made_of_copies.get(number, 0.0)) > time_s]
        for row in call.made if ends else ():
            self._made_of_copies[row.storage_id] = max(ends)

    def done(self) -> None:
        """Once all operators have been looked at: the copies are there as long as anything needs them."""
        reads: dict[int, list[Call]] = defaultdict(list)
        for call in self._calls:
            for row in call.reads:
                reads[row.storage_id].append(call)
        for storage_id, forms in self._forms.items():
            used_s = {form.number: form.start_s for form in forms}
            own_s = forms[0].start_s
            for call in reads[storage_id]:
                form = self._form(storage_id, call.row.start_s)
                if form is None:
                    own_s = max(own_s, call.row.end_s)
                else:
                    used_s[form.number] = max(used_s[form.number], call.row.end_s)
            held_s = self._rows[storage_id].last_held_s
            for form in forms:
                if form.end_s == inf and held_s is not None:  # the script has that one
                    used_s[form.number], held_s = max(used_s[form.number], held_s), None
                self._recasting.settle(form.number, used_s[form.number])
                own_s = max(own_s, self._argument_until(storage_id, form.start_s))
            self._recasting.last_uses[storage_id] = max(own_s, held_s or own_s)

    def _form(self, storage_id: int, time_s: float) -> _Form | None:
        forms = self._forms.get(storage_id, ())
        return next((form for form in reversed(forms) if form.start_s <= time_s < form.end_s), None)

    def _cast(self, cast: IdleCast) -> None:
        time_s, row = cast.time_s, self._rows.get(cast.storage_id)
        if row is None or row.dtype != WIDE or self._graph.outermost_at(time_s) is None:
            return
        is_wanted = self._is_wanted_narrow(cast)
        if self.is_narrow(row, time_s) == is_wanted:
            return
        end_s = inf if is_wanted else self._end_of(cast)
        place = bisect_left(self._calls, time_s, key=lambda call: call.row.start_s)
        following = self._calls[place] if place < len(self._calls) else None
        like = next(iter(following.made), row) if following is not None else row
        number = self._recasting.add(
            row,
            NARROW if is_wanted else WIDE,
            like,
            birth_s=time_s,
            death_s=time_s,
            saved=self._recasting.saved_between(row.storage_id, time_s, end_s),
            shape=cast.shape,
        )
        self._forms[row.storage_id].append(_Form(time_s, end_s, is_wanted, number, row))

    def _is_wanted_narrow(self, cast: IdleCast) -> bool:
        like = None if cast.like_id is None else self._rows.get(cast.like_id)
        if like is not None:
            form = self._form(like.storage_id, cast.time_s)
            is_copy = form is not None and not form.is_narrow  # to which nobody would go back
            return self._is_narrow_else(like, cast.time_s) if is_copy else self.is_narrow(like, cast.time_s)
        return (
            cast.operator in _OF_THE_SCRIPT and self._made_of_copies.get(cast.storage_id, 0.0) > cast.time_s
        )

    def _end_of(self, cast: IdleCast) -> float:
        """Of the innermost call of a module around it; for ever, where it is the last that happens there."""
        place = bisect_left(self._calls, cast.time_s, key=lambda call: call.row.start_s)
        if place == len(self._calls):
            return inf
        following = self._calls[place].row
        if cast.operator not in _OF_THE_SCRIPT:
            return following.end_s
        around = self._around(cast.time_s)
        end_s = inf if not around or around[-1][1] < following.start_s else around[-1][1]
        # `norm(x.float()).type_as(x)`: the script has the original still.
        asked_s = [later.time_s for later in self._casts if later.like_id == cast.storage_id]
        return min([end_s, *asked_s])

    def _around(self, time_s: float) -> list[tuple[int, float]]:
        """Calls of modules around a moment, the innermost one last: number and end."""
        last = bisect_right(self._modules, time_s, key=lambda call: call.start_s)
        return [(call.call_id, call.end_s) for call in self._modules[:last] if call.end_s >= time_s]

    def _argument_until(self, storage_id: int, time_s: float) -> float:
        """Whoever calls a module holds what it is called with until it returns."""
        given = [end_s for number, end_s in self._around(time_s) if (storage_id, number) in self._given]
        return max(given, default=time_s)
