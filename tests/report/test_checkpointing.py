"""The table of what checkpointing would do names what a reader can act on."""

import dataclasses

from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.checkpointing import CheckpointedModule, Checkpointing
from memadvisor.report.checkpointing import checkpointing_table
from memadvisor.report.view import RankView
from tests.make_run import make_run

PEAK_BYTES = 10**9


def row(name, saved_bytes, obstacle=""):
    return CheckpointedModule(
        name=name,
        type_name="Block",
        modules=(name,),
        num_calls=1,
        freed_bytes=saved_bytes,
        still_kept_bytes={},
        peak_bytes=PEAK_BYTES - (saved_bytes or 0),
        peak_saved_bytes=saved_bytes,
        peak_position="backward",
        recomputed_flops=None,
        extra_time_s=None,
        obstacle=obstacle,
    )


def text_of(*rows):
    run = make_run(num_ranks=1)
    analysis = analyze(run)
    found = Checkpointing(peak_bytes=PEAK_BYTES, rows=rows, num_left_out=2)
    view = RankView(analysis, run.ranks[0], dataclasses.replace(analysis.ranks[0], checkpointing=found), 300)
    return str(checkpointing_table(view))


def test_modules_that_lower_the_peak_by_next_to_nothing_are_counted_and_not_listed():
    text = text_of(
        row("large", 10**8), row("small", 10**4), row("none", -5000), row("cut", None, "it changes its input")
    )

    assert "large" in text and "cut" in text
    assert "small" not in text and "none" not in text
    assert "4 more are left out: they lower the peak less, or not at all." in text


def test_where_nothing_lowers_the_peak_the_best_are_listed_for_that():
    assert "small" in text_of(row("small", 10**4), row("none", -5000))
