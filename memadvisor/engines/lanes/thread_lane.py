"""The lane of a CPU: one worker thread, which does what it is given in order.

torch keeps grad mode, autocast and dispatch modes per thread, so the worker has none of the script's. It lets go
of a piece of work before it says that it is over: who waited is then the only one to free the buffers.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from memadvisor.engines.lanes.lanes import Adopted, Ticket, Waited

_POLL_S = 1.0
_LAST_S = (
    0.5  # how long the end of the process waits for work that may never end, as after another rank's death
)


class ThreadTicket:
    """Work on a thread lane; `error` is what it raised, or what had broken the lane before."""

    def __init__(
        self,
        work: Callable[[], Any],
        after: Sequence[Ticket],
        kept: Sequence[torch.Tensor],
        broken: list[BaseException],
    ) -> None:
        self._work: Callable[[], Any] | None = work
        self._after = list(after)
        self._kept = list(kept)
        self._broken = broken
        self._result: Any = None
        self._error: BaseException | None = None
        self._over = threading.Lock()  # held until the work is over
        self._over.acquire()
        self.is_over = False

    def wait(self) -> Any:
        self.join()
        self._kept.clear()
        if self._error is not None:
            raise self._error
        return self._result

    def join(self) -> None:
        while not self.is_over:
            # An interrupt may strike between the two calls; then others find the lock held, but the work over.
            if self._over.acquire(timeout=_POLL_S):
                self._over.release()

    def do(self) -> None:
        """Do the work, in whatever thread this is. What follows a failure is not done: ranks are out of step."""
        work, self._work = self._work, None
        try:
            for ticket in self._after:
                ticket.join()
            if self._broken:
                raise self._broken[0]
            if work is not None:
                self._result = work()
        except BaseException as error:
            self._error = error
            if not self._broken:
                self._broken.append(error)
        del work
        self._after.clear()
        self.is_over = True
        self._over.release()


class ThreadLane:
    """Its thread starts with the first work, ends with `close`, with the lane itself, or with the process.

    survives: what follows work that failed is done all the same, which is wrong of collectives.
    """

    def __init__(self, *, survives: bool = False) -> None:
        self._broken: list[BaseException] | None = None if survives else []
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._queue: SimpleQueue[ThreadTicket | None] = SimpleQueue()
        self._last: weakref.ref[ThreadTicket] | None = None
        self._end: weakref.finalize[..., ThreadLane] | None = None

    def submit(
        self,
        work: Callable[[], Any],
        *,
        after: Sequence[Ticket] = (),
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> ThreadTicket:
        if self._pid != os.getpid():
            self._start()  # a fork has copied all but the thread
        if self._end is None:
            thread = threading.Thread(
                target=_work_off, args=(self._queue,), name="memadvisor-transfers", daemon=True
            )
            thread.start()
            self._end = weakref.finalize(self, _stop, self._queue, thread, self._pid)
        ticket = ThreadTicket(work, after, (*reads, *writes), self._failures())
        self._last = weakref.ref(ticket)
        self._queue.put(ticket)
        return ticket

    def run(
        self,
        work: Callable[[], Any],
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> Any:
        last = self._last() if self._last is not None and self._pid == os.getpid() else None
        if last is not None and not last.is_over:
            return self.submit(work, reads=reads, writes=writes).wait()
        ticket = ThreadTicket(work, (), (), self._failures())
        with torch.no_grad():
            ticket.do()
        return ticket.wait()

    def _failures(self) -> list[BaseException]:
        return [] if self._broken is None else self._broken

    def adopt(
        self,
        works: Sequence[Waited],
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        result: Any = None,
    ) -> Ticket:
        return Adopted(works, (*reads, *writes), result)

    def close(self) -> None:
        if self._end is not None:
            self._end()


def _work_off(queue: SimpleQueue[ThreadTicket | None]) -> None:
    torch.set_grad_enabled(False)
    while (ticket := queue.get()) is not None:
        ticket.do()
        del ticket  # the next one may be long in coming


def _stop(queue: SimpleQueue[ThreadTicket | None], thread: threading.Thread, pid: int) -> None:
    if os.getpid() == pid:
        queue.put(None)
        if thread is not threading.current_thread():
            # A daemon thread that wakes up while Python shuts down could abort the process.
            thread.join(timeout=_LAST_S)
