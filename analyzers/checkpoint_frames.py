"""What each call of a module would keep, free and make anew if it were checkpointed.

The rules are those of `torch.utils.checkpoint.checkpoint(module, ..., use_reentrant=False)` with its
defaults, read from torch 2.13's torch/utils/checkpoint.py:
- what autograd saves inside the call is dropped; the call's arguments and the random state are kept until
  the last saved tensor of the call would have been let go;
- the first time that the backward wants one of them, the forward runs again, up to the moment that the
  last tensor is saved, and no further (early stop);
- what the second run saves is held until the backward has used it; all else of it dies;
- each backward of a graph that is kept (retain_graph=True) has a second run of its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from memadvisor.analyzers.altered_curve import FOREVER_S
from memadvisor.analyzers.derivatives import repeated_backwards
from memadvisor.analyzers.weight_casts import cached_casts, is_weight_cast
from memadvisor.run.records import ModuleCall, Operator, Saved, Span, Step, Storage
from memadvisor.run.run import RankRun

MODEL_STATES = ("parameter", "gradient", "optimizer_state")


@dataclass(frozen=True, slots=True)
class Copy:
    """A storage that the second run makes and keeps for the backward until `until_s`."""

    size_bytes: int
    until_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One call of a module in a forward, seen as a checkpoint. Times are of the process's clock.

    `again_s`: when the backward first wants what it saved, None where it never does. `stop_s`: the last
    save, where the second run stops. `highest_bytes`: the most that the second run has alive of its own. `earlier`: of
    backwards before the last one, when each first wants what it saved, and what the second run then keeps.
    """

    call: ModuleCall
    saves: tuple[Saved, ...]
    inputs: frozenset[int]
    changes_input: bool
    stop_s: float
    again_s: float | None
    end_s: float
    copies: tuple[Copy, ...]
    highest_bytes: int
    earlier: tuple[tuple[float, tuple[Copy, ...]], ...] = ()

    @property
    def second_runs(self) -> tuple[tuple[float, tuple[Copy, ...]], ...]:
        """When each begins, and what it keeps."""
        return self.earlier if self.again_s is None else (*self.earlier, (self.again_s, self.copies))


def traced_calls(rank: RankRun) -> TracedCalls | None:
    """None when no step was traced, or nothing was seen in it."""
    step = rank.traced_step
    return None if step is None or not rank.storages else TracedCalls(rank, step)


