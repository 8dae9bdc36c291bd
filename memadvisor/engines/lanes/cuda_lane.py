"""The lane of a GPU: one stream for as long as the lane lives, with events between it and the compute.

The host never waits. Work is queued where it is submitted, so the ranks' collectives come in the program's order.
A stream made anew each step would make the allocator's pools grow, and `record_stream` would leave it to chance
when a buffer can be used again: tickets keep buffers alive instead, until the computing stream has been told to
wait. Not verified on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memadvisor.engines.lanes.lanes import Adopted, EndedWell, Ticket, Waited


class CudaTicket:
    """Work on a stream, over when `event` is."""

    def __init__(
        self, event: torch.cuda.Event, device: torch.device, kept: Sequence[torch.Tensor], result: Any
    ) -> None:
        self.event = event
        self._device = device
        self._kept = list(kept)
        self._result = result

    def wait(self) -> Any:
        # Else the buffers would be given to compute that runs before the lane has done with them.
        torch.cuda.current_stream(self._device).wait_event(self.event)
        self._kept.clear()
        return self._result

    def join(self) -> None:
        self.event.synchronize()

    def __del__(self) -> None:
        if self._kept:  # nobody waited, as after an exception
            self.wait()


class CudaLane:
    """Its stream bears the transfers; NCCL's own streams wait for it and it for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._transfers = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types for it

    def submit(
        self,
        work: Callable[[], Any],
        *,
        after: Sequence[Ticket] = (),
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> CudaTicket:
        # Compute before this point may still be writing what the work reads, or reading what it writes.
        self._transfers.wait_stream(torch.cuda.current_stream(self._device))
        for ticket in (one.ticket if isinstance(one, EndedWell) else one for one in after):
            if isinstance(ticket, CudaTicket):  # which does not fail but with all that the GPU does
                self._transfers.wait_event(ticket.event)
            else:
                ticket.join()
        with torch.cuda.stream(self._transfers), torch.no_grad():
            result = work()
        return CudaTicket(self._transfers.record_event(), self._device, (*reads, *writes), result)

    def run(
        self,
        work: Callable[[], Any],
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> Any:
        return self.submit(work, reads=reads, writes=writes).wait()

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
        """Nothing: what was queued is done in its time, and the stream goes with the lane."""
