"""Stretches of units that run again together, nested in any way: losses stay bitwise those of the plain run."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from memadvisor.plan import UnitPlan
from tests.engines.trainings import Block, NormBlock, Noted, applied, make_plan

NAMES = [f"blocks.{number}" for number in range(6)]


class Pair(nn.Module):
    """Takes and returns two tensors, one of which it passes through."""

    def __init__(self, dim):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(dim, dim), nn.Tanh())

    def forward(self, x, scale=None):
        return self.inner(x) * (1.0 if scale is None else scale)


class Mixed(nn.Module):
    """A block of any kind, so that all are of one class."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args[: 1 + isinstance(self.inner, Pair)])


class Model(nn.Module):
    """`between` is the script's own code between two blocks; `skip` adds an early output to a late input."""

    def __init__(self, kinds, between=None, skip=False):
        super().__init__()
        self.embed = nn.Linear(5, 9)
        self.blocks = nn.ModuleList(kind() for kind in kinds)
        self.head = nn.Linear(9, 1)
        self.between = between
        self.skip = skip

    def forward(self, x):
        x = self.embed(x)
        early = None
        for number, block in enumerate(self.blocks):
            if self.between is not None and number:
                x = self.between(x, number)
            x = block(x, early) if self.skip and number == 4 else block(x)
            early = x if number == 1 else early
        return self.head(x)


def make_model(kinds, **options):
    torch.manual_seed(1)
    return Model(kinds, **options)


KINDS = {
    "dropout": lambda: Block(9, 0.3),
    "norm": lambda: NormBlock(9),
    "pair": lambda: Pair(9),
}


def train(model, steps=3, bf16=False, twice=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(3)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = model(torch.randn(4, 3, 5)).float().square().mean()
        if twice:
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def equal(ours, plain):
    return ours[0] == plain[0] and all(torch.equal(ours[1][name], plain[1][name]) for name in plain[1])


def nested_plan(stretches, alone=()):
    names = ["embed", *NAMES, "head"]
    units = tuple(UnitPlan(name=name, zero_stage=0, recompute=name in alone) for name in names)
    pairs = tuple((NAMES[first], NAMES[last]) for first, last in stretches)
    return make_plan(1, policy="chosen", units=units, stretches=pairs)


@st.composite
def families(draw, first=0, last=5, depth=3):
    """Stretches of two and more of these units that nest."""
    found = []
    while first < last and depth:
        begin = draw(st.integers(first, last))
        end = draw(st.integers(begin, last))
        if end > begin:
            found.append((begin, end))
            inner = draw(families(begin, end, depth - 1))
            found += [stretch for stretch in inner if stretch != (begin, end)]
        first = end + 1
    return found


@given(
    families(),
    st.sets(st.sampled_from(NAMES)),
    st.lists(st.sampled_from(sorted(KINDS)), min_size=6, max_size=6),
    *(st.booleans() for _ in range(3)),
)
@settings(max_examples=8, deadline=None)
def test_losses_weights_and_running_statistics_are_bitwise_equal(stretches, alone, kinds, bf16, skip, twice):
    stretches = list(dict.fromkeys(stretches))
    made = [lambda kind=kind: Mixed(KINDS[kind]()) for kind in kinds]
    plain = train(make_model(made, skip=skip), bf16=bf16, twice=twice)
    notes = []
    with applied(nested_plan(stretches, alone), note=lambda level, text: notes.append((level, text))):
        ours = train(make_model(made, skip=skip), bf16=bf16, twice=twice)

    assert equal(ours, plain)
    assert not [text for level, text in notes if level == "warning"]


def highest_kept(plan, steps=2):
    """The most bytes of blocks' tensors alive at the end of a forward, and while the backward runs."""
    kinds = [lambda: Block(9, 0.0)] * 6
    model = make_model(kinds)
    calls = []
    for block in model.blocks:
        block.inner = counted(block.inner, calls)
    with applied(plan):
        train(model, steps=steps)
    return len(calls) / steps / 6


def counted(inner, calls):
    def run(x):
        calls.append(1)
        return inner(x)

    return run


def test_each_unit_runs_once_more_for_each_stretch_around_it_that_runs_it():
    """Of 0..5 with 0..3 and 0..1 inside: 0 and 1 run 4 times, 2 and 3 three times, 4 and 5 twice."""
    assert highest_kept(nested_plan([])) == 1
    assert highest_kept(nested_plan([(0, 5)])) == 2
    assert highest_kept(nested_plan([(0, 5), (0, 3), (0, 1)])) == pytest.approx((4 * 2 + 3 * 2 + 2 * 2) / 6)


def test_an_inner_stretch_at_the_end_is_not_run_by_the_outer_one():
    assert highest_kept(nested_plan([(0, 5), (3, 5)])) == 2


def saved_bytes(model):
    """Bytes of all tensors that a forward leaves behind beyond those that were there."""
    before = {id(tensor.untyped_storage()): tensor for tensor in living_tensors()}
    loss = model(torch.randn(64, 3, 5)).sum()
    sizes = {}
    for found in living_tensors():
        if id(found.untyped_storage()) not in before:
            sizes[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    del loss
    return sum(sizes.values())


def living_tensors():
    """Those with a storage; other tests may have left sparse ones."""
    gc.collect()
    return [t for t in gc.get_objects() if type(t) is torch.Tensor and t.layout is torch.strided]


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (
            lambda x, number: x * 1.5 if number == 3 else x,
            "'blocks.3' does not take what the unit before it returns",
        ),
        (lambda x, number: x.mul_(1.5) if number == 3 else x, "'blocks.3' does not take"),
        (lambda x, number: torch.nn.functional.dropout(x, 0.5), "'blocks.1' does not take"),
    ],
)
def test_code_between_units_breaks_a_stretch_with_one_warning_and_right_results(between, reason):
    kinds = [KINDS["dropout"]] * 6
    plain = train(make_model(kinds, between=between))
    notes = []
    with applied(nested_plan([(0, 5), (1, 3)]), note=lambda level, text: notes.append(text)):
        ours = train(make_model(kinds, between=between))

    assert equal(ours, plain)
    assert len(notes) == 1 and reason in notes[0] and "one by one" in notes[0]


