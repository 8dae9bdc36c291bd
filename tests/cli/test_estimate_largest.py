"""`memadvisor estimate --largest` answers in words and JSON; what it cannot take is said."""

import json

import pytest

from memadvisor.cli.main import main
from memadvisor.planning.largest import QUANTITIES

ASK = ["estimate", "--model", "tinyllama-1.1b", "--gpus", "2xH100", "--seq", "2048", "--largest"]


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_words_and_json_say_the_same(capsys, monkeypatch, quantity):
    monkeypatch.setenv("COLUMNS", "150")
    assert main([*ASK, quantity]) == 0
    said = capsys.readouterr()
    assert "predicted" in said.out and "less than 10% chance" in said.out
    assert ("--seq has no effect" in said.err) == (quantity == "sequence")

    assert main([*ASK, quantity, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "predicted" and found["largest"] == quantity
    assert (found["seq_len"] is None) == (quantity == "sequence")
    for one in found["techniques"]:
        fit = one["fit"]
        assert fit["p_oom"] < found["max_p_oom"] and fit["layout"]["recompute"] == one["recompute"]
        (row,) = [line for line in said.out.splitlines() if line.startswith(one["technique"] + "  ")]
        assert str(fit["value"]) in row
        assert {"micro-batch": fit["layout"]["micro_batch_size"], "sequence": fit["seq_len"],
                "model": fit["model"]["n_layers"]}[quantity] == fit["value"]  # fmt: skip


def test_nothing_that_fits_ends_with_1(capsys):
    assert main([*ASK, "model", "--memory", "1GiB"]) == 1
    assert "none fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([*ASK, "model", "--tp", "2"], "--tp names one"),
        ([*ASK, "model", "--recompute", "full"], "--recompute names one"),
        ([*ASK[:5], "--largest", "model"], "--seq is missing"),
        ([*ASK, "model", "--table", "rows.csv", "-o", "out.csv"], "--table names many"),
        ([*ASK, "model", "--what-if"], "--what-if goes with a search"),
        ([*ASK, "model", "--micro-batch", "0"], "--micro-batch is 0"),
    ],
)
def test_what_it_cannot_take_is_said(capsys, arguments, words):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
