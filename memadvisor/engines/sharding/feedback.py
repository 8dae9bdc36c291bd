"""Means of whole gradients in compressed messages, with error feedback at both ends (stages 0 and 1).

Two passes, as in DoubleSqueeze (arXiv:1905.05957) and 1-bit Adam's communication (arXiv:2102.02888). A gradient is
cut into one part a rank. Each rank adds what it has left over from before (its *residual*) to its share of the mean,
sends the parts of the other ranks to them, compressed, and keeps what the messages lack as its new residual. Each
rank adds up what it gets of its own part to its own share of it, which needs no message, and the residual of this
sum; sends that to all, compressed; and keeps what that message lacks. All ranks put the mean together from the same
messages, their own too, so it is the same everywhere, bit for bit.

So nothing is lost: all means that ever came out, the residuals of all ranks and those of all sums add up to the sum
of all true means (but for rounding of float32). After a gradient with an infinity or a NaN, which comes out as one on
every rank, what is left over of it is dropped. Products of thin matrices are low_rank.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from memadvisor.compression import Compression, scratch_elements
from memadvisor.engines.collectives.quantise import dequantise, quantise
from memadvisor.engines.collectives.sparse import densify, sparsify
from memadvisor.engines.collectives.wire import Wire
from memadvisor.engines.lanes.lanes import Ticket
from memadvisor.engines.sharding.flat import Flat
from memadvisor.engines.sharding.low_rank import LowRank


class Feedback:
    """Of one model; residuals are made with a flat's first gradient, and go with the executor."""

    def __init__(self, wire: Wire, compression: Compression) -> None:
        self._wire = wire
        self._compression = compression
        self._residuals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        rank = compression.all_reduce_rank
        self._low_rank = None if rank is None else LowRank(wire, rank)

    def begin_mean(self, flat: Flat, grad: torch.Tensor) -> Ticket:
        """Begin to replace `grad` by its mean over the ranks, as far as it is sent in this step."""
        if not (self._compression.has_feedback and flat.script_dtype == torch.float32):
            return self._wire.begin_mean(grad, flat.unit)
        if self._low_rank is not None:
            return self._low_rank.begin_mean(flat, grad)
        shard, n = flat.shard_numel, self._wire.num_ranks
        if flat.index not in self._residuals:
            sizes = (flat.num_elements, shard)
            left, left_of_sum = (self._wire.stage(size, grad.dtype, grad.device).zero_() for size in sizes)
            self._residuals[flat.index] = (left, left_of_sum)
        message_bytes = self._compression.all_reduce_message_bytes(shard)
        messages = self._wire.stage(n * message_bytes, torch.uint8, grad.device)
        scratch = self._wire.stage(scratch_elements(shard), torch.float32, grad.device)
        left, left_of_sum = self._residuals[flat.index]
        work = partial(self._mean, flat.unit, flat.index, shard, grad, left, left_of_sum, messages, scratch)
        return self._wire.lane(grad.device).submit(work, writes=(grad, left, left_of_sum, messages, scratch))

    def left_over(self) -> Iterator[torch.Tensor]:
        """What is kept from one step to the next."""
        for both in self._residuals.values():
            yield from both
        if self._low_rank is not None:
            yield from self._low_rank.left_over()

    def _mean(
        self,
        unit: str,
        number: int,
        shard: int,
        grad: torch.Tensor,
        left: torch.Tensor,
        left_of_sum: torch.Tensor,
        messages: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:
        """Work of a lane. Ranks after the last element have empty parts, and messages of full length all the same."""
        wire, n = self._wire, self._wire.num_ranks
        left.add_(grad, alpha=1.0 / n)
        edges = [min(rank * shard, grad.numel()) for rank in range(n + 1)]
        parts = [grad[edges[rank] : edges[rank + 1]] for rank in range(n)]
        lefts = [left[edges[rank] : edges[rank + 1]] for rank in range(n)]
        slots = messages.chunk(n)
        total = parts[wire.rank].copy_(lefts[wire.rank])
        lefts[wire.rank].zero_()
        for distance in range(1, n):
            to = (wire.rank + distance) % n
            self._send(lefts[to], slots[0], parts[to], scratch)
            wire.exchange_pieces(slots[0], slots[1], distance, unit, number)
            self._read(slots[1], total, scratch, add=True)
        left_of_sum = left_of_sum[: total.numel()]
        left_of_sum.add_(total)
        own = slots[wire.rank]
        self._send(left_of_sum, own, total, scratch)
        wire.exchange_shards(messages, own, unit, number)
        for slot, part in zip(slots, parts, strict=True):
            self._read(slot, part, scratch)

    def _send(
        self, left: torch.Tensor, slot: torch.Tensor, room: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        """Make a message of what is left over, and take what it says off that; `room` is as large as `left`."""
        message = self._message(slot, left)
        if self._compression.all_reduce_bits is not None:
            room.copy_(left)
            quantise(room, message, self._compression.all_reduce_bits, room)
        else:
            sparsify(left, message, self._compression.all_reduce_top or 0, scratch)
        self._read(slot, room, scratch)
        left.sub_(room).nan_to_num_(0.0, 0.0, 0.0)

    def _read(
        self, slot: torch.Tensor, values: torch.Tensor, scratch: torch.Tensor, *, add: bool = False
    ) -> None:
        message = self._message(slot, values)
        if self._compression.all_reduce_bits is not None:
            bits = self._compression.all_reduce_bits
            dequantise(message, values, bits, scratch if add else None, add=add)
        else:
            densify(message, values, self._compression.all_reduce_top or 0, add=add)

    def _message(self, slot: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """What a slot holds of a part that may be shorter than others."""
        return slot[: self._compression.all_reduce_message_bytes(values.numel())]
