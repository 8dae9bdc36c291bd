"""The lines of `show` about a step's time."""

import dataclasses
import io

from rich.console import Console

from memadvisor.analyzers.analysis import analyze
from memadvisor.cli.summary_time import step_time
from tests.make_run import make_run


def test_what_the_recorder_took_is_a_share_only_where_it_is_known():
    """A run of three steps said "recorder not recorded of a timed step"."""
    analysis = analyze(make_run())
    rank = analysis.ranks[0]
    unknown = dataclasses.replace(rank, step_time=dataclasses.replace(rank.step_time, recorder_fraction=None))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(step_time(analysis, unknown, 100))

    text = " ".join(console.export_text().split())
    assert "recorder not recorded;" in text and "of a timed step" not in text
