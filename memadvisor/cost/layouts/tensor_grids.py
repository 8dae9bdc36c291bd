"""Tensor parallelism on a grid of ranks: every product's operands are split both ways, and blocks travel along its lines.

A product of M tokens, depth K and N columns on p ranks, elements of two bytes. What travels, forward; the backward has the
same again for each of its two products, which gathers their operands and reduces their result along the same lines.

- 2D, p = q^2 (Xu et al. 2021, arXiv:2104.05343, section 3.1, after SUMMA): each rank has a block of MK/p, KN/p and MN/p; in q
  steps those of a row pass the first operand around (MK/q in all), those of a column the second (KN/q).
- 2.5D, p = d q^2 (Wang et al. 2021, arXiv:2105.14500, section 3): tokens are shared by d such grids, the weights are there in
  each of them, and their gradients are summed over d.
- 3D, p = l^3 (Bian et al. 2021, arXiv:2105.14450, section 3): operands are gathered along two lines (MK/l^2, KN/l^2), and the
  result is reduced and scattered along the third (MN/l^2).

Rings along a line cost what an all-gather of as many bytes costs (`Group.seconds`); nothing is hidden under products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from memadvisor.cost.layouts.links import Group
from memadvisor.layout import Layout, TrainingStep

Product = tuple[float, float, float, float]  # rows, columns, depth, count


def grid_lines(layout: Layout, group: Callable[[int, int], Group]) -> tuple[Group, Group, Group]:
    """The lines that a rank is on: of its row, its column, and across grids (of one rank where there is one grid)."""
    side = layout.grid_side
    across = side if layout.tensor_kind == "3d" else layout.tensor_depth
    return group(side, 1), group(side, side), group(across, side * side)


def unsplit(step: TrainingStep) -> TrainingStep:
    """The same step without tensor parallelism."""
    plain = replace(step.layout, tensor=1, tensor_kind="1d", tensor_depth=1, sequence_parallel=False)
    return replace(step, layout=plain)


def local_products(layout: Layout, products: Sequence[Product]) -> list[Product]:
    """What one rank multiplies of whole products, the steps of a grid taken together."""
    side, grids = layout.grid_side, layout.tensor_depth
    deep = side if layout.tensor_kind == "3d" else 1
    return [
        (rows / (side * grids), columns / side, depth / deep, count)
        for rows, columns, depth, count in products
    ]


def grid_seconds(
    layout: Layout, products: Sequence[Product], lines: tuple[Group, Group, Group]
) -> tuple[float, float]:
    """Of whole products: what their operands and results take on the way, forward and backward."""
    row, column, across = lines
    side, grids = layout.grid_side, layout.tensor_depth
    forward = backward = 0.0
    for rows, columns, depth, count in products:
        first, second, result = (
            2.0 * count * size for size in (rows * depth, depth * columns, rows * columns)
        )
        if layout.tensor_kind == "3d":
            face = side * side
            one = row.seconds("all_gather", first / face) + column.seconds("all_gather", second / face)
            forward += one + across.seconds("reduce_scatter", result / face)
            # Of the input's gradient the result and the weights are gathered; of the weights', the input and the result.
            backward += 2 * (one + across.seconds("all_gather", result / face))
            continue
        tokens = first / grids / side
        one = row.seconds("all_gather", tokens) + column.seconds("all_gather", second / side)
        forward += one
        backward += 2 * one + across.seconds("all_reduce", second / side**2)
    return forward, backward
