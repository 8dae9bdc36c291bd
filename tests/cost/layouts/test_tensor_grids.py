"""Grids of tensor-parallel ranks: what each holds and what travels, by hand; a grid of one rank is no parallelism."""

import pytest

from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.cost.layouts.memory import device_contents, stage_parameters
from memadvisor.cost.layouts.tensor_grids import grid_lines, grid_seconds, local_products
from memadvisor.errors import UsageError
from memadvisor.layout import Layout, TrainingStep
from tests.cost.layouts.nodes import make_cluster

MODEL = load_architecture("gpt3-1.3b")
GRIDS = [("2d", 4, 1), ("2.5d", 8, 2), ("3d", 8, 1)]


class Bytes:
    """A group that takes a second for each byte that comes to a rank."""

    def __init__(self, size):
        self.size = size

    def seconds(self, operation, size_bytes):
        return size_bytes * (self.size - 1) / self.size * (2 if operation == "all_reduce" else 1)


@pytest.mark.parametrize(("kind", "ranks", "depth"), GRIDS)
def test_products_are_shared_out_in_equal_parts(kind, ranks, depth):
    layout = Layout(tensor=ranks, tensor_kind=kind, tensor_depth=depth)
    rows, columns, deep, _ = local_products(layout, [(64.0, 32.0, 16.0, 1.0)])[0]
    assert rows * columns * deep * ranks == 64 * 32 * 16


def test_bytes_that_come_to_a_rank_are_those_of_the_papers():
    """Of M = 64, K = 16, N = 32 in two bytes: on 2 x 2, 2 x 2 x 2 as two grids, and as a cube."""
    product, m_k, k_n, m_n = (64.0, 32.0, 16.0, 1.0), 64 * 16, 16 * 32, 64 * 32

    def came(kind, ranks, depth=1):
        layout = Layout(tensor=ranks, tensor_kind=kind, tensor_depth=depth)
        return grid_seconds(layout, [product], grid_lines(layout, lambda size, stride: Bytes(size)))

    assert came("2d", 4) == (2 * (m_k + k_n) / 4, 2 * 2 * (m_k + k_n) / 4)
    assert came("2.5d", 8, 2)[0] == 2 * (m_k / 8 + k_n / 4)
    assert came("2.5d", 8, 2)[1] == 2 * came("2.5d", 8, 2)[0] + 2 * 2 * k_n / 4 / 2
    assert came("3d", 8) == (2 * (m_k + k_n + m_n) / 8, 2 * 2 * (m_k + k_n + m_n) / 8)


@pytest.mark.parametrize(("kind", "ranks", "depth"), GRIDS)
def test_parameters_are_parted_and_activations_are_no_more_than_of_one_dimension(kind, ranks, depth):
    cluster = make_cluster(ranks, "A100-SXM4-80GB", inside=300e9, across=25e9)
    grid = Layout(tensor=ranks, tensor_kind=kind, tensor_depth=depth, micro_batch_size=8)
    line = Layout(tensor=ranks, micro_batch_size=8)
    one, other = (
        estimate_step(MODEL, TrainingStep(layout=each, seq_len=1024), cluster) for each in (grid, line)
    )
    assert one.worst.activation_bytes < other.worst.activation_bytes
    assert sum(one.time_s.values()) == pytest.approx(one.step_time_s)
    contents = device_contents((0,), (MODEL.n_layers,))
    counts = [
        stage_parameters(MODEL, TrainingStep(layout=each, seq_len=1024), contents).all
        for each in (grid, line)
    ]
    assert counts[0] == pytest.approx(depth * counts[1])


@pytest.mark.parametrize(
    "impossible",
    [{"tensor": 8, "tensor_kind": "2d"}, {"tensor": 4, "tensor_kind": "3d"}, {"tensor": 8, "tensor_kind": "2.5d", "tensor_depth": 3},
     {"tensor": 4, "tensor_kind": "4d"}, {"tensor": 4, "tensor_depth": 2}, {"tensor": 4, "tensor_kind": "2d", "sequence_parallel": True}],
)  # fmt: skip
def test_what_is_no_square_or_cube_is_refused_in_a_line(impossible):
    with pytest.raises(UsageError) as caught:
        Layout(**impossible)
    assert "\n" not in caught.value.one_line()
