import dataclasses
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.analyzers.data_waits import data_waits
from memadvisor.analyzers.step_time import step_time
from memadvisor.run.loader_records import DataWait, LoaderInfo
from memadvisor.run.records import Span
from tests.make_run import make_run, step

PLAIN = LoaderInfo(0, 0, None, False, False, 4)
WORKERS = LoaderInfo(1, 4, 2, True, True, None)


def wait(index, wait_s, **changes):
    fields = {
        "step": index,
        "loader": 0,
        "phase": "outside",
        "is_evaluation": False,
        "num_batches": 1,
        "wait_s": wait_s,
        "thread_s": wait_s,
        "num_starts": 0,
        "start_s": 0.0,
    }
    return DataWait(**{**fields, **changes})


def rank_of(waits, num_steps=5, loaders=(PLAIN, WORKERS), traced=(), forward_s=4.0):
    """Steps 2, 3, ... of 10 s each, `forward_s` of them in a forward, the rest outside."""
    indices = range(2, 2 + num_steps)
    steps = [step(index=i, start_s=10.0 * i, end_s=10.0 * i + 10, traced=i in traced) for i in indices]
    spans = [Span(i, "forward", "", 0, 10.0 * i, 10.0 * i + forward_s) for i in indices]
    rank = make_run(num_ranks=1, traced_step=None).ranks[0]
    return dataclasses.replace(
        rank,
        steps=tuple(steps),
        spans=tuple(spans),
        data_loaders=tuple(loaders),
        data_waits=tuple(waits),
    )


def test_a_run_without_a_loader_does_not_say_that_nobody_waited():
    rank = rank_of([], loaders=())

    assert data_waits(rank) is None
    assert step_time(rank).data_wait_s is step_time(rank).data_wait_fraction is None


def test_the_wait_is_a_part_of_outside():
    time = step_time(rank_of([wait(index, 1.5) for index in range(2, 7)]))

    assert (time.by_phase_s["outside"], time.data_wait_s, time.data_wait_fraction) == (6.0, 1.5, 0.15)


def test_a_first_batch_does_not_smear_over_the_steps_and_is_told():
    """Two epochs begin: one step in five waits for long, and the median does not know."""
    waits = [wait(index, 0.5) for index in (2, 3, 5)]
    waits += [wait(4, 5.0, num_starts=1, start_s=5.0), wait(6, 3.0, num_starts=1, start_s=3.0)]
    found = data_waits(rank_of(waits))

    assert step_time(rank_of(waits)).data_wait_s == 0.5
    assert dataclasses.astuple(found.starts) == (2, 4.0, 5.0)


def test_the_end_of_one_loaders_pass_alone_is_no_start():
    """Of a script that reads its loader once, the step around has the time and no pass has begun."""
    waits = [wait(index, 0.5) for index in range(2, 7)]
    waits.append(wait(6, 2.0, num_batches=0, start_s=2.0, loader=1))

    assert data_waits(rank_of(waits)).starts is None


def test_evaluations_wait_for_themselves():
    waits = [wait(index, 0.5) for index in range(2, 7)]
    waits.append(wait(4, 5.0, loader=1, is_evaluation=True, num_batches=12))
    found = data_waits(rank_of(waits))

    assert step_time(rank_of(waits)).data_wait_s == 0.5
    assert dataclasses.astuple(found.evaluation) == (12, 1, 5.0)
    assert [(use.num_workers, use.num_batches, use.num_evaluation_batches) for use in found.loaders] == [
        (0, 5, 0),
        (4, 0, 12),
    ]
    assert len(found.of_training) == 1


def test_where_evaluations_alone_read_loaders_the_trainings_wait_is_not_known():
    """As of a script that takes its training batches from a file that it has mapped."""
    rank = rank_of([wait(4, 5.0, is_evaluation=True)])

    assert step_time(rank).data_wait_s is None
    assert (data_waits(rank).thread_s, data_waits(rank).inside_phases_s) == (None, None)
    assert data_waits(rank).evaluation.time_s == 5.0


