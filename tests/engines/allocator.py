"""torch's CPU allocator's own account, for the time of a test."""

import contextlib
import gc

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memadvisor.capture.census import residents
from memadvisor.capture.cpu_account import open_cpu_account


@contextlib.contextmanager
def open_account():
    """Afterwards the allocator keeps no account, and has none of what is still alive: later tests find it as new."""
    account = open_cpu_account([])
    assert account is not None
    try:
        yield account
    finally:
        gc.collect()
        account.close([block.address for block in residents((), torch.device("cpu"), account)])


class Highest(TorchDispatchMode):
    """The highest total of an account behind any operator."""

    def __init__(self, account):
        super().__init__()
        self.account, self.size_bytes = account, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.size_bytes = max(self.size_bytes, self.account.allocated_bytes())
        return result
