"""What is said where no training step was seen."""

import resource

from memadvisor.capture import unstepped


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
