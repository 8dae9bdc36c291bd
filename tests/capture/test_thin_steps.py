"""A model of many tiny layers is listened to now and then; what is not seen is not recorded, never wrong."""

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

import memadvisor
from memadvisor.capture import recorder
from memadvisor.capture.listening import Listening


@pytest.fixture
def dear(monkeypatch):
    """Listening costs more than its budget, whatever this machine says."""
    monkeypatch.setattr(Listening, "wants", lambda _, index: is_full(index))
    monkeypatch.setattr(recorder, "has_compiled", lambda: False)  # another test of this process may have


@pytest.fixture
def rank(dear, tmp_path):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    listens = []
    with memadvisor.profile(tmp_path / "run") as prof:
        for index in range(30):
            if index % 7 == 0:
                with torch.no_grad():
                    model(torch.ones(4, 8))
            for _ in range(2):
                listens.append(
                    torch_module._has_any_global_hook() and bool(torch_module._global_forward_hooks)
                )
                model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not torch_module._has_any_global_hook()
    [rank] = prof.run.ranks
    assert [listens[2 * step.index] for step in rank.steps] == [is_full(step.index) for step in rank.steps]
    return rank


def is_full(index):
    return index < 8 or index in (14, 28)


def test_only_some_steps_are_listened_to_and_only_they_know_their_samples(rank):
    forwards = {span.step for span in rank.spans if span.kind == "forward"}

    assert forwards == {step.index for step in rank.steps if is_full(step.index)}
    assert {step.num_samples for step in rank.steps if is_full(step.index)} == {2 * 4}
    assert {step.num_samples for step in rank.steps if not is_full(step.index)} == {None}


def test_every_step_has_its_time_its_phases_and_its_micro_batches(rank):
    assert {step.num_micro_batches for step in rank.steps} == {2}
    for kind in ("backward", "optimizer"):
        assert {span.step for span in rank.spans if span.kind == kind} == {step.index for step in rank.steps}


def test_evaluation_is_told_of_the_steps_that_were_seen_and_the_others_are_counted(rank):
    """In steps 0, 7, 14, 21 and 28; nobody listened in 21. The traced step counts nowhere."""
    from memadvisor.analyzers.evaluation import evaluation

    found = evaluation(rank)

    assert (found.num_calls, found.num_steps, found.num_unseen_steps) == (4, 4, 30 - 10)
    assert found.time_s > 0


def test_phases_and_units_are_those_of_the_steps_that_were_seen(rank):
    from memadvisor.analyzers.step_time import step_time

    found = step_time(rank)

    assert (found.num_steps, found.num_listened_steps) == (30 - 4, 8 - 4 + 2)
    assert found.by_phase_s["forward"] > 0
    assert {unit.unit for unit in found.units if unit.forward_s > 0} == {"0", "1", "2"}
    assert found.samples_per_s is not None
    assert sum(found.by_phase_s.values()) == pytest.approx(found.median_s)


def test_modules_that_a_reentrant_checkpoint_calls_again_are_not_taken_for_the_model(dear, tmp_path):
    """Each has a backward of its own inside the model's, and is given more than the model is."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.blocks = nn.Embedding(9, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, words):
            x = self.words(words)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x.sum()

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(14):
            model(torch.ones(2, 4, dtype=torch.long)).backward()
            optimizer.step()
            optimizer.zero_grad()
    (rank,) = prof.run.ranks

    assert {step.largest_input_elements for step in rank.steps} == {8}
