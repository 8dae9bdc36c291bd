"""`memadvisor doctor`: what it tries really runs, and its exit code is that of a gate."""

import json
import sys

import pytest

from memadvisor.cli import doctor
from memadvisor.cli.main import main
from tests.warm_python import warm_python


@pytest.mark.timeout(300)
def test_here_everything_works(monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", warm_python())
    assert main(["doctor", "--json"]) == 0
    found = {row["subject"]: row for row in json.loads(capsys.readouterr().out)["findings"]}
    assert {"python", "packages", "torch", "devices", "disk"} <= found.keys()
    assert found["recording"]["state"] == "ok" and "its losses as without it" in found["recording"]["text"]
    assert found["2 ranks"]["state"] == "ok"


def test_a_problem_is_exit_code_1_and_nothing_is_tried_on_top_of_it(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "probe_torch", lambda: "ImportError: libfoo\x1b[31m")
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "problem  torch" in text and "\x1b" not in text and "recording" not in text
