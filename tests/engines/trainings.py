"""Small trainings of the kinds that sharding gets wrong, each run under DDP with or without a plan."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from memadvisor import loose
from memadvisor.engines.applied import Applied
from memadvisor.engines.apply import install
from memadvisor.plan import Plan, UnitPlan


@contextlib.contextmanager
def loose_from(size_bytes: int | None) -> Iterator[None]:
    """Gradients of so many bytes and more stay where autograd makes them, until they are reduced to shards."""
    usual = loose.LOOSE_BYTES
    loose.LOOSE_BYTES = usual if size_bytes is None else size_bytes
    try:
        yield
    finally:
        loose.LOOSE_BYTES = usual


class Noted:
    """What a module notes of its runs, which is no list, and so is not put back for a second one."""

    def __init__(self) -> None:
        self.values: list[object] = []
        self.append, self.clear = self.values.append, self.values.clear

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: int) -> object:
        return self.values[place]


class Block(nn.Module):
    def __init__(self, dim: int, dropout: float, checkpointed: bool = False, smooth: bool = False) -> None:
        super().__init__()
        self.smooth = smooth
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim)
        self.dropout = nn.Dropout(dropout)
        self.checkpointed = checkpointed

    def forward(self, x):
        if self.checkpointed:  # the script itself, in the middle of a unit
            return x + self.dropout(self.down(checkpoint(self.inner, x, use_reentrant=False)))
        return x + self.dropout(self.down(self.inner(x)))

    def inner(self, x):
        hidden = self.up(self.norm(x))
        return torch.tanh_(hidden) if self.smooth else F.relu(hidden, inplace=True)


class NormBlock(nn.Module):
    """A residual block with running statistics, and an in-place activation on its output."""

    def __init__(self, dim: int, smooth: bool = False) -> None:
        super().__init__()
        self.smooth = smooth
        # A bias before a batch norm has rounding for a gradient, of which Adam makes steps of full size.
        self.linear = nn.Linear(dim, dim, bias=False)
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x):
        batch, length, dim = x.shape
        x = x + self.norm(self.linear(x).view(-1, dim)).view(batch, length, dim)
        return torch.tanh_(x) if self.smooth else F.relu(x, inplace=True)


class Model(nn.Module):
    """A language model on 13 words; its sizes are odd, so that shards need padding.

    smooth: no kinks, at which rounding alone may choose the side and with it the gradient.
    """

    def __init__(
        self,
        *,
        tied=False,
        batch_norm=False,
        dropout=0.0,
        unused=False,
        checkpointed=False,
        dim=9,
        smooth=False,
    ):
        super().__init__()
        self.tokens = nn.Embedding(13, dim)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(Block(dim, dropout, checkpointed, smooth) for _ in range(3))
        self.norms = nn.ModuleList(NormBlock(dim, smooth) for _ in range(2 if batch_norm else 0))
        self.spare = nn.Linear(dim, dim) if unused else None
        self.extra = nn.Linear(dim, dim) if unused else None
        self.head = nn.Linear(dim, 13, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, words, use_extra=False):
        x = self.tokens(words) * self.scale
        for block in (*self.blocks, *self.norms):
            x = block(x)
        if use_extra:
            x = x + self.extra(x)
        return self.head(x)


@dataclass(frozen=True)
class Training:
    """One training: what model, what optimizer, and how the loop is written.

    Of the steps, the first is watched and the second is the first by what was seen; each third calls `extra`.
    """

    model: tuple[tuple[str, object], ...] = ()
    optimizer: str = "adamw"
    accumulate: int = 1
    no_sync: bool = False
    frozen: bool = False
    unused: bool = False
    clip: float | None = None
    keep_zeros: bool = False
    bf16: bool = False
    dtype: str = "float32"
    steps: int = 4


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if kind in ("sgd", "slow sgd"):
        lr = 0.1 if kind == "sgd" else 0.01  # the former makes a hundred times more of rounding in 20 steps
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-2)
    if kind == "groups":
        decay = [p for p in parameters if p.dim() >= 2]
        rest = [p for p in parameters if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1, "lr": 2e-2}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2)
    if kind in ("adamw", "foreach adamw"):
        return torch.optim.AdamW(parameters, lr=1e-2, foreach=kind == "foreach adamw")
    return getattr(torch.optim, kind)(parameters, lr=1e-2)


def build(training: Training, rank: int) -> nn.Module:
    torch.manual_seed(5)
    model = Model(unused=training.unused, **dict(training.model))
    if training.frozen:
        model.blocks[1].requires_grad_(False)
        model.tokens.requires_grad_(False)
    with torch.no_grad():
        model.scale += rank  # DDP must bring rank 0's value
    model.to(getattr(torch, training.dtype))
    torch.manual_seed(100 + rank)
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=training.unused)


def train(
    training: Training,
    rank: int,
    each_step: Callable[[nn.Module, torch.optim.Optimizer, int], None] | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The script: losses of all micro-batches, and the trained weights."""
    ddp = build(training, rank)
    optimizer = make_optimizer(training.optimizer, ddp)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(training.steps):
        for micro_batch in range(training.accumulate):
            last = micro_batch == training.accumulate - 1
            with ddp.no_sync() if training.no_sync and not last else contextlib.nullcontext():
                losses.append(micro_batch_loss(training, ddp, data, use_extra=(step + rank) % 3 == 0))
        if training.clip is not None:
            losses.append(float(nn.utils.clip_grad_norm_(ddp.parameters(), training.clip)))
        if each_step is not None:
            each_step(ddp, optimizer, step)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=not training.keep_zeros)
    return losses, {name: value.clone() for name, value in ddp.module.state_dict().items()}


def micro_batch_loss(training: Training, ddp: nn.Module, data: torch.Generator, use_extra: bool) -> float:
    words = torch.randint(0, 13, (4, 6), generator=data)
    options = {"use_extra": True} if training.unused and use_extra else {}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=training.bf16):
        logits = ddp(words[:, :-1], **options)
        loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
    (loss / training.accumulate).backward()
    return float(loss.detach())


def clipped_gradients(model: nn.Module, data: torch.Generator, accumulate: int) -> list[float]:
    """Losses of so many micro-batches of words; their gradients are summed, and clipped to a norm of 1."""
    losses = []
    for _ in range(accumulate):
        words = torch.randint(0, 13, (4, 6), generator=data)
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        (loss / accumulate).backward()
        losses.append(float(loss.detach()))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return losses


def make_plan(
    num_ranks: int, zero: int = 0, policy: str = "none", units: tuple[UnitPlan, ...] = (), **changes
) -> Plan:
    return Plan(num_ranks=num_ranks, zero_stage=zero, policy=policy, units=units, **changes)


@contextlib.contextmanager
def applied(plan: Plan, **options) -> Iterator[Applied]:
    found = install(plan, **options)
    try:
        yield found
    except BaseException:
        traceback.print_exc()  # the removal may wait for ranks that have not failed, and be all that is seen
        raise
    finally:
        found.remove()


def largest_difference(a, b) -> float:
    """Relative to the larger value, over two lists or two dicts of tensors."""
    if isinstance(a, dict):
        return max(largest_difference(a[key].flatten().tolist(), b[key].flatten().tolist()) for key in a)
    return max((abs(x - y) / max(1e-2, abs(x), abs(y)) for x, y in zip(a, b, strict=True)), default=0.0)
