"""What autograd keeps, on another tier: when it is gone, who keeps it here, and what the transfers cost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.moved_activations import absence_of, units_away
from memadvisor.cost.saved import MIN_BYTES, SavedStorages
from memadvisor.cost.simulate import simulate
from memadvisor.cost.stretches import Stretches
from memadvisor.cost.transfers import TransferTimes
from memadvisor.hardware.hardware import TierBandwidth
from memadvisor.plan import UnitPlan
from memadvisor.schedule import Lane
from memadvisor.write_schedule import write_schedule
from tests.engines.trainings import make_plan
from tests.make_run import make_run

UNITS = ("embedding", "blocks.0", "blocks.1", "blocks.2", "head")
STEP = captured_step(make_run(num_ranks=1, sequence=64))


def schedule_of(step, away, again=(), tier="disk"):
    units = tuple(
        UnitPlan(
            name=unit.name,
            zero_stage=0,
            recompute=unit.name in again,
            activation_tier=tier if unit.name in away else "device",
        )
        for unit in step.units
    )
    return write_schedule(make_plan(1, 0, "chosen", units), step.units)


def play(step, away, again=(), read=1e30, write=1e30):
    bandwidth = TierBandwidth(read_bytes_per_s=read, write_bytes_per_s=write)
    transfers = TransferTimes({Lane.DISK: bandwidth}, "a test")
    return simulate(step, schedule_of(step, away, again), None, transfers=transfers)


def kept_bytes(step, unit):
    """What a unit of the played training keeps in one micro-batch, in storages that are large enough to go."""
    return sum(
        one.size_bytes for one in step.saved if one.movable_by == ((unit, 0),) and one.micro_batch == 0
    )


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("away", [("blocks.1",), ("blocks.0", "blocks.1"), UNITS])
def test_of_all_that_units_keep_that_of_two_is_here(batches, away):
    """In the forward of the unit behind one, and from that unit's backward on."""
    step = captured_step(make_run(num_ranks=1, num_micro_batches=batches, sequence=64))
    plain = {m.segment: m.total_bytes for m in play(step, ()).moments}
    gone = dict.fromkeys(plain, 0)
    for unit in away:
        behind = (*UNITS[1:], None)[UNITS.index(unit)]
        assert kept_bytes(step, unit) >= MIN_BYTES
        for micro_batch in range(batches):
            begins = step.backward_begins[micro_batch]
            after = step.forward_at[behind, micro_batch] + 1 if behind else begins
            for segment in range(after, step.backwards[behind or unit, micro_batch]):
                gone[segment] += kept_bytes(step, unit)
    assert {m.segment: plain[m.segment] - m.total_bytes for m in play(step, away).moments} == gone
    assert max(gone.values()) > 0


def test_small_storages_stay():
    small = captured_step(make_run(num_ranks=1, hidden=8, vocabulary=16))
    assert all(one.size_bytes >= MIN_BYTES for one in STEP.saved) and STEP.saved
    assert small.saved == () and play(small, UNITS).moments == play(small, ()).moments


def test_what_a_recomputed_unit_keeps_stays():
    again = ("blocks.0", "blocks.2")
    assert play(STEP, again, again).moments == play(STEP, (), again).moments
    assert play(STEP, ("blocks.1", *again), again).moments == play(STEP, ("blocks.1",), again).moments


def between(**changes):
    """A tensor that blocks.0 makes and keeps, and that blocks.1 takes as input and keeps too."""
    first, second = (STEP.backwards[unit, 0] for unit in ("blocks.0", "blocks.1"))
    made = STEP.forward_at["blocks.0", 0]
    known = {
        "saved_until": {"blocks.0": first, "blocks.1": second},
        "movable_by": ("blocks.0", "blocks.1"),
        "held_until": STEP.forward_at["blocks.1", 0],
        **changes,
    }
    known["saved_until"] = {(unit, 0): until for unit, until in known["saved_until"].items()}
    known["movable_by"] = tuple((unit, 0) for unit in known["movable_by"])
    return SavedStorages(
        category="activation",
        dtype="float32",
        size_bytes=MIN_BYTES,
        num_storages=1,
        micro_batch=0,
        birth_segment=made,
        death_segment=first,
        input_of={("blocks.1", 0): second},
        maker=("blocks.0", 0),
        **known,
    )


