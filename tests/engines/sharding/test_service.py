"""What one rank reads without the others, and what scripts do with whole weights, gradients and states."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from memadvisor.engines.script.live import read_model
from memadvisor.engines.sharding.moving import move_parameters
from memadvisor.engines.sharding.service import Service
from memadvisor.plan import UnitPlan
from memadvisor.precision import FULL_PRECISION, Precision
from tests.engines.ranks import run_ranks
from tests.engines.trainings import (
    Model,
    Training,
    applied,
    build,
    clipped_gradients,
    largest_difference,
    make_optimizer,
    make_plan,
    train,
)
from tests.warm_python import warm_python


def same(a, b) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


def on_one_rank(rank: int, zero: int) -> dict[str, object]:
    """Rank 0 alone evaluates and saves after every step, without a barrier."""
    saved: list[bytes] = []
    evaluated: list[float] = []
    words = torch.arange(12).view(2, 6)

    def look(ddp, optimizer, step):
        if rank != 0:
            return
        ddp.eval()
        with torch.no_grad():
            evaluated.append(float(ddp.module(words).square().mean()))
        ddp.train()
        file = io.BytesIO()
        torch.save({"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
        saved.append(file.getvalue())

    training = Training(steps=5, optimizer="groups", model=(("tied", True),))
    results = []
    for plan in (None, make_plan(2, zero)):
        saved, evaluated = [], []
        if plan is None:
            losses, _ = train(training, rank, look)
        else:
            with applied(plan):
                losses, _ = train(training, rank, look)
        results.append((losses, evaluated, [torch.load(io.BytesIO(data)) for data in saved]))
    (plain, plain_eval, plain_saved), (ours, ours_eval, ours_saved) = results
    tied = [
        s["model"]["head.weight"].data_ptr() == s["model"]["tokens.weight"].data_ptr() for s in ours_saved
    ]
    return {
        "losses": plain == ours,
        "evaluated": plain_eval == ours_eval,
        "weights": all(same(b["model"], a["model"]) for a, b in zip(plain_saved, ours_saved, strict=True)),
        "states": all(_same_states(a, b) for a, b in zip(plain_saved, ours_saved, strict=True)),
        "tied": all(tied),
    }


def _same_states(a, b) -> bool:
    a, b = a["optimizer"], b["optimizer"]
    return a["param_groups"] == b["param_groups"] and all(
        a["state"].keys() == b["state"].keys() and same(b["state"][n], a["state"][n]) for n in a["state"]
    )


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_rank_zero_may_save_and_evaluate_alone(zero):
    for found in run_ranks(on_one_rank, 2, zero, timeout_s=60):
        assert all(found.values()), found


def between_steps(rank: int, zero: int) -> list[list[float]]:
    """Losses without a plan and with one; rank 0 alone evaluates behind `zero_grad`."""
    found = []
    for plan in (None, make_plan(2, zero)):
        with applied(plan) if plan else contextlib.nullcontext():
            ddp, data = build(Training(), rank), torch.Generator().manual_seed(rank)
            optimizer, losses = make_optimizer("adamw", ddp), []
            for _ in range(3):
                losses += clipped_gradients(ddp, data, 1)
                optimizer.step()
                optimizer.zero_grad()
                if rank == 0:
                    ddp.eval()
                    with torch.no_grad():
                        ddp.module(torch.arange(12).view(2, 6))
                    ddp.train()
            found.append(losses)
    return found


@pytest.mark.parametrize("zero", [2, 3])
def test_rank_zero_may_evaluate_alone_when_gradients_have_been_dropped(zero):
    """It let go of their shards, and so did not meet the others before the next forward, which waited for it."""
    for plain, ours in run_ranks(between_steps, 2, zero, timeout_s=60):
        assert ours == pytest.approx(plain, rel=1e-6)


def resumed(rank: int, zero: int) -> tuple[list[float], list[float]]:
    """A checkpoint of a plain run is loaded under a plan, and one made under a plan by a plain run."""
    data = torch.Generator().manual_seed(7 + rank)

    def start():
        ddp = build(Training(), rank)
        return ddp, make_optimizer("groups", ddp)

    def go(ddp, optimizer, steps):
        losses = []
        for _ in range(steps):
            words = torch.randint(0, 13, (4, 6), generator=data)
            loss = F.cross_entropy(ddp(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    def checkpoint(ddp, optimizer):
        return copy.deepcopy((ddp.state_dict(), optimizer.state_dict()))

    ddp, optimizer = start()
    plain = go(ddp, optimizer, 3)
    middle = checkpoint(ddp, optimizer)
    plain += go(ddp, optimizer, 3)
    data.manual_seed(7 + rank)
    with applied(make_plan(2, zero)):
        ddp, optimizer = start()
        ours = go(ddp, optimizer, 2)
        ours = plain[:3]
        for _ in range(1):
            torch.randint(0, 13, (4, 6), generator=data)
        ddp.load_state_dict(middle[0])
        optimizer.load_state_dict(middle[1])
        ours = ours + go(ddp, optimizer, 2)
        later = checkpoint(ddp, optimizer)
    ddp, optimizer = start()
    ddp.load_state_dict(later[0])
    optimizer.load_state_dict(later[1])
    return plain, ours + go(ddp, optimizer, 1)


@pytest.mark.parametrize("zero", [1, 3])
def test_checkpoints_go_from_plain_runs_to_plans_and_back(zero):
    for plain, ours in run_ranks(resumed, 2, zero, timeout_s=60):
        assert ours == plain


def whole_values(rank: int) -> dict[str, bool]:
    """Averages of weights, copies, writes and a look by rank 0 before the backward, as recipes have them."""

    def script():
        ddp = build(Training(), rank)
        average = copy.deepcopy(ddp.module).requires_grad_(False)
        optimizer = make_optimizer("sgd", ddp)
        data = torch.Generator().manual_seed(rank)
        seen = []
        for _ in range(4):
            loss = ddp(torch.randint(0, 13, (4, 6), generator=data)).square().mean()
            if rank == 0:
                with torch.no_grad():
                    seen += [float(ddp.module(torch.zeros(1, 3, dtype=torch.long)).sum())]
                seen += [float(ddp.module.head.weight.detach().abs().sum())]
            loss.backward()
            seen += [float(p.grad.abs().sum()) for p in ddp.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for old, new in zip(average.parameters(), ddp.module.parameters(), strict=True):
                    old.lerp_(new, 0.1)
                ddp.module.head.weight.clamp_(-0.2, 0.2)
                ddp.module.blocks[0].up.weight.data.mul_(0.99)
            seen += [float(ddp.module.head.weight.abs().max()), float(ddp.module.scale)]
            average(torch.zeros(1, 3, dtype=torch.long))
        whole = [f"{p.sum():.5f}" for p in average.parameters()]
        return seen, whole, repr(ddp.module.head.weight)[:40]

    plain = script()
    found = {}
    kept = tuple(
        UnitPlan(name=row.name, zero_stage=3, recompute=False, reshard=False)
        for row in read_model(Model()).rows
    )
    plans = {zero: make_plan(2, zero) for zero in (1, 2, 3)}
    plans["kept until the backward"] = make_plan(2, 3, units=kept)
    for zero, plan in plans.items():
        with applied(plan):
            ours = script()
        found[f"values {zero}"] = largest_difference(plain[0], ours[0]) < 1e-6
        found[f"average {zero}"] = plain[1] == ours[1]
        found[f"text {zero}"] = plain[2] == ours[2]
    return found


def test_averages_copies_and_writes_see_whole_weights():
    for found in run_ranks(whole_values, 2, timeout_s=60):
        assert all(found.values()), found


def differing_units(rank: int, precision: Precision) -> tuple[float, int]:
    """How far losses are from DDP's where ranks run different units, and how much a rank has asked for by way of the
    store while it trained."""
    training = Training(unused=True, accumulate=2, no_sync=True)
    plain, _ = train(training, rank)
    asked: list[str] = []
    num_asked: list[int] = []
    ask = Service._ask

    def counted(self, rank, kind, *rest):
        asked.append(kind)
        return ask(self, rank, kind, *rest)

    plan = make_plan(2, 3, overlap=True, gather_depth=2, precision=precision)
    with pytest.MonkeyPatch.context() as patch, applied(plan):
        patch.setattr(Service, "_ask", counted)
        losses, _ = train(training, rank, lambda *_: num_asked.append(len(asked)))
    return largest_difference(losses, plain), num_asked[-1]


@pytest.mark.parametrize(
    ("precision", "most"), [(FULL_PRECISION, 2e-6), (Precision(param_dtype="bfloat16"), 0.1)]
)
def test_ranks_that_run_different_units_are_sent_what_they_ask_for_as_messages(precision, most):
    for apart, num_asked in run_ranks(differing_units, 2, precision, timeout_s=60):
        assert apart < most
        assert num_asked == 0


def read_early(rank: int) -> tuple[float, float]:
    """(plain, ours): rank 0 reads a weight while rank 1 has yet to move its parameters."""
    plain = float(build(Training(), rank).module.head.weight.abs().sum())

    def move_late(*parts: object) -> None:
        time.sleep(0.3 * rank)
        move_parameters(*parts)

    with pytest.MonkeyPatch.context() as patch, applied(make_plan(2, 3)):
        patch.setattr("memadvisor.engines.sharding.executor.move_parameters", move_late)
        ddp = build(Training(), rank)
        ours = float(ddp.module.head.weight.abs().sum()) if rank == 0 else plain
        dist.barrier()
    return plain, ours


def test_a_rank_that_is_ahead_waits_for_the_others_shards():
    for plain, ours in run_ranks(read_early, 2, timeout_s=60):
        assert ours == plain


def gradients_read_by_one(rank: int) -> list[list[float]]:
    """Rank 0 reads a gradient before a change that rank 1 makes first, after one that it makes last, and when rank 1 has
    dropped it."""

    def script():
        ddp = build(Training(), rank)
        ddp(torch.arange(12).view(2, 6) % (5 + rank)).square().mean().backward()
        found = []
        if rank == 0:
            time.sleep(0.2)
            found.append(float(ddp.module.head.weight.grad.abs().sum()))
        torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.02)
        norm = torch.nn.utils.get_total_norm([p.grad for p in ddp.parameters()])
        if rank == 1:
            time.sleep(0.2)
        torch.nn.utils.clip_grads_with_norm_(ddp.parameters(), 0.01, norm)
        if rank == 0:
            found.append(float(ddp.module.head.weight.grad.abs().sum()))
            time.sleep(0.2)
            found.append(float(abs(ddp.module.head.weight.grad.detach().numpy()).sum()))
        ddp.zero_grad()  # as who looks for a worse place first (SAM): no step has come between
        ddp(torch.arange(12).view(2, 6) % 5).square().mean().backward()
        dist.barrier()
        return found

    results = [script()]
    for zero in (2, 3):
        with applied(make_plan(2, zero)):
            results.append(script())
    return results


def test_a_gradient_is_read_as_it_stands_at_that_point_of_the_program():
    plain, *ours = run_ranks(gradients_read_by_one, 2, timeout_s=60)[0]
    for found in ours:
        assert largest_difference(plain, found) <= 1e-6


SCRIPT = """
import os, sys, torch
import torch.distributed as dist
from torch import nn
from memadvisor.engines.apply import install
from tests.engines.trainings import make_plan

install(make_plan(2, 3))

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        if step == 2 and dist.get_rank() == int(sys.argv[1]):
            raise ValueError("no more data")
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        state = model.module.state_dict(), optimizer.state_dict()
        print(all(bool(torch.isfinite(value).all()) for value in state[0].values()), len(state[1]["state"]))

main()
"""


def launch(tmp_path, failing_rank: int):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    command = [warm_python(), str(script), str(failing_rank)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen(command, env={**environment, "RANK": str(rank)}, **options) for rank in range(2)]


def test_rank_zero_may_save_when_the_others_have_reached_the_end_of_the_script(tmp_path):
    ranks = launch(tmp_path, failing_rank=-1)
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert outputs[0][0] == "True 4\n"
    assert [errors for _, errors in outputs] == ["", ""]


def test_a_rank_that_raises_ends_at_once(tmp_path):
    ranks = launch(tmp_path, failing_rank=1)
    _, errors = ranks[1].communicate(timeout=45)
    assert ranks[1].returncode == 1
    assert "ValueError: no more data" in errors
    ranks[0].kill()
    ranks[0].communicate()
