"""The comparison of engines: what its table says of what its ranks measured."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import engines
import engines_link


def answers(*step_s, waiting_s=0.0):
    return [{"step_s": seconds, "waiting_s": waiting_s} for seconds in step_s]


def test_a_mode_is_compared_with_ddp_in_the_same_round_by_its_slowest_rank():
    """The machine is twice as slow in the second round: both ratios stand, their median is 1.25."""
    rounds = [
        {"ddp": answers(0.1, 0.1), "ours-3": answers(0.1, 0.12, waiting_s=0.01)},
        {"ddp": answers(0.2, 0.1), "ours-3": answers(0.26, 0.2, waiting_s=0.03)},
    ]
    assert engines.time_cells("ours-3", rounds).split() == [
        *("190.0", "ms", "1.250", "1.20-1.30"),
        *("20.0", "ms"),
    ]


def test_losses_are_compared_rank_by_rank():
    """One rank's last loss that is off by a tenth is a tenth, however many are equal."""
    losses = {
        "ddp": [[1.0, 2.0], [4.0, 8.0]],
        "same": [[1.0, 2.0], [4.0, 8.0]],
        "off": [[1.0, 2.0], [4.0, 8.8]],
    }
    assert engines.loss_cell("same", losses) == "equal in 2 steps"
    assert engines.loss_cell("off", losses) == "within 1.0e-01"


def test_what_is_covered_is_compared_with_what_forward_and_backward_could_cover():
    """2 s of communication, 1 s of compute of which 0.2 s the optimizer's: 0.8 s could go, 0.6 s did."""

    def waiting(seconds):
        return [[{"waiting_s": seconds, "compute_s": 1.0, "optimizer_s": 0.2}] * 2] * 3

    assert engines.covered_share(waiting(2.0), waiting(1.4)) == pytest.approx(0.75)


def test_a_slow_link_joins_two_ranks():
    with pytest.raises(engines_link.NoLinkError, match="2 ranks"):
        engines_link.Link("1gbit", 4)
