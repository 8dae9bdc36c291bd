"""The traced step cut into segments: nothing is lost, and replaying it gives the measured peak."""

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.analyzers.observed_collectives import observed_collectives
from memadvisor.analyzers.segments import RecordedStep, captured_step
from memadvisor.asked import Asked
from memadvisor.cost.activations import Activations
from memadvisor.cost.stretches import Stretches
from memadvisor.errors import UsageError
from memadvisor.plan import Plan
from memadvisor.planning.advise import advise
from memadvisor.precision import Precision
from memadvisor.run.records import Span, Storage
from tests.make_run import make_run, storage

BFLOAT16 = Precision(param_dtype="bfloat16")
RUNS = st.builds(
    make_run,
    num_ranks=st.integers(1, 2),
    num_blocks=st.integers(1, 4),
    num_micro_batches=st.integers(1, 3),
    hidden=st.sampled_from([16, 64]),
    unexplained_bytes=st.integers(0, 10**6),
)


@given(RUNS)
def test_the_highest_segment_is_the_allocators_peak(run):
    captured = captured_step(run)
    levels = [sum(segment.captured.peak.values()) for segment in captured.segments]

    assert max(levels) == captured.peak_bytes == run.ranks[0].traced_step.peak_allocated_bytes


@given(RUNS)
def test_segments_and_exposed_communication_sum_to_the_median_step(run):
    captured = captured_step(run)
    total_s = sum(segment.duration_s for segment in captured.segments)

    steady = sorted(s.duration_s for s in run.ranks[0].steady_steps())
    assert steady[0] <= captured.step_time_s * (1 + 1e-9)
    assert total_s + captured.exposed_communication_s == pytest.approx(captured.step_time_s)


def test_a_unit_of_which_a_forward_was_lost_is_not_recomputed():
    """Its rows were damaged in the file: advise ended in a KeyError, for the backward had nothing to run again."""
    run = make_run(num_ranks=1, num_blocks=2, num_micro_batches=2)
    (rank,) = run.ranks
    unit = next(row.name for row in rank.units if row.name in captured_step(run).recomputable)
    lost = next(
        span
        for span in rank.spans
        if span.step == rank.traced_step.index and (span.kind, span.unit) == ("unit_forward", unit)
    )
    spans = tuple(span for span in rank.spans if span is not lost)
    damaged = dataclasses.replace(run, ranks=(dataclasses.replace(rank, spans=spans),))

    assert set(captured_step(damaged).recomputable) == set(captured_step(run).recomputable) - {unit}
    assert advise(damaged, memory_bytes=2**40).plans


def test_units_that_also_run_in_an_evaluation_within_the_step_can_be_recomputed():
    """A script that validates between two updates calls every unit twice in a step, once of them without gradients."""
    plain = make_run(num_ranks=1)
    (rank,) = plain.ranks
    traced = rank.traced_step
    first = min(span.start_s for span in rank.spans if span.step == traced.index)
    length_s = (first - traced.start_s) / (2 + len(rank.units))
    spans = [Span(traced.index, "evaluation", "", 0, traced.start_s, first - length_s)]
    for number, unit in enumerate(rank.units):
        begin_s = traced.start_s + number * length_s
        spans.append(Span(traced.index, "unit_forward", unit.name, 0, begin_s, begin_s + length_s))
    validated = dataclasses.replace(plain, ranks=(dataclasses.replace(rank, spans=(*spans, *rank.spans)),))

    assert captured_step(validated).recomputable.keys() == captured_step(plain).recomputable.keys() != set()


def test_what_a_unit_alone_keeps_is_free_when_it_is_recomputed_and_its_input_stays():
    """A block of the synthetic GPT keeps 9 x 64 float32 values a token; none of them is another's."""
    captured = captured_step(make_run())
    kept = {}
    for item in captured.inner:
        kept[item.unit] = kept.get(item.unit, 0) + item.size_bytes

    assert kept["blocks.1"] == 4 * 32 * 9 * 64 * 4
    assert captured.recomputable["blocks.1"] == pytest.approx(0.008)


