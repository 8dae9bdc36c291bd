"""Forward hooks of a script's on modules inside recomputed units: what looks on fires once, what takes part again."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memadvisor.plan import UnitPlan
from tests.engines.trainings import applied, make_plan

NAMES = tuple(f"blocks.{number}" for number in range(3))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3))
        self.down = nn.Linear(8, 8)

    @property
    def up(self):
        return self.inner[0]

    def forward(self, x):
        return x + torch.tanh(self.down(self.inner(x)))


class Model(nn.Module):
    def __init__(self, kind=Block):
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in NAMES)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def units(recompute=True, inner=False):
    return tuple(
        UnitPlan(name=name, zero_stage=0, recompute=recompute, parts=((f"{name}.inner",),) if inner else ())
        for name in NAMES
    )


PLANS = {
    "each": make_plan(1, policy="every-layer"),
    "products kept": make_plan(1, policy="selective"),
    "a stretch": make_plan(1, policy="chosen", units=units(), stretches=((NAMES[0], NAMES[-1]),)),
    "parts": make_plan(1, policy="chosen", units=units(recompute=False, inner=True)),
    "parts of what runs again": make_plan(1, policy="chosen", units=units(inner=True)),
}


def train(add_hooks, kind=Block, num_forwards=1):
    """`add_hooks` of a model returns what they have seen; what has been seen, the losses and the weights at the end."""
    torch.manual_seed(0)
    model = Model(kind)
    seen = add_hooks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = sum(model(torch.randn(4, 8)).square().mean() for _ in range(num_forwards))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return seen, losses, [value.tolist() for value in model.state_dict().values()]


def averaging(model):
    """Of each layer's outputs an average over all calls."""
    seen = {}

    def hook(module, inputs, output):
        seen[module] = 0.9 * seen.get(module, 0.0) + 0.1 * output.detach().square().sum().item()

    for block in model.blocks:
        for layer in (block.up, block.inner, block.down):
            layer.register_forward_hook(hook)
    return seen


def multiplying(model):
    """By a product of its own, which the next layer's could be taken for: it has that one's number and place."""
    seen, weight, bias = {}, torch.full((8, 8), 0.5), torch.full((8,), 0.5)

    def hook(module, inputs, output):
        product = nn.functional.linear(output.detach(), weight, bias)
        seen[module] = seen.get(module, 0.0) + product.sum().item()

    for block in model.blocks:
        block.inner.register_forward_hook(hook)
    return seen


@pytest.mark.parametrize("add_hooks", [averaging, multiplying])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_a_hook_that_looks_on_fires_once(plan, add_hooks):
    plain = train(add_hooks)
    with applied(plan):
        ours = train(add_hooks)
    assert list(ours[0].values()) == list(plain[0].values())
    assert ours[1:] == plain[1:]


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def test_products_are_kept_behind_a_hook_with_operators_of_its_own():
    with applied(PLANS["products kept"]):
        model = Model()
        multiplying(model)
        loss = model(torch.randn(4, 8)).square().mean()
        with Products() as again:
            loss.backward()
    assert again.count == 0


def per_sample(model):
    """Squared norms of single samples' gradients: a forward hook puts inputs on a stack, a backward hook takes them."""
    seen, stacks = [], {}
    for block in model.blocks[1:]:  # of a module none of whose inputs needs a gradient torch warns
        block.up.register_forward_hook(
            lambda module, inputs, output: stacks.setdefault(module, []).append(inputs[0].detach())
        )

        def backward(module, of_inputs, of_outputs):
            inputs = stacks[module].pop()
            gradients = torch.einsum("no,ni->noi", of_outputs[0], inputs)
            seen.append((gradients.square().sum().item(), len(stacks[module])))

        block.up.register_full_backward_hook(backward)
    return seen


def test_gradients_of_single_samples_are_the_same():
    plain = train(per_sample)
    with applied(PLANS["each"]):
        assert train(per_sample) == plain


def scaling(model):
    for block in model.blocks:
        block.up.register_forward_hook(lambda module, inputs, output: output * 0.5)


def noisy(model):
    """Draws numbers: the dropout behind it must find the generator where it was."""
    seen = []
    for block in model.blocks:
        block.up.register_forward_hook(lambda module, inputs, output: seen.append(torch.rand(1).item()))


def in_place(model):
    def hook(module, inputs, output):
        output.mul_(0.5)

    for block in model.blocks:
        block.up.register_forward_hook(hook)


@pytest.mark.parametrize("add_hooks", [scaling, noisy, in_place])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_a_hook_that_takes_part_fires_again(plan, add_hooks):
    plain = train(add_hooks)
    with applied(plan):
        assert train(add_hooks) == plain


class Skipping(Block):
    """Adds what a hook of the script's has stored of a layer's output."""

    def forward(self, x):
        return self.down(self.inner(x)) * self.stored


def storing(model):
    for block in model.blocks:
        block.up.register_forward_hook(
            lambda module, inputs, output, block=block: setattr(block, "stored", output)
        )


def test_what_a_hook_hands_on_inside_a_unit_is_of_the_same_forward():
    """Of two forwards before the backward, the first must not meet the second one's."""
    plain = train(storing, Skipping, num_forwards=2)
    with applied(PLANS["each"]):
        assert train(storing, Skipping, num_forwards=2) == plain


def test_hooks_are_the_scripts_own_behind_a_run():
    def fires_once(model):
        handles = []

        def hook(module, inputs, output):
            handles.pop().remove()

        handles.append(model.blocks[0].up.register_forward_hook(hook))
        model.blocks[0].down.register_forward_hook(hook_that_stays)
        return model

    def hook_that_stays(module, inputs, output):
        return None

    with applied(PLANS["each"]):
        model = train(fires_once)[0]
    assert not model.blocks[0].up._forward_hooks
    assert list(model.blocks[0].down._forward_hooks.values()) == [hook_that_stays]
