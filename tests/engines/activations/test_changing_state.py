"""What a forward sets on its modules is, for a second run, as it was before the first, and afterwards as it is."""

from collections import Counter, deque

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from tests.engines.trainings import Noted, applied, make_plan


class Cached(torch.nn.Module):
    """Keeps its result for later calls until the script clears it, as pykeen's R-GCN does."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(9, 9)
        self.result = None

    def forward(self, x):
        if self.result is None:
            self.result = torch.tanh(self.linear(x)).exp()
        return self.result


class Counting(torch.nn.Module):
    """What it does depends on how often it was called; the first call makes the count."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(9, 9)
        self.runs = Noted()

    def forward(self, x):
        self.count = getattr(self, "count", 0) + 1
        self.runs.append(self.count)
        return torch.tanh(self.linear(x) * self.count)


def train(kind):
    """Its first step finds one result that is there already."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(9, 9), kind(), kind())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    model[1].result = torch.ones(5, 9)
    for _ in range(4):
        loss = (model(torch.randn(5, 9)) * model[1](torch.randn(5, 9))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for unit in model[1:]:
            unit.result = None
        losses.append(float(loss.detach()))
    return losses, model


def test_a_unit_that_keeps_its_result_for_the_next_call_is_recomputed():
    """The second run returned what was kept, saved nothing, and ended the training."""
    plain, _ = train(Cached)
    with applied(make_plan(1, policy="every-layer")):
        ours, _ = train(Cached)
    assert ours == plain


def test_a_count_of_calls_goes_on_as_without_the_plan():
    plain, plain_model = train(Counting)
    with applied(make_plan(1, policy="every-layer")):
        ours, model = train(Counting)
    assert ours == plain
    assert model[2].count == plain_model[2].count == 4
    assert sorted(model[2].runs) == [1, 1, 2, 2, 3, 3, 4, 4]  # each was run again with its own count


class Remembering(torch.nn.Module):
    """What it does depends on what it has put into lists and dictionaries, in place."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(9, 9)
        self.kinds = Counter(calls=1)
        self.means, self.last, self.made, self.seen = [], deque([0.0], maxlen=2), {}, set()
        self.long, self.many = [1.0] * 100, dict.fromkeys(range(100), 1.0)
        self.runs = Noted()

    def forward(self, x):
        y = self.linear(x)
        self.means.append(float(y.detach().mean()))
        self.last.append(self.means[-1])
        self.kinds["calls"] += 1
        self.seen.add(len(self.means) % 3)
        self.made[len(self.made)] = y.detach()
        self.long.append(0.5)
        self.many[len(self.many)] = 0.5
        self.runs.append(len(self.means))
        scale = len(self.means) + self.last[0] + self.kinds["calls"] + len(self.seen) + len(self.made)
        return torch.tanh(y * (scale + sum(self.long) + sum(self.many.values())) / 100)


def test_lists_and_dictionaries_that_a_forward_changes_in_place_are_changed_once():
    """The second run appended once more, and made the backward of another forward."""
    plain, plain_model = train(Remembering)
    with applied(make_plan(1, policy="every-layer")):
        ours, model = train(Remembering)

    assert ours == plain
    for name in ("means", "last", "kinds", "seen", "long", "many"):
        assert getattr(model[1], name) == getattr(plain_model[1], name)
    assert list(model[1].made) == list(plain_model[1].made)
    assert len(model[1].runs) == 2 * len(plain_model[1].runs)


class History(list):
    """A list of the script's own class, which has what lists have not."""

    def note(self, value):
        self.append(value)
        return len(self)


class Uncopied(dict):
    def __copy__(self):
        raise RuntimeError("there is one of me")


class Noting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(9, 9)
        self.light, self.long, self.made = History(), History([1.0] * 100), History()
        self.single = Uncopied()

    def forward(self, x):
        y = self.linear(x)
        scale = self.light.note(1.0) + self.long.note(1.0) / 100 + self.made.note(y.detach())
        self.single["last"] = scale
        return torch.tanh(y * scale)


def test_what_a_script_has_for_lists_is_of_its_class_in_the_second_run():
    """A plain list in its place ended the training in the backward."""
    plain, _ = train(Noting)
    with applied(make_plan(1, policy="every-layer")):
        ours, model = train(Noting)
    assert ours == plain
    assert type(model[1].light) is History
    assert len(model[1].light) == len(model[1].made) == 8


