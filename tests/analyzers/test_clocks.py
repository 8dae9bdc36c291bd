"""Clocks of ranks: whatever they are set to, the ranks' meetings tell how far apart they are."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.analyzers.clocks import align_clocks
from memadvisor.analyzers.matching import match_collectives
from memadvisor.analyzers.skew import skew
from memadvisor.run.records import Collective
from tests.make_run import make_run


def meetings(num_ranks, num_meetings, seed, *, late_rank=None, late_s=0.0, operation="all_reduce"):
    """By rank, the records of all_reduces in true time: random arrivals, 0.1-0.6 ms of transfer, jittered ends."""
    draw = random.Random(seed)
    calls = {rank: [] for rank in range(num_ranks)}
    now_s = 100.0
    for number in range(num_meetings):
        issues = [now_s + draw.uniform(0, 0.004) + late_s * (r == late_rank) for r in range(num_ranks)]
        done_s = max(issues) + draw.uniform(1e-4, 6e-4)
        for rank, issue_s in enumerate(issues):
            end_s = done_s + draw.uniform(0, 2e-4)
            calls[rank].append(
                Collective(0, operation, "0", num_ranks, number, 4000, "float32", "backward", "", True,
                           issue_s, end_s, None, None)
            )  # fmt: skip
        now_s = done_s + 0.002
    return calls


def ranks_with(calls, offsets_s, *, hosts=None):
    """Synthetic ranks whose clocks are ahead of true time by `offsets_s`."""
    ranks = []
    for rank, offset_s in zip(make_run(num_ranks=len(offsets_s)).ranks, offsets_s, strict=True):
        number = rank.process.rank
        shifted = tuple(
            dataclasses.replace(c, issue_s=c.issue_s + offset_s, end_s=c.end_s + offset_s)
            for c in calls[number]
        )
        step = dataclasses.replace(rank.traced_step, index=0, start_s=99.0 + offset_s, end_s=199.0 + offset_s)
        process = dataclasses.replace(rank.process, host="node0" if hosts is None else hosts[number])
        ranks.append(dataclasses.replace(rank, process=process, steps=(step,), collectives=shifted))
    return ranks


@given(
    st.lists(st.floats(-5, 5), min_size=1, max_size=3),
    st.integers(0, 10**6),
    st.sampled_from([None, 0, 1]),
    st.floats(0, 0.05),
)
@settings(max_examples=60, deadline=None)
def test_skew_of_five_seconds_is_recovered_to_a_millisecond(others_s, seed, late_rank, late_s):
    """Also where one rank always comes 50 ms late, and with a single estimate of how sure it is."""
    offsets_s = [0.0, *others_s]
    calls = meetings(len(offsets_s), 12, seed, late_rank=late_rank, late_s=late_s)
    clocks = align_clocks(ranks_with(calls, offsets_s, hosts=[f"node{n}" for n in range(len(offsets_s))]))

    for clock, offset_s in zip(clocks[1:], others_s, strict=True):
        assert abs(clock.offset_s - offset_s) < 1e-3
        assert not clock.contradicted
        if clock.source == "collectives":
            assert clock.bounds_s[0] - 1e-9 <= offset_s <= clock.bounds_s[1] + 1e-9
            assert clock.uncertainty_s < 1e-3


def test_one_machine_has_one_clock_as_long_as_the_records_allow_it():
    calls = meetings(2, 8, seed=1)
    honest, strange = (align_clocks(ranks_with(calls, [0.0, offset_s]))[1] for offset_s in (0.0, 5.0))

    assert (honest.source, honest.offset_s) == ("shared", 0.0)
    assert strange.source == "collectives" and abs(strange.offset_s - 5.0) < 1e-3


def test_without_a_meeting_wall_clocks_are_all_there_is():
    ranks = ranks_with({0: [], 1: []}, [0.0, 0.0], hosts=["a", "b"])
    second = dataclasses.replace(ranks[1].process, unix_offset_s=ranks[0].process.unix_offset_s - 7.0)
    clock = align_clocks([ranks[0], dataclasses.replace(ranks[1], process=second)])[1]

    assert (clock.source, clock.offset_s) == ("wall clocks", 7.0)


def test_records_that_no_clock_explains_are_said_to_contradict():
    """In one meeting the second rank is 5 s ahead, in another 5 s behind."""
    first, second = (meetings(2, 2, seed=3)[rank] for rank in (0, 1))
    for number, shift_s in enumerate((5.0, -5.0)):
        call = second[number]
        second[number] = dataclasses.replace(call, issue_s=call.issue_s + shift_s, end_s=call.end_s + shift_s)
    clock = align_clocks(ranks_with({0: first, 1: second}, [0.0, 0.0], hosts=["a", "b"]))[1]

    assert clock.contradicted


def test_who_is_late_is_found_behind_any_clocks():
    calls = meetings(4, 10, seed=5, late_rank=2, late_s=0.02)
    ranks = ranks_with(calls, [0.0, 3.0, -4.0, 5.0], hosts=list("abcd"))
    clocks = align_clocks(ranks)
    nothing = [None] * 4
    found = skew(ranks, clocks, match_collectives(ranks, clocks), nothing, nothing, nothing)

    assert found.straggler == 2
    caused = {row.rank: row.caused_waiting_s for row in found.ranks}
    assert caused[2] == pytest.approx(3 * 10 * 0.02, rel=0.25)
