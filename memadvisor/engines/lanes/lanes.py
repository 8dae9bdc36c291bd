"""Lanes: where the engine's transfers run beside the compute, and the tickets that order the two.

Work is submitted by the thread that computes, and begins when all compute before the submission is over. Compute
that needs what the work makes waits for its ticket. A lane runs its work one after another, in the order of
submission, which the program makes the same on all ranks.

Until a ticket has been waited for, it keeps alive what the work reads and writes. Work allocates nothing of size:
buffers are made by who submits and freed by who waits, so that what is in memory at each point of the program
does not hang on how fast a lane runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Waited(Protocol):
    """A collective that torch runs beside the compute, as `dist.Work` is."""

    def wait(self) -> object: ...


class Ticket(Protocol):
    """Work under way."""

    def wait(self) -> Any:
        """Let nothing that the caller computes from here on come before the work's end; gives its result.

        Raises what the work raised. A second call does the same again.
        """

    def join(self) -> None:
        """Block the calling thread until the work is over, for another lane's sake; nothing is let go."""


class Lane(Protocol):
    """`reads` and `writes` are all the tensors that the work touches."""

    def submit(
        self,
        work: Callable[[], Any],
        *,
        after: Sequence[Ticket] = (),
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> Ticket:
        """Have `work` done after all that was submitted before, and after `after`, of other lanes."""

    def run(
        self,
        work: Callable[[], Any],
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> Any:
        """`submit(work).wait()`, without the way through another thread where nothing else is under way."""

    def adopt(
        self,
        works: Sequence[Waited],
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        result: Any = None,
    ) -> Ticket:
        """A ticket for collectives that the caller has just issued, and torch runs beside the compute itself."""

    def close(self) -> None:
        """End the lane, when what was submitted is over."""


class Chain:
    """Several tickets as one, whose `result` is there when the last of them is over."""

    def __init__(self, tickets: Sequence[Ticket], result: torch.Tensor) -> None:
        self.tickets = tuple(tickets)
        self.result = result

    def wait(self) -> torch.Tensor:
        for ticket in self.tickets:
            ticket.wait()
        return self.result

    def join(self) -> None:
        for ticket in self.tickets:
            ticket.join()


class EndedWell:
    """A ticket that whoever follows it must see succeed: what it was to have written may be there alone."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket

    def wait(self) -> Any:
        return self.ticket.wait()

    join = wait


class Adopted:
    """The ticket of collectives that torch runs beside the compute."""

    def __init__(self, works: Sequence[Waited], kept: Sequence[torch.Tensor], result: Any) -> None:
        self._works = list(works)
        self._kept = list(kept)  # torch reads and writes them until it is done
        self._result = result

    def wait(self) -> Any:
        self.join()
        self._kept.clear()
        return self._result

    def join(self) -> None:
        for work in self._works:
            work.wait()
