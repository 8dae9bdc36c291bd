"""Learning from runs of plans: never worse on those runs, near what was predicted where they are few."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.cost.collectives import CollectiveTimes
from memadvisor.cost.components import COMPONENTS
from memadvisor.errors import UsageError
from memadvisor.plan import Plan, Prediction, UnitPlan, fingerprint
from memadvisor.planning.advise import advise
from memadvisor.planning.learn import Lesson, fit, learn
from tests.make_run import make_run

TIMES = CollectiveTimes(kind="fitted", source="a test", curves={}, alpha_s=1e-4, beta_bytes_per_s=1e9)
PLAIN = make_run()
SECONDS = st.floats(1e-3, 10.0)


def lesson(step_time_s, parts_s=None, **components_s):
    return Lesson(components_s=components_s, step_time_s=step_time_s, parts_s=parts_s or {})


def planned(run=PLAIN, **changes):
    """A run that has followed a plan for it."""
    predicted = Prediction(
        peak_bytes=1, step_time_s=1.0, by_category_bytes={}, exposed_communication_s=0.0, peak_position=""
    )
    plan = Plan(
        fingerprint=fingerprint((p.name, p.shape, p.dtype) for p in PLAIN.ranks[0].parameters),
        num_ranks=2,
        zero_stage=1,
        units=tuple(UnitPlan(name=u.name, zero_stage=1, recompute=False) for u in PLAIN.ranks[0].units),
        prediction=predicted,
    )
    return dataclasses.replace(run, plan=dataclasses.replace(plan, **changes))


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from(COMPONENTS), SECONDS, min_size=1),
            SECONDS,
            st.dictionaries(st.sampled_from(("optimizer", "recomputation")), SECONDS),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_what_is_learnt_never_makes_the_runs_learnt_from_worse(rows):
    found = fit([Lesson(components_s=c, step_time_s=t, parts_s=p) for c, t, p in rows])

    assert found.error_after <= found.error_before + 1e-9
    assert all(0.25 <= factor <= 4 for factor in found.factors.values())


def test_one_run_moves_a_factor_part_of_the_way_and_many_all_of_it():
    """A tenth of the step is the optimizer's, which takes twice as long as predicted."""
    one = lesson(1.1, {"optimizer": 0.2}, compute=0.9, optimizer=0.1)
    factors = [fit([one] * number).factors["optimizer"] for number in (1, 10, 1000)]

    assert 1 < factors[0] < factors[1] < factors[2]
    assert factors[2] == pytest.approx(2, rel=0.01)


def test_what_no_run_did_is_not_learnt():
    assert set(fit([lesson(2.0, compute=1.0, recomputation=0.0)]).factors) == {"compute"}


def test_runs_teach_plans_of_the_same_model_and_batch():
    """The plan runs in the time of the plain run's steps, which is more than its own parts would take."""
    found = learn(PLAIN, [planned()], TIMES, None)
    assert found.num_runs == 1 and found.error_after <= found.error_before

    taught = advise(PLAIN, memory_bytes=2**40, learn_from=[planned()])
    factors = taught.learnt.factors
    for ranked in taught.plans:
        assert ranked.prediction.step_time_s == pytest.approx(sum(ranked.prediction.components_s.values()))
    plain = {
        r.plan.zero_stage: r.prediction
        for r in advise(PLAIN, memory_bytes=2**40).plans
        if not r.changes_script
    }
    same = next(r for r in taught.plans if r.plan.zero_stage == 0 and not r.changes_script).prediction
    assert same.components_s["compute"] == pytest.approx(
        plain[0].components_s["compute"] * factors["compute"]
    )


@pytest.mark.parametrize(
    ("run", "word"),
    [
        (PLAIN, "followed no plan"),
        (planned(fingerprint="another"), "another model"),
        (planned(make_run(num_ranks=1)), "is of 1 rank, "),
        (planned(micro_batch_size=3), "no parts"),
        (planned(grad_accum=7), "no parts"),
    ],
)
def test_a_run_that_teaches_nothing_is_refused_in_one_line(run, word):
    with pytest.raises(UsageError, match=word) as caught:
        learn(PLAIN, [run], TIMES, None)
    assert "\n" not in caught.value.one_line()


def test_a_run_of_another_machine_is_refused():
    run = planned()
    ranks = tuple(
        dataclasses.replace(rank, process=dataclasses.replace(rank.process, host="elsewhere"))
        for rank in run.ranks
    )
    with pytest.raises(UsageError, match="another machine"):
        learn(PLAIN, [dataclasses.replace(run, ranks=ranks)], TIMES, None)


def test_nothing_is_learnt_from_a_warm_up_step():
    """Its first steps make allocators, caches and optimizer state: no plan's doing."""
    run = planned(make_run(num_steps=2, traced_step=None))

    with pytest.raises(UsageError, match="its time is of step 1, a warm-up step, and no step was steady"):
        learn(PLAIN, [run], TIMES, None)


def test_times_that_rest_on_a_warm_up_step_are_said_to():
    notes = [
        " ".join(advise(run, memory_bytes=2**30).notes)
        for run in (make_run(num_ranks=1, num_steps=3, traced_step=2), make_run(num_ranks=1))
    ]

    assert "All step times rest on that of step 1, a warm-up step" in notes[0]
    assert "rest on that of" not in notes[1]
