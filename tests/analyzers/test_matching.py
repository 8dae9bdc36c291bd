import dataclasses

import pytest

from memadvisor.analyzers.matching import match_collectives
from tests.make_run import make_run


def test_the_last_rank_to_start_is_named():
    matched = match_collectives(make_run(num_ranks=3, rank_delay_s=0.001).ranks)

    assert len(matched) == 5  # one all_reduce a unit
    assert {match.last_rank for match in matched.values()} == {2}


def test_a_collective_that_one_rank_of_the_group_did_not_record_is_left_out():
    assert match_collectives(make_run(num_ranks=3, missing_ranks=(1,)).ranks) == {}


def test_a_send_meets_its_receive():
    """Both ranks send first and receive then: the first of one is not the first of the other."""
    ranks = []
    for rank, delay_s in zip(make_run(num_ranks=3).ranks[1:], (0.0, 0.5), strict=True):
        peer = 3 - rank.process.rank
        sent, received = (
            dataclasses.replace(
                rank.collectives[0], operation=name, peer=peer, tag=0, group_size=3, issue_s=start_s + delay_s
            )
            for name, start_s in (("send", 1.0), ("recv", 2.0))
        )
        ranks.append(dataclasses.replace(rank, collectives=(sent, received)))
    matched = match_collectives(ranks)

    assert sorted(key[1].rpartition("/")[2].split()[-3] for key in matched) == ["1->2", "2->1"]
    assert sorted(match.issue_s[match.last_rank] for match in matched.values()) == [2.0, 2.5]


def test_machines_are_compared_by_their_wall_clocks():
    """The second machine booted 50 s later: its monotonic clock is 50 s behind, its offset 50 s ahead."""
    first, second = make_run().ranks
    calls = tuple(
        dataclasses.replace(call, issue_s=call.issue_s - 50.0, end_s=call.end_s - 50.0)
        for call in second.collectives
    )
    process = dataclasses.replace(
        second.process, host="node1", unix_offset_s=second.process.unix_offset_s + 50.0
    )
    steps = tuple(
        dataclasses.replace(step, start_s=step.start_s - 50.0, end_s=step.end_s - 50.0)
        for step in second.steps
    )
    ranks = (first, dataclasses.replace(second, process=process, steps=steps, collectives=calls))

    for match in match_collectives(ranks).values():
        assert abs(match.issue_s[0] - match.issue_s[1]) < 1e-6


def test_only_the_traced_step_counts():
    rank = make_run(num_ranks=1).ranks[0]
    elsewhere = tuple(
        dataclasses.replace(call, step=1, group_size=1) for call in make_run().ranks[0].collectives
    )

    assert match_collectives([dataclasses.replace(rank, collectives=elsewhere)]) == {}


def test_a_rank_that_began_to_trace_later_is_no_straggler():
    """Rank 1 starts its traced step 0.3 s late; rank 0 is the slow one, by 0.1 s until its first collective."""
    first, second = make_run(num_micro_batches=1).ranks

    def recorded(rank, begin_s, issue_s):
        step = dataclasses.replace(rank.traced_step, index=0, start_s=begin_s, end_s=9.0)
        call = dataclasses.replace(rank.collectives[0], step=0, sequence=1, issue_s=issue_s, end_s=1.5)
        return dataclasses.replace(rank, steps=(step,), collectives=(call,))

    ranks = (recorded(first, 1.0, 1.15), recorded(second, 1.3, 1.35))
    (match,) = match_collectives(ranks).values()

    assert match.last_rank == 0
    assert match.last_start_s - match.issue_s[1] == pytest.approx(0.1)
    assert match.end_s - match.last_start_s == pytest.approx(1.5 - 1.35)
