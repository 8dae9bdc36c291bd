"""Optimizers as users write them: some update each parameter by itself, others look at several."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch.optim import Optimizer


class Written(Optimizer):
    """`update` is called for each parameter that has a gradient."""

    def __init__(self, params, lr=1e-2, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)
        return loss

    def update(self, p, gradient, state, group):
        p.sub_(gradient, alpha=group["lr"])


class Lamb(Written):
    """Adam's update, scaled by the norms of the whole parameter and of its update (arXiv:1904.00962)."""

    def update(self, p, gradient, state, group):
        if not state:
            state |= {"step": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
        state["step"] += 1
        state["m"].lerp_(gradient, 0.1)
        state["v"].mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        m, v = state["m"] / (1 - 0.9 ** state["step"]), state["v"] / (1 - 0.99 ** state["step"])
        update = m / (v.sqrt() + 1e-6) + group.get("weight_decay", 0.01) * p
        weight_norm, update_norm = p.norm(), update.norm()
        trust = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
        p.sub_(update * trust, alpha=group["lr"])


class Shampoo(Written):
    """A preconditioner for each dimension, with its inverse root kept (arXiv:1802.09568)."""

    def update(self, p, gradient, state, group):
        if not state:
            sides = [torch.eye(n, dtype=p.dtype) * 1e-3 for n in p.shape]
            state |= {"step": 0, "sides": sides, "roots": [side.clone() for side in sides]}
        state["step"] += 1
        update = gradient
        for dim, side in enumerate(state["sides"]):
            unfolded = gradient.movedim(dim, 0).reshape(gradient.shape[dim], -1)
            side.add_(unfolded @ unfolded.T)
            if state["step"] % 2 == 1:
                values, vectors = torch.linalg.eigh(side)
                power = values.clamp(min=1e-12) ** (-1 / (2 * p.dim()))
                state["roots"][dim] = vectors * power @ vectors.T
            update = torch.tensordot(state["roots"][dim], update, ([1], [dim])).movedim(0, dim)
        p.sub_(update, alpha=group["lr"])


class Counting(Written):
    """Keeps a count for the group, and averages beside its options, as schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)

    def update(self, p, gradient, state, group):
        p.sub_(gradient / gradient.norm().clamp(min=1e-3), alpha=group["lr"] / group["k"])


# ---- what cannot be shared out -----------------------------------------------------------------


class GlobalNorm(Lamb):
    """Clips by the norm of all gradients, which small ones do not reach."""

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm() if gradients else torch.tensor(0.0)
        if 100 < norm < float("inf"):
            torch._foreach_mul_(gradients, 100 / norm)
        return super().step(closure)


class Normalized(Written):
    """Steps of one length for all parameters together, and no state."""

    @torch.no_grad()
    def step(self, closure=None):
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.norm = torch.stack(norms).norm().item() if norms else 1.0
        super().step(closure)
        del self.norm

    def update(self, p, gradient, state, group):
        p.sub_(gradient * group["lr"] / self.norm)


class Prodigal(Written):
    """Estimates one step size for all parameters from all gradients, as Prodigy and D-Adaptation do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            found = sum(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
            group["d"] = max(group.get("d", 1e-6), found * 1e-6)
        return super().step(closure)

    def update(self, p, gradient, state, group):
        p.sub_(gradient.sign(), alpha=group["d"])


class NotesItsParameters(Written):
    """Keeps for the group what depends on which parameters are in it."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["total"] = sum(p.numel() for p in group["params"])
        return super().step(closure)


class SkipsInfinity(Written):
    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if all(bool(torch.isfinite(g).all()) for g in gradients):
            super().step(closure)


class Noisy(Written):
    def update(self, p, gradient, state, group):
        p.sub_(gradient + torch.randn_like(p), alpha=group["lr"])


class KeepsItsParameters(Written):
    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        self.all = [p for group in self.param_groups for p in group["params"]]


class Wrapper(Written):
    """Steps another optimizer over the same parameters."""

    def __init__(self, params, lr=1e-2):
        params = list(params)
        super().__init__(params, lr)
        self.inner = torch.optim.SGD(params, lr)


class Communicating(Written):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                with contextlib.suppress(Exception):
                    dist.all_reduce(p.grad)
        return super().step(closure)


class NeedsParameters(Written):
    """Fails where a group is empty."""

    def step(self, closure=None):
        for group in self.param_groups:
            torch._foreach_mul_([p.detach() for p in group["params"]], 1 - group["lr"])
        return super().step(closure)


class Sharpness(Written):
    """Calls its closure again after a first change, as SAM does."""

    def step(self, closure=None):
        super().step()
        if closure is not None:
            closure()
        return super().step(closure)


class ScheduleFree(Written):
    """Steps in training mode alone, as schedule-free ones do, which begin in the other."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        self.train(False)

    def train(self, mode=True):
        for group in self.param_groups:
            group["train_mode"] = mode

    def update(self, p, gradient, state, group):
        if not group["train_mode"]:
            raise RuntimeError("not in train mode")
        super().update(p, gradient, state, group)


class Averaging(ScheduleFree):
    """Has an average in the place of each parameter between its steps."""

    def update(self, p, gradient, state, group):
        super().update(p, gradient, state, group)
        state.setdefault("average", p.clone()).lerp_(p, 0.5)

    @torch.no_grad()
    def eval(self):
        self.train(False)
        for group in self.param_groups:
            for p in group["params"]:
                if "average" in self.state[p]:
                    p.lerp_(self.state[p]["average"], 0.1)


class Raising(Written):
    def update(self, p, gradient, state, group):
        raise ValueError("this one\nneeds a GPU")


class Built(Written):
    """Makes its state when it is built."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.zeros_like(p)

    def update(self, p, gradient, state, group):
        state["sum"] += gradient.norm()
        p.sub_(gradient / state["sum"], alpha=group["lr"])
