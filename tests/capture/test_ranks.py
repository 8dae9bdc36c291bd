"""Several ranks: what their own parallelism keeps is named, and counted as it is on each rank."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from memadvisor.analyzers.model_states import model_states
from memadvisor.analyzers.peak import peak_breakdown
from memadvisor.analyzers.timeline import memory_timeline
from memadvisor.run.store import load_run
from tests.torch_exit import completed
from tests.warm_python import warm_python

SCRIPT = Path(__file__).parent / "zoo_ranks.py"
BYTES = 4  # fp32


def plain(kind):
    """Lines that two ranks print by themselves, sorted."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [warm_python(), str(SCRIPT), kind],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", "RANK": str(rank), "LOCAL_RANK": str(rank),
                 "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        return sorted(line for rank in ranks for line in rank.communicate(timeout=60)[0].splitlines())
    finally:
        for rank in ranks:
            rank.kill()


def profiled(kind, directory, fewest=5):
    """The recorded ranks. Losses, and each rank's collectives in their order, are those of the plain run."""
    words = ["memadvisor", "profile", "--nproc", "2", "--out", str(directory), str(SCRIPT), kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
    done = completed([warm_python(), "-m", *words], timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    expected = plain(kind)
    assert all(int(line.split()[1]) >= fewest for line in expected if "collectives" in line)
    assert sum("collectives" in line for line in expected) == 2
    assert sorted(done.stdout.splitlines()) == expected
    return load_run(directory).ranks


def alive_bytes(rank, category):
    (optimizer,) = [s for s in rank.spans if s.kind == "optimizer" and s.step == rank.traced_step.index]
    return sum(
        row.size_bytes
        for row in rank.storages
        if row.category == category
        and row.birth_s <= optimizer.start_s
        and (row.death_s is None or row.death_s > optimizer.start_s)
    )


def unexplained_bytes(rank):
    """At the peak. Elsewhere a buffer that a thread of the backend is about to free may be unexplained."""
    return abs(peak_breakdown(rank, memory_timeline(rank)).unexplained_bytes)


@pytest.mark.timeout(150)
def test_ddps_buckets_are_communication_and_its_reductions_are_seen(tmp_path):
    ranks = profiled("ddp", tmp_path / "run")
    for rank in ranks:
        num_params = sum(unit.num_parameters for unit in rank.units)
        assert alive_bytes(rank, "communication") == BYTES * num_params
        assert (
            sum(c.size_bytes for c in rank.collectives if c.operation == "all_reduce") == BYTES * num_params
        )
        assert all(c.end_s is not None and c.end_s >= c.issue_s for c in rank.collectives)
        assert unexplained_bytes(rank) < 0.01 * rank.traced_step.peak_allocated_bytes
    assert [(c.group, c.sequence, c.size_bytes) for c in ranks[0].collectives] == [
        (c.group, c.sequence, c.size_bytes) for c in ranks[1].collectives
    ]


@pytest.mark.timeout(150)
def test_ddps_buckets_are_communication_where_no_gradient_is_sent(tmp_path):
    """No operator touches them, and no tensor of Python's is of them: one copy of the parameters was unexplained."""
    for rank in profiled("local", tmp_path / "run", fewest=1):
        assert alive_bytes(rank, "communication") == BYTES * sum(unit.num_parameters for unit in rank.units)
        assert unexplained_bytes(rank) == 0
        assert rank.collectives == ()


@pytest.mark.timeout(150)
def test_fsdp2_keeps_a_half_of_each_state_on_each_of_two_ranks(tmp_path):
    for rank in profiled("fsdp", tmp_path / "run"):
        num_params = sum(row.num_elements for row in rank.parameters if not row.tied_to)
        assert alive_bytes(rank, "parameter") == pytest.approx(BYTES * num_params / 2, rel=0.01)
        assert alive_bytes(rank, "gradient") == pytest.approx(BYTES * num_params / 2, rel=0.01)
        assert alive_bytes(rank, "optimizer_state") == pytest.approx(2 * BYTES * num_params / 2, rel=0.01)
        assert {"all_gather", "reduce_scatter"} <= {c.operation for c in rank.collectives}
        states = model_states(rank, None)
        assert states.measured_bytes == pytest.approx(states.expected_bytes, rel=0.01)
        moments = [row for row in states.components if row.component == "exp_avg"]
        assert [row.recorded_bytes for row in moments] == pytest.approx([BYTES * num_params / 2], rel=0.01)
        # What it gathers and gives back is parameters and gradients, whoever keeps or makes it.
        groups = {unit.name: unit.shard_group for unit in rank.units}
        assert groups["blocks.0"] == "blocks.0" and {*groups.values()} == {g.name for g in rank.shard_groups}
        assert [(g.num_ranks, g.reshards, g.is_plain) for g in rank.shard_groups] == [
            (2, bool(g.name), True) for g in rank.shard_groups
        ]
        block_bytes = next(unit.parameter_bytes for unit in rank.units if unit.name == "blocks.0")
        born = [row for row in rank.storages if row.unit == "blocks.0" and row.phase == "backward"]
        for category in ("parameter", "gradient"):
            sizes = [row.size_bytes for row in born if row.category == category and row.death_s is not None]
            assert sum(sizes) == block_bytes
        assert unexplained_bytes(rank) < 0.01 * rank.traced_step.peak_allocated_bytes


@pytest.mark.timeout(150)
def test_tensor_parallel_parameters_count_by_what_is_local(tmp_path):
    for rank in profiled("tensor", tmp_path / "run"):
        own = BYTES * sum(row.num_elements for row in rank.parameters if not row.tied_to)
        assert alive_bytes(rank, "parameter") == own
        assert [split.num_ranks for split in rank.tensor_parallel] == [2]
        assert unexplained_bytes(rank) < 0.01 * rank.traced_step.peak_allocated_bytes


APART = """
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.timeout(150)
def test_ranks_that_train_apart_are_told_so(tmp_path):
    (tmp_path / "apart.py").write_text(APART)
    words = ["profile", "--nproc", "2", "--out", str(tmp_path / "run"), str(tmp_path / "apart.py")]
    done = completed([warm_python(), "-m", "memadvisor", *words], timeout=120)

    assert (done.returncode, done.stderr.count("The 2 ranks train apart")) == (0, 1), done.stderr
    for rank in load_run(tmp_path / "run").ranks:
        assert any("train apart" in note.text for note in rank.notes)
