"""What a script's own checkpoints free: foretold from the run that has them, and measured in one that does without."""

from functools import partial

import pytest

from memadvisor.analyzers.own_checkpoints import own_checkpoints
from memadvisor.planning.advise import advise
from tests.planning.test_moved_activations import Gpt, recorded
from tests.planning.test_own_checkpoints import Around, Attending, Checkpointing


class Plain(Checkpointing):
    """The same work without checkpoints."""

    def __init__(self, kind):
        super().__init__(kind, "not reentrant")
        for block in self.blocks:
            block.again = lambda function, *args: function(*args)


@pytest.mark.parametrize(
    ("checkpointing", "plain"),
    [
        (partial(Around, False), Gpt),
        (partial(Around, True), Gpt),
        (partial(Checkpointing, Attending, "not reentrant"), partial(Plain, Attending)),
        (partial(Checkpointing, Attending, "reentrant"), partial(Plain, Attending)),
    ],
)
def test_the_peak_without_checkpoints_is_foretold(checkpointing, plain):
    run, losses = recorded(checkpointing, 2, bf16=False)
    measured, losses_without = recorded(plain, 2, bf16=False)
    own = own_checkpoints(run.ranks[0])

    assert losses == losses_without
    assert own.units == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert own.peak_bytes == pytest.approx(measured.ranks[0].traced_step.peak_allocated_bytes, rel=0.02)
    assert own_checkpoints(measured.ranks[0]) is None
    assert 0 < own.again_s < run.ranks[0].traced_step.duration_s


def test_an_advice_says_whether_the_script_needs_them():
    run, _ = recorded(partial(Around, False), 1, bf16=False)
    without_bytes = own_checkpoints(run.ranks[0]).peak_bytes

    def said(memory_bytes):
        return " ".join(n for n in advise(run, memory_bytes=memory_bytes).notes if "checkpoints units" in n)

    assert "turn them off" in said(without_bytes)
    assert "profiled so" in said(without_bytes - 1)
