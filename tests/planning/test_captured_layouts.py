"""Layouts from a run: peaks are those of the plans that `run --plan` makes, and what is advised is safe and fastest."""

from dataclasses import replace

import pytest

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.errors import UsageError
from memadvisor.hardware.cluster import Cluster, Link
from memadvisor.hardware.hardware import Hardware
from memadvisor.planning.advise_layouts import advise_layouts, reason_of
from memadvisor.planning.captured_memory import plan_of
from memadvisor.planning.captured_space import chain_pieces, why_no_pipeline
from memadvisor.write_schedule import write_schedule
from tests.analyzers.test_captured_units import PASSED, with_flow
from tests.cost.test_simulate import TIMES
from tests.make_run import make_run
from tests.planning.captured_chains import a_chain, a_model, a_unit

LINK = Link(kind="link", bytes_per_s=1e9, alpha_s=1e-5, source="a test")
HERE = Hardware(
    name="synthetic processor",
    kind="measured",
    source="a test",
    memory_bytes=2**30,
    memory_bandwidth_bytes_per_s=1e10,
    peak_flops_per_s={"float32": 1e11},
)


def cluster(ranks):
    return Cluster(accelerator=HERE, num_nodes=1, per_node=ranks, inside=LINK, across=None)


def a_run(**changes):
    return with_flow(make_run(num_ranks=1, num_blocks=3, **changes), *PASSED)


def of(found, **wanted):
    return [one for one in found.all if all(getattr(one.layout, key) == wanted[key] for key in wanted)]


def test_the_run_as_it_was_holds_what_was_measured():
    """One rank, no plan: the allocator's own peak, and the measured step."""
    run = a_run()
    (plain, *_) = of(advise_layouts(run, cluster(1)).found, micro_batch_size=4, recompute="none")
    assert plain.memory.allocated_bytes == run.ranks[0].traced_step.peak_allocated_bytes
    assert plain.step_time_s == pytest.approx(captured_step(run).step_time_s)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_layouts_peak_is_that_of_the_plan_that_makes_it(stage):
    run = a_run()
    advice = advise_layouts(run, cluster(2), batch_samples=8)
    (one,) = of(advice.found, zero_stage=stage, micro_batch_size=4, recompute="none", pipeline=1)
    step = captured_step(run)
    plan = plan_of(one.layout, one.chosen.recomputed, step)
    played = simulate(step, write_schedule(plan, step.units), TIMES)
    assert one.memory.allocated_bytes == played.peak.total_bytes


def test_what_is_advised_is_safe_and_fastest():
    run = a_run()
    for memory_bytes in (2**30, 3 * 2**20, 2 * 2**20):
        advice = advise_layouts(run, cluster(4), batch_samples=16, memory_bytes=memory_bytes)
        safe = [one for one in advice.found.all if one.p_oom < 0.1]
        assert safe and all(one.p_oom < 0.1 for one in (*advice.found.best, *advice.found.front))
        fastest_s = min(one.step_time_s for one in safe)
        assert advice.found.best[0].step_time_s == pytest.approx(fastest_s, rel=1e-5)
        for one in advice.found.front:
            assert not any(
                other.step_time_s < one.step_time_s * (1 - 1e-5)
                and other.memory.peak_bytes <= one.memory.peak_bytes
                for other in safe
            )
        assert reason_of(advice, advice.found.best[0])


def test_more_memory_never_makes_the_best_layout_slower():
    run = a_run()
    times = []
    for mib in (2, 3, 5, 100):
        found = advise_layouts(run, cluster(2), memory_bytes=mib * 2**20).found
        times.append(found.best[0].step_time_s if found.best else float("inf"))
    assert times == sorted(times, reverse=True)


def test_a_larger_micro_batch_holds_no_less():
    found = advise_layouts(a_run(), cluster(1), batch_samples=16).found
    sizes = [of(found, micro_batch_size=n, recompute="none")[0].memory.peak_bytes for n in (2, 4, 8, 16)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_the_plan_of_the_best_layout_carries_its_prediction():
    advice = advise_layouts(a_run(), cluster(2))
    best = next(one for one in advice.found.best if one.layout.pipeline == 1)
    assert advice.plan.num_ranks == 2 and advice.plan.zero_stage == best.layout.zero_stage
    assert advice.plan.prediction.step_time_s == best.step_time_s
    assert advice.plan.prediction.peak_bytes == best.memory.allocated_bytes


def test_pipelines_follow_the_chain():
    found = advise_layouts(a_run(), cluster(4)).found
    assert {one.layout.pipeline for one in found.all} == {1, 2, 4}
    assert all(sum(one.chosen.stage_units) == 5 for one in found.all)


def test_a_model_that_is_no_chain_is_not_cut_and_says_why():
    units = [replace(unit, cut_bytes=None, no_cut="c uses what a has made") for unit in a_chain(3).units]
    assert why_no_pipeline(a_model(*units)) is not None
    assert "c uses what a has made" in why_no_pipeline(a_model(*units))


def test_pieces_have_the_units_that_no_cut_parts():
    units = [a_unit("a"), a_unit("b", cut_bytes=None), a_unit("c"), a_unit("d", cut_bytes=None)]
    assert chain_pieces(a_model(*units)) == [1, 2, 1]


def test_a_batch_that_does_not_part_is_refused():
    with pytest.raises(UsageError, match="do not part among 7"):
        advise_layouts(a_run(), cluster(7), batch_samples=4)
