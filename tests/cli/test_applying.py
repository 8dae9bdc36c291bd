"""`memadvisor run` on scripts that start their ranks themselves: the plan goes along, or is refused in one line."""

import subprocess
import sys

import pytest
import torch

from memadvisor.capture.children import Continuation
from memadvisor.capture.script import Target
from memadvisor.errors import PlanError
from memadvisor.plan import Plan
from memadvisor.plan_file import save_plan
from memadvisor.run.store import load_run
from tests.cli.test_wrapping import ENVIRONMENT, SCRIPTS
from tests.warm_python import warm_python

SPAWNS = SCRIPTS / "kinds" / "spawns_ranks.py"


def run(directory, num_ranks, *words, zero_stage=3, python=None, by_hand=False):
    """`memadvisor run` with a plan for so many ranks, and without a launcher."""
    plan = Plan(num_ranks=num_ranks, zero_stage=zero_stage, why="by hand")
    save_plan(plan, directory / "plan.json")
    made = ["--zero", zero_stage, "--ranks", num_ranks] if by_hand else ["--plan", directory / "plan.json"]
    command = [
        "-m",
        "memadvisor",
        "run",
        *made,
        "--out",
        directory / "run",
        *words,
    ]
    return subprocess.run(
        [python or warm_python(), *map(str, command)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
    )


def losses_of_rank_0(num_steps):
    """What spawns_ranks.py prints: one model, the mean of two ranks' gradients, each rank's own random stream."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    streams = [torch.Generator().manual_seed(rank) for rank in range(2)]
    printed = []
    for _ in range(num_steps):
        xs = [torch.randn(3, 4, generator=stream) for stream in streams]
        losses = [(model(x) - x.sum(dim=1, keepdim=True)).square().mean() for x in xs]
        (sum(losses) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        printed.append(losses[0].item())
    return printed


def refusals(done):
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("memadvisor")]


@pytest.mark.timeout(150)
def test_a_plan_is_applied_in_the_ranks_that_a_script_spawns(tmp_path):
    """With the losses, the words about a rank that fails, and the exit code that they have without it."""
    ours = run(tmp_path, 2, SPAWNS, "fail", by_hand=True)
    recorded = load_run(tmp_path / "run")

    *printed, caught = ours.stdout.splitlines()
    assert ours.returncode == 3, ours.stderr
    assert [float(line) for line in printed] == pytest.approx(losses_of_rank_0(5), rel=1e-5)
    assert "ValueError: the second rank fails" in caught and "memadvisor" not in caught
    assert [rank.process.rank for rank in recorded.ranks] == [0, 1]
    for rank in recorded.ranks:
        assert len(rank.steps) == 5
        assert any("2 sharded buffers of parameters" in note.text for note in rank.notes)
    assert (
        ours.stderr.count("2 sharded buffers of parameters") == 2
    )  # said by rank 0 when it is met, and in the summary
    assert "applied to nothing" not in ours.stderr


@pytest.mark.timeout(100)
def test_a_plan_for_another_number_of_ranks_than_a_script_spawns_is_refused(tmp_path):
    """However the script takes the exception of its rank: this one catches it."""
    [line] = refusals(run(tmp_path, 1, SPAWNS, zero_stage=0))

    assert "for one rank, and the script has started 2" in line and "--gpus 2" in line
    assert not (tmp_path / "run").exists()


START = """
import os, subprocess, sys
if "RANK" in os.environ:
    sys.exit(7)
subprocess.run({command}, env={{**os.environ, "WORLD_SIZE": "3", "RANK": "1"}})
print("it goes on")
"""


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("[sys.executable, __file__]", "for 2 ranks, and the script starts 3"),
        (
            "'torchrun --nproc-per-node 2 x.py', shell=True",
            "starts its ranks by `torchrun --nproc-per-node 2 x.py`",
        ),
    ],
)
def test_ranks_that_the_plan_is_not_for_or_does_not_reach_are_not_started(tmp_path, command, wanted):
    script = tmp_path / "starts.py"
    script.write_text(START.format(command=command))
    done = run(tmp_path, 2, script)
    [line] = refusals(done)

    assert wanted in line
    assert done.stdout == ""
    assert not (tmp_path / "run").exists()


def test_a_plan_that_no_model_followed_is_said_to_be_applied_to_nothing(tmp_path):
    script = tmp_path / "nothing.py"
    script.write_text("import torch\nprint('done')\n")
    done = run(tmp_path, 2, script)

    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr.count("the plan was applied to nothing: no model was trained") == 1


CANNOT_BE_RECORDED = """
import sys
from pathlib import Path
from memadvisor.run.store import journal_path
journal_path(Path(sys.argv[1]), 0).mkdir()
import torch
model = torch.nn.Linear(2, 2)
model(torch.ones(1, 2)).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
print("trained")
"""


def test_where_recording_cannot_start_the_plan_is_in_force_all_the_same(tmp_path):
    """Seen by its refusal: it is for two ranks, and the script trains on one without DDP."""
    script = tmp_path / "train.py"
    script.write_text(CANNOT_BE_RECORDED)
    # Of its own: recording starts when torch is imported.
    done = run(tmp_path, 2, script, tmp_path / "run", python=sys.executable)
    first, second = refusals(done)

    assert "recording could not start: FileExistsError" in first
    assert "for 2 ranks" in second
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("command", "is_launcher"),
    [
        ("/usr/bin/torchrun x.py", True),
        ("python -m torch.distributed.run x.py", True),
        ("python -X dev -m torch.distributed.launch x.py", True),
        ("accelerate launch x.py", True),
        ("accelerate env", False),
        ("python train.py torchrun", False),
        ("", False),
    ],
)
def test_launchers_inside_a_script_are_told_from_its_other_commands(command, is_launcher):
    target = Target(name="train.py", is_module=False, arguments=())
    planned, plain = (Continuation(target, None, ("run",), num_ranks) for num_ranks in (2, None))

    plain.check_launcher(command.split())  # `profile` leaves it alone
    if is_launcher:
        with pytest.raises(PlanError, match="does not reach them"):
            planned.check_launcher(command.split())
    else:
        planned.check_launcher(command.split())
