"""What a recomputation runs again ends with the last tensor that is saved; calls and tensors take time beside it."""

import dataclasses
from dataclasses import replace

import pytest

from memadvisor.analyzers.pieces import Piece
from memadvisor.analyzers.second_runs import second_run_cost, second_runs
from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.second_run import FREE, SecondRun, SecondRunCost
from memadvisor.cost.simulate import simulate
from memadvisor.plan import Plan, UnitPlan
from memadvisor.run.records import Module, Operator, Saved
from memadvisor.write_schedule import write_schedule
from tests.make_run import make_run, storage

SAVED_BY = ("aten::native_batch_norm", "aten::mul")
COST = SecondRunCost(call_s=1e-3, tensor_s=1e-4, operator_s=1e-5)


def operator(start_s, end_s):
    return Operator(
        name="aten::addmm",
        module="u",
        unit="u",
        phase="forward",
        start_s=start_s,
        end_s=end_s,
        executed_flops=0,
        model_flops=0,
    )


def saved(time_s):
    return Saved(
        storage_id=1,
        module="u",
        unit="u",
        micro_batch=0,
        size_bytes=4,
        shape="",
        saved_s=time_s,
        unpacked_s=None,
        released_s=None,
    )


def rank_with(operators, saves, **process):
    rank = make_run(num_ranks=1).ranks[0]
    return dataclasses.replace(
        rank,
        operators=tuple(operators),
        saved=tuple(saves),
        process=dataclasses.replace(rank.process, **process),
    )


def pieces(*forwards):
    return [Piece(phase="forward", unit="u", micro_batch=0, start_s=a, end_s=b) for a, b in forwards]


def test_operators_after_the_last_saved_tensor_do_not_run_again():
    """Traced 1, 2 and 3 s; the third saves its input and then runs: half of the timed 0.8 s."""
    rank = rank_with([operator(1, 2), operator(2, 4), operator(4.2, 7.2)], [saved(1.5), saved(4.1)])
    found = second_runs(rank, pieces((0, 8)), [0.8])

    assert found == {
        ("u", 0): SecondRun(whole_s=0.8, until_saved_s=pytest.approx(0.4), num_saved=2, num_operators=3)
    }


def test_a_forward_in_two_parts_runs_again_up_to_the_last_part_that_saves():
    rank = rank_with([operator(1, 2), operator(11, 12), operator(12.5, 15.5)], [saved(1.5), saved(12.1)])
    assert second_runs(rank, pieces((0, 3), (10, 16)), [0.2, 0.8])["u", 0].until_saved_s == pytest.approx(0.4)
    rank = rank_with([operator(1, 2), operator(11, 12)], [saved(0.5)])
    assert second_runs(rank, pieces((0, 3), (10, 16)), [0.2, 0.8])["u", 0].until_saved_s == 0.0


def test_a_forward_of_which_no_operator_was_seen_runs_whole():
    assert second_runs(rank_with([], [saved(1.0)]), pieces((0, 8)), [0.4])["u", 0].until_saved_s == 0.4


def test_units_of_one_class_that_run_the_same_on_as_many_bytes_share_their_times_and_others_do_not():
    rank = rank_with([operator(1, 2), operator(11, 12), operator(21, 22), operator(23, 24)], [])
    units = [dataclasses.replace(rank.units[0], name=name, type_name="Block") for name in "abc"]
    rank = dataclasses.replace(rank, units=tuple(units))
    parts = [
        Piece(phase="forward", unit=name, micro_batch=0, start_s=start_s, end_s=start_s + 9.0)
        for name, start_s in zip("abc", (0.5, 10.5, 20.5), strict=True)
    ]
    found = second_runs(rank, parts, [0.2, 0.4, 0.7])

    assert [found[name, 0].whole_s for name in "abc"] == pytest.approx([0.3, 0.3, 0.7])

    narrow = dataclasses.replace(rank.operators[1], written_bytes=1)
    rank = dataclasses.replace(rank, operators=(rank.operators[0], narrow, *rank.operators[2:]))
    found = second_runs(rank, parts, [0.2, 0.4, 0.7])

    assert [found[name, 0].whole_s for name in "abc"] == pytest.approx([0.2, 0.4, 0.7])


def test_what_was_not_measured_or_is_not_known_to_be_waited_for_costs_nothing_beside():
    measured = {
        "second_run_call_s": 1e-3,
        "second_run_tensor_s": 1e-4,
        "second_run_operator_s": 1e-5,
    }
    assert second_run_cost(rank_with([], [], device="cpu", **measured)) == COST
    assert second_run_cost(rank_with([], [], device="cuda:0", **measured)) == FREE
    assert second_run_cost(rank_with([], [], device="cpu")) == FREE


