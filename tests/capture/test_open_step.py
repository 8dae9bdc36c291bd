import pytest
import torch

import memadvisor


def test_gradients_of_each_step_are_told(tmp_path):
    """Of two layers of 8 x 8 floats, of which the first is frozen for three steps: no view told that later steps are larger."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run", trace_step=1) as prof:
        for step in range(5):
            if step == 3:
                optimizer.add_param_group({"params": model[0].requires_grad_(True).parameters()})
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rank = prof.run.ranks[0]

    assert [step.gradient_bytes for step in rank.steps] == [256] * 3 + [512] * 2
    larger = prof.analysis.larger_steps
    assert larger is not None and (larger.compared, larger.step, larger.num_larger) == (
        "gradient_bytes",
        3,
        2,
    )


@pytest.mark.parametrize("num_updates", [1, 2])
def test_gradients_are_of_the_optimizer_that_has_most(tmp_path, num_updates):
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 2, bias=False)])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in model[:num_updates]]
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            model[1](model[0](torch.randn(4, 8))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert {step.gradient_bytes for step in prof.run.ranks[0].steps} == {256}
