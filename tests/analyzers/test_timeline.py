import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.analyzers.timeline import memory_timeline
from memadvisor.run.records import CATEGORIES, Residual
from tests.make_run import make_run, step, storage


def rank_of(storages, residuals=(), *, start_s=0.0, end_s=10.0, **traced):
    """A rank whose one traced step lasts from 0 s to 10 s."""
    rank = make_run(num_ranks=1).ranks[0]
    traced_step = step(start_s=start_s, end_s=end_s, traced=True, **traced)
    return dataclasses.replace(
        rank, steps=(traced_step,), storages=tuple(storages), residuals=tuple(residuals), spans=()
    )


def test_bytes_count_from_birth_to_death():
    """Worked out by hand: 100 from 1 s, 130 from 2 s, 30 from 4 s, none from 5 s."""
    timeline = memory_timeline(
        rank_of(
            [
                storage(birth_s=1.0, death_s=4.0, size_bytes=100, category="activation"),
                storage(storage_id=1, birth_s=2.0, death_s=5.0, size_bytes=30, category="temporary"),
            ]
        )
    )

    assert timeline.times_s.tolist() == [0.0, 1.0, 2.0, 4.0, 5.0, 10.0]
    assert timeline.total_bytes.tolist() == [0, 100, 130, 30, 0, 0]
    assert timeline.by_category_bytes["temporary"].tolist() == [0, 0, 30, 30, 0, 0]


def test_times_are_counted_from_the_start_of_the_step():
    timeline = memory_timeline(rank_of([storage(birth_s=103.0)], start_s=100.0, end_s=110.0))

    assert timeline.times_s.tolist() == [0.0, 3.0, 10.0]
    assert timeline.clock_s.tolist() == [100.0, 103.0, 110.0]


def test_what_was_born_before_the_step_is_there_at_its_start():
    timeline = memory_timeline(rank_of([storage(birth_s=-3.0, phase="baseline")]))

    assert timeline.total_bytes.tolist() == [100, 100]


def test_a_death_and_a_birth_at_one_moment_do_not_overlap():
    timeline = memory_timeline(
        rank_of([storage(birth_s=0.0, death_s=5.0), storage(storage_id=1, birth_s=5.0)])
    )

    assert timeline.total_bytes.max() == 100


def test_storages_of_another_device_do_not_count():
    timeline = memory_timeline(rank_of([storage(device="cuda:0"), storage(storage_id=1, size_bytes=7)]))

    assert timeline.total_bytes.tolist() == [7, 7]


def test_a_residual_holds_until_the_next():
    residuals = [Residual(0.0, 10), Residual(4.0, -5), Residual(6.0, 0)]
    timeline = memory_timeline(rank_of([storage()], residuals))

    assert timeline.by_category_bytes["unexplained"].tolist() == [10, -5, 0, 0]
    assert timeline.total_bytes.tolist() == [110, 95, 100, 100]


def test_without_a_traced_step_there_is_no_timeline():
    assert memory_timeline(make_run(traced_step=None).ranks[0]) is None


LIVES = st.lists(
    st.tuples(
        st.integers(-2, 10),
        st.one_of(st.none(), st.integers(-2, 12)),
        st.integers(0, 1000),
        st.sampled_from(CATEGORIES),
    ),
    min_size=1,
    max_size=15,
)


@settings(max_examples=60)
@given(LIVES)
def test_the_timeline_equals_counting_at_every_moment(lives):
    """Brute force over whole seconds; and the categories sum to the total everywhere."""
    rows = [
        storage(
            storage_id=i,
            birth_s=float(b),
            death_s=None if d is None else float(max(b, d)),
            size_bytes=n,
            category=c,
        )
        for i, (b, d, n, c) in enumerate(lives)
    ]
    timeline = memory_timeline(rank_of(rows))

    for moment in range(11):
        index = np.searchsorted(timeline.times_s, moment, side="right") - 1
        alive = [r for r in rows if r.birth_s <= moment and (r.death_s is None or moment < r.death_s)]
        assert timeline.total_bytes[index] == sum(r.size_bytes for r in alive)
    assert (sum(timeline.by_category_bytes.values()) == timeline.total_bytes).all()
