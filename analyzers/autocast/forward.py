"""The forwards of a recorded step as autocast has them: what is bfloat16 there, and which copies it makes."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import pairwise

from memadvisor.analyzers.autocast.graph import FORWARDS, Call, StepGraph
from memadvisor.analyzers.autocast.math_attention import MathAttention
from memadvisor.analyzers.autocast.operands import operand_shape
from memadvisor.analyzers.autocast.recasting import NARROW, WIDE, Recasting
from memadvisor.analyzers.autocast.rules import Computes, computes, computes_without, is_attention
from memadvisor.analyzers.autocast.script_casts import ScriptCasts
from memadvisor.analyzers.frozen_weights import frozen_storages
from memadvisor.analyzers.shapes import dimensions
from memadvisor.run.records import ModuleCall, Storage
from memadvisor.run.run import RankRun

_PROMOTED = ("aten::cat", "aten::stack")  # which autocast itself has work on the widest dtype
_SUMS, _PRODUCTS = ("aten::add", "aten::add_"), ("aten::mm", "aten::bmm")
_ATTENTION_DIMENSIONS = 4  # of queries, keys, values and results; logsumexps have less, and stay float32


class Forwards:
    """Goes through the operators once, in the order in which they ran."""

    def __init__(self, rank: RankRun, graph: StepGraph, recasting: Recasting) -> None:
        self._graph = graph
        self._recasting = recasting
        self._device_type = rank.process.device.partition(":")[0]
        self._weights = {
            row.storage_id for row in rank.storages if row.category == "parameter" and row.dtype == WIDE
        }
        self._trained = self._weights - frozen_storages(rank)
        self._following = {id(one): other.row.name for one, other in pairwise(graph.calls)}
        self._attention = MathAttention(graph.calls)
        self._cached: dict[tuple[int, float], int] = {}  # of weights, by outermost call
        self._rows = {row.storage_id: row for row in rank.storages}
        self._given: dict[int, int] = {}  # by storage, the float32 that the script has been given of it
        self._given_s: dict[int, float] = {}  # and since when
        self._casts = ScriptCasts(rank, graph, recasting, self._is_narrow_at)
        results: dict[int, list[Storage]] = defaultdict(list)
        for tensor in rank.call_tensors:
            if tensor.role == "output" and tensor.storage_id in self._rows:
                results[tensor.call_id].append(self._rows[tensor.storage_id])
        results.update((call.call_id, [result]) for call, result in graph.evaluations if result is not None)
        ended = [outermost for outermost in graph.outermost if outermost.phase == "forward"]
        for call in graph.calls:
            if call.row.phase in FORWARDS and (around := graph.outermost_at(call.row.start_s)) is not None:
                while ended and ended[0].start_s < around.start_s:
                    self._give_back(ended[0], results[ended.pop(0).call_id])
                self._casts.go_on_to(call)
                self._run(call)
        for outermost in ended:
            self._give_back(outermost, results[outermost.call_id])
        self._casts.done()
        for storage_id, number in self._given.items():
            self._recasting.let_go(number, self._rows[storage_id])

    def rule(self, call: Call) -> Computes:
        if self._graph.is_off_at(call.row.start_s):
            return computes_without(call.row.name)
        if id(call) in self._attention.inside:
            return Computes.WIDE
        if self._adds_bias(call):
            return Computes.NARROW
        return computes(call.row.name, self._device_type, self._following.get(id(call), ""))

    def narrow_calls(
        self, names: Collection[str], backward_names: Collection[str]
    ) -> Iterator[tuple[Call, Call | None]]:
        """Operators of these names that are in 16 bits, each with the one whose gradients it gives; None for one of a forward."""
        for call in self._graph.calls:
            if call.row.name in names and call.row.phase in FORWARDS and self._is_narrow(call):
                yield call, None
        for group in self._graph.groups():
            if self._is_narrow(group.of):
                yield from ((call, group.of) for call in group.calls if call.row.name in backward_names)

    def _is_narrow(self, call: Call) -> bool:
        is_inside = self._graph.outermost_at(call.row.start_s) is not None
        return is_inside and self.rule(call) is Computes.NARROW

    def _adds_bias(self, call: Call) -> bool:
        """Whether it is the end of a linear layer that torch has as a product and a sum: its bias is an operand as well."""
        if call.row.name not in _SUMS or len(call.reads) != 2:
            return False
        product, bias = call.reads
        return (
            bias.storage_id in self._weights
            and len(dimensions(bias.shape)) == 1
            and product.operator in _PRODUCTS
            and product.module == call.row.module
        )

    def is_narrow_to(self, call: Call, row: Storage) -> bool:
        """As this operator of a forward found it, or left it."""
        return self._casts.is_narrow(row, call.row.start_s)

    def _is_narrow_at(self, row: Storage, time_s: float) -> bool:
        """But for copies of the script's: of a model's result it has float32 alone."""
        given_s = self._given_s.get(row.storage_id)
        return (given_s is None or time_s < given_s) and self._recasting.is_narrow(row)

    def _run(self, call: Call) -> None:
        rule = self.rule(call)
        numbers = [row for row in call.reads if row.dtype in (WIDE, NARROW)]
        if rule is Computes.NARROW:
            for row in numbers:
                if not self.is_narrow_to(call, row):
                    self._copy(call, row, NARROW)
            self._make(call, is_narrow=bool(numbers))
        elif rule is Computes.WIDE:
            for row in numbers:
                if self.is_narrow_to(call, row):
                    self._copy(call, row, WIDE)
            if id(call) in self._attention.last:
                self._cast_result(call)
        elif rule is Computes.AS_FIRST:
            first = next(iter(numbers), None)
            if first is not None and self.is_narrow_to(call, first):
                self._make(call, is_narrow=True, like=first)
        else:
            self._make(call, is_narrow=self._are_narrow(call, numbers))
            self._meet(call, numbers)

    def _cast_result(self, call: Call) -> None:
        for row in call.made:
            self._recasting.add(row, WIDE, row, birth_s=row.birth_s, death_s=call.row.end_s)
            self._recasting.narrow.add(row.storage_id)

    def _are_narrow(self, call: Call, numbers: list[Storage]) -> bool:
        """Whether the widest of several is bfloat16; a single number has no say among larger tensors."""
        large = [row for row in numbers if dimensions(row.shape)] or numbers
        return bool(large) and all(self.is_narrow_to(call, row) for row in large)

    def _make(self, call: Call, *, is_narrow: bool, like: Storage | None = None) -> None:
        if not is_narrow:
            return
        dimensions_of_result = _ATTENTION_DIMENSIONS if is_attention(call.row.name) else None
        for row in call.made:
            if row.dtype != WIDE or dimensions_of_result not in (None, len(dimensions(row.shape))):
                continue
            if like is None or like.size_bytes == row.size_bytes:
                self._recasting.narrow.add(row.storage_id)

    def _meet(self, call: Call, numbers: list[Storage]) -> None:
        """Both dtypes meet: on a CPU the operator, and everywhere what autocast promotes, has the narrow ones in float32."""
        if len({self.is_narrow_to(call, row) for row in numbers}) < 2 or not call.made:
            return
        if self._device_type == "cpu" or call.row.name in _PROMOTED:
            for row in numbers:
                if self.is_narrow_to(call, row):
                    self._copy(call, row, WIDE, keeps=False)

    def _copy(self, call: Call, row: Storage, dtype: str, *, keeps: bool = True) -> None:
        """What an operator is given in another dtype; what it would keep of the original, it `keeps` of the copy."""
        saved = self._recasting.saved_by(row.storage_id, call.row.node) if keeps else []
        around = self._graph.outermost_at(call.row.start_s)
        place = next(iter(call.made), row)
        end_s, cached = call.row.end_s, None
        # Of weights that nobody asks a gradient of, each use makes a copy of its own.
        if dtype == NARROW and row.storage_id in self._trained and around is not None:
            cached = row.storage_id, around.start_s
            if cached in self._cached:
                self._recasting.keep_too(self._cached[cached], saved)
                return
            end_s = max(end_s, self._last_end_s(around))  # its cache is emptied behind that
        number = self._recasting.add(
            row,
            dtype,
            place,
            birth_s=call.row.start_s,
            death_s=end_s,
            saved=saved,
            held_s=None if cached is None else end_s,
            shape=self._copied_shape(call, row, saved),
        )
        if cached is not None:
            self._cached[cached] = number

    def _give_back(self, outermost: ModuleCall, results: list[Storage]) -> None:
        """What the script gets of a model is float32: a copy of what was made, which goes once nobody asks for it."""
        cast_s = (self._last_end_s(outermost) + outermost.end_s) / 2
        for row in results:
            if row.storage_id not in self._given and self._casts.is_narrow(row, outermost.end_s):
                self._given_s[row.storage_id] = cast_s
                later = self._recasting.saved_after(row.storage_id, outermost.end_s)
                self._given[row.storage_id] = self._recasting.add(
                    row, WIDE, row, birth_s=cast_s, death_s=row.death_s, saved=later
                )
                self._recasting.deaths[row.storage_id] = self._recasting.kept_until(
                    row.storage_id, outermost.end_s
                )

    def _last_end_s(self, outermost: ModuleCall) -> float:
        """When the last operator of a call was over. Then autocast ends, and what the call returns is cast."""
        place = bisect_right(self._graph.calls, outermost.end_s, key=lambda call: call.row.start_s) - 1
        return min(outermost.end_s, self._graph.calls[place].row.end_s) if place >= 0 else outermost.start_s

    def _copied_shape(self, call: Call, row: Storage, saved: list[int]) -> str:
        """Of a copy. A weight is copied before it is transposed, and it is that which autograd keeps."""
        shape = operand_shape(call, row, self._recasting.shapes_of(saved))
        is_whole = sorted(dimensions(shape)) == sorted(dimensions(row.shape))
        return row.shape if is_whole and row.storage_id in self._weights else shape
