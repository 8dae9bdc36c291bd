"""Plans for a recorded pipeline: which units each rank recomputes, and whose activations wait on another tier, so that all of
them meet one budget.

Early stages have more micro-batches under way than late ones, so they have more to free. A longer piece never makes a step
shorter, as each rank's order of work stays what it is; so with one stage a rank the least that each of them can add is also
the least that the step can take, bubbles and all. With several stages a rank the least sum over them is taken. The step is
that of the recorded order played with longer backwards (cost/pipelines/captured.py); of pipelines beside each other, whose
stages average their gradients, it is the longest one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memadvisor.analyzers.captured_pipeline import captured_pipelines
from memadvisor.cost.pipelines.captured import CapturedPipeline, PlayedPipeline
from memadvisor.cost.pipelines.work import Kind, Work
from memadvisor.cost.places import pass_text
from memadvisor.cost.simulation import Simulation
from memadvisor.cost.step import CapturedStep
from memadvisor.cost.transfers import TransferTimes
from memadvisor.hardware.hardware import Hardware
from memadvisor.plan import LaneInterval, Plan, RankPlan
from memadvisor.planning.advice_notes import rates_text, size_notes
from memadvisor.planning.budget import card_notes
from memadvisor.planning.by_rank import front_of_points, plan_of_ranks, rank_plans
from memadvisor.planning.collecting import collecting_seldom
from memadvisor.planning.machine import transfers_of
from memadvisor.planning.stage_choice import Chosen, StageChoice
from memadvisor.run.run import Run
from memadvisor.schedule import Lane
from memadvisor.unit_ranges import unit_ranges
from memadvisor.units import format_bytes, format_seconds

_KINDS = {"forward": Kind.F, "backward": Kind.BW}
_RUNGS = 8  # budgets of the front between the smallest and that without recomputation

Choices = Sequence[Chosen]  # by rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAdvice:
    """What one rank of a pipeline would do. `num_in_flight`: micro-batches under way at once, at most, over all of its
    `stages`, as recorded; `moved`: units whose activations wait on `tier`; `added_s`: what its own step gets longer by."""

    rank: int
    stages: tuple[int, ...]
    num_in_flight: int
    measured_peak_bytes: int
    recomputed: tuple[str, ...]
    moved: tuple[str, ...]
    tier: str | None
    num_units: int
    predicted_peak_bytes: int
    added_s: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePoint:
    """The fullest rank's peak and the step, predicted; `num_recomputed` and `num_moved` by rank."""

    peak_bytes: int
    step_time_s: float
    num_recomputed: tuple[int, ...]
    num_moved: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineAdvice:
    """The best choice of each rank of `num_pipelines` beside each other, of `num_stages` each. `plan`: None where a rank
    does not fit; `ranks` then has the choice of least peak for it.

    `step_time_s` is predicted. `everything`: what it would be if every rank recomputed all that it can. `bubble_fraction`:
    of the played step, what ranks do not compute in. `front`: none known takes both less memory and less time.
    """

    budget_bytes: int
    schedule: str
    num_pipelines: int
    num_stages: int
    num_micro_batches: int
    plan: Plan | None
    ranks: tuple[RankAdvice, ...]
    step_time_s: float
    bubble_fraction: float
    everything: PipelinePoint
    front: tuple[PipelinePoint, ...]
    smallest_budget_bytes: int
    measured_peak_bytes: int
    measured_step_time_s: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """Of a process: its pipeline, and the position in that."""

    pipeline: CapturedPipeline
    position: int

    @property
    def step(self) -> CapturedStep:
        return self.pipeline.steps[self.position]


def _pass_of(place: _Place, work: Work) -> tuple[str, int, int | None]:
    """Phase, micro-batch, and the stage where the rank has several."""
    stages = place.pipeline.stages[place.position]
    phase = next(phase for phase, kind in _KINDS.items() if kind is work.kind)
    return phase, work.microbatch, work.chunk if len(stages) > 1 else None


