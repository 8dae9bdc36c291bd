"""`memadvisor estimate` with no layout named searches all of them."""

import json

import pytest

from memadvisor.cli.main import main

SEARCH = ["estimate", "--model", "llama3-8b", "--gpus", "2xH100", "--seq", "2048", "--batch", "2"]


def test_the_best_layouts_in_words_and_as_json(capsys):
    assert main(SEARCH) == 0
    said = capsys.readouterr().out
    assert "Fastest of those with less than 10% chance" in said and "predicted" in said

    assert main([*SEARCH, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    times = [one["step_time_s"] for one in found["best"]]
    assert times == sorted(times) and all(one["p_oom"] < 0.1 for one in found["best"])
    assert all(one["layout"]["data"] * one["layout"]["tensor"] * one["layout"]["pipeline"] * one["layout"]["context"] == 2
               for one in found["best"])  # fmt: skip
    why = found["best"][0]["why"]
    assert f"1. {why['text']}" in said
    assert why["plain_data_parallel"]["total_bytes"] > 80e9 and "Plain dp 2 needs" in why["text"]
    assert all(one["step_time_s"] >= times[0] for one in why["neighbours"] if one["is_safe"])
    counts = found["counts"]
    assert counts.pop("num_layouts") == sum(counts.values())


def test_what_would_change_the_answer_in_words_and_as_json(capsys):
    assert main([*SEARCH, "--what-if"]) == 0
    said = capsys.readouterr().out
    assert "half the accelerators: not asked, one node cannot be halved." in said
    assert "twice the accelerators (4) over the vendor's reference network:" in said

    assert main([*SEARCH, "--what-if", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    half, twice, memory, network = found["what_if"]
    assert half["best"] is None and network["not_asked"] == "one node has none"
    assert twice["num_accelerators"] == 4 and memory["memory_bytes"] == 160 * 10**9
    assert f"- {memory['text']}" in said and "times as fast, each accelerator does" in memory["text"]
    assert memory["speedup"] == found["best"][0]["step_time_s"] / memory["best"]["step_time_s"] >= 1


def test_nothing_safe_ends_with_1(capsys):
    assert main([*SEARCH, "--memory", "8GiB"]) == 1
    assert "No layout of 2 H100" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [([*SEARCH, "--what-if", "--tp", "2"], "--what-if goes with a search over layouts"),
     (SEARCH[:-2], "needs --seq and --batch"), ([*SEARCH, "--micro-batch", "2"], "--micro-batch is a part of one layout")],
)  # fmt: skip
def test_what_a_search_cannot_take_is_said(capsys, arguments, words):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
