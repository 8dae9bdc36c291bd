"""What checkpointing a module, or all modules of a kind, would free, do to the peak, and cost.

Predicted from one plain run; the traced step gives the bytes and FLOPs, the timed steps give the seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from memadvisor.analyzers.checkpoint_effect import Effect, checkpoint_effect, outermost
from memadvisor.analyzers.checkpoint_frames import Frame, TracedCalls, traced_calls
from memadvisor.analyzers.derivatives import differentiated_backwards
from memadvisor.analyzers.peak import PeakBreakdown, peak_breakdown, position_in_words, where
from memadvisor.analyzers.second_runs import second_run_cost
from memadvisor.analyzers.step_time import StepTime, step_time
from memadvisor.analyzers.timeline import MemoryTimeline, memory_timeline
from memadvisor.run.records import Operator
from memadvisor.run.run import RankRun
from memadvisor.units import GIB

# Each candidate replays the step; the ones that save least are left out of a model with more modules.
MAX_CANDIDATES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointedModule:
    """A module, or all of one place and class ("blocks.*.mlp"), as if it were checkpointed. All predicted.

    `freed_bytes` is what would not be kept between its forward and its backward, net of the arguments that
    the checkpoint must keep; 0 or less: it frees nothing. `peak_bytes` is the step's new peak, at
    `peak_position`; `peak_saved_bytes` how much lower that is (negative: higher). `still_kept_bytes`: what
    it saves and somebody else keeps anyway. `extra_time_s` is the second forward's and its calls', a step; None where no
    step was timed. `obstacle`, where not "", says why it cannot be checkpointed alone, or nothing is
    predicted; then the figures are None.
    """

    name: str
    type_name: str
    modules: tuple[str, ...]
    num_calls: int  # a step
    freed_bytes: int | None
    still_kept_bytes: dict[str, int]
    peak_bytes: int | None
    peak_saved_bytes: int | None
    peak_position: str
    recomputed_flops: int | None
    extra_time_s: float | None
    obstacle: str

    @property
    def extra_s_per_freed_gib(self) -> float | None:
        if self.extra_time_s is None or self.freed_bytes is None or self.freed_bytes <= 0:
            return None
        return self.extra_time_s / (self.freed_bytes / GIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """The table, most bytes saved at the peak first, then most bytes freed; `peak_bytes` is today's."""

    peak_bytes: int
    rows: tuple[CheckpointedModule, ...]
    num_left_out: int

    def best(self, count: int) -> tuple[CheckpointedModule, ...]:
        """The rows that lower the peak by 2 % or more and that no other row beats in both bytes and time.

        Most bytes saved first.
        """
        useful = [
            row
            for row in self.rows
            if (row.peak_saved_bytes or 0) >= 0.02 * self.peak_bytes and not row.obstacle
        ]
        chosen: list[CheckpointedModule] = []
        for row in useful:
            if not chosen or _cost(row) < _cost(chosen[-1]):
                chosen.append(row)
        return tuple(chosen[:count])


def _cost(row: CheckpointedModule) -> float:
    return float(row.recomputed_flops or 0) if row.extra_time_s is None else row.extra_time_s


def checkpointing(
    traced: TracedCalls | None,
    timeline: MemoryTimeline | None,
    peak: PeakBreakdown | None,
    time: StepTime | None,
) -> Checkpointing | None:
    """Try every module that saves something, and every kind. None when no module call was recorded."""
    if traced is None or timeline is None or peak is None or not traced.rank.module_calls:
        return None
    table = _Table(traced, timeline, peak, time)
    candidates = table.candidates()
    rows = [table.row(name, modules) for name, modules in candidates[:MAX_CANDIDATES]]
    rows.sort(key=lambda row: (-(row.peak_saved_bytes or 0), -(row.freed_bytes or 0), _cost(row)))
    return Checkpointing(
        peak_bytes=peak.allocated_bytes,
        rows=tuple(rows),
        num_left_out=max(0, len(candidates) - MAX_CANDIDATES),
    )


def predicted_checkpoints(rank: RankRun) -> Checkpointing | None:
    """The same of a rank of which nothing else has been worked out."""
    timeline = memory_timeline(rank)
    return checkpointing(traced_calls(rank), timeline, peak_breakdown(rank, timeline), step_time(rank))


def kind_of(module: str) -> str:
    """The name with the numbers of containers and their members replaced: `layer*.*.conv1`, `blocks.*.mlp`."""
    parts = module.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            parts[position] = "*"
            container = parts[position - 1] if position else ""
            if container.rstrip("0123456789") != container:
                parts[position - 1] = container.rstrip("0123456789") + "*"
    return ".".join(parts)


