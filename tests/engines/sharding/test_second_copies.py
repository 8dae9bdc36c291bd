"""Second copies (hpZ): gathers for the backward stay among near ranks, and nothing is computed otherwise. Nor is it where
gathers go by doubling."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memadvisor.engines.collectives.wire import Wire
from memadvisor.executors import Algorithm
from tests.engines.equality import Configuration, check
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Training, applied, build, make_optimizer, make_plan


@pytest.mark.timeout(60)
def test_two_by_two_ranks_follow_ddp():
    training = Training((("dim", 5),), "groups", frozen=True, accumulate=3, dtype="float64", steps=6)
    configuration = Configuration(
        training, stages=(3, 3, 2), secondary_ranks=2, overlap=True, gather_depth=1, removed_at=4
    )
    check(configuration, 4)


def trained(
    rank: int, secondary_ranks: int | None, depth: int, algorithms: tuple[Algorithm, ...] = ()
) -> tuple[list[float], set[tuple[int, bool, int]]]:
    """Losses of two micro-batches a step, whose forwards come before their backwards in one of them, with an
    evaluation by one rank in between; and in which step, in a backward or not, and to whom this rank sent parameters."""
    losses, sent = [], set()
    words = {"secondary_ranks": secondary_ranks, "algorithms": algorithms}
    plan = make_plan(4, 3, gather_depth=depth, overlap=bool(depth), **words)
    with applied(plan) as engine, pytest.MonkeyPatch.context() as patch:
        original = Wire._begin_exchange

        def begin(wire: Wire, operation: str, unit: str, piece: Any, to: int, *others: Any, tag: int) -> Any:
            if operation == "all-gather":
                sent.add((step, engine._hooks.in_backward, wire._messages.global_ranks[to]))
            return original(wire, operation, unit, piece, to, *others, tag=tag)

        patch.setattr(Wire, "_begin_exchange", begin)
        ddp = build(Training((("tied", True), ("dropout", 0.3), ("dim", 8))), rank)
        optimizer = make_optimizer("adamw", ddp)
        data = torch.Generator().manual_seed(rank)
        for step in range(3):
            words = torch.randint(0, 13, (2, 4, 6), generator=data)
            first = ddp(words[0]).square().mean()
            if step == 1:
                second = ddp(words[1]).square().mean()
                first.backward()
            else:
                if rank == 0:  # asks the others' service threads, and leaves the copies where they are
                    with torch.no_grad():
                        ddp.module.eval()(words[0])
                    ddp.module.train()
                first.backward()
                second = ddp(words[1]).square().mean()
            second.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses += [float(first.detach()), float(second.detach())]
    return losses, sent


DOUBLING = (
    Algorithm(operation="all_gather", min_bytes=0, name="doubling", num_ranks=4),
    Algorithm(operation="reduce_scatter", min_bytes=0, name="together"),
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("depth", [0, 1])
def test_losses_are_the_same_and_gathers_for_the_backward_stay_near(depth):
    plain = run_ranks(trained, 4, None, depth, timeout_s=40)
    second = run_ranks(trained, 4, 2, depth, timeout_s=40)
    doubled = run_ranks(trained, 4, None, depth, DOUBLING, timeout_s=40)
    assert [losses for losses, _ in second] == [losses for losses, _ in plain]
    assert [losses for losses, _ in doubled] == [losses for losses, _ in plain]
    for rank, (_, sent) in enumerate(doubled):
        assert {to for _, _, to in sent} == {rank ^ 1, rank ^ 2}
    for rank, (_, sent) in enumerate(plain):
        assert {to for _, is_backward, to in sent if is_backward} == {0, 1, 2, 3} - {rank}
    for rank, (_, sent) in enumerate(second):
        near = rank ^ 1
        assert {to for step, is_backward, to in sent if is_backward and step != 1} == {near}
        assert {to for _, is_backward, to in sent if not is_backward} == {0, 1, 2, 3} - {rank}
