"""What stands for the values of parameters that are released."""

import pytest

from memadvisor.cost.states import UnitStates
from memadvisor.run.records import Parameter

STATES = UnitStates(
    name="a",
    parameters=(
        Parameter("a.weight", "a", "[4, 5]", "float32", 20, 80, True, ""),
        Parameter("a.scale", "a", "[2]", "bfloat16", 2, 4, False, ""),
    ),
    optimizer_bytes=0,
    optimizer_scalar_bytes=0,
)


@pytest.mark.parametrize(
    ("device", "param_dtype", "size_bytes"),
    [("cpu", None, 4 + 2), ("cpu", "bfloat16", 2 + 2), ("cuda:0", None, 2 * 512)],
)
def test_one_element_stands_for_each_parameter_and_has_a_block_of_a_gpu(device, param_dtype, size_bytes):
    assert STATES.stand_in_bytes(device, param_dtype) == size_bytes
