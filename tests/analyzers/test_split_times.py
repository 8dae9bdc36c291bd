"""Seconds of pieces with micro-batches of another size."""

from dataclasses import replace
from fractions import Fraction

import pytest

from memadvisor.analyzers.pieces import cut_step
from memadvisor.analyzers.segments import captured_step
from memadvisor.analyzers.split_times import BACKWARD_CALL_S, FORWARD_CALL_S, split_durations
from tests.make_run import make_run

RANK = make_run(num_ranks=1, num_blocks=3).ranks[0]
PIECES = cut_step(RANK.spans, RANK.traced_step)


def num_calls(piece):
    return sum(piece.start_s <= operator.start_s <= piece.end_s for operator in RANK.operators)


@pytest.mark.parametrize("divisor", [2, 4, Fraction(1, 3)])
def test_calls_take_as_long_and_the_rest_goes_with_the_samples(divisor):
    durations = [1.0] * len(PIECES)
    for piece, found_s in zip(PIECES, split_durations(RANK, PIECES, durations, divisor), strict=True):
        calls_s = num_calls(piece) * (FORWARD_CALL_S if piece.phase == "forward" else BACKWARD_CALL_S)
        expected_s = 1.0 if piece.micro_batch is None else calls_s + (1 - calls_s) / divisor
        assert found_s == pytest.approx(float(expected_s), rel=1e-12)
    assert any(num_calls(piece) for piece in PIECES if piece.micro_batch is not None)


def test_a_piece_that_only_calls_takes_as_long_with_any_micro_batch():
    durations = [num_calls(piece) * BACKWARD_CALL_S / 2 for piece in PIECES]
    assert split_durations(RANK, PIECES, durations, 4) == durations


def test_where_a_device_runs_behind_the_cpu_all_goes_with_the_samples():
    rank = replace(RANK, process=replace(RANK.process, device="cuda:0"))
    for piece, found_s in zip(PIECES, split_durations(rank, PIECES, [1.0] * len(PIECES), 4), strict=True):
        assert found_s == (1.0 if piece.micro_batch is None else 0.25)


def test_more_and_smaller_micro_batches_never_take_less_time():
    run = make_run(num_ranks=1, num_blocks=3)
    seconds = []
    for divisor in (1, 2, 4):
        step = captured_step(run, micro_batch_divisor=divisor, repeats=divisor)
        inside = [segment for segment in step.segments if segment.micro_batch is not None]
        seconds.append(divisor * sum(segment.duration_s for segment in inside))
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]
