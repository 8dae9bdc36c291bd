import torch

import memadvisor


class Variable:
    def __init__(self, value):
        self.name, self._value = "variable", value


class Momentum:
    """An optimizer after Keras's, which knows variables and no tensors."""

    def __init__(self, variables):
        self.variables = variables
        self.momenta = [Variable(torch.zeros_like(each._value)) for each in variables]
        self.iterations = Variable(torch.zeros(()))

    @torch.no_grad()
    def apply(self):
        for variable, momentum in zip(self.variables, self.momenta, strict=True):
            momentum._value.mul_(0.9).add_(variable._value.grad)
            variable._value.sub_(momentum._value, alpha=0.1)
            variable._value.grad = None


def test_state_that_is_wrapped_as_parameters_are_is_optimizer_state(tmp_path):
    """It was other. So is what is as large, and in no such list."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 3))
    variables = [Variable(each) for each in model.parameters()]
    optimizer, aside = Momentum(variables), Variable(torch.zeros(8, 16))
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.apply()
    rank = prof.run.ranks[0]
    assert rank.traced_step is not None
    states = [row for row in rank.storages if row.category == "optimizer_state"]

    sizes = [each.nbytes for each in model.parameters()]
    assert [(row.unit, row.size_bytes) for row in states] == [
        ("0", sizes[0]), ("0", sizes[1]), ("1", sizes[2]), ("1", sizes[3])
    ]  # fmt: skip
    assert aside._value.nbytes in [row.size_bytes for row in rank.storages if row.category == "other"]
