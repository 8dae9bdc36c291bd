"""The Overview tab says first what to change."""

import dataclasses

from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.script_changes.change import ScriptChange
from memadvisor.tui.overview import _facts, _first
from memadvisor.tui.view import View
from memadvisor.tui.watch import State
from tests.make_run import make_run


def test_what_saves_most_stands_in_a_line_each():
    """What checkpointing saves was in another tab, and each change took a paragraph."""
    run = make_run(num_ranks=1)
    analysis = analyze(run)
    change = ScriptChange(kind="stale_gradients", seen="Seen.", change="Do.", peak_saved_bytes=2**20)
    rank = dataclasses.replace(analysis.ranks[0], script_changes=(change,))
    analysis = dataclasses.replace(analysis, ranks=(rank,))
    view = View(run=run, analysis=analysis, position=0, state=State.FINISHED, message="")

    said = [row.plain for row in _first(view)]
    assert said[0].startswith("What saves most  predicted")
    assert "peak -1.00 MiB: `zero_grad` before the forward" in said


def test_what_no_change_shortens_is_said_as_the_report_says_it():
    run = make_run(num_ranks=2)
    analysis = analyze(run)
    exposed_s = 0.4 * run.ranks[0].traced_step.duration_s
    traffic = dataclasses.replace(analysis.ranks[0].communication, exposed_s=exposed_s)
    rank = dataclasses.replace(analysis.ranks[0], communication=traffic)
    analysis = dataclasses.replace(analysis, ranks=(rank, *analysis.ranks[1:]))
    view = View(run=run, analysis=analysis, position=0, state=State.FINISHED, message="")

    assert _facts(view)[0].plain.startswith("Communication without compute beside it takes 40.0 %")
