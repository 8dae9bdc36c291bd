"""What autograd keeps of units of a script's own FSDP2 lies on another tier, or is rounded, as predicted."""

import pytest

from tests.engines.fsdp2_tiers import are_near, loop, with_units
from tests.engines.ranks import run_ranks
from tests.engines.test_fsdp2 import BLOCKS, by_units


def names(*numbers):
    return {f"blocks.{number}" for number in numbers}


MOVED = {
    "freed": with_units(
        by_units(range(BLOCKS), gather_depth=1), names(*range(BLOCKS)), activation_tier="disk"
    ),
    "run-again": with_units(by_units((0, 3), recompute=(1, 2)), names(0, 1, 2), activation_tier="disk"),
}
ROUNDED = {"rounded": with_units(by_units((), recompute=(0,)), names(*range(1, BLOCKS)), activation_bits=8)}


@pytest.mark.timeout(150)
def test_moved_activations_leave_losses_alone_and_the_peak_that_was_predicted(tmp_path):
    for are_equal, _, peaks in run_ranks(loop, 2, str(tmp_path), MOVED):
        assert are_equal
        assert are_near(peaks), peaks


@pytest.mark.timeout(150)
def test_rounded_activations_leave_the_peak_that_was_predicted(tmp_path):
    for are_equal, error, peaks in run_ranks(loop, 2, str(tmp_path), ROUNDED):
        assert not are_equal and error < 0.05
        assert are_near(peaks), peaks
