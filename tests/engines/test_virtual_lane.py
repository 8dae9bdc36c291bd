"""Whatever moment a lane does its work at, the executor computes the same; where it forgets to wait, that is seen."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from memadvisor.engines.sharding import arrivals
from memadvisor.engines.sharding import gathers as gathers_module
from memadvisor.engines.sharding.early_updates import EarlyUpdates
from memadvisor.engines.sharding.executor import Executor
from memadvisor.engines.sharding.gathers import Gathers
from memadvisor.engines.sharding.scatterings import Scatterings
from memadvisor.write_schedule import write_schedule
from tests.engines.virtual_lane import OrderError, World
from tests.engines.virtual_ranks import ROWS, AloneWire, Case, draw_case, train_alone

NUM_PLANS, NUM_ORDERS = 250, 4


@pytest.fixture(autouse=True)
def nothing_was_compiled(monkeypatch):
    """By a test before, in this process: no gather would be late then."""
    monkeypatch.setattr(arrivals, "has_compiled", lambda: False)


class AtOnce:
    """A lane without any freedom: work is done where it is submitted."""

    def submit(self, work, *, after=(), reads=(), writes=()):
        with torch.no_grad():
            self.result = work()
        return _Done(self.result)

    def run(self, work, *, reads=(), writes=()):
        return self.submit(work).wait()

    def adopt(self, works, *, reads=(), writes=(), result=None):
        return self.submit(lambda: ([work.wait() for work in works], result)[1])

    def close(self):
        pass


class _Done:
    def __init__(self, result):
        self.wait = lambda: result


@lru_cache
def expected(case: Case):
    return train_alone(case, AtOnce())


def play(case: Case, seed: int, eagerness: float) -> World:
    world = World(seed, eagerness)
    with world.watched():
        found = train_alone(case, world.lane())
    assert all(map(torch.equal, found, expected(case)))
    return world


def test_a_thousand_random_schedules_are_free_of_races():
    """Random stages for each unit, ranks, micro-batches and evaluations; work as late as may be, or at random."""
    num_early = num_late = 0
    assert sum(draw_case(number).plan.update_in_backward for number in range(NUM_PLANS)) > 60
    for number in range(NUM_PLANS):
        case = draw_case(number)
        for order in range(NUM_ORDERS):
            world = play(case, order, eagerness=(0.0, 0.05, 0.2, 0.5)[order % 4])
            num_early += world.num_early
            num_late += world.num_late
    assert num_early > 1000 and num_late > 1000


OVERLAPPED = next(
    case
    for case in map(draw_case, range(1000))
    if case.plan.overlap
    and case.loose_bytes is None
    and case.plan.gather_depth
    and {unit.zero_stage for unit in case.plan.units} == {3}
    and len(case.synced) == 2
)
MIXED = next(
    case
    for case in map(draw_case, range(1000))
    if case.plan.overlap
    and {unit.zero_stage for unit in case.plan.units} == {0, 1, 2, 3}
    and case.plan.units[0].zero_stage == 1
    and len(case.synced)
    == 1  # so that unit is reduced last, and no later wait makes up for one that is left out
)
LATE = next(
    case
    for case in map(draw_case, range(1000))
    if case.plan.overlap and {unit.zero_stage for unit in case.plan.units} == {1, 2}
)


EARLY = next(
    case
    for case in map(draw_case, range(1000))
    if case.plan.overlap
    and case.loose_bytes is None
    and case.plan.update_in_backward
    and {unit.zero_stage for unit in case.plan.units} == {3}
)


LOOSE = next(
    case
    for case in map(draw_case, range(1000))
    if case.plan.overlap
    and case.loose_bytes == 1
    and case.plan.compression.reduce_bits is None
    and {unit.zero_stage for unit in case.plan.units} == {2, 3}
)


BEHIND_UPDATES = next(
    case
    for case in map(draw_case, range(1000))
    if case.plan.overlap
    and case.plan.update_by_unit
    and {unit.zero_stage for unit in case.plan.units} == {1, 2}
)


OF_STAGE_3_BEHIND_UPDATES = next(
    case
    for case in map(draw_case, range(3000))
    if case.plan.gather_depth > 1
    and case.steps_again
    and not case.evaluates
    and case.plan.precision.param_dtype is None
    and {unit.zero_stage for unit in case.plan.units} == {3}
    and write_schedule(case.plan, ROWS).gathered_behind_updates
)


def _gather_before_the_update(monkeypatch):
    original = Executor.step_begins

    def step_begins(self):
        original(self)
        for flat in self.flats:
            if flat.unit in self.sharded.schedule.gathered_behind_updates and flat.shard is not None:
                self.updated(flat)

    monkeypatch.setattr(Executor, "step_begins", step_begins)


def _update_what_is_being_sent(monkeypatch):
    monkeypatch.setattr(Gathers, "wait_for_sent", lambda self: None)


def _show_before_it_is_there(monkeypatch):
    original = Gathers.gather

    def gather(self, flat, collective=None):
        flat.arriving = None if flat.arriving is None else _Done(None)
        original(self, flat, collective)

    monkeypatch.setattr(Gathers, "gather", gather)


def _release_what_is_arriving(monkeypatch):
    def drop(self):
        for flat in self.sharded.flats:
            self.begin(flat)  # ahead, of a unit that the model then does not come to
            if flat.arriving is not None:
                flat.arriving = None
                flat.full.untyped_storage().resize_(0)

    monkeypatch.setattr(Gathers, "drop_begun", drop)


def _use_what_is_arriving(monkeypatch):
    original = arrivals.settle

    def settle(flat):
        flat.arriving = None if flat.arriving is None else _Done(None)
        original(flat)

    monkeypatch.setattr(arrivals, "settle", settle)
    monkeypatch.setattr(gathers_module, "settle", settle)


def _keep_a_sum_that_is_not_over(monkeypatch):
    original = Scatterings._end_oldest

    def end(self):
        for flat in next(iter(self._under_way.values())):
            flat.scattering = _Done(flat.own_slice(flat.grad))
        original(self)

    monkeypatch.setattr(Scatterings, "_end_oldest", end)


def _change_a_gradient_that_is_being_sent(monkeypatch):
    original = Scatterings.begin

    def begin(self, flat, action):
        original(self, flat, action)
        for gradient in flat.loose.tensors():
            gradient.mul_(0.5)

    monkeypatch.setattr(Scatterings, "begin", begin)


def _update_by_a_sum_that_is_not_over(monkeypatch):
    def update_reduced(self):
        for unit in self._due:
            for flat in unit.trainable:
                flat.grad_shard = flat.own_slice(flat.grad) if flat.grad is not None else flat.grad_shard
            self._update(unit)
        self._due.clear()

    monkeypatch.setattr(EarlyUpdates, "update_reduced", update_reduced)


def _leave_all_reduces_unwaited(monkeypatch):
    original = AloneWire.begin_mean

    def begin_mean(self, tensor, unit=""):
        original(self, tensor, unit)
        return _Done(None)

    monkeypatch.setattr(AloneWire, "begin_mean", begin_mean)


def _reuse_staging_before_the_wait(monkeypatch):
    stage, begin, staged = AloneWire._stage, AloneWire.begin_reduce_scatter, []

    def begin_reduce_scatter(self, *args):
        ticket = begin(self, *args)
        staged.pop().zero_()  # as if compute had been given the same memory
        return ticket

    monkeypatch.setattr(
        AloneWire, "_stage", lambda self, pieces: (staged.append(stage(self, pieces)), staged[-1])[1]
    )
    monkeypatch.setattr(AloneWire, "begin_reduce_scatter", begin_reduce_scatter)


def _forget_to_declare(monkeypatch):
    original, shared = AloneWire._reduce, torch.zeros(1000)

    def reduce(self, pieces, staging, *others):
        return original(self, pieces, shared[: staging.numel()], *others)

    monkeypatch.setattr(AloneWire, "_reduce", reduce)


BUGS = {
    _show_before_it_is_there: (OVERLAPPED, "read while it is written"),
    _release_what_is_arriving: (OVERLAPPED, "written while it is written.*resize_"),
    _use_what_is_arriving: (LATE, "read while it is written"),
    _gather_before_the_update: (BEHIND_UPDATES, "written while it is written"),
    _update_what_is_being_sent: (OF_STAGE_3_BEHIND_UPDATES, "written while it is read"),
    _change_a_gradient_that_is_being_sent: (LOOSE, "written while it is written"),
    _keep_a_sum_that_is_not_over: (OVERLAPPED, "read while it is written"),
    _update_by_a_sum_that_is_not_over: (EARLY, "read while it is written"),
    _leave_all_reduces_unwaited: (MIXED, "read while it is written"),
    _reuse_staging_before_the_wait: (OVERLAPPED, "written while it is written"),
    _forget_to_declare: (OVERLAPPED, "did not declare"),
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__.strip("_"))
def test_a_planted_bug_is_caught_whatever_the_moment(bug, monkeypatch):
    case, what = BUGS[bug]
    bug(monkeypatch)
    for seed, eagerness in enumerate((0.0, 0.3, 0.9)):
        with pytest.raises(OrderError, match=what), World(seed, eagerness).watched() as world:
            train_alone(case, world.lane())


def test_work_on_two_lanes_needs_an_after():
    buffer, read = torch.zeros(3), torch.zeros(3)
    for after_it in (True, False):
        world = World(0, 0.0)
        first, second = world.lane("gathers"), world.lane("reductions")
        with world.watched():
            ticket = first.submit(lambda: buffer.fill_(2.0), writes=(buffer,))
            options = {"after": (ticket,)} if after_it else {}
            if after_it:
                second.submit(lambda: read.copy_(buffer), reads=(buffer,), writes=(read,), **options).wait()
                assert read.tolist() == [2.0] * 3
            else:
                with pytest.raises(OrderError, match="work on gathers, work on reductions"):
                    second.submit(lambda: read.copy_(buffer), reads=(buffer,), writes=(read,))


def test_a_wait_orders_what_comes_after_it_alone():
    buffer = torch.ones(3)
    world = World(0, 0.0)
    lane = world.lane()
    with world.watched():
        earlier = lane.submit(lambda: buffer.sum(), reads=(buffer,))
        later = lane.submit(lambda: buffer.mul_(2.0), reads=(buffer,), writes=(buffer,))
        assert earlier.wait() == 3.0
        with pytest.raises(OrderError):
            buffer.add_(1.0)
        later.wait()
        assert (buffer + 1.0).tolist() == [3.0] * 3