_INSTANTS = st.floats(0.001, 0.999)


@given(_INSTANTS, st.lists(st.tuples(_INSTANTS, _INSTANTS, st.integers(1, 200_000)), max_size=4))
def test_an_input_that_lives_on_is_counted_in_the_segment_that_it_died_in(death, others):
    """What only block 1 uses, and drops in the head's forward, stays until block 1's backward if that runs again."""
    plain = make_run(num_ranks=1, num_blocks=2)
    times = {(s.kind, s.unit): s for s in plain.ranks[0].spans if s.step == plain.ranks[0].traced_step.index}
    made, used, head = (times["unit_forward", unit] for unit in ("blocks.0", "blocks.1", "head"))

    def at(span, fraction):
        return span.start_s + fraction * (span.end_s - span.start_s)

    def forward_peak(death_s):
        rows = [storage(storage_id=900, birth_s=at(made, 0.5), death_s=death_s, size_bytes=100_000)]
        rows[0] = dataclasses.replace(rows[0], category="temporary", last_forward_use_s=at(used, 0.5))
        for number, (birth, end, size_bytes) in enumerate(others):
            lives = {"birth_s": at(head, min(birth, end)), "death_s": at(head, max(birth, end))}
            rows.append(
                storage(storage_id=901 + number, size_bytes=size_bytes, category="temporary", **lives)
            )
        rank = dataclasses.replace(plain.ranks[0], storages=(*plain.ranks[0].storages, *rows))
        captured = captured_step(dataclasses.replace(plain, ranks=(rank,)))
        (place,) = (n for n, s in enumerate(captured.segments) if (s.phase, s.unit) == ("forward", "head"))
        peak = Activations(captured, Stretches.alone({"blocks.1"})).peak(place, "captured")
        return sum(peak.values())

    lives_on = forward_peak(times["unit_backward", "blocks.1"].end_s)
    assert forward_peak(at(head, death)) == lives_on


def test_a_unit_that_the_script_already_recomputes_is_left_alone():
    assert "blocks.1" not in captured_step(make_run(recompute=("blocks.1",))).recomputable


def test_halving_the_micro_batch_halves_batch_shaped_storages_and_keeps_states():
    run = make_run(num_ranks=1)
    rows = [
        dataclasses.replace(row, shape=f"[4, {row.size_bytes // 16}]")
        if row.category == "activation"
        else row
        for row in run.ranks[0].storages
    ]
    run = dataclasses.replace(run, ranks=(dataclasses.replace(run.ranks[0], storages=tuple(rows)),))
    whole, half = captured_step(run), captured_step(run, micro_batch_divisor=2)

    def bytes_of(captured, category):
        return [segment.captured.peak.get(category, 0) for segment in captured.segments]

    assert half.micro_batch_size == whole.micro_batch_size / 2 == 2
    assert max(bytes_of(half, "activation")) == max(bytes_of(whole, "activation")) / 2
    assert bytes_of(half, "parameter") == bytes_of(whole, "parameter")


def test_steps_with_other_micro_batches_of_one_recording_are_those_of_recordings_of_their_own():
    run = make_run(num_blocks=2, num_micro_batches=2)
    recorded = RecordedStep(run, Asked(precision=BFLOAT16), num_ranks=2)
    for divisor in (1, 4, 2, Fraction(1, 2), 1):
        alone = captured_step(run, micro_batch_divisor=divisor, precision=BFLOAT16, num_ranks=2)
        made = {"make_storages", "make_parted"}
        for field in {each.name for each in dataclasses.fields(alone)} - made:
            assert getattr(recorded.captured(divisor), field) == getattr(alone, field), field
        assert recorded.captured(divisor).make_storages() == alone.make_storages()


def test_a_step_whose_backward_updates_is_no_accumulation_of_halves():
    """As where hooks of parameters step optimizers: each half would update by itself."""
    run = make_run(num_ranks=1)
    rank = run.ranks[0]
    step = rank.traced_step
    backward = next(s for s in rank.spans if s.step == step.index and s.kind == "backward")
    inside = dataclasses.replace(backward, kind="optimizer", end_s=(backward.start_s + backward.end_s) / 2)
    updating = dataclasses.replace(rank, spans=(*rank.spans, inside))

    assert captured_step(run).micro_batch_size == 4
    assert captured_step(dataclasses.replace(run, ranks=(updating,))).micro_batch_size is None


