"""What a unit's parameters take, and what of it the allocator never gave."""

from dataclasses import replace

import pytest

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.plan import Plan
from memadvisor.write_schedule import write_schedule
from tests.make_run import make_run

RUN = make_run(num_ranks=1, num_micro_batches=2)


def without_parameters(*units):
    """The run of a model whose weights of some units are mapped from a file: the allocator has no storage of them."""
    (rank,) = RUN.ranks
    kept = tuple(s for s in rank.storages if s.category != "parameter" or s.unit not in units)
    return replace(RUN, ranks=(replace(rank, storages=kept),))


@pytest.mark.parametrize("divisor", [1, 2])
def test_mapped_parameters_are_in_no_predicted_peak(divisor):
    plain = captured_step(RUN, micro_batch_divisor=divisor)
    step = captured_step(without_parameters("blocks.0", "blocks.1"), micro_batch_divisor=divisor)
    mapped_bytes = sum(step.states[name].parameter_bytes for name in ("blocks.0", "blocks.1"))

    peaks = [
        simulate(s, write_schedule(Plan(num_ranks=1, zero_stage=0), s.units), None).prediction().peak_bytes
        for s in (plain, step)
    ]

    assert {name for name, states in step.states.items() if states.mapped_bytes} == {"blocks.0", "blocks.1"}
    assert peaks[0] - peaks[1] == mapped_bytes > 0
