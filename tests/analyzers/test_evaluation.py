import dataclasses

from memadvisor.analyzers.evaluation import Evaluation, evaluation
from memadvisor.report.times import evaluation_in_words
from memadvisor.run.records import Span
from tests.make_run import make_run, step


def rank_of(spans, **steps):
    """A rank with three steps of 10 s; `steps` are the fields of the last."""
    rank = make_run(num_ranks=1, traced_step=None).ranks[0]
    three = [
        step(index=i, start_s=10.0 * i, end_s=10.0 * (i + 1), **(steps if i == 2 else {})) for i in range(3)
    ]
    return dataclasses.replace(rank, steps=tuple(three), spans=tuple(spans))


def span(index, kind, duration_s):
    return Span(index, kind, "", 0, 10.0 * index, 10.0 * index + duration_s)


def test_calls_without_gradients_are_counted_by_step():
    spans = [span(i, "forward", 1.0) for i in range(3)]
    found = evaluation(
        rank_of([*spans, span(0, "evaluation", 2.0), span(2, "evaluation", 3.0), span(2, "evaluation", 1.0)])
    )

    assert found == Evaluation(num_calls=3, num_steps=2, time_s=6.0, num_unseen_steps=0)
    assert (
        evaluation_in_words(found)
        == "3 model calls without gradients in 2 steps took 6.00 s, part of outside"
    )


def test_what_was_not_seen_is_no_absence():
    """Nobody listened in the last step, which has its backward alone; nor, in the second case, in any."""
    seen = [span(0, "forward", 1.0), span(1, "forward", 1.0)]
    backwards = [span(i, "backward", 1.0) for i in range(3)]
    found = evaluation(rank_of([*seen, *backwards]))

    assert found == Evaluation(num_calls=0, num_steps=0, time_s=0, num_unseen_steps=1)
    assert (
        evaluation_in_words(found)
        == "no model call without gradients was seen, and 1 step did not record such calls"
    )
    both = dataclasses.replace(found, num_calls=1, num_steps=1, time_s=0.5, num_unseen_steps=2)
    assert evaluation_in_words(both).endswith(
        "took 500 ms, part of outside (2 steps did not record such calls)"
    )
    assert evaluation(rank_of(backwards)) is None
    assert evaluation_in_words(None) == ""


def test_a_traced_steps_time_enters_no_figure():
    spans = [*(span(i, "forward", 1.0) for i in range(3)), span(2, "evaluation", 5.0)]
    found = evaluation(rank_of(spans, traced=True))

    assert found == Evaluation(num_calls=0, num_steps=0, time_s=0, num_unseen_steps=0)
    assert evaluation_in_words(found) == ""
