"""What happens before a script destroys its process group: other ranks are out of reach from there on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from memadvisor.engines.script.undo import Undo
from memadvisor.engines.sharding.executor import Executor


def patch_goodbye(executors: Iterable[Executor], undo: Undo) -> None:
    """Before a script destroys its process group, bring what it still has of other ranks, and say goodbye to them."""
    original = dist.destroy_process_group

    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        if (args[0] if args else kwargs.get("group")) in (None, dist.group.WORLD):
            for executor in list(executors):
                executor.lates.keep()
            for executor in list(executors):
                executor.service.leave()
        original(*args, **kwargs)

    undo.replace(dist, "destroy_process_group", destroy_process_group)
    undo.replace(dist.distributed_c10d, "destroy_process_group", destroy_process_group)
