"""Plans for micro-batches that were never recorded. Each training has a process of its own, whose memory is all its own."""

import os
import subprocess
from pathlib import Path

import pytest

import memadvisor
from memadvisor.analyzers.segments import RecordedStep
from memadvisor.errors import UsageError
from memadvisor.plan_file import save_plan
from memadvisor.planning.micro_batches import splits, step_with
from tests.warm_python import warm_python

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def train(directory, size, *options):
    """What the script printed, and its run."""
    out = directory / "run"
    command = ["run" if options else "profile", *options, "--out", out, "small_blocks.py", size]
    done = subprocess.run(
        [warm_python(), "-m", "memadvisor", *map(str, command)],
        cwd=ROOT / "tests" / "scripts",
        env=ENVIRONMENT,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, memadvisor.load(out)


def peak_bytes(run):
    return run.ranks[0].traced_step.peak_allocated_bytes


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return train(tmp_path_factory.mktemp("recorded"), 4)[1]


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """The same training with three times the micro-batch, which is only asked about in `recorded`."""
    return train(tmp_path_factory.mktemp("larger"), 12)


def test_the_peak_of_a_larger_micro_batch_is_foretold(recorded, larger):
    """But for single numbers, such as the loss, which count as if they grew."""
    advice = memadvisor.advise(recorded, memory=2**40, micro_batch=12)
    measured_bytes = peak_bytes(larger[1])

    assert 0 <= advice.best.prediction.peak_bytes - measured_bytes <= 64
    assert advice.best.recomputed_units == ()
    assert (advice.best.micro_batch_size, advice.best.grad_accum) == (12, 1)
    assert (advice.micro_batch, advice.recorded_micro_batch) == (12, 4)
    assert advice.measured_peak_bytes == peak_bytes(recorded) < measured_bytes


def test_a_plan_makes_it_fit_and_its_peak_is_as_foretold(recorded, larger, tmp_path):
    """Planned from micro-batches of 4, applied to a script with 12."""
    losses, plain = larger
    budget = peak_bytes(plain) * 6 // 10
    plan = memadvisor.advise(recorded, memory=budget, micro_batch=12).best
    assert plan.recomputed_units

    save_plan(plan, tmp_path / "plan.json")
    applied, run = train(tmp_path, 12, "--plan", tmp_path / "plan.json")

    assert applied == losses
    assert peak_bytes(run) <= budget
    assert peak_bytes(run) == pytest.approx(plan.prediction.peak_bytes, abs=64)


def test_splits_of_it_see_as_many_samples(recorded):
    as_recorded = RecordedStep(recorded)
    whole, size = step_with(as_recorded, 8)
    found = [step for step, _ in splits(as_recorded, whole, size)]

    assert [(step.micro_batch_size, step.repeats) for step in found] == [(8, 1), (4, 2), (2, 4), (1, 8)]
    own, _ = step_with(as_recorded, None)
    split = found[1]  # micro-batches as they were recorded, and twice as many
    assert [segment.captured for segment in split.segments] == [segment.captured for segment in own.segments]
    assert [segment.duration_s for segment in split.segments] == [
        segment.duration_s for segment in own.segments
    ]


@pytest.mark.parametrize(("size", "why"), [(2, "smaller ones"), (33, "too badly")])
def test_sizes_that_nobody_can_tell_are_refused(recorded, size, why):
    with pytest.raises(UsageError, match=why) as refused:
        memadvisor.advise(recorded, memory=2**40, micro_batch=size)
    assert "give 5 to 32" in refused.value.hint


def test_a_size_that_is_none_is_refused(recorded):
    with pytest.raises(UsageError, match="micro_batch is 0"):
        memadvisor.advise(recorded, memory=2**40, micro_batch=0)
