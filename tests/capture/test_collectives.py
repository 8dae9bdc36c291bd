"""Whichever way a script communicates, the traced step names it once, with its bytes and its end."""

import json
import os
from pathlib import Path

import pytest

from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.matching import match_collectives
from memadvisor.run.store import load_run
from tests.torch_exit import completed
from tests.warm_python import warm_python

SCRIPTS = Path(__file__).parents[1] / "scripts"


def profiled(directory, num_ranks, *command):
    """(stdout, the run)"""
    words = ["profile", "--nproc", str(num_ranks), "--out", str(directory), *map(str, command)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = completed([warm_python(), "-m", "memadvisor", *words], timeout=150, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, load_run(directory)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(what the script says that it did, the run): four ranks, of which pairs are groups too."""
    directory = tmp_path_factory.mktemp("collectives") / "run"
    printed, run = profiled(directory, 4, SCRIPTS / "collectives.py")
    return json.loads(printed), run


@pytest.mark.timeout(170)
def test_every_way_of_calling_is_seen_once_in_order(recorded):
    did, run = recorded
    for rank in run.ranks:
        seen = [[row.operation, row.size_bytes, row.group_size] for row in rank.collectives]
        # The size of pickled objects is theirs to know.
        expected = [[o, s if b is None else b, n] for (o, b, n), (_, s, _) in zip(did, seen, strict=True)]

        assert seen == expected


def test_each_has_an_end_and_every_rank_of_its_group_matches_it(recorded):
    _, run = recorded
    for rank in run.ranks:
        assert all(row.end_s is not None and row.end_s >= row.issue_s for row in rank.collectives)
    matched = match_collectives(run.ranks)
    sides = sum(len(match.issue_s) for match in matched.values())

    assert sides == sum(len(rank.collectives) for rank in run.ranks)


def test_a_wait_belongs_to_the_operation_whose_work_was_waited_for(recorded):
    """The script waits for the second of two first; a plain call waits by itself."""
    _, run = recorded
    for rank in run.ranks:
        first, second = [row for row in rank.collectives if row.size_bytes in (40, 80)]

        assert second.wait_start_s < first.wait_start_s
        assert first.asynchronous and second.asynchronous
        assert not rank.collectives[0].asynchronous


@pytest.mark.timeout(170)
def test_the_rank_that_is_slow_by_construction_is_named(tmp_path):
    """Rank 2 of 4 sleeps 400 ms in its forward; what the others wait is that, and the transfer is not."""
    _, run = profiled(tmp_path / "run", 4, SCRIPTS / "straggler.py", 2)
    analysis = analyze(run)

    assert analysis.skew.straggler == 2
    assert {clock.source for clock in analysis.skew.clocks} == {"shared"}
    for rank in analysis.ranks:
        waited_s, transfer_s = rank.communication.waiting_s, rank.communication.transfer_s
        if rank.rank != 2:
            assert waited_s > 0.1
            assert waited_s > transfer_s
