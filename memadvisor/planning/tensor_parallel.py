"""Plans for ranks whose parallelism is their own: that split layers among them (tensor parallelism), or bring gradients
together without DistributedDataParallel and FSDP2, as an optimizer of their own may, or with what the engine does not do in
DistributedDataParallel's place, or with FSDP2 in a way that no plan sets. Which units do all of them recompute?

A unit that runs again repeats its collectives, and a collective takes all ranks: so all recompute the same units, and those
run again in the same order, for backwards go through the same graph. What a second forward takes is what the first one
took, waits for the other ranks included, up to the last tensor that it saves. The choice is made on the fullest rank, and
tightened until no other one is over the budget; the step is that of the slowest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memadvisor.analyzers.data_ranks import num_splitting
from memadvisor.analyzers.planned_models import fingerprint_of
from memadvisor.analyzers.script_changes.change import ScriptChange
from memadvisor.analyzers.script_changes.found import changes_of
from memadvisor.analyzers.script_shards import unplayed
from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.step import CapturedStep
from memadvisor.errors import UsageError
from memadvisor.plan import Plan
from memadvisor.planning.advice_notes import size_notes
from memadvisor.planning.budget import card_notes
from memadvisor.planning.by_rank import front_of_points, plan_of_ranks, rank_plans
from memadvisor.planning.collecting import collecting_seldom
from memadvisor.planning.lost_ranks import lost_ranks_hint, lost_ranks_text
from memadvisor.planning.own_updates import notes_on_later_hooks, own_updates
from memadvisor.planning.stage_choice import Chosen, StageChoice
from memadvisor.run.run import Run
from memadvisor.unit_ranges import unit_ranges
from memadvisor.units import format_bytes, format_seconds

_RUNGS = 8  # budgets of the front between the smallest and that without recomputation
_MAX_TIGHTENINGS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRank:
    """One rank's own peak, as recorded and as predicted for the choice of all."""

    rank: int
    measured_peak_bytes: int
    predicted_peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPoint:
    """The fullest rank's peak and the slowest one's step, predicted; `num_recomputed` units on every rank."""

    peak_bytes: int
    step_time_s: float
    num_recomputed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAdvice:
    """The best choice of all ranks. `plan`: None where a rank does not fit; `chosen` is then that of least peak.

    `front`: none known takes both less memory and less time. `notes` are what the reader should know.
    """

    budget_bytes: int
    plan: Plan | None
    ranks: tuple[TensorRank, ...]
    recomputed: tuple[str, ...]
    num_units: int
    chosen: TensorPoint
    front: tuple[TensorPoint, ...]
    smallest_budget_bytes: int
    measured_peak_bytes: int
    measured_step_time_s: float
    notes: tuple[str, ...]
    script_changes: tuple[ScriptChange, ...] = ()


class UnlikeRanksError(UsageError):
    """Ranks train models that differ, as stages of a pipeline by hand do."""


class TensorSearch:
    """One choice for all ranks, for any budget."""

    def __init__(self, steps: Sequence[CapturedStep]) -> None:
        self.ranks = [StageChoice(step) for step in steps]
        self.fullest = max(self.ranks, key=lambda rank: rank.play(Chosen()).peak_bytes)

    def peaks(self, units: Chosen) -> list[int]:
        return [rank.play(units).peak_bytes for rank in self.ranks]

    def fastest(self, budget_bytes: int) -> Chosen | None:
        """None where nothing that was found fits on all ranks."""
        target_bytes = budget_bytes
        for _ in range(_MAX_TIGHTENINGS):
            units = self.fullest.fastest(target_bytes)
            if units is None:
                break
            over_bytes = max(self.peaks(units)) - budget_bytes
            if over_bytes <= 0:
                return units
            target_bytes = min(target_bytes, self.fullest.play(units).peak_bytes) - over_bytes
        smallest = self.smallest()
        return smallest if max(self.peaks(smallest)) <= budget_bytes else None

    def smallest(self) -> Chosen:
        return self.fullest.smallest()

    def point(self, units: Chosen) -> TensorPoint:
        return TensorPoint(
            peak_bytes=max(self.peaks(units)),
            step_time_s=max(rank.play(units).step_time_s for rank in self.ranks),
            num_recomputed=len(units.recomputed),
        )


def is_tensor_parallel(run: Run) -> bool:
    """Whether ranks hold parts of one layer."""
    return any(rank.tensor_parallel for rank in run.ranks)


def is_of_its_own(run: Run) -> bool:
    """Whether several ranks train as only such a plan can be applied to.

    FSDP1 gathers a unit's parameters once more when it runs again, which is not played.
    """
    is_shared = any(rank.shard_groups for rank in run.ranks)
    if run.manifest.world_size < 2 or (is_shared and own_sharding(run) is None):
        return False
    return all(
        (rank.process.has_ddp is False or own_updates(rank) is not None)
        and all(module.type_name != "FullyShardedDataParallel" for module in rank.modules)
        for rank in run.ranks
    )


