"""A tensor of two tensors, as quantised weights are: whole numbers and a scale for each row."""

import torch
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


class TwoParts(torch.Tensor):
    @staticmethod
    def __new__(cls, numbers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)

    def __init__(self, numbers, scale):
        self.numbers = numbers
        self.scale = scale

    @classmethod
    def of(cls, plain):
        scale = plain.abs().amax(1, keepdim=True) / 127
        return cls((plain / scale).round().to(torch.int8), scale)

    def whole(self):
        return self.numbers * self.scale

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["numbers"], parts["scale"])

    def __repr__(self):
        return f"TwoParts({list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return cls(func(args[0].numbers), func(args[0].scale))
        return func(*tree_map_only(cls, cls.whole, args), **tree_map_only(cls, cls.whole, kwargs or {}))
