"""A recorded pipeline played again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.cost.pipelines import ChunkCosts, simulate_pipeline
from memadvisor.cost.pipelines.work import Kind, Work
from tests.planning.small_pipelines import LINK_S, a_pipeline

SECONDS = st.floats(0.01, 2.0)


@given(
    forwards=st.lists(SECONDS, min_size=2, max_size=4),
    added=st.lists(SECONDS, min_size=4, max_size=4),
    more=st.integers(0, 5),
)
@settings(max_examples=50, deadline=None)
def test_a_recorded_1f1b_takes_what_the_schedule_of_that_name_does(forwards, added, more):
    """With backwards twice as long as forwards, and each rank's longer by something."""
    stages = [[(1000, 0, forward_s)] for forward_s in forwards]
    num_micro_batches = len(stages) + more
    pipeline = a_pipeline(stages, num_micro_batches)
    longer = {
        Work(Kind.BW, stage, number): added[stage]
        for stage in range(len(stages))
        for number in range(num_micro_batches)
    }
    costs = [
        ChunkCosts(forward_s=forward_s, input_backward_s=2 * forward_s, weight_backward_s=added_s)
        for forward_s, added_s in zip(forwards, added, strict=False)
    ]
    named = simulate_pipeline(
        "1f1b",
        costs,
        num_micro_batches,
        num_devices=len(stages),
        transfer_s=LINK_S,
        blocking=True,
    )

    assert pipeline.play(longer).step_s == pytest.approx(named.step_s)
    assert [pipeline.in_flight(rank) for rank in range(len(stages))] == list(named.peak_in_flight)
