"""Bytes alive in each segment of the traced step, and which of them a recomputation would set free.

A storage is alive on [birth, death). What autograd keeps for one unit alone is `Inner`; what flows
between units is a `BoundaryTensor`; everything else is in the segments' levels and stays as captured.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from memadvisor.analyzers.born_gradients import Gradients, gradients_of, last_gradient_bytes
from memadvisor.analyzers.first_asked import FirstAsked, first_asked
from memadvisor.analyzers.gradient_buffers import Buffers, buffers_of
from memadvisor.analyzers.gradient_views import Event, handed_over, own_gradients
from memadvisor.analyzers.levels import apply, highest, missed_by_deaths, plain
from memadvisor.analyzers.movable import boundary_tensors, cached_keys, inner_storages
from memadvisor.analyzers.placement import Placed, Placement, Stretch
from memadvisor.analyzers.roundable import roundable_storages
from memadvisor.analyzers.saved_storages import grouped, saved_storages
from memadvisor.analyzers.step_storages import step_storages
from memadvisor.analyzers.unit_operators import Forward, unit_forwards
from memadvisor.analyzers.unit_parts import parted_passes
from memadvisor.analyzers.walked_twice import dropped_copies
from memadvisor.analyzers.weight_casts import is_weight_cast
from memadvisor.cost.kept import ForwardOperators
from memadvisor.cost.level import Level
from memadvisor.cost.rounded_activations import RoundableStorage, Timeline
from memadvisor.cost.saved import SavedStorages
from memadvisor.cost.second_run import SecondRunCost
from memadvisor.cost.step import (
    STATES,
    BoundaryTensor,
    Inner,
    PartedPasses,
    SecondRuns,
    StepStorage,
)
from memadvisor.run.records import UNEXPLAINED, Parameter, Step
from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLevels:
    """The levels of one segment; see cost/step.py."""

    captured: Level
    own_gradients: Level
    passing_gradients: Level
    collected_gradients: Level
    loose_gradients: Level
    gradient_units: tuple[str, ...]
    growth: dict[str, int]
    last_gradient_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Levels of all segments and the storages that a plan can move. `peak_bytes` is that of the rows."""

    levels: tuple[SegmentLevels, ...]
    inner: tuple[Inner, ...]
    cached: tuple[Inner, ...]
    boundaries: tuple[BoundaryTensor, ...]
    saved: tuple[SavedStorages, ...]
    roundable: tuple[RoundableStorage, ...]
    timelines: tuple[Timeline, ...]
    make_storages: Callable[[], tuple[StepStorage, ...]]
    make_parted: Callable[[SecondRuns, SecondRunCost], PartedPasses]
    operators: Mapping[int, ForwardOperators]  # by forward segment, with the seconds of the traced step
    unit_forwards: Mapping[int, Forward]
    peak_bytes: int


def segment_memory(placement: Placement, divisor: int | Fraction) -> Memory:
    """Place every storage of the process's device on the segments, and sum them up."""
    rank, step, pieces = placement.rank, placement.step, placement.pieces
    passes, freed, casts = placement.passes, placement.freed, placement.casts
    placed = placement.with_micro_batches(divisor)
    events, start = _events(rank, step, pieces, placed)
    gradients = gradients_of(rank)
    parameters: dict[str, list[Parameter]] = {unit.name: [] for unit in rank.units}
    for parameter in rank.parameters:
        if not parameter.tied_to:
            parameters.setdefault(parameter.unit, []).append(parameter)
    buffers = buffers_of(parameters, placement.precision)
    forwards = unit_forwards(rank, passes, placed, freed - casts)
    levels, timelines = [], []
    missed: dict[int, int] = {}
    operators = {}
    recast = _casts_again(rank, pieces, placed)
    asked = first_asked(rank.saved, passes, placed)
    dropped = dropped_copies(placed, passes, rank.operators)
    for position, piece in enumerate(pieces):
        unsaved = _without_saving(piece, events[position], placed, freed, casts)
        if position in dropped:
            unsaved = _with_drops(unsaved, dropped[position], placed)
        around = asked.get(position)
        level, timeline = _levels(piece, start, events[position], unsaved, placed, gradients, buffers, around)
        if position in recast:
            level = replace(level, growth=dict(recast[position] + Counter(level.growth)))
        levels.append(level)
        timelines.append(timeline)
        counts = level.captured.peak if around is None else level.captured.peak_unsaved
        missed.update(missed_by_deaths(start, events[position], sum(counts.values())))
        if position in forwards:
            operators[position] = forwards[position].operators(start, unsaved, events[position], placed)
        apply(start, events[position])
    boundaries = boundary_tensors(placed, freed, casts, passes, missed)
    saved = saved_storages(rank, placed, casts, passes)
    return Memory(
        levels=tuple(levels),
        inner=tuple(inner_storages(placed, freed, casts, passes)),
        cached=tuple(cached_keys(placed, passes)),
        boundaries=tuple(boundaries.values()),
        saved=grouped(saved.values()),
        roundable=roundable_storages(rank, placed, saved, casts, passes),
        timelines=tuple(timelines),
        make_storages=partial(
            step_storages, rank, step, placed, passes, boundaries, saved=saved, freed=freed, casts=casts
        ),
        make_parted=partial(parted_passes, rank, passes, placed, freed, casts),
        operators=operators,
        unit_forwards=forwards,
        peak_bytes=max(sum(level.captured.peak.values()) for level in levels),
    )


