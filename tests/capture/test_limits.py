"""What a rank writes and remembers is bounded; past the bound less is recorded, and a note says so."""

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


def minimise(recorder):
    """Many evaluations within one step; the state of the optimizer grows on the way."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    inputs = torch.randn(16, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=8, tolerance_grad=0, tolerance_change=0)
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sin()).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(4):
        optimizer.step(closure)
    recorder.finish(0, None)
    return losses


def test_of_a_step_of_too_many_operators_the_peak_is_recorded(tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    (tmp_path / "long").mkdir()
    losses = minimise(Recorder(options(tmp_path / "whole", trace_step=2)))
    monkeypatch.setattr(labels, "MOST_OPERATORS", 150)
    assert minimise(Recorder(options(tmp_path / "long", trace_step=2))) == losses
    whole, long = only_rank(tmp_path / "whole"), only_rank(tmp_path / "long")

    assert len(whole.operators) > 4 * 150
    assert long.steps[2].traced and long.traced_step is None and long.peak_storages
    assert (long.storages, long.saved, long.operators) == ((), (), ())
    assert ["too many operators" in note.text for note in long.notes] == [True]
    expected = analyze(load_run(tmp_path / "whole")).ranks[0].peak
    peak = analyze(load_run(tmp_path / "long")).ranks[0].peak
    assert (peak.allocated_bytes, peak.unexplained_bytes) == (expected.allocated_bytes, 0)
    assert peak.step == 2 and peak.position == expected.position
    assert peak.by_category_bytes["parameter"] == sum(row.num_elements * 4 for row in whole.parameters)
    for category in ("parameter", "gradient", "activation", "input", "other"):
        assert peak.by_category_bytes[category] == expected.by_category_bytes[category]
    assert is_all_off()


def test_a_backward_of_too_many_operators_is_not_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(labels, "MOST_OPERATORS", 35)
    monkeypatch.setattr(labels, "_MOST_MORE_IN_A_BACKWARD", 1)
    train(Recorder(options(tmp_path, trace_step=2)), 6)
    rank = only_rank(tmp_path)

    assert len(rank.steps) == 6 and rank.traced_step is None
    assert (rank.operators, rank.peak_storages) == ((), ())
    assert ["too many operators" in note.text for note in rank.notes] == [True]
    assert is_all_off()


def is_all_off():
    is_profiling = torch._C._autograd._profiler_enabled()
    return not is_profiling and torch.utils._python_dispatch._get_current_dispatch_mode() is None
