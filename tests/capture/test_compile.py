"""A compiled model notices nothing: as many graphs, graph breaks and compiled frames as without memadvisor."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "compiled.py"
MOMENTS = ("before", "timed", "traced", "timed again", "afterwards")


@pytest.fixture(scope="module")
def told():
    """{(what is compiled, whole graph or broken, moment): what Dynamo has counted by then, and the loss}."""
    commands = [[sys.executable, SCRIPT], [sys.executable, SCRIPT, "profiled"]]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    outputs = [process.communicate(timeout=150) for process in running]
    plain_errors, errors = (errors for _, errors in outputs)
    assert [process.returncode for process in running] == [0, 0], errors
    assert errors == plain_errors  # Dynamo warns of itself on some Pythons; as often without us
    rows = [[json.loads(line) for line in output.splitlines()] for output, _ in outputs]
    return [{tuple(row[:3]): row[3:] for row in run} for run in rows]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("compiled", ["model", "inside", "in_place", "blocks", "step"])
@pytest.mark.parametrize("graph", ["full", "broken"])
def test_a_model_stays_compiled_while_it_is_profiled_and_afterwards(compiled, graph, told):
    plain, ours = told
    for moment in MOMENTS:
        assert ours[compiled, graph, moment] == plain[compiled, graph, moment]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("compiled", ["model", "inside", "in_place", "blocks", "step"])
@pytest.mark.parametrize("graph", ["full", "broken"])
def test_a_compiled_step_is_accounted_for_to_the_byte(compiled, graph, told):
    """Also where the whole step is one graph, and no hook ever sees the model called."""
    [peak_bytes] = told[1][compiled, graph, "peak bytes"]
    [unexplained_bytes] = told[1][compiled, graph, "unexplained bytes"]

    assert peak_bytes > 0
    assert unexplained_bytes == 0