class TracedCalls:
    """The traced step, ordered for questions about calls. Storages of other devices are left out."""

    def __init__(self, rank: RankRun, step: Step) -> None:
        self.rank = rank
        self.step = step
        own = [row for row in rank.storages if row.device == rank.process.device]
        self.storages = {row.storage_id: row for row in own}
        self.saves = sorted((r for r in rank.saved if r.storage_id in self.storages), key=lambda r: r.saved_s)
        self.saves_of: dict[int, list[Saved]] = defaultdict(list)  # in order of saving
        for save in self.saves:
            self.saves_of[save.storage_id].append(save)
        self.operators: list[Operator] = sorted(rank.operators, key=lambda row: row.start_s)
        self._operator_starts = [row.start_s for row in self.operators]
        self._save_times = [row.saved_s for row in self.saves]
        self._births = sorted((r for r in own if r.phase != "baseline"), key=lambda r: r.birth_s)
        self._birth_times = [row.birth_s for row in self._births]
        self._cached_casts = cached_casts(rank)
        self._read_calls()

    def _read_calls(self) -> None:
        inputs: dict[int, set[int]] = defaultdict(set)
        self._changing: set[int] = set()
        for row in self.rank.call_tensors:
            if row.role == "input":
                inputs[row.call_id].add(row.storage_id)
                if row.is_changed:
                    self._changing.add(row.call_id)
        self._inputs = {call_id: frozenset(found) for call_id, found in inputs.items()}
        self._argument_until: dict[int, float] = {}  # a caller's arguments live as long as the call
        for call in self.rank.module_calls:
            for storage_id in self._inputs.get(call.call_id, ()):
                until_s = self._argument_until.get(storage_id, call.end_s)
                self._argument_until[storage_id] = max(until_s, call.end_s)

    @cached_property
    def frames(self) -> tuple[Frame, ...]:
        """Calls in a forward that keep something, in order of their start."""
        calls = [call for call in self.rank.module_calls if call.phase == "forward"]
        found = (self._frame(call) for call in sorted(calls, key=lambda call: call.start_s))
        return tuple(frame for frame in found if frame is not None)

    def operators_between(self, start_s: float, end_s: float) -> Sequence[Operator]:
        """Operators that started in this stretch, in order."""
        first = bisect_left(self._operator_starts, start_s)
        return self.operators[first : bisect_right(self._operator_starts, end_s)]

    def released_s(self, saves: Sequence[Saved]) -> float:
        """When autograd has let go of all of these."""
        return max((FOREVER_S if s.released_s is None else s.released_s for s in saves), default=0.0)

    def is_held_elsewhere(self, storage: Storage) -> bool:
        """Whether it outlives autograd: somebody else, such as a script's variable, keeps it.

        What autograd alone keeps dies with its release, before any further operator runs.
        """
        if storage.phase == "baseline" or storage.category in MODEL_STATES:
            return True
        released_s = self.released_s(self.saves_of[storage.storage_id])
        death_s = FOREVER_S if storage.death_s is None else storage.death_s
        return self.has_operator_between(released_s, death_s)

    def has_operator_between(self, after_s: float, before_s: float) -> bool:
        """Whether any began after the one moment, and before the other."""
        following = bisect_right(self._operator_starts, after_s)
        return following < len(self.operators) and self._operator_starts[following] < before_s

    def argument_until_s(self, storage: Storage) -> float:
        """Until when a module that it was given to ran; 0 where it was given to none."""
        return self._argument_until.get(storage.storage_id, 0.0)

    def forward_end_s(self, storage: Storage) -> float:
        """Until when the forward itself needs a storage, as far as operators and arguments tell."""
        uses = [storage.birth_s, storage.last_forward_use_s, self._argument_until.get(storage.storage_id)]
        end_s = max(use for use in uses if use is not None)
        if storage.storage_id in self._cached_casts:
            end_s = max(end_s, self.backward_after(storage.birth_s))
        return end_s

    def backward_after(self, time_s: float) -> float:
        """When the first backward after a moment begins; the moment itself where none does."""
        position = bisect_left(self._backwards, time_s)
        return self._backwards[position] if position < len(self._backwards) else time_s

    @cached_property
    def _backwards(self) -> list[float]:
        spans = self.rank.spans
        return sorted(s.start_s for s in spans if s.step == self.step.index and s.kind == "backward")

    def _frame(self, call: ModuleCall) -> Frame | None:
        first = bisect_left(self._save_times, call.start_s)
        saves = self.saves[first : bisect_right(self._save_times, call.end_s)]
        if not saves:
            return None
        stop_s = saves[-1].saved_s
        wanted = [save.unpacked_s for save in saves if save.unpacked_s is not None]
        again_s = min(wanted, default=None)
        copies, highest_bytes = self._second_run(call, saves, stop_s, again_s)
        return Frame(
            call=call,
            saves=tuple(saves),
            inputs=self._inputs.get(call.call_id, frozenset()),
            changes_input=call.call_id in self._changing,
            stop_s=stop_s,
            again_s=again_s,
            end_s=self.released_s(saves),
            copies=copies,
            highest_bytes=highest_bytes,
            earlier=tuple(self._earlier_runs(call, saves)),
        )

    @cached_property
    def _repeated(self) -> Sequence[Span]:
        return repeated_backwards(self.rank)

    @cached_property
    def _times_of_nodes(self) -> Mapping[int, Sequence[tuple[float, float]]]:
        """By node, when operators of it have run in backwards that another one repeats."""
        found: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for span in self._repeated:
            for operator in self.operators_between(span.start_s, span.end_s):
                if operator.node is not None:
                    found[operator.node].append((operator.start_s, operator.end_s))
        return found

    def _earlier_runs(
        self, call: ModuleCall, saves: Sequence[Saved]
    ) -> Iterator[tuple[float, tuple[Copy, ...]]]:
        """Of each backward before the last one that goes through a call."""
        own = {row.storage_id for row in self._births_between(call.start_s, saves[-1].saved_s)}
        for span in self._repeated:
            until_s: dict[int, float] = {}
            again_s = []
            for save in saves:
                times = self._times_of_nodes.get(save.node, ()) if save.node is not None else ()
                inside = [each for each in times if span.start_s <= each[0] < span.end_s]
                if inside and call.end_s < span.start_s:
                    again_s.append(inside[0][0])
                    until_s[save.storage_id] = max(inside[-1][1], until_s.get(save.storage_id, 0.0))
            if again_s:
                sizes = ((self.storages[n].size_bytes, end_s) for n, end_s in until_s.items() if n in own)
                yield min(again_s), tuple(Copy(size_bytes, end_s) for size_bytes, end_s in sizes)

    def _births_between(self, start_s: float, end_s: float) -> Sequence[Storage]:
        first = bisect_left(self._birth_times, start_s)
        return self._births[first : bisect_right(self._birth_times, end_s)]

    def _second_run(
        self, call: ModuleCall, saves: Sequence[Saved], stop_s: float, again_s: float | None
    ) -> tuple[tuple[Copy, ...], int]:
        """What the second run keeps, and the highest level of all that it makes."""
        if again_s is None:
            return (), 0
        saved: dict[int, list[Saved]] = defaultdict(list)
        for save in saves:
            saved[save.storage_id].append(save)
        born = self._births_between(call.start_s, stop_s)
        # A weight that autocast has cast before this call comes from its cache; the second run casts it anew.
        cached = [
            row
            for storage_id in saved
            if (row := self.storages[storage_id]).birth_s < call.start_s
            and is_weight_cast(row, self.rank.parameters)
        ]
        copies, changes = [], []
        for row in (*cached, *born):
            birth_s = max(row.birth_s, call.start_s)
            until_s = self._copy_until(row, saved.get(row.storage_id, ()))
            is_kept = until_s > again_s
            changes.append((birth_s, row.size_bytes))
            if is_kept:
                copies.append(Copy(row.size_bytes, until_s))
            elif row.death_s is not None and row.death_s <= stop_s:
                changes.append((row.death_s, -row.size_bytes))
        return tuple(copies), _highest(changes)

    def _copy_until(self, row: Storage, saves: Sequence[Saved]) -> float:
        """When the backward drops the copy of a storage; 0 where the second run saves none."""
        if not saves:
            return 0.0
        released_s = self.released_s(saves)
        is_last = released_s >= self.released_s(self.saves_of[row.storage_id])
        if is_last and not self.is_held_elsewhere(row):
            # Its death follows its release by microseconds: one moment, or the curve would dip in between.
            return FOREVER_S if row.death_s is None else row.death_s
        return released_s


def _highest(changes: list[tuple[float, int]]) -> int:
    level = highest = 0
    for _, delta_bytes in sorted(changes, key=lambda change: change[0]):
        level += delta_bytes
        highest = max(highest, level)
    return highest