class PipelineSearch:
    """Choices of all ranks of pipelines beside each other, for any budget. `ranks`: in the order of the processes."""

    def __init__(self, *pipelines: CapturedPipeline, times: TransferTimes | None = None) -> None:
        self.pipelines = pipelines
        self.times = times
        places = [_Place(each, position) for each in pipelines for position in range(len(each.steps))]
        self.places = sorted(places, key=lambda place: place.step.rank)
        self.ranks = [StageChoice(place.step, times) for place in self.places]

    def fastest(self, budget_bytes: int) -> list[Chosen | None]:
        """By rank; None for one that does not fit."""
        return [rank.fastest(budget_bytes) for rank in self.ranks]

    def smallest(self) -> list[Chosen]:
        return [rank.smallest() for rank in self.ranks]

    def peaks(self, choices: Choices) -> list[int]:
        return [rank.play(own).peak_bytes for rank, own in zip(self.ranks, choices, strict=True)]

    def step_s(self, choices: Choices) -> float:
        """The measured step, and what the longest pipeline's play gets longer by."""
        played_s = max(played.step_s for played in self.play(choices))
        return self.pipelines[0].step_time_s + played_s - max(each.plain.step_s for each in self.pipelines)

    def play(self, choices: Choices) -> list[PlayedPipeline]:
        return [pipeline.play(self._added_s(pipeline, choices)) for pipeline in self.pipelines]

    def timelines(self, choices: Choices) -> list[tuple[LaneInterval, ...]]:
        """By rank, its pieces from the start of the pipeline's first one on."""
        played = {id(each): each.pieces(self._added_s(each, choices)) for each in self.pipelines}
        return [
            tuple(
                LaneInterval(
                    Lane.COMPUTE.value, pass_text(*_pass_of(place, piece.work)), piece.start_s, piece.end_s
                )
                for piece in played[id(place.pipeline)][place.position]
            )
            for place in self.places
        ]

    def _added_s(self, pipeline: CapturedPipeline, choices: Choices) -> dict[Work, float]:
        """What a pipeline's pieces get longer by: second forwards, and waiting for transfers."""
        found: dict[Work, float] = {}
        for place, rank, own in zip(self.places, self.ranks, choices, strict=True):
            if place.pipeline is pipeline and own != Chosen():
                for (kind, number), added_s in _added_by_pass(place.step, rank.play(own)).items():
                    found[pipeline.work_of(place.position, kind, number)] = added_s
        return found

    def point(self, choices: Choices) -> PipelinePoint:
        return PipelinePoint(
            peak_bytes=max(self.peaks(choices)),
            step_time_s=self.step_s(choices),
            num_recomputed=tuple(len(own.recomputed) for own in choices),
            num_moved=tuple(len(own.moved) for own in choices),
        )


def _added_by_pass(step: CapturedStep, played: Simulation) -> dict[tuple[Kind, int], float]:
    """What each pass of a micro-batch takes beyond what was recorded, as compute's lane has it. What is waited for between two
    pieces is of the one before."""
    found: dict[tuple[Kind, int], float] = {}
    done = [lane for lane in played.lanes.intervals if lane.lane is Lane.COMPUTE]
    position, last_s, of_pass = 0, 0.0, None
    for interval in done:
        if position == len(step.segments) or interval.label != step.places[position]:
            continue  # a second run, whose time is of the segment that it stands before
        segment = step.segments[position]
        if segment.phase in _KINDS and segment.micro_batch is not None:
            of_pass = _KINDS[segment.phase], segment.micro_batch
        if of_pass is not None:
            found[of_pass] = found.get(of_pass, 0.0) + interval.end_s - last_s - segment.duration_s
        position, last_s = position + 1, interval.end_s
    return found


def pipeline_search(run: Run, hardware: Hardware | None = None) -> PipelineSearch:
    """Without a tier for stages in `fully_shard`, as elsewhere. Raises UsageError for pipelines that no plan is made for."""
    pipelines = captured_pipelines(run)
    if any(rank.shard_groups for rank in run.ranks):
        return PipelineSearch(*pipelines)
    kept_bytes = sum(
        storages.size_bytes for each in pipelines for step in each.steps for storages in step.saved
    )
    return PipelineSearch(*pipelines, times=transfers_of(run, hardware, kept_bytes))


@collecting_seldom()
def advise_pipeline(run: Run, *, memory_bytes: int, hardware: Hardware | None = None) -> PipelineAdvice:
    """Choose for each rank of a pipeline; activations wait on a tier whose transfers `hardware` knows. Raises UsageError for pipelines that no plan is made for."""
    search = pipeline_search(run, hardware)
    first = search.pipelines[0]
    smallest = search.smallest()
    found = search.fastest(memory_bytes)
    choices = [least if own is None else own for own, least in zip(found, smallest, strict=True)]
    fits = None not in found
    ranks = tuple(_rank_advice(search, rank, own, memory_bytes) for rank, own in enumerate(choices))
    played = search.play(choices)
    longest_s, busy_s = max(each.step_s for each in played), [s for each in played for s in each.busy_s]
    point = search.point(choices)
    plan = _plan(run, search, choices, memory_bytes, point) if fits else None
    return PipelineAdvice(
        budget_bytes=memory_bytes,
        schedule=first.schedule,
        num_pipelines=len(search.pipelines),
        num_stages=first.num_stages,
        num_micro_batches=first.num_micro_batches,
        plan=plan,
        ranks=ranks,
        step_time_s=point.step_time_s,
        bubble_fraction=1 - sum(busy_s) / (len(busy_s) * longest_s),
        everything=search.point([rank.everything for rank in search.ranks]),
        front=_front(search, smallest, memory_bytes),
        smallest_budget_bytes=max(search.peaks(smallest)),
        measured_peak_bytes=max(place.step.peak_bytes for place in search.places),
        measured_step_time_s=first.step_time_s,
        notes=(
            *size_notes(run),
            *card_notes(run, memory_bytes),
            *_notes(search.pipelines),
            *_transfer_note(ranks, search.times),
        ),
    )


