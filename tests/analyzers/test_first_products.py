"""Where cuBLAS's workspaces come into being in a training's first step."""

import dataclasses

from memadvisor.analyzers.first_products import first_products
from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.allocation_sequence import captured_sequence
from memadvisor.cost.allocator_settings import MIB
from memadvisor.run.records import CUBLAS, Operator
from tests.cuda_run import cuda_run
from tests.make_run import storage


class Piece:
    def __init__(self, start_s):
        self.start_s = start_s


PIECES = [Piece(0.0), Piece(1.0), Piece(2.0)]


def operator(name, phase, start_s):
    return Operator(
        name=name,
        module="",
        unit="",
        phase=phase,
        start_s=start_s,
        end_s=9.0,
        executed_flops=0,
        model_flops=0,
    )


def test_they_are_the_first_of_the_forward_and_of_the_backward():
    rows = [
        operator("aten::relu", "forward", 0.1),
        operator("aten::addmm", "forward", 1.5),
        operator("aten::mm", "forward", 1.2),
        operator("aten::bmm", "backward", 2.5),
        operator("aten::mm", "optimizer", 0.05),
    ]
    assert first_products(rows, [], PIECES) == [(1, 1.2), (2, 2.5)]


def test_a_product_asks_for_one_when_its_result_is_there():
    rows = [operator("aten::mm", "forward", 1.2)]
    result, before = storage(birth_s=1.25), storage(birth_s=1.1)
    ((piece, at),) = first_products(rows, [storage(birth_s=1.4), result, before], PIECES)

    assert piece == 1
    assert 1.25 < at < 1.2500001


def test_a_convolution_without_cudnn_is_one_and_with_it_none():
    rows = [operator("aten::convolution", "forward", 0.1)]
    inside = storage(birth_s=0.2, operator="inside aten::_slow_conv2d_forward")

    assert first_products(rows, [inside], PIECES) == [(0, 0.2)]
    assert first_products(rows, [], PIECES) == []


def test_a_workspace_is_allocated_once_in_the_first_step_where_it_comes():
    """And not with the parameters, whose segments it would fill."""
    run = cuda_run()
    (rank,) = run.ranks
    baseline = [row for row in rank.storages if row.phase == "baseline"]
    space = dataclasses.replace(
        baseline[0],
        storage_id=10**6,
        size_bytes=8 * MIB + 512,
        category="other",
        operator=CUBLAS,
        death_s=None,
    )
    rank = dataclasses.replace(rank, storages=(space, *rank.storages))
    step = captured_step(dataclasses.replace(run, ranks=(rank,)))
    changes = captured_sequence(step.storages, step.segments)
    places = [(c.step, c.place) for c in changes if c.size_bytes == space.size_bytes]

    assert len(places) == 1 and places[0][0] == 0
    assert places[0][1].startswith("forward of ")
