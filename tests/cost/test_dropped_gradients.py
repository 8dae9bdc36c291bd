"""When the gradients of the step before are free."""

from dataclasses import replace

from memadvisor.analyzers.segments import captured_step
from tests.cost.test_simulate import play
from tests.make_run import make_run


def test_gradients_that_the_script_drops_between_forward_and_backward_are_free_in_the_backward():
    """As where `optimizer.zero_grad()` stands right before `loss.backward()`."""
    step = captured_step(make_run(num_micro_batches=1))
    first = next(place for place, segment in enumerate(step.segments) if segment.phase == "backward")
    segments = [
        replace(s, captured=replace(s.captured, start={**s.captured.start, "gradient": int(place < first)}))
        for place, s in enumerate(step.segments)
    ]
    moments = list(play(replace(step, segments=tuple(segments)), ranks=2, stage=2).moments)
    held = {moment.position: moment.by_category_bytes.get("gradient", 0) for moment in moments[::-1]}

    assert held["forward of blocks.0"] == held["forward of head"] > 0
    assert held["backward of head"] == 0