@pytest.mark.parametrize(
    ("away", "again", "changes", "first", "last"),
    [
        # The last one to save it is the first one to ask for it, before the backward of the unit behind that.
        (UNITS, (), {}, "forward blocks.2", "backward blocks.2"),
        # Who keeps what it saves keeps it here until its own backward, and there it would be asked for.
        (("blocks.0",), (), {}, None, None),
        (("blocks.1",), (), {}, None, None),
        # A recomputed unit keeps its input until its backward.
        (("blocks.0",), ("blocks.1",), {}, None, None),
        (("blocks.0",), (), {"saved_until": {"blocks.0": 10**6}}, "forward blocks.2", "backward blocks.1"),
        # A script that still uses it keeps it in the forward; one that keeps it altogether keeps it.
        (
            UNITS,
            (),
            {"held_until": STEP.forward_at["head", 0]},
            "behind forward head",
            "backward blocks.2",
        ),
        (UNITS, (), {"held_until": 10**6}, None, None),
        # An argument without gradient.
        (UNITS, (), {"movable_by": ()}, None, None),
        # A skip: the unit that saves it last asks for it, and nothing is behind that.
        (
            UNITS,
            (),
            {"movable_by": ("blocks.0", "head"), "saved_until": {"blocks.0": 90, "head": 90}},
            "forward blocks.2",
            "backward head",
        ),
    ],
)
def test_what_somebody_else_holds_does_not_leave(away, again, changes, first, last):
    storages = between(**changes)
    absence = absence_of(storages, STEP, units_away(schedule_of(STEP, away, again)), Stretches.alone(again))
    if first is None:
        assert absence is None or not absence.is_away
        return
    place, _, unit = first.rpartition(" ")
    assert absence.first == STEP.forward_at[unit, 0] + (place == "behind forward")
    assert absence.last == STEP.backwards[last.split()[1], 0] - 1
    assert (absence.written_by, absence.is_away) == (("blocks.0", 0), True)


@given(
    st.sets(st.sampled_from(UNITS), min_size=1),
    st.sets(st.sampled_from(UNITS)),
    st.floats(1e6, 1e10),
    st.floats(1e6, 1e10),
)
@settings(max_examples=25, deadline=None)
def test_transfers_cost_what_compute_does_not_hide(away, again, read, write):
    """What goes is written once and read once; no more is waited for than that, and nothing by an endless disk."""
    here = play(STEP, (), again)
    slow, fast = play(STEP, away, again, read, write), play(STEP, away, again)
    total = sum(kept_bytes(STEP, unit) for unit in away - again)
    moved_s = sum(i.end_s - i.start_s for i in slow.lanes.intervals if i.lane is Lane.DISK)

    assert moved_s == pytest.approx(total / read + total / write)
    assert slow.step_time_s == pytest.approx(here.step_time_s + slow.exposed_transfer_s)
    assert slow.exposed_transfer_s <= moved_s * (1 + 1e-9)
    assert fast.step_time_s == pytest.approx(here.step_time_s)
    assert slow.moments == fast.moments


def test_a_unit_waits_for_its_own_write_after_the_next_forward_and_for_its_reads_as_it_uses_them():
    """By hand: 0.008 s of a block's forward under the write, 0.016 s of the next one's backward under the read."""
    size_bytes = kept_bytes(STEP, "blocks.1")
    (parts,) = {one.num_storages for one in STEP.saved if one.movable_by == (("blocks.1", 0),)}
    write_s, read_s = 0.02, 0.05
    played = play(STEP, ("blocks.1",), read=size_bytes / read_s, write=size_bytes / write_s)
    durations = {(s.phase, s.unit): s.duration_s for s in STEP.segments}
    after_write_s = write_s - durations["forward", "blocks.2"]
    late_s = read_s - durations["backward", "blocks.2"]
    # All but the last storage may be used while others come.
    pace_s = max(-read_s, -durations["backward", "blocks.1"]) * (1 - 1 / parts)
    assert played.exposed_transfer_s == pytest.approx(after_write_s + late_s + pace_s)


def test_what_is_moved_needs_a_bandwidth():
    with pytest.raises(AssertionError, match="bandwidths"):
        simulate(STEP, schedule_of(STEP, UNITS), None)
