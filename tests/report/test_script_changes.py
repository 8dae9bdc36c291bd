"""The section about the script says what to change, and of nothing found, what was looked for."""

import dataclasses

from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.script_changes.change import ScriptChange
from memadvisor.report.page import render
from tests.make_run import make_run

CHANGE = ScriptChange(
    kind="held_results",
    seen="At the peak, variables hold <b>float32</b>.",
    change="`del` the names.",
    peak_saved_bytes=3 * 2**20,
    step_saved_s=0.002,
    is_at_most=True,
    effect="not bit for bit the same",
)


def page(*changes):
    analysis = analyze(make_run(num_ranks=1))
    ranks = (dataclasses.replace(analysis.ranks[0], script_changes=changes),)
    return render(dataclasses.replace(analysis, ranks=ranks))


def test_a_change_has_its_savings_and_its_words_as_text():
    text = page(CHANGE)

    assert (
        "<b>peak -3.00 MiB, step at most -2.00 ms</b>: At the peak, variables hold &lt;b&gt;float32" in text
    )
    assert "<code>del</code> the names. Results: not bit for bit the same." in text


def test_where_nothing_is_found_it_says_what_was_looked_for():
    assert "None found. Looked for: results that variables hold beyond their use" in page()
    assert "None found." not in page(CHANGE)


def test_of_a_run_without_a_traced_step_nothing_is_known():
    assert "Not recorded: no step was traced." in render(analyze(make_run(traced_step=None)))


def test_the_change_that_saves_most_is_among_the_next_steps():
    analysis = analyze(make_run(num_ranks=1))
    half = dataclasses.replace(CHANGE, peak_saved_bytes=analysis.ranks[0].peak.allocated_bytes // 2)
    steps = page(half).partition("What to do next")[2].partition("</ol>")[0]

    assert f'kind-predicted">predicted</span><b>{half.saved_in_words}</b>: At the peak, variables' in steps
