"""Whichever way a script communicates, the traced step names it once, with its bytes and its end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memadvisor.analyzers.matching import match_collectives
from memadvisor.run.store import load_run

SCRIPT = Path(__file__).parents[1] / "scripts" / "collectives.py"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(what the script says that it did, the run): four ranks, of which pairs are groups too."""
    directory = tmp_path_factory.mktemp("collectives") / "run"
    words = ["profile", "--nproc", "4", "--out", str(directory), str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "memadvisor", *words],
        capture_output=True, text=True, timeout=150, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), load_run(directory)


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
