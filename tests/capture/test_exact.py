"""The captured peak is the allocator's own, for every kind of training; and the script notices nothing."""

import ast
import json
import os
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from memadvisor.run.store import load_run
from tests.warm_python import warm_python

HERE = Path(__file__).parent
FAMILIES = ("language", "networks", "operators", "loops")


def kinds_of(family: str) -> list[str]:
    """The names in the list KINDS of a family's file."""
    tree = ast.parse((HERE / "zoo" / f"{family}.py").read_text())
    (names,) = [
        statement.value.elts
        for statement in tree.body
        if isinstance(statement, ast.Assign) and statement.targets[0].id == "KINDS"
    ]
    return [name.id for name in names]


KINDS = [(family, kind) for family in FAMILIES for kind in kinds_of(family)]


def start(*words: str | Path, num_threads: int = 1) -> "subprocess.Popen[str]":
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(num_threads),
        "PYTHONPATH": str(HERE.parents[1]),
    }
    command = [warm_python(), *map(str, words)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


class Witnessed:
    """All trainings of a family, once under memadvisor and once under the independent witness."""

    def __init__(self, directory: Path, family: str) -> None:
        names = kinds_of(family)
        num_threads = 2 if family == "networks" else 1  # an operator's threads allocate, too
        witness = start(HERE / "true_peak.py", "--zoo", *names, num_threads=num_threads)
        ours = start(HERE / "profile_zoo.py", directory, *names, num_threads=num_threads)
        plain_output, told = witness.communicate(timeout=150)
        output, errors = ours.communicate(timeout=150)
        assert (witness.returncode, ours.returncode) == (0, 0), told + errors
        # Not a word that is not said without us (Dynamo warns of itself on some Pythons).
        assert [line for line in errors.splitlines() if line not in told.splitlines()] == []
        # A library may have last words of its own (nanobind's of leaks, in a fork).
        said = [line for line in told.splitlines() if line.startswith("{")]
        self.peaks_bytes: dict[str, list[int]] = json.loads(said[-1])
        self.plain_lines, self.lines = by_kind(plain_output, names), by_kind(output, names)
        self.directory = directory

    def true_peak_bytes(self, kind: str) -> int:
        """The third step of one optimizer; of two, whose cycle is learnt first, the fourth and fifth together."""
        peaks = self.peaks_bytes[kind]
        return max(peaks[3:5]) if kind in ("gan", "actor_critic") else peaks[1]

    def rank(self, kind: str):
        return load_run(self.directory / kind).ranks[0]


def by_kind(output: str, names: list[str]) -> dict[str, list[str]]:
    lines: dict[str, list[str]] = defaultdict(list)
    name = ""
    for line in output.splitlines():
        name = line if line in names else name
        lines[name].append(line)
    return lines


@pytest.fixture(scope="module")
def witnessed(tmp_path_factory):
    done: dict[str, Witnessed] = {}

    def of(family: str) -> Witnessed:
        if family not in done:
            done[family] = Witnessed(tmp_path_factory.mktemp(family), family)
        return done[family]

    return of


# What has no shape cannot be counted.
NOTES = {"nested_strided": ["FLOPs of aten::linear could not be worked out; they count 0."]}


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_captured_peak_is_the_allocators(family, kind, witnessed):
    """An independent profiler over the whole process sees the same peak in the same step."""
    true_peak_bytes = witnessed(family).true_peak_bytes(kind)
    rank = witnessed(family).rank(kind)
    step = rank.traced_step
    assert step is not None, rank.notes
    assert step.peak_allocated_bytes == pytest.approx(true_peak_bytes, rel=1e-3)
    assert {row.unexplained_bytes for row in rank.residuals} == {0}
    assert explained_peak_bytes(rank) == step.peak_allocated_bytes


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_losses_are_the_same_to_the_last_bit(family, kind, witnessed):
    done = witnessed(family)
    assert done.lines[kind] == done.plain_lines[kind]
    assert len(done.lines[kind]) >= 7  # its name, five losses, the random streams
    assert [note.text for note in done.rank(kind).notes] == NOTES.get(kind, [])


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_what_is_born_in_a_forward_or_backward_has_an_operator(family, kind, witnessed):
    """And nothing that is born in a step is "other"."""
    born = [row for row in witnessed(family).rank(kind).storages if row.phase != "baseline"]
    assert [row for row in born if not row.operator and row.phase != "outside"] == []
    assert [row for row in born if row.category == "other"] == []


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
    witness = start(HERE / "true_peak.py", script, option)
    ours = start("-m", "memadvisor", "profile", "--out", tmp_path / "run", script, option)
    plain_output, told = witness.communicate(timeout=150)
    output, _ = ours.communicate(timeout=150)

    true_peak_bytes = json.loads([line for line in told.splitlines() if line.startswith("{")][-1])[
        "peaks_bytes"
    ][1]
    assert load_run(tmp_path / "run").ranks[0].traced_step.peak_allocated_bytes == true_peak_bytes
    assert (output, ours.returncode) == (plain_output, 0)
