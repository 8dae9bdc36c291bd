"""All-reduces that share a message, in the simulator."""

from dataclasses import replace

import pytest

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.executors import Algorithm
from memadvisor.schedule import Lane
from memadvisor.write_schedule import write_schedule
from tests.cost.test_simulate import TIMES, busy_s, plan
from tests.make_run import make_run


@pytest.mark.parametrize("stage", [0, 1])
def test_sums_that_share_a_message_save_its_latencies_and_have_one_buffer_of_all_of_them(stage):
    step = captured_step(make_run())
    apart = plan(ranks=2, stage=stage)
    merge = Algorithm(operation="all_reduce", min_bytes=0, name="merged")
    together = replace(apart, algorithms=(merge, replace(merge, min_bytes=2**40, name="native")))
    first, second = (simulate(step, write_schedule(each, step.units), TIMES) for each in (apart, together))

    num_units = sum(unit.trainable_bytes > 0 for unit in step.units)
    saved_s = busy_s(first, Lane.COLLECTIVE) - busy_s(second, Lane.COLLECTIVE)
    assert num_units > 1 and saved_s == pytest.approx(2 * TIMES.alpha_s * (num_units - 1))
    assert first.sent_bytes == second.sent_bytes

    def most(result):
        return max(moment.by_category_bytes.get("communication", 0) for moment in result.moments)

    assert most(second) - most(first) == sum(unit.trainable_bytes for unit in step.units)
