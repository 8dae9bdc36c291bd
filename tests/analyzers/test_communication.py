import dataclasses

import pytest

from memadvisor.analyzers.communication import bus_factor, communication
from memadvisor.analyzers.matching import match_collectives
from memadvisor.run.records import Collective, Operator, Span
from tests.make_run import make_run, step


def call(rank, sequence, issue_s, end_s, *, size_bytes=1000, operation="all_reduce"):
    return Collective(
        step=0,
        operation=operation,
        group="default",
        group_size=2,
        sequence=sequence,
        size_bytes=size_bytes,
        dtype="float32",
        phase="backward",
        unit="head",
        asynchronous=True,
        issue_s=issue_s,
        end_s=end_s,
        wait_start_s=None,
        wait_end_s=None,
    )


def two_ranks(first, second, operators=()):
    rows = tuple(Operator(name, "", "", "backward", start, end, 0, 0) for name, start, end in operators)
    return tuple(
        dataclasses.replace(
            rank, steps=(step(end_s=10.0, traced=True),), collectives=tuple(calls), operators=rows
        )
        for rank, calls in zip(make_run().ranks, (first, second), strict=True)
    )


def traffic_of(ranks, number=0):
    return communication(ranks[number], match_collectives(ranks))


def test_exposed_is_communication_outside_every_operator():
    """Communication from 1 to 6 s, operators from 0 to 2 and 4 to 5 s: 2 s overlapped, 3 s exposed."""
    calls = [call(0, 0, 1.0, 4.0), call(0, 1, 3.0, 6.0)]
    ranks = two_ranks(calls, calls, [("aten::mm", 0.0, 2.0), ("aten::mm", 4.0, 5.0)])
    traffic = traffic_of(ranks)

    assert (traffic.bytes, traffic.num_calls) == (2000, 2)
    assert (traffic.time_s, traffic.exposed_s, traffic.overlapped_s) == (5.0, 3.0, 2.0)


def test_a_collectives_own_operator_hides_nothing():
    calls = [call(0, 0, 1.0, 4.0)]
    traffic = traffic_of(two_ranks(calls, calls, [("c10d::allreduce_", 1.0, 4.0)]))

    assert traffic.exposed_s == 3.0


def test_waiting_lasts_until_the_last_rank_starts():
    """Rank 0 starts at 1 s, rank 1 at 3 s, both end at 5 s: rank 0 waits 2 s; the rest takes 2 s."""
    ranks = two_ranks([call(0, 0, 1.0, 5.0)], [call(1, 0, 3.0, 5.0)])

    assert traffic_of(ranks, 0).waiting_s == 2.0
    assert traffic_of(ranks, 1).waiting_s == 0.0
    assert traffic_of(ranks, 0).operations[0].duration_s == 2.0


def test_what_a_rank_waits_for_another_to_begin_tracing_is_not_exposed():
    """Rank 1 begins its traced step 4 s late, and both issue 1 s into it: of rank 0's 5 s the last one is transfer."""
    ranks = two_ranks([call(0, 0, 1.0, 6.0)], [call(1, 0, 5.0, 6.0)])
    late = dataclasses.replace(ranks[1], steps=(dataclasses.replace(ranks[1].steps[0], start_s=4.0),))
    traffic = traffic_of((ranks[0], late))

    assert (traffic.time_s, traffic.exposed_s, traffic.waiting_s, traffic.transfer_s) == (1.0, 1.0, 0.0, 1.0)
    assert traffic.exposed_fraction == pytest.approx(1.0 / 6.0)  # of the 10 s that rank 0's step took, 4 less
    assert traffic.late_fraction == 0.0


def test_what_waits_for_the_last_rank_is_late_where_no_operator_runs():
    """Rank 0 waits from 1 to 5 s of a step of 10, and computes until 2 s; the rest of its exposed 5 s is transfer."""
    ranks = two_ranks([call(0, 0, 1.0, 7.0)], [call(1, 0, 5.0, 7.0)], [("aten::mm", 0.0, 2.0)])

    assert traffic_of(ranks).exposed_fraction == pytest.approx(0.5)
    assert traffic_of(ranks).late_fraction == pytest.approx(0.3)
    assert traffic_of(ranks, 1).late_fraction == 0.0


def test_exposed_communication_inside_the_optimizer_is_told():
    """Of what is exposed from 4 to 8 s of a step of 10 the optimizer's, from 6 s on, is 2 s."""
    ranks = tuple(
        dataclasses.replace(rank, spans=(Span(0, "optimizer", "", 0, 6.0, 9.0),))
        for rank in two_ranks([call(0, 0, 4.0, 8.0)], [call(1, 0, 4.0, 8.0)])
    )

    assert traffic_of(ranks).exposed_fraction == pytest.approx(0.4)
    assert traffic_of(ranks).update_fraction == pytest.approx(0.2)


