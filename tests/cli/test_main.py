"""What the command line says of words that no command can take."""

import json
import subprocess
import sys

import pytest

from memadvisor.cli.main import main

SHAPE = ["estimate", "--model", "gpt2", "--gpus", "1xH100", "--seq", "128", "--tp", "1"]
CONFIG = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 8}


def said(words, capsys):
    """The one line on stderr of a command that ends with 2."""
    try:
        code = main(words)
    except SystemExit as error:
        code = error.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert line.count("Hint: ") == 1
    return line


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([*SHAPE, "--batch", "2.5"], "argument --batch: '2.5' is not a whole number."),
        ([*SHAPE, "--max-p-oom", "x"], "argument --max-p-oom: 'x' is not a number."),
        ([*SHAPE, "--zero", "x"], "argument --zero: 'x' is not a whole number."),
        (["profile", "--memory-limit", "0", "train.py"], "--memory-limit: '0' is not a usable size. Hint: it must"),
        ([*SHAPE, "--batch", str(10**20)], "--batch is 100000000000000000000. Hint: look for a digit too many."),
        (["profile", "--memory-limit", "-5GiB", "train.py"], "argument --memory-limit: '-5GiB' is negative."),
        (["advise", "run", "--memory", "-1GiB"], "argument --memory: '-1GiB' is negative."),
        (["run", "--zero", "2"], "No script is named. Hint: memadvisor run [OPTIONS] train.py, or -m package.module."),
        (["profile", "-", "word"], "A script is not read from standard input where `-` stands."),
        (["show", "run", "--hardware=--"], "memadvisor show: argument --hardware: expected one argument."),
        (["check", "run", "--max-peak=--"], "memadvisor check: argument --max-peak: expected one argument."),
        ([*SHAPE, "--dp=--"], "memadvisor estimate: argument --dp: expected one argument."),
        (["run", "--plan=--", "train.py"], "memadvisor run: argument --plan: expected one argument."),
        (["profile", "--joined", "samples/train_gpt.py"], "--joined and --again are for ranks that memadvisor starts itself."),
        ([*SHAPE, "--lora-rank", str(10**20)], "the rank of LoRA is 100000000000000000000. Hint: it is 1 to"),
    ],
)  # fmt: skip
def test_it_is_one_line_with_one_hint_and_no_words_of_pythons(words, wanted, capsys):
    assert wanted in said(words, capsys)


@pytest.mark.parametrize(("field", "what"), [("n_embd", "parameters"), ("n_layer", "layers")])
def test_a_model_file_of_numbers_past_any_float(field, what, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, field: 10**300 * CONFIG["n_head"]}))

    line = said(["estimate", "--model", str(path), *SHAPE[3:]], capsys)

    assert "config.json' has more than" in line and f"{what}. Hint: look for a digit too many" in line


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--plan", "{zero}", __file__],
        ["export", "{zero}", "--to", "fsdp2"],
        ["estimate", "--model", "{zero}", *SHAPE[3:]],
        [*SHAPE[:3], "--gpus", "2x{zero}", *SHAPE[5:]],
        [*SHAPE[:3], "--cluster", "{zero}", *SHAPE[5:]],
        ["estimate", "--table", "{zero}", "-o", "{zero}.csv"],
    ],
    ids=" ".join,
)
def test_a_device_in_place_of_a_file_is_one_line(words, tmp_path, capsys):
    zero = tmp_path / "zero.json"
    zero.symlink_to("/dev/zero")

    line = said([word.format(zero=zero) for word in words], capsys)

    assert f"'{zero}' cannot be read: it is no regular file. Hint: " in line


@pytest.mark.parametrize(
    "words",
    [["profile", "-m", "json.tool"], ["profile", "--out", "{run}", "-m", "json.tool"], ["calibrate", "--ranks", "1"], ["doctor"]],
    ids=" ".join,
)  # fmt: skip
def test_a_working_directory_that_was_deleted_is_one_line(tmp_path, words):
    gone = tmp_path / "gone"
    gone.mkdir()
    words = [word.format(run=tmp_path / "run") for word in words]
    # torch itself cannot be loaded from there, nor a socket by Python 3.13.0: only what says so is started.
    code = f"import os, socket, sys; from memadvisor.cli.main import main; os.rmdir({str(gone)!r}); sys.exit(main({words!r}))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=gone, text=True, capture_output=True, timeout=60)

    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.count("\n") == 1 and "The working directory has been deleted." in ended.stderr


def test_help_says_how_to_begin_within_eighty_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main(["--help"])

    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert "  memadvisor profile train.py  " in out and "  memadvisor run --plan plan.json train.py  " in out
    assert max(map(len, out.splitlines())) <= 80
