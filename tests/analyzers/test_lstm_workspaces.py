"""What LSTMs keep on a CPU, with fewer samples."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memadvisor.analyzers.batch_sizes import shrink_batch
from memadvisor.analyzers.lstm_workspaces import LSTM, workspace_bytes
from memadvisor.run.records import Operator
from tests.make_run import make_run, storage

SAMPLES = 16


class _Workspaces(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if str(func).startswith("aten.mkldnn_rnn_layer."):
            self.sizes.append(made[3].untyped_storage().nbytes())
        return made


@pytest.mark.parametrize(
    ("length", "samples", "given", "width"),
    [
        (1, 1, 48, 48),
        (48, 16, 48, 48),
        (64, 1, 16, 256),
        (100, 3, 33, 17),
        (33, 4, 512, 256),
        (20, 16, 24, 40),
    ],
)
def test_onednn_keeps_what_the_law_says(length, samples, given, width):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("without oneDNN torch computes LSTMs by other operators")
    with _Workspaces() as seen:
        torch.nn.LSTM(given, width, num_layers=2)(torch.zeros(length, samples, given, requires_grad=True))
    assert seen.sizes == [workspace_bytes(length, samples, each, width) for each in (given, width)]


def test_fewer_samples_have_whole_pages_too():
    """A seventh of the bytes and whole rows stay: a split of an LSTM's batch was predicted to take 2.6 % too much."""
    (rank,) = make_run(num_ranks=1, micro_batch_size=SAMPLES).ranks
    operator = Operator(
        name=LSTM, module="", unit="", phase="forward", start_s=1.0, end_s=2.0, executed_flops=0, model_flops=0,
        shapes=f"[[48, {SAMPLES}, 48], [192, 48]]",
    )  # fmt: skip
    known, other = workspace_bytes(48, SAMPLES, 48, 48), workspace_bytes(48, SAMPLES, 48, 48) + 4096
    rows = [
        storage(
            storage_id=10**6 + n, size_bytes=size, shape=f"[{size}]", dtype="uint8", operator=LSTM, birth_s=1.5, phase="forward"
        )
        for n, size in enumerate((known, other))
    ]  # fmt: skip
    found = shrink_batch(replace(rank, operators=(operator,), storages=tuple(rows)), rank.traced_step, 8)

    assert known == 2_252_800
    assert found[10**6] == workspace_bytes(48, SAMPLES // 8, 48, 48) == 299_008
    assert found[10**6 + 1] > 299_008  # laid out otherwise: as before
