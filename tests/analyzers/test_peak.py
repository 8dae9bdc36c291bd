import dataclasses
import io

import pytest
from rich.console import Console

from memadvisor.analyzers.peak import peak_breakdown, position_in_words, where
from memadvisor.analyzers.timeline import memory_timeline
from memadvisor.cli.summary_memory import modules
from memadvisor.cost.places import place_in
from memadvisor.run.records import CATEGORIES, Residual, Span
from tests.make_run import make_run, storage


def peak_of(rank):
    return peak_breakdown(rank, memory_timeline(rank))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_ranks": 1, "num_micro_batches": 3},
        {"recompute": ("blocks.0", "blocks.1", "blocks.2")},
        {"device": "cuda:0"},
        {"unexplained_bytes": -100},
    ],
)
def test_categories_and_unexplained_sum_to_the_allocators_peak(changes):
    for rank in make_run(**changes).ranks:
        peak = peak_of(rank)

        assert tuple(peak.by_category_bytes) == CATEGORIES
        assert peak.allocated_bytes == rank.traced_step.peak_allocated_bytes
        assert sum(peak.by_category_bytes.values()) + peak.unexplained_bytes == peak.allocated_bytes
        assert peak.timeline_bytes == peak.allocated_bytes


@pytest.mark.parametrize("difference", [-5000, 12345])
def test_what_the_timeline_misses_of_the_allocators_peak_is_unexplained(difference):
    rank = make_run(num_ranks=1).ranks[0]
    changed = [
        dataclasses.replace(step, peak_allocated_bytes=step.peak_allocated_bytes + difference)
        if step.traced
        else step
        for step in rank.steps
    ]
    before = peak_of(rank)
    after = peak_of(dataclasses.replace(rank, steps=tuple(changed)))

    assert after.allocated_bytes == before.allocated_bytes + difference
    assert after.unexplained_bytes == before.unexplained_bytes + difference
    assert after.by_category_bytes == before.by_category_bytes
    assert after.timeline_bytes == before.timeline_bytes


def test_without_the_allocators_peak_the_storages_own_is_shown_as_such():
    rank = make_run(num_ranks=1).ranks[0]
    steps = [dataclasses.replace(step, peak_allocated_bytes=None) for step in rank.steps]
    peak = peak_of(dataclasses.replace(rank, steps=tuple(steps)))

    assert not peak.is_allocators
    assert peak.allocated_bytes == peak.timeline_bytes


def test_modules_sum_to_their_categories():
    peak = peak_of(make_run().ranks[0])

    for category in CATEGORIES:
        of_modules = sum(row.size_bytes for row in peak.by_module if row.category == category)
        assert of_modules == peak.by_category_bytes[category]


def test_the_peak_names_phase_unit_and_micro_batch():
    """The synthetic GPT is fullest in the last block's backward, before any of its activations are freed."""
    peak = peak_of(make_run().ranks[0])

    assert (peak.phase, peak.unit, peak.micro_batch) == ("backward", "blocks.2", 0)
    assert peak.position == "backward of blocks.2"


def test_the_largest_storages_are_alive_at_the_peak():
    rank = make_run().ranks[0]
    peak = peak_of(rank)
    clock_s = rank.traced_step.start_s + peak.time_s

    sizes = [storage.size_bytes for storage in peak.largest]
    assert sizes == sorted(sizes, reverse=True)
    assert all(s.birth_s <= clock_s + 1e-9 for s in peak.largest)
    assert all(s.death_s is None or s.death_s > clock_s - 1e-9 for s in peak.largest)


def test_recomputing_the_blocks_lowers_the_activations_at_the_peak():
    plain = peak_of(make_run().ranks[0])
    recomputed = peak_of(make_run(recompute=("blocks.0", "blocks.1", "blocks.2")).ranks[0])

    assert recomputed.by_category_bytes["activation"] < plain.by_category_bytes["activation"]


def test_on_an_accelerator_the_birth_that_made_the_peak_says_where():
    """Its spans lie behind the host's time, in which storages are born: here by a whole step."""
    rank = make_run(device="cuda:0").ranks[0]
    late = tuple(
        dataclasses.replace(span, start_s=span.start_s + 0.3, end_s=span.end_s + 0.3) for span in rank.spans
    )

    assert peak_of(dataclasses.replace(rank, spans=late)).position == "backward of blocks.2"