class Dropping(Model):
    """Leaves a block out by chance, as LayerDrop does."""

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            if torch.rand(()) > 0.3:
                x = block(x)
        return self.head(x)


def test_units_that_are_left_out_by_chance_break_the_stretch_and_not_the_results():
    def made():
        torch.manual_seed(1)
        return Dropping([KINDS["dropout"]] * 6)

    plain = train(made(), steps=6)
    notes = []
    with applied(nested_plan([(0, 5)]), note=lambda level, text: notes.append(text)):
        ours = train(made(), steps=6)

    assert equal(ours, plain)
    assert len(notes) == 1 and "in its turn" in notes[0]


class Forces(nn.Module):
    """Asks for a gradient of its own in its forward, as models of forces do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(9, 9), nn.Tanh())

    def forward(self, x):
        energy = self.inner(x).square()
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return x + force


@pytest.mark.parametrize("stretches", [[(0, 5)], [(0, 5), (1, 3)]])
def test_a_unit_that_walks_a_graph_in_its_forward(stretches):
    kinds = [Forces] * 6
    plain = train(make_model(kinds))
    with applied(nested_plan(stretches)):
        ours = train(make_model(kinds))

    assert equal(ours, plain)


def test_a_stretch_keeps_one_input_in_the_place_of_six():
    """After a forward: what head and loss keep, and of the blocks the input of the first one alone."""
    model = make_model([lambda: Block(9, 0.0)] * 6)
    sizes = {}
    for name, plan in {
        "alone": nested_plan([], NAMES),
        "together": nested_plan([(0, 5)], NAMES),
    }.items():
        with applied(plan):
            train(model, steps=1)
            sizes[name] = saved_bytes(model)

    one_input = 64 * 3 * 9 * 4
    assert sizes["alone"] - sizes["together"] == 5 * one_input


class Watched(nn.Module):
    """`gone`: of each call, which of the outputs that were `made` before it are no more."""

    def __init__(self, made, gone):
        super().__init__()
        self.inner, self.made, self.gone = nn.Sequential(nn.Linear(9, 9), nn.Tanh()), made, gone

    def forward(self, x):
        self.gone.append([output.expired() for output in self.made])
        output = self.inner(x)
        self.made.append(StorageWeakRef(output.untyped_storage()))
        return output


def test_a_second_run_lets_go_of_what_nobody_takes_any_more():
    """Blocks 0 and 1, inside an inner stretch, are done with when block 5 runs; block 2's output is block 3's input."""
    made, gone = Noted(), Noted()
    model = make_model([lambda: Watched(made, gone)] * 6)
    with applied(nested_plan([(0, 5), (0, 2)])):
        model(torch.randn(4, 3, 5)).square().mean().backward()

    in_second_run = len(NAMES)
    assert gone[in_second_run + 5][in_second_run:] == [True, True, False, False, False]


class Skipping(nn.Module):
    """Returns what the one behind it takes, and what the script alone adds up, as WaveNet's skips; `gone` is of these."""

    def __init__(self, made, gone):
        super().__init__()
        self.inner, self.skip = nn.Sequential(nn.Linear(9, 9), nn.Tanh()), nn.Linear(9, 9)
        self.made, self.gone = made, gone

    def forward(self, x):
        self.gone.append([output.expired() for output in self.made])
        x = self.inner(x)
        skip = self.skip(x)
        self.made.append(StorageWeakRef(skip.untyped_storage()))
        return x, skip


class AddingUp(Model):
    def forward(self, x):
        x, total = self.embed(x), 0
        for block in self.blocks:
            x, skip = block(x)
            total = total + skip
        return self.head(x + total)


def test_a_second_run_lets_go_of_what_only_the_script_has_taken():
    """Beside another output of the same call, which the next unit takes."""
    made, gone = Noted(), Noted()
    model = AddingUp([lambda: Skipping(made, gone)] * len(NAMES))
    with applied(nested_plan([(0, 5)])):
        model(torch.randn(4, 3, 5)).square().mean().backward()

    in_second_run = len(NAMES)
    assert gone[in_second_run + 3][in_second_run:] == [True, True, True]


class Joining(nn.Module):
    """Keeps nothing of what it is called with."""

    def __init__(self):
        super().__init__()
        self.down = nn.Linear(18, 9)

    def forward(self, x):
        return self.down(torch.cat([x, -x], -1).tanh())


def test_each_loss_of_a_stretch_may_have_its_backward_by_itself():
    """That of an inner stretch first: the one around it still has what it runs again with."""

    def gradients():
        model = make_model([Joining] * 6)
        taken = []
        handle = model.blocks[2].register_forward_hook(lambda module, args, output: taken.append(output))
        loss = model(torch.randn(4, 3, 5)).square().mean()
        handle.remove()
        taken[0].sum().backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    torch.manual_seed(3)
    plain = gradients()
    torch.manual_seed(3)
    with applied(nested_plan([(0, 5), (0, 2)])):
        ours = gradients()

    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
