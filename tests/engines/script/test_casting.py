"""What a call returns in another dtype, in containers of the same classes."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from memadvisor.engines.script.casting import cast

BF16 = torch.bfloat16


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Output:
    """As models of libraries return it, that torch's pytrees do not know."""

    loss: Any = None
    more: Any = None
    unset: Any = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any

    def __post_init__(self):
        if isinstance(self.value, torch.Tensor) and self.value.dtype is torch.float32:
            raise AssertionError("made anew")


class Named(collections.OrderedDict):
    """A mapping of its own class, with attributes beside its items, as ModelOutput is."""

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        super().__setattr__(name, value)


def named(**items):
    made = Named()
    for name, value in items.items():
        made[name] = value
    return made


def narrow(*shape):
    return torch.ones(shape or (2,), dtype=BF16)


def to_float(values):
    return cast(values, torch.float32, lambda tensor: tensor.dtype is BF16)


def tensors(value):
    """All tensors in a value, by hand."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in tensors(each)]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in tensors(each)]
    if dataclasses.is_dataclass(value):
        return [
            tensor
            for field in dataclasses.fields(value)
            for tensor in tensors(getattr(value, field.name, None))
        ]
    return []


LEAVES = st.sampled_from([None, 3, "text", b"x", object()]) | st.sampled_from(
    [BF16, torch.float16, torch.float32, torch.float64, torch.int64]
).map(lambda dtype: torch.ones(2, dtype=dtype))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(lambda items: named(**items)),
        st.tuples(inner, inner).map(lambda both: Pair(*both)),
        st.tuples(inner, inner).map(lambda both: Output(*both)),
        inner.filter(lambda each: not isinstance(each, torch.Tensor) or each.dtype is not torch.float32).map(
            Frozen
        ),
    ),
    max_leaves=8,
)


def shape_of(value):
    """Classes and keys, without what tensors are."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    if isinstance(value, dict):
        return type(value), [(key, shape_of(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [shape_of(each) for each in value]
    if dataclasses.is_dataclass(value):
        return type(value), [shape_of(getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    return value


@given(VALUES)
def test_narrow_tensors_alone_are_cast_and_containers_stay_what_they_are(value):
    before = [(tensor, tensor.dtype) for tensor in tensors(value)]
    shape = shape_of(value)
    made = to_float(value)

    assert shape_of(made) == shape == shape_of(value)
    assert [
        (tensor, tensor.dtype) for tensor in tensors(value)
    ] == before  # nothing of the model's is changed
    for (tensor, dtype), other in zip(before, tensors(made), strict=True):
        if dtype is BF16:
            assert other.dtype is torch.float32
        else:
            assert other is tensor
    if all(dtype is not BF16 for _, dtype in before):
        assert made is value


def test_a_mapping_of_its_own_class_has_its_attributes_too():
    made = to_float(named(logits=narrow(), loss=torch.ones(())))
    assert type(made) is Named and list(made) == ["logits", "loss"]
    assert made.logits is made["logits"] and made.logits.dtype is torch.float32


def test_a_tensor_that_is_there_twice_is_cast_once():
    tensor = narrow()
    made = to_float({"a": tensor, "b": [tensor, Output(tensor)]})
    assert made["a"] is made["b"][0] is made["b"][1].loss


def test_a_container_that_holds_itself_is_looked_through_once():
    node = Output(narrow())
    node.more = [node]
    made = to_float(node)
    assert made.loss.dtype is torch.float32 and node.loss.dtype is BF16
    assert made.more[0] is node


def test_gradients_go_through():
    tensor = narrow().requires_grad_()
    to_float(Output(tensor)).loss.sum().backward()
    assert tensor.grad.dtype is BF16


def test_a_packed_sequence_stays_one():
    packed = pack_sequence([narrow(3, 2), narrow(1, 2)])
    made = to_float(packed)
    assert type(made) is type(packed) and made.data.dtype is torch.float32
    assert made.batch_sizes is packed.batch_sizes


@pytest.mark.parametrize("value", [Output, Pair, int, torch.distributions.Normal(0.0, 1.0)])
def test_what_is_no_container_is_left_as_it_is(value):
    assert to_float(value) is value
