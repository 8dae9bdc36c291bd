"""Shapes that a run tells of its operators, whatever has become of the run."""

import pytest

from memadvisor.analyzers.shapes import given_and_weight, given_shapes
from memadvisor.run.records import Operator


def operator(shapes):
    return Operator("aten::convolution", "", "", "forward", 0.0, 1.0, 0, 0, shapes)


def test_shapes_are_those_of_the_arguments_in_their_order():
    convolution = operator("[[8, 3, 32, 32], [16, 3, 3, 3], [16]]")
    assert given_shapes(convolution) == [(8, 3, 32, 32), (16, 3, 3, 3), (16,)]
    assert given_and_weight(convolution) == ((8, 3, 32, 32), (16, 3, 3, 3))


def test_a_size_that_is_not_known_is_none():
    jagged = operator("[[8, null, 4], [4, 4]]")
    assert given_shapes(jagged) == [(8, None, 4), (4, 4)]
    assert given_and_weight(jagged) is None


@pytest.mark.parametrize(
    "shapes", [None, "", "forward", "8", "[8]", '[["a"]]', "[[1.5]]", "[[[1]]]", "{}", "[" * 100_000]
)
def test_what_cannot_be_read_are_no_shapes(shapes):
    assert given_shapes(operator(shapes)) == []
    assert given_and_weight(operator(shapes)) is None


def test_a_layer_without_a_weight_has_none():
    assert given_and_weight(operator("[[8, 3]]")) is None
