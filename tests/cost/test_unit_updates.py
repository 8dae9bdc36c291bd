"""What an optimizer allocates for one unit's part of its step."""

from collections import Counter
from itertools import pairwise

import pytest

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.allocation_sequence import NUM_STEPS, planned_sequence
from memadvisor.cost.allocator_settings import MIN_BLOCK_BYTES
from memadvisor.cost.flats import piece_elements
from memadvisor.cost.states import UnitStates
from memadvisor.cost.step import StepStorage
from memadvisor.cost.transfers import TransferTimes
from memadvisor.cost.unit_updates import UnitUpdates, parameters_of
from memadvisor.hardware.hardware import TierBandwidth
from memadvisor.plan import UnitPlan
from memadvisor.run.records import Parameter
from memadvisor.schedule import Lane
from memadvisor.write_schedule import write_schedule
from tests.cost.test_simulate import TIMES, plan
from tests.make_run import make_run

HOST = TransferTimes({Lane.HOST: TierBandwidth(read_bytes_per_s=1e9, write_bytes_per_s=1e9)}, "a test")


def states(name, *sizes):
    parameters = tuple(
        Parameter(
            name=f"{name}.{number}",
            unit=name,
            shape=f"[{size // 4}]",
            dtype="float32",
            num_elements=size // 4,
            size_bytes=size,
            requires_grad=True,
            tied_to="",
        )
        for number, size in enumerate(sizes)
    )
    return UnitStates(name=name, parameters=parameters, optimizer_bytes=0, optimizer_scalar_bytes=0)


def temporaries(*sizes):
    return [
        StepStorage(
            category="temporary", size_bytes=size, birth_segment=0, birth_s=0.0, death_segment=0, death_s=1.0
        )
        for size in sizes
    ]


UNITS = {"a": states("a", 400, 80), "b": states("b", 400)}


@pytest.mark.parametrize(
    ("sizes", "together", "units"),
    [
        ((400, 80, 400, 400, 80, 400), True, "aabaab"),  # two operators over all three
        (
            (400, 400, 80, 80, 400, 400),
            False,
            "aaaabb",
        ),  # two temporaries of each, one parameter after another
        ((400, 80, 400, 8), True, "aab-"),  # a scalar is nobody's
        ((400, 400, 400), True, "---"),  # three for two parameters cannot be told apart
    ],
)
def test_temporaries_are_told_by_the_bytes_of_parameters(sizes, together, units):
    found = parameters_of(temporaries(*sizes), range(len(sizes)), UNITS, together=together)
    assert "".join(found[number][0] if number in found else "-" for number in range(len(sizes))) == units


def test_under_fsdp2_temporaries_are_told_by_the_bytes_of_shards():
    """Of three ranks: of 100 elements, and of 20, the first has 34 and 7."""
    sharing = dict.fromkeys(UNITS, 3)
    found = parameters_of(temporaries(136, 28, 136), range(3), UNITS, together=True, sharing=sharing)
    assert "".join(found[number][0] for number in range(3)) == "aab"


def sequence(tier="host", **settings):
    step = captured_step(make_run(num_ranks=1, device="cuda:0", **settings))
    units = tuple(
        UnitPlan(name=unit.name, zero_stage=0, recompute=False, optimizer_tier=tier) for unit in step.units
    )
    schedule = write_schedule(plan(units=units), step.units)
    return step, schedule, planned_sequence(step, schedule, TIMES, HOST)


def test_the_first_step_makes_each_units_state_tensor_by_tensor_and_later_ones_fetch_it_in_one_piece():
    step, _, changes = sequence()
    made = [
        Counter(change.size_bytes for change in changes if change.step == number and is_state(change))
        for number in range(NUM_STEPS)
    ]
    whole = sorted(own.optimizer_bytes for own in step.states.values())
    tensors = Counter(
        parameter.num_elements * item_bytes
        for own in step.states.values()
        for parameter in own.parameters
        for item_bytes, _ in own.state_items[parameter.name]
    )

    assert tensors and made[0] & tensors == tensors
    assert not made[0] - tensors - Counter(own.optimizer_scalar_bytes for own in step.states.values())
    for later in made[1:]:
        assert sum(later.values()) == 2 and max(later) == whole[-1]  # two buffers take turns


