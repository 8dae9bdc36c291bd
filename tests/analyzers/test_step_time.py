import dataclasses

import pytest

from memadvisor.analyzers.step_time import step_time
from memadvisor.run.records import Span
from tests.make_run import make_run, step


def rank_of(spans, steps=None):
    """A rank whose only steady step, number 2, lasts from 0 s to 10 s."""
    rank = make_run(num_ranks=1, traced_step=None).ranks[0]
    steps = steps or (step(index=2, end_s=10.0),)
    return dataclasses.replace(rank, steps=tuple(steps), spans=tuple(spans))


def test_phases_of_the_synthetic_step():
    """1 + 3 x 8 + 4 ms forward, twice that backward, 8 ms optimizer, 5 ms outside: 100 ms."""
    time = step_time(make_run(num_ranks=1).ranks[0])

    assert time.median_s == pytest.approx(0.100)
    assert time.by_phase_s == pytest.approx(
        {"forward": 0.029, "backward": 0.058, "optimizer": 0.008, "outside": 0.005}
    )
    assert time.samples_per_s == pytest.approx(40)
    assert time.tokens_per_s == pytest.approx(1280)
    assert time.recorder_fraction == pytest.approx(0.01)


def test_the_traced_steps_time_is_apart():
    """A traced step is three times slower here, and none of the medians knows."""
    traced, plain = (step_time(make_run(num_ranks=1, traced_step=t).ranks[0]) for t in (3, None))

    assert traced.median_s == pytest.approx(plain.median_s)
    assert traced.traced_step_s == pytest.approx(0.3)
    assert plain.traced_step_s is None


@pytest.mark.parametrize("recompute", [(), ("blocks.1",)])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_phases_sum_to_the_step(recompute, num_micro_batches):
    time = step_time(make_run(recompute=recompute, num_micro_batches=num_micro_batches).ranks[0])

    assert sum(time.by_phase_s.values()) == pytest.approx(time.median_s)


def test_units_sum_over_micro_batches():
    time = step_time(make_run(num_micro_batches=2, recompute=("blocks.1",)).ranks[0])
    units = {unit.unit: unit for unit in time.units}

    assert list(units) == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert units["head"].forward_s == pytest.approx(2 * 0.004)
    assert units["blocks.0"].backward_s == pytest.approx(2 * 0.016)
    assert units["blocks.0"].recompute_s == 0
    assert units["blocks.1"].recompute_s == pytest.approx(2 * 0.008, rel=0.25)


def test_a_closures_forward_and_backward_are_not_the_optimizers():
    """LBFGS calls forward and backward from inside its step."""
    time = step_time(
        rank_of(
            [
                Span(2, "optimizer", "", 0, 1.0, 9.0),
                Span(2, "forward", "", 0, 2.0, 4.0),
                Span(2, "backward", "", 0, 4.0, 7.0),
            ]
        )
    )

    assert time.by_phase_s == {"forward": 2.0, "backward": 3.0, "optimizer": 3.0, "outside": 2.0}


def test_updates_during_the_backward_are_the_optimizers():
    """Hooks on gradients call an optimizer for each parameter."""
    time = step_time(
        rank_of(
            [
                Span(2, "forward", "", 0, 1.0, 4.0),
                Span(2, "backward", "", 0, 4.0, 9.0),
                Span(2, "optimizer", "", 0, 5.0, 6.0),
                Span(2, "optimizer", "", 0, 8.5, 9.0),
            ]
        )
    )

    assert time.by_phase_s == {"forward": 3.0, "backward": 3.5, "optimizer": 1.5, "outside": 2.0}


def test_a_unit_inside_another_counts_there_alone():
    time = step_time(
        rank_of(
            [
                Span(2, "unit_forward", "", 0, 0.0, 6.0),
                Span(2, "unit_forward", "blocks.0", 0, 1.0, 3.0),
                Span(2, "unit_forward", "blocks.1", 0, 3.0, 5.0),
                Span(2, "unit_backward", "blocks.1", 0, 6.0, 9.0),
                Span(2, "unit_recompute", "blocks.1", 0, 6.0, 7.0),
            ]
        )
    )
    units = {unit.unit: unit for unit in time.units}

    assert units[""].forward_s == 2.0
    assert units["blocks.0"].forward_s == 2.0
    assert (units["blocks.1"].backward_s, units["blocks.1"].recompute_s) == (2.0, 1.0)


def test_throughput_that_was_not_recorded_is_unknown():
    time = step_time(rank_of([]))

    assert time.samples_per_s is None
    assert time.tokens_per_s is None
    assert time.recorder_fraction is None


def test_throughput_is_what_a_step_is_given_over_the_median_step():
    """Two of the four steps take four times as long: the median of the four rates is 56 % more than that."""
    ends = [(0.0, 1.0), (1.0, 2.0), (2.0, 6.0), (6.0, 10.0)]
    steps = [
        step(index=index, start_s=start_s, end_s=end_s, num_samples=5, num_tokens=10)
        for index, (start_s, end_s) in enumerate(ends, start=2)
    ]
    time = step_time(rank_of([], steps))

    assert time.median_s == pytest.approx(2.5)
    assert time.samples_per_s == pytest.approx(2)
    assert time.tokens_per_s == pytest.approx(4)


def test_without_a_timed_step_nothing_is_known():
    assert step_time(rank_of([], steps=(step(index=0, traced=True),))) is None


def test_an_evaluation_pass_is_outside_and_no_units():
    time = step_time(
        rank_of(
            [
                Span(2, "evaluation", "", 0, 0.0, 3.0),
                Span(2, "unit_forward", "head", 0, 1.0, 2.0),
                Span(2, "forward", "", 0, 4.0, 9.0),
                Span(2, "unit_forward", "head", 0, 5.0, 9.0),
            ]
        )
    )
    units = {unit.unit: unit for unit in time.units}

    assert units["head"].forward_s == 4.0
    assert (time.by_phase_s["forward"], time.by_phase_s["outside"]) == (5.0, 5.0)


def test_phases_sum_to_the_median_step_and_none_is_negative():
    """Steps of 10 s that spend 9 s forward, 9 s backward, and so on: parts of different steps."""
    spans = []
    for index, forward_s, backward_s in (
        (2, 9.0, 0.5),
        (3, 0.5, 9.0),
        (4, 8.0, 1.9),
        (5, 1.9, 8.0),
        (6, 7.0, 2.9),
    ):
        begin_s = 10.0 * (index - 2)
        spans.append(Span(index, "forward", "", 0, begin_s, begin_s + forward_s))
        spans.append(Span(index, "backward", "", 0, begin_s + forward_s, begin_s + forward_s + backward_s))
    steps = [step(index=i, start_s=10.0 * (i - 2), end_s=10.0 * (i - 1)) for i in range(2, 7)]
    time = step_time(rank_of(spans, steps))

    assert sum(time.by_phase_s.values()) == pytest.approx(time.median_s)
    assert min(time.by_phase_s.values()) >= 0


@pytest.mark.parametrize(
    ("indices", "traced", "basis"),
    [
        ((0, 1), None, "of step 1, a warm-up step: no step was steady"),
        ((2, 3), 2, "of step 3, next to the traced one: no step was steady"),
        ((0, 1, 2), None, "median of 1 steady step"),
        ((0, 1, 2, 3), None, "median of 2 steady steps"),
    ],
)
def test_a_time_says_of_which_steps_it_is(indices, traced, basis):
    steps = [step(index=n, start_s=float(n), end_s=n + 0.5, traced=n == traced) for n in indices]

    assert step_time(rank_of((), steps)).basis == basis
