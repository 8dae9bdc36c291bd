"""The traced step as a chain of segments with measured times: what the simulator replays and changes.

Memory comes from the traced step, exactly; times come from the timed steps, since a traced step is slow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from statistics import median

from memadvisor.analyzers.data_ranks import num_splitting
from memadvisor.analyzers.evaluation import without_evaluated_units
from memadvisor.analyzers.gradient_use import leaves_gradients_alone
from memadvisor.analyzers.observed_collectives import observed_collectives
from memadvisor.analyzers.out_of_memory import way_on
from memadvisor.analyzers.pipeline_passes import with_passes_apart
from memadvisor.analyzers.planned_models import is_each_called_once, live_gradients, planned_models
from memadvisor.analyzers.roundable import rounding_cost
from memadvisor.analyzers.script_shards import check_predictable, take_collectives, with_copies_counted
from memadvisor.analyzers.second_runs import second_run_cost, second_runs
from memadvisor.analyzers.segment_memory import Memory, segment_memory
from memadvisor.analyzers.split_times import split_durations
from memadvisor.analyzers.unit_operators import timed_operators
from memadvisor.analyzers.unit_states import constant_states, planned_units, unit_states
from memadvisor.cost.second_run import SecondRun, SecondRunCost
from memadvisor.cost.step import CapturedStep, Segment, pass_number
from memadvisor.errors import UsageError
from memadvisor.precision import FULL_PRECISION, Precision
from memadvisor.run.records import Span, Step
from memadvisor.run.run import RankRun, Run

# Phase, unit, micro-batch, and how many such pieces came before it in the step.
_Key = tuple[str, str | None, int | None, int]
_UNIT_PHASES = {"unit_forward": "forward", "unit_recompute": "recompute", "unit_backward": "backward"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of one step in which no boundary is crossed.

    `unit` None: outside any unit. `micro_batch` None: before, between or after the micro-batches; from the
    first forward of a micro-batch to its last backward everything belongs to it. `call`: which of the unit's calls in
    its micro-batch this is, or is the backward of.
    """

    phase: str
    unit: str | None
    micro_batch: int | None
    start_s: float
    end_s: float
    call: int = 0

    @property
    def pass_number(self) -> int | None:
        return pass_number(self.micro_batch, self.call)


