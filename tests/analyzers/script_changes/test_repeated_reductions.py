"""Which all-reduces of a step say the same thing twice."""

import dataclasses

from memadvisor.analyzers.checkpoint_frames import traced_calls
from memadvisor.analyzers.script_changes.change import ScriptChange
from memadvisor.analyzers.script_changes.found import script_changes
from memadvisor.analyzers.timeline import memory_timeline
from memadvisor.run.records import Collective, Span
from tests.analyzers.script_changes.test_held_results import rank_of

ALL_REDUCE = Collective(
    0, "all_reduce", "0", 2, 0, 400, "float32", "backward", "head", True, 0.0, None, None, None
)


def found(*calls: tuple[str, float], update_s: float = 0.9) -> ScriptChange | None:
    """Of all-reduces of 400 bytes (unit, moment), two backwards from 0.1 and 0.5 s, and an update after them."""
    rank = rank_of()
    spans = [Span(0, "backward", "", 0, 0.1, 0.4), Span(0, "backward", "", 1, 0.5, 0.8)]
    rank = dataclasses.replace(
        rank,
        process=dataclasses.replace(rank.process, has_ddp=True),
        spans=(*spans, Span(0, "optimizer", "", 2, update_s, update_s + 0.05)),
        collectives=tuple(dataclasses.replace(ALL_REDUCE, unit=unit, issue_s=at_s) for unit, at_s in calls),
    )
    changes = script_changes(traced_calls(rank), memory_timeline(rank), has_plan=False)
    return next((change for change in changes if change.kind == "repeated_reductions"), None)


def test_the_same_units_in_each_backward():
    change = found(("head", 0.2), ("head", 0.6))

    assert change is not None
    assert "800 B, where 400 B would do" in change.seen


def test_other_units_in_each_backward_are_not():
    assert found(("generator", 0.2), ("critic", 0.6)) is None


def test_an_update_between_the_backwards_makes_them_two_trainings():
    assert found(("head", 0.2), ("head", 0.6), update_s=0.45) is None


def test_one_backward_without_any_is_as_it_should_be():
    assert found(("head", 0.6)) is None
