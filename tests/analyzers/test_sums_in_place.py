"""Sums that the traced step makes anew, and others make in the memory of what they are added to."""

import dataclasses

import pytest

from memadvisor.analyzers.sums_in_place import sums_in_place
from memadvisor.run.records import Parameter
from tests.make_run import storage

BIAS = Parameter("net.layer.bias", "net", "[16]", "float32", 16, 64, True, "")
PRODUCT = storage(
    storage_id=1, operator="aten::mm", module="net.layer", shape="[12, 16]", birth_s=1.0, death_s=2.1
)
SUM = storage(
    storage_id=2, operator="aten::add", module="net.layer", shape="[3, 4, 16]", birth_s=2.0, death_s=9.0
)
NEXT = storage(storage_id=3, operator="aten::gelu", birth_s=3.0)


def test_a_bias_is_added_to_the_product():
    assert sums_in_place([NEXT, SUM, PRODUCT], [BIAS]) == {2: 1}


@pytest.mark.parametrize(
    ("product", "total", "parameters"),
    [
        ({"death_s": 5.0}, {}, [BIAS]),  # somebody else needs the product
        ({"death_s": 1.9}, {}, [BIAS]),  # it is gone before
        ({}, {"shape": "[3, 4, 8]"}, [BIAS]),
        ({}, {"dtype": "bfloat16"}, [BIAS]),
        ({}, {"module": "net.other"}, [BIAS]),
        ({}, {}, []),  # a sum of two products, of a module without a bias
        ({"operator": "aten::bmm"}, {}, [BIAS]),  # attention's scores and a mask
        ({}, {"operator": "aten::mul"}, [BIAS]),
    ],
)
def test_no_other_sum_is_taken_for_one(product, total, parameters):
    rows = [dataclasses.replace(PRODUCT, **product), dataclasses.replace(SUM, **total), NEXT]
    assert sums_in_place(rows, parameters) == {}


def test_a_gradient_is_added_to_the_one_that_ends_where_the_sum_begins():
    """And not to the other, of as many bytes, that is gone right after; one that somebody still has stays as it is, and the
    sum is made anew in any step."""
    first = storage(storage_id=1, phase="backward", shape="[3, 4]", birth_s=1.0, death_s=2.0)
    kept = dataclasses.replace(first, storage_id=5, birth_s=1.5, death_s=8.0)
    second = dataclasses.replace(first, storage_id=4, birth_s=1.7, death_s=2.1)
    total = dataclasses.replace(first, storage_id=2, operator="aten::add", birth_s=2.0, death_s=9.0)

    assert sums_in_place([first, kept, second, total, NEXT], []) == {2: 1}
    assert sums_in_place([kept, second, total, NEXT], []) == {}
    assert sums_in_place([dataclasses.replace(first, shape="[12]"), total, NEXT], []) == {}
