"""What checkpointing would free is foretold from the plain run; here it is applied, and measured."""

import dataclasses

import numpy as np
import pytest
import torch

from memadvisor.analyzers.activations import activations
from memadvisor.analyzers.checkpoint_frames import traced_calls
from memadvisor.analyzers.checkpointing import Checkpointing, checkpointing, kind_of
from memadvisor.analyzers.peak import peak_breakdown
from memadvisor.analyzers.step_time import step_time
from memadvisor.analyzers.timeline import memory_timeline
from memadvisor.run.run import RankRun
from tests.analyzers.checkpointed import Cnn, Encoder, Gpt, Recurrent, Shared, profiled, with_checkpoints
from tests.make_run import make_run

BATCHES = {"micro_batches": 2}
AUTOCAST = {"autocast": True}
# What a checkpoint keeps besides tensors that autograd would count: the processor's random state.
RANDOM_STATE_BYTES = 5056


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    """Plain runs of a kind of model with settings, each made once."""
    runs = {}

    def run(kind, settings):
        key = (kind, *settings)
        if key not in runs:
            torch.manual_seed(0)
            runs[key] = profiled(kind(), tmp_path_factory.mktemp("plain") / "run", **settings)
        return runs[key]

    return run


def table(rank: RankRun) -> Checkpointing:
    timeline = memory_timeline(rank)
    return checkpointing(traced_calls(rank), timeline, peak_breakdown(rank, timeline), step_time(rank))


def kept_for_backward(rank: RankRun) -> int:
    """Bytes alive when the traced step's first backward begins."""
    timeline = memory_timeline(rank)
    starts = [s.start_s for s in rank.spans if s.step == rank.traced_step.index and s.kind == "backward"]
    return int(timeline.total_bytes[np.searchsorted(timeline.clock_s, min(starts), side="right") - 1])


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "settings", "name"),
    [
        (Gpt, {}, "blocks.*"),  # the peak moves from the loss into the backward
        (Gpt, {}, "blocks.*.attn"),  # dropout, fused attention
        (Gpt, BATCHES, "blocks.*"),
        (Gpt, AUTOCAST, "blocks.*"),  # the cast weights are cast again
        (Cnn, {}, "layer*.*"),  # the peak moves
        (Cnn, {}, "layer1.0"),  # its output stays: the next convolution keeps it
        (Recurrent, {}, "first"),
        (Recurrent, {}, "second"),  # frees much; the peak stays, in its own backward
        (Encoder, {}, "layers.*"),
        (Shared, {}, "block"),  # three calls of one module, behind frozen embeddings
    ],
)
def test_a_foretold_checkpoint_is_what_is_measured_when_it_is_applied(
    plain_run, tmp_path, kind, settings, name
):
    before = plain_run(kind, settings)
    row = next(row for row in table(before).rows if row.name == name)
    torch.manual_seed(0)
    after = profiled(with_checkpoints(kind(), name), tmp_path / "run", **settings)

    now_kept = kept_for_backward(before) - row.freed_bytes
    assert now_kept == pytest.approx(kept_for_backward(after), rel=1e-4)
    saved_bytes = activations(traced_calls(before)).saved_bytes - row.freed_bytes
    saved_bytes -= RANDOM_STATE_BYTES * row.num_calls // settings.get("micro_batches", 1)
    assert saved_bytes == pytest.approx(activations(traced_calls(after)).saved_bytes, rel=1e-4)
    assert row.peak_bytes == pytest.approx(after.traced_step.peak_allocated_bytes, rel=0.002)


def test_where_nothing_is_freed_or_nothing_can_be_the_table_says_so(plain_run):
    rows = {row.name: row for row in table(plain_run(Gpt, {})).rows}
    assert rows["blocks.*.norm1"].freed_bytes == -4 * RANDOM_STATE_BYTES + 16384
    assert rows["blocks.*.norm1"].extra_s_per_freed_gib is None
    assert rows["blocks.*.attn"].still_kept_bytes == {"input of the checkpoint": 4 * 4 * 128 * 64 * 4}

    rows = {row.name: row for row in table(plain_run(Cnn, {})).rows}
    assert rows["layer1.0.relu"].obstacle == "it changes its input in place"
    assert rows["layer1.0.relu"].peak_bytes is None


