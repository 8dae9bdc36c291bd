"""The CPU allocator's account is found whatever other threads allocate meanwhile."""

import sys
import threading

import pytest
import torch

from memadvisor.capture.cpu_account import open_cpu_account


def test_an_account_opens_and_knows_its_blocks_while_other_threads_allocate():
    """One opening in twelve gave no account, and steps whose memory was "not recorded"; one block in forty had another size."""
    if (account := open_cpu_account([])) is None:
        pytest.skip("this build of torch does not tell its CPU total")
    account.close([])
    goes_on = True
    small, block = torch.ones(100), torch.ones(10_000)
    address, size_bytes = block.data_ptr(), block.nbytes

    def work() -> None:
        while goes_on:
            torch.relu(small)

    threads = [threading.Thread(target=work) for _ in range(3)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for _ in range(1000):
            account = open_cpu_account([])
            assert account is not None
            account.add(address, size_bytes)
            assert account.holds(address, size_bytes) and not account.holds(address + 64, size_bytes)
            account.close([address])
    finally:
        goes_on = False
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval_s)