def test_a_recomputation_inside_a_backward_is_named():
    rank = make_run(num_ranks=1).ranks[0]
    spans = (
        Span(3, "backward", "", 1, 10.0, 20.0),
        Span(3, "unit_backward", "blocks.1", 1, 12.0, 18.0),
        Span(3, "unit_recompute", "blocks.1", 1, 12.0, 14.0),
        Span(2, "forward", "", 0, 0.0, 50.0),
    )
    rank = dataclasses.replace(rank, spans=spans)

    assert where(rank, 11.0) == ("backward", "", 1)
    assert where(rank, 13.0) == ("recompute", "blocks.1", 1)
    assert where(rank, 14.0) == ("backward", "blocks.1", 1)
    assert where(rank, 20.0) == ("outside", "", None)


def test_an_evaluation_pass_is_named():
    rank = make_run(num_ranks=1).ranks[0]
    spans = (Span(3, "evaluation", "", 0, 10.0, 20.0), Span(3, "unit_forward", "head", 0, 12.0, 18.0))

    assert where(dataclasses.replace(rank, spans=spans), 13.0) == ("evaluation", "head", None)


def test_a_category_that_nobody_knows_counts_as_other():
    rank = make_run(num_ranks=1).ranks[0]
    start_s = rank.traced_step.start_s
    strange = storage(storage_id=9, birth_s=start_s, size_bytes=999, category="from-the-future")
    rank = dataclasses.replace(rank, storages=(strange,), residuals=(Residual(start_s, 0),))

    assert peak_of(rank).by_category_bytes["other"] == 999


def test_without_a_traced_step_there_is_no_peak():
    assert peak_of(make_run(traced_step=None).ranks[0]) is None


def peaks_with(spans, **changes):
    """A rank on the processor with one storage more, which makes the peak 2 ms into its traced step. `spans`: kind and unit of
    what runs then, from the outside in."""
    rank = make_run(num_ranks=1).ranks[0]
    step = rank.traced_step
    around = [
        Span(step.index, kind, unit, 0, step.start_s + 1e-3 + n * 1e-5, step.start_s + 5e-3)
        for n, (kind, unit) in enumerate(spans)
    ]
    born_s = step.start_s + 2e-3
    extra = storage(storage_id=10**6, birth_s=born_s, death_s=born_s + 1e-3, size_bytes=10**9, **changes)
    return peak_of(dataclasses.replace(rank, spans=tuple(around), storages=(*rank.storages, extra)))


def test_on_the_processor_the_spans_say_where_and_not_whose_gradient_is_born():
    """One graph of all, as torch.compile makes it, or tied weights: the backward that runs is another unit's."""
    gradient = {"category": "gradient", "module": "wte", "unit": "wte", "phase": "backward"}
    whole, of_root, of_head = ("backward", ""), ("unit_backward", ""), ("unit_backward", "head")

    assert peaks_with([whole, of_root], **gradient).position == place_in("backward", "")
    assert peaks_with([whole, of_head], **gradient).position == place_in("backward", "head")
    assert peaks_with([whole], **gradient).position == place_in("backward", None)


def test_what_the_roots_own_forward_made_is_the_models():
    """A loss that the script works out itself is of no module."""
    of_root, of_none = (peaks_with([("forward", "")], phase=phase) for phase in ("forward", "outside"))

    assert of_root.by_root_bytes == {"activation": 10**9}
    assert of_none.by_root_bytes == {}
    for peak, name in ((of_root, "(model)"), (of_none, "(no module)")):
        console = Console(width=120, record=True, file=io.StringIO())
        console.print(modules(peak, 120))
        first = console.export_text().splitlines()[1]
        assert first.startswith(f" {name} ")


@pytest.mark.parametrize("phase", ["outside", "optimizer", "forward", "backward"])
def test_where_no_unit_runs_is_said_in_the_words_of_plans(phase):
    assert position_in_words(phase, "") == place_in(phase, None)
