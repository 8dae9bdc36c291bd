"""The Python interface: what the context manager records, of which program, and what it is wrongly called with."""

import contextlib
import json
import sys
import threading
import traceback

import numpy as np
import pytest
import torch

import memadvisor
import memadvisor.plan
from memadvisor.errors import MemadvisorError, UsageError


def train(num_steps=4):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(num_steps):
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    with memadvisor.profile(tmp_path_factory.mktemp("api") / "run") as prof:
        train()
    return prof.run


@pytest.mark.parametrize(
    ("argv", "script", "arguments"),
    [
        (["train.py", "--lr", "1"], "train.py", ["--lr", "1"]),
        (["/x/ipykernel_launcher.py", "-f", "/tmp/kernel-1.json"], "(notebook)", []),
        (["/x/colab_kernel_launcher.py", "-f", "kernel.json"], "(notebook)", []),
        ([""], "(Python prompt)", []),
    ],
)
def test_a_profile_names_the_script_or_says_that_there_is_none(
    argv, script, arguments, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "argv", argv)
    with memadvisor.profile(tmp_path / "run"):
        pass

    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["script"], manifest["arguments"]) == (script, arguments)


@pytest.mark.parametrize(
    ("argv", "label"),
    [(["a/train.py"], "train"), (["/x/ipykernel_launcher.py"], "notebook"), ([""], "Python-prompt")],
)
def test_directories_without_a_name_are_named_after_the_program(argv, label, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.chdir(tmp_path)

    profile = memadvisor.profile()

    assert profile.directory.name.startswith(label)
    assert repr(profile) == f"<profile in {profile.directory}>"


WRONG = [
    ("profile", {"out": 3}, "out is 3, which is no path."),
    ("profile", {"out": b"run"}, "out is b'run', which is no path."),
    ("profile", {"out": []}, "out is of type list"),
    ("profile", {"out": "a\0b"}, "holds a NUL"),
    ("profile", {"trace_step": -1}, "trace_step is -1."),
    ("profile", {"trace_step": "2"}, "trace_step is '2'."),
    ("profile", {"trace_step": True}, "trace_step is True."),
    ("load", {"path": None}, "path is None, which is no path."),
    ("advise", {"run": torch.nn.Linear(1, 1)}, "run is of type Linear"),
    ("advise", {"memory": None}, "memory is None."),
    ("advise", {"memory": -1}, "memory is -1."),
    ("advise", {"memory": 1.5}, "memory is 1.5."),
    ("advise", {"gpus": "8xH100"}, "gpus is '8xH100'."),
    ("advise", {"gpus": 0}, "gpus is 0."),
    ("advise", {"hardware": 3}, "hardware is 3"),
    ("advise", {"hardware": "H1000"}, "'H1000' is neither a known device nor a file."),
    ("advise", {"learn": 3}, "learn is 3"),
    ("advise", {"learn": [3]}, "learn is 3"),
    ("advise", {"near_ranks": "2"}, "near_ranks is '2'."),
    ("advise", {"micro_batch": "x"}, "micro_batch is 'x'."),
    ("advise", {"optimizer_bits": "8"}, "optimizer_bits is '8'."),
    ("advise", {"precision": "bf16"}, "precision is 'bf16', which is no Precision."),
    ("advise", {"compression": 8}, "compression is 8, which is no Compression."),
    ("advise", {"local_sgd": 4}, "local_sgd is 4, which is no LocalSgd."),
    ("apply", {"plan": {}, "model": None, "optimizer": None}, "plan is of type dict"),
    ("apply", {"model": 3, "optimizer": None}, "The model is of type int."),
    ("apply", {"model": torch.nn.Linear(1, 1), "optimizer": 4}, "The optimizer is of type int."),
]


@pytest.mark.parametrize(("name", "given", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_argument_is_named_and_nothing_is_begun(name, given, words, recorded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = memadvisor.plan.Plan(num_ranks=1, zero_stage=0, policy="every-layer")
    usual = {"advise": {"run": recorded, "memory": "1GiB"}, "apply": {"plan": plan}}.get(name, {})

    with pytest.raises(MemadvisorError) as caught:
        getattr(memadvisor, name)(**{**usual, **given})

    assert words in str(caught.value)
    assert caught.value.hint is not None
    assert list(tmp_path.iterdir()) == []


def test_a_budget_of_a_wrong_kind_is_told_the_texts_that_are_budgets(recorded):
    with pytest.raises(MemadvisorError) as caught:
        memadvisor.advise(recorded, memory=1.5)

    assert '"24GiB"' in caught.value.hint and '"60%"' in caught.value.hint


def test_a_hint_is_in_the_traceback(tmp_path):
    try:
        memadvisor.load(tmp_path / "missing")
    except MemadvisorError as error:
        shown = "".join(traceback.format_exception(error)).splitlines()

    assert shown[-1] == "Hint: name the directory that `memadvisor profile` wrote."


def test_hardware_is_named_as_on_the_command_line_and_numbers_may_be_numpys(recorded):
    advice = memadvisor.advise(recorded, memory=np.int64(2**30), gpus=np.int64(1), hardware="H100")

    assert advice.budget_bytes == 2**30
    assert advice.plans[0].fits


def test_a_profile_is_of_one_block(tmp_path):
    profile = memadvisor.profile(tmp_path / "run")
    with pytest.raises(UsageError, match="not begun"):
        profile.__exit__(None, None, None)
    with profile:
        losses = train()
        with pytest.raises(UsageError, match="used already"), profile:
            pass
    with pytest.raises(UsageError, match="used already"), profile:
        pass

    assert losses == train()
    assert len(profile.run.ranks[0].steps) == 4


def test_a_directory_that_is_gone_by_then_is_one_line(tmp_path):
    profile = memadvisor.profile(tmp_path / "run")
    profile.directory.rmdir()
    with pytest.raises(UsageError, match="cannot be written"), profile:
        pass
    with memadvisor.profile(tmp_path / "next"):  # the one that failed is in nobody's way
        pass


@pytest.mark.parametrize(
    ("error", "code", "name"),
    [
        (None, 0, None),
        (KeyError("x"), 1, "KeyError"),
        (SystemExit(3), 3, None),
        (SystemExit("words"), 1, None),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt"),
        (GeneratorExit(), 0, None),
    ],
)
def test_a_block_ends_as_a_script_of_it_would(error, code, name, tmp_path):
    expected = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with expected, memadvisor.profile(tmp_path / "run"):
        train(1)
        if error is not None:
            raise error
    ending = memadvisor.load(tmp_path / "run").ranks[0].ending

    assert (ending.exit_code, ending.exception) == (code, name)


def test_a_generator_that_is_closed_has_not_failed(tmp_path):
    def trained():
        with memadvisor.profile(tmp_path / "run"):
            yield train()

    next(trained())  # nobody holds it: Python closes it
    rank = memadvisor.load(tmp_path / "run").ranks[0]

    assert (rank.ending.exit_code, len(rank.steps)) == (0, 4)


def test_memory_that_runs_out_in_a_block_is_recorded(tmp_path):
    def ask_for_too_much():
        return torch.empty(2**50, dtype=torch.uint8)

    with pytest.raises(RuntimeError), memadvisor.profile(tmp_path / "run") as prof:
        train(2)
        ask_for_too_much()

    [event] = prof.run.ranks[0].out_of_memory
    assert (event.requested_bytes, event.step) == (2**50, 2)


def test_two_threads_do_not_record_at_once_and_one_after_the_other_may(tmp_path):
    refused, losses = [], []

    def record(directory):
        try:
            with memadvisor.profile(directory):
                losses.append(train())
        except UsageError as error:
            refused.append(str(error))

    def in_thread(directory):
        thread = threading.Thread(target=record, args=(directory,))
        thread.start()
        thread.join()

    with memadvisor.profile(tmp_path / "outer") as prof:
        in_thread(tmp_path / "beside")
        losses.append(train())
    in_thread(tmp_path / "after")

    assert refused == ["Another thread of this process is recording a profile."]
    assert losses == [train()] * 2
    assert len(prof.run.ranks[0].steps) == len(memadvisor.load(tmp_path / "after").ranks[0].steps) == 4


def test_a_directory_that_cannot_be_used_is_named_as_the_argument_is(tmp_path):
    (tmp_path / "file").write_text("here already")

    with pytest.raises(UsageError, match=r"^out '.*' is not empty\."):
        memadvisor.profile(tmp_path)
    with pytest.raises(UsageError, match=r"^out '.*' cannot be made"):
        memadvisor.profile(tmp_path / "file" / "run")


def test_a_profile_is_no_decorator_and_says_so(tmp_path):
    with pytest.raises(UsageError, match="no decorator") as raised:

        @memadvisor.profile(tmp_path / "run")
        def train():
            pass

    assert "with memadvisor.profile()" in raised.value.hint
