"""The collectives of the engine over one process group, chosen for exact memory.

Gloo's own reduce-scatter clones its input and all-reduces the clone, and its all-gather stages the
output. Pairwise exchange moves (n-1)/n of the bytes with no more than one shard of staging. NCCL's own
collectives are used where the tensors live on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist


class Wire:
    """Collectives of one group. `staged` is told of every staging buffer that is allocated."""

    def __init__(self, group: dist.ProcessGroup, staged: Callable[[torch.Tensor], None]) -> None:
        self.group = group
        self.num_ranks = group.size()
        self.rank = group.rank()
        self._staged = staged
        self._global_ranks = [dist.get_global_rank(group, rank) for rank in range(self.num_ranks)]

    def begin_mean(self, tensor: torch.Tensor) -> dist.Work:
        """Begin to replace `tensor` by its mean over the ranks, scaled before the sum as DDP does.

        The tensor must be left alone, and alive, until the work that is returned has been waited for.
        """
        tensor.mul_(1.0 / self.num_ranks)
        work: dist.Work | None = dist.all_reduce(tensor, group=self.group, async_op=True)
        if work is None:
            raise AssertionError("this process is no part of its own group")
        return work

    def gather(self, full: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill `full` with every rank's shard, in order of rank. `shard` may be its own slice of `full`."""
        way = self.way(full)
        slices = list(full.chunk(self.num_ranks))
        if way == "native":
            dist.all_gather_into_tensor(full, shard, group=self.group)
            return
        if way == "staged":
            dist.all_gather(slices, shard, group=self.group)
            return
        if slices[self.rank].data_ptr() != shard.data_ptr():
            slices[self.rank].copy_(shard)
        works = []
        for distance in range(1, self.num_ranks):
            to, source = self._partners(distance)
            works.append(dist.isend(shard, self._global_ranks[to], group=self.group))
            works.append(dist.irecv(slices[source], self._global_ranks[source], group=self.group))
        for work in works:
            if work is not None:
                work.wait()

    def reduce_scatter_mean(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the mean of `full` over the ranks; `full` is used up."""
        full.mul_(1.0 / self.num_ranks)
        slices = full.chunk(self.num_ranks)
        own = slices[self.rank]
        way = self.way(full)
        if way == "native":
            result = torch.empty_like(own)
            self._staged(result)
            dist.reduce_scatter_tensor(result, full, group=self.group)
            return result
        if way == "staged":
            dist.all_reduce(full, group=self.group)
            return own
        staging = torch.empty_like(own)
        self._staged(staging)
        for distance in range(1, self.num_ranks):
            to, source = self._partners(distance)
            sent = dist.isend(slices[to], self._global_ranks[to], group=self.group)
            received = dist.irecv(staging, self._global_ranks[source], group=self.group)
            for work in (sent, received):
                if work is not None:
                    work.wait()
            own.add_(staging)
        return own

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
