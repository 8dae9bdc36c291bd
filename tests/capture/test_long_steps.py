"""Of a step of many operators the profiler remembers memory alone; its account is that of any other step."""

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from memadvisor.capture import labels, tracing
from memadvisor.run.store import load_run
from tests.scripts.long_steps import train
from tests.warm_python import warm_python

SCRIPT = Path(__file__).parents[1] / "scripts" / "long_steps.py"


def born(rank):
    """What was born in the traced step, but for the operator: the allocator's own events do not name it."""
    return Counter(
        (row.size_bytes, row.category, row.dtype, row.shape, row.module, row.unit, row.phase, row.micro_batch)
        for row in rank.storages
        if row.phase != "baseline"
    )


def changes_bytes(rank):
    """What was allocated and freed in the traced step, in order; a meeting gradient ends before the sum begins."""
    ends = [(row.death_s, -row.size_bytes) for row in rank.storages if row.death_s is not None]
    births = [(row.birth_s, row.size_bytes) for row in rank.storages if row.phase != "baseline"]
    return [size_bytes for _, size_bytes in sorted(ends + births)]


def outcomes(rank):
    return [(row.operator, row.size_bytes) for row in rank.storages if row.shape and row.phase != "baseline"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What a training printed, and its rank, as a usual step and as a long one; in a process of their own, where nothing of
    other tests is alive."""
    directory = tmp_path_factory.mktemp("runs")
    words = [warm_python(), str(SCRIPT), str(directory), "usual=2000", "long=-1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    ranks = [load_run(directory / name).ranks[0] for name in ("usual", "long")]
    return list(zip(lines, ranks, strict=True))


def test_the_account_is_that_of_any_step(trained):
    (usual_losses, usual), (losses, rank) = trained

    assert losses == usual_losses
    assert born(rank) == born(usual)
    assert changes_bytes(rank) == changes_bytes(usual)
    assert outcomes(rank) == outcomes(usual)
    assert rank.traced_step.peak_allocated_bytes == usual.traced_step.peak_allocated_bytes
    assert {row.unexplained_bytes for row in rank.residuals} == {0}


def test_what_an_operator_makes_for_itself_is_the_dispatched_ones(trained):
    _, (_, rank) = trained
    inside = {row.operator for row in rank.storages if row.operator.startswith("inside ")}

    assert "inside aten::convolution_backward" in inside
    assert {row.removeprefix("inside ") for row in inside} <= {row.name for row in rank.operators}


def test_a_step_is_long_if_the_one_before_made_many_nodes(tmp_path, monkeypatch):
    """Of more operators than are remembered of a usual step, more are."""
    num_operators = len(train(tmp_path / "usual")[1].operators)
    monkeypatch.setattr(labels, "MOST_OPERATORS", num_operators // 2)

    assert train(tmp_path / "none")[1].traced_step is None
    monkeypatch.setattr(tracing, "_NODES_OF_LONG_STEP", 10)
    assert len(train(tmp_path / "long")[1].operators) == num_operators
    monkeypatch.setattr(tracing, "_NODES_OF_LONG_STEP", 1_000)
    assert train(tmp_path / "short")[1].traced_step is None
