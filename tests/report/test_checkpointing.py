"""The table of what checkpointing would do names what a reader can act on."""

import dataclasses

from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.checkpointing import Checkpointing
from memadvisor.report.checkpointing import checkpointing_table
from memadvisor.report.view import RankView
from tests.make_checkpointing import PEAK_BYTES, checkpointed
from tests.make_run import make_run


def text_of(*rows):
    run = make_run(num_ranks=1)
    analysis = analyze(run)
    found = Checkpointing(peak_bytes=PEAK_BYTES, rows=rows, num_left_out=2)
    view = RankView(analysis, run.ranks[0], dataclasses.replace(analysis.ranks[0], checkpointing=found), 300)
    return str(checkpointing_table(view))


def test_modules_that_lower_the_peak_by_next_to_nothing_are_counted_and_not_listed():
    text = text_of(
        checkpointed("large", PEAK_BYTES // 10),
        checkpointed("small", 1000),
        checkpointed("none", -5000),
        checkpointed("cut", None, obstacle="it changes its input"),
    )

    assert "large" in text and "cut" in text
    assert "small" not in text and "none" not in text
    assert "4 more are left out: they lower the peak less, or not at all." in text


def test_where_nothing_lowers_the_peak_the_best_are_listed_for_that():
    assert "small" in text_of(checkpointed("small", 1000), checkpointed("none", -5000))
