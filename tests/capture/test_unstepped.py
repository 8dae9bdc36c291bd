"""What is said where no training step was seen."""

import resource
import subprocess
import sys

import pytest
import torch

import memadvisor
from memadvisor.capture import unstepped
from memadvisor.capture.optimizer_hooks import compiled_updates

BUSY = "import time\nwhile time.process_time() < 1.2: pass"


def test_who_only_launches_is_told_where_memadvisor_goes(monkeypatch):
    class Used:
        ru_utime, ru_stime = 4.0, 1.0

    monkeypatch.setattr(resource, "getrusage", lambda who: Used)
    said = unstepped.what_was_seen(False, unstepped.BackwardSteps())

    assert "processes that it started took 5 s of processor time, unrecorded" in said
    assert said.endswith("let it launch this: LAUNCHER ... -m memadvisor profile SCRIPT.")


def test_who_starts_nothing_is_not(monkeypatch):
    class Used:
        ru_utime = ru_stime = 0.0

    monkeypatch.setattr(resource, "getrusage", lambda who: Used)

    assert (
        unstepped.what_was_seen(False, unstepped.BackwardSteps())
        == "No training step was seen: no model was called."
    )


def test_a_launcher_without_torch_is_told_too(tmp_path):
    script = tmp_path / "launch.py"
    script.write_text(
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}], check=True)\n"
    )
    words = [sys.executable, "-m", "memadvisor", "profile", "-o", tmp_path / "run", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0
    assert "the script never imported torch; processes that it started took 1 s" in done.stderr
    assert "-m memadvisor profile SCRIPT" in done.stderr


def test_derivatives_by_what_is_to_be_measured_next_are_no_steps_of_a_model_that_is_fitted(tmp_path):
    """As of Bayesian optimization: fitted by SciPy, the model says by its derivatives where to look. Each was a step."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def fit():
        model.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad

    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(3):
            for _ in range(4):
                fit()
            for _ in range(5):
                points = torch.randn(2, 4, requires_grad=True)
                torch.autograd.grad(model(points).sum(), points)
    rank = prof.run.ranks[0]
    assert len(rank.steps) == 12 - 1  # the first one holds two passes
    assert {step.num_micro_batches for step in rank.steps[1:]} == {1}


def test_a_training_that_asks_for_derivatives_by_tensors_of_its_own_alone_has_a_step_for_each(tmp_path):
    model = torch.nn.Linear(4, 1)
    weights = {name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()}
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(6):
            loss = torch.func.functional_call(model, weights, (torch.randn(16, 4),)).square().mean()
            with torch.no_grad():
                for weight, gradient in zip(
                    weights.values(), torch.autograd.grad(loss, [*weights.values()]), strict=True
                ):
                    weight -= 0.1 * gradient
    assert len(prof.run.ranks[0].steps) == 6 - 1


def test_an_optimizer_that_comes_after_backwards_that_counted_as_steps_is_told_of(tmp_path):
    """As of blocks that are put into CUDA graphs before the optimizer is made: what was traced is one of their warm-ups."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(6):
            model(torch.ones(4, 8)).sum().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    rank = prof.run.ranks[0]
    found = [note.text for note in rank.notes if "steps after all" in note.text]
    updates = {span.step for span in rank.spans if span.kind == "optimizer"}

    assert len(found) == 1
    assert "--trace-step 8 " in found[0]
    assert rank.traced_step.index not in updates
    assert {8, 9} < updates


@pytest.mark.timeout(300)
def test_an_update_that_is_compiled_with_its_caller_ends_a_step_each_time(tmp_path):
    """As of torch's tutorial on compiled optimizers: Dynamo takes the hooks into its graph, and no step was seen at all."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))

    @torch.compile(backend="eager")
    def update():
        optimizer.step()

    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(6):
            for _ in range(2):
                model(torch.ones(4, 8)).square().mean().backward()
            update()
            optimizer.zero_grad()
    rank = prof.run.ranks[0]

    is_seen = (
        len(rank.steps) == 6
    )  # torch 2.11 leaves the first to the hooks; else the first step holds three passes
    assert is_seen or len(rank.steps) == 6 - 1
    assert {step.num_micro_batches for step in rank.steps[not is_seen :]} == {2}
    assert rank.traced_step is not None
    assert any("is compiled together with its caller" in note.text for note in rank.notes) != is_seen


def test_a_compiled_update_that_came_before_the_recorder_ends_none_of_its_steps():
    """The first pass of a training in the same process ended a step, whose backward was another's."""
    compiled_updates.have_come = True
    passes = unstepped.BackwardSteps()
    passes.enter_pass(True)

    assert not passes.ends_step(lambda level, text: pytest.fail(text))


def test_gradients_from_elsewhere_are_no_sign_of_a_compiled_model(tmp_path):
    """A server of parameters neither calls its model nor has a backward: it was told that the model may be compiled."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    (note,) = [row.text for row in prof.run.ranks[0].notes if row.level == "warning"]

    assert "its gradients are given to it here" in note
    assert "compiled" not in note
