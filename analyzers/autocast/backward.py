"""The backwards of a recorded step as autocast has them: gradients are of the dtype of what they are of."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from memadvisor.analyzers.autocast.forward import Forwards
from memadvisor.analyzers.autocast.graph import FORWARDS, Call, Group, StepGraph
from memadvisor.analyzers.autocast.recasting import NARROW, WIDE, Recasting
from memadvisor.analyzers.autocast.rules import Computes
from memadvisor.analyzers.shapes import dimensions
from memadvisor.run.records import Storage

_SUMS = ("aten::add", "aten::add_")  # of gradients that meet


class Backwards:
    """Goes through the nodes once, in the order in which they ran."""

    def __init__(self, graph: StepGraph, forwards: Forwards, recasting: Recasting) -> None:
        self._forwards = forwards
        self._recasting = recasting
        self._starts = [call.row.start_s for call in graph.calls]
        self._copies: dict[
            int, tuple[int, float]
        ] = {}  # of gradients in the other dtype, and when they were made
        self._last_reads = _last_reads(graph)
        self._wide_until: dict[int, float] = {}  # by gradient with a copy, the last read of itself
        for group in graph.groups():
            if group.of.row.phase in FORWARDS and graph.outermost_at(group.of.row.start_s) is not None:
                self._run(group)
        for storage_id, (number, made_s) in self._copies.items():
            self._recasting.deaths.setdefault(
                storage_id, max(made_s, self._wide_until.get(storage_id, made_s))
            )
            self._recasting.keep_until(number, made_s)

    def _run(self, group: Group) -> None:
        own = {row.storage_id for call in group.calls for row in call.made}
        sums = [call for call in group.calls if _is_sum(call, own)]
        summed = {row.storage_id for call in sums for row in call.made}
        result = group.of.result
        is_narrow = result is not None and self._forwards.is_narrow_to(group.of, result)
        for call in group.calls:
            for row in call.reads:
                if row.storage_id not in own and row.phase == "backward" and row.dtype == WIDE:
                    self._take(group, call, row, is_narrow=is_narrow and call not in sums)
        made = [row for call in group.calls for row in call.made if row.dtype == WIDE]
        self._make(group, [row for row in made if row.storage_id not in summed], is_narrow, sums)
        for call in sums:
            if all(map(self._recasting.is_narrow, call.reads)):
                self._recasting.narrow.update(row.storage_id for row in call.made if row.dtype == WIDE)

    def _take(self, group: Group, call: Call, row: Storage, *, is_narrow: bool) -> None:
        """A gradient that comes to a node: in the dtype of that node's result, or as a copy in that."""
        if self._recasting.is_narrow(row) == is_narrow or call.row.name in _SUMS:
            self._wide_until[row.storage_id] = call.row.end_s
            return
        last_s = row.death_s if self._last_reads.get(row.storage_id) == call.row.end_s else None
        known = self._copies.get(row.storage_id)
        if known is None:
            dtype = NARROW if is_narrow else WIDE
            number = self._recasting.add(
                row, dtype, row, birth_s=group.start_s, death_s=last_s or call.row.end_s
            )
            self._copies[row.storage_id] = number, group.start_s
        else:
            self._recasting.keep_until(known[0], last_s or call.row.end_s)

    def _make(self, group: Group, made: Sequence[Storage], is_narrow: bool, sums: Sequence[Call]) -> None:
        rule = self._forwards.rule(group.of)
        operands = [row for row in group.of.reads if row.dtype in (WIDE, NARROW)]
        computed = {Computes.NARROW: True, Computes.WIDE: False}.get(rule, is_narrow)
        gradients = _gradients(made, operands)
        end_s = min([group.end_s, *(call.row.start_s for call in sums)])
        recast = []
        for row in made:
            operand = gradients.get(row.storage_id)
            wanted = computed if operand is None else self._forwards.is_narrow_to(group.of, operand)
            if rule is Computes.AS_FIRST and operand is not None:
                computed = wanted
            if wanted:
                self._recasting.narrow.add(row.storage_id)
            if computed != wanted:
                recast.append((row, operand))
        # Autograd goes through the casts of operands last first: of activations, of weights, of biases.
        recast.sort(
            key=lambda item: (item[1] is not None and item[1].category == "parameter", -item[0].size_bytes)
        )
        given = [row for call in group.calls for row in call.reads]
        self._cast(recast, given, end_s, NARROW if computed else WIDE)

    def _cast(
        self,
        recast: Sequence[tuple[Storage, Storage | None]],
        given: Sequence[Storage],
        end_s: float,
        dtype: str,
    ) -> None:
        """Gradients that were computed in one dtype, and are then cast to that of what they are of, one by one."""
        following = bisect_right(self._starts, end_s)
        next_s = self._starts[following] if following < len(self._starts) else end_s
        gone = [row.death_s for row in given if row.death_s is not None and end_s < row.death_s < next_s]
        end_s = max([end_s, *gone])  # what the node was given is let go of first
        step_s = max(0.0, next_s - end_s) / (2 * len(recast) + 2)
        for place, (row, _) in enumerate(recast):
            cast_s = end_s + (2 * place + 1) * step_s
            self._recasting.add(row, dtype, row, birth_s=row.birth_s, death_s=cast_s + step_s)
            self._recasting.births[row.storage_id] = cast_s


def _is_sum(call: Call, own: set[int]) -> bool:
    """Whether gradients of one tensor are added: one that this node has made, and one of before."""
    numbers = [row.storage_id in own for row in call.reads]
    return call.row.name in _SUMS and any(numbers) and not all(numbers)


def _last_reads(graph: StepGraph) -> dict[int, float]:
    """By storage, when the last operator that reads it has ended."""
    return {row.storage_id: call.row.end_s for call in graph.calls for row in call.reads}


def _gradients(made: Sequence[Storage], operands: Sequence[Storage]) -> dict[int, Storage]:
    """By storage that a node has made, the operand that it is the gradient of: the last one of its size, and its shape."""
    found: dict[int, Storage] = {}
    left = list(operands)
    for alike in (_same_shape, _same_size):
        for row in reversed(made):
            operand = next((one for one in left if row.storage_id not in found and alike(row, one)), None)
            if operand is not None:
                found[row.storage_id] = operand
                left.remove(operand)
    return found


def _same_shape(one: Storage, other: Storage) -> bool:
    return dimensions(one.shape) == dimensions(other.shape)


def _same_size(one: Storage, other: Storage) -> bool:
    return one.size_bytes == other.size_bytes
