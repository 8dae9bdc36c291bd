import dataclasses

import pytest

from memadvisor.cli.apply_command import apply_command
from memadvisor.run.run import UNKNOWN
from tests.make_run import make_run


@pytest.mark.parametrize(
    ("script", "arguments", "num_ranks", "num_nodes", "command"),
    [
        ("train.py", (), 1, 1, "memadvisor run --plan p.json train.py"),
        ("a b/train.py", ("--lr", "1e-3"), 2, 1, "memadvisor run --plan p.json --nproc 2 'a b/train.py' --lr 1e-3"),
        ("package.train", ("$(x)",), 1, 1, "memadvisor run --plan p.json -m package.train '$(x)'"),
        ("train.py", (), 16, 2, "torchrun ... -m memadvisor run --plan p.json train.py"),
        (UNKNOWN, (), 2, 1, "memadvisor run --plan p.json --nproc 2 SCRIPT"),
    ],
)  # fmt: skip
def test_the_command_starts_the_recorded_script_as_it_was_started(
    script, arguments, num_ranks, num_nodes, command
):
    run = make_run()
    manifest = dataclasses.replace(run.manifest, script=script, arguments=arguments)
    run = dataclasses.replace(run, manifest=manifest)
    assert apply_command(run, "p.json", num_ranks, num_nodes) == command
