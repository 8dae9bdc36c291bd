"""Captured pipelines made by hand: 1F1B, units that each keep some bytes for each micro-batch under way."""

from hypothesis import strategies as st

from memadvisor.cost.level import Level
from memadvisor.cost.pipelines.captured import CapturedPipeline
from memadvisor.cost.pipelines.one_chunk import one_forward_one_backward
from memadvisor.cost.pipelines.work import Kind
from memadvisor.cost.second_run import SecondRun
from memadvisor.cost.step import CapturedStep, Inner, Segment
from memadvisor.run.records import Unit

BASE_BYTES = 1000
LINK_S = 0.05


def a_stage(rank, works, units):
    """`units`: (kept bytes, bytes that a forward reaches, forward seconds) of each, in order."""
    names = [f"blocks.{place}" for place in range(len(units))]
    pieces = []
    for work in works:
        order = range(len(units)) if work.kind is Kind.F else reversed(range(len(units)))
        pieces += [(work.kind, place, work.microbatch) for place in order]
    at = {piece: position for position, piece in enumerate(pieces)}
    held, segments = BASE_BYTES, []
    for kind, place, micro_batch in pieces:
        kept_bytes, growth_bytes, forward_s = units[place]
        is_forward = kind is Kind.F
        top = held + (max(kept_bytes, growth_bytes) if is_forward else growth_bytes)
        bare = held + growth_bytes if is_forward else top
        level = Level(start={"activation": held}, peak={"activation": top}, peak_unsaved={"activation": bare})
        held += kept_bytes if is_forward else -kept_bytes
        segments.append(
            Segment(
                phase="forward" if is_forward else "backward",
                unit=names[place],
                micro_batch=micro_batch,
                duration_s=forward_s * (1 if is_forward else 2),
                captured=level,
                own_gradients=level,
                passing_gradients=level,
                collected_gradients=level,
                loose_gradients=level,
                gradient_units=(),
                growth={"activation": max(kept_bytes, growth_bytes)} if is_forward else {},
            )
        )
    passes = [
        (place, work.microbatch) for work in works if work.kind is Kind.F for place in range(len(units))
    ]
    runs = {
        (names[place], number): SecondRun(whole_s=units[place][2], until_saved_s=units[place][2], num_saved=1)
        for place, number in passes
    }
    return CapturedStep(
        rank=rank,
        world_size=1,
        device="cpu",
        units=tuple(Unit(name, "Block", True, 1, 4, 4, model="") for name in names),
        states={},
        segments=tuple(segments),
        inner=tuple(
            Inner(
                unit=names[place],
                category="activation",
                size_bytes=units[place][0],
                birth_segment=at[Kind.F, place, number],
                freed_after_segment=at[Kind.F, place, number],
                death_segment=at[Kind.BW, place, number],
            )
            for place, number in passes
        ),
        boundaries=(),
        make_storages=tuple,
        recomputable={name: len(runs) / len(units) * units[place][2] for place, name in enumerate(names)},
        operators={},
        constant_state_bytes={},
        step_time_s=sum(segment.duration_s for segment in segments),
        exposed_communication_s=0.0,
        peak_bytes=max(sum(segment.captured.peak.values()) for segment in segments),
        synced_micro_batches=frozenset(),
        num_micro_batches=len(works) // 2,
        repeats=1,
        micro_batch_size=None,
        second_runs=runs,
    )


def a_pipeline(stages, num_micro_batches):
    """`stages`: the units of each, as of `a_stage`. Its step is what its play takes."""
    order = one_forward_one_backward(len(stages), num_micro_batches)
    works = tuple(tuple(order.works(rank)) for rank in range(len(stages)))
    seconds = {
        work: sum(forward_s for *_, forward_s in stages[work.chunk]) * (1 if work.kind is Kind.F else 2)
        for own in works
        for work in own
    }
    pipeline = CapturedPipeline(
        schedule="Schedule1F1B",
        num_stages=len(stages),
        num_micro_batches=num_micro_batches,
        steps=tuple(a_stage(rank, own, stages[rank]) for rank, own in enumerate(works)),
        stages=tuple((rank,) for rank in range(len(stages))),
        works=works,
        seconds=seconds,
        link_s=(LINK_S,) * len(stages),
        is_blocking=True,
        step_time_s=1.0,
    )
    return pipeline


BYTES = st.integers(1, 50).map(lambda number: 100_000 * number)
UNITS = st.tuples(BYTES, BYTES, st.floats(0.01, 1.0))


@st.composite
def pipelines(draw, most_ranks=3, most_units=3):
    num_ranks = draw(st.integers(2, most_ranks))
    stages = [draw(st.lists(UNITS, min_size=1, max_size=most_units)) for _ in range(num_ranks)]
    return a_pipeline(stages, draw(st.integers(num_ranks, num_ranks + 3)))
