"""What each device of a pipeline has of the model, told apart as far as bounds of time and memory depend on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.stages import stage_layers
from memadvisor.errors import UsageError
from memadvisor.layout import Layout, Software


@dataclass(frozen=True, slots=True)
class Share:
    """Of one device: layers of both kinds and the ends of the model; of chunks before its first one the same."""

    device: int
    dense: int
    sparse: int
    embedding: int
    head: int
    fewest: int  # layers of its smallest chunk
    dense_before: int
    sparse_before: int
    embedding_before: int


# Of the devices that may be the busiest, and of those that may be the fullest.
Shares = tuple[tuple[Share, ...], tuple[Share, ...]]


def deal_shares(model: Architecture, software: Software, num_stages: int, chunks: int) -> Shares:
    """Of looped chunks: device d has the chunks d, d + p, ... None where the layers cannot be dealt out."""
    num_sparse = sum(model.is_second_kind(layer) for layer in range(model.n_layers))
    layout = Layout(pipeline=num_stages, chunks=chunks)
    try:
        layers = stage_layers(model, layout, software)
    except UsageError:
        return (), ()
    first_sparse = model.n_layers - num_sparse
    starts = [sum(layers[:chunk]) for chunk in range(len(layers) + 1)]

    def sparse_of(chunk: int) -> int:
        return max(0, starts[chunk + 1] - max(starts[chunk], first_sparse))

    shares = []
    for device in range(num_stages):
        mine = range(device, len(layers), num_stages)
        sparse = sum(sparse_of(chunk) for chunk in mine)
        shares.append(
            Share(
                device=device,
                dense=sum(layers[chunk] for chunk in mine) - sparse,
                sparse=sparse,
                embedding=int(device == 0),
                head=int(len(layers) - 1 in mine),
                fewest=min(layers[chunk] for chunk in mine),
                dense_before=min(starts[device], first_sparse),
                sparse_before=max(0, starts[device] - first_sparse),
                embedding_before=int(device > 0),
            )
        )
    return _telling(shares, _work_numbers), _telling(shares, _memory_numbers)


def _telling(shares: list[Share], numbers: Callable[[Share], tuple[int, ...]]) -> tuple[Share, ...]:
    """Those that no other has as much of everything as."""

    def beaten(share: Share, other: Share) -> bool:
        return all(theirs >= ours for theirs, ours in zip(numbers(other), numbers(share), strict=True)) and (
            numbers(other) != numbers(share) or other.device < share.device
        )

    return tuple(share for share in shares if not any(beaten(share, other) for other in shares))


def _work_numbers(share: Share) -> tuple[int, ...]:
    before = share.dense_before, share.sparse_before, share.embedding_before
    return share.dense, share.sparse, share.embedding, share.head, *before


def _memory_numbers(share: Share) -> tuple[int, ...]:
    return share.dense, share.sparse, share.embedding, share.head, -share.device, share.fewest
