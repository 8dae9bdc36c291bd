"""What an arrangement is as a plan, and what it gives: played, and with a CUDA allocator's settings replayed.

Searches play thousands; nothing here refers to a search, so that what is kept of one goes with it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from dataclasses import replace
from functools import partial

from memadvisor.analyzers.planned_models import fingerprint_of, planned_models
from memadvisor.asked import NOTHING, Asked
from memadvisor.cost.activations import Activations, activations_under
from memadvisor.cost.allocation_sequence import planned_sequence
from memadvisor.cost.allocator_replay import last_peak, replay
from memadvisor.cost.allocator_settings import AllocatorSettings
from memadvisor.cost.collectives import CollectiveTimes
from memadvisor.cost.limit import LeastTime, Limit
from memadvisor.cost.moments import Moments
from memadvisor.cost.simulate import simulate
from memadvisor.cost.simulation import Simulation
from memadvisor.cost.step import CapturedStep
from memadvisor.cost.timeline import timeline_of
from memadvisor.cost.transfers import TransferTimes
from memadvisor.executors import Algorithm
from memadvisor.plan import Plan, Prediction
from memadvisor.planning.arrangement import Arrangement
from memadvisor.planning.outcomes import MemoryFirst, Outcome, Played
from memadvisor.planning.paging import starting_bytes
from memadvisor.planning.ranked import RankedPlan
from memadvisor.planning.stretches import Nested, nested_of
from memadvisor.run.run import Run
from memadvisor.write_schedule import write_schedule


def ranks_that_share(step: CapturedStep) -> int | None:
    """How many ranks share what the script's own FSDP2 shards, where other ranks hold the same; else None."""
    return next((group.num_ranks for group in step.shard_groups if group.num_replicas > 1), None)


def _forward_ranks(step: CapturedStep) -> int | None:
    """How many ranks have parts of what the script's own FSDP2 has freed after the forward, where those are not all."""
    return next((group.forward_ranks for group in step.shard_groups if group.forward_ranks), None)


