"""The collectives of the engine over one process group, chosen for exact memory.

Gloo's own reduce-scatter clones its input and all-reduces the clone, and its all-gather stages the
output. Pairwise exchange moves (n-1)/n of the bytes with no more than one shard of staging. NCCL's own
collectives are used where the tensors live on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

# The script's own sends and receives carry small tags; ours must not be taken for them.
_FIRST_TAG = 2**20


@dataclass(slots=True, eq=False)
class Transfer:
    """A collective under way. What it reads and writes is left alone, and alive, until `wait` has returned."""

    works: list[dist.Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(slots=True, eq=False)
class Scattering(Transfer):
    """A reduce-scatter under way; `own` is this rank's slice of what was summed, without `parts` so far."""

    own: torch.Tensor
    parts: list[torch.Tensor]  # other ranks' contributions, in the order in which they are added

    def result(self) -> torch.Tensor:
        """This rank's slice of the sum, once it is there."""
        self.wait()
        # The last part has storage of its own, which may stay when the full gradient goes.
        result = self.parts.pop() if self.parts else self.own
        for part in self.parts:
            self.own.add_(part)
        self.parts.clear()
        return result if result is self.own else result.add_(self.own)


class Wire:
    """Collectives of one group. `staged` is told of every staging buffer that is allocated."""

    def __init__(self, group: dist.ProcessGroup, staged: Callable[[torch.Tensor], None]) -> None:
        self.group = group
        self.num_ranks = group.size()
        self.rank = group.rank()
        self._staged = staged
        self._global_ranks = [dist.get_global_rank(group, rank) for rank in range(self.num_ranks)]

    def begin_mean(self, tensor: torch.Tensor) -> Transfer:
        """Begin to replace `tensor` by its mean over the ranks, scaled before the sum as DDP does."""
        tensor.mul_(1.0 / self.num_ranks)
        return _transfer(dist.all_reduce(tensor, group=self.group, async_op=True))

    def gather(self, full: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill `full` with every rank's shard, in order of rank. `shard` may be its own slice of `full`."""
        self.begin_gather(full, shard).wait()

    def begin_gather(self, full: torch.Tensor, shard: torch.Tensor, number: int = 0) -> Transfer:
        """Begin `gather`. Of gathers that are under way together, each has a `number` of its own."""
        way = self.way(full)
        slices = list(full.chunk(self.num_ranks))
        if way == "native":
            return _transfer(dist.all_gather_into_tensor(full, shard, group=self.group, async_op=True))
        if way == "staged":
            return _transfer(dist.all_gather(slices, shard, group=self.group, async_op=True))
        if slices[self.rank].data_ptr() != shard.data_ptr():
            slices[self.rank].copy_(shard)
        works: list[dist.Work] = []
        for distance in range(1, self.num_ranks):
            to, source = self._partners(distance)
            works += self._exchange(shard, to, slices[source], source, 2 * number)
        return Transfer(works)

    def reduce_scatter(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the sum of `full` over the ranks; `full` is used up.

        Pairwise it takes the other ranks' contributions one after another, into what becomes the result.
        """
        if self.way(full) != "pairwise":
            return self.begin_reduce_scatter(full).result()
        slices = full.chunk(self.num_ranks)
        own = slices[self.rank]
        staging = torch.empty_like(own)
        self._staged(staging)
        for distance in range(1, self.num_ranks):
            to, source = self._partners(distance)
            Transfer(self._exchange(slices[to], to, staging, source, 1)).wait()
            if distance < self.num_ranks - 1:
                own.add_(staging)
        return staging.add_(own)

    def begin_reduce_scatter(self, full: torch.Tensor, number: int = 0) -> Scattering:
        """Begin `reduce_scatter`; pairwise all contributions are staged, num_ranks - 1 slices."""
        slices = full.chunk(self.num_ranks)
        own = slices[self.rank]
        way = self.way(full)
        if way == "native":
            result = torch.empty_like(own)
            self._staged(result)
            work = dist.reduce_scatter_tensor(result, full, group=self.group, async_op=True)
            return Scattering(_transfer(work).works, result, [])
        if way == "staged":
            work = dist.all_reduce(full, group=self.group, async_op=True)
            return Scattering(_transfer(work).works, own, [])
        parts, works = [], []
        for distance in range(1, self.num_ranks):
            to, source = self._partners(distance)
            parts.append(torch.empty_like(own))
            self._staged(parts[-1])
            works += self._exchange(slices[to], to, parts[-1], source, 2 * number + 1)
        return Scattering(works, own, parts)

    def _exchange(
        self, sent: torch.Tensor, to: int, received: torch.Tensor, source: int, tag: int
    ) -> list[dist.Work]:
        """Send to one rank of the group and receive from another; both are under way on return."""
        out = dist.isend(sent, self._global_ranks[to], group=self.group, tag=_FIRST_TAG + tag)
        back = dist.irecv(received, self._global_ranks[source], group=self.group, tag=_FIRST_TAG + tag)
        return _transfer(out).works + _transfer(back).works

    def largest(self, values: list[int], device: torch.device) -> list[int]:
        """The largest of each value over the ranks."""
        tensor = torch.tensor(values, dtype=torch.int64, device=device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return [int(value) for value in tensor.tolist()]

    def broadcast(self, values: list[int], device: torch.device) -> list[int]:
        """The first rank's values."""
        tensor = torch.tensor(values, dtype=torch.int64, device=device)
        dist.broadcast(tensor, self._global_ranks[0], group=self.group)
        return [int(value) for value in tensor.tolist()]

    def _partners(self, distance: int) -> tuple[int, int]:
        return (self.rank + distance) % self.num_ranks, (self.rank - distance) % self.num_ranks

    def way(self, tensor: torch.Tensor) -> str:
        """How shards travel: natively (NCCL), pairwise (Gloo), or staged by Gloo through the host."""
        if not tensor.is_cuda:
            return "pairwise"
        return "native" if "nccl" in dist.get_backend(self.group) else "staged"


def _transfer(work: dist.Work | None) -> Transfer:
    if work is None:
        raise AssertionError("this process is no part of its own group")
    return Transfer([work])
