"""Bounds of time and of memory against the cost model, over every layout of small spaces."""

from dataclasses import replace

import numpy as np
from hypothesis import example, given, settings

from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.errors import UsageError
from memadvisor.planning.layout_memory_bounds import MemoryBounds
from memadvisor.planning.layout_shares import can_be_dealt
from memadvisor.planning.layout_space import make_layout, pipelines, splits, states
from memadvisor.planning.layout_time_bounds import TimeBounds
from memadvisor.planning.layout_works import WorkPrices
from memadvisor.software_traits import Software
from tests.planning.small_spaces import LORA, STARVED, ZEROPP, questions


def families(question, prices):
    """Of each split and schedule: the works that can run so."""
    for split in splits(question):
        every = prices.of(split)
        ways = {}
        for row, count in enumerate(every.num_microbatches.tolist()):
            for way in pipelines(question.schedules, question.model.n_layers, split.pipeline, count):
                ways.setdefault(way, []).append(row)
        for (schedule, chunks), rows in ways.items():
            if can_be_dealt(question.model, question.software, split.pipeline, chunks):
                yield split, schedule, chunks, every.at(rows)


def layouts_with_bounds(question):
    prices = WorkPrices(question, FITTED)
    times, memories = TimeBounds(prices), MemoryBounds(prices)
    for split, schedule, chunks, works in families(question, prices):
        ways = states(question, split)
        pipeline_s = times.pipeline_seconds(split, works, schedule, chunks)
        peaks = memories.peak_bytes(
            memories.work_bytes(split, works, schedule, chunks),
            memories.state_bytes(split, ways, schedule, chunks),
        )
        for row, work in enumerate(works.rows):
            bounds = times.step_seconds(
                pipeline_s[row], split, works, row, schedule, chunks, ways, np.arange(len(ways))
            )
            for held, least_s, least_bytes in zip(ways, bounds, peaks[row], strict=True):
                layout = make_layout(question, split, work, schedule, chunks, held)
                try:
                    estimate = estimate_step(question.model, question.step(layout), question.cluster)
                except UsageError:
                    continue
                yield layout, estimate, least_s, least_bytes


@settings(max_examples=10, deadline=None)
@given(questions())
@example(ZEROPP)
@example(LORA)
@example(STARVED)
def test_no_layout_beats_its_bounds(question):
    safe = MemoryBounds(WorkPrices(question, FITTED)).largest_safe_peak_bytes
    for layout, estimate, least_s, least_bytes in layouts_with_bounds(question):
        assert least_s <= estimate.step_time_s, layout
        assert least_bytes <= estimate.peak_memory_bytes, layout
        assert (estimate.p_oom < question.max_p_oom) <= (estimate.peak_memory_bytes <= safe)


@settings(max_examples=5, deadline=None)
@given(questions())
@example(ZEROPP)
@example(LORA)
def test_without_a_pipeline_the_bounds_are_the_estimate(question):
    for layout, estimate, least_s, least_bytes in layouts_with_bounds(question):
        if layout.pipeline == 1:
            assert abs(least_s / estimate.step_time_s - 1) < 1e-8, layout
            assert abs(least_bytes / estimate.peak_memory_bytes - 1) < 1e-6, layout


def test_where_microbatches_do_not_fill_a_pipeline_of_all_forwards_first_the_bound_is_the_way_through_it():
    """So it is with parameters gathered for each microbatch, which the cost model plays as longer chunks."""
    question = replace(STARVED, software=Software())
    met = set()
    for layout, estimate, least_s, _ in layouts_with_bounds(question):
        if layout.schedule != "1f1b" and 1 < layout.num_microbatches < layout.pipeline:
            met.add((layout.schedule, layout.zero_stage == 3))
            assert 0.999999 * estimate.step_time_s < least_s, layout
    assert met == {
        (schedule, gathers) for schedule in ("gpipe", "breadth-first") for gathers in (False, True)
    }
