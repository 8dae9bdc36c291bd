"""What is said of a training that torch.distributed.rpc spreads over processes, on one of them."""

import subprocess
import sys

import memadvisor

SCRIPT = """
import os, sys
import torch, torch.distributed.rpc as rpc, torch.distributed.autograd as dist_autograd
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer

class Hybrid(torch.nn.Module):
    def __init__(self, remote):
        super().__init__()
        self.remote, self.head = remote, torch.nn.Linear(8, 4)

    def forward(self, indices):
        return self.head(self.remote.forward(indices))

rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{os.getcwd()}/meeting"))
torch.manual_seed(0)
model = Hybrid(RemoteModule("alone", torch.nn.Embedding, args=(16, 8)))
references = model.remote.remote_parameters() + [rpc.RRef(each) for each in model.head.parameters()]
distributed = DistributedOptimizer(torch.optim.SGD, references, lr=0.1)
local = torch.optim.SGD(model.head.parameters(), lr=0.1)
for step in range(6):
    indices = torch.arange(4) + step
    if sys.argv[1] == "distributed":
        with dist_autograd.context() as context:
            loss = model(indices).square().sum()
            dist_autograd.backward(context, [loss])
            distributed.step(context)
    else:  # without such a context what comes from elsewhere is no part of autograd's graph
        loss = model(indices).square().sum()
        loss.backward()
        local.step()
        local.zero_grad()
    print(f"{loss.item():.6f}")
rpc.shutdown()
"""


def run(tmp_path, kind, *tool):
    script = tmp_path / "over_rpc.py"
    script.write_text(SCRIPT)
    place = tmp_path / f"in{len(tool)}"
    place.mkdir()
    words = [sys.executable, "-W", "ignore", *tool, script, kind]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=place)


def test_a_model_with_parts_in_other_processes_is_named_as_such(tmp_path):
    """A RemoteModule raises where it is asked for its modules or parameters, and so does what is around it."""
    plain = run(tmp_path, "distributed")
    recorded = run(tmp_path, "distributed", "-m", "memadvisor", "profile", "-o", tmp_path / "run")

    assert plain.returncode == recorded.returncode == 0, (plain.stderr, recorded.stderr)
    assert recorded.stdout == plain.stdout
    assert "stopped recording" not in recorded.stderr
    said = " ".join(recorded.stderr.split())
    assert "No training step was seen: a model was called" in said
    assert "updates of its DistributedOptimizer" in said
    assert "let it launch this" not in said


def test_what_a_process_trains_beside_them_is_recorded(tmp_path):
    recorded = run(tmp_path, "local", "-m", "memadvisor", "profile", "-o", tmp_path / "run")
    rank = memadvisor.load(tmp_path / "run").ranks[0]

    assert recorded.returncode == 0, recorded.stderr
    assert [(each.name, each.num_elements) for each in rank.parameters] == [("weight", 32), ("bias", 4)]
    assert len(rank.steps) == 6
