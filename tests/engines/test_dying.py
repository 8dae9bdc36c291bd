"""A rank that dies or hangs in the middle of a step takes the others with it, and they say where."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.dying import CASES, Case

_COLLECTIVE = re.compile(
    r"CollectiveError: The (all-gather|reduce-scatter|all-reduce|meeting of all ranks)"
    r"(?: of unit '([\w.]+)'| of the model's own parameters)? failed on rank (\d)"
    r"(?:, (?:sending to|receiving from) rank (\d))?: "
)


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> tuple[dict[str, dict[str, int | None]], Path]:
    folder = tmp_path_factory.mktemp("dying")
    command = [sys.executable, "-m", "tests.engines.dying", str(folder)]
    subprocess.run(command, check=True, timeout=120, cwd=Path(__file__).parents[2])
    return json.loads((folder / "codes.json").read_text()), folder


@pytest.mark.timeout(150)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_others_end_and_name_what_failed(played, case: Case):
    """Within the group's time limit, with an exit code of failure; a Python error, not an abort."""
    codes, folder = played[0][case.name], played[1]
    for rank in range(case.num_ranks):
        if rank == case.victim:
            continue
        told = (folder / f"{case.name}.{rank}").read_text()
        assert codes[str(rank)] == 1, (rank, codes, told)
        found = _COLLECTIVE.search(told)
        assert found is not None, told
        collective, unit, named_rank, partner = found.groups()
        assert int(named_rank) == rank
        if collective != "meeting of all ranks":
            assert unit is not None or "own parameters" in found.group()
        if collective in ("all-gather", "reduce-scatter"):
            # Of three ranks one may be waiting for another that has just ended because of the victim.
            assert partner is not None and int(partner) != rank
            assert case.num_ranks > 2 or int(partner) == case.victim