@pytest.mark.parametrize(("lag_s", "share"), [(0.0, 1.0), (0.006, 0.5), (0.012, 0.0), (1.0, 0.0)])
def test_a_device_waits_for_the_hosts_work_as_far_as_it_is_not_behind(lag_s, share):
    """Two calls and ten saved tensors of 1 ms each. On an H200 a GPT that waits for its launches took 50 ms a step under
    plans that were predicted to take 21 and 26; one that the device itself holds up, 0.4 % more than predicted."""
    rank = make_run(num_ranks=1).ranks[0]
    process = dataclasses.replace(
        rank.process,
        device="cuda:0",
        second_run_call_s=1e-3,
        second_run_tensor_s=1e-3,
        second_run_operator_s=1e-3,
    )
    step = rank.traced_step.index
    spans = [span for span in rank.spans if span.kind == "unit_forward" and span.step == step][:2]
    steps = [dataclasses.replace(each, device_lag_s=None if each.traced else lag_s) for each in rank.steps]
    rank = dataclasses.replace(
        rank, process=process, spans=tuple(spans), steps=tuple(steps), saved=rank.saved[:1] * 10
    )
    cost = second_run_cost(rank)

    assert (cost.call_s, cost.tensor_s, cost.operator_s) == pytest.approx((1e-3 * share,) * 3)


def test_the_last_unit_of_a_stretch_alone_stops_early():
    """Of two units in one stretch, 30 and 40 ms that save last after 20 and 25: 30 + 25, and 2 calls of 10 tensors."""
    step = captured_step(make_run(num_ranks=1))
    names = ["blocks.0", "blocks.1"]
    runs = {
        ("blocks.0", 0): SecondRun(whole_s=0.03, until_saved_s=0.02, num_saved=10),
        ("blocks.1", 0): SecondRun(whole_s=0.04, until_saved_s=0.025, num_saved=10),
    }
    step = dataclasses.replace(step, second_runs=runs, second_run_cost=COST)

    def added_s(stretches, alone):
        units = tuple(UnitPlan(name=u.name, zero_stage=0, recompute=u.name in alone) for u in step.units)
        plan = Plan(num_ranks=1, zero_stage=0, policy="chosen", units=units, stretches=stretches)
        return simulate(step, write_schedule(plan, step.units), None).step_time_s - step.step_time_s

    assert added_s((("blocks.0", "blocks.1"),), ()) == pytest.approx(0.055 + 2 * (1e-3 + 10 * 1e-4))
    assert added_s((), names) == pytest.approx(0.045 + 2 * (1e-3 + 10 * 1e-4))


def test_buffers_that_a_forward_changes_are_copied_and_those_that_a_batch_norm_saves_once_more():
    """A counter that is added to, and running statistics; not a table that is only read, nor what the step itself makes."""
    kept = (replace(saved(4.0), storage_id=number, operator=name) for number, name in enumerate(SAVED_BY))
    writes = replace(operator(1, 2), name="aten::add_", changes=2), replace(operator(2, 3), changes=3)
    rows = [
        storage(storage_id=number, size_bytes=10**number, category="other", phase="baseline")
        for number in range(3)
    ]
    rows.append(storage(storage_id=3, size_bytes=10**3, category="other", phase="forward"))
    rank = replace(rank_with(writes, kept, device="cpu"), storages=tuple(rows))
    found = second_runs(rank, pieces((0, 8)), [0.4])["u", 0]

    assert (found.copied_bytes, found.saved_copies_bytes) == (1 + 100, 1)


def test_running_statistics_of_norms_that_a_compiler_has_taken_in_are_copied():
    """No operator tells of them there; of a norm that runs by itself operators do."""
    rank = rank_with([operator(1, 2)], [saved(4.0)], device="cpu")
    weight = replace(rank.parameters[0], name="u._orig_mod.norm.weight", num_elements=16)
    norm = Module("u._orig_mod.norm", "BatchNorm2d", "u", is_own_forward=True)
    other = Module("u._orig_mod.norm", "LayerNorm", "u", is_own_forward=True)

    def copied_bytes(module):
        found = second_runs(replace(rank, modules=(module,), parameters=(weight,)), pieces((0, 8)), [0.4])
        return found["u", 0].copied_bytes

    assert copied_bytes(norm) == 2 * 16 * 4 + 8
    assert copied_bytes(other) == copied_bytes(replace(norm, is_own_forward=False)) == 0
