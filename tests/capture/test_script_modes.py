import torch
from torch.overrides import TorchFunctionMode

import memadvisor


class Log(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def train(log):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with log:
        for _ in range(6):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_mode_of_the_scripts_sees_what_the_script_calls_alone(tmp_path):
    """It saw each parameter's gradient that was asked for, and thousands of tensors in the traced step."""
    alone, profiled = Log(), Log()
    train(alone)
    with memadvisor.profile(tmp_path / "run") as prof:
        train(profiled)

    assert profiled.seen == alone.seen
    assert prof.run.ranks[0].traced_step is not None
