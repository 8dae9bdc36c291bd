from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.analyzers.timeline import memory_timeline
from memadvisor.run.records import PHASES
from memadvisor.tui.chart import _phase_segment, columns_of
from tests.make_run import make_run, step, storage

WINDOWS = st.tuples(st.floats(0, 1), st.floats(0.01, 1))


@given(st.integers(1, 200))
def test_no_width_hides_the_peak(width):
    rank = make_run().ranks[0]
    timeline = memory_timeline(rank)

    entries, _ = columns_of(timeline, 0.0, rank.traced_step.duration_s, width)

    assert timeline.total_bytes[entries].max() == timeline.total_bytes.max()


@given(WINDOWS, st.integers(1, 50))
def test_each_column_shows_its_fullest_moment(window, width):
    """Against a brute force over all entries that hold at some moment of the column."""
    rank = make_run(num_blocks=1).ranks[0]
    timeline = memory_timeline(rank)
    whole_s = rank.traced_step.duration_s
    start_s, end_s = window[0] * whole_s / 2, window[0] * whole_s / 2 + window[1] * whole_s / 2
    edges = np.linspace(start_s, end_s, width + 1)
    entries, moments_s = columns_of(timeline, start_s, end_s, width)

    until_s = [*timeline.times_s[1:], np.inf]
    for column in range(width):
        inside = [
            int(total)
            for total, begin_s, stop_s in zip(timeline.total_bytes, timeline.times_s, until_s, strict=True)
            if begin_s < edges[column + 1] and stop_s > edges[column]
        ]
        assert timeline.total_bytes[entries[column]] == max(inside)
        assert edges[column] <= moments_s[column] <= edges[column + 1]


def test_a_step_with_one_storage_is_one_level():
    rank = replace(
        make_run(num_ranks=1).ranks[0],
        steps=(step(traced=True),),
        storages=(storage(),),
        residuals=(),
    )
    timeline = memory_timeline(rank)

    entries, _ = columns_of(timeline, 0.0, 0.1, 5)

    assert timeline.total_bytes[entries].tolist() == [100] * 5


@given(st.sampled_from([*PHASES, "evaluation"]), st.integers(1, 20))
def test_a_phase_has_its_name_a_short_one_or_none_and_no_piece_of_one(phase, width):
    """`reco`, `backw` and `rec` stood beside each other."""
    segment = _phase_segment(phase, width)

    assert len(segment.text) == width
    said = segment.text.strip()
    assert said in (phase, "fwd", "bwd", "opt", "rec", "out", "eval", "")
    assert said == phase or len(phase) > width