def _rank_advice(search: PipelineSearch, rank: int, own: Chosen, budget_bytes: int) -> RankAdvice:
    place, choice = search.places[rank], search.ranks[rank]
    step = place.step
    peak_bytes = choice.play(own).peak_bytes
    return RankAdvice(
        rank=step.rank,
        stages=place.pipeline.stages[place.position],
        num_in_flight=place.pipeline.in_flight(place.position),
        measured_peak_bytes=step.peak_bytes,
        recomputed=tuple(unit.name for unit in step.units if unit.name in own.recomputed),
        moved=tuple(unit.name for unit in step.units if unit.name in own.moved),
        tier=choice.tier if own.moved else None,
        num_units=len(step.units),
        predicted_peak_bytes=peak_bytes,
        added_s=choice.added_s(own),
        fits=peak_bytes <= budget_bytes,
    )


def _plan(
    run: Run, search: PipelineSearch, choices: Choices, budget_bytes: int, point: PipelinePoint
) -> Plan:
    own = rank_plans(run, search.ranks, choices, point.step_time_s)
    timelines = search.timelines(choices)
    own = tuple(replace(each, timeline=lanes) for each, lanes in zip(own, timelines, strict=True))
    return plan_of_ranks(own, budget_bytes, _why(search.pipelines[0], own, point, budget_bytes))


def _why(pipeline: CapturedPipeline, own: Sequence[RankPlan], point: PipelinePoint, budget_bytes: int) -> str:
    what = "; ".join(f"rank {each.rank} {_what_of(each)}" for each in own)
    return (
        f"{what}. The fullest rank's peak is {format_bytes(point.peak_bytes)} of "
        f"{format_bytes(budget_bytes)}, and a step takes {format_seconds(point.step_time_s)}, "
        f"{format_seconds(pipeline.step_time_s)} without."
    )


def _what_of(own: RankPlan) -> str:
    again = [unit.name for unit in own.units if unit.recompute]
    away = {unit.name: unit.activation_tier for unit in own.units if unit.activation_tier != "device"}
    told = [f"recomputes {unit_ranges(again)}"] if again else []
    told += [f"has activations of {unit_ranges(away)} on {next(iter(away.values()))}"] if away else []
    return " and ".join(told) or "does nothing"


def _front(search: PipelineSearch, smallest: Choices, budget_bytes: int) -> tuple[PipelinePoint, ...]:
    nothing: Choices = [Chosen() for _ in search.ranks]
    low, high = max(search.peaks(smallest)), max(search.peaks(nothing))
    targets = [low + (high - low) * rung // _RUNGS for rung in range(_RUNGS)] + [budget_bytes]
    points = [search.point(nothing)]
    for target in targets:
        found = [units for units in search.fastest(target) if units is not None]
        if len(found) == len(search.ranks):
            points.append(search.point(found))
    return front_of_points(points)


def _transfer_note(ranks: Sequence[RankAdvice], times: TransferTimes | None) -> Iterator[str]:
    tiers = {rank.tier for rank in ranks} - {None}
    if tiers and times is not None:
        yield f"Transfers of activations are predicted from {rates_text(times, to_host='host' in tiers)}."


def _notes(pipelines: Sequence[CapturedPipeline]) -> list[str]:
    notes = []
    if any(None in each.link_s[: len(each.steps) - 1] for each in pipelines):
        notes.append(
            "How long messages between some of the stages take was not recorded: they are part of what is taken to stay as "
            "it is."
        )
    if len(pipelines) > 1:
        notes.append("What averaging gradients over the pipelines takes is taken to stay as it is.")
    if pipelines[0].steps[0].device != "cpu":
        notes.append("What a CUDA device reserves beyond its peak is not predicted for pipelines.")
    if any(len(own) > 1 for each in pipelines for own in each.stages):
        notes.append(
            "Each rank has several stages, and the least second forwards in all are chosen: the step may be a little longer "
            "than it need be."
        )
    return notes
