"""The samples train on real text and images, the same way for the same seed, and know nothing of memadvisor."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memadvisor.run.store import load_run
from tests.torch_exit import completed
from tests.warm_python import warm_python

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "samples"
SMALL = ["--layers", "2", "--dim", "32", "--heads", "2", "--seq", "32", "--steps", "5", "--device", "cpu"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(*words, python=None):
    done = completed([python or warm_python(), *map(str, words)], cwd=ROOT, env=ENVIRONMENT, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses_of(stdout):
    lines = [line.split() for line in stdout.splitlines() if line.startswith("step ")]
    assert [int(words[1]) for words in lines] == list(range(len(lines)))
    return [float(words[3]) for words in lines]


def gpt(*options):
    return losses_of(run(SAMPLES / "train_gpt.py", *SMALL, *options))


@pytest.fixture(scope="module")
def plain_losses():
    return gpt("--micro-batch", "4")


def test_the_gpt_learns_and_repeats_itself_to_the_last_bit(plain_losses):
    assert len(plain_losses) == 5
    assert plain_losses[-1] < plain_losses[0]
    assert gpt("--micro-batch", "4") == plain_losses


def test_another_seed_trains_otherwise(plain_losses):
    assert gpt("--micro-batch", "4", "--seed", "2") != plain_losses


def test_every_option_of_the_gpt_together(tmp_path):
    """bf16, accumulation, clipping, cosine, dropout, tied head; and the weights that it saves."""
    weights = tmp_path / "weights.pt"
    losses = gpt(
        "--bf16", "--accum", "2", "--clip", "0.5", "--cosine", "--dropout", "0.1", "--tied", "--save", weights
    )
    state = torch.load(weights, weights_only=True)

    assert len(losses) == 5
    assert state["head.weight"].data_ptr() == state["tok_emb.weight"].data_ptr()
    assert {"tok_emb.weight", "pos_emb.weight", "blocks.1.attn.qkv.weight", "ln_f.weight"} <= set(state)


def test_two_ranks_of_the_gpt_train_on_different_text_and_print_once():
    words = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        SAMPLES / "train_gpt.py",
        *SMALL,
        "--accum",
        "2",
    ]
    losses = losses_of(run(*words))

    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_the_resnet_learns_the_digits():
    pytest.importorskip("sklearn")
    stdout = run(SAMPLES / "train_cnn.py", "--width", "8", "--epochs", "2", "--device", "cpu")
    accuracies = [float(line.split()[-1]) for line in stdout.splitlines() if line.startswith("epoch")]

    assert losses_of(stdout)[-1] < losses_of(stdout)[0]
    assert len(accuracies) == 2
    assert accuracies[-1] > 0.2


def test_without_scikit_learn_the_resnet_says_what_to_install(tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ImportError\n")
    program = f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); runpy.run_path({str(SAMPLES / 'train_cnn.py')!r})"
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, text=True, capture_output=True)

    assert done.returncode == 2
    assert done.stderr == "train_cnn.py: the digits come with scikit-learn: pip install scikit-learn\n"


def test_the_lstm_learns():
    losses = losses_of(run(SAMPLES / "train_rnn.py", "--dim", "64", "--steps", "10", "--device", "cpu"))

    assert losses[-1] < losses[0]


def test_the_loop_profiles_itself_and_names_its_run(tmp_path):
    stdout = run(
        SAMPLES / "train_loop.py", "--steps", "5", "--dim", "32", "--out", tmp_path / "run", "--device", "cpu"
    )
    [rank] = load_run(tmp_path / "run").ranks

    assert f"run: {tmp_path / 'run'}" in stdout
    assert len(rank.steps) == len(losses_of(stdout)) == 5
    assert rank.traced_step.peak_allocated_bytes > 0


@pytest.mark.parametrize("name", ["train_gpt.py", "train_cnn.py", "train_rnn.py"])
def test_a_sample_knows_nothing_of_memadvisor(name):
    tree = ast.parse((SAMPLES / name).read_text())
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }

    assert not {module for module in imported if module.startswith("memadvisor")}


@pytest.mark.parametrize("name", ["train_gpt.py", "train_cnn.py", "train_rnn.py"])
def test_a_profiled_sample_has_the_losses_of_the_plain_one(tmp_path, name):
    """Bitwise: the profiler changes nothing that the script computes."""
    if name == "train_cnn.py":
        pytest.importorskip("sklearn")
    options = {
        "train_gpt.py": [*SMALL, "--dropout", "0.1"],
        "train_cnn.py": ["--width", "8", "--epochs", "1", "--device", "cpu"],
        "train_rnn.py": ["--dim", "64", "--steps", "6", "--device", "cpu"],
    }[name]
    plain = run(SAMPLES / name, *options)
    ours = ["-m", "memadvisor", "profile", "--out", tmp_path / "run"]
    python = sys.executable if name == "train_gpt.py" else warm_python()
    profiled = run(*ours, SAMPLES / name, *options, python=python)
    [rank] = load_run(tmp_path / "run").ranks

    assert profiled == plain
    assert len(rank.steps) == len(losses_of(plain))
    assert rank.traced_step.peak_allocated_bytes > 0
