"""An operator's share of the time: as the traced step has it on a CPU, by the roofs of an accelerator."""

from dataclasses import replace

import pytest

from memadvisor.analyzers.time_shares import TimeShares
from memadvisor.run.records import Operator
from tests.make_run import make_run

H100 = "NVIDIA H100 80GB HBM3"  # 3.35 TB/s; 67 TFLOP/s in float32, 494.5 in tf32, 989.5 in bfloat16
DTYPES = [("float32", None, 67e12), ("float32", "tf32", 494.5e12), ("bfloat16", None, 989.5e12)]


def operator(name, seconds, flops, size_bytes):
    return Operator(name, "m", "m", "forward", 1.0, 1.0 + seconds, flops, flops, None, size_bytes, size_bytes)


PRODUCT, GELU = operator("aten::mm", 0.25, 10**12, 10**6), operator("aten::gelu", 0.5, 0, 10**9)


def shares(device, name, rows, dtype="float32", matmul=None):
    (rank,) = make_run(num_ranks=1, device=device, device_name=name).ranks
    parameters = tuple(replace(each, dtype=dtype) for each in rank.parameters)
    process = replace(rank.process, float32_matmul=matmul)
    of = TimeShares(replace(rank, process=process, parameters=parameters, storages=())).of(rows)
    return None if of is None else [of[id(row)] for row in rows]


def test_on_a_cpu_it_is_what_was_taken():
    assert shares("cpu", "whatever", (PRODUCT, GELU)) == [0.25, 0.5]


@pytest.mark.parametrize(("dtype", "matmul", "flops_per_s"), DTYPES)
def test_on_an_accelerator_it_is_the_least_that_its_roofs_allow(dtype, matmul, flops_per_s):
    """Products at the peak of what they run in, all else by its bytes."""
    found = shares("cuda:0", H100, (PRODUCT, GELU), dtype, matmul)
    assert found == pytest.approx([1e12 / flops_per_s, 2e9 / 3.35e12])


def test_nothing_is_known_of_a_strange_card_or_an_operator_without_bytes():
    assert shares("cuda:0", "a card of nobody's", (PRODUCT,)) is None
    assert shares("cuda:0", H100, (PRODUCT, replace(GELU, read_bytes=None))) is None
