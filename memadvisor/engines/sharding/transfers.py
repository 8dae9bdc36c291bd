"""How a flat's parameters and gradients travel between ranks: as they are (wire.py), or in a few bits an element.

Quantised gathers: each rank packs its shard, the messages of all ranks are gathered, and every rank unpacks all of
them, its own too: so all ranks compute with the same numbers, and none with its own exact ones. The shards stay
exact; stages 1 and 2, where the shard is a slice of what is computed with, have no place for both.

Quantised reductions: one after another, each rank packs what it has of another's shard, sends that, unpacks what it
receives, and adds it up in the gradient's dtype. What a rank adds of its own is not rounded. So each contribution is
rounded once, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from memadvisor.backends import uses_nccl
from memadvisor.compression import UNCOMPRESSED, Compression, packed_bytes, scratch_elements
from memadvisor.engines.collectives.quantise import dequantise, quantise
from memadvisor.engines.collectives.wire import Pieces, Wire
from memadvisor.engines.lanes.lanes import Chain, Ticket
from memadvisor.engines.sharding.flat import Flat
from memadvisor.engines.sharding.paged_flats import Leaving, put_gradient
from memadvisor.engines.sharding.second_copies import SecondCopies
from memadvisor.errors import PlanError

Work = Callable[[], None]  # of a lane
Writes = tuple[torch.Tensor, ...]


class Transfers:
    """Of one model's flats, over its wire; a flat says in how many bits."""

    def __init__(self, wire: Wire, second: SecondCopies | None = None) -> None:
        self._wire = wire
        self._second = second

    def keep_second(self, flat: Flat) -> None:
        """Leave a second copy of parameters that are about to be freed."""
        if self._second is not None:
            self._second.keep(flat)

    def close(self) -> None:
        """After the wire: let go of groups of ranks."""
        if self._second is not None:
            self._second.close()

    # ---- parameters of stage 3 ---------------------------------------------------------------

    def begin_gather(self, flat: Flat) -> Ticket:
        """Begin to fill a flat's `full` from the shards of all ranks."""
        if flat.page is not None and flat.full is not None:
            return flat.page.parameters.read_into(flat.full)
        full, shard = _tensors(flat)
        if self._second is not None and flat.second is not None:
            return self._second.begin_gather(full, flat.second, flat)
        if flat.gather_bits is None:
            return self._wire.begin_gather(full, flat.own_part(full), flat.unit, flat.index)
        work, writes = self._gather_work(flat, full, shard, flat.gather_bits)
        return self._wire.lane(full.device).submit(work, reads=(shard,), writes=writes)

    def gather(self, flat: Flat) -> None:
        """The same, and wait for it."""
        if flat.page is not None:
            self.begin_gather(flat).wait()
            return
        full, shard = _tensors(flat)
        if self._second is not None and flat.second is not None:
            self._second.gather(full, flat.second, flat)
            flat.second = None
            return
        if flat.gather_bits is None:
            self._wire.gather(full, flat.own_part(full), flat.unit, flat.index)
            return
        work, writes = self._gather_work(flat, full, shard, flat.gather_bits)
        self._wire.lane(full.device).run(work, reads=(shard,), writes=writes)

    def _gather_work(
        self, flat: Flat, full: torch.Tensor, shard: torch.Tensor, bits: int
    ) -> tuple[Work, Writes]:
        """With room for the messages of all ranks; and scratch, for which this rank's own part of `full` serves if
        it can."""
        n, device = self._wire.num_ranks, full.device
        packed = self._wire.stage(n * packed_bytes(flat.shard_numel, bits), torch.uint8, device)
        if full.dtype == torch.float32:
            scratch = flat.own_slice(full)
        else:
            scratch = self._wire.stage(scratch_elements(flat.shard_numel), torch.float32, device)
        work = partial(self._gather, flat.unit, flat.index, bits, full, shard, packed, scratch)
        return work, (full, packed, scratch)

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

    def begin_reduce_scatter(self, flat: Flat, grad: torch.Tensor | Pieces) -> Chain | Leaving:
        """Begin to sum a flat's gradients, which are used up; the ticket gives this rank's shard of the sum."""
        if isinstance(grad, Pieces):
            return self._wire.begin_reduce_scatter(grad, flat.unit, flat.index)
        if flat.page is not None and flat.page.gradient is not None:
            return put_gradient(flat.page.gradient, grad)
        if flat.reduce_bits is None:
            return self._wire.begin_reduce_scatter(grad, flat.unit, flat.index)
        own, work, writes = self._reduce_work(flat, grad, flat.reduce_bits)
        return Chain([self._wire.lane(grad.device).submit(work, reads=(grad,), writes=writes)], own)

    def reduce_scatter(self, flat: Flat, grad: torch.Tensor | Pieces) -> torch.Tensor:
        """The same, and wait for it."""
        if isinstance(grad, Pieces):
            return self._wire.reduce_scatter(grad, flat.unit, flat.index)
        if flat.page is not None:
            return self.begin_reduce_scatter(flat, grad).wait()
        if flat.reduce_bits is None:
            return self._wire.reduce_scatter(grad, flat.unit, flat.index)
        own, work, writes = self._reduce_work(flat, grad, flat.reduce_bits)
        self._wire.lane(grad.device).run(work, reads=(grad,), writes=writes)
        return own

    def _reduce_work(self, flat: Flat, grad: torch.Tensor, bits: int) -> tuple[torch.Tensor, Work, Writes]:
        """With what becomes the sum; and room for two messages, one to send and one to receive."""
        own = self._wire.stage(flat.shard_numel, flat.reduce_dtype, flat.device)
        packed = self._wire.stage(2 * packed_bytes(flat.shard_numel, bits), torch.uint8, flat.device)
        return own, partial(self._reduce, flat.unit, flat.index, bits, grad, own, packed), (grad, own, packed)

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
    if compression == UNCOMPRESSED or uses_nccl(group):
        return
    if any(parameter.is_cuda for parameter in model.parameters()):
        raise PlanError(
            "Compressed messages between GPUs need NCCL, and the script's process group has "
            f"{dist.get_backend(group)}.",
            hint="start it with backend='nccl', or leave out --gather-bits and --reduce-bits.",
        )
