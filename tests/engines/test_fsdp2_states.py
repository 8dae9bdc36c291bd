"""Optimizer state of a script's own FSDP2 lies on another tier, or in 8 bits, between updates: results, peaks, checkpoints."""

from dataclasses import replace

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from memadvisor.engines.apply import apply
from memadvisor.plan import Plan
from tests.engines.fsdp2_tiers import are_near, loop, with_units
from tests.engines.ranks import run_ranks
from tests.engines.test_fsdp2 import BLOCKS, Training, by_units

ALL_UNITS = ("tokens", *(f"blocks.{number}" for number in range(BLOCKS)), "norm")
RECOMPUTED = by_units(range(BLOCKS), recompute=range(BLOCKS), gather_depth=1)
ON_DISK = {
    "all": with_units(RECOMPUTED, ALL_UNITS, optimizer_tier="disk"),
    "blocks, one after another": with_units(
        replace(RECOMPUTED, update_by_unit=True), ALL_UNITS[1:-2], optimizer_tier="disk"
    ),
}
CODED = {"coded": with_units(RECOMPUTED, ALL_UNITS, optimizer_bits=8)}


def look(name, training, under):
    """At where momenta are under a plan, and after it."""
    assert all(is_away(state) == under for state in moved(training.optimizer))


def moved(optimizer):
    """Momenta of the weights of the second block, which is away in all plans on disk."""
    weight = optimizer.param_groups[0]["params"][9]
    assert weight.shape == (128, 32)
    return [optimizer.state[weight][key] for key in ("exp_avg", "exp_avg_sq")]


def is_away(state) -> bool:
    assert type(state) is DTensor
    return type(state._local_tensor) is not torch.Tensor


@pytest.mark.timeout(150)
def test_state_on_disk_leaves_losses_alone_and_the_peak_that_was_predicted(tmp_path):
    for are_equal, _, peaks in run_ranks(loop, 2, str(tmp_path), ON_DISK, look):
        assert are_equal
        assert are_near(peaks), peaks


@pytest.mark.timeout(150)
def test_state_in_8_bits_leaves_the_peak_that_was_predicted(tmp_path):
    for are_equal, error, peaks in run_ranks(loop, 2, str(tmp_path), CODED):
        assert not are_equal and error < 0.05
        assert are_near(peaks), peaks


def by_hand(rank: int) -> list[tuple[bool, bool, bool]]:
    """Of plans that ask for no stage: whether losses are the plain training's, FSDP2 is as it was, and state is away."""
    found = []
    plain = Training(rank)
    expected = plain.losses(3)
    for changes in ({"optimizer_tier": "disk"}, {"activation_tier": "disk"}):
        training = Training(rank)
        applied = apply(Plan(num_ranks=2, zero_stage=0, **changes), training.model, training.optimizer)
        losses = training.losses(3)
        found.append(
            (
                losses == expected,
                training.settings() == plain.settings(),
                any(map(is_away, moved(training.optimizer))),
            )
        )
        applied.remove()
    return found


@pytest.mark.timeout(100)
def test_a_plan_without_a_stage_leaves_fsdp2_as_the_script_has_it():
    for found in run_ranks(by_hand, 2):
        assert found == [(True, True, True), (True, True, False)]


def checkpoint(rank: int, folder: str) -> dict[str, object]:
    """What a script saves and loads while state is on disk, beside the same without a plan."""
    found: dict[str, object] = {}
    for name, plan in (("plain", None), ("away", ON_DISK["all"])):
        training = Training(rank)
        applied = apply(plan, training.model, training.optimizer) if plan else None
        training.losses(2)
        whole = get_optimizer_state_dict(
            training.model,
            training.optimizer,
            options=StateDictOptions(full_state_dict=True, cpu_offload=True),
        )
        sharded = get_optimizer_state_dict(training.model, training.optimizer)
        dcp.save({"optimizer": sharded}, checkpoint_id=f"{folder}/{name}")
        before = training.losses(1)
        # What the other one has saved is read into this one's state.
        other = f"{folder}/plain"
        target = get_optimizer_state_dict(training.model, training.optimizer)
        dcp.load({"optimizer": target}, checkpoint_id=other)
        set_optimizer_state_dict(training.model, training.optimizer, target)
        after = training.losses(2)
        if applied:
            applied.remove()
        sums = {
            key: float(value.double().sum())
            for key, state in whole.get("state", {}).items()
            for value in state.values()
            if value.dim()
        }
        found[name] = (sums, before, after)
    training = Training(rank)
    training.losses(2)
    target = get_optimizer_state_dict(training.model, training.optimizer)
    dcp.load({"optimizer": target}, checkpoint_id=f"{folder}/away")
    found["read back"] = [float(s["exp_avg"].to_local().double().sum()) for s in target["state"].values()]
    found["own"] = [float(s["exp_avg"].to_local().double().sum()) for s in training.optimizer.state.values()]
    return found


@pytest.mark.timeout(150)
def test_checkpoints_of_state_on_disk_are_those_of_the_plain_script(tmp_path):
    first, second = run_ranks(checkpoint, 2, str(tmp_path))
    for found in (first, second):
        assert found["plain"] == found["away"]
        assert sorted(found["read back"]) == sorted(found["own"])
    assert len(first["plain"][0]) > BLOCKS  # whole state dicts are on the first rank
