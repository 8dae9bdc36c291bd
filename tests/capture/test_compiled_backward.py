"""A script whose backward is compiled trains as without memadvisor, and is told why no step is traced."""

import subprocess
import sys

SCRIPT = """
import os
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch._dynamo.config.compiled_autograd = True

@torch.compile(backend="eager")
def train(batch):
    loss = model(batch).square().mean()
    loss.backward()
    return loss

for _ in range(5):
    print(train(torch.rand(4, 8)).item(), flush=True)
    optimizer.step()
    optimizer.zero_grad()
os._exit(0)  # torch 2.13 may wait for ever when such a process ends
"""


def test_a_training_whose_backward_is_compiled_goes_on_and_no_step_of_it_is_traced(tmp_path):
    """Dynamo traced through the recorder in the traced step, for longer than anybody waits."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    plain, profiled = (
        subprocess.run([sys.executable, *words, script], capture_output=True, text=True, timeout=250)
        for words in ((), ("-m", "memadvisor", "profile", "--out", tmp_path / "run"))
    )
    assert plain.returncode == profiled.returncode == 0
    assert profiled.stdout == plain.stdout
