"""Messages between pairs of ranks as the engine sends them (memadvisor/engines/collectives/messages.py)."""

from __future__ import annotations

import torch.distributed as dist

from memadvisor.engines.collectives.exchanges import Parts


def exchange(sent: Parts, to: int, received: Parts, source: int) -> list[dist.Work]:
    """Send to one rank and receive from another; the receives are posted first."""
    works = [dist.irecv(each, source) for each in received] + [dist.isend(each, to) for each in sent]
    return [work for work in works if work is not None]
