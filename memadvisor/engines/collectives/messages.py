"""Messages between two ranks of a group, with tags of our own, whose failures say what they were.

Messages of one tag from one rank to another arrive in the order in which they are sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from memadvisor.engines.collectives.exchanges import Parts
from memadvisor.engines.collectives.works import CollectiveError, Work, there
from memadvisor.own_hooks import own_hooks_aside


class Messages:
    """Of one wire, whose tags begin at `first_tag`. Ranks are counted in the group."""

    def __init__(self, group: dist.ProcessGroup, first_tag: int) -> None:
        self._group = group
        self._first_tag = first_tag
        self.global_ranks = [dist.get_global_rank(group, rank) for rank in range(group.size())]
        self._rank = self.global_ranks[group.rank()]

    def begin_exchange(
        self,
        operation: str,
        unit: str,
        sent: Parts,
        to: int,
        received: Parts,
        source: int,
        tag: int,
    ) -> list[Work]:
        """Send to one rank, and receive from another, any number of tensors one after another; all are under way on return.

        Receives are posted first. Gloo sends what the other end waits for already in the thread that says so, beside its
        own that receives; what is waited for later its own thread sends, so that of two messages that cross each other on
        a slow link one waits for the other.
        """
        back = [self.begin_receive(operation, unit, tensor, source, tag) for tensor in received]
        return [*(self.begin_send(operation, unit, tensor, to, tag) for tensor in sent), *back]

    def begin_send(self, operation: str, unit: str, sent: torch.Tensor, to: int, tag: int) -> Work:
        rank = self.global_ranks[to]
        sending = partial(self.named, operation, unit, f", sending to rank {rank}")
        with sending():
            return Work(there(dist.isend(sent, rank, group=self._group, tag=self._first_tag + tag)), sending)

    def begin_receive(self, operation: str, unit: str, received: torch.Tensor, source: int, tag: int) -> Work:
        rank = self.global_ranks[source]
        receiving = partial(self.named, operation, unit, f", receiving from rank {rank}")
        with receiving():
            work = there(dist.irecv(received, rank, group=self._group, tag=self._first_tag + tag))
        return Work(work, receiving)

    @contextlib.contextmanager
    def named(self, operation: str, unit: str | None = None, where: str = "") -> Iterator[None]:
        """Say in an error what failed."""
        try:
            with own_hooks_aside():
                yield
        except Exception as error:
            whose = "" if unit is None else f" of unit {unit!r}" if unit else " of the model's own parameters"
            raise CollectiveError(
                f"The {operation}{whose} failed on rank {self._rank}{where}: {error}"
            ) from error
