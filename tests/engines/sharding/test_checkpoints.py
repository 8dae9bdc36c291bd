"""Checkpoints that the script writes by torch.distributed.checkpoint, and what is in memory meanwhile."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.multiprocessing.reductions import StorageWeakRef

from tests.engines.ranks import run_ranks
from tests.engines.trainings import Training, applied, build, make_optimizer, make_plan

NUM_STEPS = 6
SAVED_AT = 3
STAGES = (None, 0, 1, 2, 3)  # None is DDP without us


def steps(rank: int, stage: int | None, first: int, last: int, load: str | None, save: str | None):
    """Losses over all ranks of steps `first` to `last`; the same 12 sequences a step, on however many ranks."""
    num_ranks = dist.get_world_size()
    with contextlib.nullcontext() if stage is None else applied(make_plan(num_ranks, stage)):
        ddp = build(Training(model=(("tied", True),), dtype="float64"), 0)
        optimizer = make_optimizer("groups", ddp)
        if load is not None:
            model, state = get_state_dict(ddp, optimizer)
            dcp.load({"model": model, "optimizer": state}, checkpoint_id=load)
            set_state_dict(ddp, optimizer, model_state_dict=model, optim_state_dict=state)
        losses = []
        for step in range(first, last):
            words = torch.randint(0, 13, (12, 6), generator=torch.Generator().manual_seed(step))
            mine = words.chunk(num_ranks)[rank]
            loss = F.cross_entropy(ddp(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / num_ranks)
        if save is not None:
            model, state = get_state_dict(ddp, optimizer)
            dcp.save({"model": model, "optimizer": state}, checkpoint_id=save)
    return losses


def saved(rank: int, folder: str) -> list[list[float]]:
    whole = steps(rank, None, 0, NUM_STEPS, None, None)
    return [whole, *(steps(rank, stage, 0, SAVED_AT, None, f"{folder}/{stage}") for stage in STAGES)]


def resumed(rank: int, folder: str, pairs: list[tuple[int | None, int | None]]) -> list[list[float]]:
    return [steps(rank, stage, SAVED_AT, NUM_STEPS, f"{folder}/{origin}", None) for origin, stage in pairs]


@pytest.mark.timeout(180)
def test_a_checkpoint_goes_on_in_another_stage_and_on_other_ranks(tmp_path: Path):
    """fp64, so that a mistake cannot hide in the rounding of sums over another number of ranks."""
    whole, *begun = run_ranks(saved, 2, str(tmp_path), timeout_s=60)[0]
    for losses in begun:
        assert losses == pytest.approx(whole[:SAVED_AT], rel=1e-13)
    for num_ranks, pairs in (
        (2, [(3, 2), (1, 3), (3, None)]),
        (3, [(None, 3), (0, 1), (2, 3), (3, 2), (3, None)]),
    ):
        for losses in run_ranks(resumed, num_ranks, str(tmp_path), pairs, timeout_s=60)[0]:
            assert losses == pytest.approx(whole[SAVED_AT:], rel=1e-12)


class Ledger:
    """Most bytes of full parameters that were alive at once, of those that the engine has announced."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._alive: list[tuple[StorageWeakRef, int]] = []
        self.peak_bytes = 0

    def label(self, tensor: torch.Tensor, category: str, unit: str) -> None:
        if category == "parameter":
            self._alive.append((StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()))
            self.peak_bytes = max(self.peak_bytes, self.alive_bytes)

    @property
    def alive_bytes(self) -> int:
        return sum(size for storage, size in self._alive if not storage.expired())


def lent(rank: int) -> dict[str, float]:
    """Full parameters alive at once, as a multiple of the largest unit's, while the script does this or that."""
    ledger = Ledger()
    with applied(make_plan(2, 3), label=ledger.label) as engine:
        ddp = build(Training(model=(("dim", 24),)), rank)
        (executor,) = engine._executors
        largest_bytes = max(4 * sum(f.padded_numel for f in unit.flats) for unit in executor.units.values())
        found = {}

        def measure(name, action):
            ddp(torch.arange(6)[None]).sum().backward()  # a training pass ends all loans
            ddp.zero_grad()
            ledger.begin()
            result = action()
            found[name] = ledger.peak_bytes / largest_bytes
            return result

        measure("read", lambda: [p.norm().detach() for p in ddp.parameters()])
        measure("detached", lambda: [p.detach().norm() for p in ddp.parameters()])
        copies = {name: p.clone() for name, p in ddp.module.state_dict().items()}
        measure("loaded", lambda: ddp.module.load_state_dict(copies))
        measure("saved", lambda: torch.save(ddp.module.state_dict(), io.BytesIO()))
        # What the script asks for is whole, and nothing of it is left when the script has let go of it.
        held = measure("held", lambda: [value.view(-1) for value in ddp.module.state_dict().values()])
        del held
        ddp.module.head.weight.norm(), ddp.module.scale.norm()
        found["next"] = ledger.alive_bytes / largest_bytes
        found["all"] = sum(p.numel() for p in ddp.parameters()) * 4 / largest_bytes
    return found


def test_what_is_read_or_loaded_one_by_one_is_in_memory_one_unit_at_a_time():
    for found in run_ranks(lent, 2, timeout_s=60):
        assert found["all"] > 3
        for name in ("read", "detached", "loaded", "saved", "next"):
            assert found[name] <= 1.02, found
        assert found["all"] <= found["held"] <= 1.02 * found["all"]


def written(rank: int) -> list[bool]:
    """Writes that only the loan itself shows, in the shards of one rank or of both, while other units are read."""
    with applied(make_plan(2, 3)):
        ddp = build(Training(), rank)
        expected = {name: p.clone() for name, p in ddp.named_parameters()}
        checks = []
        for number, (name, parameter) in enumerate(ddp.named_parameters()):
            piece = (slice(0, 1), slice(-1, None), slice(None))[number % 3]
            expected[name].view(-1)[piece] += number
            if number % 2:
                parameter.data.view(-1)[piece] += number
            else:
                detached = parameter.detach()
                detached.view(-1)[piece] += number
                del detached
            checks.append(all(torch.equal(p, expected[other]) for other, p in ddp.named_parameters()))
        ddp(torch.arange(6)[None]).sum().backward()
        return [*checks, all(torch.equal(p, expected[name]) for name, p in ddp.named_parameters())]


def test_what_is_written_into_a_loan_is_kept_though_nobody_holds_it():
    for checks in run_ranks(written, 2, timeout_s=60):
        assert len(checks) > 10 and all(checks)
