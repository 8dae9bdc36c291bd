"""What is read of the allocators leaves nothing on the script's stderr."""

import subprocess
import sys

import pytest
import torch

SCRIPT = """
import sys, torch
device = sys.argv[1]
model = torch.nn.Linear(64, 64).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [torch.randn(8, 64) for _ in range(6)]
while batches:
    batch = batches.pop()
    model(batch.to(device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    del batch
"""
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize("device", DEVICES)
def test_torch_does_not_say_that_it_does_not_know_a_batch(device, tmp_path):
    """A batch on the host that was there before the traced step is freed in it."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = ["-m", "memadvisor", "profile", "--out", tmp_path / "run", script, device]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, check=True)

    assert "step 2 traced" in " ".join(done.stderr.split())
    assert "unknown size" not in done.stderr
