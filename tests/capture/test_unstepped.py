"""What is said where no training step was seen."""

import resource
import subprocess
import sys

from memadvisor.capture import unstepped

BUSY = "import time\nwhile time.process_time() < 1.2: pass"


def test_who_only_launches_is_told_where_memadvisor_goes(monkeypatch):
    class Used:
        ru_utime, ru_stime = 4.0, 1.0

    monkeypatch.setattr(resource, "getrusage", lambda who: Used)
    said = unstepped.what_was_seen(False, unstepped.BackwardSteps())

    assert "processes that it started took 5 s of processor time, unrecorded" in said
    assert said.endswith("let it launch this: LAUNCHER ... -m memadvisor profile SCRIPT.")


def test_who_starts_nothing_is_not(monkeypatch):
    class Used:
        ru_utime = ru_stime = 0.0

    monkeypatch.setattr(resource, "getrusage", lambda who: Used)

    assert (
        unstepped.what_was_seen(False, unstepped.BackwardSteps())
        == "No training step was seen: no model was called."
    )


def test_a_launcher_without_torch_is_told_too(tmp_path):
    script = tmp_path / "launch.py"
    script.write_text(
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}], check=True)\n"
    )
    words = [sys.executable, "-m", "memadvisor", "profile", "-o", tmp_path / "run", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0
    assert "the script never imported torch; processes that it started took 1 s" in done.stderr
    assert "-m memadvisor profile SCRIPT" in done.stderr
