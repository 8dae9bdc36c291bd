"""The collectives of the engine over the ranks of one model, chosen for exact memory.

Gloo's own reduce-scatter clones its input and all-reduces the clone, and its all-gather stages the
output. Pairwise exchange moves (n-1)/n of the bytes with no more than one shard of staging. NCCL's own
collectives are used where the tensors live on a GPU.

Pairwise messages bear tags of our own, so a lane's thread may issue them while the script's collectives go on.
What takes a number in the group's own count is issued by the thread that computes, where all ranks issue it in
one order with the script's. With hybrid sharding the sum across groups is issued by the lane, in a group that
nobody else uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from memadvisor.backends import uses_nccl
from memadvisor.engines.collectives.exchanges import (
    Parts,
    gather_by_doubling,
    gather_pairwise,
    reduce_pairwise,
    reduce_together,
)
from memadvisor.engines.collectives.groups import give_back, of_host, split
from memadvisor.engines.collectives.messages import Messages
from memadvisor.engines.collectives.native import all_gather, reduce_scatter
from memadvisor.engines.collectives.works import Work, there
from memadvisor.engines.lanes.lane_for import lane_for
from memadvisor.engines.lanes.lanes import Chain, Lane, Ticket
from memadvisor.executors import Algorithm, algorithm_for

# The script's own sends and receives carry small tags; ours must not be taken for them.
_FIRST_TAG = 2**20
_MAX_WIRES = 1000
_FIRST_PIECE_TAG = 2**19  # of uneven pieces; before it those of shards
_FIRST_ASKED_TAG = 3 * 2**18  # of shards that one rank asks another for


@dataclass(frozen=True, slots=True)
class Pieces:
    """A full message as it lies in memory: `tensors`, and what of them is for each rank, in the order in which it is sent.

    num_elements: with what pads the ranks' slices to the same length, which is sent by nobody. Between ranks of a CPU alone
    it may be in more than one tensor.
    """

    tensors: tuple[torch.Tensor, ...]
    by_rank: tuple[tuple[torch.Tensor, ...], ...]
    num_elements: int

    @property
    def nbytes(self) -> int:
        return self.num_elements * self.tensors[0].itemsize


class Wire:
    """Collectives of the ranks of `everyone`. `staged` is told of every staging buffer that is allocated.

    Shards are of the `num_ranks` of `group`: all ranks, or with `shard_ranks` this rank's group inside (groups.py);
    `across` is then its group across.

    number: the same on all ranks, and another for each wire of a group; tells their messages apart.
    algorithms: how pairwise gathers and reductions to shards go instead, by their size.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        staged: Callable[[torch.Tensor], None],
        number: int = 0,
        lane_for: Callable[[torch.device], Lane] = lane_for,
        shard_ranks: int | None = None,
        algorithms: tuple[Algorithm, ...] = (),
    ) -> None:
        self.everyone = self.group = group
        self.across: dist.ProcessGroup | None = None
        self._host: dist.ProcessGroup | None = None  # for numbers of the host's, once there have been some
        if shard_ranks is not None and shard_ranks < group.size():
            self.group, self.across = split(group, shard_ranks)
        self.num_contributions = group.size()  # to a mean
        self.num_ranks = self.group.size()
        self.rank = self.group.rank()
        self._staged = staged
        self.algorithms = algorithms
        self._lane_for = lane_for
        self._lanes: dict[torch.device, Lane] = {}
        self._messages = Messages(self.group, _FIRST_TAG * (1 + number % _MAX_WIRES))

    @property
    def first_rank(self) -> int:
        """The first of the ranks that share shards, in the count of the whole script."""
        return self._messages.global_ranks[0]

    def algorithm(self, operation: str, full: torch.Tensor | Pieces) -> str | None:
        """Which of `algorithms` a gather of `full`, or its reduction to shards, goes by."""
        return algorithm_for(self.algorithms, operation, full.nbytes, self.num_ranks)

    def lane(self, device: torch.device) -> Lane:
        if device not in self._lanes:
            self._lanes[device] = self._lane_for(device)
        return self._lanes[device]

    def close(self) -> None:
        """End the lanes, and let others use the groups of this wire."""
        while self._lanes:
            self._lanes.popitem()[1].close()
        give_back(self._host, *(() if self.across is None else (self.group, self.across)))
        self.across = self._host = None

    # ---- all ranks' gradients ----------------------------------------------------------------

    def begin_mean(self, tensor: torch.Tensor, unit: str = "") -> Ticket:
        """Begin to replace `tensor` by its mean over the ranks, scaled before the sum as DDP does."""
        tensor.mul_(1.0 / self.num_contributions)
        return self._begin_sum(tensor, unit, self.everyone)

    def _begin_sum(self, tensor: torch.Tensor, unit: str, group: dist.ProcessGroup) -> Ticket:
        named = partial(self._messages.named, "all-reduce", unit)
        with named():
            work = there(dist.all_reduce(tensor, group=group, async_op=True))
        return self.lane(tensor.device).adopt([Work(work, named)], writes=(tensor,))

    def begin_reduce_scatter(self, full: torch.Tensor | Pieces, unit: str = "", number: int = 0) -> Chain:
        """Begin to sum `full`, which is used up; the ticket gives this rank's slice of the sum.

        Pairwise it takes the other ranks' contributions one after another, into what becomes the result.
        Flats are told apart by their `number`.
        """
        if isinstance(full, torch.Tensor) and self.way(full) == "staged":
            return Chain([self._begin_sum(full, unit, self.group)], full.chunk(self.num_ranks)[self.rank])
        pieces = self._cut(full)
        staging = self._stage(pieces)
        reduce, writes = self._reduction(pieces, staging, unit, number)
        ticket = self.lane(staging.device).submit(reduce, reads=pieces.tensors, writes=writes)
        return Chain([ticket], staging)

    def reduce_scatter(
        self,
        full: torch.Tensor | Pieces,
        unit: str = "",
        number: int = 0,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """This rank's slice of the sum of `full` over the ranks; `full` is used up. `into`: where it comes to be.

        Staged, it is a slice of `full` in any case.
        """
        if isinstance(full, torch.Tensor) and self.way(full) == "staged":
            return self.begin_reduce_scatter(full, unit).wait()
        pieces = self._cut(full)
        staging = self._stage(pieces) if into is None else into
        reduce, writes = self._reduction(pieces, staging, unit, number)
        own: torch.Tensor = self.lane(staging.device).run(reduce, reads=pieces.tensors, writes=writes)
        return own

    def _reduction(
        self, pieces: Pieces, staging: torch.Tensor, unit: str, number: int
    ) -> tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]:
        """A lane's work, and what it writes."""
        others = self._stage_others(pieces)
        reduce = partial(self._reduce, pieces, staging, others, unit, number)
        return reduce, (*pieces.tensors, staging, *others)

    def _cut(self, full: torch.Tensor | Pieces) -> Pieces:
        if isinstance(full, Pieces):
            return full
        return Pieces((full,), tuple((part,) for part in full.chunk(self.num_ranks)), full.numel())

    def _stage(self, pieces: Pieces) -> torch.Tensor:
        """Room for what comes from another rank, which becomes the sum."""
        first = pieces.tensors[0]
        return self.stage(pieces.num_elements // self.num_ranks, first.dtype, first.device)

    def _stage_others(self, pieces: Pieces) -> tuple[torch.Tensor, ...]:
        """Room for what all ranks but the last to be added send, where they send at once."""
        first = pieces.tensors[0]
        if self.way(first) != "pairwise" or self.num_ranks == 2:
            return ()
        if self.algorithm("reduce_scatter", pieces) != "together":
            return ()
        shard = pieces.num_elements // self.num_ranks
        return self.stage((self.num_ranks - 2) * shard, first.dtype, first.device).chunk(self.num_ranks - 2)

    def stage(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for a transfer, labelled as such."""
        staging = torch.empty(numel, dtype=dtype, device=device)
        self._staged(staging)
        return staging

    def _reduce(
        self,
        pieces: Pieces,
        staging: torch.Tensor,
        others: Sequence[torch.Tensor],
        unit: str,
        number: int,
    ) -> torch.Tensor:
        """Work of a lane."""
        if self.way(staging) == "native":
            with self._messages.named("reduce-scatter", unit):
                reduce_scatter(staging, pieces.tensors[0], group=self.group)
            return staging
        exchange = partial(self._begin_exchange, "reduce-scatter", unit, tag=2 * number + 1)
        staging[sum(part.numel() for part in pieces.by_rank[self.rank]) :].zero_()  # what pads the shard
        if others:
            return reduce_together(exchange, pieces.by_rank, self.rank, staging, others)
        return reduce_pairwise(exchange, pieces.by_rank, self.rank, staging)

    def begin_sum_across(self, reduced: Chain, unit: str = "") -> Chain:
        """Begin to sum what a reduction to shards leaves over the groups, in place."""
        shard = reduced.result
        if self.way(shard) == "staged":
            reduced.wait()  # the backend would read what it is still writing
            return Chain([self._begin_sum(shard, unit, self._across())], shard)
        total = partial(self._sum_across, shard, unit)
        ticket = self.lane(shard.device).submit(total, reads=(shard,), writes=(shard,))
        return Chain([*reduced.tickets, ticket], shard)

    def sum_across(self, shard: torch.Tensor, unit: str = "") -> None:
        """Sum a shard over the groups, in place."""
        if self.way(shard) == "staged":
            self._begin_sum(shard, unit, self._across()).wait()
        else:
            total = partial(self._sum_across, shard, unit)
            self.lane(shard.device).run(total, reads=(shard,), writes=(shard,))

    def _sum_across(self, shard: torch.Tensor, unit: str) -> None:
        """Work of a lane."""
        with self._messages.named("all-reduce across groups", unit):
            dist.all_reduce(shard, group=self._across())

    def _across(self) -> dist.ProcessGroup:
        if self.across is None:
            raise AssertionError("all ranks share what is sharded: there is nobody across")
        return self.across

    # ---- all ranks' shards -------------------------------------------------------------------

    def begin_gather(
        self, full: torch.Tensor, shard: torch.Tensor, unit: str = "", number: int = 0
    ) -> Ticket:
        """Begin to fill `full` with every rank's shard, in order of rank. `shard` may be its own slice of `full`.

        Flats are told apart by their `number`.
        """
        way = self.way(full)
        if way == "staged":
            named = partial(self._messages.named, "all-gather", unit)
            with named():
                slices = list(full.chunk(self.num_ranks))
                work = there(dist.all_gather(slices, shard, group=self.group, async_op=True))
            return self.lane(full.device).adopt([Work(work, named)], reads=(shard,), writes=(full,))
        gather = partial(self._gather, way, full, shard, unit, number)
        return self.lane(full.device).submit(gather, reads=(shard,), writes=(full,))

    def gather(self, full: torch.Tensor, shard: torch.Tensor, unit: str = "", number: int = 0) -> None:
        """Fill `full` with every rank's shard."""
        way = self.way(full)
        if way == "staged":
            self.begin_gather(full, shard, unit).wait()
        else:
            gather = partial(self._gather, way, full, shard, unit, number)
            self.lane(full.device).run(gather, reads=(shard,), writes=(full,))

    def _gather(self, way: str, full: torch.Tensor, shard: torch.Tensor, unit: str, number: int) -> None:
        """Work of a lane."""
        if way == "native":
            with self._messages.named("all-gather", unit):
                all_gather(full, shard, group=self.group)
            return
        slices = full.chunk(self.num_ranks)
        own = None if slices[self.rank].data_ptr() == shard.data_ptr() else shard
        exchange = partial(self._begin_exchange, "all-gather", unit, tag=2 * number)
        if self.algorithm("all_gather", full) == "doubling":
            if own is not None:
                slices[self.rank].copy_(own)
            gather_by_doubling(exchange, full, self.rank, self.num_ranks)
        else:
            gather_pairwise(exchange, slices, self.rank, own)

    # ---- for the work of a lane that packs its messages itself (transfers.py) ---------------

    def exchange_shards(self, full: torch.Tensor, own: torch.Tensor, unit: str, number: int) -> None:
        """Fill `full` with every rank's part of it."""
        self._gather(self.way(full), full, own, unit, number)

    def exchange_pieces(
        self, sent: torch.Tensor, received: torch.Tensor, distance: int, unit: str, number: int
    ) -> None:
        """Send to the rank that is `distance` after this one, and receive from the one as far before it."""
        to, source = self._partners(distance)
        if self.way(sent) == "pairwise":
            for half in self._begin_exchange(
                "reduce-scatter", unit, [sent], to, [received], source, 2 * number + 1
            ):
                half.wait()
            return
        with self._messages.named("reduce-scatter", unit):
            # NCCL might do one of them only after the other, and two ranks would wait for each other.
            out = dist.P2POp(dist.isend, sent, self._messages.global_ranks[to], group=self.group)
            back = dist.P2POp(dist.irecv, received, self._messages.global_ranks[source], group=self.group)
            for work in dist.batch_isend_irecv([out, back]):
                work.wait()

    # ---- pieces of any size ------------------------------------------------------------------

    def all_to_all(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], unit: str = "", number: int = 0
    ) -> None:
        """Send each rank a piece, and receive one from each, of sizes that both know."""
        exchange = partial(self._all_to_all, list(sent), list(received), unit, number)
        self.lane(sent[0].device).run(exchange, reads=sent, writes=received)

    def _all_to_all(
        self, sent: list[torch.Tensor], received: list[torch.Tensor], unit: str, number: int
    ) -> None:
        """Work of a lane."""
        way = self.way(sent[0])
        if way == "native":
            with self._messages.named("all-to-all", unit):
                dist.all_to_all(received, sent, group=self.group)
            return
        received[self.rank].copy_(sent[self.rank])
        staged = way == "staged"  # this backend sends from the host alone
        arriving = [torch.empty_like(piece, device="cpu") for piece in received] if staged else received
        leaving = [piece.cpu() for piece in sent] if staged else sent
        works = []
        for distance in range(1, self.num_ranks):
            to, source = self._partners(distance)
            tag = _FIRST_PIECE_TAG + number
            works += self._begin_exchange(
                "all-to-all", unit, [leaving[to]], to, [arriving[source]], source, tag
            )
        for work in works:
            work.wait()
        for piece, host in zip(received, arriving, strict=True):
            if staged and piece is not received[self.rank]:
                piece.copy_(host)

    # ---- between two ranks -------------------------------------------------------------------

    def begin_receive(self, received: torch.Tensor, source: int, unit: str, number: int) -> Work:
        """Begin to receive what rank `source` of the group is asked to `send`. May be called from any thread, as that may."""
        return self._messages.begin_receive("fetch", unit, received, source, _FIRST_ASKED_TAG + number)

    def send(self, sent: torch.Tensor, to: int, unit: str, number: int) -> None:
        """Send a rank of the group what it waits for."""
        self._messages.begin_send("fetch", unit, sent, to, _FIRST_ASKED_TAG + number).wait()

    def _begin_exchange(
        self, operation: str, unit: str, sent: Parts, to: int, received: Parts, source: int, tag: int
    ) -> list[Work]:
        return self._messages.begin_exchange(operation, unit, sent, to, received, source, tag)

    def _partners(self, distance: int) -> tuple[int, int]:
        return (self.rank + distance) % self.num_ranks, (self.rank - distance) % self.num_ranks

    # ---- small numbers -----------------------------------------------------------------------

    def largest(self, values: list[int]) -> list[int]:
        """The largest of each value over the ranks. No rank returns before all have called this."""
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        with self._messages.named("meeting of all ranks"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._of_host())
        return [int(value) for value in tensor.tolist()]

    def broadcast(self, values: list[int]) -> list[int]:
        """The first rank's values."""
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        with self._messages.named("broadcast"):
            dist.broadcast(tensor, dist.get_global_rank(self.everyone, 0), group=self._of_host())
        return [int(value) for value in tensor.tolist()]

    def _of_host(self) -> dist.ProcessGroup:
        self._host = self._host or of_host(self.everyone)
        return self._host

    # ---- what is what ------------------------------------------------------------------------

    def way(self, tensor: torch.Tensor) -> str:
        """How shards travel: natively (NCCL), pairwise (Gloo), or staged by Gloo through the host."""
        if not tensor.is_cuda:
            return "pairwise"
        return "native" if uses_nccl(self.group) else "staged"
