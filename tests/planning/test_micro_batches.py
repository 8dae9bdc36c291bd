"""Plans for micro-batches that were never recorded."""

import pytest
import torch

import memadvisor
from memadvisor.errors import UsageError
from memadvisor.planning.micro_batches import splits, step_with
from memadvisor.precision import FULL_PRECISION


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.attention = torch.nn.MultiheadAttention(32, 2, batch_first=True)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32))

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(self.norm(x))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(100, 32)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.head = torch.nn.Linear(32, 100)

    def forward(self, x):
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(out, size, accumulation=1):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    with memadvisor.profile(out) as prof:
        for _ in range(5):
            for _ in range(accumulation):
                x = torch.randint(100, (size, 24))
                torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return prof.run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return train(tmp_path_factory.mktemp("run") / "run", 4)


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """The same training with three times the micro-batch, which is only asked about in `recorded`."""
    return train(tmp_path_factory.mktemp("run") / "run", 12).ranks[0].traced_step.peak_allocated_bytes


def test_the_peak_of_a_larger_micro_batch_is_foretold(recorded, larger):
    """But for single numbers, such as the loss, which count as if they grew."""
    advice = memadvisor.advise(recorded, memory=2**40, micro_batch=12)

    assert 0 <= advice.best.prediction.peak_bytes - larger <= 64
    assert advice.best.recomputed_units == ()
    assert (advice.best.micro_batch_size, advice.best.grad_accum) == (12, 1)
    assert (advice.micro_batch, advice.recorded_micro_batch) == (12, 4)
    assert advice.measured_peak_bytes == recorded.ranks[0].traced_step.peak_allocated_bytes < larger


def test_a_plan_makes_it_fit_and_its_peak_is_as_foretold(recorded, larger, tmp_path):
    """Planned from micro-batches of 4, applied to one of 12."""
    budget = larger * 6 // 10
    plan = memadvisor.advise(recorded, memory=budget, micro_batch=12).best
    assert plan.recomputed_units

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    applied = memadvisor.apply(plan, model, optimizer)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            x = torch.randint(100, (12, 24))
            torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    applied.remove()
    peak_bytes = prof.run.ranks[0].traced_step.peak_allocated_bytes

    assert peak_bytes <= budget
    assert peak_bytes == pytest.approx(plan.prediction.peak_bytes, rel=0.01)


def test_splits_of_it_see_as_many_samples(recorded):
    whole, size = step_with(recorded, 8, FULL_PRECISION, 1)
    found = [step for step, _ in splits(recorded, whole, size, 1)]

    assert [(step.micro_batch_size, step.repeats) for step in found] == [(8, 1), (4, 2), (2, 4), (1, 8)]
    own, _ = step_with(recorded, None, FULL_PRECISION, 1)
    split = found[1]  # micro-batches as they were recorded, and twice as many
    assert [segment.captured for segment in split.segments] == [segment.captured for segment in own.segments]
    assert [segment.duration_s for segment in split.segments] == [
        segment.duration_s for segment in own.segments
    ]


@pytest.mark.parametrize(("size", "why"), [(2, "smaller ones"), (0, "smaller ones"), (33, "too badly")])
def test_sizes_that_nobody_can_tell_are_refused(recorded, size, why):
    with pytest.raises(UsageError, match=why) as refused:
        memadvisor.advise(recorded, memory=2**40, micro_batch=size)
    assert "give 5 to 32" in refused.value.hint
