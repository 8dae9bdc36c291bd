"""The sequence of allocations under a plan holds, at its fullest, what the simulator says is alive."""

from collections import Counter
from dataclasses import replace

import pytest

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.allocation_events import StepEvents
from memadvisor.cost.allocation_log import AllocationLog
from memadvisor.cost.allocation_sequence import NUM_STEPS, captured_sequence, planned_sequence
from memadvisor.cost.allocator_replay import replay
from memadvisor.cost.allocator_settings import MIB, AllocatorSettings
from memadvisor.cost.simulate import simulate
from memadvisor.cost.step import BoundaryTensor, StepStorage
from memadvisor.cost.transfers import TransferTimes
from memadvisor.hardware.hardware import TierBandwidth
from memadvisor.plan import UnitPlan
from memadvisor.precision import Precision
from memadvisor.schedule import Lane
from memadvisor.write_schedule import write_schedule
from tests.cost.test_simulate import TIMES, plan
from tests.make_run import make_run

HOST = TransferTimes({Lane.HOST: TierBandwidth(read_bytes_per_s=1e9, write_bytes_per_s=1e9)}, "a test")


def exact_peak(changes):
    """Highest sum of the requests alive, without any rounding; every free has its allocation."""
    sizes, total, peak = {}, 0, 0
    for change in changes:
        if change.size_bytes > 0:
            assert change.name not in sizes
            sizes[change.name] = change.size_bytes
            total += change.size_bytes
        else:
            total -= sizes.pop(change.name)
        peak = max(peak, total)
    return peak


def exact_last_peak(changes):
    """In the last step: that sum at its highest, by category."""
    alive, total, peak, found = {}, 0, -1, {}
    for change in changes:
        if change.size_bytes > 0:
            alive[change.name] = change
            total += change.size_bytes
        else:
            total -= alive.pop(change.name).size_bytes
        if change.step == changes[-1].step and total > peak:
            peak, found = total, Counter()
            for each in alive.values():
                found[each.category] += each.size_bytes
    return peak, dict(found)


def units_of(step, stage, which):
    """With some units recomputed, or with what some keep on another tier."""
    again = set(chosen(step, "first" if which == "one away" else "none" if which == "away" else which))
    away = {"away": set(step.recomputable), "one away": set(chosen(step, "middle"))}.get(which, set())
    return tuple(
        UnitPlan(
            name=unit.name,
            zero_stage=stage,
            recompute=unit.name in again,
            activation_tier="host" if unit.name in away else "device",
        )
        for unit in step.units
    )


def chosen(step, which):
    units = list(step.recomputable)
    return {"none": [], "first": units[:1], "middle": units[1:3], "all": units}[which]


# On a device where checkpointing keeps no generator's state, so that all bytes are in both.
@pytest.mark.parametrize("which", ["none", "first", "middle", "all", "away", "one away"])
@pytest.mark.parametrize(
    ("recorded", "ranks", "stage"), [(1, 1, 0), (1, 2, 3), (2, 2, 0), (2, 2, 1), (2, 4, 2)]
)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_the_sequence_and_the_simulator_agree_on_the_peak(recorded, ranks, stage, which, num_micro_batches):
    run = make_run(num_ranks=recorded, device="cuda:0", num_micro_batches=num_micro_batches, sequence=64)
    step = captured_step(run)
    wanted = plan(ranks=ranks, stage=stage, units=units_of(step, stage, which))
    schedule = write_schedule(wanted, step.units)

    changes = planned_sequence(step, schedule, TIMES, HOST)
    peak = simulate(step, schedule, TIMES, transfers=HOST).peak
    assert exact_peak(changes) == peak.total_bytes
    assert exact_last_peak(changes) == (
        peak.total_bytes,
        {c: n for c, n in peak.by_category_bytes.items() if n},
    )


