"""A run as a chain of units: times sum to the step, bytes to what was kept, and cuts are where one tensor passes."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.analyzers.captured_units import captured_model
from memadvisor.analyzers.segments import captured_step
from memadvisor.errors import UsageError
from tests.make_run import make_run, storage


def model_of(run):
    return captured_model(run, captured_step(run))


@given(st.integers(1, 4), st.integers(1, 3))
def test_units_and_what_is_around_them_sum_to_the_step(num_blocks, num_micro_batches):
    model = model_of(make_run(num_ranks=1, num_blocks=num_blocks, num_micro_batches=num_micro_batches))
    passes = sum(unit.forward.seconds + unit.backward.seconds for unit in model.units)
    total_s = num_micro_batches * passes + model.optimizer_s + model.outside_s
    assert total_s == pytest.approx(model.step_time_s)
    assert model.batch_samples == 4 * num_micro_batches


def test_parameters_belong_to_one_unit_each():
    run = make_run(num_ranks=1)
    rows = [row for row in run.ranks[0].parameters if not row.tied_to]
    assert model_of(run).elements == sum(row.num_elements for row in rows)


def with_flow(run, *passed):
    """What forwards make for others: (maker, last user, bytes)."""
    rank = run.ranks[0]
    spans = {
        span.unit: span
        for span in rank.spans
        if span.kind == "unit_forward" and span.step == rank.traced_step.index
    }
    rows = [
        storage(
            storage_id=10**6 + number,
            birth_s=(spans[maker].start_s + spans[maker].end_s) / 2,
            death_s=spans[user].end_s,
            size_bytes=size_bytes,
            category="activation",
            unit=maker,
            phase="forward",
            last_forward_use_s=(spans[user].start_s + spans[user].end_s) / 2,
        )
        for number, (maker, user, size_bytes) in enumerate(passed)
    ]
    return replace(run, ranks=(replace(rank, storages=(*rank.storages, *rows)),))


CHAIN = ("embedding", "blocks.0", "blocks.1", "blocks.2", "head")
PASSED = [(maker, user, 64) for maker, user in pairwise(CHAIN)]


def cuts(*passed):
    units = model_of(with_flow(make_run(num_ranks=1, num_blocks=3), *passed)).units
    return {unit.name: unit.cut_bytes for unit in units}, {unit.name: unit.no_cut for unit in units}


def test_a_chain_may_be_cut_behind_each_unit_but_the_last():
    assert cuts(*PASSED)[0] == {**dict.fromkeys(CHAIN, 64), "head": None}


def test_a_skip_connection_forbids_the_cuts_under_it():
    """It passes where its maker hands over, and would pass through a stage that has not made it."""
    sizes, reasons = cuts(*PASSED, ("blocks.0", "blocks.2", 16))
    assert sizes == {"embedding": 64, "blocks.0": 80, "blocks.1": None, "blocks.2": 64, "head": None}
    assert reasons["blocks.1"] == "blocks.2 uses what blocks.0 has made"


def test_a_run_without_samples_is_refused():
    run = make_run(num_ranks=1)
    rank = run.ranks[0]
    steps = tuple(replace(step, num_samples=None) for step in rank.steps)
    with pytest.raises(UsageError, match="how many samples"):
        model_of(replace(run, ranks=(replace(rank, steps=steps),)))
