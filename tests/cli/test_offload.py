"""What `--offload-activations` says of a plan, and that options with values are told from the script."""

import argparse
from pathlib import Path

import pytest

from memadvisor.capture.script import split_command
from memadvisor.cli import profile, run
from memadvisor.cli.offload import offload_of, with_disk_directory
from memadvisor.errors import UsageError
from memadvisor.plan import Plan


@pytest.mark.parametrize("command", [profile, run])
def test_every_option_with_a_value_keeps_it_from_being_the_script(command):
    parser = argparse.ArgumentParser()
    command.configure(parser)
    for action in parser._actions:
        for option in action.option_strings if action.nargs is None else ():
            words, target = split_command(["run", option, "value", "train.py"])
            assert words[-1] == "value" and target.name == "train.py", option


def asked(activations=None, units=None, optimizer=None, parameters=None):
    words = {"offload_activations": activations, "offload_units": units, "offload_optimizer": optimizer}
    words["offload_parameters"] = parameters
    return offload_of(argparse.Namespace(**words))


def test_a_tier_a_directory_and_units():
    here = {"optimizer_tier": "device", "parameter_tier": "device"}
    assert asked() == here
    assert asked(optimizer="disk") == {**here, "optimizer_tier": "disk"}
    # The state goes with them.
    assert asked(parameters="disk") == {"optimizer_tier": "disk", "parameter_tier": "disk"}
    disk = {"activation_tier": "disk", "activation_units": (), "disk_directory": None}
    assert asked("disk") == {**here, **disk}
    named = asked("disk:/data/it:self", "blocks.*, head")
    assert named["disk_directory"] == "/data/it:self" and named["activation_units"] == ("blocks.*", "head")


@pytest.mark.parametrize("words", [("tape",), ("host:/tmp",), ("disk:",), (None, "blocks.0")])
def test_what_names_no_tier_is_refused(words):
    with pytest.raises(UsageError, match="offload-activations"):
        asked(*words)


def test_the_file_is_made_where_the_run_is_unless_the_plan_says_otherwise():
    plan = Plan(num_ranks=1, zero_stage=0, activation_tier="disk")
    assert with_disk_directory(plan, Path("/runs/a")).disk_directory == "/runs/a"
    state = Plan(num_ranks=1, zero_stage=0, optimizer_tier="disk")
    assert with_disk_directory(state, Path("/runs/a")).disk_directory == "/runs/a"
    elsewhere = Plan(num_ranks=1, zero_stage=0, activation_tier="disk", disk_directory="/b")
    assert with_disk_directory(elsewhere, Path("/runs/a")) == elsewhere
    nowhere = Plan(num_ranks=1, zero_stage=0)
    assert with_disk_directory(nowhere, Path("/runs/a")) == nowhere