def test_what_is_waited_inside_a_phase_is_that_phases():
    """A closure that reads its own batches."""
    waits = [wait(index, 2.0, phase="optimizer") for index in range(2, 7)]
    waits += [wait(index, 0.25) for index in range(2, 7)]
    rank = rank_of(waits)

    assert step_time(rank).data_wait_s == 0.25
    assert data_waits(rank).inside_phases_s == 2.0
    assert data_waits(rank).loaders[0].wait_s == 5 * 2.25


def test_what_a_device_does_not_wait_for_is_the_threads_alone():
    rank = rank_of([wait(index, 0.0, thread_s=3.0) for index in range(2, 7)])

    assert step_time(rank).data_wait_s == 0.0
    assert data_waits(rank).thread_s == 3.0


def test_a_step_that_reads_nothing_does_not_wait():
    """Several steps on one batch, as in PPO: the usual step has the data already."""
    assert step_time(rank_of([wait(2, 4.0)])).data_wait_s == 0.0


def test_the_traced_step_has_no_part_in_it():
    waits = [wait(index, 0.5) for index in range(2, 9)]
    waits[1] = wait(3, 9.0, num_batches=50)
    rank = rank_of(waits, num_steps=7, traced=(3,))

    assert step_time(rank).data_wait_s == 0.5
    assert data_waits(rank).loaders[0].num_batches == 6


def test_steps_of_which_nothing_else_is_recorded_do_not_count_as_without_a_wait():
    """After --max-run-size only steps are written."""
    waits = [wait(index, 0.5) for index in (2, 3)]
    rank = rank_of(waits)
    cut = dataclasses.replace(rank, spans=tuple(span for span in rank.spans if span.step < 4))

    assert step_time(cut).data_wait_s == 0.5
    assert data_waits(cut).thread_s == 0.5


def test_a_longer_wait_than_what_is_outside_is_cut():
    """Two clocks of a device need not agree to the last microsecond."""
    time = step_time(rank_of([wait(index, 6.001) for index in range(2, 7)]))

    assert time.data_wait_s == time.by_phase_s["outside"] == 6.0


waits_of_steps = st.lists(
    st.builds(
        lambda index, wait_s, loader, phase, is_evaluation, num_batches: wait(
            index, wait_s, loader=loader, phase=phase, is_evaluation=is_evaluation, num_batches=num_batches
        ),
        st.integers(0, 9),
        st.floats(0, 1),
        st.integers(0, 1),
        st.sampled_from(["outside", "forward", "backward", "optimizer"]),
        st.booleans(),
        st.integers(0, 3),
    ),
    max_size=30,
)


@given(waits_of_steps)
def test_parts_sum_to_the_whole(waits):
    """Loaders' waits to all of training's, what is in phases and what is not; the median step's to no more than outside."""
    rank = rank_of(waits, num_steps=6)
    time, found = step_time(rank), data_waits(rank)
    timed = [row for row in waits if 2 <= row.step < 8]
    own = [row for row in timed if not row.is_evaluation]

    assert (found is None) == (not waits)
    assert (time.data_wait_s is None) == (not any(row.num_batches for row in own))
    if found is None:
        return
    assert sum(use.wait_s for use in found.loaders) == pytest.approx(sum(row.wait_s for row in own))
    assert sum(use.num_batches + use.num_evaluation_batches for use in found.loaders) == sum(
        row.num_batches for row in timed
    )
    evaluation_s = 0.0 if found.evaluation is None else found.evaluation.time_s
    assert evaluation_s == pytest.approx(sum(row.wait_s for row in timed if row.is_evaluation))
    if time.data_wait_s is not None:
        assert 0 <= time.data_wait_s <= time.by_phase_s["outside"] + 1e-12
        sums_s = [sum(r.wait_s for r in own if r.step == i and r.phase == "outside") for i in range(2, 8)]
        assert time.data_wait_s == pytest.approx(min(median(sums_s), 6.0))