def own_sharding(run: Run) -> str | None:
    """What the script's own FSDP2 does, in words, that no plan sets: what it frees and gathers is replayed as it was. None: it
    has none, or plans set it."""
    sharded = [(rank, rank.traced_step) for rank in run.ranks if rank.shard_groups]
    found = (unplayed(rank, step) for rank, step in sharded if step is not None)
    return next((what for what in found if what is not None), None)


@collecting_seldom()
def advise_tensor_parallel(run: Run, *, memory_bytes: int) -> TensorAdvice:
    """Choose for all ranks. Raises UsageError for runs that no such plan is made for."""
    steps = _steps(run)
    search = TensorSearch(steps)
    found = search.fastest(memory_bytes)
    units = search.smallest() if found is None else found
    chosen = search.point(units)
    names = tuple(unit.name for unit in steps[0].units if unit.name in units.recomputed)
    measured_s = max(step.step_time_s for step in steps)
    why = (
        f"all ranks recompute {unit_ranges(names) or 'nothing'}. The fullest rank's peak is "
        f"{format_bytes(chosen.peak_bytes)} of {format_bytes(memory_bytes)}, and a step takes "
        f"{format_seconds(chosen.step_time_s)}, {format_seconds(measured_s)} without."
    )
    own = rank_plans(run, search.ranks, [units] * len(steps), chosen.step_time_s)
    return TensorAdvice(
        budget_bytes=memory_bytes,
        plan=None if found is None else plan_of_ranks(own, memory_bytes, why, alike=True),
        ranks=tuple(
            TensorRank(
                rank=step.rank, measured_peak_bytes=step.peak_bytes, predicted_peak_bytes=predicted_bytes
            )
            for step, predicted_bytes in zip(steps, search.peaks(units), strict=True)
        ),
        recomputed=names,
        num_units=len(steps[0].units),
        chosen=chosen,
        front=_front(search, memory_bytes),
        smallest_budget_bytes=max(search.peaks(search.smallest())),
        measured_peak_bytes=max(step.peak_bytes for step in steps),
        measured_step_time_s=measured_s,
        notes=(*size_notes(run), *card_notes(run, memory_bytes), *notes_on_later_hooks(run)),
        script_changes=changes_of(run, run.ranks[0]),
    )


def _steps(run: Run) -> list[CapturedStep]:
    """Each rank's own, of ranks that have the same units."""
    hint = "`memadvisor show RUN` says what recomputing each unit would free."
    if run.missing_ranks:
        raise UsageError(
            f"Nothing is known of {lost_ranks_text(run)}, and what all ranks recompute is chosen from the records of all.",
            hint=f"{lost_ranks_hint(run)}.",
        )
    untraced = [rank.process.rank for rank in run.ranks if rank.traced_step is None]
    if 0 < len(untraced) < len(run.ranks):
        raise UsageError(
            f"No step of rank {untraced[0]} was traced, and of others one was, as where some ranks alone train.",
            hint=hint,
        )
    parts = {num_splitting(rank) for rank in run.ranks}
    if len(parts) > 1:
        raise UsageError(
            f"Layers are split among {min(parts)} ranks on some ranks of the run, and among {max(parts)} on others.",
            hint=hint,
        )
    steps = [captured_step(run, num_ranks=1, of_rank=rank.process.rank) for rank in run.ranks]
    first = run.ranks[0]
    for rank, step in zip(run.ranks[1:], steps[1:], strict=True):
        names = [unit.name for unit in step.units]
        if (fingerprint_of(rank), names, set(step.recomputable)) != (
            fingerprint_of(first),
            [unit.name for unit in steps[0].units],
            set(steps[0].recomputable),
        ):
            raise UnlikeRanksError(
                f"Rank {rank.process.rank} has other units, or can recompute others, than rank {first.process.rank}: "
                "a plan of such ranks has all of them run the same ones again.",
                hint=hint,
            )
    return steps


def none_applies(why: UsageError) -> UsageError:
    """What to say of ranks whose parallelism is their own where they cannot choose alike, and times of collectives, which
    plans for DistributedDataParallel would need, are not known."""
    return UsageError(
        f"{why} So no plan of several ranks applies to this script, whose parallelism is its own.",
        hint="`memadvisor show RUN` says what recomputing each unit of the fullest rank would free; `memadvisor run --policy "
        "every-layer` has each rank that calls a model of repeated layers recompute these by itself.",
    )


def _front(search: TensorSearch, budget_bytes: int) -> tuple[TensorPoint, ...]:
    nothing, smallest = Chosen(), search.smallest()
    low, high = max(search.peaks(smallest)), max(search.peaks(nothing))
    targets = [low + (high - low) * rung // _RUNGS for rung in range(_RUNGS)] + [budget_bytes]
    found = {nothing, *(units for target in targets if (units := search.fastest(target)) is not None)}
    return front_of_points(map(search.point, found))