def _events(
    rank: RankRun, step: Step, pieces: Sequence[Stretch], placed: Sequence[Placed]
) -> tuple[list[list[Event]], Counter[str]]:
    """Changes of live bytes by segment, in order of time, and what is alive when the step begins."""
    events: list[list[Event]] = [[] for _ in pieces]
    start: Counter[str] = Counter()
    for number, item in enumerate(placed):
        row = item.row
        if item.birth < 0:
            start[row.category] += row.size_bytes
        else:
            events[item.birth].append(Event(row.birth_s, row.size_bytes, row.category, number, True))
        if item.death < len(pieces) and row.death_s is not None:
            own = item.birth == item.death
            events[item.death].append(Event(row.death_s, -row.size_bytes, row.category, number, own))
    _add_residuals(rank, step, pieces, events, start)
    for changes in events:
        changes.sort(key=lambda event: (event.time_s, event.delta_bytes > 0))
    return events, start


def _add_residuals(
    rank: RankRun,
    step: Step,
    pieces: Sequence[Stretch],
    events: list[list[Event]],
    start: Counter[str],
) -> None:
    starts = [piece.start_s for piece in pieces]
    known_bytes = 0
    for residual in sorted(rank.residuals, key=lambda row: row.time_s):
        delta_bytes, known_bytes = residual.unexplained_bytes - known_bytes, residual.unexplained_bytes
        if residual.time_s <= step.start_s:
            start[UNEXPLAINED] += delta_bytes
        elif residual.time_s < step.end_s:
            position = bisect_right(starts, residual.time_s) - 1
            events[position].append(Event(residual.time_s, delta_bytes, UNEXPLAINED, -1, False))


def _levels(
    piece: Stretch,
    start: Mapping[str, int],
    events: Sequence[Event],
    unsaved: Sequence[Event],
    placed: Sequence[Placed],
    gradients: Gradients,
    buffers: Buffers,
    asked: FirstAsked | None,
) -> tuple[SegmentLevels, Timeline]:
    others = {category: size for category, size in start.items() if category not in STATES}
    taken_over = partial(handed_over, piece, placed=placed, gradients=gradients, buffers=buffers)
    units, passing = taken_over(events, takes="each")
    collected = loose = passing
    if units:
        collected = loose = taken_over(events, takes="buffer")[1]
    if any(unit in buffers.small_bytes for unit in units):
        loose = taken_over(events, takes="small")[1]
    lean = passing  # a forward brings no gradients, so this serves both views of it
    if unsaved is not events:
        _, lean = taken_over(unsaved, takes="each")
    same = unsaved is events
    own = own_gradients(events)
    views = {"captured": events, "own_gradients": own, "passing_gradients": passing}
    asked_s = None if asked is None else asked.time_s
    timeline = Timeline(
        piece.start_s, {**views, "collected_gradients": collected, "loose_gradients": loose}, asked_s
    )
    passing_level = collected_level = _level(others, passing, lean, asked)
    if collected is not passing:
        collected_level = _level(others, collected, collected if same else lean, asked)
    loose_level = collected_level
    if loose is not collected:
        loose_level = _level(others, loose, loose if same else lean, asked)
    own_level = passing_level  # as nearly everywhere where no gradients come
    if units or len(own) > len(passing):
        own_level = _level(others, own, own_gradients(unsaved), asked)
    levels = SegmentLevels(
        captured=_level(start, events, unsaved, asked),
        own_gradients=own_level,
        passing_gradients=passing_level,
        collected_gradients=collected_level,
        loose_gradients=loose_level,
        gradient_units=units,
        growth=_growth(piece, events, placed),
        last_gradient_bytes=last_gradient_bytes(piece, events, placed, gradients, buffers),
    )
    return levels, timeline


