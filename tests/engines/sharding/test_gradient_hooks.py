"""Hooks of the script on gradients find, and change, what they do under DDP; what would mean something else is refused."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from memadvisor.errors import PlanError
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Model, applied, make_optimizer, make_plan

STEPS = 3


def trained(rank: int, deed, *, is_first: bool, accumulate: int = 1) -> list[float]:
    """Losses of a training with a hook on each gradient, registered before the model is wrapped or after, and what the
    hooks have seen."""
    torch.manual_seed(5)
    model = Model(tied=True)
    seen: list[float] = []

    def hook(parameter):
        deed(parameter, seen)

    def register():
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)

    if is_first:
        register()
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = make_optimizer("adamw", ddp)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(STEPS):
        if step == 1 and not is_first:
            register()
        for micro_batch in range(accumulate):
            words = torch.randint(0, 13, (4, 6), generator=data)
            with ddp.no_sync() if micro_batch < accumulate - 1 else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(ddp(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
                loss.backward()
            losses.append(float(loss.detach()))
        seen.extend(float(gradient.norm()) for gradient in _kept)
        _kept.clear()
        optimizer.step()
        optimizer.zero_grad()
    return losses + seen


def _read(parameter, seen):
    seen.append(float(parameter.grad.norm()))


def _scale(parameter, seen):
    parameter.grad.mul_(0.5)


def _clip(parameter, seen):
    seen.append(float(nn.utils.clip_grad_norm_([parameter], 1e-2)))


def _replace(parameter, seen):
    parameter.grad = parameter.grad.sign()


def _keep(parameter, seen):
    _kept.append(parameter.grad)


def _keep_view(parameter, seen):
    _kept.append(parameter.grad.detach())


_kept: list[torch.Tensor] = []  # until the backward is over


def _drop(parameter, seen):
    parameter.grad = None


def _step(parameter, seen):
    torch.optim.SGD([parameter], lr=0.1).step()
    parameter.grad = None


def as_under_ddp(rank: int) -> dict[tuple[str, int, bool], bool]:
    same = {}
    for deed in (_read, _scale, _clip, _replace):
        for is_first in (True, False):
            plain = trained(rank, deed, is_first=is_first)
            for zero in range(4):
                with applied(make_plan(2, zero, overlap=True, gather_depth=1)):
                    same[deed.__name__, zero, is_first] = trained(rank, deed, is_first=is_first) == plain
    plain = trained(rank, _keep, is_first=True)
    for zero in range(2):
        with applied(make_plan(2, zero)):
            same["_keep", zero, True] = trained(rank, _keep, is_first=True) == plain
    plain = trained(rank, _scale, is_first=True, accumulate=2)
    with applied(make_plan(2, 1)):
        same["accumulated", 1, True] = trained(rank, _scale, is_first=True, accumulate=2) == plain
    return same


def test_hooks_find_and_change_what_they_do_under_ddp():
    """This rank's own gradient, whenever the hook was registered, and its mean when the backward is over; two ranks' sums are
    not reordered, so in every bit."""
    for same in run_ranks(as_under_ddp, 2):
        assert all(same.values()), same


def refused(rank: int) -> dict[str, str]:
    told = {}
    cases = {
        "drop": (_drop, 1, 1),
        "step": (_step, 1, 2),
        "step, whole": (_step, 1, 3),
        "accumulate": (_read, 2, 2),
        "keep": (_keep, 1, 3),
        "keep a view": (_keep_view, 1, 3),
        "keep a view, whole": (_keep_view, 1, 0),
    }
    for name, (deed, accumulate, zero) in cases.items():
        with applied(make_plan(2, zero)):
            try:
                trained(rank, deed, is_first=False, accumulate=accumulate)
            except PlanError as error:
                told[name] = error.one_line()
        _kept.clear()
        dist.barrier()
    return told


def test_what_hooks_cannot_have_is_refused_in_one_line():
    for told in run_ranks(refused, 2):
        assert "drops it inside the backward" in told["drop"]
        assert "has SGD step inside the backward" in told["step"]
        assert "has SGD step inside the backward" in told["step, whole"]
        assert "sees the sum of several backwards" in told["accumulate"]
        assert "keeps the gradient" in told["keep"]
        assert "keeps a view of the gradient" in told["keep a view"]
        assert "keeps a view of the gradient" in told["keep a view, whole"]
