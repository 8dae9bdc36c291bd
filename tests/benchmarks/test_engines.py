"""The comparison of engines: what its table says of what its ranks measured."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import engines
import engines_cover
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


def cover(compute_s, transfer_s, silent_s, step_s):
    """A mode's round: forward and backward of each, and whole steps; the first rank is the slower one."""
    quick = {"window_s": {"forward": 0.0, "backward": 0.0}, "transfer_s": {"forward": 0.0, "backward": 0.0}}
    windows = ("forward", "backward")
    silent = {"step_s": silent_s, "window_s": dict(zip(windows, compute_s, strict=True))}
    mode = {"step_s": step_s, "transfer_s": dict(zip(windows, transfer_s, strict=True))}
    return {
        "ours-3-silent": [silent, {"step_s": 0.0, **quick}],
        "ours-3-overlap": [mode, {"step_s": 0.0, **quick}],
    }


@pytest.mark.parametrize(
    ("step_s", "share"),
    [
        pytest.param(1.0 + 2.5 + 0.2, "0%", id="one after another"),
        pytest.param(0.8 + 1.7 + 0.2, "100%", id="the longer of both in each window"),
        pytest.param(3.0, "70%", id="0.7 of 1.0 s"),
    ],
)
def test_what_is_covered_is_compared_with_what_forward_and_backward_could_cover(step_s, share):
    """0.3 s of compute under 0.8 s of gathers, 0.7 s under 1.7 s, 0.2 s outside: 1 s can be covered."""
    lines = []
    taken = cover((0.3, 0.7), (0.8, 1.7), 1.2, step_s)
    engines_cover.print_cover("ours-3-overlap", [taken] * 3, lines.append)
    assert f": {share} of that is covered" in lines[-1]


def test_a_slow_link_joins_two_ranks():
    with pytest.raises(engines_link.NoLinkError, match="2 ranks"):
        engines_link.Link("1gbit", 4)