def _level(
    start: Mapping[str, int],
    events: Sequence[Event],
    unsaved: Sequence[Event],
    asked: FirstAsked | None,
) -> Level:
    if asked is not None:
        return asked.level(start, events)
    peak = highest(start, events)
    return Level(
        start=plain(start),
        peak=peak,
        peak_unsaved=peak if unsaved is events else highest(start, unsaved),
    )


def _without_saving(
    piece: Stretch,
    events: Sequence[Event],
    placed: Sequence[Placed],
    freed: set[int],
    casts: set[int],
) -> Sequence[Event]:
    """The same forward if it saved nothing: what it would have kept dies at its last use, its inputs stay."""
    if piece.unit is None or piece.phase != "forward":
        return events
    changed = []
    for event in events:
        if event.number in freed and event.delta_bytes > 0:
            row, needed_s = placed[event.number].row, placed[event.number].needed_until_s
            end_s = piece.end_s if needed_s is None else needed_s
            birth = event._replace(category="temporary")
            changed.append(birth)
            if event.number not in casts:
                death_s = max(end_s, row.birth_s)
                changed.append(birth.end_at(death_s))
        elif event.delta_bytes > 0 or event.is_own or event.number < 0:
            changed.append(event)
    changed.sort(key=lambda event: (event.time_s, event.delta_bytes > 0))
    return changed


def _with_drops(
    events: Sequence[Event], drops: Sequence[tuple[float, int]], placed: Sequence[Placed]
) -> Sequence[Event]:
    """The same with the ends of copies that a second run has made for a derivative."""
    ends = [
        Event(time_s, -placed[number].row.size_bytes, placed[number].row.category, number, False)
        for time_s, number in drops
    ]
    return sorted((*events, *ends), key=lambda event: (event.time_s, event.delta_bytes > 0))


def _casts_again(
    rank: RankRun, pieces: Sequence[Stretch], placed: Sequence[Placed]
) -> dict[int, Counter[str]]:
    """By forward segment of a later call of a unit in a micro-batch: copies of weights that an earlier one has left in
    autocast's cache, and that nothing keeps for a backward, as of biases. When the later one runs again it makes its own."""
    found: dict[int, Counter[str]] = defaultdict(Counter)
    for item in placed:
        outlives = 0 <= item.birth < item.death and not item.saved
        if not outlives or not is_weight_cast(item.row, rank.parameters):
            continue
        maker = pieces[item.birth]
        for position in range(item.birth + 1, min(item.death + 1, len(pieces))):
            piece = pieces[position]
            is_of_unit = (piece.unit, piece.micro_batch) == (maker.unit, maker.micro_batch)
            if piece.phase == maker.phase == "forward" and is_of_unit and piece.call > maker.call:
                found[position][item.row.category] += item.row.size_bytes
    return found


def _growth(piece: Stretch, events: Sequence[Event], placed: Sequence[Placed]) -> dict[str, int]:
    """What the segment's own storages reach until its unit has saved its last tensor.

    Non-reentrant checkpointing stops a recomputation there (torch.utils.checkpoint, early stop).
    """
    if piece.unit is None or piece.phase != "forward":
        return {}
    own = [event for event in events if event.is_own and event.category not in STATES]
    last_saved_s = max(
        (
            saved.saved_s
            for event in own
            for saved in placed[event.number].saved
            if saved.unit == piece.unit and saved.saved_s <= piece.end_s
        ),
        default=piece.start_s,
    )
    return highest({}, [event for event in own if event.time_s <= last_saved_s])