class Appending(torch.nn.Module):
    def __init__(self, log):
        super().__init__()
        self.linear, self.log = torch.nn.Linear(9, 9), log

    def forward(self, x):
        self.log.append(1.0)
        return torch.tanh(self.linear(x))


class Reading(Appending):
    def forward(self, x):
        return torch.tanh(self.linear(x) * len(self.log))


class Sharing(torch.nn.Module):
    """Its layers have one list, which one of them appends to and the other reads."""

    def __init__(self):
        super().__init__()
        self.log = []
        self.first, self.second = Appending(self.log), Reading(self.log)

    def forward(self, x):
        return self.second(self.first(x))


def test_a_list_that_two_layers_share_is_one_list_in_the_second_run():
    """Each had a copy of its own, so that gradients were of another forward."""
    plain, _ = train(Sharing)
    with applied(make_plan(1, policy="every-layer")):
        ours, _ = train(Sharing)
    assert ours == plain


class Dropping(torch.nn.Module):
    """Has what it made in a list that the script empties before the backward."""

    def __init__(self):
        super().__init__()
        self.linear, self.made = torch.nn.Linear(9, 9), []

    def forward(self, x):
        self.made.append(torch.tanh(self.linear(x)))
        return self.made[-1] * 2


def test_tensors_in_a_list_are_not_held_for_a_second_run():
    with applied(make_plan(1, policy="every-layer")):
        model = torch.nn.Sequential(Dropping(), Dropping())
        torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.randn(5, 9)).sum()
        made = [torch.multiprocessing.reductions.StorageWeakRef(model[0].made[0].untyped_storage())]
        model[0].made.clear()
        assert made[0].expired()
        loss.backward()
    assert model[0].linear.weight.grad is not None


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(9, 9), torch.nn.BatchNorm1d(9)
        self.register_buffer("shift", torch.zeros(9))

    def forward(self, x):
        return x + torch.tanh(self.norm(self.linear(x)) + self.shift)


def meta_train(create_graph):
    """A step on copies of the weights, and the loss of a call with those."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(Normed(), Normed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        inner = model(torch.randn(5, 9)).square().mean()
        slopes = torch.autograd.grad(inner, list(model.parameters()), create_graph=create_graph)
        own = zip(model.named_parameters(), slopes, strict=True)
        fast = {name: value - 0.5 * slope for (name, value), slope in own}
        fast |= {name: value + 1 for name, value in model.named_buffers() if name.endswith("shift")}
        loss = F.mse_loss(functional_call(model, fast, (torch.randn(5, 9),)), torch.ones(5, 9))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_unit_that_is_called_with_other_weights_runs_again_with_those(create_graph):
    """The module had its own again when the backward came, and gradients were of a model that never ran."""
    plain = meta_train(create_graph)
    with applied(make_plan(1, policy="every-layer")):
        ours = meta_train(create_graph)
    assert ours == plain


class Lazy(torch.nn.Module):
    """Makes its buffers in its first call: one that is as it was registered (litgpt's LoRA does so), and a mean that each
    call moves on."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(9, 9)
        self.register_buffer("mean", None)

    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.linspace(0, 1, 9), persistent=False)
        x = torch.tanh(self.linear(x) * self.scale)
        if self.mean is None:
            self.mean = x.detach().mean(0)
        self.mean = self.mean.lerp(x.detach().mean(0), 0.5)
        return x * self.mean


def test_a_buffer_that_the_first_call_makes_is_made_in_its_second_run_too():
    """The training ended in an error, as the unit had more buffers than before."""
    plain, plain_model = train(Lazy)
    with applied(make_plan(1, policy="every-layer")):
        ours, model = train(Lazy)
    assert ours == plain
    assert [b.tolist() for b in model.buffers()] == [b.tolist() for b in plain_model.buffers()]


class Dispensing(torch.nn.Module):
    """Takes a buffer out in its first call."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(9, 9)
        self.register_buffer("start", torch.linspace(0, 1, 9))

    def forward(self, x):
        start = self._buffers.pop("start", None)
        return torch.tanh(self.linear(x) * (1 if start is None else start))


def test_a_buffer_that_the_first_call_takes_out_is_there_in_its_second_run():
    plain, _ = train(Dispensing)
    with applied(make_plan(1, policy="every-layer")):
        ours, _ = train(Dispensing)
    assert ours == plain
