"""A script that runs out of memory ends, or goes on, as it does without the tool; the run says what held it all."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.out_of_memory import way_on
from memadvisor.run.store import load_run
from tests.warm_python import warm_python

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
    ENVIRONMENT.pop(name, None)
LIMIT_BYTES = 24 * 2**20


def run(*words):
    return subprocess.run(
        [warm_python(), *map(str, words)],
        cwd=SCRIPTS,
        env=ENVIRONMENT,
        text=True,
        capture_output=True,
        timeout=120,
    )


def profile(out, *options, script):
    return run("-m", "memadvisor", "profile", "--out", out, *options, "hungry.py", *script)


def events_of(out):
    [rank] = analyze(load_run(out)).ranks
    return rank.out_of_memory


@pytest.fixture(scope="module")
def halved(tmp_path_factory):
    """A script that halves its batch until it fits, under a limit; and its run."""
    out = tmp_path_factory.mktemp("halved") / "run"
    return profile(out, "--memory-limit", "24MiB", script=("4000", "halve")), out


def test_a_script_that_halves_its_batch_goes_on(halved):
    done, out = halved
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "out of memory at 4000"
    assert len(re.findall("batch 2000", done.stdout)) == 5
    [rank] = load_run(out).ranks
    assert len(rank.steps) == 5 and rank.traced_step.index == 2


def test_what_the_recorder_measures_is_not_held_against_the_limit(tmp_path):
    """Its own trainings pass over 8 MiB once a step is traced; under a limit they were said to be the script's failure."""
    out = tmp_path / "run"
    done = profile(out, "--memory-limit", "5MiB", script=("100", "raise"))

    assert done.returncode == 0, done.stderr
    assert "out of memory" not in done.stderr
    assert events_of(out) == ()
    [rank] = load_run(out).ranks
    assert rank.process.second_run_call_s is not None and rank.process.rounding_tensor_s is not None


def test_the_event_says_what_was_asked_for_where_and_what_held_the_rest(halved):
    """Worked out by hand for the first step: float32, 4000 samples, four blocks of 64 and 256 features."""
    _, out = halved
    [event] = events_of(out)
    narrow, wide = 4000 * 64 * 4, 4000 * 256 * 4
    parameters = 4 * (16 * 64 + 64 + 4 * (64 * 256 + 256 + 256 * 64 + 64) + 64 + 1)

    assert (event.phase, event.step, event.module, event.unit) == ("forward", 0, "blocks.3", "blocks.3")
    assert event.operator == "aten::relu"
    assert event.requested_bytes == wide
    assert event.limit_bytes == LIMIT_BYTES < event.allocated_bytes + event.requested_bytes
    assert event.limit == "--memory-limit"
    assert event.by_category_bytes["parameter"] == parameters
    assert event.by_category_bytes["input"] == 4000 * 16 * 4
    # Kept for the backward: the input of each block and the rectified features; those of block 3 are not there yet.
    assert event.by_category_bytes["activation"] == 4 * narrow + 3 * wide
    assert event.by_category_bytes["temporary"] == wide
    assert event.unlabelled_bytes == 0
    assert event.largest[0].shape == "[4000, 256]"
    assert event.hint is None


def test_a_run_with_a_traced_step_needs_no_other_way(halved):
    assert way_on(load_run(halved[1])) is None


def test_the_views_say_it_first(halved):
    done, out = halved
    shown = run("-m", "memadvisor", "show", out)
    told = json.loads(run("-m", "memadvisor", "show", out, "--json").stdout)["ranks"][0]["out_of_memory"]

    sentence = "in forward of blocks.3 (aten::relu), step 0: asked for 3.91 MiB"
    assert sentence in " ".join(done.stderr.split())
    assert sentence in " ".join(shown.stdout.split())
    assert told[0]["requested_bytes"] == 4096000
    assert told[0]["largest"][0]["size_bytes"] == 4096000
    assert "Out of memory in forward of blocks.3" in (out / "report.html").read_text()


@pytest.mark.parametrize("traced", ["--trace-step=0", "--trace-step=2"])
def test_what_escapes_ends_the_script_with_its_own_traceback(tmp_path, traced):
    """In a traced step and in another: exit code 1, the script's frames, torch's class, our limit named."""
    done = profile(tmp_path / "run", traced, "--memory-limit", "24MiB", script=("4000", "raise"))
    [event] = events_of(tmp_path / "run")
    [rank] = load_run(tmp_path / "run").ranks

    assert done.returncode == 1 and done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("torch.OutOfMemoryError: CPU out of memory. Tried to allocate 3.91 MiB.")
    assert "memadvisor's --memory-limit" in last and "24.0 MiB" in last
    assert "in forward" in done.stderr and "runpy" not in done.stderr
    assert rank.ending.exception == "OutOfMemoryError"
    assert event.by_category_bytes["activation"] == 4 * 4000 * 64 * 4 + 3 * 4000 * 256 * 4
    assert "No training step was seen" not in done.stderr  # the reason is told already
    way = way_on(load_run(tmp_path / "run"))
    assert way in " ".join(done.stderr.split())
    page = tmp_path / "page.html"
    run("-m", "memadvisor", "report", tmp_path / "run", "-o", page)
    assert "Out of memory in forward of blocks.3</h1>" in page.read_text()
    refused = run("-m", "memadvisor", "advise", tmp_path / "run", "--memory", "24MiB")
    assert refused.returncode == 2
    assert refused.stderr.startswith("memadvisor advise: This run ran out of memory before a step")
    assert way in refused.stderr


OWN_BASIS = {"--trace-step=0": "trace", "--trace-step=3": "known"}


@pytest.mark.parametrize("traced", OWN_BASIS)
def test_an_allocators_own_error_reaches_the_script_as_the_same_object(tmp_path, traced):
    """Without a limit: a traced step knows every storage, another the model states, and then says what to do."""
    done = profile(tmp_path / "run", traced, script=("64", "own"))
    [event] = events_of(tmp_path / "run")

    assert done.returncode == 0, done.stderr  # the script asserts that it is the same object
    assert done.stdout.startswith("out of memory at 64\n")
    assert event.basis == OWN_BASIS[traced]
    assert event.requested_bytes == 20 * 2**20
    assert event.position.startswith("forward")
    assert event.by_category_bytes["parameter"] == 534020
    if event.basis == "known":
        assert event.by_category_bytes["activation"] == 0
        assert "--memory-limit" in event.hint and "--trace-step 0" in event.hint
    else:
        # It fails before the last block, which has kept nothing yet.
        assert event.by_category_bytes["activation"] == 3 * (64 * 64 + 64 * 256) * 4
        assert event.hint is None


def test_a_step_is_traced_after_one_that_ran_out(tmp_path):
    profile(tmp_path / "run", "--trace-step=0", script=("64", "own"))
    [rank] = load_run(tmp_path / "run").ranks

    assert rank.traced_step.index == 1
    assert rank.storages


def test_a_size_that_is_none_is_refused_in_one_line(tmp_path):
    done = profile(tmp_path / "run", "--memory-limit", "lots", script=("8", "raise"))

    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "'lots' is not a size" in done.stderr
