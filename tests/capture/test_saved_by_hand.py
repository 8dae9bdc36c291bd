"""What autograd keeps of small modules, worked out by hand from shapes; and the laws that hold for any module."""

import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memadvisor
from memadvisor.analyzers.activations import activations
from memadvisor.analyzers.checkpoint_frames import traced_calls

F32 = 4
LOSS_BYTES = 2 * F32  # itself, and the one that its backward begins with
BATCH, DIM, WIDE = 8, 16, 24


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = self.qkv(x).split(DIM, -1)
        return self.out((q @ k.transpose(-2, -1)).softmax(-1) @ v)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.gates = nn.Linear(2 * DIM, 4 * DIM)

    def forward(self, x):
        i, f, g, o = self.gates(torch.cat([x, x], -1)).chunk(4, -1)
        c = f.sigmoid() * x + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh()


def mlp():
    return nn.Sequential(nn.Linear(DIM, WIDE), nn.GELU(), nn.Linear(WIDE, DIM))


def convolution():
    return nn.Sequential(nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())


# (module that saved it first, operator that made it, storage's bytes, the operators whose backwards need it); the
# batch comes from outside, and `square` is the loss's: it keeps the model's result.
INPUT = "from outside"
FLAT = BATCH * DIM * F32
IMAGE = BATCH * 5 * 5 * F32
BY_HAND = {
    "mlp": (
        mlp,
        (BATCH, DIM),
        [
            ("0", INPUT, FLAT, "addmm"),
            ("1", "aten::addmm", BATCH * WIDE * F32, "gelu"),  # before the GELU
            ("2", "aten::gelu", BATCH * WIDE * F32, "addmm"),  # what the second layer multiplies
            ("", "aten::addmm", FLAT, "pow"),
        ],
    ),
    "attention": (
        Attention,
        (2, BATCH, DIM),
        [
            ("qkv", INPUT, 2 * FLAT, "addmm"),
            ("", "aten::addmm", 3 * 2 * FLAT, "bmm"),  # query, key and value are views of one storage
            ("", "aten::_softmax", 2 * BATCH * BATCH * F32, "_softmax bmm"),
            ("out", "aten::bmm", 2 * FLAT, "addmm"),
            ("", "aten::addmm", 2 * FLAT, "pow"),
        ],
    ),
    "convolution": (
        convolution,
        (BATCH, 2, 5, 5),
        [
            ("0", INPUT, 2 * IMAGE, "convolution"),
            ("1", "aten::convolution", 6 * IMAGE, "native_batch_norm"),
            ("1", "aten::native_batch_norm", 6 * F32, "native_batch_norm"),  # mean
            ("1", "aten::native_batch_norm", 6 * F32, "native_batch_norm"),  # 1 / deviation
            ("2", "aten::relu", 6 * IMAGE, "relu pow"),  # the loss keeps the same
        ],
    ),
    "cell": (
        Cell,
        (BATCH, DIM),
        [
            ("", INPUT, FLAT, "mul"),  # the previous state, times the forget gate
            ("gates", "aten::cat", 2 * FLAT, "addmm"),
            ("", "aten::sigmoid", FLAT, "sigmoid"),  # forget: the state that it scales needs no gradient
            ("", "aten::sigmoid", FLAT, "sigmoid mul"),
            ("", "aten::sigmoid", FLAT, "sigmoid mul"),
            ("", "aten::tanh", FLAT, "tanh mul"),
            ("", "aten::tanh", FLAT, "tanh mul"),
            ("", "aten::mul", FLAT, "pow"),  # the result, for the loss
        ],
    ),
}


def profiled(model, shape, directory):
    """A run of two steps on fresh batches, its second traced."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with memadvisor.profile(directory, trace_step=1) as prof:
        for _ in range(2):
            model(torch.randn(shape)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return prof.run.ranks[0]


def moments(rank):
    """(start of the forward, of the backward, end of the backward) of the traced step, from its start."""
    step = rank.traced_step
    spans = {s.kind: s for s in rank.spans if s.step == step.index and s.kind in ("forward", "backward")}
    return tuple(
        t - step.start_s
        for t in (spans["forward"].start_s, spans["backward"].start_s, spans["backward"].end_s)
    )


@pytest.mark.parametrize("name", BY_HAND)
def test_autograd_keeps_what_is_worked_out_by_hand(name, tmp_path):
    build, shape, expected = BY_HAND[name]
    rank = profiled(build(), shape, tmp_path / "run")
    kept = activations(traced_calls(rank))
    found = [
        (
            life.module,
            INPUT if life.category == "input" else life.operator,
            life.size_bytes,
            " ".join(life.saved_by).replace("aten::", ""),
        )
        for life in kept.lifetimes
    ]

    assert sorted(found) == sorted(expected)
    assert kept.saved_bytes == sum(size_bytes for _, _, size_bytes, _ in expected)
    forward_s, backward_s, end_s = moments(rank)
    for life in kept.lifetimes:
        assert (life.born_s >= forward_s) == (life.category != "input")
        assert life.born_s <= life.saved_s < backward_s
        assert backward_s < life.released_s <= end_s
        assert life.last_used_s > backward_s
        assert not life.is_held_elsewhere


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


leaves = st.sampled_from(["Linear", "ReLU", "LayerNorm", "Dropout"])
bodies = st.recursive(
    leaves, lambda inner: st.lists(inner, min_size=1, max_size=3) | st.tuples(inner), max_leaves=6
)


def built(body):
    """A list is a Sequential, a tuple of one a residual around it."""
    if isinstance(body, list):
        return nn.Sequential(*map(built, body))
    if isinstance(body, tuple):
        return Residual(built(body[0]))
    return {
        "Linear": lambda: nn.Linear(DIM, DIM),
        "ReLU": nn.ReLU,
        "LayerNorm": lambda: nn.LayerNorm(DIM),
        "Dropout": lambda: nn.Dropout(0.2),
    }[body]()


@settings(max_examples=5, deadline=None, derandomize=True)
@given(body=bodies)
def test_modules_keep_what_is_alive_for_the_backward_and_parents_keep_their_childrens(body):
    """When the backward begins nothing born in the step is alive but what modules keep, and the loss."""
    with tempfile.TemporaryDirectory() as directory:
        rank = profiled(nn.Sequential(nn.Linear(DIM, DIM), built(body)), (BATCH, DIM), f"{directory}/run")
    kept = activations(traced_calls(rank))
    step = rank.traced_step
    begin_s = moments(rank)[1] + step.start_s
    alive = {
        row.storage_id: row.size_bytes
        for row in rank.storages
        if row.phase != "baseline"
        and row.birth_s <= begin_s
        and (row.death_s is None or row.death_s > begin_s)
    }

    assert sum(module.saved_bytes for module in kept.modules) == sum(alive.values()) - LOSS_BYTES
    assert {life.storage_id for life in kept.lifetimes} <= alive.keys()
    for life in kept.lifetimes:
        parts = life.module.split(".")
        for depth in range(1, len(parts) + 1 if life.module else 0):
            (call,) = [c for c in rank.module_calls if c.module == ".".join(parts[:depth])]
            assert call.start_s <= life.saved_s + step.start_s <= call.end_s
