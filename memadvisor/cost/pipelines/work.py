"""Pieces of work in a pipeline, and the numbers that stand for them while orders are written and played.

A step has a forward (F) of every chunk for every microbatch, and its backward. The backward is one piece (BW), which
hands its input gradient on when all of it is done, or two (arXiv:2401.10241): B makes the input gradient, which the
chunk before is waiting for, and W the weights' gradients, for which nobody waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What a piece of work does; the names are what drawings write."""

    F = 0  # forward
    B = 1  # gradient of the chunk's input
    W = 2  # gradients of its weights
    BW = 3  # both, as autograd runs a backward that nobody splits


class Work(NamedTuple):
    """One piece: what it does, for which chunk of the model (in the model's order) and which microbatch."""

    kind: Kind
    chunk: int
    microbatch: int


class Ending(IntEnum):
    """How a step meets the next one, which says what of the pipeline's filling and emptying a step pays."""

    FLUSH = 0  # every device waits for the last one (the gradients' norm, the optimizer): a step takes the makespan
    POST_VALIDATED = (
        1  # devices go on by themselves (arXiv:2401.10241, section 4): the longest device's stretch
    )
    NEVER_EMPTY = 2  # the next step's microbatches follow at once (PipeDream-2BW): the steady state's pace


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOrder:
    """Who does what after what: for each device its pieces of work in order, as codes (`Codes`).

    `weight_copies`: how many stages' weights a device holds for each stage of the model that is its share, 2 where
    two pipelines run through it in opposite directions. `weight_versions`: how many updates' weights it keeps.
    """

    num_devices: int
    num_chunks: int  # of the model; a device has num_chunks / num_devices of them, times weight_copies
    num_microbatches: int
    codes: tuple[Sequence[int], ...]
    weight_copies: int = 1
    weight_versions: int = 1
    ending: Ending = Ending.FLUSH
    together: frozenset[int] = (
        frozenset()
    )  # forwards that run as one with the backward behind them on the device

    def works(self, device: int) -> list[Work]:
        """The device's pieces in words."""
        num_microbatches, num_chunks = self.num_microbatches, self.num_chunks
        return [
            Work(
                Kind(code // (num_chunks * num_microbatches)),
                code // num_microbatches % num_chunks,
                code % num_microbatches,
            )
            for code in self.codes[device]
        ]


@dataclass(frozen=True, slots=True)
class Codes:
    """A piece of work as one number, (kind * chunks + chunk) * microbatches + microbatch.

    The microbatches of one kind and chunk are then a range, and an order is written from slices.
    """

    num_chunks: int
    num_microbatches: int

    def first(self, kind: Kind, chunk: int) -> int:
        """The piece of microbatch 0; that of microbatch j is j more."""
        return (kind * self.num_chunks + chunk) * self.num_microbatches

    def of(self, work: Work) -> int:
        return self.first(work.kind, work.chunk) + work.microbatch
