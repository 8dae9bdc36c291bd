"""Where a training step ends."""

from memadvisor.capture.steps import StepCycle


def ends(*optimizers):
    """For each optimizer step, whether a training step ended before it or after it."""
    cycle = StepCycle()
    return [(cycle.before(one), cycle.after(one)) for one in optimizers]


def test_one_optimizer_ends_every_step():
    assert [after for _, after in ends(1, 1, 1)] == [True, True, True]


def test_two_optimizers_share_a_step_once_their_order_is_known():
    found = ends(1, 2, 1, 2, 1, 2)

    assert found[2] == (True, False)  # the cycle is learnt here: the step had ended with optimizer 2
    assert found[3:] == [(False, True), (False, False), (False, True)]


def test_an_optimizer_that_steps_out_of_turn_ends_the_step_before_it():
    found = ends(1, 2, 1, 2, 1, 1)

    assert found[5] == (True, True)
