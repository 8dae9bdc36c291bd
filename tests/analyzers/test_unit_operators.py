"""Which operators of a unit's forward may be kept when it is recomputed, and how long each takes."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from memadvisor.analyzers.placement import Passes, Placed
from memadvisor.analyzers.segments import captured_step
from memadvisor.analyzers.unit_operators import unit_forwards
from memadvisor.run.records import Operator, Saved
from tests.make_run import make_run, storage


@dataclass(frozen=True)
class Piece:
    phase: str
    start_s: float
    end_s: float
    unit: str = "block"
    micro_batch: int = 0
    call: int = 0
    walk: int = 0


PASSES = Passes([Piece("forward", 0.0, 100.0), Piece("backward", 100.0, 200.0)])


def call(number, name, *, changes=None, is_random=False):
    """From 10 n to 10 n + 8 s."""
    row = Operator(f"aten::{name}", "", "block", "forward", 10.0 * number, 10.0 * number + 8, 0, 0)
    return replace(row, changes=changes, is_random=is_random)


def made(number, name, *, saved_s=None, death=1, kept=True):
    """What the n-th call makes; its storage's number is the call's."""
    row = storage(
        storage_id=number,
        birth_s=10.0 * number + 1,
        death_s=150.0,
        operator=f"aten::{name}",
        unit="block",
        size_bytes=100 + number,
    )
    rows = () if saved_s is None else (Saved(number, "", "block", 0, 100, "", saved_s, 101.0, 150.0),)
    return Placed(row, 0, death, rows), kept


def names(calls, storages):
    placed = [item for item, _ in storages]
    kept = {number for number, (_, is_kept) in enumerate(storages) if is_kept}
    found = unit_forwards(SimpleNamespace(operators=calls), PASSES, placed, kept)
    return [group.name for group in found[0].groups] if found else []


def test_calls_are_numbered_by_name_and_views_make_nothing():
    calls = [call(0, "mm"), call(1, "t"), call(2, "mm"), call(3, "gelu")]
    storages = [
        made(0, "mm", saved_s=31.0),
        made(2, "mm", death=0, kept=False),
        made(3, "gelu", saved_s=38.5),
    ]
    assert names(calls, storages) == ["aten::mm#0", "aten::mm#1", "aten::gelu#0"]


def test_what_comes_after_the_last_saved_tensor_is_not_run_again():
    calls = [call(0, "mm"), call(1, "mm")]
    storages = [made(0, "mm", saved_s=9.0), made(1, "mm", death=0, kept=False)]
    assert names(calls, storages) == ["aten::mm#0"]
    placed = [item for item, _ in storages]
    found = unit_forwards(SimpleNamespace(operators=calls), PASSES, placed, {0})[0]
    assert [group.name for group in found.late] == ["aten::mm#1"]


def test_what_flows_to_other_units_is_none():
    calls = [call(0, "mm"), call(1, "gelu")]
    storages = [made(0, "mm", saved_s=19.0, kept=False), made(1, "gelu", saved_s=19.0)]
    assert names(calls, storages) == ["aten::gelu#0"]


@pytest.mark.parametrize(("between", "kept"), [(False, ["aten::mm#0"]), (True, [])])
def test_operators_in_place_count_with_what_they_follow_at_once(between, kept):
    """With a reader in between, what stays at the end is not what that one has read."""
    calls = [call(0, "mm"), *([call(1, "view")] if between else []), call(2, "relu_", changes=0)]
    assert names(calls, [made(0, "mm", saved_s=29.0)]) == kept


def test_what_draws_before_something_that_draws_again_is_drawn_again():
    calls = [
        call(0, "native_dropout", is_random=True),
        call(1, "mm"),
        call(2, "rand_like", is_random=True),
        call(3, "native_dropout", is_random=True),
    ]
    storages = [
        made(0, "native_dropout", saved_s=9.0),
        made(1, "mm", saved_s=19.0),
        made(2, "rand_like", saved_s=39.0, kept=False),
        made(3, "native_dropout", saved_s=39.0),
    ]
    assert names(calls, storages) == ["aten::mm#0", "aten::native_dropout#1"]


def test_casts_that_autocast_may_have_in_its_cache_are_never_kept():
    assert names([call(0, "_to_copy")], [made(0, "_to_copy", saved_s=9.0)]) == []


def test_older_runs_do_not_say_what_is_random_and_keep_nothing():
    assert names([replace(call(0, "mm"), is_random=None)], [made(0, "mm", saved_s=9.0)]) == []


def test_operators_take_no_longer_than_their_forward_and_of_like_units_the_same():
    step = captured_step(make_run(num_blocks=3, num_micro_batches=2))
    blocks = [p for p in step.operators if step.segments[p].unit.startswith("blocks")]
    assert len(blocks) == 6
    for position in blocks:
        operators = step.operators[position]
        assert 0 < operators.seconds(range(len(operators.operators))) < step.segments[position].duration_s
        assert operators.operators == step.operators[blocks[0]].operators or position > blocks[0]
    seconds = [[each.seconds for each in step.operators[p].operators] for p in blocks]
    assert all(row == seconds[0] for row in seconds)


def test_with_nothing_kept_levels_are_those_of_plain_recomputation():
    step = captured_step(make_run(num_blocks=2))
    for position, operators in step.operators.items():
        segment = step.segments[position]
        assert sum(operators.forward_peak(()).values()) == sum(segment.captured.peak_unsaved.values())
        assert sum(operators.growth(()).values()) == sum(segment.growth.values())