def test_what_is_recomputed_already_is_left_alone(tmp_path):
    rows = table(profiled(with_checkpoints(Gpt(layers=2), "blocks.*"), tmp_path / "run")).rows
    by_name = {row.name: row for row in rows}

    assert by_name[""].obstacle == "parts of it are recomputed already"
    assert by_name["head"].obstacle == ""
    assert not any(row.freed_bytes for row in rows if row.name.startswith("blocks."))


def test_what_a_plan_rounds_or_moves_already_is_not_foretold(plain_run):
    rank = plain_run(Gpt, {})
    block = next(row for row in rank.saved if row.module.startswith("blocks.0"))
    codes = dataclasses.replace(block, copy_of=block.storage_id, original_bytes=4 * block.size_bytes)
    back = dataclasses.replace(block, copy_of=block.storage_id)
    for row, obstacle in ((codes, "are in fewer bits already"), (back, "are moved already")):
        saved = tuple(row if each is block else each for each in rank.saved)
        by_name = {row.name: row for row in table(dataclasses.replace(rank, saved=saved)).rows}
        assert by_name["blocks.0"].obstacle == f"parts of what it keeps {obstacle}"
        assert by_name["blocks.0"].freed_bytes is None
        assert by_name["head"].obstacle == ""


def test_the_second_forward_costs_what_it_runs_again(plain_run):
    """All but what follows the last saved tensor of a block: the product of its last layer."""
    rank = plain_run(Gpt, {})
    row = next(row for row in table(rank).rows if row.name == "blocks.*")
    forward = [op for op in rank.operators if op.phase == "forward" and op.module.startswith("blocks.")]
    last = sum(op.executed_flops for op in forward if op.module.endswith(".mlp.2"))

    assert row.recomputed_flops == sum(op.executed_flops for op in forward) - last
    blocks_s = sum(unit.forward_s for unit in step_time(rank).units if unit.unit.startswith("blocks."))
    free, dear = (
        extra_time_s(rank, second_run_call_s=call_s, second_run_tensor_s=0.0) for call_s in (0.0, 1.0)
    )
    assert 0 < free < blocks_s
    assert dear == pytest.approx(free + 4)  # each block is called once more
    assert row.extra_s_per_freed_gib == pytest.approx(row.extra_time_s / (row.freed_bytes / 2**30))


def extra_time_s(rank: RankRun, **measured: float) -> float:
    """Of all blocks, where the run has measured this of a second run."""
    costing = dataclasses.replace(rank, process=dataclasses.replace(rank.process, **measured))
    return next(row.extra_time_s for row in table(costing).rows if row.name == "blocks.*")


def test_the_best_rows_save_more_or_cost_less_than_each_other(plain_run):
    found = table(plain_run(Gpt, {}))
    best = found.best(5)

    assert best[0].peak_saved_bytes == max(row.peak_saved_bytes for row in found.rows if not row.obstacle)
    savings = [row.peak_saved_bytes for row in best]
    costs = [row.extra_time_s for row in best]
    assert savings == sorted(savings, reverse=True)
    assert costs == sorted(costs, reverse=True)


def test_without_recorded_calls_there_is_no_table():
    """A run of an earlier version has none."""
    rank = make_run().ranks[0]
    assert rank.traced_step is not None
    assert table(rank) is None
    assert table(dataclasses.replace(rank, steps=())) is None


def test_kinds_leave_the_numbers_of_containers_out():
    assert kind_of("blocks.3.mlp.0") == "blocks.*.mlp.*"
    assert kind_of("layer1.0.conv1") == "layer*.*.conv1"
    assert kind_of("0.norm1") == "*.norm1"
    assert kind_of("") == ""