def is_state(change):
    return change.category == "optimizer_state" and change.size_bytes > 0


def test_state_that_is_made_is_free_when_that_of_the_next_unit_is_put_away():
    """So no more than two units' are there at once, and none when the step is over."""
    step, _, changes = sequence()
    alive, highest = {}, 0
    for change in changes:
        if change.step or change.size_bytes <= 0:
            alive.pop(change.name, None)
        elif is_state(change):
            alive[change.name] = change.size_bytes
        highest = max(highest, sum(alive.values()))
    sizes = [own.optimizer_bytes for own in step.states.values()]
    scalars = sum(own.optimizer_scalar_bytes for own in step.states.values())
    two = max(first + second for first, second in pairwise(sizes))

    assert max(sizes) < highest - scalars <= two
    assert sum(alive.values()) <= scalars


def test_a_piece_of_a_parameter_takes_its_part_of_what_that_had():
    """Of two ranks the first has the first parameters of a flat whole, the last not at all."""
    step = captured_step(make_run(num_ranks=2, device="cuda:0"))
    units = tuple(
        UnitPlan(name=unit.name, zero_stage=2, recompute=False, optimizer_tier="host") for unit in step.units
    )
    schedule = write_schedule(plan(ranks=2, stage=2, units=units), step.units)
    sizes = {name: own.optimizer_bytes // 2 for name, own in step.states.items()}
    updates = UnitUpdates(step, schedule, sizes)

    for name, size_bytes in sizes.items():
        assert sum(updates.made(name)) == pytest.approx(size_bytes, abs=len(step.states[name].parameters))


@pytest.mark.parametrize("stage", [1, 3])
def test_state_that_stays_is_made_for_pieces_of_parameters(stage):
    """And not as one a unit: tensors of less than a MiB are in other segments than what is larger."""
    step = captured_step(make_run(num_ranks=2, device="cuda:0"))
    units = tuple(UnitPlan(name=unit.name, zero_stage=stage, recompute=False) for unit in step.units)
    schedule = write_schedule(plan(ranks=2, stage=stage, units=units), step.units)
    played = Counter(c.size_bytes for c in planned_sequence(step, schedule, TIMES) if is_state(c))
    pieces = Counter(
        count * item_bytes
        for own in step.states.values()
        for name, count in piece_elements(own, 2, 0).items()
        for item_bytes, _ in own.state_items[name]
        if count
    )

    assert max(pieces.values()) > 1 and played & pieces == pieces
    largest = max(own.optimizer_bytes for own in step.states.values())
    assert max(played) < largest // 2


def test_what_stands_for_parameters_is_there_before_those_of_the_next_unit_are_free():
    """One block a parameter, unit by unit, as the engine puts a script's parameters away."""
    step = captured_step(make_run(num_ranks=1, device="cuda:0"))
    paged = {"optimizer_tier": "host", "parameter_tier": "host"}
    units = tuple(UnitPlan(name=unit.name, zero_stage=3, recompute=False, **paged) for unit in step.units)
    changes = planned_sequence(step, write_schedule(plan(stage=3, units=units), step.units), TIMES, HOST)
    own = [states.parameters for states in step.states.values()]
    at_first = [change.size_bytes for change in changes if not change.step]
    blocks = at_first[: at_first.index(0)].count(MIN_BLOCK_BYTES)

    assert not any(parameter.size_bytes == MIN_BLOCK_BYTES for rows in own for parameter in rows)
    assert blocks == len(own[0])
    assert at_first.count(MIN_BLOCK_BYTES) == sum(map(len, own))
