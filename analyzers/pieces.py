"""A step cut into pieces at every start and end of a span, and how long each usually takes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from memadvisor.analyzers.evaluation import without_evaluated_units
from memadvisor.cost.step import pass_number
from memadvisor.run.records import Span, Step
from memadvisor.run.run import RankRun

# Phase, unit, micro-batch, and how many such pieces came before it in the step.
_Key = tuple[str, str | None, int | None, int]
_UNIT_PHASES = {"unit_forward": "forward", "unit_recompute": "recompute", "unit_backward": "backward"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of one step in which no boundary is crossed.

    `unit` None: outside any unit. `micro_batch` None: before, between or after the micro-batches; from the
    first forward of a micro-batch to its last backward everything belongs to it. `call`: which of the unit's calls in
    its micro-batch this is, or is the backward of. `walk`: which of its micro-batch's backwards goes through it; there are
    several where the loss is made of a derivative (derivatives.py).
    """

    phase: str
    unit: str | None
    micro_batch: int | None
    start_s: float
    end_s: float
    call: int = 0
    walk: int = 0

    @property
    def pass_number(self) -> int | None:
        return pass_number(self.micro_batch, self.call)


def cut_step(spans: Sequence[Span], step: Step, checkpointing: Collection[str] = ()) -> tuple[Piece, ...]:
    """Cut a step at every start and end of a span; the innermost span running then owns a piece.

    Innermost is the one that started last, a unit before a phase. Pieces cover the step without gap. Units in an evaluation
    own nothing: with them, a unit would seem to run in two pieces, which nobody can recompute. What a unit of those that are
    `checkpointing` parts of themselves runs again in its own backward is a piece of that.
    """
    inside = [s for s in spans if s.step == step.index and s.end_s > step.start_s and s.start_s < step.end_s]
    own = _without_parts_again(without_evaluated_units(inside), checkpointing)
    times = {step.start_s, step.end_s}
    for span in own:
        times |= {max(span.start_s, step.start_s), min(span.end_s, step.end_s)}
    starting = sorted(own, key=_nesting)
    walks = _walks(starting)
    calls = _calls(starting, walks)
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
        _append(pieces, innermost, calls.get(id(innermost), 0), walks.get(id(innermost), 0), start_s, end_s)
    return _fill_micro_batches(pieces)


def checkpointing_units(rank: RankRun) -> frozenset[str]:
    """Units whose forward itself checkpoints parts of it, and which nobody around them calls again, as the traced step has
    it; none in runs that do not tell modules' calls."""
    step = rank.traced_step
    again = {
        span.unit
        for span in rank.spans
        if step is not None and span.step == step.index and span.kind == "unit_recompute"
    }
    whole = {
        call.unit for call in rank.module_calls if call.phase == "recompute" and call.module == call.unit
    }
    return frozenset(again - whole) if rank.module_calls else frozenset()


def _without_parts_again(spans: Sequence[Span], checkpointing: Collection[str]) -> Sequence[Span]:
    """Without second forwards of parts of these units that lie in the backward of the unit itself."""
    if not checkpointing:
        return spans
    backwards: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind == "unit_backward":
            backwards[span.unit].append(span)
    return [
        span
        for span in spans
        if span.kind != "unit_recompute"
        or span.unit not in checkpointing
        or not any(
            around.start_s <= span.start_s and span.end_s <= around.end_s for around in backwards[span.unit]
        )
    ]


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


def _walks(spans: Sequence[Span]) -> dict[int, int]:
    """By id of a backward, or of a unit's, in which of its micro-batch's backwards it is."""
    starts: dict[int | None, list[float]] = defaultdict(list)
    for span in spans:
        if span.kind == "backward":
            starts[span.micro_batch].append(span.start_s)
    return {
        id(span): bisect_right(among, span.start_s) - 1
        for span in spans
        if span.kind in ("backward", "unit_backward") and len(among := starts[span.micro_batch]) > 1
    }