def test_where_a_ranks_record_is_missing_nobody_is_late():
    ranks = two_ranks([call(0, 0, 1.0, 5.0)], [])

    assert traffic_of(ranks).late_fraction is None


def test_collectives_that_wait_together_wait_once():
    """Two started at 1 and 2 s, and the other rank starts both at 4 s: 3 s, not 5 s."""
    ranks = two_ranks(
        [call(0, 0, 1.0, 5.0), call(0, 1, 2.0, 5.0)], [call(1, 0, 4.0, 5.0), call(1, 1, 4.0, 5.0)]
    )

    assert traffic_of(ranks).waiting_s == 3.0


def test_bandwidths_follow_nccl_tests():
    """1000 bytes in 2 s: 500 B/s; an all_reduce of 2 ranks moves 2(n-1)/n = 1 times as much a link."""
    ranks = two_ranks(
        [call(0, 0, 1.0, 3.0), call(0, 1, 4.0, 6.0, operation="all_gather")],
        [call(1, 0, 1.0, 3.0), call(1, 1, 4.0, 6.0, operation="all_gather")],
    )
    rows = {row.operation: row for row in traffic_of(ranks).operations}

    assert (rows["all_reduce"].algorithm_bytes_per_s, rows["all_reduce"].bus_bytes_per_s) == (500, 500)
    assert (rows["all_gather"].algorithm_bytes_per_s, rows["all_gather"].bus_bytes_per_s) == (500, 250)


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", 1.75),
        ("all_gather", 0.875),
        ("reduce_scatter", 0.875),
        ("all_to_all", 0.875),
        ("broadcast", 1),
    ],
)
def test_bus_factors_of_eight_ranks(operation, factor):
    assert bus_factor(operation, 8) == factor


def test_where_no_end_was_seen_times_are_unknown_not_zero():
    calls = [call(0, 0, 1.0, None)]
    traffic = traffic_of(two_ranks(calls, calls))

    assert (traffic.num_calls, traffic.num_unfinished) == (1, 1)
    assert (traffic.time_s, traffic.exposed_s, traffic.overlapped_s) == (None, None, None)
    assert traffic.operations[0].bus_bytes_per_s is None


def test_one_end_among_several_is_what_is_known():
    calls = [call(0, 0, 1.0, None), call(0, 1, 2.0, 5.0)]
    traffic = traffic_of(two_ranks(calls, calls))

    assert (traffic.num_unfinished, traffic.time_s) == (1, 3.0)


def test_on_an_accelerator_launch_times_hide_nothing():
    """An operator's row ends when it is launched there, so nobody knows what ran beside a collective."""
    ranks = make_run(device="cuda:0").ranks
    traffic = communication(ranks[0], match_collectives(ranks))

    assert traffic.time_s > 0
    assert (traffic.exposed_s, traffic.overlapped_s) == (None, None)


def test_waiting_is_unknown_while_another_rank_is_missing():
    ranks = make_run(num_ranks=2, missing_ranks=(1,)).ranks
    traffic = communication(ranks[0], match_collectives(ranks))

    assert traffic.waiting_s is None
    assert traffic.bytes == 4 * 212_992
    assert all(row.bus_bytes_per_s is None for row in traffic.operations)


def test_in_the_synthetic_run_only_the_last_all_reduce_is_exposed():
    """It takes 2 ms after the embedding's backward, when nothing else runs; the others hide."""
    ranks = make_run().ranks
    traffic = communication(ranks[0], match_collectives(ranks))

    assert traffic.time_s == pytest.approx(5 * 0.002)
    assert traffic.exposed_s == pytest.approx(0.002)


def test_a_single_rank_communicates_nothing():
    ranks = make_run(num_ranks=1).ranks
    traffic = communication(ranks[0], match_collectives(ranks))

    assert (traffic.bytes, traffic.time_s, traffic.waiting_s) == (0, 0.0, 0.0)


def test_without_a_traced_step_nothing_is_known():
    ranks = make_run(traced_step=None).ranks

    assert communication(ranks[0], match_collectives(ranks)) is None


def test_what_the_device_runs_begins_when_the_device_comes_to_it():
    """Issued at 1 s by both; their devices come to it at 3 and at 5 s, and it ends at 6 s."""
    first, second = (
        dataclasses.replace(call(rank, 0, 1.0, 6.0), device_start_s=s) for rank, s in ((0, 3.0), (1, 5.0))
    )
    traffic = traffic_of(two_ranks([first], [second]))

    assert traffic.time_s == pytest.approx(3.0)
    assert traffic.waiting_s == pytest.approx(2.0)
    assert traffic.transfer_s == pytest.approx(1.0)
