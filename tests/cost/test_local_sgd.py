"""What local SGD sends and waits for, as the simulator has it."""

from dataclasses import replace

import pytest

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.local_sgd import LocalSgd
from memadvisor.write_schedule import write_schedule
from tests.cost.test_simulate import TIMES, plan, play
from tests.make_run import make_run


def test_local_sgd_sends_parameters_once_a_period_and_gradients_never():
    """So often as gradients would have been summed; each average waits, with a copy of a unit beside its parameters."""
    step = captured_step(make_run())
    plain = play(step, ranks=4)
    played = {
        period: simulate(step, write_schedule(replace(plan(ranks=4), local_sgd=local_sgd), step.units), TIMES)
        for period in (1, 4)
        for local_sgd in (LocalSgd(period=period, warmup_steps=10),)
    }

    assert played[1].sent_bytes == plain.sent_bytes == 4 * played[4].sent_bytes
    assert played[1].exposed_communication_s > plain.exposed_communication_s
    assert played[1].exposed_communication_s == pytest.approx(4 * played[4].exposed_communication_s)
    assert played[4].step_time_s - played[4].exposed_communication_s == pytest.approx(step.step_time_s)
    copies = [m.by_category_bytes["communication"] for m in played[4].moments if "average of" in m.position]
    assert copies == [unit.trainable_bytes for unit in step.units if unit.trainable_bytes]
    assert played[1].peak_bytes == played[4].peak_bytes >= plain.peak_bytes
