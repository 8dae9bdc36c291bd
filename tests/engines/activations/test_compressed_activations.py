"""Units whose activations are rounded train nearly as without, take as much less memory as is told, and leave no trace."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memadvisor.activation_bits import rounded_bytes
from memadvisor.engines.activations import saved_activations
from memadvisor.engines.activations.compressed_activations import Rounded
from memadvisor.engines.apply import apply
from memadvisor.errors import PlanError
from memadvisor.plan import UnitPlan
from memadvisor.plan_checks import check_plan
from tests.engines.activations.test_offloaded_activations import Training, Wide, assert_equal, stack
from tests.engines.trainings import Model, applied, make_plan


@pytest.fixture(autouse=True)
def no_tensor_is_too_small(monkeypatch):
    monkeypatch.setattr(saved_activations, "MIN_BYTES", 1)


def by_name(names, bits=8, recomputed=(), **changes):
    units = tuple(
        UnitPlan(
            name=name,
            zero_stage=0,
            recompute=name in recomputed,
            activation_bits=None if name in recomputed else bits,
        )
        for name in (*names, *recomputed)
    )
    return make_plan(1, units=units, policy="chosen", **changes)


@pytest.fixture
def made(monkeypatch):
    """Every storage that is rounded: what it was, its bits, and itself."""
    found, original = [], Rounded.__init__

    def noting(stored, values, packed, bits, *, is_relu):
        original(stored, values, packed, bits, is_relu=is_relu)
        found.append((values.clone(), bits, is_relu, packed.nbytes))

    monkeypatch.setattr(Rounded, "__init__", noting)
    return found


def gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters()])


@pytest.mark.parametrize(("bits", "allowed"), [(8, 0.02), (4, 0.25), (2, 1.2)])
def test_gradients_are_near_and_on_average_the_same(bits, allowed):
    torch.manual_seed(0)
    model, x = stack(2), torch.randn(64, 8)
    plain = gradients(model, x)
    with applied(make_plan(1, activation_bits=bits)):
        found = [gradients(model, x) for _ in range(16)]
    assert torch.equal(gradients(model, x), plain)
    near = [float((one - plain).norm() / plain.norm()) for one in found]
    mean = float((torch.stack(found).mean(0) - plain).norm() / plain.norm())
    assert 0 < max(near) < allowed
    assert mean < max(near) / 2  # 16 of them: a quarter, but for what is not linear


@pytest.mark.parametrize("options", [{}, {"batch_norm": True, "dropout": 0.3}, {"checkpointed": True}])
def test_losses_stay_close_and_random_numbers_are_the_scripts(options):
    """Dropout draws what it draws without a plan; several graphs alive, and a second backward, find what they need."""
    training = Training(options=tuple(options.items()), num_alive=2, retains=True, evaluates=True)
    plain = training.run()
    after = torch.get_rng_state()
    with applied(make_plan(1, activation_bits=8)):
        losses, weights = training.run()
        assert torch.equal(torch.get_rng_state(), after)
    assert losses == pytest.approx(plain[0], rel=2e-2)
    assert losses[: training.num_alive] == plain[0][: training.num_alive]  # no forward is changed
    assert weights.keys() == plain[1].keys()
    assert_equal(training.run(), plain)


def test_where_nothing_qualifies_all_is_bitwise_as_without(made, monkeypatch):
    training = Training(options=(("dropout", 0.2),))
    plain = training.run()
    monkeypatch.setattr(saved_activations, "MIN_BYTES", 2**30)
    with applied(make_plan(1, activation_bits=2)):
        assert_equal(training.run(), plain)
    assert made == []


def test_a_run_is_the_same_each_time():
    training = Training()
    runs = []
    for _ in range(2):
        with applied(make_plan(1, activation_bits=2)):
            runs.append(training.run())
    assert_equal(*runs)
    assert runs[0][0] != training.run()[0]


class Kinds(nn.Module):
    """A unit that keeps one of everything."""

    def __init__(self, dim=64):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, dim)
        self.register_buffer("table", torch.ones(32, dim))

    def forward(self, x, weights):
        y = self.norm(x)  # keeps x, mean and rstd
        y = self.linear(y) * self.table * weights  # its input; the table and weights, and what they are times
        y = F.relu(y)  # its result
        y = F.dropout(y, 0.5)  # 0 and 2, by chance
        y = y * y.detach().sum(1, keepdim=True)  # numbers that need no gradient
        y = y.masked_fill(y > 1, 0.0)  # booleans
        y = y / y.square().mean(1, keepdim=True).add(1).sqrt()  # one of a row, with a gradient
        best = y.max(1, keepdim=True)  # indices
        return y + best.values


def test_what_is_rounded_is_what_has_a_gradient_and_masks_are_exact(made):
    torch.manual_seed(0)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.kinds = nn.Linear(64, 64), nn.ModuleList([Kinds(), Kinds()])

        def forward(self, x):
            weights = torch.full((32, 64), 0.7)
            return self.kinds[1](self.kinds[0](self.first(x), weights), weights)

    model = Whole()
    x = torch.randn(32, 64)
    with applied(by_name(["kinds.0"], 4)):
        loss = model(x).sum()
        loss.backward()
    kinds = [(values.dtype, values.numel(), bits, is_relu) for values, bits, is_relu, _ in made]
    whole = 32 * 64
    assert (torch.float32, whole, 4, True) in kinds  # of the ReLU
    assert (torch.bool, whole, 1, False) in kinds
    masks = [values for values, bits, _, _ in made if bits == 1 and values.dtype == torch.float32]
    assert [sorted(set(mask.tolist())) for mask in masks] == [[0.0, 2.0]]  # of the dropout
    assert all(size == whole for _, size, _, _ in kinds)  # statistics of rows are not among them
    rounded = [values for values, bits, _, _ in made if bits == 4]
    assert not any(torch.equal(values, torch.ones(whole)) for values in rounded)
    assert not any(torch.equal(values, torch.full((whole,), 0.7)) for values in rounded)
    assert all(nbytes == rounded_bytes(values.numel(), bits) for values, bits, _, nbytes in made)


def test_weights_that_autocast_has_cast_stay_exact(made):
    model, x = stack(2), torch.randn(16, 8)
    with applied(by_name(["1"])), torch.autocast("cpu", torch.bfloat16):
        model(x).sum().backward()
    casts = [parameter.detach().bfloat16().flatten() for parameter in model[1].parameters()]
    assert made and not any(torch.equal(values, cast) for values, *_ in made for cast in casts)


def test_what_is_infinite_stays_exact(made):
    class Masked(Wide):
        def forward(self, x):
            scores = self.up(x).masked_fill(torch.eye(16, 128).bool(), float("-inf"))
            return self.down(scores.logsumexp(1, keepdim=True) * scores.exp())

    model, x = nn.Sequential(Masked(), Masked(), nn.Linear(64, 1)), torch.randn(16, 64, requires_grad=True)
    plain = gradients(model, x)
    with applied(by_name(["0"])):
        assert float((gradients(model, x) - plain).norm() / plain.norm()) < 0.05
    assert all(bool(values.isfinite().all()) for values, *_ in made if values.is_floating_point())


def test_bytes_between_forward_and_backward_are_as_told():
    """All views of a storage share one copy, and it goes with the graph."""
    with applied(make_plan(1, activation_bits=4)) as found:
        model = stack(3)
        output = model(torch.ones(256, 8))
        sizes = [stored.packed.nbytes for stored in found._rounding.known.values()]
        wide, narrow = rounded_bytes(256 * 128, 4), rounded_bytes(256 * 64, 4)
        assert sorted(sizes) == sorted([wide, narrow] * 3)  # of each block its input, and the tanh's result
        del output
        assert len(found._rounding.known) == 0
        model(torch.ones(256, 8)).sum().backward()
        assert len(found._rounding.known) == 0


def test_recomputed_units_keep_their_input_exactly(made):
    training = Training()
    plain = training.run()
    with applied(by_name([], recomputed=["blocks.0", "blocks.1", "blocks.2"])):
        assert_equal(training.run(), plain)
    with applied(make_plan(1, policy="every-layer", activation_bits=2)):
        assert_equal(training.run(), plain)
    assert made == []


@pytest.mark.parametrize("when", ["inside", "after"])
def test_a_saved_tensor_that_is_modified_in_place_is_found_out(when):
    from tests.engines.activations.test_offloaded_activations import Writes

    with applied(by_name(["0"])):
        model = nn.Sequential(Writes(when), nn.Linear(64, 1))
        loss = model(torch.randn(8, 64)).sum()
        if when == "after":
            with torch.no_grad():
                model[0].z.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_storage_that_is_saved_changed_and_saved_again_is_rounded_twice():
    class Twice(Wide):
        def forward(self, x):
            y = self.up(x) * 1.0
            self.first = y.sin()  # keeps y as it is now, for a backward that never comes
            y.add_(3)
            return self.down(y.square())

    torch.manual_seed(0)
    model, x = nn.Sequential(Twice(), Twice(), nn.Linear(64, 1)), torch.randn(16, 64)
    plain = gradients(model, x)
    with applied(by_name(["0", "1"])):
        assert float((gradients(model, x) - plain).norm() / plain.norm()) < 0.05


def test_the_plan_says_so_before_the_first_step_and_compiled_models_are_refused():
    notes = []
    with applied(
        make_plan(1, activation_bits=4, compressed_units=("blocks.*",)),
        note=lambda level, text: notes.append(text),
    ) as found:
        assert ["lossy" in note and "4 bits" in note for note in notes] == [True]
        model = Model()
        model(torch.zeros(4, 6, dtype=torch.long))
        assert sorted(name for name, _ in found._rounding._units.values()) == [
            f"blocks.{i}" for i in range(3)
        ]
    model = torch.compile(Model(), backend="eager")
    with pytest.raises(PlanError, match="Rounding of activations cannot"):
        apply(make_plan(1, activation_bits=4), model)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (make_plan(1, activation_bits=3), "activation_bits 3"),
        (make_plan(1, activation_bits=8, activation_tier="disk"), "rounds activations"),
        (
            make_plan(
                1,
                policy="chosen",
                units=(UnitPlan(name="a", zero_stage=0, recompute=True, activation_bits=8),),
            ),
            "rounds activations",
        ),
    ],
)
def test_plans_that_cannot_be_are_refused(plan, why):
    with pytest.raises(PlanError, match=why):
        check_plan(plan, "This plan")