class Plays:
    """Of the steps of one run, for so many ranks and within one budget, with what was asked for and never chosen.

    `settings`: a CUDA allocator's; with them a plan needs what that reserves, and its peak is what that has allocated, in
    its blocks; else it is the simulator's. `paged_transfers`: where parameters and gradients lie on the tier too. `chunked_units`: those that a loss in
    chunks needs beyond their forward, which are not freed after it.
    """

    def __init__(
        self,
        run: Run,
        times: CollectiveTimes | None,
        num_ranks: int,
        budget_bytes: int,
        settings: AllocatorSettings | None = None,
        *,
        asked: Asked = NOTHING,
        transfers: TransferTimes | None = None,
        paged_transfers: TransferTimes | None = None,
        chunked_units: Collection[str] = (),
        algorithms: tuple[Algorithm, ...] = (),
    ) -> None:
        self.fingerprint = fingerprint_of(run.ranks[0])
        self.models = planned_models(run.ranks[0], num_ranks)
        self.has_any_order = any(rank.process.has_ddp_any_order for rank in run.ranks)
        self.times = times
        self.num_ranks = num_ranks
        self.budget_bytes = budget_bytes
        self.settings = settings
        self.asked = asked
        self.transfers = transfers
        self.paged_transfers = paged_transfers
        self._chunked_units = chunked_units
        self._algorithms = algorithms
        # Of the step that is played, and of the same with fewer micro-batches; of each way of having states the moments of
        # one play.
        self._activations: dict[tuple[int, Nested], Activations] = {}
        self._moments: dict[tuple[int, Hashable], Moments] = {}
        self._least: LeastTime | None = None  # of it too

    def begin(self) -> None:
        """Another step comes."""
        self._activations.clear()
        self._moments.clear()
        self._least = None

    def play(self, step: CapturedStep, arrangement: Arrangement, limit: Limit | None = None) -> Simulation:
        schedule = write_schedule(self._plan(step, arrangement), step.units)
        transfers = self.paged_transfers if schedule.paged else self.transfers
        key = step.repeats, nested_of(arrangement)
        known = self._activations.get(key)
        played = simulate(step, schedule, self.times, activations=known, transfers=transfers, limit=limit)
        self._activations[key] = played.moments.activations
        if played.is_whole:
            self._moments[step.repeats, arrangement.states] = played.moments
        return played

    def look(self, step: CapturedStep, arrangement: Arrangement) -> Played:
        """What it gives; it is played now where its memory is not known without."""
        moments = self._memory(step, arrangement)
        if moments is None:
            return self.play(step, arrangement)
        return MemoryFirst(moments, partial(self.play, step, arrangement))

    def outcome(self, step: CapturedStep, arrangement: Arrangement, limit: Limit | None) -> Outcome:
        """What it gives, as far as it stays within a limit; it is not played where it is known to pass that."""
        least = Outcome(0.0 if limit is None else self.least_s(step, arrangement), 0, is_whole=False)
        if limit is not None and limit.peak_bytes < math.inf and not least.passes(limit):
            moments = self._memory(step, arrangement)
            least = least if moments is None else replace(least, peak_bytes=moments.peak_bytes)
        if least.passes(limit):
            return least
        played = self.play(step, arrangement, limit)
        return Outcome(played.step_time_s, played.peak_bytes, played.is_whole)

    def _memory(self, step: CapturedStep, arrangement: Arrangement) -> Moments | None:
        """All moments, where a step was played whose states are the same."""
        like = self._moments.get((step.repeats, arrangement.states))
        if like is None:
            return None
        key = step.repeats, nested_of(arrangement)
        known = self._activations.get(key)
        if known is None or known.step is not step:
            schedule = write_schedule(self._plan(step, arrangement), step.units)
            known = self._activations[key] = activations_under(step, schedule)
        return like.under(known)

    def least_s(self, step: CapturedStep, arrangement: Arrangement) -> float:
        """What it takes at the least, as far as that is known without playing it."""
        if self._least is None:
            self._least = LeastTime(step)
        return self._least.seconds(arrangement.units, arrangement.shard_ranks or self.num_ranks)

    def ranked(self, step: CapturedStep, arrangement: Arrangement, simulated: Prediction) -> RankedPlan:
        """`simulated`: what playing it gives, which searches go by; a plan says what its allocations are replayed to give."""
        plan = self._plan(step, arrangement)
        prediction = self._replayed(step, plan, simulated)
        plan = replace(plan, prediction=prediction)
        return RankedPlan(
            plan=plan,
            prediction=prediction,
            fits=max(prediction.needed_bytes, starting_bytes(step, plan)) <= self.budget_bytes,
            changes_script=step.repeats > 1,
            step=step,
        )

    def with_timeline(self, ranked: RankedPlan) -> Plan:
        """The plan with its lanes."""
        schedule = write_schedule(ranked.plan, ranked.step.units)
        transfers = self.paged_transfers if schedule.paged else self.transfers
        played = simulate(ranked.step, schedule, self.times, transfers=transfers)
        return replace(ranked.plan, timeline=timeline_of(played))

    def _replayed(self, step: CapturedStep, plan: Plan, simulated: Prediction) -> Prediction:
        if self.settings is None:
            return simulated
        schedule = write_schedule(plan, step.units)
        transfers = self.paged_transfers if schedule.paged else self.transfers
        changes = planned_sequence(step, schedule, self.times, transfers)
        played = replay(changes, self.settings)
        peak = last_peak(changes, played)
        return replace(
            simulated,
            peak_bytes=peak.allocated_bytes,
            by_category_bytes=peak.by_category_bytes,
            peak_position=peak.place,
            reserved_bytes=played.peak_reserved_bytes,
        )

    def _plan(self, step: CapturedStep, arrangement: Arrangement) -> Plan:
        units, asked = arrangement.units, self.asked
        if asked.optimizer_bits is not None:
            units = tuple(replace(unit, optimizer_bits=asked.optimizer_bits) for unit in units)
        units = tuple(
            replace(unit, zero_stage=min(2, unit.zero_stage)) if unit.name in self._chunked_units else unit
            for unit in units
        )
        return Plan(
            fingerprint=self.fingerprint,
            num_ranks=self.num_ranks,
            zero_stage=max((unit.zero_stage for unit in arrangement.units), default=0),
            policy="chosen",
            units=units,
            micro_batch_size=step.micro_batch_size,
            grad_accum=step.num_micro_batches * step.repeats,
            budget_bytes=self.budget_bytes,
            overlap=arrangement.behind > 0,
            gather_depth=arrangement.gather_depth,
            reduce_depth=arrangement.reduce_depth,
            precision=asked.precision,
            compression=asked.compression,
            local_sgd=asked.local_sgd,
            shard_ranks=ranks_that_share(step) or arrangement.shard_ranks,
            secondary_ranks=_forward_ranks(step) or arrangement.copied_among,
            executor="fsdp2" if step.shard_groups else "built-in",
            reshard_model=any(group.reshards and not group.name for group in step.shard_groups),
            algorithms=() if step.shard_groups or step.device != "cpu" else self._algorithms,
            update_in_backward=arrangement.early,
            update_by_unit=arrangement.by_unit,
            fused_updates=asked.fused_updates,
            chunked_loss=asked.chunked_loss,
            autocast=asked.autocast,
            stretches=arrangement.stretches,
            models=self.models,
        )
