"""The sequence of allocations and frees of a training, from one captured step and what a plan changes of it.

The training is played from its first step on, because what is cached then decides what is reserved later:

- before the first step there is what was alive before the captured one and is not made anew in every step;
- where ranks share, the script's own parameters, which DDP broadcasts in large pieces, move into the engine's, unit by unit;
- optimizer state comes into being in the first optimizer step, between what the backward has left free; where it lies
  elsewhere, the optimizer makes it unit by unit, and fetches it into buffers from the second step on;
- what the captured step frees of the step before (gradients) is what it leaves itself, by size and category.

After `NUM_STEPS` steps the reservation has settled: the steps are alike. The last is played as it was traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memadvisor.cost.allocation_events import StepEvents, Stretch
from memadvisor.cost.allocation_log import AllocationLog
from memadvisor.cost.allocator_replay import Change
from memadvisor.cost.collectives import CollectiveTimes
from memadvisor.cost.delayed_memory import memory_of
from memadvisor.cost.fsdp2_memory import streams_of
from memadvisor.cost.moved_activations import absence_of, units_away
from memadvisor.cost.parted_units import chosen_passes
from memadvisor.cost.simulate import simulate
from memadvisor.cost.step import CapturedStep, StepStorage
from memadvisor.cost.stretches import Stretches
from memadvisor.cost.transfers import TransferTimes
from memadvisor.cost.unit_updates import UnitUpdates
from memadvisor.schedule import Schedule, updated_at_step

NUM_STEPS = 3


def captured_sequence(storages: Sequence[StepStorage], segments: Sequence[Stretch]) -> list[Change]:
    """The training as it was captured."""
    log = AllocationLog(storages, StepEvents(storages, segments, (), {}, {}), segments, models_states=False)
    for number in range(NUM_STEPS):
        log.is_traced = number == NUM_STEPS - 1
        for position in range(len(segments)):
            log.segment(position, {}, 1.0)
        log.end_step()
    return log.changes


def planned_sequence(
    step: CapturedStep,
    schedule: Schedule,
    times: CollectiveTimes | None,
    transfers: TransferTimes | None = None,
) -> list[Change]:
    """The training under a schedule: recomputed units allocate twice, and engines hold what they hold."""
    # One process alone keeps its states as captured, but for what lies elsewhere; else they are the engine's.
    models_states = schedule.num_ranks > 1 or step.world_size > 1 or bool(schedule.offloaded_states)
    stretches = Stretches(schedule.stretches)
    if not stretches.are_alone:
        raise AssertionError("what stretches of several units reserve is not known")
    recomputed = frozenset(stretches.units)
    away = units_away(schedule)
    storages = [_uncached(item, recomputed) for item in step.storages]
    absences = {
        number: absence
        for number, item in enumerate(storages if away else ())
        if item.saved is not None and (absence := absence_of(item.saved, step, away, stretches)) is not None
    }
    asked_s = {n: line.asked_s for n, line in enumerate(step.timelines) if line.asked_s is not None}
    chosen = chosen_passes(step, schedule.parts)
    engine = memory_of(step, schedule)
    shares = schedule.num_ranks > 1 and schedule.executor != "fsdp2"
    own = _parameters(step) if models_states else {}
    state_bytes = {name: engine.state_bytes(name) for name in schedule.offloaded_states}
    log = AllocationLog(
        storages,
        StepEvents(storages, step.segments, recomputed, absences, asked_s, chosen.values()),
        step.segments,
        models_states=models_states,
        as_captured=_as_captured(step, schedule),
        absences=absences,
        streams=streams_of(step, schedule),
        updates=UnitUpdates(step, schedule, state_bytes),
        keeps_gradients=schedule.executor == "fsdp2",
        first_parameters=own if shares else {u: own[u] for u in own if u in schedule.paged},
    )
    if models_states:
        if shares:
            stages = {unit.name: unit.stage_on(schedule.shard_ranks) for unit in schedule.units}
            log.start(stages, engine.tensors())
        else:
            log.put_away(engine.tensors())
        log.states(engine.tensors())
        log.has_started()
    for number in range(NUM_STEPS):
        log.is_traced = number == NUM_STEPS - 1
        # Before it updates in the backward, the engine sees one step through.
        simulate(step, schedule if number else updated_at_step(schedule), times, log, transfers=transfers)
        log.end_step()
    return log.changes


def _uncached(item: StepStorage, recomputed: frozenset[str]) -> StepStorage:
    """As it lives where the unit that has put it into a cache is called without one, for it is called again."""
    if item.cached is None or item.cached[0] not in recomputed:
        return item
    segment, time_s = item.cached[1]
    if segment < 0:  # never there: a byte keeps its number
        return replace(item, size_bytes=1)
    return replace(item, death_segment=segment, death_s=time_s)


def _as_captured(step: CapturedStep, schedule: Schedule) -> frozenset[str]:
    """Units whose parameters and gradients are the script's own tensors, whatever is done to their optimizer's state."""
    if schedule.num_ranks > 1 or step.world_size > 1:
        return frozenset()
    return frozenset(unit.name for unit in schedule.units if unit.parameter_tier == "device")


def _parameters(step: CapturedStep) -> dict[str, list[int]]:
    """Bytes of each parameter, by unit."""
    sizes = {
        name: [parameter.size_bytes for parameter in states.parameters]
        for name, states in step.states.items()
    }
    return {name: [size for size in found if size > 0] for name, found in sizes.items()}
