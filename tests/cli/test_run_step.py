"""`run` traces the step that `profile` did, of the same samples: predicted and measured are of one step."""

import subprocess

import pytest

import memadvisor
from tests.warm_python import warm_python

SCRIPT = """
import torch

torch.manual_seed(0)

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.func.vmap(torch.tanh)(self.linear(x))

model = torch.nn.Sequential(*(Block() for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.randn(4 + step, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.timeout(300)
def test_a_run_with_a_plan_traces_the_chosen_step_where_a_trace_that_sees_casts_would_be_made_again(tmp_path):
    """As of transformers' masks, and of shards under ZeRO: the trace was inflated, and the next step, of other samples, was
    traced without looking at casts, for which nobody asks of a run with a plan."""
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["-m", "memadvisor", "run", "--policy", "every-layer", "--out", "run", "train.py"]
    subprocess.run([warm_python(), *words], cwd=tmp_path, check=True, capture_output=True)

    assert memadvisor.load(tmp_path / "run").ranks[0].traced_step.index == 2
