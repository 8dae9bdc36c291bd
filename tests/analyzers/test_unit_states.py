"""What a unit's parameters take, and what of it the allocator never gave."""

from dataclasses import replace

import pytest

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.engine_memory import EngineMemory
from memadvisor.cost.simulate import simulate
from memadvisor.plan import Plan
from memadvisor.write_schedule import write_schedule
from tests.engines.trainings import make_plan
from tests.make_run import make_run

RUN = make_run(num_ranks=1, num_micro_batches=2)


def without_parameters(*units):
    """The run of a model whose weights of some units are mapped from a file: the allocator has no storage of them."""
    (rank,) = RUN.ranks
    kept = tuple(s for s in rank.storages if s.category != "parameter" or s.unit not in units)
    return replace(RUN, ranks=(replace(rank, storages=kept),))


@pytest.mark.parametrize("divisor", [1, 2])
def test_mapped_parameters_are_in_no_predicted_peak(divisor):
    plain = captured_step(RUN, micro_batch_divisor=divisor)
    step = captured_step(without_parameters("blocks.0", "blocks.1"), micro_batch_divisor=divisor)
    mapped_bytes = sum(step.states[name].parameter_bytes for name in ("blocks.0", "blocks.1"))

    peaks = [
        simulate(s, write_schedule(Plan(num_ranks=1, zero_stage=0), s.units), None).prediction().peak_bytes
        for s in (plain, step)
    ]

    assert {name for name, states in step.states.items() if states.mapped_bytes} == {"blocks.0", "blocks.1"}
    assert peaks[0] - peaks[1] == mapped_bytes > 0


def test_what_a_gpus_allocator_gives_beyond_a_state_goes_with_it():
    """Blocks are larger than what was asked for; state that is away leaves nothing of its block behind."""
    (rank,) = RUN.ranks
    rows = tuple(
        replace(s, device="cuda:0", size_bytes=s.size_bytes + 512) if s.category == "optimizer_state" else
        replace(s, device="cuda:0")
        for s in rank.storages
    )  # fmt: skip
    on_gpu = replace(rank, process=replace(rank.process, device="cuda:0"), storages=rows)
    step = captured_step(replace(RUN, ranks=(on_gpu,)))
    given = {name: states.given_optimizer_bytes for name, states in step.states.items()}
    num_rows = sum(s.category == "optimizer_state" and s.death_s is None for s in rows)
    held = [
        dict(EngineMemory(step, write_schedule(plan, step.units)).tensors())
        for plan in (Plan(num_ranks=2, zero_stage=0), make_plan(2, 0, optimizer_tier="disk"))
    ]
    here, away = (
        sum(size for (what, _), size in pieces.items() if "optimizer_state" in what) for pieces in held
    )

    assert sum(given.values()) == 512 * num_rows > 0
    assert step.constant_state_bytes["optimizer_state"] == 0
    assert here == sum(s.size_bytes for s in rows if s.category == "optimizer_state" and s.death_s is None)
    assert away == sum(states.optimizer_scalar_bytes for states in step.states.values())