def _calls(spans: Sequence[Span], walks: Mapping[int, int]) -> dict[int, int]:
    """By id of a unit's span, which call it is of those in its micro-batch; 0 where there is one, or they do not match.

    Autograd goes through what was called last first (nodes in falling order of their sequence numbers). Of several
    backwards each is taken to go through the last calls before it; placement.py holds that against what they ask for.
    """
    found: dict[tuple[str, int | None], dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        if span.kind in _UNIT_PHASES:
            found[span.unit, span.micro_batch][_UNIT_PHASES[span.kind]].append(span)
    calls: dict[int, int] = {}
    for by_phase in found.values():
        forwards, backwards = by_phase["forward"], by_phase["backward"]
        if len(forwards) < 2 or by_phase["recompute"]:
            continue
        by_walk: dict[int, list[Span]] = defaultdict(list)
        for span in backwards:
            by_walk[walks.get(id(span), 0)].append(span)
        before = {
            walk: sum(each.end_s <= own[0].start_s for each in forwards) for walk, own in by_walk.items()
        }
        if len(by_walk) == 1 and len(backwards) != len(forwards):
            continue
        if any(len(own) > before[walk] for walk, own in by_walk.items()):
            continue
        calls |= {id(span): call for call, span in enumerate(forwards)}
        for walk, own in by_walk.items():
            calls |= {id(span): before[walk] - 1 - place for place, span in enumerate(own)}
    return calls


def _append(
    pieces: list[Piece], span: Span | None, call: int, walk: int, start_s: float, end_s: float
) -> None:
    if span is None:
        owner: tuple[str, str | None, int | None] = ("outside", None, None)
    elif span.kind in _UNIT_PHASES:
        owner = (_UNIT_PHASES[span.kind], span.unit, span.micro_batch)
    else:
        owner = (span.kind, None, None if span.kind == "optimizer" else span.micro_batch)
    last = pieces[-1] if pieces else None
    if last is not None and (last.phase, last.unit, last.micro_batch, last.call, last.walk) == (
        *owner,
        call,
        walk,
    ):
        start_s = pieces.pop().start_s
    phase, unit, micro_batch = owner
    pieces.append(
        Piece(
            phase=phase,
            unit=unit,
            micro_batch=micro_batch,
            call=call,
            walk=walk,
            start_s=start_s,
            end_s=end_s,
        )
    )


def typical_durations(
    rank: RankRun, pieces: Sequence[Piece], checkpointing: Collection[str] = ()
) -> tuple[list[float], float]:
    """Median duration of each piece over the steady steps, scaled to sum to the median step time.

    A run without a timed step has only the traced step's own times. `checkpointing`: as the pieces were cut.
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
        found = cut_step(spans_of[step.index], step, checkpointing)
        for key, piece in zip(_keys(found), found, strict=True):
            seen[key].append(piece.end_s - piece.start_s)
    step_time_s = median(step.duration_s for step in steady)
    typical = [median(seen[key]) if key in seen else 0.0 for key in _keys(pieces)]
    total_s = sum(typical)
    if total_s <= 0:
        return [step_time_s / len(pieces)] * len(pieces), step_time_s
    return [duration * step_time_s / total_s for duration in typical], step_time_s


def cut_again(
    pieces: Sequence[Piece], durations: Sequence[float], times_s: Iterable[float]
) -> tuple[tuple[Piece, ...], list[float]]:
    """The same cut at more times, the durations of pieces dealt out in proportion."""
    ordered = sorted(times_s)
    cut: list[Piece] = []
    dealt: list[float] = []
    for piece, duration_s in zip(pieces, durations, strict=True):
        first, last = bisect_right(ordered, piece.start_s), bisect_left(ordered, piece.end_s)
        times = (piece.start_s, *dict.fromkeys(ordered[first:last]), piece.end_s)
        for start_s, end_s in pairwise(times):
            share = 1.0 if len(times) == 2 else (end_s - start_s) / (piece.end_s - piece.start_s)
            cut.append(replace(piece, start_s=start_s, end_s=end_s))
            dealt.append(duration_s * share)
    return tuple(cut), dealt


def _keys(pieces: Sequence[Piece]) -> list[_Key]:
    """What names a piece in every step."""
    counts: Counter[tuple[str, str | None, int | None]] = Counter()
    keys = []
    for piece in pieces:
        owner = (piece.phase, piece.unit, piece.micro_batch)
        keys.append((*owner, counts[owner]))
        counts[owner] += 1
    return keys
