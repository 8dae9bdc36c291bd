"""Play a schedule over a captured step: step time, exposed communication, and memory at every moment.

The same schedule is played by the executor on the live model. Time runs on two lanes; memory is a list
of moments, each the highest instant of a segment, of a recomputation or of an action.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from memadvisor.cost.activations import Activations, View, activations_under, added
from memadvisor.cost.carried import carry_over
from memadvisor.cost.collectives import CollectiveTimes
from memadvisor.cost.components import scaled
from memadvisor.cost.delayed_memory import memory_of
from memadvisor.cost.engine_memory import EngineMemory
from memadvisor.cost.engine_time import UNIT_UPDATE_S, EngineTime, PagingTime
from memadvisor.cost.fsdp2_memory import Fsdp2Memory
from memadvisor.cost.lanes import Lanes
from memadvisor.cost.limit import Limit, Remaining
from memadvisor.cost.moments import Moments
from memadvisor.cost.moved_activations import TRANSFERS, MovedActivations
from memadvisor.cost.paged_parameters import PagedParameters
from memadvisor.cost.paged_updates import PagedUpdates
from memadvisor.cost.places import place_at, second_run_of
from memadvisor.cost.played_collectives import PlayedCollectives
from memadvisor.cost.segment_points import AFTER, PASSES, POINTS, lent_after, lent_before
from memadvisor.cost.simulation import Simulation, Watcher
from memadvisor.cost.step import NOTHING, Bytes, CapturedStep
from memadvisor.cost.transfers import TransferTimes
from memadvisor.schedule import Action, ActionKind, Point, Ranks, Schedule


def simulate(
    step: CapturedStep,
    schedule: Schedule,
    times: CollectiveTimes | None,
    watcher: Watcher | None = None,
    activations: Activations | None = None,
    transfers: TransferTimes | None = None,
    limit: Limit | None = None,
) -> Simulation:
    """Play `schedule` over `step`. `times` may be None where one rank needs no collective, `transfers` without other tiers.

    `activations`: those of the same step and choices, if at hand. Times do without what rounding takes if the run has not
    measured it (`rounding_cost`). A step that passes `limit` is played no further than to where that is certain."""
    if schedule.num_ranks > 1 and times is None:
        raise AssertionError("several ranks need times of collectives")
    activations = activations_under(step, schedule, activations)
    return _Player(step, schedule, times, watcher, activations, transfers).play(limit)


class _Here(NamedTuple):
    """A boundary whose actions are played: between segments `position` and `following`, which may be the same; `is_last`:
    of the last micro-batch."""

    point: Point
    position: int
    following: int
    view: View
    is_last: bool


class _Player:
    """The state of one simulation: the lanes' clocks, and the moments so far."""

    def __init__(
        self,
        step: CapturedStep,
        schedule: Schedule,
        times: CollectiveTimes | None,
        watcher: Watcher | None,
        activations: Activations,
        transfers: TransferTimes | None,
    ) -> None:
        self.step = step
        self.watcher = watcher
        self.schedule = schedule
        self.times = times
        self.stretches = activations.stretches
        self.engine = memory_of(step, schedule)
        self.activations = activations
        self.lanes = Lanes() if times is None or times.slowdown is None else Lanes(times.slowdown)
        self.paging_time = PagingTime(step, schedule, transfers)
        self.optimizer_s = sum(step.segments[position].duration_s for position in step.optimizer_at)
        update_s = partial(self.paging_time.whole_update_s, self.optimizer_s, self.engine.updates)
        self.paged = PagedUpdates(schedule, self.lanes, transfers, self.engine.update_traffic, update_s)
        self.updated_alone = frozenset(schedule.updated_alone)
        self.pages = PagedParameters(self.lanes, transfers, self.engine, self.paging_time)
        self.moved = MovedActivations(step, activations.moves, self.lanes, transfers, activations.using_s)
        self.moments = Moments(activations)
        self.engine_time = EngineTime(step, schedule, times)
        self.collectives = PlayedCollectives(step, schedule, times, self.lanes, self.engine_time)
        self.passing = ""  # the model's forward, a backward, or neither
        self.updates_due: list[str] = []  # units to be updated in the backward, once their reduction is over

    def play(self, limit: Limit | None) -> Simulation:
        self.paged.begin()
        carried = carry_over(self.schedule, self.lanes, self._alone_s, self._gather_updated)
        remaining = None
        if limit is not None:
            remaining = Remaining(self.step, limit, self.activations, self.engine.updates.late_time())
        for num_played, (position, is_last, is_again) in enumerate(self.step.order):
            if remaining is not None and remaining.is_hopeless(num_played, self.lanes, self.moments):
                least_s = remaining.step_time_s(num_played, self.lanes)
                return replace(self._simulation(), step_time_s=least_s, is_whole=False)
            self._segment(position, is_last, is_again)
        self._end_backward(len(self.step.segments) - 1, True)
        self.lanes.end_step(carried)
        return self._simulation()

    def _simulation(self) -> Simulation:
        step_time_s, components_s = scaled(self.lanes, self.step.time_factors)
        return Simulation(
            step_time_s=step_time_s,
            exposed_communication_s=components_s["exposed_communication"],
            exposed_transfer_s=components_s["exposed_transfer"],
            components_s=components_s,
            sent_bytes=round(self.collectives.sent_bytes),
            lanes=self.lanes,
            moments=self.moments,
        )

    def _gather_updated(self, action: Action) -> None:
        """What the step before has updated, and still has to bring to all ranks, comes in under this one."""
        self.engine.stale.add(action.unit)
        message = self.engine.act(action)
        if message is not None:
            self.collectives.queue(action, message)

    def _segment(self, position: int, is_last: bool, is_again: bool) -> None:
        segment, place = self.step.segments[position], self.step.places[position]
        enters, leaves = self.step.edges[position]
        begins, ends = self.step.call_edges[position]
        passing = PASSES.get(segment.phase, "")
        if passing == "backward" and segment.unit is None:
            passing = self.passing if self.passing == "backward" else ""  # the loss, outside the model
        if passing != self.passing:
            self._turn(position, passing, is_last)
        if enters:
            if segment.phase == "optimizer" and self.engine_time.is_known:
                self._meet(1)
                self.lanes.compute("optimizer step's pieces", self.engine_time.pieces_s())
            self._actions(POINTS[segment.phase][0], position, is_last)
        elif begins:
            self.moved.play_all(self.schedule.at(POINTS[segment.phase][0], segment.unit or ""), segment)
        self._lend(lent_before(self.schedule, segment), position, is_last)
        self.engine.enter(segment, is_again=is_again)
        self._tell_states()
        view = self.engine.view(segment)
        if self.activations.runs_again(position):
            self._run_again(position, view)
        self._highest(place, position, view)
        if parts_s := self.activations.parted.seconds(position):
            self.lanes.compute(f"recomputation of parts of {segment.unit}", parts_s)
        share = self.engine.updates.late_time() if segment.phase == "optimizer" else 1.0
        self.lanes.compute(place, segment.duration_s * share + self.activations.rounding_s(position))
        self.engine.leave(segment)
        self._lend(lent_after(self.schedule, segment), position, is_last)
        if self.watcher is not None:
            share = float(self._temporaries_share(position, view))
            self.watcher.segment(position, self.engine.tensors(), share)
        if leaves:
            if segment.phase == "backward" and self.engine_time.is_known:
                name = segment.unit or ""
                self.lanes.compute(f"engine at the backward of {name}", self.engine_time.gradients_s(name))
            self._actions(POINTS[segment.phase][1], position, is_last)
        elif ends:
            self.moved.play_all(self.schedule.at(POINTS[segment.phase][1], segment.unit or ""), segment)

    def _lend(self, lent: Iterator[tuple[Point, Action]], position: int, is_last: bool) -> None:
        """Units of which the segment calls modules; FSDP2 does not know of such calls."""
        for point, action in () if isinstance(self.engine, Fsdp2Memory) else lent:
            here = _Here(point, position, position + (point in AFTER), "passing_gradients", is_last)
            (self._page if self.pages.plays(action) else self._play_here)(action, here)

    def _meet(self, stage: int) -> None:
        """All ranks meet if a unit is of this stage or a higher one."""
        if seconds := self.engine_time.meeting_s(stage):
            self.lanes.meet(seconds)

    def _run_again(self, position: int, view: View) -> None:
        """The stretches that are run again before this backward."""
        number = self.step.segments[position].pass_number
        self.moments.add_second_runs(position, view, self.engine.held())
        for stretch, _ in self.activations.recomputations(position):
            self.lanes.compute(second_run_of(stretch), self.activations.again_s(stretch, number))
            if self.watcher is not None:
                self.watcher.recomputation(position)

    def _highest(self, place: str, position: int, view: View) -> None:
        """The segment's own highest instant; an optimizer's temporaries shrink with what it updates."""
        share = self._temporaries_share(position, view)
        if share != 1:
            grown = self._growth(position, view, share)
            self._moment(place, position, position, view, grown)
            return
        self.moments.add_peak(place, position, view, self.engine.held())

    def _temporaries_share(self, position: int, view: View) -> float | Fraction:
        is_as_captured = self.engine.replays and not self.updated_alone
        if self.step.segments[position].phase != "optimizer" or is_as_captured:
            return 1.0
        grown_bytes = sum(self._growth(position, view, 1.0).values())
        return self.engine.updates.late_temporaries(grown_bytes, position)

    def _growth(self, position: int, view: View, share: float | Fraction) -> Bytes:
        """What a segment reaches above its start, times `share`."""
        start, peak = self.activations.start(position, view), self.activations.peak(position, view)
        return {c: math.ceil((peak.get(c, 0) - start.get(c, 0)) * share) for c in {**peak, **start}}

    def _tell_states(self, beside: Bytes = NOTHING) -> None:
        if self.watcher is not None:
            self.watcher.states(self.engine.tensors(), beside)

    def _tell_place(self, words: str) -> None:
        if self.watcher is not None:
            self.watcher.place(words)

    def _actions(self, point: Point, position: int, is_last: bool) -> None:
        """Play what the schedule asks for at one boundary of a segment."""
        segment = self.step.segments[position]
        unit = segment.unit or "" if segment.phase != "optimizer" else ""
        is_over = point in AFTER and position + 1 < len(self.step.segments)
        self._act(point, unit, position, position + is_over, is_last)

    def _turn(self, position: int, passing: str, is_last: bool) -> None:
        """With a segment the model's forward, or a backward, begins or ends."""
        if self.passing == "backward":
            self._end_backward(position, is_last)
        elif self.passing == "forward":
            self._act(Point.FORWARD_ENDS, "", position, position, is_last)
            if isinstance(self.engine, EngineMemory):
                self.engine.end_forward(self.collectives.arriving)
        self.passing = passing
        if passing:
            if passing == "forward":
                self._meet(3)
                self._meet(2)
            point = Point.FORWARD_BEGINS if passing == "forward" else Point.BACKWARD_BEGINS
            self._act(point, "", position, position, is_last)

    def _act(self, point: Point, unit: str, position: int, following: int, is_last: bool) -> None:
        """Play the actions of a boundary; `following` is the segment that begins when they are over."""
        segment = self.step.segments[position]
        self.engine.turn(point)
        actions = self.schedule.at(point, unit)
        if not actions:
            return
        view: View = "captured" if self.engine.replays else "passing_gradients"
        here = _Here(point, position, following, view, is_last)
        for action in actions:
            if point in POINTS["optimizer"] and action.kind is ActionKind.GATHER and action.overlaps:
                if isinstance(self.engine, EngineMemory) and self.engine.stages[action.unit] == 3:
                    self.engine.act(action)  # what it fills is there from now on
                continue  # it falls into the next step, as that of the step before did into this one
            if point is Point.BEFORE_OPTIMIZER and action.unit in self.paged:
                self._update_paged(action, here)
            elif point is Point.BEFORE_OPTIMIZER and action.unit in self.updated_alone:
                self._update_alone(action, here)
            elif action.kind in TRANSFERS:
                self.moved.play(action, segment)
            elif self.pages.plays(action):
                self._page(action, here)
            else:
                self._play_here(action, here)
        if point is Point.BEFORE_OPTIMIZER:
            self.paged.end()

    def _update_paged(self, action: Action, here: _Here) -> None:
        """One of the actions on a unit whose state is fetched for its update."""
        self._tell_place(self.step.places[here.position])
        self.paged.play(action)
        self.engine.act(action)
        scratch = {"temporary": self.engine.coding_bytes(action.unit)}
        self._tell_states(scratch)
        if self.watcher is not None and action.kind is ActionKind.UPDATE:
            self.watcher.update(action.unit, float(self.engine.updates.temporaries((action.unit,))))
        if scratch["temporary"]:
            self._moment_here(self.step.places[here.position], here, scratch)

    def _update_alone(self, action: Action, here: _Here) -> None:
        """A unit's part of the optimizer step, by itself."""
        self._tell_place(self.step.places[here.position])
        self.lanes.compute(f"update of {action.unit}", self._alone_s(action.unit))
        self.engine.act(action)
        if self.watcher is not None:
            self.watcher.update(action.unit, float(self.engine.updates.temporaries((action.unit,))))

    def _page(self, action: Action, here: _Here) -> None:
        """A gather or a reduction of what lies on another tier."""
        place = place_at(action)
        self._tell_place(place)
        message = self.pages.play(action)
        self._tell_states(NOTHING if message is None else message.beside)
        if message is not None and message.staging:
            self._moment_here(place, here, message.staging)

    def _play_here(self, action: Action, here: _Here) -> None:
        """Any other action."""
        kind = action.kind
        if isinstance(self.engine, Fsdp2Memory) and self.engine.holds_back(
            action, here.point, is_last=here.is_last
        ):
            return
        if kind is ActionKind.GATHER:
            self.collectives.wait_for_gathered(action)
        elif kind is ActionKind.REDUCE:
            self._wait_for_reduction(action)
            segment = self.step.segments[here.position]
            if self.collectives.leaves_out(action, segment.micro_batch, is_last=here.is_last):
                return
        elif kind is ActionKind.UPDATE and here.point is Point.AFTER_BACKWARD:
            if here.is_last:
                self.updates_due.append(action.unit)
                self._update_reduced(here)
            return
        self._tell_place(place_at(action))
        if self.watcher is not None and isinstance(self.engine, Fsdp2Memory):
            for tensors in self.engine.passes(action):
                self.watcher.states(tensors)
        message = self.engine.act(action)
        held = self._held_by_autograd(here) if kind is ActionKind.REDUCE and action.shard else NOTHING
        self._tell_states(NOTHING if message is None else added(message.beside, held))
        if message is not None and self.times is not None:
            self._moment_here(place_at(action), here, added(message.staging, held))
            self.collectives.queue(action, message)

    def _held_by_autograd(self, here: _Here) -> Bytes:
        """What is there while actions run from inside of the addition of a unit's last gradient."""
        if here.point is not Point.AFTER_BACKWARD or not isinstance(self.engine, EngineMemory):
            return NOTHING
        return {"gradient": self.engine.held_by_autograd(self.step.segments[here.position])}

    def _wait_for_reduction(self, action: Action) -> None:
        """A reduction to shards is waited for by a later one."""
        if action.ranks is not Ranks.ACROSS and self.engine.must_end_scattering:
            self.collectives.wait_for_reduction_of(self.engine.end_scattering())
            self._tell_states()

    def _update_reduced(self, here: _Here) -> None:
        """Update the units that are due and whose reduction is over; their gradients are free then."""
        due = [name for name in self.updates_due if not self.engine.is_reducing(name)]
        for name in due:
            self.updates_due.remove(name)
            place = f"update of {name}"
            held = self._held_by_autograd(here)
            self._moment_here(place, here, added(self._update_temporaries(name), held))
            self.lanes.compute(place, self._update_s((name,)))
            self._tell_place(place)
            if self.watcher is not None:
                self.watcher.update(name, float(self.engine.updates.temporaries((name,))), held)
            self.engine.spend(name)
            self._tell_states()

    def _alone_s(self, unit: str) -> float:
        """A unit's update by itself; "": what else the optimizer step does."""
        if not unit:
            return self.optimizer_s * self.engine.updates.late_time()
        return self._update_s((unit,)) + UNIT_UPDATE_S["cpu" if self.step.device == "cpu" else "cuda"]

    def _update_s(self, names: tuple[str, ...]) -> float:
        return self.optimizer_s * self.engine.updates.time(names)

    def _update_temporaries(self, name: str) -> Bytes:
        """What an optimizer allocates beside its state to update one unit."""
        most: Bytes = {}
        for position in self.step.optimizer_at:
            view = self.engine.view(self.step.segments[position])
            share = self.engine.updates.temporaries((name,), position)
            most = max(most, self._growth(position, view, share), key=lambda found: sum(found.values()))
        return most

    def _end_backward(self, following: int, is_last: bool) -> None:
        """The end of a backward waits for all reductions, and drops what was gathered and not asked for."""
        self._act(Point.BACKWARD_ENDS, "", following, following, is_last)
        self.collectives.wait_for_reductions()
        self.pages.end_backward()
        while self.engine.end_scattering() is not None:
            pass
        if self.updates_due:
            self._tell_states()
            end = _Here(Point.BACKWARD_ENDS, following, following, "passing_gradients", is_last)
            self._update_reduced(end)
        self.engine.drop(self.collectives.arriving)
        self.collectives.arriving.clear()
        self._tell_states()

    def _moment_here(self, place: str, here: _Here, beside: Bytes) -> None:
        self._moment(place, here.position, here.following, here.view, beside)

    def _moment(self, place: str, segment: int, at: int, view: View, beside: Bytes) -> None:
        """What is there when segment `at` begins, and `beside`."""
        self.moments.add(place, segment, at, view, beside, self.engine.held())