class _Table:
    def __init__(
        self, traced: TracedCalls, timeline: MemoryTimeline, peak: PeakBreakdown, time: StepTime | None
    ) -> None:
        self._traced = traced
        self._timeline = timeline
        self._peak = peak
        self._types = {module.name: module.type_name for module in traced.rank.modules}
        self._frames: dict[str, list[Frame]] = defaultdict(list)
        for frame in traced.frames:
            if frame.call.module in self._types:
                self._frames[frame.call.module].append(frame)
        self._moved = {save.copy_of for save in traced.saves if save.original_bytes is None} - {None}
        self._derivatives = differentiated_backwards(traced.rank)
        self._again = {c.module for c in traced.rank.module_calls if c.phase == "recompute"}
        self._seconds_per_traced_s = _scales(traced.rank, time)
        self._cost = second_run_cost(traced.rank)

    def candidates(self) -> list[tuple[str, tuple[str, ...]]]:
        """Kinds of two modules or more, and single modules; those that save most first."""
        kinds: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name in self._frames:
            kinds[kind_of(name), self._types[name]].append(name)
        found = [(kind, tuple(names)) for (kind, _), names in kinds.items() if len(names) > 1]
        found += [(name, (name,)) for name in self._frames]
        return sorted(found, key=lambda entry: -self._saved_bytes(entry[1]))

    def _saved_bytes(self, modules: Iterable[str]) -> int:
        sizes = {
            save.storage_id: self._traced.storages[save.storage_id].size_bytes
            for name in modules
            for frame in self._frames[name]
            for save in frame.saves
        }
        return sum(sizes.values())

    def row(self, name: str, modules: tuple[str, ...]) -> CheckpointedModule:
        frames = outermost(frame for module in modules for frame in self._frames[module])
        obstacle = self._obstacle(modules, frames)
        effect = None if obstacle else checkpoint_effect(self._traced, self._timeline, frames)
        operators = [
            operator for frame in frames for _, _ in frame.second_runs for operator in self._second_run(frame)
        ]
        saved = None if effect is None else -effect.growth_bytes
        return CheckpointedModule(
            name=name,
            type_name=self._types[modules[0]],
            modules=modules,
            num_calls=len(frames),
            freed_bytes=None if effect is None else effect.freed_bytes,
            still_kept_bytes={} if effect is None else effect.still_kept_bytes,
            peak_bytes=None if saved is None else self._peak.allocated_bytes - saved,
            peak_saved_bytes=saved,
            peak_position="" if effect is None else self._position(effect),
            recomputed_flops=None if effect is None else sum(op.executed_flops for op in operators),
            extra_time_s=None if effect is None else self._seconds(operators, frames),
            obstacle=obstacle,
        )

    def _obstacle(self, modules: Sequence[str], frames: Sequence[Frame]) -> str:
        if any(frame.changes_input for frame in frames):
            return "it changes its input in place"
        if any(self._types[module] == "MultiheadAttention" for module in modules) and any(
            len(frame.inputs) == 1 for frame in frames
        ):
            # It asks whether query, key and value are the same object; the second run gets three.
            return "torch's MultiheadAttention runs otherwise the second time"
        for module in modules:
            prefix = f"{module}." if module else ""
            if any(again.startswith(prefix) or again == module for again in self._again):
                return "parts of it are recomputed already"
        saves = [save for frame in frames for save in frame.saves]
        if any(save.storage_id in self._moved for save in saves):
            return "parts of what it keeps are moved already"
        if any(save.original_bytes is not None for save in saves):
            return "parts of what it keeps are in fewer bits already"
        if any(self._num_derivatives(frame) > 1 for frame in frames):
            # Each of them runs it again, and has its own copies for the graph of its derivative.
            return "autograd goes through it more than twice"
        return ""

    def _num_derivatives(self, frame: Frame) -> int:
        """Of the backwards between its call and the last that asks for what it kept, those with a graph of their own."""
        return sum(frame.call.end_s < span.start_s and span.end_s < frame.end_s for span in self._derivatives)

    def _position(self, effect: Effect) -> str:
        phase, unit, _ = where(self._traced.rank, effect.peak_s)
        return position_in_words("recompute" if effect.peaks_again else phase, unit)

    def _second_run(self, frame: Frame) -> Sequence[Operator]:
        if frame.again_s is None:
            return ()
        return self._traced.operators_between(frame.call.start_s, frame.stop_s)

    def _seconds(self, operators: Iterable[Operator], frames: Iterable[Frame]) -> float | None:
        """Of the operators that run again, and of what their calls take beside them (cost/second_run.py)."""
        scales = self._seconds_per_traced_s
        if not scales:
            return None
        forward_s = sum((op.end_s - op.start_s) * scales.get(op.unit, 0.0) for op in operators)
        return forward_s + sum(self._cost.call_s + self._cost.tensor_s * len(frame.saves) for frame in frames)


def _scales(rank: RankRun, time: StepTime | None) -> Mapping[str, float]:
    """Timed seconds of the forward per second of the traced step's operators, by unit; "" outside any.

    A traced step is slow between its operators, not alike in all of them; the timed forward of a unit is
    dealt out to its operators in proportion. Empty when no step was timed.
    """
    if time is None:
        return {}
    traced_s: dict[str, float] = defaultdict(float)
    for operator in rank.operators:
        if operator.phase == "forward":
            traced_s[operator.unit] += operator.end_s - operator.start_s
    timed_s = {unit.unit: unit.forward_s for unit in time.units}
    total_timed_s, total_traced_s = time.by_phase_s["forward"], sum(traced_s.values())
    overall = total_timed_s / total_traced_s if total_traced_s > 0 else 0.0
    scales = {}
    for unit, seconds in traced_s.items():
        known = timed_s.get(unit, 0.0)
        scales[unit] = known / seconds if known > 0 and seconds > 0 else overall
    return scales