@pytest.mark.parametrize("which", ["none", "middle", "all"])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("stage", "param_dtype", "reduce_dtype"),
    [(2, None, "bfloat16"), (3, None, "float16"), (3, "bfloat16", "bfloat16"), (3, "bfloat16", None)],
)
def test_they_agree_in_another_precision_too(stage, param_dtype, reduce_dtype, which, num_micro_batches):
    precision = Precision(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    run = make_run(num_ranks=1, device="cuda:0", num_micro_batches=num_micro_batches)
    step = captured_step(run, precision=precision)
    wanted = plan(ranks=2, stage=stage, recompute=chosen(step, which), precision=precision)
    schedule = write_schedule(wanted, step.units)

    changes = planned_sequence(step, schedule, TIMES)
    assert exact_peak(changes) == simulate(step, schedule, TIMES).peak.total_bytes


@pytest.mark.parametrize("which", ["none", "all"])
def test_smaller_micro_batches_hold_no_more_than_the_simulator_says(which):
    """It adds up each segment's own highest instant; the sequence knows that they do not coincide."""
    step = captured_step(make_run(num_ranks=1, device="cuda:0"), micro_batch_divisor=2)
    schedule = write_schedule(plan(recompute=chosen(step, which)), step.units)
    peak = simulate(step, schedule, None).peak.total_bytes

    assert 0.95 * peak <= exact_peak(planned_sequence(step, schedule, None)) <= peak


def test_as_captured_the_sequence_has_the_measured_peak():
    run = make_run(num_ranks=1)
    step = captured_step(run)

    changes = captured_sequence(step.storages, step.segments)
    assert exact_peak(changes) == run.ranks[0].traced_step.peak_allocated_bytes


class Stretch:
    """A segment without a unit."""

    unit = micro_batch = pass_number = None

    def __init__(self, phase):
        self.phase = phase


class Unit(Stretch):
    """A segment of one."""

    pass_number = 0

    def __init__(self, phase, unit="u"):
        super().__init__(phase)
        self.unit = unit


SEGMENTS = [Stretch("forward"), Stretch("backward"), Stretch("optimizer")]


def storage(category, mib, birth, death, *, birth_s=0.0, death_s=9.0):
    return StepStorage(
        category=category,
        size_bytes=mib * MIB,
        birth_segment=birth,
        birth_s=birth_s,
        death_segment=death,
        death_s=death_s,
    )


def changes_where_the_last_runs_again(storages, segments, firsts=None):
    """MiB of each change where unit u is recomputed, whose backward is the last segment. `firsts`: as StepEvents has them."""
    events = StepEvents(storages, segments, {"u"}, {}, firsts or {})
    log = AllocationLog(storages, events, segments, models_states=False)
    last = len(segments) - 1
    for position in range(last):
        log.segment(position, {}, 1.0)
    log.recomputation(last)
    log.segment(last, {}, 1.0)
    return [change.size_bytes // MIB for change in log.changes]


def test_optimizer_state_comes_in_the_first_optimizer_step_into_what_the_backward_left():
    """40 MiB of activations are free when 30 MiB of state come: the next activations need a segment anew."""
    storages = [
        storage("parameter", 30, -1, 3),
        storage("optimizer_state", 30, -1, 3),
        storage("activation", 40, 0, 1),
    ]
    changes = captured_sequence(storages, SEGMENTS)

    assert [change.size_bytes // MIB for change in changes if change.size_bytes > 0] == [30, 40, 30, 40, 40]
    assert exact_peak(changes) == 100 * MIB
    assert replay(changes, AllocatorSettings()).peak_reserved_bytes == (30 + 40 + 40) * MIB


def test_what_a_step_frees_of_the_one_before_is_what_that_left():
    """Gradients found and freed in the forward are those left by the last backward: never two generations."""
    storages = [storage("gradient", 30, -1, 0, death_s=0.0), storage("gradient", 30, 1, 3, birth_s=2.0)]
    changes = captured_sequence(storages, SEGMENTS)

    assert len(changes) == 2 * NUM_STEPS - 1  # each step makes one; all but the last are freed
    assert exact_peak(changes) == 30 * MIB


def test_what_a_step_leaves_in_other_sizes_goes_with_what_it_found():
    """One old gradient of 50 MiB, two new ones of 20 and 30: both go when the old one would."""
    storages = [
        storage("gradient", 50, -1, 0, death_s=0.0),
        storage("gradient", 20, 1, 3, birth_s=2.0),
        storage("gradient", 30, 1, 3, birth_s=2.5),
    ]
    assert exact_peak(captured_sequence(storages, SEGMENTS)) == 50 * MIB


def test_what_a_step_leaves_and_makes_anew_is_replaced():
    """A loss that the script keeps until the next: two at a time, not one more each step."""
    changes = captured_sequence([storage("other", 10, 0, 3)], SEGMENTS)
    assert exact_peak(changes) == 20 * MIB


def test_a_batch_is_renewed_though_it_is_an_input_only_where_a_model_is_called_with_it():
    """The step frees the last one, which is nothing to it, and leaves its own: there is none before the first step."""
    storages = [
        storage("other", 30, -1, 0, death_s=1.0),
        storage("input", 30, 0, 3, birth_s=0.5),
        storage("other", 10, -1, 3),
    ]
    changes = captured_sequence(storages, SEGMENTS)

    assert [change.size_bytes // MIB for change in changes if change.size_bytes > 0] == [10, 30, 30, 30]
    assert exact_peak(changes) == (10 + 30 + 30) * MIB


def test_steps_that_are_not_traced_add_in_place():
    """A product of 12 MiB and its sum are one tensor there, and two where operators are seen."""
    product = storage("temporary", 12, 0, 0, birth_s=1.0, death_s=2.1)
    total = replace(storage("activation", 12, 0, 1, birth_s=2.0), in_place_of=0)
    changes = captured_sequence([product, total], SEGMENTS)

    assert [c.step for c in changes if c.size_bytes > 0] == [0, 1, 2, 2]
    assert [c.category for c in changes if c.size_bytes > 0][2:] == ["temporary", "activation"]
    assert exact_peak(changes) == 24 * MIB
    assert exact_peak([c for c in changes if c.step < 2]) == 12 * MIB


def test_a_sum_has_the_memory_of_a_gradient_that_ends_where_it_begins():
    """Where operators are not seen it is that tensor, and not the other that is gone with it."""
    first = storage("temporary", 12, 0, 0, birth_s=1.0, death_s=2.0)
    second = storage("temporary", 12, 0, 0, birth_s=1.5, death_s=2.1)
    total = replace(storage("temporary", 12, 0, 1, birth_s=2.0), in_place_of=0)
    changes = captured_sequence([first, second, total], SEGMENTS)
    plain = [change for change in changes if change.step == 0]

    assert [change.size_bytes // MIB for change in plain] == [12, 12, 0, 0]
    assert [change.name for change in plain] == [1, 2, 2, 1]
    traced = [change for change in changes if change.step == 2]
    assert [change.size_bytes // MIB for change in traced] == [12, 12, 12, 0, 0, 0]
    assert [change.is_aside for change in traced] == [False, False, True, False, False, False]


@pytest.mark.parametrize(
    ("accumulated", "buffer_mib", "sizes"),
    [
        ((1, 13.0), 5, [4, 2, 3, 0, 0, 5, 0, 1, 0]),  # what its node had, and was given, is gone by then
        (None, 5, [4, 2, 5, 0, 3, 0, 0, 1, 0]),
        ((1, 13.0), 2, [4, 2, 3, 0, 0, 1, 0]),  # a unit's only gradient becomes its buffer
        ((2, 20.0), 5, [4, 2, 3, 0, 0, 1, 0, 5, 0]),  # once a later unit's has been added
    ],
)
def test_a_gradient_passes_to_its_buffer_when_autograd_accumulates_it(accumulated, buffer_mib, sizes):
    segments = [Unit("forward"), Unit("backward"), Unit("backward", "v"), Stretch("optimizer")]
    given = storage("temporary", 4, 1, 1, birth_s=9.0, death_s=12.5)
    gradient = storage("gradient", 2, 1, 4, birth_s=10.0)
    gradient = replace(gradient, owner="u", accumulated=accumulated)
    inside = storage("temporary", 3, 1, 1, birth_s=11.0, death_s=12.0)
    following = storage("temporary", 1, 1, 1, birth_s=14.0, death_s=15.0)
    storages = [given, gradient, inside, following]
    log = AllocationLog(storages, StepEvents(storages, segments, (), {}, {}), segments, models_states=True)
    there = {("gradient", "u"): buffer_mib * MIB}
    log.segment(0, {}, 1.0)
    log.segment(1, {} if accumulated and accumulated[0] == 2 else there, 1.0)
    log.segment(2, there, 1.0)

    assert [change.size_bytes // MIB for change in log.changes] == sizes


def test_first_parameters_come_in_their_order_among_those_that_stay():
    """What makes way is not behind what stays, or the room that it leaves would be elsewhere."""
    segments = [Unit("forward")]
    sizes = {"u": [3, 1], "v": [2], "w": [4]}
    storages = [
        replace(storage("parameter", mib, -1, 1), owner=unit) for unit, mib in (("u", 3), ("v", 2), ("u", 1))
    ]
    log = AllocationLog(
        storages,
        StepEvents(storages, segments, (), {}, {}),
        segments,
        models_states=True,
        as_captured=["v"],
        first_parameters={unit: [size * MIB for size in sizes[unit]] for unit in ("u", "w")},
    )
    assert [change.size_bytes // MIB for change in log.changes] == [3, 2, 1, 4]  # w's were not recorded
    log.put_away({})
    assert [change.size_bytes // MIB for change in log.changes[4:]] == [0, 0, 4, 0, 0, 4, 0]


def test_parameters_move_into_the_engines_storage_unit_by_unit():
    """With stage 0 they stay, with 2 the whole flat comes first, and with 3 it is there until there is a shard."""
    sizes = {"kept": [2, 1], "flat": [4], "shared": [6, 2]}
    tensors = {("parameter", "kept"): 3, ("parameter", "flat"): 5, ("parameter", "shared"): 4}
    segments = [Unit("forward")]
    log = AllocationLog(
        [],
        StepEvents([], segments, (), {}, {}),
        segments,
        models_states=True,
        first_parameters={unit: [mib * MIB for mib in own] for unit, own in sizes.items()},
    )
    wanted = {key: mib * MIB for key, mib in tensors.items()}
    log.start({"flat": 2, "shared": 3}, wanted)
    log.states(wanted)
    log.has_started()

    assert [change.size_bytes // MIB for change in log.changes] == [
        *(2, 1, 4, 6, 2),  # as the script has them
        *(15, 0),  # broadcast
        *(5, 0),
        *(8, 0, 0, 4, 0),
    ]


def test_what_is_freed_for_good_was_there_from_the_start():
    """Two tensors from before the step that it drops, and leaves nothing for."""
    storages = [storage("other", 30, -1, 0), storage("other", 20, -1, 1), storage("activation", 40, 0, 1)]
    changes = captured_sequence(storages, SEGMENTS)

    assert [change.size_bytes // MIB for change in changes if change.size_bytes > 0] == [30, 20, 40, 40, 40]
    assert exact_peak(changes) == 90 * MIB


@pytest.mark.parametrize("stage", [1, 3])
def test_what_ddp_broadcasts_is_there_once_before_the_first_step(stage):
    """All parameters in one piece, whose segment stays cached: plans reserved 10 % more than was predicted without it."""
    step = captured_step(make_run(num_ranks=2, device="cuda:0"))
    whole_bytes = sum(states.parameter_bytes for states in step.states.values())
    schedule = write_schedule(plan(ranks=2, stage=stage, units=units_of(step, stage, "none")), step.units)
    changes = planned_sequence(step, schedule, TIMES)
    (place,) = [place for place, change in enumerate(changes) if change.size_bytes == whole_bytes]

    assert (changes[place + 1].name, changes[place + 1].size_bytes) == (changes[place].name, 0)
    assert (
        sum(change.size_bytes for change in changes[:place]) >= whole_bytes
    )  # the script's own are all there


def test_with_optimizer_state_elsewhere_one_rank_has_the_scripts_own_parameters_and_gradients():
    """Tensor by tensor, as they were recorded, and not in one piece a unit."""
    step = captured_step(make_run(num_ranks=1, device="cuda:0"))
    own = step.units[1].name
    units = tuple(
        UnitPlan(name=unit.name, zero_stage=0, recompute=False, optimizer_tier="host") for unit in step.units
    )
    schedule = write_schedule(plan(units=units), step.units)
    played = [c.size_bytes for c in planned_sequence(step, schedule, None, HOST) if c.size_bytes > 0]

    for category, at_once in (("parameter", 1), ("gradient", NUM_STEPS)):
        births = {"parameter": -1, "gradient": 0}
        captured = [
            item.size_bytes
            for item in step.storages
            if (item.owner, item.category) == (own, category) and item.birth_segment >= births[category]
        ]
        assert len(captured) > 1
        assert all(played.count(size) >= at_once * captured.count(size) for size in captured)
        assert sum(captured) not in played


@pytest.mark.parametrize(("asked_s", "highest_mib"), [(None, 9), (12.0, 6)])
def test_a_unit_runs_again_where_its_backward_first_asks(asked_s, highest_mib):
    """Its backward works with 4 MiB, which are gone when it asks for the 3 that were kept beside 2 of another's."""
    segments = [Unit("forward"), Unit("backward")]
    kept = storage("activation", 3, 0, 1, birth_s=1.0, death_s=14.0)
    kept = replace(kept, freed_by="u", unsaved_death=(0, 2.0), runs_again=True)
    others, worked = storage("other", 2, -1, 2), storage("temporary", 4, 1, 1, birth_s=10.0, death_s=11.0)
    storages = [kept, others, worked]
    events = StepEvents(storages, segments, {"u"}, {}, {} if asked_s is None else {1: asked_s})
    log = AllocationLog(storages, events, segments, models_states=False)
    log.segment(0, {}, 1.0)
    log.recomputation(1)
    log.segment(1, {}, 1.0)

    assert exact_peak(log.changes) == highest_mib * MIB
    assert sum(change.size_bytes > 0 for change in log.changes) == 4


def test_what_a_unit_makes_for_others_and_saves_itself_is_there_again_in_its_backward():
    """3 MiB that the next unit takes go after its forward; the second run makes them anew, for a backward with 4 MiB."""
    segments = [Unit("forward"), Unit("forward", "v"), Unit("backward", "v"), Unit("backward")]
    shared = BoundaryTensor(
        category="activation",
        size_bytes=3 * MIB,
        birth_segment=0,
        death_segment=3,
        missed_bytes=0,
        last_use_segment=1,
        saved_until={"u": 3},
        input_of={"v": 2},
    )
    made = storage("activation", 3, 0, 3, birth_s=1.0, death_s=32.0)
    made = replace(made, boundary=shared, runs_again=True)
    worked = storage("temporary", 4, 3, 3, birth_s=31.0, death_s=33.0)
    storages = [made, worked]
    assert changes_where_the_last_runs_again(storages, segments) == [3, 0, 3, 4, 0, 0]


def test_what_autograd_let_go_of_before_a_unit_ran_again_goes_when_it_has_run():
    segments = [Unit("forward"), Unit("backward")]
    kept = storage("activation", 3, 0, 1, birth_s=1.0, death_s=11.0)
    kept = replace(kept, freed_by="u", unsaved_death=(0, 2.0), runs_again=True)
    assert changes_where_the_last_runs_again([kept], segments, {1: 12.0}) == [3, 0, 3, 0]


def test_what_a_unit_is_called_with_and_does_not_save_goes_when_it_has_run_again():
    """3 MiB that another unit's code has dropped in the forward are kept for the second run, and not for 4 MiB behind it."""
    segments = [Unit("forward", "v"), Unit("forward"), Unit("backward")]
    taken = BoundaryTensor(
        category="temporary",
        size_bytes=3 * MIB,
        birth_segment=0,
        death_segment=1,
        missed_bytes=0,
        last_use_segment=1,
        saved_until={},
        input_of={"u": 2},
    )
    made = replace(storage("temporary", 3, 0, 1, birth_s=1.0, death_s=12.0), boundary=taken)
    worked = storage("temporary", 4, 2, 2, birth_s=31.0, death_s=33.0)
    storages = [made, worked]
    assert changes_where_the_last_runs_again(storages, segments) == [3, 0, 4, 0]
