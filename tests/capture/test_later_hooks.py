"""What is said of DDP's communication hooks that begin after the traced step."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import memadvisor
from memadvisor.run.documents import LATER_HOOK


@pytest.fixture(autouse=True)
def group(monkeypatch):
    monkeypatch.setattr("memadvisor.api.measure_engines", tuple)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def warnings_of(directory, hook, state, trace_step):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with memadvisor.profile(directory, trace_step=trace_step) as profile:
        for _ in range(6):
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rank = profile.run.ranks[0]
    return [note.text for note in rank.notes if "communication hook" in note.text]


def test_powersgd_that_has_not_begun_is_told_with_what_it_will_keep_and_a_step_behind(tmp_path):
    """Of steps 0, 1, 2, ... it compresses those from 3 on, and keeps from the first of them on what the next one begins with."""
    state = PowerSGDState(None, start_powerSGD_iter=3, min_compression_rate=0.5)
    (told,) = warnings_of(tmp_path / "before", powerSGD_hook, state, 2)
    bytes_of_gradients = (16 * 16 + 16) * 4

    assert "(PowerSGDState) begins at its iteration 3" in told
    assert f"of all gradients ({bytes_of_gradients / 2**10:.2f} KiB)" in told
    assert told.endswith("--trace-step 4 traces one of those.")
    assert told.startswith(LATER_HOOK)

    state = PowerSGDState(None, start_powerSGD_iter=3, min_compression_rate=0.5)
    assert warnings_of(tmp_path / "behind", powerSGD_hook, state, 4) == []
    assert sum(error.nbytes for error in state.error_dict.values()) == bytes_of_gradients


def test_local_sgd_that_has_not_begun_is_told(tmp_path):
    state = PostLocalSGDState(None, None, start_localSGD_iter=10)
    (told,) = warnings_of(tmp_path / "run", post_localSGD_hook, state, 2)

    assert "(PostLocalSGDState) begins at its iteration 10" in told
    assert "gradients" not in told


def test_a_hook_that_has_no_beginning_is_not(tmp_path):
    def hook(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    assert warnings_of(tmp_path / "run", hook, None, 2) == []
