"""The traced step as a chain of segments with measured times: what the simulator replays and changes.

Memory comes from the traced step, exactly; times come from the timed steps, since a traced step is slow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction

from memadvisor.analyzers.autocast.step import required_autocast
from memadvisor.analyzers.batch_sizes import slow_convolutions
from memadvisor.analyzers.chunked_step import ChunkedStep, required_chunked_step
from memadvisor.analyzers.derivatives import copies_released_s, with_derivatives_inside
from memadvisor.analyzers.fused_step import fused_seconds, with_fused_updates
from memadvisor.analyzers.gradient_use import leaves_gradients_alone, updates_in_pieces
from memadvisor.analyzers.late_backwards import with_forwards_of_their_backwards
from memadvisor.analyzers.lent_calls import with_lent_calls_inside
from memadvisor.analyzers.lent_modules import (
    in_order_of_own_calls,
    lenders,
    loans_ended,
    with_saved_by_callers,
)
from memadvisor.analyzers.nested_backwards import with_nested_backwards
from memadvisor.analyzers.observed_collectives import observed_collectives
from memadvisor.analyzers.own_messages import with_own_messages
from memadvisor.analyzers.own_updates import own_updates
from memadvisor.analyzers.pieces import (
    Piece,
    checkpointing_units,
    cut_again,
    cut_step,
    typical_durations,
)
from memadvisor.analyzers.pipeline_passes import with_passes_apart
from memadvisor.analyzers.placement import Placement
from memadvisor.analyzers.planned_models import is_each_called_once, live_gradients, planned_models
from memadvisor.analyzers.roundable import rounding_cost
from memadvisor.analyzers.script_shards import (
    absent_in_backward,
    check_predictable,
    late_sharding,
    take_collectives,
    with_buffers_counted,
)
from memadvisor.analyzers.second_runs import second_run_cost, second_runs
from memadvisor.analyzers.segment_memory import Memory, segment_memory
from memadvisor.analyzers.split_times import split_durations
from memadvisor.analyzers.traced_ranks import traced_peak_bytes, traced_ranks
from memadvisor.analyzers.unit_operators import timed_operators
from memadvisor.analyzers.unit_states import constant_states, planned_units, unit_states
from memadvisor.asked import NOTHING, Asked
from memadvisor.autocast import WorkspacesOf
from memadvisor.cost.late_sharding import NOTHING_LATE
from memadvisor.cost.second_run import SecondRun, SecondRunCost
from memadvisor.cost.step import CapturedStep, Segment
from memadvisor.hardware.hardware import OptimizerRate
from memadvisor.precision import FULL_PRECISION, Precision
from memadvisor.run.records import Step
from memadvisor.run.run import RankRun, Run


def captured_step(
    run: Run,
    *,
    micro_batch_divisor: int | Fraction = 1,
    repeats: int | None = None,
    precision: Precision = FULL_PRECISION,
    num_ranks: int | None = None,
    of_rank: int | None = None,
) -> CapturedStep:
    """The step of the rank whose traced peak is highest, or of that named, which may hold a stage of a pipeline or parts
    of layers, and keeps all that the script's ranks do together.

    With a divisor d, the step as it would be with micro-batches of 1/d of their size, d times as many: storages with a
    batch dimension shrink, states do not (docs/planning.md). A divisor of 1/k: micro-batches k times as large, and as
    many as there were. `repeats`: that many in place of each, however large they are. With a precision, the step as the
    schedules of plans with that precision find it. Of several models the units are those that a plan for `num_ranks`, by
    default the run's own, may be about (planned_models.py). Raises UsageError when no step was traced, the run already
    carries a plan, or the script's own FSDP2 does what no plan is made for.
    """
    recorded = RecordedStep(run, Asked(precision=precision), num_ranks=num_ranks, of_rank=of_rank)
    return recorded.captured(micro_batch_divisor, repeats)


class RecordedStep:
    """What captured steps with other micro-batches have in common with the recorded one; see `captured_step`.

    What is `asked` for is there already. Fused updates take what `optimizer_rates` say, where these are known
    (fused_step.py). Under autocast (autocast/), with `workspaces_of` its products, times are those recorded. A loss in chunks: chunked_step.py.
    `measured_step_time_s`: of the step as it was.
    `chunked_loss`: with its layer and rows; `chunked_units`: whose parameters it needs until the loss; `chunks_again_s`: what
    is done once more for it.
    """

    def __init__(
        self,
        run: Run,
        asked: Asked = NOTHING,
        *,
        num_ranks: int | None = None,
        of_rank: int | None = None,
        optimizer_rates: Sequence[OptimizerRate] = (),
        workspaces_of: WorkspacesOf | None = None,
    ) -> None:
        traced, rank, step = traced_ranks(run, of_rank)
        # What several ranks share, and an allocator's blocks, are not played for a derivative.
        has_derivatives = (num_ranks or rank.process.world_size) == 1 and rank.process.device == "cpu"
        rank = _as_asked(rank, has_derivatives, asked, workspaces_of)
        chunked = required_chunked_step(rank, step, wanted) if (wanted := asked.chunked_loss) else None
        self.chunked_loss = None if chunked is None else chunked.chunked_loss
        self.chunked_units = frozenset[str]() if chunked is None else chunked.units
        rank = rank if chunked is None else chunked.without_scores()
        self._is_apart = of_rank is not None  # it shares nothing but what the script itself does
        # Stages keep theirs gathered for the whole step, and beside split layers each is gathered as it was: replayed as it is.
        self._groups = rank.shard_groups if rank.process.world_size > 1 and not self._is_apart else ()
        if self._groups:
            check_predictable(rank, step)
            rank = with_buffers_counted(rank, step)
        else:
            rank = with_own_messages(rank)
        self._rank, self._step, self._precision = rank, step, asked.precision
        checkpointing = checkpointing_units(rank)
        self._pieces = cut_step(rank.spans, step, checkpointing)
        self._durations, self._step_time_s = typical_durations(rank, self._pieces, checkpointing)
        released_s = copies_released_s(rank) if has_derivatives else ()
        self._pieces, self._durations = cut_again(self._pieces, self._durations, released_s)
        self.measured_step_time_s = self._step_time_s
        if asked.fused_updates:
            fused_s = fused_seconds(rank, optimizer_rates)
            self._step_time_s -= _shorten_updates(self._pieces, self._durations, fused_s)
        self.chunks_again_s = _run_chunks_again(chunked, self._pieces, self._durations)
        self._step_time_s += self.chunks_again_s
        self._exposed_s = self._take_exposed(run)
        is_autocast = asked.autocast is not None
        rank = self._rank = with_saved_by_callers(rank, self._pieces, {unit.name for unit in rank.units})
        self._placement = Placement(rank, step, self._pieces, asked.precision, tells_caches=is_autocast)
        self._units = planned_units(rank, planned_models(rank, num_ranks or rank.process.world_size))
        self._states = unit_states(rank, step, self._units)
        self._batch = _micro_batch_size(rank, step) if is_each_called_once(rank, step) else None
        self._gradients = live_gradients(rank, self._pieces)
        self._lenders = lenders(rank, self._pieces, {unit.name for unit in self._units})
        self._units = in_order_of_own_calls(self._units, self._pieces, self._lenders)
        self._leaves_gradients_alone = all(map(leaves_gradients_alone, traced))
        self._updates_together = not asked.fused_updates and any(
            row.phase == "optimizer" and row.name.startswith("aten::_foreach_") for row in rank.operators
        )
        sharing = self._ranks_that_share()
        self._own_updates = own_updates(
            rank, self._pieces, self._states, together=self._updates_together, sharing=sharing
        )
        self._may_update_by_unit = not asked.fused_updates and updates_in_pieces(rank)
        self._constant_bytes = constant_states(rank, step, self._states)
        self._synced = _synced(rank, self._pieces)
        self._rounding_cost, self._second_run_cost = rounding_cost(rank), second_run_cost(rank)

    def _ranks_that_share(self) -> dict[str, int]:
        """By unit that the script's own FSDP2 shards, among how many."""
        ranks_of = {group.name: group.num_ranks for group in self._groups}
        return {u.name: ranks_of[u.shard_group] for u in self._units if u.shard_group in ranks_of}

    def _take_exposed(self, run: Run) -> float:
        """Take out of the durations what compute waited for collectives: how much that is."""
        if self._groups:
            observed = observed_collectives(run)
            return take_collectives(self._rank, self._step, self._pieces, self._durations, observed)
        if self._is_apart and not self._rank.pipeline_stages:
            return 0.0  # its backward waits for the same collectives under a plan
        return _take_exposed_tail(self._rank, self._pieces, self._durations)

    def slow_convolutions(self, micro_batch_divisor: int | Fraction) -> set[str]:
        """Modules whose times are not those of fewer samples: see `slow_convolutions.py`."""
        return slow_convolutions(self._rank, self._step, micro_batch_divisor)

    def captured(self, micro_batch_divisor: int | Fraction = 1, repeats: int | None = None) -> CapturedStep:
        """With micro-batches of 1/divisor of their size, so many in place of each."""
        rank, step, pieces, units = self._rank, self._step, self._pieces, self._units
        memory = segment_memory(self._placement, micro_batch_divisor)
        repeats = max(1, int(micro_batch_divisor)) if repeats is None else repeats
        durations = split_durations(rank, pieces, self._durations, micro_batch_divisor)
        runs = second_runs(rank, pieces, durations)
        return CapturedStep(
            rank=rank.process.rank,
            world_size=1 if self._is_apart else rank.process.world_size,
            device=rank.process.device,
            units=units,
            states=self._states,
            segments=_segments(pieces, durations, memory, self._gradients, self._lenders),
            inner=memory.inner,
            cached=memory.cached,
            boundaries=memory.boundaries,
            saved=memory.saved,
            roundable=memory.roundable,
            timelines=memory.timelines,
            rounding_cost=self._rounding_cost,
            make_storages=memory.make_storages,
            make_parted=memory.make_parted,
            recomputable=_recomputable(
                {unit.name for unit in units} - absent_in_backward(rank),
                memory,
                runs,
                self._second_run_cost,
                repeats,
                self._placement.num_walks(),
            ),
            second_runs=runs,
            second_run_cost=self._second_run_cost,
            operators=timed_operators(rank, memory.unit_forwards, memory.operators, durations),
            constant_state_bytes=self._constant_bytes,
            step_time_s=self._step_time_s,
            exposed_communication_s=self._exposed_s,
            peak_bytes=traced_peak_bytes(rank) or memory.peak_bytes,
            synced_micro_batches=self._synced,
            num_micro_batches=max(1, step.num_micro_batches),
            repeats=repeats,
            micro_batch_size=None if self._batch is None else int(self._batch // micro_batch_divisor),
            precision=self._precision,
            leaves_gradients_alone=self._leaves_gradients_alone,
            updates_together=self._updates_together,
            may_update_by_unit=self._may_update_by_unit,
            own_updates=self._own_updates,
            shard_groups=self._groups,
            holder=_holder(self._rank),
            late=late_sharding(rank, step) if self._groups else NOTHING_LATE,
        )


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


def _as_asked(
    rank: RankRun, has_derivatives: bool, asked: Asked, workspaces_of: WorkspacesOf | None
) -> RankRun:
    """The rank as it is planned for, but for a loss in chunks, whose passes are asked for more."""
    rank = with_nested_backwards(with_passes_apart(rank) if rank.pipeline_stages else rank)
    rank = with_lent_calls_inside(rank)
    rank = with_derivatives_inside(rank) if has_derivatives else rank
    rank = rank if rank.pipeline_stages else with_forwards_of_their_backwards(rank)
    rank = with_fused_updates(rank) if asked.fused_updates else rank
    return rank if asked.autocast is None else required_autocast(rank, workspaces_of)


def _run_chunks_again(chunked: ChunkedStep | None, pieces: Sequence[Piece], durations: list[float]) -> float:
    """Have pieces take what a loss in chunks does once more; the seconds that this takes."""
    again = {} if chunked is None else chunked.again_s(pieces, durations)
    for place, more_s in again.items():
        durations[place] += more_s
    return sum(again.values())


def _shorten_updates(pieces: Sequence[Piece], durations: list[float], updates_s: float | None) -> float:
    """Have the optimizer's pieces take no longer than that in all, where it is known; the seconds that this saves."""
    before_s = sum(s for piece, s in zip(pieces, durations, strict=True) if piece.phase == "optimizer")
    if updates_s is None or before_s <= updates_s:
        return 0.0
    for place, piece in enumerate(pieces):
        if piece.phase == "optimizer":
            durations[place] *= updates_s / before_s
    return before_s - updates_s


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


def _holder(rank: RankRun) -> str:
    """As of CapturedStep."""
    return "FSDP2" if rank.shard_groups else "torch.compile" if rank.process.has_compiled_model else ""


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
    lent: Sequence[tuple[str, ...]],
) -> tuple[Segment, ...]:
    return tuple(
        Segment(
            phase=piece.phase,
            unit=piece.unit,
            micro_batch=piece.micro_batch,
            call=piece.call,
            walk=piece.walk,
            duration_s=duration,
            captured=levels.captured,
            own_gradients=levels.own_gradients,
            passing_gradients=levels.passing_gradients,
            collected_gradients=levels.collected_gradients,
            loose_gradients=levels.loose_gradients,
            gradient_units=levels.gradient_units,
            growth=levels.growth,
            last_gradient_bytes=levels.last_gradient_bytes,
            live_gradients=alive,
            lenders=lenders_of,
            loans_ended=ended,
        )
        for piece, duration, levels, alive, lenders_of, ended in zip(
            pieces, durations, memory.levels, gradients, lent, loans_ended(pieces, lent), strict=True
        )
    )


def _recomputable(
    known: Collection[str],
    memory: Memory,
    runs: Mapping[tuple[str, int | None], SecondRun],
    cost: SecondRunCost,
    repeats: int,
    num_walks: Mapping[tuple[str, int | None], int],
) -> dict[str, float]:
    """Seconds of recomputing, over all micro-batches, of each unit that recomputing would free bytes of. `num_walks`: of
    units' passes that autograd goes through several times, how often."""
    return {
        unit: repeats
        * sum(run.seconds(cost) * num_walks.get(key, 1) for key, run in runs.items() if key[0] == unit)
        for unit in dict.fromkeys(item.unit for item in memory.inner if item.unit in known)
    }
