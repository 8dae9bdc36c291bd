"""How a flat's parameters and gradients travel between ranks: as they are (wire.py), or in a few bits an element.

Quantised gathers: each rank packs its shard, the messages of all ranks are gathered, and every rank unpacks all of
them, its own too: so all ranks compute with the same numbers, and none with its own exact ones. The shards stay
exact; stages 1 and 2, where the shard is a slice of what is computed with, have no place for both.

Quantised reductions: one after another, each rank packs what it has of another's shard, sends that, unpacks what it
receives, and adds it up in the gradient's dtype. What a rank adds of its own is not rounded. So each contribution is
rounded once, however many ranks there are.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from memadvisor.compression import UNCOMPRESSED, Compression, packed_bytes, scratch_elements
from memadvisor.engines.flat import Flat
from memadvisor.engines.lanes import Chain, Ticket
from memadvisor.engines.quantise import dequantise, quantise
from memadvisor.engines.wire import Wire
from memadvisor.errors import PlanError


class Transfers:
    """Of one model's flats, over its wire; a flat says in how many bits."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    # ---- parameters of stage 3 ---------------------------------------------------------------

    def begin_gather(self, flat: Flat) -> Ticket:
        """Begin to fill a flat's `full` from the shards of all ranks."""
        full, shard = _tensors(flat)
        if flat.gather_bits is None:
            return self._wire.begin_gather(full, flat.own_part(full), flat.unit, flat.index)
        packed, scratch = self._gather_room(flat, full)
        work = partial(self._gather, flat.unit, flat.index, flat.gather_bits, full, shard, packed, scratch)
        return self._wire.lane(full.device).submit(work, reads=(shard,), writes=(full, packed, scratch))

    def gather(self, flat: Flat) -> None:
        """The same, and wait for it."""
        full, shard = _tensors(flat)
        if flat.gather_bits is None:
            self._wire.gather(full, flat.own_part(full), flat.unit, flat.index)
            return
        packed, scratch = self._gather_room(flat, full)
        work = partial(self._gather, flat.unit, flat.index, flat.gather_bits, full, shard, packed, scratch)
        self._wire.lane(full.device).run(work, reads=(shard,), writes=(full, packed, scratch))

    def _gather_room(self, flat: Flat, full: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The messages of all ranks; and scratch, for which this rank's own part of `full` serves if it can."""
        message_bytes = packed_bytes(flat.shard_numel, flat.gather_bits or 0)
        packed = self._wire.stage(self._wire.num_ranks * message_bytes, torch.uint8, full.device)
        if full.dtype == torch.float32:
            return packed, flat.own_slice(full)
        return packed, self._wire.stage(scratch_elements(flat.shard_numel), torch.float32, full.device)

    def _gather(
        self,
        unit: str,
        number: int,
        bits: int,
        full: torch.Tensor,
        shard: torch.Tensor,
        packed: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:
        """Work of a lane."""
        messages = packed.chunk(self._wire.num_ranks)
        own = messages[self._wire.rank]
        quantise(shard, own, bits, scratch)
        self._wire.exchange_shards(packed, own, unit, number)
        for message, part in zip(messages, full.chunk(self._wire.num_ranks), strict=True):
            dequantise(message, part, bits, None if part.dtype == torch.float32 else scratch)

    # ---- gradients that become shards --------------------------------------------------------

    def begin_reduce_scatter(self, flat: Flat, grad: torch.Tensor) -> Chain:
        """Begin to sum a flat's gradients, which are used up; the ticket gives this rank's shard of the sum."""
        if flat.reduce_bits is None:
            return self._wire.begin_reduce_scatter(grad, flat.unit, flat.index)
        own, packed = self._reduce_room(flat)
        work = partial(self._reduce, flat.unit, flat.index, flat.reduce_bits, grad, own, packed)
        ticket = self._wire.lane(grad.device).submit(work, reads=(grad,), writes=(grad, own, packed))
        return Chain([ticket], own)

    def reduce_scatter(self, flat: Flat, grad: torch.Tensor) -> torch.Tensor:
        """The same, and wait for it."""
        if flat.reduce_bits is None:
            return self._wire.reduce_scatter(grad, flat.unit, flat.index)
        own, packed = self._reduce_room(flat)
        work = partial(self._reduce, flat.unit, flat.index, flat.reduce_bits, grad, own, packed)
        self._wire.lane(grad.device).run(work, reads=(grad,), writes=(grad, own, packed))
        return own

    def _reduce_room(self, flat: Flat) -> tuple[torch.Tensor, torch.Tensor]:
        """What becomes the sum; and two messages, one to send and one to receive."""
        message_bytes = packed_bytes(flat.shard_numel, flat.reduce_bits or 0)
        own = self._wire.stage(flat.shard_numel, flat.reduce_dtype, flat.device)
        return own, self._wire.stage(2 * message_bytes, torch.uint8, flat.device)

    def _reduce(
        self,
        unit: str,
        number: int,
        bits: int,
        grad: torch.Tensor,
        total: torch.Tensor,
        packed: torch.Tensor,
    ) -> None:
        """Work of a lane: as the wire's own, in the same order of ranks."""
        parts = grad.chunk(self._wire.num_ranks)
        own = parts[self._wire.rank]
        sent, received = packed.chunk(2)
        for distance in range(1, self._wire.num_ranks):
            part = parts[(self._wire.rank + distance) % self._wire.num_ranks]
            quantise(part, sent, bits, part)
            self._wire.exchange_pieces(sent, received, distance, unit, number)
            dequantise(received, total, bits)
            if distance < self._wire.num_ranks - 1:
                own.add_(total)
        total.add_(own)


def _tensors(flat: Flat) -> tuple[torch.Tensor, torch.Tensor]:
    if flat.full is None or flat.shard is None:
        raise AssertionError("a flat without a shard has nothing to gather")
    return flat.full, flat.shard


def check_compressible(group: dist.ProcessGroup, model: torch.nn.Module, compression: Compression) -> None:
    """Raise PlanError where messages of bytes could not be unpacked on the way."""
    if compression == UNCOMPRESSED or "nccl" in dist.get_backend(group):
        return
    if any(parameter.is_cuda for parameter in model.parameters()):
        raise PlanError(
            "Compressed messages between GPUs need NCCL, and the script's process group has "
            f"{dist.get_backend(group)}.",
            hint="start it with backend='nccl', or leave out --gather-bits and --reduce-bits.",
        )
