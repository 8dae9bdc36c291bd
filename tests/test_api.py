"""What the context manager says of the program around it."""

import json
import sys

import pytest

import memadvisor


@pytest.mark.parametrize(
    ("argv", "script", "arguments"),
    [
        (["train.py", "--lr", "1"], "train.py", ["--lr", "1"]),
        (["/x/ipykernel_launcher.py", "-f", "/tmp/kernel-1.json"], "(notebook)", []),
        (["/x/colab_kernel_launcher.py", "-f", "kernel.json"], "(notebook)", []),
        ([""], "(Python prompt)", []),
    ],
)
def test_a_profile_names_the_script_or_says_that_there_is_none(
    argv, script, arguments, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "argv", argv)
    with memadvisor.profile(tmp_path / "run"):
        pass

    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["script"], manifest["arguments"]) == (script, arguments)


@pytest.mark.parametrize(
    ("argv", "label"),
    [(["a/train.py"], "train"), (["/x/ipykernel_launcher.py"], "notebook"), ([""], "Python-prompt")],
)
def test_directories_without_a_name_are_named_after_the_program(argv, label, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.chdir(tmp_path)

    profile = memadvisor.profile()

    assert profile.directory.name.startswith(label)
    assert repr(profile) == f"<profile in {profile.directory}>"
