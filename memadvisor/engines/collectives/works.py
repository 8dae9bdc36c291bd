"""Works of torch's process groups, whose failures say what they were."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist


class CollectiveError(RuntimeError):
    """A collective failed; says which one, of which unit, on which rank, and with whom."""


@dataclass(frozen=True, slots=True)
class Work:
    """One of torch's works, whose failure says what it was."""

    work: dist.Work
    named: Callable[[], contextlib.AbstractContextManager[None]]

    def wait(self) -> None:
        with self.named():
            self.work.wait()


def there(work: dist.Work | None) -> dist.Work:
    """What torch gives to the ranks of a group."""
    if work is None:
        raise AssertionError("this process is no part of its own group")
    return work
