"""Whatever happens to a run's files: no crash, no hang, and no row that nobody wrote."""

import random
from collections import Counter

import pytest

from benchmarks.damage import DAMAGES, draw_case, judge, read_files, read_written, write_files
from memadvisor.plan import Plan
from tests.make_run import make_run, write_run

NUM_CASES = 150
PLAN = Plan(num_ranks=2, zero_stage=0, why="made by hand")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("damage")
    return [
        write_run(make_run(num_ranks=1, num_blocks=2), scratch / "one"),
        write_run(make_run(num_ranks=2, num_blocks=2, plan=PLAN), scratch / "two"),
    ]


def test_a_damaged_run_is_read_in_part_or_refused_in_one_line(runs, tmp_path):
    """Seeded as benchmarks/survival.py is, which does the same with thousands of real runs."""
    originals, written = [read_files(path) for path in runs], read_written(runs)
    outcomes, kinds = Counter(), Counter()
    for seed in range(NUM_CASES):
        case = draw_case(originals, random.Random(seed))
        write_files(case.files, tmp_path / str(seed))
        verdict = judge(case, tmp_path / str(seed), written)

        assert verdict.wrong == "", f"seed {seed}, {case.kind}"
        outcomes[verdict.outcome] += 1
        kinds[case.kind] += 1

    assert set(kinds) == {*DAMAGES, "crafted", "JSON files"}
    assert outcomes["damage reported"] > NUM_CASES / 2


def test_the_judge_sees_a_row_that_nobody_wrote(runs, tmp_path):
    """A frame whose checksum is right and whose content is not the original's."""
    originals, written = [read_files(path) for path in runs], read_written(runs)
    found = set()
    for seed in range(40):
        case = draw_case(originals, random.Random(seed))
        if case.is_crafted:
            write_files(case.files, tmp_path / str(seed))
            pretended = type(case)(case.kind, case.files, is_crafted=False)
            found.add(judge(pretended, tmp_path / str(seed), written).wrong.partition(" ")[2])

    assert "0 has rows that were never written" in found
