"""What a plan keeps for the backward in other forms or places is in the record, with its own bytes and its own times."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import memadvisor
from memadvisor.activation_bits import rounded_bytes
from memadvisor.analyzers.activations import activations
from memadvisor.analyzers.checkpoint_frames import traced_calls
from memadvisor.engines.activations import saved_activations
from memadvisor.engines.apply import apply
from tests.engines.activations.test_offloaded_activations import stack
from tests.engines.trainings import make_plan

LOSS_BYTES = 2 * 4  # itself, and the one that its backward begins with
NARROW, WIDE = 32 * 64, 32 * 128  # elements that a block is called with, and those of its tanh
PLANS = {
    "plain": None,
    "rounded": make_plan(1, activation_bits=4),
    "moved": make_plan(1, activation_tier="disk"),
}


@pytest.fixture(autouse=True)
def no_tensor_is_too_small(monkeypatch):
    monkeypatch.setattr(saved_activations, "MIN_BYTES", 1)


def profiled(plan, directory, pack=None):
    """A run of two steps, its second traced, under a plan; `pack` is a hook of the script's own, which keeps as is."""
    model = stack(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    with memadvisor.profile(directory, trace_step=1) as prof:
        applied = apply(plan, model, optimizer, label=prof._recorder.label) if plan is not None else None
        for _ in range(2):
            with nullcontext() if pack is None else saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = model(torch.ones(32, 8)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        if applied is not None:
            applied.remove()
    return prof.run.ranks[0], losses


def begin_of_backward(rank):
    step = rank.traced_step
    return next(s.start_s for s in rank.spans if s.step == step.index and s.kind == "backward") - step.start_s


def alive_bytes(rank, time_s):
    """Born in the step or the script's batch, and not freed by then."""
    start_s = rank.traced_step.start_s
    return sum(
        row.size_bytes
        for row in rank.storages
        if row.phase != "baseline"
        and row.birth_s - start_s <= time_s
        and (row.death_s is None or row.death_s - start_s > time_s)
    )


def who(lifetimes):
    return sorted((life.module, life.operator, life.saved_by) for life in lifetimes)


@pytest.mark.parametrize("kind", PLANS)
def test_when_the_backward_begins_what_is_said_to_be_kept_is_what_is_alive(kind, tmp_path):
    rank, _ = profiled(PLANS[kind], tmp_path / "run")
    begin_s = begin_of_backward(rank)
    here = [
        life
        for life in activations(traced_calls(rank)).lifetimes
        if life.saved_s <= begin_s < life.released_s
    ]

    assert sum(life.size_bytes for life in here) == alive_bytes(rank, begin_s) - LOSS_BYTES
    rows = {row.storage_id: row for row in rank.storages}
    for life in activations(traced_calls(rank)).lifetimes:
        row = rows[life.storage_id]
        assert life.born_s <= life.saved_s < life.released_s <= row.death_s - rank.traced_step.start_s
        assert life.last_used_s > begin_s or kind == "moved"
        assert not life.is_held_elsewhere


def test_codes_count_their_own_bytes_for_whom_saved_the_original(tmp_path):
    plain = activations(traced_calls(profiled(None, tmp_path / "plain")[0]))
    rounded = activations(traced_calls(profiled(PLANS["rounded"], tmp_path / "rounded")[0]))

    assert who(rounded.lifetimes) == who(plain.lifetimes)
    sizes = sorted(
        (life.size_bytes, life.original_bytes) for life in rounded.lifetimes if life.original_bytes
    )
    assert sizes == [(rounded_bytes(count, 4), count * 4) for count in (NARROW,) * 3 + (WIDE,) * 3]


def test_what_is_away_is_not_said_to_be_here_and_counts_once(tmp_path):
    rank, losses = profiled(PLANS["moved"], tmp_path / "moved")
    plain_rank, plain_losses = profiled(None, tmp_path / "plain")
    moved, plain = activations(traced_calls(rank)), activations(traced_calls(plain_rank))
    begin_s = begin_of_backward(rank)
    back = [life for life in moved.lifetimes if life.returned_of is not None]
    first = {life.storage_id: life for life in moved.lifetimes if life.returned_of is None}

    assert losses == plain_losses
    assert sorted(life.size_bytes for life in back) == [NARROW * 4] * 3 + [WIDE * 4] * 3
    for life in back:
        left = first[life.returned_of]
        assert left.released_s <= begin_s < life.saved_s
        assert (life.module, life.operator, life.shape) == (left.module, left.operator, left.shape)
        assert life.last_used_s > begin_s
    assert who(first.values()) == who(plain.lifetimes)
    assert (moved.saved_bytes, plain.moved_bytes) == (plain.saved_bytes, 0)
    assert moved.moved_bytes == sum(life.size_bytes for life in back)


@pytest.mark.parametrize("kind", ["rounded", "moved"])
def test_a_scripts_own_hooks_see_what_stays_and_no_codes(kind, tmp_path):
    """Those around the model are the next ones outside; the recorder's, outside of them, are told nothing, which is no 0."""
    seen = []

    def pack(tensor):
        seen.append((tensor.dtype, tuple(tensor.shape)))
        return tensor.detach()

    rank, _ = profiled(PLANS[kind], tmp_path / "run", pack)
    recorded, seen[:] = [*seen], []
    model = stack(3)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.ones(32, 8)).sum()
    every, seen[:] = [*seen], []
    applied = apply(PLANS[kind], model, None)
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.ones(32, 8)).sum()
    finally:
        applied.remove()

    assert recorded == seen * 2
    goes = [(torch.float32, (32, 64))] * 3 + [(torch.float32, (32, 128))] * 6
    assert sorted(map(str, seen + goes)) == sorted(map(str, every))
    assert rank.saved == () and activations(traced_calls(rank)) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_autograd_keeps_on_a_gpu_may_go():
    """Torch says of each storage there that it is shared; for that reason nothing was moved or rounded."""
    assert saved_activations.may_go(torch.zeros(1000, device="cuda"))


def test_what_other_processes_share_stays():
    tensor = torch.zeros(1000)
    assert saved_activations.may_go(tensor)
    assert not saved_activations.may_go(tensor.share_memory_())
