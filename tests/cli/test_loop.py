"""The whole way on a real script: profile, advise, run the advice, compare; and ZeRO by its definition."""

import json
import os
import re
from pathlib import Path

import pytest

from memadvisor.cli.main import main
from memadvisor.plan import Plan
from memadvisor.plan_file import save_plan
from memadvisor.run.store import load_run
from tests.torch_exit import completed
from tests.warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]
GPT = ROOT / "samples" / "train_gpt.py"
SMALL = ("--layers", "4", "--dim", "64", "--heads", "4", "--seq", "64", "--micro-batch", "8", "--steps", "5")


def memadvisor(*words, timeout_s=150):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [warm_python(), "-m", "memadvisor", *map(str, words)]
    done = completed(command, timeout=timeout_s, env=environment)
    assert done.returncode == 0, done.stderr
    return done


def shown(run):
    return json.loads(memadvisor("show", run, "--json").stdout)


def losses(output):
    found = [float(text) for text in re.findall(r"loss ([0-9.e+-]+)", output)]
    assert found
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_advice_for_seventy_percent_of_the_peak_is_kept_when_it_is_run(tmp_path, num_ranks):
    nproc = ("--nproc", num_ranks) if num_ranks > 1 else ()
    plain = memadvisor("profile", *nproc, "--out", tmp_path / "plain", GPT, *SMALL)
    peak_bytes = max(rank["peak"]["allocated_bytes"] for rank in shown(tmp_path / "plain")["ranks"])
    budget_bytes = int(0.7 * peak_bytes)
    memadvisor("advise", tmp_path / "plain", "--memory", budget_bytes, "-o", tmp_path / "plan.json")
    applied = memadvisor(
        "run", "--plan", tmp_path / "plan.json", *nproc, "--out", tmp_path / "applied", GPT, *SMALL
    )

    result = shown(tmp_path / "applied")
    assert len(result["ranks"]) == num_ranks
    assert all(rank["peak"]["allocated_bytes"] <= budget_bytes for rank in result["ranks"])
    predicted = result["prediction"]["peak_bytes"]
    assert predicted["predicted"] == pytest.approx(predicted["measured"], rel=0.05)
    if num_ranks == 1:  # recomputation alone reorders no sum
        assert losses(applied.stdout) == losses(plain.stdout)
    else:
        assert losses(applied.stdout) == pytest.approx(losses(plain.stdout), rel=1e-5)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("stage", "num_ranks", "bytes_per_parameter"), [(1, 2, 8 + 8 / 2), (2, 2, 4 + 12 / 2), (3, 4, 16 / 4)]
)
def test_model_states_are_those_of_zeros_definition(tmp_path, stage, num_ranks, bytes_per_parameter):
    """fp32 Adam, bytes a parameter: 8+8/n, 4+12/n and 16/n (arXiv:1910.02054), but for padding and Adam's steps."""
    memadvisor("run", "--zero", stage, "--nproc", num_ranks, "--out", tmp_path / "run", GPT, *SMALL)
    for rank in shown(tmp_path / "run")["ranks"]:
        states = rank["model_states"]
        measured = states["parameter_bytes"] + states["gradient_bytes"] + states["optimizer_state_bytes"]
        theory = bytes_per_parameter * states["num_params"]
        padding_and_steps_bytes = 16 * 64 + 4 * 100
        assert theory <= measured <= theory + padding_and_steps_bytes, rank["rank"]


@pytest.mark.timeout(100)
def test_a_plan_for_another_micro_batch_says_what_to_set(tmp_path):
    """A plan cannot change the script's own batch: it must not look as if it had."""
    plan = {
        "format": 1, "fingerprint": None, "num_ranks": 1, "zero_stage": 0, "policy": "none", "units": [],
        "micro_batch_size": 2, "grad_accum": 4, "prediction": None, "budget_bytes": None, "why": "by hand",
    }  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done = memadvisor("run", "--plan", tmp_path / "plan.json", "--out", tmp_path / "run", GPT, *SMALL)

    assert "micro-batches of 2 samples, and the script's first has 8" in done.stderr
    notes = load_run(tmp_path / "run").ranks[0].notes
    assert any("gradient accumulation to 4" in note.text for note in notes)


@pytest.mark.timeout(100)
def test_a_stage_on_one_rank_is_said_to_have_no_effect_before_the_script_starts(tmp_path):
    """Where parameters lie elsewhere between their uses, stage 3 is how."""
    words = (GPT, *SMALL[:-1], "2")
    done = memadvisor("run", "--zero", "2", "--out", tmp_path / "run", *words)
    first, *others = done.stderr.splitlines()

    assert first.startswith("memadvisor run: --zero 2 has no effect: ZeRO shards among several ranks")
    assert not any("no effect" in line for line in others)
    for options in (("--zero", "0"), ("--zero", "3", "--offload-parameters", "disk")):
        other = memadvisor("run", *options, "--out", tmp_path / options[-1], *words)
        assert "has no effect" not in other.stderr


@pytest.mark.timeout(100)
def test_what_a_plan_moves_to_a_disk_and_back_is_recorded_to_the_byte(tmp_path):
    """All state that has an element for each of a parameter's is read once, and written once, in the traced step."""
    memadvisor("run", "--offload-optimizer", "disk", "--out", tmp_path / "run", GPT, *SMALL)
    rank = load_run(tmp_path / "run").ranks[0]
    step = rank.traced_step

    moved_bytes = sum(row.size_bytes for row in rank.optimizer_states if row.size_bytes > 4)
    for kind in ("read", "write"):
        assert sum(each.size_bytes for each in rank.transfers if each.kind == kind) == moved_bytes
    assert {(each.lane, each.step) for each in rank.transfers} == {("disk", step.index)}
    assert all(step.start_s <= each.start_s <= each.end_s <= step.end_s for each in rank.transfers)


def test_a_plan_for_one_rank_is_refused_in_the_singular(tmp_path, capsys):
    save_plan(Plan(num_ranks=1, zero_stage=0, why="by hand"), tmp_path / "plan.json")

    assert main(["run", "--plan", str(tmp_path / "plan.json"), "--nproc", "2", str(GPT)]) == 2
    assert "The plan is for 1 rank, and this is a run of 2." in capsys.readouterr().err


@pytest.mark.timeout(100)
def test_of_a_script_that_a_plan_is_not_for_that_alone_is_said(tmp_path):
    """Its micro-batch is another one, too; to set it would help nobody."""
    plan = Plan(
        num_ranks=1, zero_stage=0, why="by hand", fingerprint="0" * 16, micro_batch_size=2, grad_accum=4
    )
    save_plan(plan, tmp_path / "plan.json")
    command = [warm_python(), "-m", "memadvisor", "run", "--plan", tmp_path / "plan.json"]
    words = map(str, [*command, "--out", tmp_path / "run", GPT, *SMALL])
    done = completed(list(words), timeout=90, env={**os.environ, "OMP_NUM_THREADS": "1"})

    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "The plan is for another model" in line
