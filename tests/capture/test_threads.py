"""Models in several threads: one thread's training is recorded, and nobody's is harmed."""

import subprocess
import sys
import threading

import torch
from torch import nn

import memadvisor
from memadvisor.capture.training_thread import OTHERS


def make_model(width=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))


def train(model, num_steps=6, between=lambda: None):
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(num_steps):
        loss = model(torch.full((4, 8), 1.0 + step)).square().mean()
        between()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_thread(work):
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def texts(run):
    return [note.text for note in run.ranks[0].notes]


def test_a_training_beside_another_is_left_out_and_both_are_as_they_were(tmp_path):
    alone = train(make_model()), train(make_model(32), 1)
    others, model = [], make_model()

    def begin_other():  # while the model, whose forward hook this is, is running
        others.append(in_thread(lambda: train(make_model(32), 1)))

    def trained():
        calls = iter(range(100))
        model[1].register_forward_hook(lambda *_: begin_other() if next(calls) > 0 else None)
        return train(model)

    with memadvisor.profile(tmp_path / "run") as prof:
        losses = trained()

    assert (losses, others) == (alone[0], [alone[1]] * 5)
    assert texts(prof.run) == [OTHERS]
    steps = prof.run.ranks[0].steps
    assert len(steps) == 6 and any(step.traced for step in steps)


def test_who_trains_takes_the_place_of_who_only_calls_models(tmp_path):
    actor, learner = make_model(), make_model(32)

    def act_while_the_learner_learns():
        actor[1].register_forward_hook(lambda *_: in_thread(lambda: train(learner)) and None)
        with torch.no_grad():
            actor(torch.ones(4, 8))

    with memadvisor.profile(tmp_path / "run") as prof:
        act_while_the_learner_learns()

    assert len(prof.run.ranks[0].steps) == 6
    assert any(step.traced for step in prof.run.ranks[0].steps)


def test_an_evaluation_in_another_thread_leaves_the_traced_step_to_who_trains(tmp_path):
    """Of a copy, while the training waits: it took the training's place, and with it the traced step was given up."""
    copy = make_model()

    def evaluate():
        with torch.no_grad():
            return copy(torch.zeros(4, 8)).sum().item()

    with memadvisor.profile(tmp_path / "run") as prof:
        losses = train(make_model(), between=lambda: in_thread(evaluate))
    rank = prof.run.ranks[0]

    assert losses == train(make_model())
    assert texts(prof.run) == []
    assert len(rank.steps) == 6
    assert rank.traced_step is not None and rank.traced_step.index == 2 and rank.storages


def test_threads_one_after_another_are_one_training(tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with memadvisor.profile(tmp_path / "run", trace_step=100) as prof:
        for _ in range(4):
            in_thread(step)

    assert len(prof.run.ranks[0].steps) == 4
    assert OTHERS not in texts(prof.run)


def test_a_thread_that_ends_in_its_traced_step_does_not_bring_the_process_down(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import threading, torch\n"
        "def work():\n"
        "    model = torch.nn.Linear(4, 4)\n"
        "    optimizer = torch.optim.AdamW(model.parameters())\n"
        "    for _ in range(2):\n"
        "        model(torch.ones(2, 4)).sum().backward()\n"
        "        optimizer.step()\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "thread.join()\n"
        "print('done')\n"
    )
    command = [sys.executable, "-m", "memadvisor", "profile", "--out", str(tmp_path / "run"), str(script)]
    ended = subprocess.run(command, capture_output=True, text=True)

    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert "while it stopped recording" not in ended.stderr
