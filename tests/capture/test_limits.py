"""What a rank writes and remembers is bounded; past the bound less is recorded, and a note says so."""

import pytest
import torch
from torch import nn

from memadvisor.analyzers.analysis import analyze
from memadvisor.capture import labels, writer
from memadvisor.capture.recorder import Recorder
from memadvisor.run.store import load_run


def train(recorder, num_steps):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    recorder.finish(0, None)


def options(directory, **changes):
    return writer.RecorderOptions(directory=directory, rank=0, world_size=1, local_rank=0, **changes)


def only_rank(directory):
    [rank] = load_run(directory).ranks
    return rank


def test_past_the_size_only_steps_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_FLUSH_EVERY_S", 0.0)
    (tmp_path / "capped").mkdir()
    (tmp_path / "free").mkdir()
    train(Recorder(options(tmp_path / "capped", max_bytes=40_000, trace_step=10**6)), 400)
    train(Recorder(options(tmp_path / "free", trace_step=10**6)), 400)
    capped, free = only_rank(tmp_path / "capped"), only_rank(tmp_path / "free")

    assert [step.index for step in capped.steps] == [step.index for step in free.steps] == list(range(400))
    assert 0 < len(capped.spans) < len(free.spans)
    assert capped.ending.exit_code == 0
    [note] = capped.notes
    assert "--max-run-size 39.1 KiB" in note.text and note.level == "warning"
    assert analyze(load_run(tmp_path / "capped")).ranks[0].step_time.median_s > 0


def test_a_trace_that_does_not_fit_is_left_out_whole(tmp_path):
    train(Recorder(options(tmp_path, max_bytes=4000, trace_step=2)), 6)
    rank = only_rank(tmp_path)

    assert len(rank.steps) == 6 and rank.traced_step is None
    assert (rank.storages, rank.saved, rank.operators) == ((), (), ())
    assert any("does not fit into --max-run-size" in note.text for note in rank.notes)


@pytest.mark.parametrize("most", [20, 35])  # it is full in the forward, in the backward
def test_a_step_of_too_many_operators_is_not_remembered(tmp_path, monkeypatch, most):
    monkeypatch.setattr(labels, "MOST_OPERATORS", most)
    recorder = Recorder(options(tmp_path, trace_step=2))
    train(recorder, 6)
    rank = only_rank(tmp_path)

    assert len(rank.steps) == 6 and rank.traced_step is None
    assert rank.operators == ()
    assert [step.index for step in rank.steady_steps()] == [3, 4, 5]
    assert ["too many operators" in note.text for note in rank.notes] == [True]
    assert not torch._C._autograd._profiler_enabled()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