def test_a_collective_starts_when_the_last_rank_has_issued_it():
    """Both ranks end 2 ms after rank 1, the late one, has issued."""
    seen = observed_collectives(make_run(rank_delay_s=0.003))

    assert {row.operation for row in seen} == {"all_reduce"}
    assert all(row.duration_s == pytest.approx(0.002) for row in seen)


def test_a_run_without_a_traced_step_and_a_run_with_a_plan_are_refused():
    with pytest.raises(UsageError, match="traced"):
        captured_step(make_run(traced_step=None))
    plan = Plan(num_ranks=2, zero_stage=1)
    with pytest.raises(UsageError, match="plan"):
        captured_step(dataclasses.replace(make_run(), plan=plan))


def test_neither_a_bias_gradient_nor_a_workspace_begins_a_buffer_before_their_operator_is_done():
    """Weight and bias come from one operator, which lets go of what it had saved before either is taken over; so does
    one that allocates inside itself."""
    run = make_run(num_ranks=1)
    rank = run.ranks[0]
    where = next(s for s in rank.spans if (s.step, s.kind, s.unit) == (3, "unit_backward", "blocks.1"))

    def highest_bytes(bias_shape: str, operator: str = "aten::sum") -> int:
        def temporary(
            shape: str, birth: int, death: int, size_bytes: int, operator: str = "aten::mm"
        ) -> Storage:
            times = (where.start_s + 1e-4 * birth, where.start_s + 1e-4 * death)
            row = {"storage_id": 10**6 + birth, "shape": shape, "size_bytes": size_bytes}
            return storage(
                **row,
                birth_s=times[0],
                death_s=times[1],
                category="temporary",
                unit=where.unit,
                phase="backward",
                operator=operator,
            )

        rows = [
            temporary("[7]", 1, 4, 10**7),
            temporary("[64, 8]", 2, 6, 2048),
            temporary(bias_shape, 3, 7, 256, operator),
        ]
        weight = dataclasses.replace(rank.parameters[-1], unit=where.unit, shape="[64, 8]", tied_to="")
        bias = dataclasses.replace(weight, shape="[64]", size_bytes=256, num_elements=64)
        changed = dataclasses.replace(
            rank, storages=(*rank.storages, *rows), parameters=(*rank.parameters, weight, bias)
        )
        segments = captured_step(dataclasses.replace(run, ranks=(changed,))).segments
        backward = next(s for s in segments if (s.phase, s.unit) == ("backward", where.unit))
        return sum(backward.collected_gradients.peak.values())

    assert highest_bytes("[1, 64]") == highest_bytes("[64]") < highest_bytes("[2, 32]")
    assert highest_bytes("", "inside aten::mm") < highest_bytes("", "inside aten::sum")


def test_passes_that_are_no_accumulation_have_no_micro_batch():
    """Of a step in which weights are updated between passes (a GAN), or a batch comes again (SAM), half is no other batch."""
    run = make_run(num_ranks=1, num_micro_batches=2)
    (rank,) = run.ranks
    traced = rank.traced_step
    first, second = sorted(
        (s for s in rank.spans if s.step == traced.index and s.kind == "backward"), key=lambda s: s.start_s
    )
    between = (first.end_s, (first.end_s + second.start_s) / 2)
    updated = dataclasses.replace(rank, spans=(*rank.spans, Span(traced.index, "optimizer", "", 1, *between)))
    again = dataclasses.replace(
        rank,
        steps=tuple(
            dataclasses.replace(s, num_repeated_batches=1) if s.index == traced.index else s
            for s in rank.steps
        ),
    )

    assert captured_step(run).micro_batch_size is not None
    for other in (updated, again):
        assert captured_step(dataclasses.replace(run, ranks=(other,))).micro_batch_size is None