def captured_step(
    run: Run,
    *,
    micro_batch_divisor: int | Fraction = 1,
    repeats: int | None = None,
    precision: Precision = FULL_PRECISION,
    num_ranks: int | None = None,
    of_rank: int | None = None,
) -> CapturedStep:
    """The step of the rank whose traced peak is highest, or of that named, which may hold a stage of a pipeline or parts of layers.

    With a divisor d, the step as it would be with micro-batches of 1/d of their size, d times as many:
    storages with a batch dimension shrink, states do not (docs/planning.md). A divisor of 1/k: micro-batches k times as
    large, and as many as there were. `repeats`: that many in place of each, however large they are. With a precision, the
    step as the schedules of plans with that precision find it. Of several models the units are those that a plan for `num_ranks`, by
    default the run's own, may be about (planned_models.py). Raises UsageError when no step was traced, the run already
    carries a plan, or the script's own FSDP2 does what no plan is made for.
    """
    traced, rank, step = _traced_ranks(run, of_rank)
    rank = with_passes_apart(rank) if rank.pipeline_stages else rank
    is_apart = bool(rank.pipeline_stages or rank.tensor_parallel)  # it shares nothing
    # Stages keep theirs gathered for the whole step, and beside split layers each is gathered as it was: replayed as it is.
    groups = rank.shard_groups if rank.process.world_size > 1 and not is_apart else ()
    if groups:
        check_predictable(rank, step)
        rank = with_copies_counted(rank, step)
    pieces = cut_step(rank.spans, step)
    durations, step_time_s = _durations(rank, pieces)
    memory = segment_memory(rank, step, pieces, micro_batch_divisor, precision)
    repeats = max(1, int(micro_batch_divisor)) if repeats is None else repeats
    if groups:
        exposed_s = take_collectives(rank, step, pieces, durations, observed_collectives(run))
    elif rank.tensor_parallel:
        exposed_s = 0.0  # its backward waits for the same collectives under a plan
    else:
        exposed_s = _take_exposed_tail(rank, pieces, durations)
    batch = _micro_batch_size(rank, step) if is_each_called_once(rank, step) else None
    units = planned_units(rank, planned_models(rank, num_ranks or rank.process.world_size))
    states = unit_states(rank, step, units)
    durations = split_durations(rank, pieces, durations, micro_batch_divisor)
    runs, cost = second_runs(rank, pieces, durations), second_run_cost(rank)
    return CapturedStep(
        rank=rank.process.rank,
        world_size=1 if is_apart else rank.process.world_size,
        device=rank.process.device,
        units=units,
        states=states,
        segments=_segments(pieces, durations, memory, live_gradients(rank, pieces)),
        inner=memory.inner,
        cached=memory.cached,
        boundaries=memory.boundaries,
        saved=memory.saved,
        roundable=memory.roundable,
        timelines=memory.timelines,
        rounding_cost=rounding_cost(rank),
        make_storages=memory.make_storages,
        make_parted=memory.make_parted,
        recomputable=_recomputable({unit.name for unit in units}, memory, runs, cost, repeats),
        second_runs=runs,
        second_run_cost=cost,
        operators=timed_operators(rank, memory.unit_forwards, memory.operators, durations),
        constant_state_bytes=constant_states(rank, step, states),
        step_time_s=step_time_s,
        exposed_communication_s=exposed_s,
        peak_bytes=_traced_peak_bytes(rank) or memory.peak_bytes,
        synced_micro_batches=_synced(rank, pieces),
        num_micro_batches=max(1, step.num_micro_batches),
        repeats=repeats,
        micro_batch_size=None if batch is None else int(batch // micro_batch_divisor),
        precision=precision,
        leaves_gradients_alone=all(map(leaves_gradients_alone, traced)),
        shard_groups=groups,
    )


def _traced_ranks(run: Run, of_rank: int | None) -> tuple[list[RankRun], RankRun, Step]:
    """The ranks whose step was traced, of them the one whose peak is highest, and that step."""
    if run.plan is not None:
        raise UsageError(
            "This run was made with a plan applied, and a plan is worked out from a plain run.",
            hint="profile the script without a plan, and advise on that run.",
        )
    named = [rank for rank in run.ranks if of_rank in (None, rank.process.rank)]
    traced = [rank for rank in named if rank.traced_step is not None and rank.storages]
    if not traced:
        way = way_on(run)
        if way is not None:
            raise UsageError("This run ran out of memory before a step of it was traced.", hint=way)
        raise UsageError(
            "No step of this run was traced, so nothing is known of its memory.",
            hint="profile it for more steps: the traced one comes after the warm-up.",
        )
    rank = max(traced, key=_traced_peak_bytes)
    if rank.pipeline_stages and of_rank is None:
        raise UsageError(
            "Each rank of this run holds stages of a pipeline, and what is asked for is worked out for ranks that have the "
            "same model.",
            hint="`memadvisor advise RUN --memory SIZE` makes plans for pipelines.",
        )
    if rank.tensor_parallel and (of_rank is None or rank.pipeline_stages):
        raise UsageError(
            f"{num_splitting(rank)} ranks of this run split the layers of a model, and what is asked for is worked out for ranks that have all of it.",
            hint="`memadvisor advise RUN --memory SIZE` makes plans for them; `memadvisor estimate` predicts layouts with "
            "tensor parallelism.",
        )
    step = rank.traced_step
    if step is None:
        raise AssertionError("a traced rank has a traced step")
    return traced, rank, step


def _traced_peak_bytes(rank: RankRun) -> int:
    step = rank.traced_step
    return (step.peak_allocated_bytes if step is not None else None) or 0


def _micro_batch_size(rank: RankRun, step: Step) -> int | None:
    """None where nobody knows what half of one is: samples are not known, or passes are no accumulation, since the weights
    are updated between or inside them, or the same batch comes again."""
    if step.num_samples is None or step.num_samples % max(1, step.num_micro_batches):
        return None
    own = [span for span in rank.spans if span.step == step.index]
    last_s = max((span.end_s for span in own if span.kind == "backward"), default=step.start_s)
    if step.num_repeated_batches or any(s.kind == "optimizer" and s.end_s <= last_s for s in own):
        return None
    return step.num_samples // max(1, step.num_micro_batches)


def cut_step(spans: Sequence[Span], step: Step) -> tuple[Piece, ...]:
    """Cut a step at every start and end of a span; the innermost span running then owns a piece.

    Innermost is the one that started last, a unit before a phase. Pieces cover the step without gap. Units in an evaluation
    own nothing: with them, a unit would seem to run in two pieces, which nobody can recompute.
    """
    inside = [s for s in spans if s.step == step.index and s.end_s > step.start_s and s.start_s < step.end_s]
    own = without_evaluated_units(inside)
    times = {step.start_s, step.end_s}
    for span in own:
        times |= {max(span.start_s, step.start_s), min(span.end_s, step.end_s)}
    starting = sorted(own, key=_nesting)
    calls = _calls(starting)
    ordered = sorted(times)
    active: list[Span] = []
    pieces: list[Piece] = []
    position = 0
    for start_s, end_s in pairwise(ordered):
        while position < len(starting) and starting[position].start_s <= start_s:
            active.append(starting[position])
            position += 1
        active = [span for span in active if span.end_s > start_s]
        innermost = max(active, key=_nesting) if active else None
        _append(pieces, innermost, calls.get(id(innermost), 0), start_s, end_s)
    return _fill_micro_batches(pieces)


def _fill_micro_batches(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Give what runs between a micro-batch's forward and backward, such as the loss, to that micro-batch."""
    last: dict[int, int] = {}
    for position, piece in enumerate(pieces):
        if piece.phase in ("forward", "backward", "recompute") and piece.micro_batch is not None:
            last[piece.micro_batch] = position
    filled: list[Piece] = []
    current: int | None = None
    for position, piece in enumerate(pieces):
        if piece.phase in ("forward", "backward", "recompute"):
            current = piece.micro_batch
        elif current is not None and position < last[current]:
            piece = replace(piece, micro_batch=current)
        filled.append(piece)
    return tuple(filled)


def _nesting(span: Span) -> tuple[float, bool, float]:
    return span.start_s, span.kind in _UNIT_PHASES, -span.end_s


def _calls(spans: Sequence[Span]) -> dict[int, int]:
    """By id of a unit's span, which call it is of those in its micro-batch; 0 where there is one, or they do not match.

    Autograd goes through what was called last first (nodes in falling order of their sequence numbers).
    """
    found: dict[tuple[str, int | None], dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        if span.kind in _UNIT_PHASES:
            found[span.unit, span.micro_batch][_UNIT_PHASES[span.kind]].append(span)
    calls: dict[int, int] = {}
    for by_phase in found.values():
        forwards, backwards = by_phase["forward"], by_phase["backward"]
        if len(forwards) == len(backwards) > 1 and not by_phase["recompute"]:
            calls |= {id(span): call for call, span in enumerate(forwards)}
            calls |= {id(span): call for call, span in enumerate(reversed(backwards))}
    return calls


def _append(pieces: list[Piece], span: Span | None, call: int, start_s: float, end_s: float) -> None:
    if span is None:
        owner: tuple[str, str | None, int | None] = ("outside", None, None)
    elif span.kind in _UNIT_PHASES:
        owner = (_UNIT_PHASES[span.kind], span.unit, span.micro_batch)
    else:
        owner = (span.kind, None, None if span.kind == "optimizer" else span.micro_batch)
    last = pieces[-1] if pieces else None
    if last is not None and (last.phase, last.unit, last.micro_batch, last.call) == (*owner, call):
        start_s = pieces.pop().start_s
    phase, unit, micro_batch = owner
    pieces.append(
        Piece(phase=phase, unit=unit, micro_batch=micro_batch, call=call, start_s=start_s, end_s=end_s)
    )


def _durations(rank: RankRun, pieces: Sequence[Piece]) -> tuple[list[float], float]:
    """Median duration of each piece over the steady steps, scaled to sum to the median step time.

    A run without a timed step has only the traced step's own times.
    """
    steady = rank.steady_steps()
    if not steady:
        own = [piece.end_s - piece.start_s for piece in pieces]
        return own, sum(own)
    spans_of: dict[int, list[Span]] = defaultdict(list)
    for span in rank.spans:
        spans_of[span.step].append(span)
    seen: dict[_Key, list[float]] = defaultdict(list)
    for step in rank.steps_with_units():
        found = cut_step(spans_of[step.index], step)
        for key, piece in zip(_keys(found), found, strict=True):
            seen[key].append(piece.end_s - piece.start_s)
    step_time_s = median(step.duration_s for step in steady)
    typical = [median(seen[key]) if key in seen else 0.0 for key in _keys(pieces)]
    total_s = sum(typical)
    if total_s <= 0:
        return [step_time_s / len(pieces)] * len(pieces), step_time_s
    return [duration * step_time_s / total_s for duration in typical], step_time_s


def _keys(pieces: Sequence[Piece]) -> list[_Key]:
    """What names a piece in every step."""
    counts: Counter[tuple[str, str | None, int | None]] = Counter()
    keys = []
    for piece in pieces:
        owner = (piece.phase, piece.unit, piece.micro_batch)
        keys.append((*owner, counts[owner]))
        counts[owner] += 1
    return keys


def _take_exposed_tail(rank: RankRun, pieces: Sequence[Piece], durations: list[float]) -> float:
    """Take out of `durations` the end of each backward in which only collectives were still running.

    DDP issues its last bucket when the last gradient is there, and then waits for it; under our engine
    that wait is not there. How much of a piece is waiting is known from the traced step alone.
    """
    exposed_s = 0.0
    for first, last in _backwards(pieces):
        start_s, end_s = pieces[first].start_s, pieces[last].end_s
        issues = [
            row.issue_s
            for row in rank.collectives
            if row.phase == "backward" and row.asynchronous and start_s <= row.issue_s <= end_s
        ]
        for position in range(first, last + 1) if issues else ():
            piece = pieces[position]
            waiting_s = piece.end_s - max(piece.start_s, *issues)
            if waiting_s > 0 and piece.end_s > piece.start_s:
                taken_s = durations[position] * waiting_s / (piece.end_s - piece.start_s)
                durations[position] -= taken_s
                exposed_s += taken_s
    return exposed_s


def _synced(rank: RankRun, pieces: Sequence[Piece]) -> frozenset[int]:
    """Micro-batches in whose backward DDP reduced; under `no_sync` only the last one is."""
    issues = [row.issue_s for row in rank.collectives if row.phase == "backward" and row.asynchronous]
    return frozenset(
        piece.micro_batch
        for piece in pieces
        if piece.phase == "backward"
        and piece.micro_batch is not None
        and any(piece.start_s <= issue_s <= piece.end_s for issue_s in issues)
    )


def _backwards(pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """First and last piece of each backward."""
    first: int | None = None
    for position, piece in enumerate(pieces):
        if piece.phase in ("backward", "recompute") and first is None:
            first = position
        following = pieces[position + 1].phase if position + 1 < len(pieces) else ""
        if first is not None and following not in ("backward", "recompute"):
            yield first, position
            first = None


def _segments(
    pieces: Sequence[Piece],
    durations: Sequence[float],
    memory: Memory,
    gradients: Sequence[frozenset[str] | None],
) -> tuple[Segment, ...]:
    return tuple(
        Segment(
            phase=piece.phase,
            unit=piece.unit,
            micro_batch=piece.micro_batch,
            call=piece.call,
            duration_s=duration,
            captured=levels.captured,
            own_gradients=levels.own_gradients,
            passing_gradients=levels.passing_gradients,
            collected_gradients=levels.collected_gradients,
            gradient_units=levels.gradient_units,
            growth=levels.growth,
            live_gradients=alive,
        )
        for piece, duration, levels, alive in zip(pieces, durations, memory.levels, gradients, strict=True)
    )


def _recomputable(
    known: Collection[str],
    memory: Memory,
    runs: Mapping[tuple[str, int | None], SecondRun],
    cost: SecondRunCost,
    repeats: int,
) -> dict[str, float]:
    """Seconds of recomputing, over all micro-batches, of each unit that recomputing would free bytes of."""
    return {
        unit: repeats * sum(run.seconds(cost) for (owner, _), run in runs.items() if owner == unit)
        for unit in dict.fromkeys(item.unit for item in memory.inner if item.unit in known)
    }
