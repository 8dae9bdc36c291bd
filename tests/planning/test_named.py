"""Policies by name: the plans that hand-made ones are, and DTR's order of eviction."""

import re
from dataclasses import replace

import pytest

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.errors import UsageError
from memadvisor.hardware.hardware import TierBandwidth
from memadvisor.planning.advise import advise
from memadvisor.planning.named import _scores
from memadvisor.policies import resolve_units
from memadvisor.write_schedule import write_schedule
from tests.engines.trainings import make_plan
from tests.make_run import make_run
from tests.planning.test_advise import MEASURED

RUN = make_run(num_ranks=1, num_blocks=6)
STEP = captured_step(RUN)
BLOCKS = [f"blocks.{number}" for number in range(6)]


def named(policy, memory_bytes=2**40, run=RUN):
    return advise(run, memory_bytes=memory_bytes, policy=policy).named


@pytest.mark.parametrize("policy", ["none", "every-layer", "sqrt", "selective"])
def test_a_policy_is_the_plan_made_by_hand(policy):
    """The units, the peak and the time of what `run --policy` does."""
    by_hand = make_plan(1, policy=policy)
    units = resolve_units(by_hand, STEP.units)
    played = simulate(STEP, write_schedule(by_hand, STEP.units), None)
    found = named(policy)

    assert [unit.recompute for unit in found.plan.units] == [unit.recompute for unit in units]
    assert any(unit.kept for unit in found.plan.units) == (policy == "selective")
    assert all(re.fullmatch(r"aten::\w+#\d+", name) for unit in found.plan.units for name in unit.kept)
    assert found.prediction.peak_bytes == played.peak.total_bytes
    assert found.prediction.step_time_s == played.step_time_s
    assert found.fits and found.plan.why


def with_disk(bytes_per_s):
    tier = TierBandwidth(read_bytes_per_s=bytes_per_s, write_bytes_per_s=bytes_per_s)
    return replace(MEASURED, disk=tier)


def test_kwai_is_selective_with_what_it_keeps_elsewhere_where_that_hides():
    """The last block's transfers have only the head's forward and backward to hide under."""
    run = make_run(num_ranks=1, num_blocks=4, sequence=64)
    kwai = advise(run, memory_bytes=2**40, hardware=with_disk(1e8), policy="kwai").named
    selective = advise(run, memory_bytes=2**40, policy="selective").named

    assert [(u.recompute, u.kept) for u in kwai.plan.units] == [
        (u.recompute, u.kept) for u in selective.plan.units
    ]
    away = [unit.name for unit in kwai.plan.units if unit.activation_tier == "disk"]
    assert away == ["blocks.0", "blocks.1", "blocks.2"] and set(away) < set(kwai.plan.recomputed_units)
    assert kwai.prediction.peak_bytes < selective.prediction.peak_bytes
    assert kwai.prediction.step_time_s == pytest.approx(selective.prediction.step_time_s)
    with pytest.raises(UsageError, match="kwai would move nothing"):
        advise(run, memory_bytes=2**40, hardware=with_disk(1e5), policy="kwai")


def test_the_best_plan_is_no_slower_than_any_policy():
    for policy in ("none", "every-layer", "sqrt", "dtr"):
        budget = named(policy).prediction.peak_bytes
        advice = advise(RUN, memory_bytes=budget, policy=policy)
        assert advice.best.prediction.step_time_s <= advice.named.prediction.step_time_s * (1 + 1e-9)
        assert advice.plans == advise(RUN, memory_bytes=budget).plans


def _peak_without(plan, last):
    units = tuple(replace(unit, recompute=unit.recompute and unit.name != last) for unit in plan.units)
    schedule = write_schedule(replace(plan, units=units), STEP.units)
    return simulate(STEP, schedule, None).peak.total_bytes


def test_dtr_lets_the_oldest_go_first_where_all_else_is_alike():
    """Least cost a byte and second: units of one kind go in the order in which their forwards ran, and no more than needed."""
    highest, lowest = (named(policy).prediction.peak_bytes for policy in ("none", "every-layer"))
    seen = set()
    for share in (0, 0.1, 0.3, 0.5, 0.7, 0.9):
        budget = int(highest - share * (highest - lowest))
        found = named("dtr", budget)
        evicted = found.plan.recomputed_units
        blocks = [name for name in evicted if name != "embedding"]
        assert blocks == BLOCKS[: len(blocks)] and found.prediction.peak_bytes <= budget
        if evicted:  # without the one that went last it does not fit
            without = [_peak_without(found.plan, last) for last in ("embedding", *blocks[-1:])]
            assert max(without) > budget
        seen.add(len(evicted))
    assert len(seen) > 2


def test_dtr_spares_what_is_dear_for_its_bytes():
    """A unit that takes a thousand times as long is the last to go."""
    step = replace(STEP, recomputable={**STEP.recomputable, "blocks.0": 1e3 * STEP.recomputable["blocks.0"]})
    position = max(place for place, s in enumerate(step.segments) if s.phase == "forward")
    units = resolve_units(make_plan(1), step.units)
    scores = _scores(step, units, frozenset(), position)
    assert max(scores, key=scores.get) == "blocks.0"
    assert scores["blocks.1"] < scores["blocks.2"] < scores["blocks.3"]
    assert "blocks.1" not in _scores(step, units, frozenset({"blocks.1"}), position)


def test_with_several_ranks_it_is_sharded_as_the_first_plan_is():
    run = make_run(num_ranks=2)
    advice = advise(run, memory_bytes=2**40, policy="every-layer")
    first = next(ranked.plan for ranked in advice.plans if not ranked.changes_script)
    assert [u.zero_stage for u in advice.named.plan.units] == [u.zero_stage for u in first.units]
    assert set(advice.named.plan.recomputed_units) == {"blocks.0", "blocks.1", "blocks.2"}


@pytest.mark.parametrize(
    ("policy", "memory_bytes", "words"),
    [
        ("every-layer", 1000, "every-layer needs .*, and the budget is 1000 B"),
        ("dtr", 1000, "dtr needs"),
        ("kawi", 2**40, "no policy 'kawi'"),
        ("kwai", 2**40, "no bandwidth of another tier"),
    ],
)
def test_a_policy_that_cannot_be_had_is_refused(policy, memory_bytes, words):
    with pytest.raises(UsageError, match=words):
        named(policy, memory_bytes)


def test_selective_needs_to_know_what_operators_make():
    unknown = replace(RUN, ranks=(replace(RUN.ranks[0], operators=()),))
    with pytest.raises(UsageError, match="does not tell what keeping outputs"):
        named("selective", run=unknown)
