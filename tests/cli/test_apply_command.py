import dataclasses

import pytest

from memadvisor.cli.apply_command import apply_command
from memadvisor.run.run import NOTEBOOK, PROMPT, UNKNOWN
from tests.make_run import make_run


@pytest.mark.parametrize(
    ("script", "arguments", "num_ranks", "num_nodes", "command"),
    [
        ("train.py", (), 1, 1, "memadvisor run --plan p.json train.py"),
        ("a b/train.py", ("--lr", "1e-3"), 2, 1, "memadvisor run --plan p.json --nproc 2 'a b/train.py' --lr 1e-3"),
        ("package.train", ("$(x)",), 1, 1, "memadvisor run --plan p.json -m package.train '$(x)'"),
        ("train.py", (), 16, 2, "torchrun ... -m memadvisor run --plan p.json train.py"),
        (UNKNOWN, (), 2, 1, "memadvisor run --plan p.json --nproc 2 SCRIPT"),
        (NOTEBOOK, (), 1, 1, "memadvisor.apply('p.json', model, optimizer)"),
        (PROMPT, (), 1, 1, "memadvisor.apply('p.json', model, optimizer)"),
    ],
)  # fmt: skip
def test_the_command_starts_the_recorded_script_as_it_was_started(
    script, arguments, num_ranks, num_nodes, command
):
    run = make_run(traced_step=2)
    manifest = dataclasses.replace(run.manifest, script=script, arguments=arguments)
    run = dataclasses.replace(run, manifest=manifest)
    assert apply_command(run, "p.json", num_ranks, num_nodes) == command


def test_a_plan_is_tried_on_the_step_that_it_was_made_from():
    command = apply_command(make_run(traced_step=1), "p.json", 1, 1)
    assert command.startswith("memadvisor run --plan p.json --trace-step 1 ")
    assert "--trace-step" not in apply_command(make_run(traced_step=2), "p.json", 1, 1)
