"""Parts of units in place of whole ones: against all choices, applied and measured."""

import math
import random
from dataclasses import replace
from itertools import product

import pytest
import torch

import memadvisor
from memadvisor.analyzers import unit_parts
from memadvisor.analyzers.segments import captured_step
from memadvisor.cost import activation_changes, activations
from memadvisor.cost.allocation_sequence import planned_sequence
from memadvisor.cost.allocator_settings import AllocatorSettings
from memadvisor.cost.simulate import simulate
from memadvisor.planning import advise as advising
from memadvisor.planning.advise import advise
from memadvisor.planning.machine import machine_for
from memadvisor.planning.sparing import SparingSearch
from memadvisor.planning.stretches import Nested, nested_with
from memadvisor.planning.way import Way
from memadvisor.write_schedule import write_schedule
from tests.cost.test_allocation_sequence import exact_peak
from tests.engines.trainings import make_plan
from tests.planning.test_parts import KINDS, peak_of, recorded
from tests.steady_times import steady_times

SHARES = (0.95, 0.85, 0.7, 0.6)
MOST = 1000  # choices; of more, so many by chance


@pytest.fixture(scope="module", params=sorted(KINDS))
def plain(request, tmp_path_factory):
    return request.param, *recorded(tmp_path_factory.mktemp("plain") / "run", request.param)


@pytest.fixture(autouse=True)
def _times_are_of_bytes_and_flops(monkeypatch):
    steady_times(monkeypatch)


class Plays:
    """Of one step, what each choice gives."""

    def __init__(self, run):
        self.step = captured_step(run)
        self._known = {}

    def __call__(self, nested):
        if nested not in self._known:
            self._known[nested] = simulate(self.step, self.schedule(nested), None)
        return self._known[nested]

    def schedule(self, nested):
        units = Way(0, False, False, 0).arranged(self.step, nested, "device").units
        return write_schedule(make_plan(1, policy="chosen", units=units), self.step.units)

    def some(self):
        """Every choice of nothing, whole units and offered parts, or many by chance."""
        step = self.step
        parts = {
            u: [o.modules for o in found.sparing] for (u, number), found in step.parted.items() if not number
        }
        ways = {unit: [None, "whole", *parts.get(unit, ())] for unit in step.recomputable}
        chance = random.Random(0)
        is_few = math.prod(map(len, ways.values())) <= MOST
        by_chance = ([chance.choice(own) for own in ways.values()] for _ in range(MOST))
        for chosen in product(*ways.values()) if is_few else by_chance:
            taken = dict(zip(ways, chosen, strict=True))
            whole = frozenset(unit for unit, way in taken.items() if way == "whole")
            yield nested_with(
                whole, (), {}, parts={u: way for u, way in taken.items() if way not in (None, "whole")}
            )


def test_offered_parts_free_more_and_take_longer_each(plain):
    _, run, _ = plain
    step = captured_step(run)
    cost = step.second_run_cost
    assert any(options.sparing for options in step.parted.values())
    for (unit, _), options in step.parted.items():
        freed = [sum(part.size_bytes for part in one.parts) for one in options.sparing]
        seconds = [sum(part.run.seconds(cost) for part in one.parts) for one in options.sparing]
        assert freed == sorted(set(freed))
        assert seconds == sorted(set(seconds))
        names = [name for one in options.sparing for part in one.modules for name in part]
        assert all(name.startswith(f"{unit}.") for name in names)


def test_the_choice_is_as_fast_as_the_best_of_many(plain):
    _, run, _ = plain
    plays = Plays(run)
    known = [plays(nested) for nested in plays.some()]
    most = plays(Nested(frozenset(), ())).peak_bytes
    least = min(played.peak_bytes for played in known)
    search = SparingSearch(plays.step, plays)
    plain_s = plays(Nested(frozenset(), ())).step_time_s
    for share in SHARES:
        budget_bytes = int(least + share * (most - least))
        found = search.fastest(budget_bytes)
        best_s = min(played.step_time_s for played in known if played.peak_bytes <= budget_bytes)
        assert plays(found).peak_bytes <= budget_bytes
        assert plays(found).step_time_s - plain_s <= 1.1 * (best_s - plain_s)
    assert search.fastest(1) is None


