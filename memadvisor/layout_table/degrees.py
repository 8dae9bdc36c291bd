"""A row's columns of degrees -> how many ranks share what."""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.errors import UsageError
from memadvisor.layout_table.cells import Cells
from memadvisor.layout_table.machine import usual_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """How many ranks share what."""

    data: int
    tensor: int
    pipeline: int
    context: int

    @property
    def num_ranks(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context


def degrees_of(cells: Cells) -> Degrees:
    """Degrees of a row; the replicas follow from the accelerators where only those are named. Raises UsageError."""
    tensor, pipeline, context = (cells.whole(name) or 1 for name in ("tp", "pp", "cp"))
    ranks, data = cells.whole("n_gpus"), cells.whole("dp")
    if ranks is None and cells.text("nodes") and (data is None or cells.text("gpus_per_node")):
        ranks = (cells.whole("nodes") or 1) * (cells.whole("gpus_per_node") or usual_per_node(cells))
    inner = tensor * pipeline * context
    if data is None and (cells.text("replicate") is not None or (ranks is None and cells.text("shard"))):
        data = (cells.whole("shard") or 1) * (cells.whole("replicate") or 1)
    ranks = _of_all_nodes(cells, ranks, inner)
    if data is not None and ranks is not None:
        data = _agreeing(
            cells, data, ranks, Degrees(data=1, tensor=tensor, pipeline=pipeline, context=context)
        )
    if data is None:
        if ranks is not None and ranks % inner:
            raise UsageError(
                f"tp {tensor} x pp {pipeline} x cp {context} does not divide {ranks} accelerators."
            )
        data = _fewest(cells, inner) if ranks is None else ranks // inner
    if ranks is not None and data * inner != ranks:
        raise UsageError(
            f"dp {data} x tp {tensor} x pp {pipeline} x cp {context} is {data * inner}, but there are {ranks} accelerators."
        )
    return Degrees(data=data, tensor=tensor, pipeline=pipeline, context=context)


def _of_all_nodes(cells: Cells, ranks: int | None, inner: int) -> int | None:
    """Accelerators of all nodes, where those of a column are too few for the degrees and are one node's."""
    nodes = cells.whole("nodes") or 1
    if ranks is None or nodes == 1 or ranks % inner == 0 or ranks * nodes % inner:
        return ranks
    cells.note(f"n_gpus {ranks} is taken for those of each of {nodes} nodes")
    return ranks * nodes


def _agreeing(cells: Cells, data: int, ranks: int, others: Degrees) -> int:
    """Replicas where columns count them otherwise: with the ranks that share a sequence, or without those that have other
    experts or shards. What no counting explains is left as it is.
    """
    named = data * others.num_ranks
    without = {named * (cells.count("ep") or 1), named * (cells.whole("shard") or 1)}
    is_explained = named == ranks * others.context or ranks in without
    if named == ranks or ranks % others.num_ranks or not is_explained:
        return data
    left = ranks // others.num_ranks
    cells.note(f"dp {data} is another count: {ranks} accelerators leave {left} replicas")
    return left


def _fewest(cells: Cells, inner: int) -> int:
    """Replicas where nothing says how many there are: as many as share experts."""
    shared = cells.count("ep") or 1
    data = max(1, shared // inner)
    if data > 1:
        cells.note(f"no number of accelerators: {data * inner} are taken, that share the experts")
    return data
