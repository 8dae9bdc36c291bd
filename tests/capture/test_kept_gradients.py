import torch

import memadvisor


def test_gradients_of_each_sample_that_parameters_hold_from_the_step_before_are_gradients(tmp_path):
    """As of opacus and BackPACK: 4 samples of 8 x 8 floats. They were other."""
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            x = torch.randn(4, 8)
            model(x).square().sum().backward()
            model.weight.grad_sample = 2 * torch.einsum("no,ni->noi", model(x).detach(), x)
            model.weight.grad_norms = torch.ones(1000)
            optimizer.step()
            optimizer.zero_grad()
    rows = prof.run.ranks[0].storages
    before = {(row.size_bytes, row.category) for row in rows if row.phase == "baseline"}

    assert (4 * 256, "gradient") in before
    assert (4000, "other") in before