def with_parts(plans):
    """The first that has parts."""
    return next(each for each in plans if each.plan.parted_units)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_whole_units_would_take_longer_for_is_advised_in_parts_and_measured(kind, tmp_path):
    run, losses = recorded(tmp_path / "plain", kind)
    budgets = (int(share * peak_of(run)) for share in (0.9, 0.8, 0.7))
    ranked = with_parts(advise(run, memory_bytes=budget_bytes).plans[0] for budget_bytes in budgets)
    ours, losses_ours = recorded(tmp_path / "run", kind, ranked.plan)

    assert ranked.fits and not ranked.changes_script
    assert losses_ours == losses
    # As in test_parts.py.
    assert 0 <= ranked.prediction.peak_bytes - peak_of(ours) <= (1200 if kind == "convolutions" else 0)


def test_an_allocator_is_asked_for_what_the_simulator_says(plain, monkeypatch):
    """Of hundreds of choices, to the byte, but for the states of random number generators, and copies of buffers that whole
    units change: these are of the host where there is an allocator whose reservation counts."""
    kind, run, _ = plain
    for module in (unit_parts, activations, activation_changes):
        monkeypatch.setattr(module, "RNG_STATE_BYTES", 0)
    plays = Plays(run)
    for nested in list(plays.some())[::11]:
        changes = planned_sequence(plays.step, plays.schedule(nested), None)
        assert exact_peak(changes) == pytest.approx(
            plays(nested).peak_bytes, rel=4e-4 if kind == "convolutions" else 0
        )


def test_where_a_reservation_counts_parts_are_advised_too(tmp_path, monkeypatch):
    def on_a_gpu(*args):
        return replace(machine_for(*args), settings=AllocatorSettings())

    monkeypatch.setattr(advising, "machine_for", on_a_gpu)
    run, _ = recorded(tmp_path / "plain", "gpt")
    budget_bytes = int(0.85 * peak_of(run))
    plans = advise(run, memory_bytes=budget_bytes).plans
    ranked = with_parts(plans)

    assert ranked.fits and ranked.prediction.peak_bytes <= ranked.prediction.reserved_bytes <= budget_bytes
    whole = [each for each in plans if each.fits and not each.plan.parted_units and not each.changes_script]
    assert all(ranked.prediction.step_time_s < each.prediction.step_time_s for each in whole)


def test_where_reservations_of_whole_units_do_not_fit_parts_of_them_do(tmp_path, monkeypatch):
    """In segments that grow, by 2 MiB, little more is reserved than is held."""
    make, _ = KINDS["gpt"]
    monkeypatch.setitem(KINDS, "gpt", (make, lambda: torch.randint(0, 16, (64, 64))))
    run, _ = recorded(tmp_path / "run", "gpt")
    settings = AllocatorSettings(expandable_segments=True)

    def on_a_gpu(*args):
        return replace(machine_for(*args), settings=settings)

    def plans(budget_bytes):
        found = advise(run, memory_bytes=budget_bytes).plans
        return [each for each in found if not each.changes_script]

    monkeypatch.setattr(advising, "machine_for", on_a_gpu)
    whole = next(each for each in plans(1) if not each.plan.parted_units)
    budget_bytes = whole.prediction.reserved_bytes - 1
    fitting = [each for each in plans(budget_bytes) if each.fits]

    assert fitting and all(each.plan.parted_units and each.plan.recomputed_units for each in fitting)
    assert all(each.prediction.reserved_bytes <= budget_bytes for each in fitting)


def test_without_parts_to_choose_from_there_is_nothing_to_find(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with memadvisor.profile(tmp_path / "run", trace_step=1):
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    plays = Plays(memadvisor.load(tmp_path / "run"))
    assert SparingSearch(plays.step, plays).fastest(10**12) is None
