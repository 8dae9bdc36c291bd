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


def test_of_one_accelerator_recomputation_and_the_host_are_searched(capsys):
    words = ["estimate", "--model", "gpt2-xl", "--gpus", "RTX-4090-24GB", "--seq", "1024", "--batch", "32"]
    assert main(words) == 0
    said = capsys.readouterr().out
    fastest = next(line for line in said.splitlines() if line.startswith("Fastest"))
    assert "on the host: optimizer" in fastest
    assert "less memory for more time" in said and "splits over ranks" not in said

    assert main([*words, "--dp", "1"]) == 1  # one layout, with its parts; it does not fit
    assert "layout     dp 1, 32 microbatches of 1" in capsys.readouterr().out


def test_tensor_parallelism_may_fill_several_nodes(capsys):
    """Four tensor-parallel ranks on nodes of two, once --widest-tp says so."""
    cluster = [
        "estimate",
        "--model",
        "llama3-70b",
        "--gpus",
        "2xH100,nodes=2",
        "--seq",
        "512",
        "--batch",
        "1",
    ]
    front = []
    for option in ([], ["--widest-tp", "4"]):
        assert main([*cluster, "--max-p-oom", "1", "--json", *option]) == 0
        found = json.loads(capsys.readouterr().out)
        front.append({one["layout"]["tensor"] for one in found["best"] + found["front"]})
    assert max(front[0]) == 2 and max(front[1]) == 4


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


def test_schedules_the_accepted_chance_and_a_batch_in_tokens(capsys):
    options = ["--schedule", "ZB-H1,gpipe", "--max-p-oom", "0.6", "--batch-tokens", "4.1K"]
    assert main([*SEARCH[:-2], *options, "--json"]) == 0
    said = capsys.readouterr()
    assert "4.1K is 2.0498 sequences of 2048: 2 are taken" in said.err
    found = json.loads(said.out)
    assert found["batch_sequences"] == 2 and found["max_p_oom"] == 0.6
    everyone = [*found["best"], *found["front"]]
    pipelines = {one["layout"]["schedule"] for one in everyone if one["layout"]["pipeline"] > 1}
    assert pipelines and pipelines <= {"zb-h1", "gpipe"}


def test_zeropp_is_searched_where_it_is_named_and_lossy_in_words(capsys):
    search = [
        "estimate",
        "--model",
        "llama3-8b",
        "--gpus",
        "2xH100,nodes=2,across=5GB/s",
        "--seq",
        "2048",
        "--batch",
        "4",
    ]
    times = []
    for options in ([], ["--zeropp", "hpz,qgz"]):
        assert main([*search, *options, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        times.append(found["best"][0]["step_time_s"])
        layouts = [one["layout"] for one in (*found["best"], *found["front"])]
        used = {
            (one["secondary_shard"], one["quantized_weights"], one["quantized_gradients"]) for one in layouts
        }
        assert (used == {(None, False, False)}) == (not options) and not any(on for _, on, _ in used)
    assert times[1] <= times[0]
    assert main([*search, "--zero", "3", "--zeropp", "hpz,qgz"]) in (0, 1)
    assert "ZeRO 3, hpZ, qgZ (4 bits, lossy)" in capsys.readouterr().out


def test_nothing_safe_ends_with_1(capsys):
    assert main([*SEARCH, "--memory", "8GiB"]) == 1
    said = capsys.readouterr().out
    assert "No layout of 2 H100" in said and "Least memory: " in said and "more; on " in said

    assert main([*SEARCH, "--memory", "8GiB", "--json"]) == 1
    nearest = json.loads(capsys.readouterr().out)["nearest"]
    assert nearest["total_bytes"] > 8 * 2**30 and nearest["smallest"]["p_oom"] >= 0.1
    assert main([*SEARCH, "--memory", f"{nearest['safe_memory_bytes']}B"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    "arguments, words",
    [([*SEARCH, "--what-if", "--tp", "2"], "--what-if goes with a search over layouts"),
     ([*SEARCH, "--max-p-oom", "1.5"], "running out of memory is 1.5"),
     ([*SEARCH, "--max-p-oom", "0.2", "--tp", "2"], "--max-p-oom goes with a search"),
    ([*SEARCH, "--widest-tp", "8", "--tp", "2"], "--widest-tp goes with a search"),
    ([*SEARCH, "--widest-tp", "0"], "--widest-tp is 0"),
    ([*SEARCH, "--tp-kind", "2d"], "--tp-kind is a part of one layout"),
     ([*SEARCH, "--schedule", "1f1b,nothing"], "'nothing' is not a pipeline schedule"),
     ([*SEARCH[:-2], "--batch-tokens", "2000"], "is 0.976562 sequences of 2048"),
     ([*SEARCH[:-2], "--batch-tokens", "many"], "'many' is not a number of 1 or more"),
     ([*SEARCH, "--zeropp", "hpz,qxz"], "'qxz' is no option of ZeRO++"),
     ([*SEARCH, "--zero", "2", "--zeropp", "qwz"], "ZeRO++ (qwz) with ZeRO stage 2"),
     ([*SEARCH, "--batch-tokens", "4K"], "in place of --batch"),
     (SEARCH[:-2], "needs --seq and --batch"), ([*SEARCH, "--micro-batch", "2"], "--micro-batch is a part of one layout")],
)  # fmt: skip
def test_what_a_search_cannot_take_is_said(capsys, arguments, words):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_a_batch_that_leaves_replicas_out_says_so(capsys):
    """64 sequences on three accelerators leave a pipeline alone; on four nothing is odd about them."""
    words = ["estimate", "--model", "gpt2", "--seq", "1024", "--gpus"]
    main([*words, "3xA100", "--batch", "64"])
    odd = capsys.readouterr().out
    main([*words, "4xA100", "--batch", "64"])
    even = capsys.readouterr().out

    assert "64 sequences part among 1 of 3 accelerators at most, as replicas" in odd
    assert "A batch of 63 or 66 parts among all" in odd
    assert "at most, as replicas" not in even
