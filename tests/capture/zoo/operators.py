"""What autograd and single operators do that a profiler may get wrong."""

from itertools import pairwise

import torch
from torch import nn
from training import train
from two_parts import TwoParts


def mlp(*widths):
    layers = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def distances():
    def loss_of(model):
        x = model(torch.randn(300, 32))
        return torch.cdist(x, x).logsumexp(1).mean()

    train(nn.Linear(32, 32), loss_of)


def distances_inside():
    class Distances(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(32, 32)

        def forward(self, x):
            x = self.inside(x)
            return torch.cdist(x, x).logsumexp(1)

    train(Distances(), lambda model: model(torch.randn(300, 32)).mean())


def penalty():
    """A gradient penalty: the backward of a backward."""

    def loss_of(model):
        x = torch.randn(128, 32, requires_grad=True)
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.pow(2).sum()

    train(mlp(32, 64, 1), loss_of)


def functional():
    """Gradients of each sample by torch.func, for their mean norm."""

    def loss_of(model):
        weights = dict(model.named_parameters())

        def loss_of_sample(weights, x):
            return torch.func.functional_call(model, weights, (x.unsqueeze(0),)).sum()

        gradients = torch.func.vmap(torch.func.grad(loss_of_sample), in_dims=(None, 0))(
            weights, torch.randn(32, 16)
        )
        return sum(gradient.pow(2).sum() for gradient in gradients.values()) / 32

    train(mlp(16, 32, 1), loss_of)


class Scaled(torch.autograd.Function):
    """Keeps a tensor and a number for its backward."""

    @staticmethod
    def forward(x, factor):
        return x.exp() * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.factor = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx, gradient):
        _, output = ctx.saved_tensors
        return gradient * output, None


def custom_function():
    class Custom(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(32, 64)

        def forward(self, x):
            return Scaled.apply(self.inside(x), 0.5)

    train(Custom(), lambda model: model(torch.randn(64, 32)).mean())


def complex_numbers():
    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.filter = nn.Parameter(torch.randn(33, dtype=torch.complex64))

        def forward(self, x):
            return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=64)

    train(Spectrum(), lambda model: model(torch.randn(64, 64)).pow(2).mean())


def tensor_hooks():
    """Hooks on tensors, and a second backward through a graph that was kept."""

    def loss_of(model):
        hidden = model[0](torch.randn(64, 32))
        hidden.register_hook(lambda gradient: gradient * 0.5)
        out = model[2](model[1](hidden)).mean()
        out.backward(retain_graph=True)
        return out * 2

    train(mlp(32, 64, 1), loss_of)


def views_and_in_place():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(32, 64)

        def forward(self, x):
            out = self.inside(x)
            out[:, ::2].mul_(2)  # every other column, in place
            wide = out[:1].expand(64, 64) + out.t().contiguous()
            wide.relu_()
            storage = torch.zeros(3, 64, 64)
            storage[1] = wide
            return storage.as_strided((64, 64), (1, 64), 4096)

    train(Views(), lambda model: model(torch.randn(64, 32)).pow(2).mean())


def empty_tensors():
    class Empty(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(32, 64)
            self.nothing = nn.Parameter(torch.zeros(0, 64))

        def forward(self, x):
            return self.inside(torch.cat([x, x[:0]])) + self.inside(x[:0]).sum() + self.nothing.sum()

    train(Empty(), lambda model: model(torch.randn(64, 32)).pow(2).mean())


def wrapper_subclass():
    """A quantised, frozen weight beside a trained one."""

    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Parameter(TwoParts.of(torch.randn(64, 64)), requires_grad=False)
            self.adapter = nn.Linear(64, 64)

        def forward(self, x):
            return torch.nn.functional.linear(x, self.frozen) + self.adapter(x)

    model = Quantised()
    trained = torch.optim.AdamW(model.adapter.parameters())
    train(model, lambda model: model(torch.randn(32, 64)).pow(2).mean(), trained)


def nested_strided():
    """Rows of unequal lengths in one tensor, which has no shape."""

    def loss_of(model):
        rows = torch.nested.nested_tensor([torch.randn(length, 32) for length in (40, 60)])
        return torch.nested.to_padded_tensor(model(rows), 0.0).square().mean()

    train(nn.Linear(32, 64), loss_of)


def loss_module():
    """A loss that is a module of its own, outside the model."""
    criterion = nn.CrossEntropyLoss()

    def loss_of(model):
        return criterion(model(torch.randn(64, 32)), torch.randint(0, 10, (64,)))

    train(mlp(32, 64, 10), loss_of)


KINDS = [
    distances, distances_inside, penalty, functional, custom_function, complex_numbers, tensor_hooks,
    views_and_in_place, empty_tensors, wrapper_subclass, nested_strided, loss_module,
]  # fmt: skip
