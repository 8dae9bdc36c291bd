"""Whether torch.distributed.rpc spreads the training over processes: capture and engines ask, and need no torch for it."""

from __future__ import annotations

import sys
from typing import Any

from memadvisor.run.children import children_of


def uses_rpc() -> bool:
    """Whether this process has, or had, a part in it."""
    rpc = sys.modules.get("torch.distributed.rpc")
    return bool(getattr(rpc, "_init_counter", 0))


def holds_remote(module: Any) -> bool:
    """Whether a module, or one inside it, is another process's: such a `RemoteModule` raises where it, or what is around
    it, is asked for modules and parameters."""
    remote = sys.modules.get("torch.distributed.nn.api.remote_module")
    if remote is None or not uses_rpc():
        return False
    left, seen = [module], {id(module)}
    while left:
        part = left.pop()
        if isinstance(part, remote._RemoteModule):
            return True
        inside = children_of(part)
        left += [each for each in inside if id(each) not in seen]
        seen |= set(map(id, inside))
    return False
