"""The captured peak is the allocator's own, for every kind of training; and the script notices nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memadvisor.run.store import load_run

HERE = Path(__file__).parent
KINDS = [
    "gpt", "gpt_tied_accumulated", "gpt_checkpointed", "gpt_autocast", "gpt_compiled", "lora", "cnn", "lstm",
    "encoder", "distances", "experts", "gan", "penalty", "evaluation", "loader", "exported", "closure",
]  # fmt: skip


def start(*words: str | Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.parametrize("kind", KINDS)
def test_captured_peak_is_the_allocators(kind, tmp_path):
    """An independent profiler over the whole process sees the same peak in the same step, and the same stdout."""
    # The third step of one optimizer; of the GAN's two, whose cycle is learnt first, the fourth and fifth.
    window = ("3", "5") if kind == "gan" else ("1", "2")
    witness = start(HERE / "true_peak.py", *window, HERE / "zoo.py", kind)
    ours = start("-m", "memadvisor", "profile", "--out", tmp_path / "run", HERE / "zoo.py", kind)
    plain_output, told = witness.communicate(timeout=120)
    output, errors = ours.communicate(timeout=120)

    true_peak_bytes = json.loads(told.strip().splitlines()[-1])["true_peak_bytes"]
    rank = load_run(tmp_path / "run").ranks[0]
    step = rank.traced_step
    assert step is not None, errors
    assert step.peak_allocated_bytes == pytest.approx(true_peak_bytes, rel=1e-3)
    assert max(abs(row.unexplained_bytes) for row in rank.residuals) < 0.01 * true_peak_bytes
    assert explained_peak_bytes(rank) == pytest.approx(true_peak_bytes, rel=0.01)
    assert (output, ours.returncode) == (plain_output, 0)


def explained_peak_bytes(rank) -> int:
    """The highest sum of live storages; a death counts before a birth of the same moment."""
    changes = [(row.birth_s, 1, row.size_bytes) for row in rank.storages]
    changes += [(row.death_s, 0, -row.size_bytes) for row in rank.storages if row.death_s is not None]
    alive_bytes = peak_bytes = 0
    for _, _, delta_bytes in sorted(changes):
        alive_bytes += delta_bytes
        peak_bytes = max(peak_bytes, alive_bytes)
    return peak_bytes


@pytest.mark.parametrize(
    ("sample", "option"),
    [("train_cnn.py", "--epochs=1"), ("train_rnn.py", "--steps=4"), ("train_gpt.py", "--steps=4")],
)
def test_captured_peak_of_the_samples_is_the_allocators(sample, option, tmp_path):
    script = HERE.parents[1] / "samples" / sample
    witness = start(HERE / "true_peak.py", "1", "2", script, option)
    ours = start("-m", "memadvisor", "profile", "--out", tmp_path / "run", script, option)
    plain_output, told = witness.communicate(timeout=150)
    output, _ = ours.communicate(timeout=150)

    true_peak_bytes = json.loads(told.strip().splitlines()[-1])["true_peak_bytes"]
    assert load_run(tmp_path / "run").ranks[0].traced_step.peak_allocated_bytes == true_peak_bytes
    assert (output, ours.returncode) == (plain_output, 0)
