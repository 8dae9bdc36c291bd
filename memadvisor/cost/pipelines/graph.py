"""An order of work as a graph that can be played: every piece after those that it needs.

A piece waits for the piece before it on its device, and for at most one of another device: a forward for the forward
of the chunk before, a backward for the backward of the chunk after. What it needs of its own device the order has
before it (an order that has not is refused, as is one whose devices wait for each other).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memadvisor.cost.pipelines.work import Kind, PipelineOrder

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineGraph:
    """Columns with a row for each piece of work.

    In the order of playing: `device`; `needs`, 1 + the row of another device's piece that it waits for, or 0;
    `cost`, kind * chunks + chunk; `link_in`, 1 + the link over which its input comes, or 0; `link_before`, the same
    of what the device's piece before sends. Link d joins devices d and d+1, and the last one the last and the first.

    Device by device: `by_device`, the row in the order of playing; `offsets`, where each device begins. And for each
    device the chunks that it has. `together`: rows of forwards, and of the backwards that run as one with them.
    """

    order: PipelineOrder
    device: Ints
    needs: Ints
    cost: Ints
    microbatch: Ints
    link_in: Ints
    link_before: Ints
    by_device: Ints
    offsets: Ints
    chunks: tuple[tuple[int, ...], ...]
    together: tuple[Ints, Ints]


def pipeline_graph(order: PipelineOrder, sequence: Sequence[int] | None = None) -> PipelineGraph:
    """Resolve an order's dependencies; raises AssertionError where it cannot be played.

    `sequence`: the device of each piece in an order of playing, where whoever wrote the order knows one.
    """
    num_microbatches, num_chunks = order.num_microbatches, order.num_chunks
    lengths = [len(codes) for codes in order.codes]
    code = np.concatenate([np.asarray(codes, dtype=np.int64) for codes in order.codes])
    device = np.repeat(np.arange(order.num_devices), lengths)
    cost, microbatch = np.divmod(code, num_microbatches)
    kind, chunk = np.divmod(cost, num_chunks)
    firsts = np.flatnonzero(np.isin(code, np.array(sorted(order.together), dtype=np.int64)))
    result = np.arange(len(code))
    result[firsts] += 1
    source = _sources(kind, chunk, microbatch, result, num_chunks, num_microbatches)
    own = (source >= 0) & (device[source] == device)
    assert bool((source[own] < np.flatnonzero(own)).all()), "a piece of work comes before what it needs"
    source[own] = -1
    link_in = np.where(source >= 0, 1 + _link(device[source], device, order.num_devices), 0)
    waits = np.flatnonzero(source >= 0)
    link_out = np.zeros(len(code), dtype=np.int64)
    link_out[source[waits]] = link_in[waits]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    link_before = np.concatenate([[0], link_out[:-1]])
    link_before[offsets[:-1]] = 0
    played = np.asarray(
        _playable(offsets, source) if sequence is None else _rows_of(sequence), dtype=np.int64
    )
    assert len(played) == len(code), "the devices wait for each other"
    row = np.empty(len(code), dtype=np.int64)
    row[played] = np.arange(len(code))
    needs = np.where(source >= 0, row[source] + 1, 0)

    def column(values: npt.NDArray[np.int64]) -> Ints:
        return values[played].astype(np.int32)

    return PipelineGraph(
        order=order,
        device=column(device),
        needs=column(needs),
        cost=column(cost),
        microbatch=column(microbatch),
        link_in=column(link_in),
        link_before=column(link_before),
        by_device=row.astype(np.int32),
        offsets=offsets.astype(np.int32),
        chunks=tuple(
            tuple(np.unique(chunk[begin:end]).tolist()) for begin, end in itertools.pairwise(offsets)
        ),
        together=(row[firsts].astype(np.int32), row[firsts + 1].astype(np.int32)),
    )


def _rows_of(sequence: Sequence[int]) -> npt.NDArray[np.int64]:
    """Rows of pieces that run on these devices one after another."""
    by_device = np.argsort(np.asarray(sequence), kind="stable")
    rows = np.empty(len(sequence), dtype=np.int64)
    rows[by_device] = np.arange(len(sequence))
    return rows


def _sources(
    kind: npt.NDArray[np.int64],
    chunk: npt.NDArray[np.int64],
    microbatch: npt.NDArray[np.int64],
    result: npt.NDArray[np.int64],
    num_chunks: int,
    num_microbatches: int,
) -> npt.NDArray[np.int64]:
    """For each piece, the one with whose end its input is there, or -1: for a W its B, for the last backward its forward.

    `result` is the piece with whose end a piece's own result is there.
    """
    # A backward is found under one name, whether it is split or not.
    forward = kind == Kind.F
    weights = kind == Kind.W
    role = np.where(forward, 0, np.where(weights, 2, 1))
    place = np.full((3, num_chunks + 2, num_microbatches), -1, dtype=np.int64)
    place[role, chunk + 1, microbatch] = result
    last = ~forward & ~weights & (chunk == num_chunks - 1)
    needed_role = np.where(forward | last, 0, 1)
    needed_chunk = np.where(forward, chunk - 1, np.where(weights | last, chunk, chunk + 1))
    found: npt.NDArray[np.int64] = place[needed_role, needed_chunk + 1, microbatch]
    return found


def _link(
    one: npt.NDArray[np.int64], other: npt.NDArray[np.int64], num_devices: int
) -> npt.NDArray[np.int64]:
    """The link between neighbours on the ring; with two devices there is only one."""
    low, high = np.minimum(one, other), np.maximum(one, other)
    return np.where(high - low == 1, low, num_devices - 1)


def _playable(offsets: npt.NDArray[np.int64], source: npt.NDArray[np.int64]) -> list[int]:
    """Rows so that each comes after its source and after the row before on its device; short if that cannot be."""
    at, ends, sources = offsets[:-1].tolist(), offsets[1:].tolist(), source.tolist()
    done = bytearray(len(sources) + 1)
    done[-1] = 1  # what waits for nobody has source -1
    waiting: dict[int, list[int]] = {}
    played: list[int] = []
    ready = list(range(len(at) - 1, -1, -1))
    while ready:
        here = ready.pop()
        row, end = at[here], ends[here]
        while row < end and done[sources[row]]:
            done[row] = 1
            played.append(row)
            if row in waiting:
                ready += waiting.pop(row)
            row += 1
        at[here] = row
        if row < end:
            waiting.setdefault(sources[row], []).append(here)
    return played
